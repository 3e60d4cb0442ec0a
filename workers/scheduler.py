"""Which sequences the next step computes: pure policy over queues and the pool, no clock and no tensors of its own.

`schedule` assumes that every launched step will succeed, so it may be called again before the results of the last are
committed (`overlap` steps ahead). A sequence found ended by `commit` has then wasted one slot of the step that follows,
and its blocks return when that step is committed too.

Order within a step: running sequences one token each, oldest first; then chunks of prompts, oldest first; then new ones
while batch, token budget and blocks allow. Whoever stands first in a queue and does not fit lets nobody pass, except a
waiting reservation, which smaller ones may overtake a bounded number of times.

A group's data ranks share the queues; each has a lane of its own: a pool, a batch, a budget. A sequence gets its lane
with its blocks: the one that holds most of its prefix among those that are not busier than the others, else the one
with the least to compute. It leaves the lane only by giving its blocks up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from diptych.workers.blocks import BlockPool
from diptych.workers.sequence import Sequence, State

OVERTAKES = 4
LOOKAHEAD = 8  # waiting reservations that one turn looks at
SLACK, STRETCH = 2, 1.25  # how far a lane's batch may exceed the smallest one and still be chosen for its prefix


class Row(msgspec.Struct, frozen=True):
    """Tokens [start, start + count) of one sequence; `sample`: a token is drawn after the last of them."""

    seq: Sequence
    start: int
    count: int
    sample: bool


@dataclass(frozen=True)
class Step:
    """What one launch computes. A sequence stands in at most one row; rows of one data rank stand together, in the
    order of data ranks."""

    number: int
    rows: tuple[Row, ...]
    preempted: tuple[Sequence, ...] = ()
    revoked: tuple[Sequence, ...] = ()


@dataclass(eq=False)
class Lane:
    """What a data rank has: its pool, and the sequences whose blocks are in it."""

    number: int
    pool: BlockPool
    running: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)

    @property
    def busy(self) -> int:
        return len(self.running) + len(self.reserved)

    @property
    def work(self) -> int:
        """Tokens that are due: what is left of prompts, and one for each other sequence."""
        return len(self.reserved) + sum(max(1, seq.target - seq.computed) for seq in self.running)


class Scheduler:
    """Owns the queues. The engine moves sequences in (`enqueue`, `reserve`, `admit`) and out (`remove`)."""

    def __init__(
        self,
        pools: Seq[BlockPool],
        max_batch: int,
        token_budget: int,
        revoke: Callable[[Sequence], bool] = lambda seq: True,
    ) -> None:
        """pools: one a data rank. max_batch, token_budget: of each. revoke: takes a reservation back unless its
        transfer has begun, and says whether it did; after True nobody writes to its blocks."""
        self.lanes = tuple(Lane(number, pool) for number, pool in enumerate(pools))
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.revoke = revoke
        self.block_wait: deque[Sequence] = deque()
        self.waiting: deque[Sequence] = deque()
        self.steps = 0
        self.blocked_on = "batch"

    def lane(self, seq: Sequence) -> Lane:
        """Where its blocks are."""
        return self.lanes[seq.data_rank]

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return sum(len(lane.running) for lane in self.lanes)

    @property
    def reserved(self) -> int:
        return sum(len(lane.reserved) for lane in self.lanes)

    # ── moving in and out ──────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, seq: Sequence) -> None:
        """Queues a sequence to be prefilled here, by age: a late grant does not cost it its place."""
        seq.state = State.WAITING
        index = len(self.waiting)
        while index and self.waiting[index - 1].arrived > seq.arrived:
            index -= 1
        self.waiting.insert(index, seq)

    def reserve(self, seq: Sequence) -> None:
        """Queues a sequence for a grant of blocks; `grants` gives it."""
        seq.state = State.BLOCK_WAIT
        self.block_wait.append(seq)

    def admit(self, seq: Sequence) -> None:
        """A reserved sequence whose KV is complete joins the batch."""
        self.lane(seq).reserved.remove(seq)
        seq.state = State.RUNNING
        self._insert(seq)

    def localise(self, seq: Sequence) -> None:
        """A reserved sequence that this engine prefills itself: keeps its blocks and runs.

        When the whole prompt was found cached its last block is computed again, since a token is drawn after its last
        token; it is written to a block of its own, never to the shared one.
        """
        pool, seq.target = self.lane(seq).pool, len(seq.tokens)
        if seq.computed == seq.target:
            last = seq.computed // pool.block_size - 1
            pool.release([seq.blocks[last]])
            seq.blocks[last] = seq.blocks.pop()
            seq.computed -= pool.block_size
            seq.published = last
            seq.cached = seq.computed
        self.admit(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes it out of whatever queue it is in. Its blocks stay its own."""
        lane = self.lane(seq)
        for queue in (self.block_wait, self.waiting, lane.running, lane.reserved):
            if seq in queue:
                queue.remove(seq)
        seq.state = State.ENDED

    def _insert(self, seq: Sequence) -> None:
        """Keeps `running` ordered by age: the youngest is preempted first and the oldest always finishes."""
        running = self.lane(seq).running
        index = len(running)
        while index and running[index - 1].arrived > seq.arrived:
            index -= 1
        running.insert(index, seq)

    # ── choosing a lane ────────────────────────────────────────────────────────────────────────────────────────────

    def _with_room(self, lanes: Iterable[Lane]) -> list[Lane]:
        return [lane for lane in lanes if lane.busy < self.max_batch]

    def _ordered(self, lanes: list[Lane], seq: Sequence, upto: int) -> list[Lane]:
        """The best first, for a sequence of whose first `upto` tokens a cached prefix would be used."""
        if len(lanes) < 2:
            return lanes
        digests = seq.digests[: upto // lanes[0].pool.block_size]
        limit = SLACK + STRETCH * min(lane.busy for lane in self.lanes)

        def cost(lane: Lane) -> tuple[bool, int, int, int]:
            return lane.busy > limit, -len(lane.pool.match(digests)), lane.work, -lane.pool.available

        return sorted(lanes, key=cost)

    # ── reservations ───────────────────────────────────────────────────────────────────────────────────────────────

    def grants(self) -> Iterator[Sequence]:
        """Gives blocks for the prompt plus one (if it can ever need that one) to waiting reservations; yields each that
        it served.

        Whoever had to make room comes back first: new reservations would else take every block that it waits for.
        """
        if self.waiting:
            return
        for seq in list(islice(self.block_wait, LOOKAHEAD)):
            able = self._with_room(self.lanes)
            if not able:
                return
            if any(self._grant(seq, lane) for lane in self._ordered(able, seq, seq.prompt_len)):
                self.block_wait.remove(seq)
                for ahead in self.block_wait:
                    if ahead.arrived < seq.arrived:
                        ahead.overtaken += 1
                yield seq
            elif seq.overtaken >= OVERTAKES:
                return

    def _grant(self, seq: Sequence, lane: Lane) -> bool:
        pool = lane.pool
        found = _take_prefix(pool, seq, seq.prompt_len)
        room = pool.blocks_for(max(seq.full_length, seq.prompt_len + 1)) - len(found)
        # The one more must not be asked for where all that it can ever hold fits: in a small pool it may not exist.
        wanted = min(pool.blocks_for(seq.prompt_len) + 1 - len(found), room)
        fresh = pool.allocate(wanted, found[-1] if found else None, room)
        if fresh is None:
            pool.release(found)
            return False
        seq.blocks = found + fresh
        seq.held = seq.cached = seq.computed = len(found) * pool.block_size
        seq.published = len(found)
        seq.state = State.RESERVED
        seq.data_rank = lane.number
        lane.reserved.append(seq)
        return True

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to compute. Marks its tokens as computed and its draws as
        pending; the caller must launch it."""
        preempted: list[Sequence] = []
        revoked: list[Sequence] = []
        parts = [self._part(lane, preempted, revoked) for lane in self.lanes]
        while self.waiting and any(part.budget > 0 for part in parts):
            seq = self.waiting[0]
            if seq.in_flight or not self._start(seq, [part.lane for part in parts if part.budget > 0]):
                break
            parts[seq.data_rank].chunk(seq)
        rows = [row for part in parts for row in part.rows]
        if not rows and not preempted and not revoked:
            return None
        for row in rows:
            row.seq.computed += row.count
            row.seq.in_flight += 1
            row.seq.pending += row.sample
        self.steps += 1
        return Step(self.steps, tuple(rows), tuple(preempted), tuple(revoked))

    def _part(self, lane: Lane, preempted: list[Sequence], revoked: list[Sequence]) -> _Part:
        """What a lane's own sequences give to the step."""
        rows = self._decode_rows(lane, preempted, revoked)
        part = _Part(lane, rows, self.token_budget - len(rows))
        for seq in [seq for seq in lane.running if seq.prefilling]:
            part.chunk(seq)
        return part

    def _decode_rows(self, lane: Lane, preempted: list[Sequence], revoked: list[Sequence]) -> list[Row]:
        rows: list[Row] = []
        for seq in list(lane.running):
            if seq.state is not State.RUNNING or seq.prefilling or seq.exhausted or seq.single:
                continue
            while seq.state is State.RUNNING and not _grow(lane.pool, seq):
                self._make_room(lane, preempted, revoked)
            if seq.state is State.RUNNING:
                rows.append(Row(seq, seq.computed, 1, True))
        return rows

    def _make_room(self, lane: Lane, preempted: list[Sequence], revoked: list[Sequence]) -> None:
        """Frees blocks: the youngest reservation whose transfer has not begun, else the youngest running sequence."""
        youngest_first = sorted(lane.reserved, key=lambda seq: -seq.arrived)
        victim = next((seq for seq in youngest_first if self.revoke(seq)), None)
        if victim is not None:
            lane.reserved.remove(victim)
            revoked.append(victim)
        else:
            victim = lane.running.pop()
            preempted.append(victim)
        lane.pool.release(victim.blocks)
        victim.blocks = []
        victim.computed = victim.published = victim.held = 0
        victim.target = len(victim.tokens) + victim.pending
        self.enqueue(victim)

    def _start(self, seq: Sequence, lanes: list[Lane]) -> bool:
        """Moves the first waiting sequence into one of the lanes' batches with blocks for all it must prefill, if there
        is room."""
        able = self._with_room(lanes)
        if not able:
            self.blocked_on = "batch"
            return False
        seq.target = len(seq.tokens)
        # The last token is always computed, since a token is drawn after it; so are all whose log-probability is asked.
        reusable = 0 if seq.request.prompt_logprobs is not None and not seq.generated else seq.target - 1
        if any(self._begin(seq, reusable, lane) for lane in self._ordered(able, seq, reusable)):
            return True
        self.blocked_on = "blocks"
        return False

    def _begin(self, seq: Sequence, reusable: int, lane: Lane) -> bool:
        pool = lane.pool
        found = _take_prefix(pool, seq, reusable)
        wanted = pool.blocks_for(seq.target) - len(found)
        room = pool.blocks_for(seq.full_length) - len(found)
        fresh = pool.allocate(wanted, found[-1] if found else None, room)
        if fresh is None:
            pool.release(found)
            return False
        self.waiting.popleft()
        seq.data_rank = lane.number
        seq.blocks = found + fresh
        seq.computed = len(found) * pool.block_size
        seq.published = len(found)
        if not seq.generated:
            seq.cached = seq.computed
            seq.prompt_logprobs.clear()  # a prompt that was preempted half-way is computed from its start again
        seq.state = State.RUNNING
        self._insert(seq)
        return True


@dataclass
class _Part:
    """What a lane gives to a step; budget: tokens that it may still add."""

    lane: Lane
    rows: list[Row]
    budget: int

    def chunk(self, seq: Sequence) -> None:
        """As much of a prompt as the budget allows."""
        count = min(self.budget, seq.target - seq.computed)
        if count > 0:
            self.rows.append(Row(seq, seq.computed, count, seq.computed + count == seq.target))
            self.budget -= count


def _take_prefix(pool: BlockPool, seq: Sequence, upto: int) -> list[int]:
    """Shares the cached blocks of the first `upto` tokens."""
    found = pool.match(seq.digests[: upto // pool.block_size])
    pool.share(found)
    return found


def _grow(pool: BlockPool, seq: Sequence) -> bool:
    """Room for its next token."""
    if seq.computed < len(seq.blocks) * pool.block_size:
        return True
    fresh = pool.allocate(1, seq.blocks[-1])
    if fresh is None:
        return False
    seq.blocks += fresh
    return True
