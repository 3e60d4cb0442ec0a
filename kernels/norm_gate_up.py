"""The first half of a gated feed-forward layer: RMSNorm, both products, SiLU, product of the two."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from diptych.kernels.norm_linear import norm_linear_reference


def norm_gate_up(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    """h = rms_norm(x, norm_weight, eps); y = silu(h · gateᵀ) * (h · upᵀ)  (Shazeer, arXiv 2002.05202).

    x: [T, H], last dimension contiguous. gate_up_weight: [2F, H] contiguous, gate's F rows first. Returns [T, F] of x's
    dtype.
    """
    if x.is_cuda:
        from diptych.kernels.triton.norm_gate_up import norm_gate_up as launch

        return launch(x, norm_weight, eps, gate_up_weight)
    return norm_gate_up_reference(x, norm_weight, eps, gate_up_weight)


def norm_gate_up_reference(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    gate, up = norm_linear_reference(x, norm_weight, eps, gate_up_weight).chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
