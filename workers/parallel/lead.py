"""The first rank's side of a group: every step that it launches is told to the other ranks before it runs here.

Wraps the rank's own runner and looks like one, so that the engine's loop is the same with one rank and with several. A
step is cut into one part a data rank, perhaps empty; the first of the ranks that share another data rank than this
one's answers with what they drew.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from threading import Thread
from time import monotonic_ns

import msgspec

from diptych.contract.errors import Internal
from diptych.workers.channel import frame
from diptych.workers.parallel.layout import Grid
from diptych.workers.parallel.orders import Answer, CommitOrder, Line, Opened, RowOrder, StepOrder
from diptych.workers.runner import Drawn, Launch, Launched, Runner
from diptych.workers.scheduler import Row, Step
from diptych.workers.sequence import Sequence, State
from diptych.workers.transfer.events import Event


class Followers:
    """All other ranks, in order. `order` packs a message once and sends it to each that it concerns."""

    def __init__(self, lines: Seq[Line], grid: Grid | None = None, limit: float = 60.0) -> None:
        """grid: of all ranks, the first included; without one they share one data rank. limit: seconds to wait for an
        answer."""
        self.lines = tuple(lines)
        self.grid = grid or Grid(1, 1 + len(self.lines))
        self.limit = limit
        self.ahead = 0  # steps launched and not committed
        self._answers: dict[int, queue.SimpleQueue[Answer | None]] = {
            data_rank: queue.SimpleQueue() for data_rank in range(1, self.grid.data)
        }

    def order(self, message: msgspec.Struct, data_rank: int | None = None) -> None:
        """To all other ranks, or to those of them that share a data rank."""
        ranks = range(1, self.grid.ranks) if data_rank is None else self.grid.members(data_rank)
        lines = [self.lines[rank - 1] for rank in ranks if rank]
        if lines:
            data = frame(message)
            for line in lines:
                line.send_frame(data)

    def listen(self, rank: int, post: Callable[[Event], None]) -> None:
        """From a thread of its own, until the rank is gone: passes what its links report on to `post`, and keeps what
        it answers for `answer`."""
        line, (data_rank, _) = self.lines[rank - 1], self.grid.place(rank)

        def run() -> None:
            try:
                while True:
                    told = line.told()
                    if isinstance(told, Answer):
                        self._answers[data_rank].put(told)
                    else:
                        post(told.event)
            except EOFError:
                if data_rank in self._answers:
                    self._answers[data_rank].put(None)

        Thread(target=run, name="follower-reports", daemon=True).start()

    def answer(self, data_rank: int, number: int) -> Answer:
        """What another data rank drew in a step; waits for it. Raises `Internal` when it does not come."""
        try:
            found = self._answers[data_rank].get(timeout=self.limit)
        except queue.Empty:
            raise Internal(f"Data rank {data_rank} did not answer step {number} in {self.limit:.0f} s.") from None
        if found is None:
            raise Internal(f"Data rank {data_rank} is gone.")
        if found.number != number:
            raise Internal(f"Data rank {data_rank} answered step {found.number} where {number} was due.")
        return found


@dataclass
class _Known:
    """What the other ranks know of a sequence."""

    handle: int
    data_rank: int
    blocks: list[int] = field(default_factory=list)


@dataclass
class _Changes:
    """What a data rank's next order tells beside its rows."""

    drawn: list[int] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)


