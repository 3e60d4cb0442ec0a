"""Paged attention of whole chunks: FlashAttention-2 (Dao, arXiv 2307.08691), sequences of any lengths in one launch.

A block takes a tile of query tokens of one head and walks the pages that they see: first the tiles that all rows see
whole, then those that the causal edge or the window cuts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.kernels.triton.common import enter, leave
from diptych.kernels.triton.decode_attention import LOG2E


@triton.jit
def prefill_attention_kernel(
    q_ptr, o_ptr, k_ptr, v_ptr, table_ptr, plan_ptr,
    table_stride, k_block, k_token, k_head, v_block, v_token, v_head, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q, o: [T, HEADS * D]. Grid: (HEADS, items)."""
    head, item = tl.program_id(0), tl.program_id(1)
    entry = plan_ptr + item * 8
    seq = tl.load(entry)
    enter(PDL)
    if seq < 0:
        return
    start = tl.load(entry + 1)
    context = tl.load(entry + 5)
    q_first = tl.load(entry + 6)
    queries = tl.load(entry + 7)
    row = start + tl.arange(0, BM)
    dim = tl.arange(0, D)
    alive = (row < queries)[:, None]
    at = (q_first + row).to(tl.int64)[:, None] * (HEADS * D) + head * D + dim[None, :]
    q = tl.load(q_ptr + at, mask=alive, other=0.0)
    q_pos = context - queries + row
    first_pos = context - queries + start
    kv_head = head // (HEADS // KV_HEADS)
    table = table_ptr + seq.to(tl.int64) * table_stride
    k_base, v_base = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head
    token = tl.arange(0, BN)
    maximum = tl.full((BM,), float("-inf"), tl.float32)
    denominator = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    end = tl.minimum(context, first_pos + BM)
    whole = (first_pos + 1) // BN * BN
    low = 0
    if WINDOW > 0:  # every tile is checked: windows are short
        low = tl.maximum(first_pos + 1 - WINDOW, 0) // BN * BN
        whole = low
    for t in tl.range(low, whole, BN, num_stages=STAGES):
        maximum, denominator, acc = _tile(
            q, t + token, q_pos, end, table, k_base, v_base, k_block, k_token, v_block, v_token, dim,
            maximum, denominator, acc, scale, softcap, PAGE, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    for t in tl.range(whole, end, BN, num_stages=STAGES):
        maximum, denominator, acc = _tile(
            q, t + token, q_pos, end, table, k_base, v_base, k_block, k_token, v_block, v_token, dim,
            maximum, denominator, acc, scale, softcap, PAGE, WINDOW, SOFTCAP, True,
        )  # fmt: skip
    acc = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # rows past the end saw nothing
    tl.store(o_ptr + at, acc.to(o_ptr.dtype.element_ty), mask=alive)
    leave(PDL)


@triton.jit
def _tile(
    q, at, q_pos, end, table, k_base, v_base, k_block, k_token, v_block, v_token, dim,
    maximum, denominator, acc, scale, softcap,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    if CUT:
        ok = at < end
        page = tl.load(table + at // PAGE, mask=ok, other=0).to(tl.int64)
        k = tl.load(
            k_base + (page * k_block + at % PAGE * k_token)[None, :] + dim[:, None], mask=ok[None, :], other=0.0
        )
        v = tl.load(
            v_base + (page * v_block + at % PAGE * v_token)[:, None] + dim[None, :], mask=ok[:, None], other=0.0
        )
    else:
        page = tl.load(table + at // PAGE).to(tl.int64)
        k = tl.load(k_base + (page * k_block + at % PAGE * k_token)[None, :] + dim[:, None])
        v = tl.load(v_base + (page * v_block + at % PAGE * v_token)[:, None] + dim[None, :])
    s = tl.dot(q, k, input_precision="ieee")
    if SOFTCAP:
        factor = LOG2E * 1.0
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s * scale / softcap)))
    else:
        factor = scale * LOG2E
    if CUT:
        seen = at[None, :] <= q_pos[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > q_pos[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(maximum, tl.max(s, axis=1) * factor)
    base = new
    if CUT:
        base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s * factor - base[:, None])
    shrink = tl.exp2(maximum - base)
    denominator = denominator * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new, denominator, acc
