"""`norm_linear` on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.kernels.triton.products import product


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return product(x, weight, norm=(norm_weight, eps), bias=bias, out_dtype=out_dtype)
