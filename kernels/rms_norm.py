"""RMSNorm alone: the operator that `norm_linear` and `norm_gate_up` fuse into their product."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * (x / sqrt(mean(x²) + eps)), the mean in float32 (Zhang and Sennrich, arXiv 1910.07467).

    x: [..., H], last dimension contiguous. weight: [H] of the same dtype. Returns a new tensor of x's dtype: what is in
    brackets is rounded to it before the product with `weight`, as the reference models do. Rows do not affect
    each other.
    """
    if x.is_cuda:
        from diptych.kernels.triton.rms_norm import rms_norm as launch

        return launch(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    # A product of the vector with itself is one pass; torch's own rms_norm is seven small operators on a CPU.
    square: Tensor = torch.linalg.vecdot(wide, wide).unsqueeze_(-1)
    scaled = wide * square.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return scaled.mul_(weight) if scaled.dtype == x.dtype else weight * scaled.to(x.dtype)
