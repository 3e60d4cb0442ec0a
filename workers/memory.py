"""How many blocks the KV cache gets: what is left on the device after weights, graphs and workspace, measured.

Knows sizes only; which tokens go where is the pool's matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from diptych.contract.errors import CapacityExceeded
from diptych.workers.cache import KVLayout
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.parameters import cut, parameters
from diptych.workers.parallel.layout import WHOLE, Shard
from diptych.workers.settings import WorkerSettings

log = logging.getLogger("diptych.memory")

CPU_CACHE_BYTES = 1 << 30
SLACK = 256 << 20  # allocator's rounding, library handles that come with the first call


def weight_bytes(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> int:
    """Bytes of all parameters as the shard holds them, from the configuration alone."""
    total = 0
    for parameter in parameters(config):
        count = 1
        for size in cut(parameter, shard).shape:
            count *= size
        total += count
    return total * dtype.itemsize


def refuse_what_does_not_fit(
    settings: WorkerSettings, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE
) -> None:
    """Before anything is loaded on a GPU: raises `CapacityExceeded` with the numbers."""
    free, total = torch.cuda.mem_get_info(torch.device(settings.device))
    need = weight_bytes(config, dtype, shard)
    room = min(free, int(total * settings.memory_share))
    if need + SLACK > room:
        raise CapacityExceeded(
            f"The model is {need / 2**30:.1f} GiB of weights in {dtype}; {settings.device} has {room / 2**30:.1f} for"
            f" this worker ({free / 2**30:.1f} free of {total / 2**30:.1f}, memory_share {settings.memory_share})."
        )


def cache_blocks(settings: WorkerSettings, layout: KVLayout, rehearse: Callable[[], None] | None = None) -> int:
    """As set (`cache_blocks`, then `cache_bytes`), else 1 GiB on a CPU and on a GPU what `rehearse` leaves.

    rehearse: runs once what needs the most workspace, be it prefill or decode, so that this can be measured.
    """
    if settings.cache_blocks:
        return settings.cache_blocks
    room = settings.cache_bytes
    if not room:
        room = CPU_CACHE_BYTES if rehearse is None else _left(settings, rehearse)
    blocks = room // layout.block_bytes
    if blocks < 2:
        raise CapacityExceeded(
            f"There is room for {max(room, 0)} bytes of KV cache, which hold {max(blocks, 0)} blocks of"
            f" {layout.block_bytes} bytes; raise cache_bytes or memory_share."
        )
    return blocks


def _left(settings: WorkerSettings, rehearse: Callable[[], None]) -> int:
    device = torch.device(settings.device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rehearse()
    torch.cuda.synchronize(device)
    workspace = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    # The share counts what this engine holds already; nobody may take more than what is free.
    room = min(int(total * settings.memory_share) - mine, free) - 2 * workspace - SLACK
    log.warning(
        "memory of %s: %.2f GiB after weights, %.2f GiB workspace (twice, for captured graphs), %.2f GiB for the cache",
        device,
        mine / 2**30,
        workspace / 2**30,
        room / 2**30,
    )
    return room
