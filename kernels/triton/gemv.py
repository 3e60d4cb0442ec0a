"""FastGEMV: y = x · Wᵀ for one to four rows of x, on the plain arithmetic units (Hong et al., arXiv 2311.01282, §5).

A block owns BN rows of W and walks all of K, so nothing is combined between blocks and a row's sum has one fixed order:
the result of a row depends on nothing but that row. RMSNorm before and bias, residual and SiLU·mul after are fused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.kernels.triton.common import enter, leave, prefetch


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, g_ptr, b_ptr, r_ptr, o_ptr,
    n, x_stride, r_stride, o_stride, eps,
    K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x: [M, K]; w: [n, K], or [2n, K] with GATE (gate's rows first); o: [M, n]. Grid: ceil(n / BN)."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    w_row = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * K
    u_row = w_row + n.to(tl.int64) * K
    cols = tl.arange(0, BK)
    if AHEAD > 0:
        PIECE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8 * 128
        pieces = tl.arange(0, AHEAD // 128) * 128
        prefetch(w_row + pieces[None, :], PIECE)
        if GATE:
            prefetch(u_row + pieces[None, :], PIECE)
    enter(PDL)
    acc0 = tl.zeros((BN, BK), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    up0, up1, up2, up3 = acc0, acc0, acc0, acc0
    sq0 = tl.zeros((BK,), tl.float32)
    sq1, sq2, sq3 = sq0, sq0, sq0
    for k in tl.range(0, K, BK, num_stages=STAGES):
        at = k + cols
        w = _load(w_row + at[None, :], at[None, :], K, BK).to(tl.float32)
        u = w
        if GATE:
            u = _load(u_row + at[None, :], at[None, :], K, BK).to(tl.float32)
        g = sq0
        if NORM:
            g = _load(g_ptr + at, at, K, BK).to(tl.float32)
        x = _load(x_ptr + at, at, K, BK).to(tl.float32)
        acc0, up0, sq0 = _add(acc0, up0, sq0, w, u, g, x, NORM, GATE)
        if M > 1:
            x = _load(x_ptr + x_stride + at, at, K, BK).to(tl.float32)
            acc1, up1, sq1 = _add(acc1, up1, sq1, w, u, g, x, NORM, GATE)
        if M > 2:
            x = _load(x_ptr + 2 * x_stride + at, at, K, BK).to(tl.float32)
            acc2, up2, sq2 = _add(acc2, up2, sq2, w, u, g, x, NORM, GATE)
        if M > 3:
            x = _load(x_ptr + 3 * x_stride + at, at, K, BK).to(tl.float32)
            acc3, up3, sq3 = _add(acc3, up3, sq3, w, u, g, x, NORM, GATE)
    _finish(acc0, up0, sq0, b_ptr, r_ptr, o_ptr, rows, n, eps, K, NORM, GATE, BIAS, RESIDUAL)
    if M > 1:
        _finish(acc1, up1, sq1, b_ptr, r_ptr + r_stride, o_ptr + o_stride, rows, n, eps, K, NORM, GATE, BIAS, RESIDUAL)
    if M > 2:
        r_ptr += 2 * r_stride
        o_ptr += 2 * o_stride
        _finish(acc2, up2, sq2, b_ptr, r_ptr, o_ptr, rows, n, eps, K, NORM, GATE, BIAS, RESIDUAL)
        if M > 3:
            r_ptr += r_stride
            o_ptr += o_stride
            _finish(acc3, up3, sq3, b_ptr, r_ptr, o_ptr, rows, n, eps, K, NORM, GATE, BIAS, RESIDUAL)
    leave(PDL)


@triton.jit
def _load(pointers, at, K: tl.constexpr, BK: tl.constexpr):
    if K % BK == 0:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=at < K, other=0.0)
    return values


@triton.jit
def _add(acc, up, squares, w, u, g, x, NORM: tl.constexpr, GATE: tl.constexpr):
    if NORM:
        squares += x * x
        x = x * g
    acc += w * x[None, :]
    if GATE:
        up += u * x[None, :]
    return acc, up, squares


@triton.jit
def _finish(
    acc, up, squares, b_ptr, r_ptr, o_ptr, rows, n, eps,
    K: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The row's scale is known only now: RMSNorm's division is taken out of the sum."""
    y = tl.sum(acc, axis=1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    y *= scale
    if GATE:
        y = y / (1.0 + tl.exp(-y)) * (tl.sum(up, axis=1) * scale)
    ok = rows < n
    if BIAS:
        y += tl.load(b_ptr + rows, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(r_ptr + rows, mask=ok, other=0.0).to(tl.float32)
    tl.store(o_ptr + rows, y.to(o_ptr.dtype.element_ty), mask=ok)
