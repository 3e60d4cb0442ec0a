"""Streamed product for Hopper: one warp brings weights and rows by the copy engine, the others multiply.

FlatGEMM's double buffering (Hong et al., arXiv 2311.01282, §4) taken to the copy engine: many tiles of W are in flight,
the first of them before the kernel that writes x has ended, and no thread that multiplies computes an address. W is the
tall operand of the matrix units. RMSNorm before the product is four more warps, which put the norm's weight on each
tile of x in shared memory and add up its squares. Where N is too small to fill the GPU, K is split over blocks, and the
last to arrive adds the parts up, in the order of the splits.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from diptych.kernels.dataflow import Choice
from diptych.kernels.triton.common import counters, launch_options, multiprocessors, partials
from diptych.kernels.triton.hopper import async_load, boxes, thread_barrier

MOST_ROWS = 256
REGISTERS_OF_NORM = gl.constexpr(96)


@cache
def can_stream(device: torch.device) -> bool:
    """Whether `streamed` runs there, for two-byte dtypes: Hopper."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9


def aligned(x: Tensor, weight: Tensor) -> bool:
    """Whether the copy engine can bring both: rows that begin at multiples of 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (x, weight))


def streamed(
    x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None, gate: bool, bias: Tensor | None,
    residual: Tensor | None, out: Tensor, c: Choice, pdl: int,
) -> None:  # fmt: skip
    """out[m, n] = f(x) · weightᵀ + bias + residual, or silu(f(x) · gateᵀ) * (f(x) · upᵀ); f is RMSNorm or nothing.
    x: [m, k] of two bytes an element, m at most MOST_ROWS."""
    (m, k), n = x.shape, out.shape[1]
    bm = max(16, 1 << (m - 1).bit_length())
    tiles = -(-n // c.bn)
    g, eps = norm or (x, 0.0)
    r, r_stride = (out, 0) if residual is None else (residual, residual.stride(0))
    places = multiprocessors(x.device) * c.blocks
    assert c.split == 1 or not (gate or norm)
    streamed_kernel[(min(tiles * c.split, places),)](
        boxes(weight, c.bn, c.bk), boxes(x, bm, c.bk), g, out if bias is None else bias, r, out,
        partials(x.device, tiles * c.split * c.bn * bm if c.split > 1 else 1), counters(x.device),
        m, n, r_stride, out.stride(0), tiles, eps,
        K=k, BM=bm, BN=c.bn, BK=c.bk, SPLIT=c.split, STAGES=c.stages, NORM=norm is not None, GATE=gate,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=pdl, num_warps=c.warps,
        maxnreg=registers(c, norm is not None), **launch_options(pdl),
    )  # fmt: skip


def registers(c: Choice, norm: bool) -> int | None:
    """A thread's registers, so that `blocks` blocks find room on a multiprocessor."""
    threads = 32 * (c.warps + 4 + (4 if norm else 0))  # the copying warp counts as four
    return None if c.blocks == 1 else (1 << 16) // c.blocks // threads // 8 * 8


@gluon.jit(do_not_specialize=["m"])
def streamed_kernel(
    w_desc, x_desc, g_ptr, b_ptr, r_ptr, o_ptr, part_ptr, count_ptr, m, n, r_stride, o_stride, tiles, eps,
    K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    NORM: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """w: [n, K], or [2n, K] with GATE, by boxes [BN, BK]; x: [m <= BM, K] by boxes [BM, BK]; o: [m, n]. Grid: any
    number of blocks; block b does units b, b + blocks, … of tiles * SPLIT."""
    HALVES: gl.constexpr = 2 if GATE else 1
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * HALVES, BN, BK], w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    sums = gl.allocate_shared_memory(gl.float32, [BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(summed.index(i), count=1)
    fence_async_shared()
    if NORM:
        gl.warp_specialize(
            [
                (_multiply, (
                    w_smem, x_smem, sums, ready, free, summed, b_ptr, r_ptr, o_ptr, part_ptr, count_ptr,
                    m, n, r_stride, o_stride, tiles, eps,
                    K, BM, BN, BK, SPLIT, STAGES, NORM, GATE, BIAS, RESIDUAL, PDL)),
                (_normalize, (
                    x_smem, sums, full, ready, summed, g_ptr, tiles, K, BM, BK, SPLIT, STAGES)),
                (_bring, (
                    w_desc, x_desc, w_smem, x_smem, full, free, n, tiles, K, BM, BN, BK, SPLIT, STAGES, GATE, PDL)),
            ],
            [4, 1],
            [REGISTERS_OF_NORM, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    w_smem, x_smem, sums, full, free, summed, b_ptr, r_ptr, o_ptr, part_ptr, count_ptr,
                    m, n, r_stride, o_stride, tiles, eps,
                    K, BM, BN, BK, SPLIT, STAGES, NORM, GATE, BIAS, RESIDUAL, PDL)),
                (_bring, (
                    w_desc, x_desc, w_smem, x_smem, full, free, n, tiles, K, BM, BN, BK, SPLIT, STAGES, GATE, PDL)),
            ],
            [1],
            [40],
        )  # fmt: skip


