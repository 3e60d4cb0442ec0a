"""RMSNorm on a GPU: a block takes ROWS rows whole."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.invariance import is_batch_invariant
from diptych.kernels.triton.common import dependent_launch, enter, launch_options, leave


@triton.jit
def rms_norm_kernel(
    x_ptr, g_ptr, y_ptr, rows, x_stride, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BH)
    ok = (row < rows)[:, None] & (at < H)[None, :]
    g = tl.load(g_ptr + at, mask=at < H, other=0.0)
    enter(PDL)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + at[None, :], mask=ok, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / H + eps)
    y = (wide * scale[:, None]).to(x.dtype).to(tl.float32) * g[None, :].to(tl.float32)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * H + at[None, :], y.to(x.dtype), mask=ok)
    leave(PDL)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    rows, h = flat.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows == 0:
        return y
    bh = triton.next_power_of_2(h)
    per = max(1, 4096 // bh) if rows >= 1024 and not is_batch_invariant() else 1
    pdl = dependent_launch(x.device, early=rows <= 128)
    rms_norm_kernel[(triton.cdiv(rows, per),)](
        flat, weight, y, rows, flat.stride(0), eps,
        H=h, BH=bh, ROWS=per, PDL=pdl, num_warps=min(16, max(4, bh // 1024)), **launch_options(pdl),
    )  # fmt: skip
    return y
