"""The first rank's side of a group: every step that it launches is told to the other ranks before it runs here.

Wraps the rank's own runner and looks like one, so that the engine's loop is the same with one rank and with several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from threading import Thread

import msgspec

from diptych.workers.channel import frame
from diptych.workers.parallel.orders import Line, Opened, RowOrder, StepOrder
from diptych.workers.runner import Launch, Launched, Runner
from diptych.workers.scheduler import Row, Step
from diptych.workers.sequence import Sequence, State
from diptych.workers.transfer.events import Event


class Followers:
    """All other ranks. `order` packs a message once and sends it to each."""

    def __init__(self, lines: Seq[Line]) -> None:
        self.lines = tuple(lines)
        self.ahead = 0  # steps launched and not committed

    def order(self, message: msgspec.Struct) -> None:
        data = frame(message)
        for line in self.lines:
            line.send_frame(data)

    def listen(self, line: Line, post: Callable[[Event], None]) -> None:
        """Passes what a rank's links report on to `post`, from a thread of its own, until the rank is gone."""

        def run() -> None:
            with contextlib.suppress(EOFError):
                while True:
                    post(line.told())

        Thread(target=run, name="follower-reports", daemon=True).start()


class _Known:
    """What the other ranks know of a sequence."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.blocks: list[int] = []


class LeadingRunner:
    """A `Runner` whose steps all ranks run. A step that fails leaves them out of step: the group must end then
    (`alone`)."""

    alone = False

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self.runner, self.followers = runner, followers
        self.decoder, self.cache = runner.decoder, runner.cache
        self.overlap = runner.overlap
        self._known: dict[Sequence, _Known] = {}
        self._handles = 0
        self._drawn: list[int] = []

    def launch(self, step: Step) -> Launched:
        self.followers.order(self._order(step))
        launched = self.runner.launch(step)
        self.followers.ahead += 1
        return _Followed(self, launched)

    def committed(self, launch: Launch) -> None:
        self.followers.ahead -= 1
        self._drawn += [drawn.token for drawn in launch.drawn]

    def _order(self, step: Step) -> StepOrder:
        closed = [seq for seq in self._known if seq.state is State.ENDED and not seq.in_flight]
        gone = tuple(self._known.pop(seq).handle for seq in closed)
        opened: list[Opened] = []
        rows = tuple(self._row(row, opened) for row in step.rows)
        drawn, self._drawn = tuple(self._drawn), []
        return StepOrder(step.number, self.followers.ahead, drawn, tuple(opened), gone, rows)

    def _row(self, row: Row, opened: list[Opened]) -> RowOrder:
        seq = row.seq
        known = self._known.get(seq)
        if known is None:
            self._handles += 1
            known = self._known[seq] = _Known(self._handles)
            opened.append(Opened(known.handle, seq.request, tuple(seq.tokens[seq.prompt_len :])))
        keep, size = len(known.blocks), len(seq.blocks)
        if seq.blocks == known.blocks:  # nearly always, and without a copy
            return RowOrder(known.handle, row.start, row.count, row.sample, keep, ())
        if seq.blocks[:keep] != known.blocks:
            keep = next((at for at in range(min(keep, size)) if seq.blocks[at] != known.blocks[at]), min(keep, size))
        added = seq.blocks[keep:]
        known.blocks[keep:] = added
        return RowOrder(known.handle, row.start, row.count, row.sample, keep, tuple(added))


class _Followed:
    """A launched step of a group."""

    def __init__(self, owner: LeadingRunner, launched: Launched) -> None:
        self._owner, self._launched = owner, launched

    @property
    def step(self) -> Step:
        return self._launched.step

    def result(self) -> Launch:
        launch = self._launched.result()
        self._owner.committed(launch)
        return launch
