"""Times a step's operators: a timeline cut at the border of every operator, each piece belonging to the innermost one.

Every operator's time is measured by its own two borders, the time between operators too; nothing is a remainder. What a
border itself costs is measured as well, and belongs to no operator. On a GPU the borders are events in the stream, and
a pause before the step lets the host run ahead, so that the times are the device's and not the launching's; in a
captured graph they are nodes of it, recorded anew by each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import torch

from diptych.profile.work import Operator, Work

NONE = Work()
BETWEEN = Operator("between operators", "other")
RECORDING = Operator("recording itself", "other")
_CYCLES = 2e9  # of a GPU in a second, so that its pauses are about as long as asked


class Clock(Protocol):
    """on_host: its time passes while a border is drawn."""

    on_host: bool

    def begin(self) -> None: ...
    def cost(self, piece: float) -> float:
        """Of the seconds between two marks, those that the marks themselves took on the device."""
        ...

    def mark(self) -> Any: ...
    def seconds(self, marks: list[Any]) -> list[float]:
        """Between consecutive marks."""
        ...


class HostClock:
    on_host = True

    def begin(self) -> None:
        pass

    def cost(self, piece: float) -> float:
        return 0.0

    def mark(self) -> float:
        return perf_counter()

    def seconds(self, marks: list[float]) -> list[float]:
        return [b - a for a, b in pairwise(marks)]


@dataclass(frozen=True)
class Border:
    """Seconds of a device. empty: from a mark to the next with nothing between. around: what two marks add to the time
    of the work between them, against the same work without marks."""

    empty: float
    around: float

    def cost(self, piece: float) -> float:
        """A piece as short as an empty one holds nothing."""
        return piece if piece <= 1.2 * self.empty else min(piece, self.around)


class StreamClock:
    """CUDA events in the current stream. pause: seconds that the device waits at first, longer than the host takes to
    launch a step. border: what marks cost (`diptych.profile.borders`)."""

    on_host = False

    def __init__(self, border: Border, pause: float = 0.03) -> None:
        self.border, self.pause = border, pause

    def begin(self) -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(int(self.pause * _CYCLES))  # type: ignore[no-untyped-call]

    def cost(self, piece: float) -> float:
        return self.border.cost(piece)

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, marks: list[Any]) -> list[float]:
        marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


class GraphClock(StreamClock):
    """Events that are nodes of a captured graph: a mark is drawn once, and every replay records it."""

    def __init__(self, border: Border) -> None:
        super().__init__(border, pause=0.002)

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, marks: list[Any]) -> list[float]:
        torch.cuda.synchronize()  # an event that this replay has not reached yet still shows the replay before
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


@dataclass
class Timed:
    """What one operator did in one step."""

    calls: int = 0
    seconds: float = 0.0
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Drawing:
    """What a step's borders mean. pieces: whose the time between two marks is. called: operators in order, with what
    each had to do."""

    pieces: tuple[Operator, ...]
    called: tuple[tuple[Operator, Work], ...]


class Recorder:
    """`with recorder.step(): …` around each step, `with recorder.inside(operator, work): …` around each operator."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[dict[Operator, Timed]] = []
        self._marks: list[Any] = []
        self._owners: list[Operator] = []
        self._stack: list[Operator] = []
        self._called: list[tuple[Operator, Work]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        self.clock.begin()
        with self.drawn():
            yield
        self.resolve()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """A step's borders without their times, which `resolve` reads: of a captured step after each replay."""
        self._stack, self._owners, self._called = [BETWEEN], [], []
        self._marks = [self.clock.mark()]
        yield
        self._arrive()
        self._stack = []

    @property
    def drawing(self) -> Drawing:
        """Of the step drawn last."""
        return Drawing(tuple(self._owners), tuple(self._called))

    def resolve(self) -> dict[Operator, Timed]:
        """The times of the borders drawn last; also kept in `steps`."""
        self.steps.append(self._resolve())
        return self.steps[-1]

    def enter(self, operator: Operator, work: Work = NONE) -> None:
        """Outside of a step nothing is recorded."""
        if self._stack:
            self._arrive()
            self._enter(operator, work)

    def enter_as(self, describe: Callable[..., tuple[Operator, Work]], *args: Any, **named: Any) -> None:
        """`enter` what `describe` says of the arguments; finding that out is recording's time too."""
        if self._stack:
            self._arrive()
            self._enter(*describe(*args, **named))

    def _enter(self, operator: Operator, work: Work) -> None:
        self._stack.append(operator)
        self._called.append((operator, work))
        self._depart()

    def leave(self) -> None:
        if self._stack:
            self._arrive()
            self._stack.pop()
            self._depart()

    @contextmanager
    def inside(self, operator: Operator, work: Work = NONE) -> Iterator[None]:
        self.enter(operator, work)
        try:
            yield
        finally:
            self.leave()

    @property
    def innermost(self) -> str:
        """The name of the operator that runs now."""
        return self._stack[-1].name if self._stack else ""

    def wrap(self, function: Callable[..., Any], describe: Callable[..., tuple[Operator, Work]]) -> Callable[..., Any]:
        """`function`, recorded as what `describe` says of its arguments."""

        def recorded(*args: Any, **named: Any) -> Any:
            self.enter_as(describe, *args, **named)
            try:
                return function(*args, **named)
            finally:
                self.leave()

        return recorded

    def _arrive(self) -> None:
        """The innermost operator's time ends here."""
        self._marks.append(self.clock.mark())
        self._owners.append(self._stack[-1])

    def _depart(self) -> None:
        if self.clock.on_host:
            self._marks.append(self.clock.mark())
            self._owners.append(RECORDING)

    def _resolve(self) -> dict[Operator, Timed]:
        found: dict[Operator, Timed] = {BETWEEN: Timed(calls=1), RECORDING: Timed()}
        for operator, work in self._called:
            timed = found.setdefault(operator, Timed())
            timed.calls += 1
            timed.work += work
        for operator, seconds in zip(self._owners, self.clock.seconds(self._marks), strict=True):
            own = self.clock.cost(seconds)
            found[operator].seconds += seconds - own
            found[RECORDING].seconds += own
        return found


@contextmanager
def replaced(places: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Puts functions in the place of others (module or object, name, new one) while the block runs."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    try:
        for owner, name, function in places:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            if function is None:
                delattr(owner, name)  # a method: kept in its object it would hold the object, weights and all
            else:
                setattr(owner, name, function)
