"""The draw on a GPU, without a wait for the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.triton.common import counters, dependent_launch, enter, launch_options, leave, partials

BLOCK = 4096


@triton.jit
def greedy_kernel(
    x_ptr, out_ptr, part_ptr, count_ptr, vocab, x_stride,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, number of blocks of the vocabulary). The last block of a row combines."""
    row, part = tl.program_id(0), tl.program_id(1)
    splits = tl.num_programs(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    enter(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=0)
    where = tl.min(tl.where(x == best, at, 2147483647), axis=0)  # the first of equals
    base = part_ptr + (row * splits) * 2
    tl.store(base + part * 2, best)
    tl.store(base + part * 2 + 1, where.to(tl.float32, bitcast=True))
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") == splits - 1:
        tl.store(count_ptr + row, 0)
        i = tl.arange(0, SPLITS)
        values = tl.load(base + i * 2, mask=i < splits, other=float("-inf"), cache_modifier=".cg")
        places = tl.load(base + i * 2 + 1, mask=i < splits, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
        best = tl.max(values, axis=0)
        first = tl.min(tl.where((values == best) & (i < splits), places, 2147483647), axis=0)
        tl.store(out_ptr + row, first.to(tl.int64))
    leave(PDL)


def greedy(logits: Tensor) -> Tensor:
    """The largest logit of each row, the first of equals. logits: [B, V], rows contiguous. Returns [B] int64."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    splits = triton.cdiv(vocab, BLOCK)
    pdl = dependent_launch(logits.device)
    greedy_kernel[(rows, splits)](
        logits, out, partials(logits.device, rows * splits * 2), counters(logits.device), vocab, logits.stride(0),
        BLOCK=BLOCK, SPLITS=triton.next_power_of_2(splits), PDL=pdl, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def advance_kernel(
    ids_ptr, token_ptr, position_ptr, slot_ptr, context_ptr, table_ptr, rows, table_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK)
    ok = row < rows
    enter(PDL)
    context = tl.load(context_ptr + row, mask=ok, other=0)
    ok = ok & (context > 0)
    block = tl.load(table_ptr + row * table_stride + context // PAGE, mask=ok, other=0).to(tl.int64)
    tl.store(token_ptr + row, tl.load(ids_ptr + row, mask=ok), mask=ok)
    tl.store(position_ptr + row, context.to(tl.int64), mask=ok)
    tl.store(slot_ptr + row, block * PAGE + context % PAGE, mask=ok)
    tl.store(context_ptr + row, context + 1, mask=ok)
    leave(PDL)


def advance(ids: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, context_lens: Tensor, tables: Tensor,
            page: int) -> None:  # fmt: skip
    """Makes a decode batch of the next step in place: the drawn ids become its tokens, each context grows by one. Rows
    with an empty context stay as they are. The block table must hold the next token's block already."""
    rows = ids.shape[0]
    pdl = dependent_launch(ids.device)
    advance_kernel[(1,)](
        ids, token_ids, positions, slots, context_lens, tables, rows, tables.stride(0),
        PAGE=page, BLOCK=triton.next_power_of_2(rows), PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
