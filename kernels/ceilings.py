"""What the machine at hand can do at most, measured in the same run as everything that is compared with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from diptych.kernels.linear import linear, pack_weight
from diptych.kernels.timing import Replay

_TRIES = 9


@dataclass(frozen=True)
class Ceilings:
    """read: bytes a second, reading only. flops: of a large product in the dtype of the weights."""

    read: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which the arithmetic is the wall."""
        return self.flops / self.read

    def floor(self, flops: float, moved: float) -> float:
        """Seconds that work of so many FLOPs and bytes takes at least."""
        return max(flops / self.flops, moved / self.read)


def ceilings(device: torch.device | str, dtype: torch.dtype) -> Ceilings:
    if torch.device(device).type == "cpu":
        return Ceilings(_cpu_read(), _cpu_products(dtype))
    return Ceilings(read_bandwidth(), product_rate(8192, 8192, 8192, dtype))


def _cpu_read(megabytes: int = 128) -> float:
    """The fastest of several: a ceiling is what nobody disturbed. A sum reads once and needs little arithmetic."""
    x = torch.ones(megabytes << 18)
    return x.nbytes / min(_seconds(lambda: x.sum()) for _ in range(_TRIES))


def _cpu_products(dtype: torch.dtype, size: int = 1024) -> float:
    """By the library and by the packed form that the decoder uses, whichever is faster."""
    a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    forms = (b, pack_weight(b))
    return 2 * size**3 / min(_seconds(partial(linear, a, form)) for form in forms for _ in range(_TRIES))


def _seconds(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


def read_bandwidth(gigabytes: int = 8) -> float:
    """Of a GPU, bytes a second, reading only. 4.60e12 was seen on an H200."""
    from diptych.kernels.triton.read import read_bandwidth as measure

    return float(measure(gigabytes))


def copy_bandwidth(gigabytes: int = 4) -> float:
    """Bytes a second, read and written together. Not captured: a graph's copies go to the copy engine (2.75e12)."""
    x = torch.randint(-(2**31), 2**31, (gigabytes << 28,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return 2 * x.numel() * 4 / (statistics.median(times) * 1e-3)


def product_rate(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP a second of the library's product of these sizes on a GPU, on random data."""
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn(n, k, device="cuda", dtype=dtype)
    return 2 * m * n * k / (Replay([lambda: torch.nn.functional.linear(a, b)] * 4).time(7).us * 1e-6)
