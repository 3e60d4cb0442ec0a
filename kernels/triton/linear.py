"""`linear` on a GPU."""

from __future__ import annotations

from torch import Tensor

from diptych.kernels.triton.products import product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    return product(x, weight, bias=bias, residual=residual)
