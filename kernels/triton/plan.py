"""Work lists of attention, made on the GPU from the batch's lengths so that one captured graph serves every length.

Owns the cut of a batch into items: spans of cached tokens for decode, tiles of query tokens for prefill. Made in the
first layer that needs one and kept in `Batch.memo` for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.batch import Batch

FIELDS = 8
"""int32 an item.

Decode: sequence (-1: no work), first and last token of the span, the sequence's first item, its number of items,
context, first query token, query tokens. Prefill: sequence, first query row of the tile, three unused, context, first
query token, query tokens.
"""


@triton.jit
def decode_plan_kernel(
    context_ptr, start_ptr, plan_ptr, batch, items, slots,
    TILE: tl.constexpr, WINDOW: tl.constexpr, FUSED: tl.constexpr, MAXQ: tl.constexpr,
    BB: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Cuts the batch's tiles into about `slots` equal items. Sequences of more than MAXQ query tokens are prefill's.
    Grid: ceil(items / BI)."""
    i = tl.arange(0, BB)
    context = tl.load(context_ptr + i, mask=i < batch, other=0)
    start = tl.load(start_ptr + i, mask=i < batch, other=0)
    queries = tl.load(start_ptr + i + 1, mask=i < batch, other=0) - start
    mine = (context > 0) & (queries > 0) & (queries <= MAXQ)
    begin = i * 0
    if WINDOW > 0:
        begin = tl.maximum(context - queries + 1 - WINDOW, 0) // TILE * TILE
    end = context
    if FUSED:  # the new token is in no page yet
        end = context - 1
    tiles = tl.where(mine, tl.maximum((end - begin + TILE - 1) // TILE, 1), 0)
    total = tl.sum(tiles, axis=0)
    size = tl.maximum((total + slots - 1) // slots, 1)
    step = tl.maximum(size // 16, 1)
    for _ in tl.static_range(12):  # rounding up makes more items than slots: a second wave for a few
        count = tl.sum((tiles + size - 1) // size, axis=0)
        size = tl.where(count > slots, size + step, size)
    number = (tiles + size - 1) // size
    after = tl.cumsum(number, axis=0)
    item = tl.program_id(0) * BI + tl.arange(0, BI)
    seq = tl.sum((after[None, :] <= item[:, None]).to(tl.int32), axis=1)
    live = item < tl.sum(number, axis=0)
    here = i[None, :] == seq[:, None]
    splits = tl.maximum(tl.sum(tl.where(here, number[None, :], 0), axis=1), 1)
    first = tl.sum(tl.where(here, (after - number)[None, :], 0), axis=1)
    spans = tl.sum(tl.where(here, tiles[None, :], 0), axis=1)
    low = tl.sum(tl.where(here, begin[None, :], 0), axis=1)
    high = tl.sum(tl.where(here, end[None, :], 0), axis=1)
    span = (spans + splits - 1) // splits
    from_ = low + (item - first) * span * TILE
    to = tl.minimum(from_ + span * TILE, high)
    at = plan_ptr + item * 8
    ok = item < items
    tl.store(at, tl.where(live, seq, -1), mask=ok)
    tl.store(at + 1, from_, mask=ok)
    tl.store(at + 2, to, mask=ok)
    tl.store(at + 3, first, mask=ok)
    tl.store(at + 4, splits, mask=ok)
    tl.store(at + 5, tl.sum(tl.where(here, context[None, :], 0), axis=1), mask=ok)
    tl.store(at + 6, tl.sum(tl.where(here, start[None, :], 0), axis=1), mask=ok)
    tl.store(at + 7, tl.sum(tl.where(here, queries[None, :], 0), axis=1), mask=ok)


@triton.jit
def prefill_plan_kernel(
    context_ptr, start_ptr, plan_ptr, batch, items,
    ROWS: tl.constexpr, MAXQ: tl.constexpr, BB: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS query tokens of the sequences with more than MAXQ, the last tiles, which see most, first."""
    i = tl.arange(0, BB)
    context = tl.load(context_ptr + i, mask=i < batch, other=0)
    start = tl.load(start_ptr + i, mask=i < batch, other=0)
    queries = tl.load(start_ptr + i + 1, mask=i < batch, other=0) - start
    number = tl.where(queries > MAXQ, (queries + ROWS - 1) // ROWS, 0)
    after = tl.cumsum(number, axis=0)
    item = tl.program_id(0) * BI + tl.arange(0, BI)
    seq = tl.sum((after[None, :] <= item[:, None]).to(tl.int32), axis=1)
    here = i[None, :] == seq[:, None]
    first = tl.sum(tl.where(here, (after - number)[None, :], 0), axis=1)
    count = tl.sum(tl.where(here, number[None, :], 0), axis=1)
    at = plan_ptr + item * 8
    ok = item < items
    tl.store(at, tl.where(item < tl.sum(number, axis=0), seq, -1), mask=ok)
    tl.store(at + 1, (count - 1 - (item - first)) * ROWS, mask=ok)
    tl.store(at + 5, tl.sum(tl.where(here, context[None, :], 0), axis=1), mask=ok)
    tl.store(at + 6, tl.sum(tl.where(here, start[None, :], 0), axis=1), mask=ok)
    tl.store(at + 7, tl.sum(tl.where(here, queries[None, :], 0), axis=1), mask=ok)


@dataclass(frozen=True, eq=False)
class Plan:
    """items: [W, FIELDS] int32 on the GPU. fresh: made by this very call, so the next kernel must not start early."""

    items: Tensor
    fresh: bool


def decode_plan(batch: Batch, *, slots: int, tile: int, window: int | None, fused: bool, max_query: int) -> Plan:
    """At most slots + B items."""
    key = ("decode plan", slots, tile, window, fused, max_query)
    if key in batch.memo:
        return Plan(batch.memo[key], fresh=False)
    sequences = batch.context_lens.shape[0]
    items = slots + sequences
    plan = torch.empty(items, FIELDS, dtype=torch.int32, device=batch.context_lens.device)
    decode_plan_kernel[(triton.cdiv(items, 32),)](
        batch.context_lens, batch.query_start, plan, sequences, items, slots,
        TILE=tile, WINDOW=window or 0, FUSED=fused, MAXQ=max_query,
        BB=triton.next_power_of_2(sequences), BI=32, num_warps=4,
    )  # fmt: skip
    batch.memo[key] = plan
    return Plan(plan, fresh=True)


def prefill_plan(batch: Batch, *, tokens: int, rows: int, max_query: int) -> Plan:
    key = ("prefill plan", rows, max_query)
    if key in batch.memo:
        return Plan(batch.memo[key], fresh=False)
    sequences = batch.context_lens.shape[0]
    items = triton.cdiv(tokens, rows) + sequences
    plan = torch.empty(items, FIELDS, dtype=torch.int32, device=batch.context_lens.device)
    prefill_plan_kernel[(triton.cdiv(items, 32),)](
        batch.context_lens, batch.query_start, plan, sequences, items,
        ROWS=rows, MAXQ=max_query, BB=triton.next_power_of_2(sequences), BI=32, num_warps=4,
    )  # fmt: skip
    batch.memo[key] = plan
    return Plan(plan, fresh=True)
