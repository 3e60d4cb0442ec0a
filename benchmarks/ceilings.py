"""What the GPU at hand can do at most, measured in the same run as everything that is compared with it."""

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl

from diptych.kernels.timing import Replay

TILE_BYTES = 16 << 10
BLOCKS = 65_536


@triton.jit
def _read_kernel(x_ptr, sink_ptr, tiles, TILE: tl.constexpr):
    """Sums tiles of 16 KiB; only a sum that cannot occur is stored, so nothing is written and nothing left out."""
    at = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=3):
        total += tl.load(x_ptr + tile.to(tl.int64) * TILE + at)
    result = tl.sum(total, axis=0)
    if result == 0x7FFFFFF1:
        tl.store(sink_ptr, result)


def read_bandwidth(gigabytes: int = 8) -> float:
    """Bytes a second, reading only. 4.60e12 was seen on an H200."""
    x = torch.randint(-(2**31), 2**31, (gigabytes << 28,), dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    tiles = x.numel() * 4 // TILE_BYTES
    replay = Replay([lambda: _read_kernel[(BLOCKS,)](x, sink, tiles, TILE=TILE_BYTES // 4, num_warps=4)])
    return x.numel() * 4 / (replay.time(9).us * 1e-6)


def copy_bandwidth(gigabytes: int = 4) -> float:
    """Bytes a second, read and written together. Not captured: a graph's copies go to the copy engine (2.75e12)."""
    x = torch.randint(-(2**31), 2**31, (gigabytes << 28,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * x.numel() * 4 / (statistics.median(times) * 1e-3)


def product_rate(m: int, n: int, k: int) -> float:
    """FLOP a second of the library's bf16 product of these sizes, on random data."""
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    return 2 * m * n * k / (Replay([lambda: torch.nn.functional.linear(a, b)] * 4).time(7).us * 1e-6)