class LeadingRunner:
    """A `Runner` whose steps all ranks run. A step that fails leaves them out of step: the group must end then
    (`alone`)."""

    alone = False

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self.runner, self.followers = runner, followers
        self.decoder, self.cache = runner.decoder, runner.cache
        self.overlap, self.softmax_counts = runner.overlap, runner.softmax_counts
        self._known: dict[Sequence, _Known] = {}
        self._handles = 0
        self._changes = [_Changes() for _ in range(followers.grid.data)]
        self._left = 0  # launched steps that the others will leave uncommitted, as told so far

    def launch(self, step: Step) -> Launched:
        parts = self._cut(step.rows)
        for seq in [seq for seq in self._known if seq.state is State.ENDED and not seq.in_flight]:
            self._close(seq)
        for data_rank, rows in enumerate(parts):
            for row in rows:
                self._open(row.seq, data_rank)
        for data_rank, rows in enumerate(parts):
            self.followers.order(self._order(step.number, data_rank, rows), data_rank)
        launched = self.runner.launch(step if len(parts) == 1 else Step(step.number, parts[0]))
        self.followers.ahead += 1
        self._left = min(self._left + 1, self.overlap)
        return _Followed(self, step, launched, parts)

    def _cut(self, rows: tuple[Row, ...]) -> list[tuple[Row, ...]]:
        count = len(self._changes)
        return [rows] if count == 1 else [tuple(r for r in rows if r.seq.data_rank == n) for n in range(count)]

    def expect_answers(self) -> None:
        """Before the oldest launched step's are waited for: the others must commit it."""
        left = self.followers.ahead - 1
        if self._left > left:
            for data_rank in range(1, len(self._changes)):
                self.followers.order(CommitOrder(left), data_rank)
            self._left = left

    def committed(self, drawn: Seq[Seq[Drawn]]) -> None:
        """drawn: by data rank."""
        self.followers.ahead -= 1
        for changes, own in zip(self._changes, drawn, strict=True):
            changes.drawn += [one.token for one in own]

    def _order(self, number: int, data_rank: int, rows: tuple[Row, ...]) -> StepOrder:
        told = [self._row(row) for row in rows]
        changes, self._changes[data_rank] = self._changes[data_rank], _Changes()
        return StepOrder(
            number,
            self.followers.ahead,
            self.overlap,
            tuple(changes.drawn),
            tuple(changes.opened),
            tuple(changes.closed),
            tuple(told),
        )

    def _open(self, seq: Sequence, data_rank: int) -> None:
        known = self._known.get(seq)
        if known is not None and known.data_rank == data_rank:
            return
        if known is not None:  # it gave its blocks up and got others elsewhere
            self._close(seq)
        self._handles += 1
        self._known[seq] = _Known(self._handles, data_rank)
        opened = Opened(self._handles, seq.request, tuple(seq.tokens[seq.prompt_len :]))
        self._changes[data_rank].opened.append(opened)

    def _close(self, seq: Sequence) -> None:
        known = self._known.pop(seq)
        self._changes[known.data_rank].closed.append(known.handle)

    def _row(self, row: Row) -> RowOrder:
        seq = row.seq
        known = self._known[seq]
        keep, size = len(known.blocks), len(seq.blocks)
        if seq.blocks == known.blocks:  # nearly always, and without a copy
            return RowOrder(known.handle, row.start, row.count, row.sample, keep, ())
        if seq.blocks[:keep] != known.blocks:
            keep = next((at for at in range(min(keep, size)) if seq.blocks[at] != known.blocks[at]), min(keep, size))
        added = seq.blocks[keep:]
        known.blocks[keep:] = added
        return RowOrder(known.handle, row.start, row.count, row.sample, keep, tuple(added))


@dataclass(frozen=True)
class _Followed:
    """A launched step of a group. launched: of this rank's part."""

    owner: LeadingRunner
    step: Step
    launched: Launched
    parts: Seq[tuple[Row, ...]]

    def result(self) -> Launch:
        if len(self.parts) > 1:
            self.owner.expect_answers()
        own = self.launched.result()
        self.owner.decoder.check()
        drawn, prompt, at = [own.drawn], dict(own.prompt), len(self.parts[0])
        for data_rank, rows in enumerate(self.parts[1:], 1):
            answer = self.owner.followers.answer(data_rank, self.step.number)
            drawn.append([Drawn(token, logprob) for token, logprob in answer.drawn])
            prompt |= {at + index: found for index, found in answer.prompt.items()}
            at += len(rows)
        self.owner.committed(drawn)
        if len(drawn) == 1:
            return own
        return Launch(self.step, [one for part in drawn for one in part], prompt, own.started, monotonic_ns())
