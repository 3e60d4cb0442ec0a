"""Time of GPU work: calls captured into one graph, inputs rotated past L2 by the caller, medians of replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timed:
    """us: median time of one call. spread: half the distance between the quartiles, over the median."""

    us: float
    spread: float


class Replay:
    """`calls` in one captured graph; the first is run before, so that kernels are compiled and scratch exists."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.count = len(calls)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()

    def once(self) -> float:
        """Microseconds a call, of one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.count

    def time(self, replays: int = 15) -> Timed:
        self.once()
        return summary([self.once() for _ in range(replays)])


def summary(samples: Sequence[float]) -> Timed:
    low, middle, high = statistics.quantiles(samples, n=4)
    return Timed(middle, (high - low) / 2 / middle)


def paired(a: Replay, b: Replay, rounds: int = 15) -> tuple[Timed, Timed, float, tuple[float, float]]:
    """a and b in turns. Returns both times, the median of a's time over b's and the middle half of those ratios."""
    a.once(), b.once()
    times = [(a.once(), b.once()) for _ in range(rounds)]
    ratios = [x / y for x, y in times]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return summary([x for x, _ in times]), summary([y for _, y in times]), middle, (low, high)
