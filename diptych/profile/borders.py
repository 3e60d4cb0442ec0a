"""What drawing a border costs on a GPU, measured: a chain of tiny kernels with borders between them and without."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from diptych.profile.recorder import Border, Clock, GraphClock, HostClock, StreamClock

_CHAIN, _TRIES = 128, 7
_FREE = Border(0.0, 0.0)


def clock_of(device: torch.device) -> Clock:
    """For steps that are launched one operator after the other."""
    return StreamClock(stream_border()) if device.type == "cuda" else HostClock()


@cache
def stream_border() -> Border:
    """Of events between launches."""
    clock = StreamClock(_FREE)
    return border(lambda chain: _launched(clock, chain))


@cache
def graph_border() -> Border:
    """Of events in a captured graph."""
    clock = GraphClock(_FREE)
    return border(lambda chain: _replayed(clock, chain))


Mark = Callable[[], Any]
Chain = Callable[[Mark], list[Any]]


def border(run: Callable[[Chain], list[list[float]]]) -> Border:
    """run: does a chain of work with marks several times and returns the seconds between the marks of each."""
    x = torch.zeros(1024, device="cuda" if torch.cuda.is_available() else "cpu")

    def bare(mark: Mark) -> list[Any]:
        marks = [mark()]
        for _ in range(_CHAIN):
            x.add_(1)
        return [*marks, mark()]

    def bordered(mark: Mark) -> list[Any]:
        marks = [mark()]
        for _ in range(_CHAIN):
            x.add_(1)
            marks += [mark(), mark()]
        return marks

    alone = min(total for (total,) in run(bare)) / _CHAIN
    found = run(bordered)
    works, empties = ([statistics.median(pieces[first::2]) for pieces in found] for first in (0, 1))
    return Border(empty=min(empties), around=max(0.0, min(works) - alone))


def _launched(clock: Clock, chain: Chain) -> list[list[float]]:
    chain(clock.mark)  # the kernel is loaded
    found = []
    for _ in range(_TRIES):
        clock.begin()
        found.append(clock.seconds(chain(clock.mark)))
    return found


def _replayed(clock: GraphClock, chain: Chain) -> list[list[float]]:
    chain(lambda: None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        marks = chain(clock.mark)
    found = []
    for _ in range(_TRIES):
        clock.begin()
        graph.replay()
        found.append(clock.seconds(marks))
    return found
