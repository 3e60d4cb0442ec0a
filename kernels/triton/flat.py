"""FlatGEMM: y = x · Wᵀ for a few rows of x on the matrix units (Hong et al., arXiv 2311.01282, §4).

The weights are the tall operand: BN rows of W against BM rows of x, which are all of them where few are. W is walked
once with STAGES tiles in flight; where N is too small to fill the GPU, K is split over blocks and the last block to
arrive adds the parts up, in a fixed order. RMSNorm before and bias, residual and SiLU·mul after are fused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.kernels.triton.common import enter, leave, prefetch


@triton.jit(do_not_specialize=["m"])
def flat_kernel(
    x_ptr, w_ptr, g_ptr, b_ptr, r_ptr, o_ptr, part_ptr, count_ptr,
    m, n, x_stride, r_stride, o_stride, eps,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x: [m, K]; w: [n, K], or [2n, K] with GATE; o: [m, n]. Grid: (ceil(m / BM), ceil(n / BN), SPLIT): blocks that
    share a tile of W follow one another."""
    tile, split = tl.program_id(1), tl.program_id(2)
    place = tl.program_id(0) * tl.num_programs(1) + tile
    rows = tile * BN + tl.arange(0, BN)
    SPAN: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT) * BK
    first = split * SPAN
    last = tl.minimum(first + SPAN, K)
    w_row = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * K
    u_row = w_row + n.to(tl.int64) * K
    cols = tl.arange(0, BK)
    if AHEAD > 0:
        PIECE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8 * 128
        pieces = tl.minimum(first + tl.arange(0, AHEAD // 128) * 128, K - 128)
        prefetch(w_row + pieces[None, :], PIECE)
        if GATE:
            prefetch(u_row + pieces[None, :], PIECE)
    enter(PDL)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    seen = row[:, None] < m
    x_row = x_ptr + row[:, None] * x_stride
    acc = tl.zeros((BN, BM), tl.float32)
    up = acc
    squares = tl.zeros((BM, BK), tl.float32)
    for k in tl.range(first, last, BK, num_stages=STAGES):
        at = k + cols
        if K % BK == 0:
            w = tl.load(w_row + at[None, :])
            x = tl.load(x_row + at[None, :], mask=seen, other=0.0)
        else:
            w = tl.load(w_row + at[None, :], mask=at[None, :] < K, other=0.0)
            x = tl.load(x_row + at[None, :], mask=seen & (at[None, :] < K), other=0.0)
        if NORM:
            g = tl.load(g_ptr + at, mask=at < K, other=0.0).to(tl.float32)
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * g[None, :]).to(w.dtype)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATE:
            if K % BK == 0:
                u = tl.load(u_row + at[None, :])
            else:
                u = tl.load(u_row + at[None, :], mask=at[None, :] < K, other=0.0)
            up = tl.dot(u, tl.trans(x), up, input_precision="ieee")
    total = tl.sum(squares, axis=1)
    if SPLIT == 1:
        _finish(acc, up, total, b_ptr, r_ptr, o_ptr, rows, row, m, n, r_stride, o_stride, eps, K,
                NORM, GATE, BIAS, RESIDUAL)  # fmt: skip
    else:
        SIZE: tl.constexpr = BN * BM * (2 if GATE else 1) + BM
        lane = tl.arange(0, BM)
        grid = tl.arange(0, BN)[:, None] * BM + lane[None, :]
        mine = part_ptr + (place * SPLIT + split) * SIZE
        tl.store(mine + grid, acc)
        if NORM:
            tl.store(mine + SIZE - BM + lane, total)
        if GATE:
            tl.store(mine + BN * BM + grid, up)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + place, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(count_ptr + place, 0)
            acc = tl.zeros((BN, BM), tl.float32)
            up = acc
            total = tl.zeros((BM,), tl.float32)
            for s in tl.static_range(SPLIT):
                part = part_ptr + (place * SPLIT + s) * SIZE
                acc += tl.load(part + grid, cache_modifier=".cg")
                if NORM:
                    total += tl.load(part + SIZE - BM + lane, cache_modifier=".cg")
                if GATE:
                    up += tl.load(part + BN * BM + grid, cache_modifier=".cg")
            _finish(acc, up, total, b_ptr, r_ptr, o_ptr, rows, row, m, n, r_stride, o_stride, eps, K,
                    NORM, GATE, BIAS, RESIDUAL)  # fmt: skip
    leave(PDL)


@triton.jit
def _finish(
    acc, up, total, b_ptr, r_ptr, o_ptr, rows, row, m, n, r_stride, o_stride, eps,
    K: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    if NORM:
        scale = tl.rsqrt(total / K + eps)
        acc *= scale[None, :]
        if GATE:
            up *= scale[None, :]
    if GATE:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if BIAS:
        acc += tl.load(b_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    ok = (rows[:, None] < n) & (row[None, :] < m)
    if RESIDUAL:
        acc += tl.load(r_ptr + row[None, :] * r_stride + rows[:, None], mask=ok, other=0.0).to(tl.float32)
    tl.store(o_ptr + row[None, :] * o_stride + rows[:, None], acc.to(o_ptr.dtype.element_ty), mask=ok)
