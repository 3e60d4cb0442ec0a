"""RMSNorm, then a matrix product: qkv and the vocabulary's head."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.kernels.linear import linear_reference
from diptych.kernels.rms_norm import rms_norm_reference


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = rms_norm(x, norm_weight, eps) · weightᵀ (+ bias).

    x: [T, H], last dimension contiguous. norm_weight: [H]. weight: [N, H] contiguous. bias: [N]. Returns [T, N] of
    out_dtype, or of x's dtype.
    """
    if x.is_cuda:
        from diptych.kernels.triton.norm_linear import norm_linear as launch

        return launch(x, norm_weight, eps, weight, bias, out_dtype)
    return norm_linear_reference(x, norm_weight, eps, weight, bias).to(out_dtype or x.dtype)


def norm_linear_reference(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return linear_reference(rms_norm_reference(x, norm_weight, eps), weight, bias)
