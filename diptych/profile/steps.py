"""A step under measurement, by turns as it is and with borders between its operators: launched operator by operator, or
as a graph, where a host cannot launch as fast as the device works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Protocol

import torch

from diptych.profile.borders import clock_of, graph_border
from diptych.profile.recorder import GraphClock, Recorder, StreamClock, Timed
from diptych.profile.work import Operator

log = logging.getLogger("diptych.profile")

_LONGEST = 0.25  # seconds of a pause


class Repeatable(Protocol):
    device: torch.device

    def repeated(self) -> Callable[[], None]: ...
    def labelled(self, recorder: Recorder) -> AbstractContextManager[None]: ...


class Steps(Protocol):
    """plain: seconds of a step. recorded: of another, operator by operator."""

    captured: bool

    def plain(self) -> float: ...
    def recorded(self) -> dict[Operator, Timed]: ...


class Launched:
    """Each operator is launched by the host."""

    captured = False

    def __init__(self, engine: Repeatable, step: Callable[[], None]) -> None:
        self.engine, self.step = engine, step
        self.clock = clock_of(engine.device)
        self.recorder = Recorder(self.clock)
        if isinstance(self.clock, StreamClock):
            torch.cuda.synchronize()
            started = perf_counter()
            step()
            # Recording makes the host slower; a device that catches up with it would show the host's time.
            self.clock.pause = min(_LONGEST, 3 * (perf_counter() - started) + 0.005)

    def plain(self) -> float:
        self.clock.begin()
        marks = [self.clock.mark()]
        self.step()
        marks.append(self.clock.mark())
        (seconds,) = self.clock.seconds(marks)
        return seconds

    def recorded(self) -> dict[Operator, Timed]:
        with self.engine.labelled(self.recorder), self.recorder.step():
            self.step()
        return self.recorder.steps[-1]


class Captured:
    """The same step as two graphs, one of them with borders: both do `again`."""

    captured = True

    def __init__(self, engine: Repeatable, again: Callable[[], None]) -> None:
        again()  # kernels are loaded and scratch exists before anything is captured
        torch.cuda.synchronize()
        self.clock = GraphClock(graph_border())
        self.stream = StreamClock(self.clock.border, self.clock.pause)
        self.recorder = Recorder(self.clock)
        self.bare = _graph(again)
        with engine.labelled(self.recorder):
            self.bordered = _graph(self._drawn(again))
        self.bare.replay()
        self.bordered.replay()
        torch.cuda.synchronize()

    def _drawn(self, again: Callable[[], None]) -> Callable[[], None]:
        def step() -> None:
            with self.recorder.drawn():
                again()

        return step

    def plain(self) -> float:
        self.stream.begin()
        marks = [self.stream.mark()]
        self.bare.replay()
        marks.append(self.stream.mark())
        (seconds,) = self.stream.seconds(marks)
        return seconds

    def recorded(self) -> dict[Operator, Timed]:
        self.clock.begin()
        self.bordered.replay()
        return self.recorder.resolve()


def _graph(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


def decode_steps(engine: Repeatable, decode: Callable[[], None]) -> Steps:
    """Captured on a GPU, where a decode step is shorter than its launching. An engine that cannot be captured (one that
    asks the device for a number on its way) is launched, and the result says so. decode: the step of a CPU."""
    if engine.device.type != "cuda":
        return Launched(engine, decode)
    again = engine.repeated()
    try:
        return Captured(engine, again)
    except RuntimeError as error:
        log.warning("decode cannot be captured and is launched operator by operator: %s", error)
        torch.cuda.synchronize()
    return Launched(engine, again)


def by_turns(steps: Steps, rounds: int) -> Iterator[tuple[float, dict[Operator, Timed]]]:
    """Plain and recorded, so that what else happens on the machine meets both."""
    for _ in range(rounds):
        yield steps.plain(), steps.recorded()
