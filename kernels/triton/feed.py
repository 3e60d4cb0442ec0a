"""`feed` on a GPU: one launch where PyTorch takes eight, each of them a microsecond of every step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def feed_kernel(staged_ptr, drawn_ptr, out_ptr, batch, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    ok = row < batch
    host = tl.load(staged_ptr + row, mask=ok, other=0).to(tl.int64)
    feedback = tl.load(staged_ptr + batch + row, mask=ok, other=-1)
    drawn = tl.load(drawn_ptr + tl.maximum(feedback, 0), mask=ok & (feedback >= 0), other=0)
    tl.store(out_ptr + row, tl.where(feedback >= 0, drawn, host), mask=ok)
    for column in tl.static_range(2):
        value = tl.load(staged_ptr + (2 + column) * batch + row, mask=ok, other=0)
        tl.store(out_ptr + (1 + column) * batch + row, value.to(tl.int64), mask=ok)


def feed(staged: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert staged.is_contiguous()
    assert drawn.is_contiguous()
    batch = staged.shape[1]
    out = torch.empty(3, batch, dtype=torch.int64, device=staged.device)
    feed_kernel[(1,)](staged, drawn, out, batch, BLOCK=triton.next_power_of_2(batch), num_warps=4)
    tokens, positions, slots = out.unbind()
    return tokens, positions, slots
