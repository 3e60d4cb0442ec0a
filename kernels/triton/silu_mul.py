"""SiLU·mul alone, behind the library's product: y = silu(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.triton.common import dependent_launch, enter, launch_options, leave


@triton.jit
def silu_mul_kernel(x_ptr, y_ptr, f, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    enter(PDL)
    gate = tl.load(x_ptr + row * 2 * f + at, mask=at < f, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * f + f + at, mask=at < f, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * f + at, y.to(y_ptr.dtype.element_ty), mask=at < f)
    leave(PDL)


def silu_mul(x: Tensor) -> Tensor:
    """x: [T, 2F] contiguous. Returns [T, F]."""
    tokens, f = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, f, dtype=x.dtype, device=x.device)
    if tokens:
        pdl = dependent_launch(x.device)
        for start in range(0, tokens, 65535):  # the grid's second dimension ends there
            part = x[start : start + 65535]
            silu_mul_kernel[(triton.cdiv(f, 2048), part.shape[0])](
                part, y[start:], f, BLOCK=2048, PDL=pdl, num_warps=8, **launch_options(pdl)
            )
    return y
