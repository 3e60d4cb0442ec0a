"""Prefill attention for Hopper: one warp brings pages by the copy engine while two warp groups compute.

The method of FlashAttention-3 (Shah et al., arXiv 2407.08608), over pages: each warp group owns half of the block's
query tokens, multiplies by the next tile's keys while it takes the softmax of this one, and keeps its weights in
registers for the product with the values. Written in Gluon, as the tile language neither assigns warps nor lets a
product run on while other instructions do.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diptych.kernels.triton.hopper import async_load, boxes, thread_barrier

LOG2E = gl.constexpr(1.4426950408889634)
QUERY_ROWS = 128
"""Query tokens a block: what its items of `prefill_plan` are cut to."""
COLUMNS = 128
"""Cached tokens a tile."""


def streams(q: Tensor, k_cache: Tensor, v_cache: Tensor, head_dim: int) -> bool:
    """Whether `streamed_attention` does this dtype, head size and layout on this device: Hopper, two bytes an element,
    and pages in which a head's tokens follow one another, as the copy engine brings rows of one matrix."""
    page = k_cache.shape[1]
    return (
        _hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and 16 <= page <= COLUMNS
        and page & (page - 1) == 0
        and all(c.stride(1) == head_dim and c.stride(0) % head_dim == 0 for c in (k_cache, v_cache))
        and all(c.stride(2) % head_dim == 0 and c.data_ptr() % 16 == 0 for c in (k_cache, v_cache))
    )


@cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def streamed_attention(
    q: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, items: Tensor,
    *, heads: int, kv_heads: int, head_dim: int, scale: float, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    """q, out: [T, heads * head_dim], contiguous; items: of `prefill_plan` with QUERY_ROWS; see `streams`."""
    pages = [_rows(cache, head_dim) for cache in (k_cache, v_cache)]
    page = k_cache.shape[1]
    streamed_attention_kernel[(heads, items.shape[0])](
        boxes(q.view(-1, heads * head_dim), 64, head_dim), *(boxes(p, page, head_dim) for p in pages),
        out, table, items, table.stride(0),
        *(c.stride(axis) // head_dim for c in (k_cache, v_cache) for axis in (0, 2)), scale, softcap or 1.0,
        HEADS=heads, KV_HEADS=kv_heads, D=head_dim, PAGE=page, BN=COLUMNS, STAGES=256 // head_dim,
        WINDOW=window or 0, SOFTCAP=softcap is not None, num_warps=4,
    )  # fmt: skip


def _rows(pages: Tensor, head_dim: int) -> Tensor:
    """All pages of all heads as one matrix of rows of head_dim."""
    elements = sum((n - 1) * step for n, step in zip(pages.shape, pages.stride(), strict=True)) + 1
    return pages.as_strided((elements // head_dim, head_dim), (head_dim, 1))


@gluon.jit
def streamed_attention_kernel(
    q_desc, k_desc, v_desc, o_ptr, table_ptr, plan_ptr, table_stride, k_block, k_head, v_block, v_head, scale, softcap,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """q, o: [T, HEADS * D], read by rows of 64. k_desc, v_desc: all pages of all heads as rows of D, PAGE at a time;
    a page of head h begins at row page * k_block + h * k_head. Grid: (HEADS, items of 128 query tokens)."""
    head, item = gl.program_id(0), gl.program_id(1)
    entry = plan_ptr + item * 8
    seq = gl.load(entry)
    if seq >= 0:
        start = gl.load(entry + 1)
        context = gl.load(entry + 5)
        q_first = gl.load(entry + 6)
        queries = gl.load(entry + 7)
        kv_head = head // (HEADS // KV_HEADS)
        first_pos = context - queries + start
        end = gl.minimum(context, first_pos + 128)
        low = 0
        if WINDOW > 0:
            low = gl.maximum(first_pos + 1 - WINDOW, 0) // BN
        high = (end + BN - 1) // BN
        q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 64, D], q_desc.layout)
        k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, D], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(q_full.index(i), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        fence_async_shared()
        row = start
        pos = first_pos
        out_ptr = o_ptr + head * D
        gl.warp_specialize(
            [
                (_compute, (
                    0, q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free,
                    out_ptr, row, pos, low, high, context, q_first, queries, scale, softcap,
                    HEADS, D, BN, STAGES, WINDOW, SOFTCAP)),
                (_compute, (
                    1, q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free,
                    out_ptr, row, pos, low, high, context, q_first, queries, scale, softcap,
                    HEADS, D, BN, STAGES, WINDOW, SOFTCAP)),
                (_bring, (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free,
                    q_first + start, head * D, table_ptr + seq * table_stride, low, high, (context - 1) // PAGE,
                    k_block, kv_head * k_head, v_block, kv_head * v_head, D, PAGE, BN, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


@gluon.jit
def _bring(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free,
    q_row, q_column, table, low, high, last, k_block, k_row, v_block, v_row,
    D: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp. Values follow keys one tile behind, as they are needed."""
    for i in gl.static_range(2):
        mbarrier.expect(q_full.index(i), 64 * D * 2)
        async_load(q_desc, [q_row + i * 64, q_column], q_full.index(i), q_smem.index(i))
    for tile in range(low, high):
        n = tile - low
        stage = n % STAGES
        mbarrier.wait(k_free.index(stage), (n // STAGES + 1) & 1)
        mbarrier.expect(k_full.index(stage), BN * D * 2)
        for i in gl.static_range(BN // PAGE):
            page = gl.load(table + gl.minimum(tile * (BN // PAGE) + i, last))
            async_load(
                k_desc, [page * k_block + k_row, 0], k_full.index(stage), k_smem.index(stage).slice(i * PAGE, PAGE)
            )
        mbarrier.wait(v_free.index(stage), (n // STAGES + 1) & 1)
        mbarrier.expect(v_full.index(stage), BN * D * 2)
        for i in gl.static_range(BN // PAGE):
            page = gl.load(table + gl.minimum(tile * (BN // PAGE) + i, last))
            async_load(
                v_desc, [page * v_block + v_row, 0], v_full.index(stage), v_smem.index(stage).slice(i * PAGE, PAGE)
            )


@gluon.jit
def _compute(
    half, q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free,
    out_ptr, row, pos, low, high, context, q_first, queries, scale, softcap,
    HEADS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 query tokens against all tiles from `low` to `high`."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row += half * 64
    pos += half * 64
    q = q_smem.index(half)
    q_pos = pos + gl.arange(0, 64, gl.SliceLayout(1, scores))
    maximum = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, scores))
    acc = gl.zeros([64, D], gl.float32, output)
    zero = gl.zeros([64, BN], gl.float32, scores)
    mbarrier.wait(q_full.index(half), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(0), count=1)
    p, maximum, total, _ = _soften(
        s, low * BN, q_pos, context, maximum, total, scale, softcap, BN, WINDOW, SOFTCAP, True, scores
    )
    weights = _operand(p, v_smem.dtype, output)
    # Tiles below `whole` are seen whole by all 64 rows.
    whole = gl.minimum(gl.maximum((pos + 1) // BN, low + 1), high)
    if WINDOW > 0:
        whole = low + 1
    for tile in range(low + 1, whole):
        acc, weights, maximum, total = _advance(
            tile - low, tile, q, k_smem, v_smem, k_full, v_full, k_free, v_free, acc, weights, zero, q_pos,
            context, maximum, total, scale, softcap, BN, STAGES, WINDOW, SOFTCAP, False, scores, output,
        )  # fmt: skip
    for tile in range(whole, high):
        acc, weights, maximum, total = _advance(
            tile - low, tile, q, k_smem, v_smem, k_full, v_full, k_free, v_free, acc, weights, zero, q_pos,
            context, maximum, total, scale, softcap, BN, STAGES, WINDOW, SOFTCAP, True, scores, output,
        )  # fmt: skip
    n = high - low - 1
    stage = n % STAGES
    mbarrier.wait(v_full.index(stage), (n // STAGES) & 1)
    values = v_smem.index(stage)
    if high * BN > context:  # what lies behind the last token is anything, NaN too, and 0 * NaN is not 0
        linear: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
        at = (high - 1) * BN + gl.arange(0, BN, gl.SliceLayout(1, linear))
        v = values.load(linear)
        values.store(gl.where((at < context)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
        thread_barrier()
    acc = warpgroup_mma(weights, values, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    total = gl.convert_layout(total, gl.SliceLayout(1, output))
    acc = acc / gl.where(total == 0.0, 1.0, total)[:, None]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), stored)
    r = row + gl.arange(0, 64, gl.SliceLayout(1, stored))
    column = gl.arange(0, D, gl.SliceLayout(0, stored))
    at = (q_first + r).to(gl.int64)[:, None] * (HEADS * D) + column[None, :]
    gl.store(out_ptr + at, out, mask=(r < queries)[:, None])


@gluon.jit
def _advance(
    n, tile, q, k_smem, v_smem, k_full, v_full, k_free, v_free, acc, weights, zero, q_pos, context,
    maximum, total, scale, softcap, BN: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, CUT: gl.constexpr, scores: gl.constexpr, output: gl.constexpr,
):  # fmt: skip
    """Starts this tile's scores, then the product of the last tile's weights and values, and softens under it."""
    stage = n % STAGES
    before = (n - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((n - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_smem.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    p, maximum, total, shrink = _soften(
        s, tile * BN, q_pos, context, maximum, total, scale, softcap, BN, WINDOW, SOFTCAP, CUT, scores
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, output))[:, None]
    return acc, _operand(p, v_smem.dtype, output), maximum, total


@gluon.jit
def _operand(p, dtype: gl.constexpr, output: gl.constexpr):
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, output, 2))


@gluon.jit
def _soften(
    s, first, q_pos, context, maximum, total, scale, softcap, BN: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, CUT: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """One tile's running softmax: the weights, the new maximum and sum, and what older sums shrink by."""
    factor = scale * LOG2E
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (1.0 + gl.exp2(2.0 * LOG2E / softcap * scale * s)))
        factor = LOG2E * 1.0
    if CUT:
        at = first + gl.arange(0, BN, gl.SliceLayout(0, scores))
        seen = (at[None, :] <= q_pos[:, None]) & (at < context)[None, :]
        if WINDOW > 0:
            seen = seen & (at[None, :] > q_pos[:, None] - WINDOW)
        s = gl.where(seen, s, float("-inf"))
    new = gl.maximum(maximum, gl.max(s, axis=1) * factor)
    base = new
    if CUT:
        base = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * factor - base[:, None])
    shrink = gl.exp2(maximum - base)
    return p, new, total * shrink + gl.sum(p, axis=1), shrink
