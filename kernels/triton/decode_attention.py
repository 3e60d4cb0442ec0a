"""Paged attention of a few query tokens a sequence: FlashDecoding (Dao et al., 2023) over a work list in GPU memory.

All query heads of a KV head, and all query tokens of the sequence, are the rows of one tile, so K and V are read once.
A block takes one item of the plan for one KV head; the last block of a sequence's head combines the parts by
log-sum-exp. With FUSED (one query token a sequence) the q/k norm, the rotary embedding and the write of the new token's
K and V happen here too: the new token is the start of the last item's softmax and is read from no page.

UNIFIED is the asynchronous softmax of FlashDecoding++ (Hong et al., arXiv 2311.01282, §3): a scale `phi` known before
takes the place of the running maximum, so tiles do not wait for one another's. An item whose row maximum leaves
[phi - low, phi + high] runs again with the running maximum, in the same launch, and is counted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.kernels.triton.common import enter, leave, prefetch

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decode_attention_kernel(
    q_ptr, o_ptr, k_ptr, v_ptr, table_ptr, plan_ptr, slot_ptr, cos_ptr, sin_ptr, qn_ptr, kn_ptr,
    part_ptr, count_ptr, stat_ptr,
    q_stride, table_stride, k_block, k_token, k_head, v_block, v_token, v_head, scale, softcap, eps, phi, low, high,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    MAXQ: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr, QK_NORM: tl.constexpr,
    UNIFIED: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q: with FUSED the rows of qkv, else rotated queries [T, HEADS * D]. Grid: (items, KV_HEADS)."""
    G: tl.constexpr = HEADS // KV_HEADS
    item, head = tl.program_id(0), tl.program_id(1)
    entry = plan_ptr + item * 8
    seq = tl.load(entry)
    if seq < 0:
        enter(PDL)
        return
    begin = tl.load(entry + 1)
    end = tl.load(entry + 2)
    first_item = tl.load(entry + 3)
    splits = tl.load(entry + 4)
    context = tl.load(entry + 5)
    q_first = tl.load(entry + 6)
    queries = tl.load(entry + 7)
    dim = tl.arange(0, D)
    token = tl.arange(0, TILE)
    row = tl.arange(0, PAD)
    table = table_ptr + seq.to(tl.int64) * table_stride
    k_base = k_ptr + head * k_head
    v_base = v_ptr + head * v_head
    # What earlier steps wrote (old pages) and what the step was given (rotary tables) is touched before the predecessor
    # ends: the chain of loads behind it is what a short context waits for.
    if AHEAD > 0:
        near = begin + tl.arange(0, AHEAD)
        near = tl.minimum(near, tl.maximum(end - 1, 0))
        near_page = tl.load(table + near // PAGE).to(tl.int64)
        LINE: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8 * D
        prefetch(k_base + near_page * k_block + near % PAGE * k_token, LINE)
        prefetch(v_base + near_page * v_block + near % PAGE * v_token, LINE)
    last = begin < 0  # whether this item opens its sum with the new token
    score = tl.zeros((PAD,), tl.float32)
    opening_v = tl.zeros((D,), tl.float32)
    turned = tl.where(dim < R // 2, dim + R // 2, tl.where(dim < R, dim - R // 2, dim))
    if FUSED:
        last = first_item + splits - 1 == item
        angle = (context - 1).to(tl.int64) * R  # a lone new token stands at the end of its context
        cos = tl.load(cos_ptr + angle + dim, mask=dim < R, other=1.0)
        sin = tl.load(sin_ptr + angle + dim, mask=dim < R, other=0.0)
        if QK_NORM:
            q_weight, q_weight_other = tl.load(qn_ptr + dim)[None, :], tl.load(qn_ptr + turned)[None, :]
    enter(PDL)

    q_index = row // G
    q_head = head * G + row % G
    alive = row < G * queries
    q_at = q_ptr + (q_first + q_index).to(tl.int64)[:, None] * q_stride + q_head[:, None] * D
    q = tl.load(q_at + dim[None, :], mask=alive[:, None], other=0.0)
    q_pos = context - queries + q_index
    if FUSED:
        other = tl.load(q_at + turned[None, :], mask=alive[:, None], other=0.0)
        wide, wide_other = q.to(tl.float32), other.to(tl.float32)
        if QK_NORM:
            q_scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
            wide = _normed(wide, q_scale, q_weight, q.dtype)
            wide_other = _normed(wide_other, q_scale, q_weight_other, q.dtype)
        q = (wide * cos[None, :] + wide_other * sin[None, :]).to(q.dtype)
        if last:
            row_at = q_ptr + q_first.to(tl.int64) * q_stride
            k_at = row_at + (HEADS + head) * D
            wide_k = tl.load(k_at + dim).to(tl.float32)
            wide_k_other = tl.load(k_at + turned).to(tl.float32)
            new_v = tl.load(row_at + (HEADS + KV_HEADS + head) * D + dim)
            if QK_NORM:
                k_scale = tl.rsqrt(tl.sum(wide_k * wide_k, axis=0) / D + eps)
                wide_k = _normed(wide_k, k_scale, tl.load(kn_ptr + dim), q.dtype)
                wide_k_other = _normed(wide_k_other, k_scale, tl.load(kn_ptr + turned), q.dtype)
            new_k = (wide_k * cos + wide_k_other * sin).to(q.dtype)
            slot = tl.load(slot_ptr + q_first)
            tl.store(k_base + slot // PAGE * k_block + slot % PAGE * k_token + dim, new_k)
            tl.store(v_base + slot // PAGE * v_block + slot % PAGE * v_token + dim, new_v)
            score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], axis=1)
            score = _scaled(score, scale, softcap, SOFTCAP)
            opening_v = new_v.to(tl.float32)
    maximum, denominator, acc = _opened(last, score, opening_v)
    if UNIFIED:
        # `maximum` is finite only where the new token opened the sum: it is brought to the scale phi
        opening = tl.exp2(maximum - phi)
        weights = tl.zeros((PAD, TILE), tl.float32)
        peak = tl.full((PAD, TILE), float("-inf"), tl.float32)
        acc *= opening[:, None]
        for t in tl.range(begin, end, TILE, num_stages=STAGES):
            at = t + token
            ok = at < end
            page = tl.load(table + at // PAGE, mask=ok, other=0).to(tl.int64)
            k = tl.load(k_base + (page * k_block + at % PAGE * k_token)[None, :] + dim[:, None],
                        mask=ok[None, :], other=0.0)  # fmt: skip
            v = tl.load(v_base + (page * v_block + at % PAGE * v_token)[:, None] + dim[None, :],
                        mask=ok[:, None], other=0.0)  # fmt: skip
            s = _scores(q, k, at, end, q_pos, scale, softcap, WINDOW, SOFTCAP, FUSED)
            p = tl.exp2(s - phi)
            weights += p
            peak = tl.maximum(peak, s)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        top = tl.maximum(tl.max(peak, axis=1), maximum)
        strays = tl.sum((alive & ((top > phi + high) | (top < phi - low))).to(tl.int32), axis=0)
        denominator = denominator * opening + tl.sum(weights, axis=1)
        maximum = tl.zeros((PAD,), tl.float32) + phi
        if head == 0:
            tl.atomic_add(stat_ptr + 1, (queries * HEADS).to(tl.int64))
        if strays > 0:
            tl.atomic_add(stat_ptr, strays.to(tl.int64))
            maximum, denominator, acc = _opened(last, score, opening_v)
            maximum, denominator, acc = _walk(
                q, begin, end, q_pos, table, k_base, v_base, k_block, k_token, v_block, v_token, dim, token,
                maximum, denominator, acc, scale, softcap,
                PAGE, TILE, 1, WINDOW, SOFTCAP, FUSED,
            )  # fmt: skip
    else:
        maximum, denominator, acc = _walk(
            q, begin, end, q_pos, table, k_base, v_base, k_block, k_token, v_block, v_token, dim, token,
            maximum, denominator, acc, scale, softcap, PAGE, TILE, STAGES, WINDOW, SOFTCAP, FUSED,
        )  # fmt: skip

    if splits == 1:
        acc = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # rows that pad the tile
        out = o_ptr + (q_first + q_index).to(tl.int64)[:, None] * (HEADS * D) + q_head[:, None] * D + dim[None, :]
        tl.store(out, acc.to(o_ptr.dtype.element_ty), mask=alive[:, None])
        return
    SIZE: tl.constexpr = ROWS * (D + 2)
    part = part_ptr + (item * KV_HEADS + head).to(tl.int64) * SIZE
    kept = row < ROWS
    tl.store(part + row[:, None] * D + dim[None, :], acc, mask=kept[:, None])
    tl.store(part + ROWS * D + row, maximum, mask=kept)
    tl.store(part + ROWS * D + ROWS + row, denominator, mask=kept)
    tl.debug_barrier()
    counter = count_ptr + first_item * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
        tl.store(counter, 0)
        _combine(part_ptr, o_ptr, first_item, splits, head, q_first, queries, HEADS, KV_HEADS, D, ROWS, CHUNK)
    leave(PDL)


@triton.jit
def _opened(last, score, v):
    """The softmax of nothing, or of the new token alone."""
    maximum = tl.where(last, score, float("-inf"))
    denominator = tl.where(last, 1.0, tl.zeros_like(score))
    acc = tl.where(last, v[None, :], tl.zeros_like(score)[:, None])
    return maximum, denominator, acc


@triton.jit
def _walk(
    q, begin, end, q_pos, table, k_base, v_base, k_block, k_token, v_block, v_token, dim, token,
    maximum, denominator, acc, scale, softcap,
    PAGE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """The running softmax over the pages that hold tokens [begin, end)."""
    for t in tl.range(begin, end, TILE, num_stages=STAGES):
        at = t + token
        ok = at < end
        page = tl.load(table + at // PAGE, mask=ok, other=0).to(tl.int64)
        k = tl.load(k_base + (page * k_block + at % PAGE * k_token)[None, :] + dim[:, None],
                    mask=ok[None, :], other=0.0)  # fmt: skip
        v = tl.load(v_base + (page * v_block + at % PAGE * v_token)[:, None] + dim[None, :],
                    mask=ok[:, None], other=0.0)  # fmt: skip
        s = _scores(q, k, at, end, q_pos, scale, softcap, WINDOW, SOFTCAP, FUSED)
        maximum, denominator, acc = _absorb(s, v, maximum, denominator, acc)
    return maximum, denominator, acc


@triton.jit
def _normed(wide, scale, weight, dtype: tl.constexpr):
    return (wide * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _scaled(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log2, so that exp2 serves."""
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s * scale / softcap))) * LOG2E
    else:
        s = s * (scale * LOG2E)
    return s


@triton.jit
def _scores(
    q, k, at, end, q_pos, scale, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr
):  # fmt: skip
    s = _scaled(tl.dot(q, k, input_precision="ieee"), scale, softcap, SOFTCAP)
    ok = (at < end)[None, :]
    if not FUSED:
        ok = ok & (at[None, :] <= q_pos[:, None])
    if WINDOW > 0:
        ok = ok & (at[None, :] > q_pos[:, None] - WINDOW)
    return tl.where(ok, s, float("-inf"))


@triton.jit
def _absorb(s, v, maximum, denominator, acc):
    """One tile of the running softmax. A row that has seen nothing yet keeps a maximum of -inf."""
    new = tl.maximum(maximum, tl.max(s, axis=1))
    base = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(maximum - base)
    p = tl.exp2(s - base[:, None])
    denominator = denominator * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new, denominator, acc


@triton.jit
def _combine(
    part_ptr, o_ptr, first_item, splits, head, q_first, queries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds a head's parts, CHUNK at a time, in the order of their items; past L1, since other blocks wrote them."""
    G: tl.constexpr = HEADS // KV_HEADS
    SIZE: tl.constexpr = ROWS * (D + 2)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    index = tl.arange(0, CHUNK)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for c in tl.range(0, splits, CHUNK):
        ok = c + index < splits
        part = part_ptr + ((first_item + c + index) * KV_HEADS + head).to(tl.int64) * SIZE
        m_at = part[:, None] + ROWS * D + row[None, :]
        m = tl.load(m_at, mask=ok[:, None], other=float("-inf"), cache_modifier=".cg")
        d = tl.load(m_at + ROWS, mask=ok[:, None], other=0.0, cache_modifier=".cg")
        a = tl.load(part[:, None, None] + row[None, :, None] * D + dim[None, None, :],
                    mask=ok[:, None, None], other=0.0, cache_modifier=".cg")  # fmt: skip
        new = tl.maximum(maximum, tl.max(m, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(maximum - base)
        weight = tl.exp2(m - base[None, :])
        denominator = denominator * shrink + tl.sum(d * weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(a * weight[:, :, None], axis=0)
        maximum = new
    acc = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    q_row = (q_first + row // G).to(tl.int64)
    out = o_ptr + q_row[:, None] * (HEADS * D) + (head * G + row % G)[:, None] * D + dim[None, :]
    tl.store(out, acc.to(o_ptr.dtype.element_ty), mask=(row < G * queries)[:, None])
