"""`norm_gate_up` on a GPU."""

from __future__ import annotations

from torch import Tensor

from diptych.kernels.triton.products import product


def norm_gate_up(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    return product(x, gate_up_weight, norm=(norm_weight, eps), gate=True)
