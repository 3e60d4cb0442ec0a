"""Matrix product with everything that may ride in its epilogue."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """y = x · weightᵀ (+ bias) (+ residual).

    x: [T, K], last dimension contiguous. weight: [N, K] contiguous. bias: [N]. residual: [T, N]. Returns [T, N] of x's
    dtype, accumulated in float32; `residual` is not modified.
    """
    if x.is_cuda:
        from diptych.kernels.triton.linear import linear as launch

        return launch(x, weight, bias, residual)
    return linear_reference(x, weight, bias, residual)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is not None:
        residual = residual + bias
    return torch.addmm(residual, x, weight.t())
