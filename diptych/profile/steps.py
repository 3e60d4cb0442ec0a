"""A step under measurement, as it is and with its operators told apart: launched operator by operator, or as a graph,
where a host cannot launch as fast as the device works.

On a GPU a timeline of the step itself says what each operator took; where none is to be had, and on a CPU, borders
between the operators do.
"""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

import torch

from diptych.profile import timeline
from diptych.profile.borders import clock_of, graph_border
from diptych.profile.recorder import RECORDING, Clock, Drawing, GraphClock, Recorder, StreamClock, Timed
from diptych.profile.work import Operator

log = logging.getLogger("diptych.profile")

IDLE = Operator("between kernels", "other")
LAUNCHING = Operator("host (launching)", "other")
_LONGEST = 0.25  # seconds of a pause
_LEAD = 4  # steps at a timeline's start, of which it may lack events


class Repeatable(Protocol):
    device: torch.device

    def repeated(self) -> Callable[[], None]: ...
    def labelled(self, recorder: Recorder) -> AbstractContextManager[None]: ...


class Steps(Protocol):
    """plain: seconds of a step. recorded: of another, operator by operator. run, marked: enqueue a step without waiting
    for it, as it is and with a mark at every border; `drawing` is then what the marks mean. On a GPU `begin` comes
    first: a pause in which the host runs ahead."""

    captured: bool
    idle: Operator

    def plain(self) -> float: ...
    def recorded(self) -> dict[Operator, Timed]: ...
    def begin(self) -> None: ...
    def run(self) -> None: ...
    def marked(self) -> Drawing: ...


class Launched:
    """Each operator is launched by the host."""

    captured, idle = False, LAUNCHING

    def __init__(self, engine: Repeatable, step: Callable[[], None]) -> None:
        self.engine, self.run = engine, step
        self.clock = clock_of(engine.device)
        self.recorder = Recorder(self.clock)
        if isinstance(self.clock, StreamClock):
            # Recording makes the host slower; a device that catches up with it would show the host's time.
            self.clock.pause = min(_LONGEST, 3 * _launching(step) + 0.005)

    def begin(self) -> None:
        self.clock.begin()

    def plain(self) -> float:
        self.begin()
        return _between_marks(self.clock, self.run)

    def recorded(self) -> dict[Operator, Timed]:
        with self.engine.labelled(self.recorder), self.recorder.step():
            self.run()
        return self.recorder.steps[-1]

    def marked(self) -> Drawing:
        marker = Recorder(_Marks())
        with self.engine.labelled(marker), marker.drawn():
            self.run()
        return marker.drawing


class Captured:
    """The same step as graphs: as it is, with marks and, when asked for, with timed borders. All do `again`."""

    captured, idle = True, IDLE

    def __init__(self, engine: Repeatable, again: Callable[[], None]) -> None:
        again()  # kernels are loaded and scratch exists before anything is captured
        self.engine, self.again = engine, again
        self.bare = _graph(again)
        self.clock = StreamClock(graph_border(), pause=0.002)
        self._marked: tuple[torch.cuda.CUDAGraph, Drawing] | None = None
        self._bordered: tuple[torch.cuda.CUDAGraph, Recorder] | None = None
        self.bare.replay()
        torch.cuda.synchronize()

    def begin(self) -> None:
        self.clock.begin()

    def run(self) -> None:
        self.bare.replay()

    def plain(self) -> float:
        self.begin()
        return _between_marks(self.clock, self.run)

    def marked(self) -> Drawing:
        if self._marked is None:
            graph, recorder = self._drawn(Recorder(_Marks()))
            self._marked = graph, recorder.drawing
        self._marked[0].replay()
        return self._marked[1]

    def recorded(self) -> dict[Operator, Timed]:
        if self._bordered is None:
            self._bordered = self._drawn(Recorder(GraphClock(self.clock.border)))
            self._bordered[0].replay()
        graph, recorder = self._bordered
        recorder.clock.begin()
        graph.replay()
        return recorder.resolve()

    def _drawn(self, recorder: Recorder) -> tuple[torch.cuda.CUDAGraph, Recorder]:
        def step() -> None:
            with recorder.drawn():
                self.again()

        with self.engine.labelled(recorder):
            return _graph(step, self.bare), recorder


