"""Memory over time, and what the configuration says it must be.

Measured is the process's resident memory (weights that are mapped from their file count as soon as they are read), or
what the allocator gave out on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from diptych.workers.model.config import ModelConfig

_STATUS = Path("/proc/self/status")


def used(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def tidy(device: torch.device) -> None:
    """What nobody uses any more is given back, so that it is not taken for somebody's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)


class MemoryCurve:
    """`with MemoryCurve(device, baseline) as curve`: (seconds, bytes above the baseline), sampled by a thread."""

    def __init__(self, device: torch.device, baseline: int, every: float = 0.004) -> None:
        self.device, self.baseline, self.every = device, baseline, every
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> MemoryCurve:
        self._done = threading.Event()
        self.start = perf_counter()
        self._thread = threading.Thread(target=self._run, name="memory-curve", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.is_set():
            self.samples.append((perf_counter() - self.start, used(self.device) - self.baseline))
            self._done.wait(self.every)

    @property
    def peak(self) -> int:
        seen = max(size for _, size in self.samples)
        if self.device.type == "cuda":
            return max(seen, torch.cuda.max_memory_allocated(self.device) - self.baseline)
        return seen


@dataclass(frozen=True)
class Sizes:
    """Bytes. weights: of all parameters. held: what of it is in memory, with copies in other forms. cache: keys and
    values. workspace: what a step needs on its way."""

    weights: int
    held: int
    cache: int
    workspace: int

    @property
    def peak(self) -> int:
        return self.held + self.cache + self.workspace


def workspace(config: ModelConfig, tokens: int, sequences: int, item: int) -> int:
    """The largest step's activations: the residual stream twice, and either attention's rows (qkv, the same rotated,
    the result) or the feed-forward's (gate and up, their product), beside the logits of each sequence's last token."""
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_dim + config.heads * config.head_dim
    attention += (config.heads + 2 * config.kv_heads) * config.head_dim
    width = config.width
    if config.moe is not None:
        width = config.moe.top_k * (config.moe.width + config.hidden)
    inside = max(attention, 3 * width)
    return tokens * (2 * config.hidden + inside) * item + sequences * config.vocab * 4