@gluon.jit
def _span(unit, K: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr):
    """A unit's chunks of K: [first, last), as even as can be."""
    CHUNKS: gl.constexpr = (K + BK - 1) // BK
    split = unit % SPLIT
    return split * CHUNKS // SPLIT, (split + 1) * CHUNKS // SPLIT


@gluon.jit
def _bring(
    w_desc, x_desc, w_smem, x_smem, full, free, n, tiles,
    K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp. The first tiles of W come before the kernel that writes x has ended."""
    unit = gl.program_id(0)
    first, last = _span(unit, K, BK, SPLIT)
    ahead = gl.minimum(last - first, STAGES)
    for i in range(ahead):
        _weights(w_desc, w_smem, full, i, unit // SPLIT, first + i, n, BM, BN, BK, GATE)
    if PDL > 0:
        _wait_for_predecessor()
        if PDL == 1:
            _let_successor_start()
    for i in range(ahead):
        async_load(x_desc, [0, (first + i) * BK], full.index(i), x_smem.index(i))
    count = ahead
    first += ahead
    for u in range(unit, tiles * SPLIT, gl.num_programs(0)):
        if u != unit:
            first, last = _span(u, K, BK, SPLIT)
        for chunk in range(first, last):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES + 1) & 1)
            _weights(w_desc, w_smem, full, stage, u // SPLIT, chunk, n, BM, BN, BK, GATE)
            async_load(x_desc, [0, chunk * BK], full.index(stage), x_smem.index(stage))
            count += 1
    if PDL == 2:
        _let_successor_start()


@gluon.jit
def _weights(
    w_desc, w_smem, full, stage, tile, chunk, n, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GATE: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if GATE else 1
    mbarrier.expect(full.index(stage), (HALVES * BN + BM) * BK * 2)
    for half in gl.static_range(HALVES):
        async_load(w_desc, [tile * BN + half * n, chunk * BK], full.index(stage), w_smem.index(stage * HALVES + half))


@gluon.jit
def _normalize(
    x_smem, sums, full, ready, summed, g_ptr, tiles,
    K: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The norm's warps: x becomes x * g where it lies; the rows' sums of squares follow each unit."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [gl.num_warps(), 1], [1, 0])
    count = 0
    units = 0
    for unit in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        first, last = _span(unit, K, BK, SPLIT)
        squares = gl.zeros([BM, BK], gl.float32, rows)
        for chunk in range(first, last):
            stage = count % STAGES
            at = chunk * BK + gl.arange(0, BK, gl.SliceLayout(0, rows))
            g = gl.load(g_ptr + at, mask=at < K, other=0.0).to(gl.float32)
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            x = x_smem.index(stage).load(rows).to(gl.float32)
            squares += x * x
            x_smem.index(stage).store((x * g[None, :]).to(x_smem.dtype))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ready.index(stage), count=1)
            count += 1
        mbarrier.wait(summed.index(1), (units + 1) & 1)
        sums.store(gl.sum(squares, axis=1))
        thread_barrier()
        mbarrier.arrive(summed.index(0), count=1)
        units += 1  # noqa: SIM113 - a kernel's loop has no `enumerate`


@gluon.jit
def _multiply(
    w_smem, x_smem, sums, full, free, summed, b_ptr, r_ptr, o_ptr, part_ptr, count_ptr,
    m, n, r_stride, o_stride, tiles, eps,
    K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    NORM: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The other warps: each group of four owns BN / groups rows of W."""
    HALVES: gl.constexpr = 2 if GATE else 1
    WARPS: gl.constexpr = gl.num_warps()
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    count = 0
    units = 0
    for unit in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        first, last = _span(unit, K, BK, SPLIT)
        acc = warpgroup_mma_init(gl.zeros([BN, BM], gl.float32, grid))
        up = acc
        for chunk in range(first, last):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            x = x_smem.index(stage).permute((1, 0))
            acc = warpgroup_mma(w_smem.index(stage * HALVES), x, acc, is_async=True)
            if GATE:
                up = warpgroup_mma(w_smem.index(stage * HALVES + 1), x, up, is_async=True)
                acc, up = warpgroup_mma_wait(2, deps=[acc, up])
                acc = warpgroup_mma_init(acc)
                up = warpgroup_mma_init(up)
            else:
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
            if chunk > first:  # the product before this one is done
                mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
            count += 1
        if GATE:
            acc, up = warpgroup_mma_wait(0, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
        if PDL > 0:
            _wait_for_predecessor()
        tile = unit // SPLIT
        if NORM:
            mbarrier.wait(summed.index(0), units & 1)
            scale = gl.rsqrt(sums.load(gl.SliceLayout(0, grid)) / K + eps)
            mbarrier.arrive(summed.index(1), count=1)
            acc *= scale[None, :]
            if GATE:
                up *= scale[None, :]
            units += 1
        if GATE:
            acc = acc / (1.0 + gl.exp(-acc)) * up
        if SPLIT == 1:
            _finish(acc, tile * BN, b_ptr, r_ptr, o_ptr, m, n, r_stride, o_stride, BM, BN, BIAS, RESIDUAL, grid)
        else:
            _join(acc, tile, unit % SPLIT, part_ptr, count_ptr, b_ptr, r_ptr, o_ptr, m, n, r_stride, o_stride,
                  BM, BN, SPLIT, BIAS, RESIDUAL, grid)  # fmt: skip


@gluon.jit
def _join(
    acc, tile, split, part_ptr, count_ptr, b_ptr, r_ptr, o_ptr, m, n, r_stride, o_stride,
    BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    grid: gl.constexpr,
):  # fmt: skip
    """Leaves this split's part, waits for the tile's others, and adds up pieces of the tile's rows."""
    PIECES: gl.constexpr = 2 if SPLIT <= 2 else 4 if SPLIT <= 4 else 8 if SPLIT <= 8 else 16
    ROWS: gl.constexpr = BN // PIECES
    THREADS: gl.constexpr = ROWS // 4 if ROWS < 128 else 32
    piece: gl.constexpr = gl.BlockedLayout([4, 1], [THREADS, 32 // THREADS], [1, gl.num_warps()], [0, 1])
    part = part_ptr + tile * (SPLIT * BN * BM)
    row = gl.arange(0, BN, gl.SliceLayout(1, grid))
    column = gl.arange(0, BM, gl.SliceLayout(0, grid))
    gl.store(part + split * (BN * BM) + column[None, :] * BN + row[:, None], acc)
    thread_barrier()
    arrived = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel") + 1
    if arrived == SPLIT:
        for p in range(PIECES):
            at = gl.arange(0, BM, gl.SliceLayout(0, piece))[None, :] * BN
            at += p * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, piece))[:, None]
            total = gl.zeros([ROWS, BM], gl.float32, piece)
            for s in gl.static_range(SPLIT):
                total += gl.load(part + s * (BN * BM) + at, cache_modifier=".cg")
            _finish(total, tile * BN + p * ROWS, b_ptr, r_ptr, o_ptr, m, n, r_stride, o_stride,
                    BM, ROWS, BIAS, RESIDUAL, piece)  # fmt: skip
        gl.store(count_ptr + tile, 0)


@gluon.jit
def _finish(
    acc, first, b_ptr, r_ptr, o_ptr, m, n, r_stride, o_stride,
    BM: gl.constexpr, ROWS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """acc: [ROWS, BM], rows of W from `first`."""
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, BM, gl.SliceLayout(0, layout))
    if BIAS:
        acc += gl.load(b_ptr + row, mask=row < n, other=0.0).to(gl.float32)[:, None]
    ok = (row[:, None] < n) & (column[None, :] < m)
    if RESIDUAL:
        acc += gl.load(r_ptr + column[None, :] * r_stride + row[:, None], mask=ok, other=0.0).to(gl.float32)
    gl.store(o_ptr + column[None, :] * o_stride + row[:, None], acc.to(o_ptr.dtype.element_ty), mask=ok)


@gluon.jit
def _wait_for_predecessor():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_successor_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
