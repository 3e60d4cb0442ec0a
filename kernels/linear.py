"""Matrix product with everything that may ride in its epilogue."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


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
    if weight.is_mkldnn:
        y = _packed(x, weight, bias)
        return y if residual is None else y.add_(residual)
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is not None:
        residual = residual + bias
    return torch.addmm(residual, x, weight.t())


def implementation(x: Tensor, weight: Tensor) -> str:
    """Which product `linear` runs for these: triton, onednn (a packed weight) or blas."""
    return "triton" if x.is_cuda else "onednn" if weight.is_mkldnn else "blas"


def pack_weight(weight: Tensor) -> Tensor:
    """The form in which `linear` reads a weight fastest on its device: a copy on a CPU in float32 where oneDNN is
    there, else the tensor itself. Drop the original; only `linear` and what is built on it take the result.

    oneDNN's blocked weights are read 2 to 4 times faster than BLAS reads plain ones (576 → 3072 on 2 cores: 190 against
    460 µs for one row, 170 against 690 for eight), and its rows come out bitwise the same whatever stands beside them.
    """
    if weight.is_cuda or weight.dtype is not torch.float32 or not _ONEDNN:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A single row goes as two: alone it would take another kernel, which sums in another order, and a sequence's
    tokens would depend on whether it is alone in its batch."""
    rows = x.shape[0]
    if rows == 1:
        x = x.expand(2, -1).contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y[:1] if rows == 1 else y
