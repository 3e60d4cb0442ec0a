"""Reading and nothing else: the kernel behind the read-only ceiling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.kernels.timing import Replay

TILE_BYTES = 16 << 10
BLOCKS = 65_536


@triton.jit
def read_kernel(x_ptr, sink_ptr, tiles, TILE: tl.constexpr):
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
    replay = Replay([lambda: read_kernel[(BLOCKS,)](x, sink, tiles, TILE=TILE_BYTES // 4, num_warps=4)])
    return x.numel() * 4 / (replay.time(9).us * 1e-6)