class _Marks:
    """A clock whose marks are kernels that a timeline finds again; it tells no time."""

    on_host = False

    def begin(self) -> None:
        pass

    def cost(self, piece: float) -> float:
        return 0.0

    def mark(self) -> None:
        timeline.mark()

    def seconds(self, marks: list[None]) -> list[float]:
        raise NotImplementedError("marks are read in a timeline")


def _between_marks(clock: Clock, run: Callable[[], None]) -> float:
    marks = [clock.mark()]
    run()
    (seconds,) = clock.seconds([*marks, clock.mark()])
    return seconds


def _graph(step: Callable[[], None], beside: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    """beside: a graph whose memory this one may use, as they never run at once."""
    graph = torch.cuda.CUDAGraph()
    pool = None if beside is None else beside.pool()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph


def _launching(step: Callable[[], None]) -> float:
    """Seconds that a host takes to launch a step's operators one by one."""
    torch.cuda.synchronize()
    started = perf_counter()
    step()
    return perf_counter() - started


def steps_of(engine: Repeatable, step: Callable[[], None]) -> Steps:
    """Captured on a GPU. A step that cannot be (one that asks the device for a number on its way) is launched, and the
    result says so."""
    if engine.device.type != "cuda":
        return Launched(engine, step)
    try:
        _waits_for_nothing(step)
        return Captured(engine, step)
    except RuntimeError as error:
        log.warning("the step cannot be captured and is launched operator by operator: %s", error)
        torch.cuda.synchronize()
    return Launched(engine, step)


def _waits_for_nothing(step: Callable[[], None]) -> None:
    """Raises `RuntimeError` where the host waits for the device: found in a capture it would spoil that."""
    step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is called a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@dataclass(frozen=True)
class Measured:
    """operators: of one step, or the mean of several. step: seconds of a step without recording, as those of the
    operators were chosen; plain: of all such steps. recorded: seconds of a step while it is recorded. note: why it was
    not measured in a better way."""

    method: str
    operators: dict[Operator, Timed]
    step: float
    plain: tuple[float, ...]
    recorded: float
    note: str = ""
    details: dict[str, int] = field(default_factory=dict)


def measure(steps: Steps, rounds: int, device: torch.device) -> Measured:
    if device.type != "cuda":
        return by_borders(steps, rounds)
    try:
        return by_timeline(steps, rounds)
    except timeline.Untold as error:
        log.warning("no timeline, so borders: %s", error)
        torch.cuda.synchronize()
        return replace(by_borders(steps, rounds), note=f"no timeline: {error}")


def by_borders(steps: Steps, rounds: int) -> Measured:
    """Plain and recorded by turns, so that what else happens on the machine meets both. Of each the fastest is taken:
    on a machine that others use it is the one that they disturbed least."""
    plain, recorded = zip(*((steps.plain(), steps.recorded()) for _ in range(rounds)), strict=True)
    operators = min(recorded, key=lambda step: sum(timed.seconds for o, timed in step.items() if o != RECORDING))
    whole = sum(timed.seconds for timed in operators.values())
    told = {operator: timed for operator, timed in operators.items() if operator != RECORDING}
    return Measured("borders", told, min(plain), plain, whole)


def by_timeline(steps: Steps, rounds: int) -> Measured:
    """Raises `timeline.Untold`."""
    steps.begin()
    drawing = steps.marked()  # a graph of it is captured before anybody watches
    plain = [steps.plain() for _ in range(rounds)]
    kernels: list[timeline.Kernel] = []
    with timeline.traced(kernels):
        recorded = [steps.plain() for _ in range(_LEAD + rounds)]
        for _ in range(_LEAD):
            steps.begin()
            steps.marked()
    plain += [steps.plain() for _ in range(rounds)]
    found = timeline.account(kernels, drawing.pieces, steps.idle)
    operators = {operator: Timed(0, found.operators.get(operator, 0.0)) for operator in found.operators}
    for operator, work in drawing.called:
        timed = operators.setdefault(operator, Timed())
        timed.calls, timed.work = timed.calls + 1, timed.work + work
    return Measured(
        "timeline", operators, statistics.median(plain), tuple(plain), statistics.median(recorded[_LEAD:]),
        details={"steps": found.steps, "broken": found.broken, "kernels": found.kernels},
    )  # fmt: skip
