"""Which sequences the next step computes: pure policy over queues and the pool, no clock and no tensors of its own.

`schedule` assumes that every launched step will succeed, so it may be called again before the results of the last are
committed (`overlap` steps ahead). A sequence found ended by `commit` has then wasted one slot of the step that follows,
and its blocks return when that step is committed too.

Order within a step: running sequences one token each, oldest first; then chunks of prompts, oldest first; then new ones
while batch, token budget and blocks allow. Whoever stands first in a queue and does not fit lets nobody pass, except a
waiting reservation, which smaller ones may overtake a bounded number of times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from diptych.workers.blocks import BlockPool
from diptych.workers.sequence import Sequence, State

OVERTAKES = 4
LOOKAHEAD = 8  # waiting reservations that one turn looks at


@dataclass(frozen=True)
class Row:
    """Tokens [start, start + count) of one sequence; `sample`: a token is drawn after the last of them."""

    seq: Sequence
    start: int
    count: int
    sample: bool


@dataclass(frozen=True)
class Step:
    """What one launch computes. A sequence stands in at most one row."""

    number: int
    rows: tuple[Row, ...]
    preempted: tuple[Sequence, ...] = ()
    revoked: tuple[Sequence, ...] = ()


class Scheduler:
    """Owns the queues. The engine moves sequences in (`enqueue`, `reserve`, `admit`) and out (`remove`)."""

    def __init__(
        self, pool: BlockPool, max_batch: int, token_budget: int, revoke: Callable[[Sequence], bool] = lambda seq: True
    ) -> None:
        """revoke: takes a reservation back unless its transfer has begun, and says whether it did; after True nobody
        writes to its blocks."""
        self.pool = pool
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.revoke = revoke
        self.block_wait: deque[Sequence] = deque()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.steps = 0
        self.blocked_on = "batch"

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
        self.reserved.remove(seq)
        seq.state = State.RUNNING
        self._insert(seq)

    def localise(self, seq: Sequence) -> None:
        """A reserved sequence that this engine prefills itself: keeps its blocks and runs.

        When the whole prompt was found cached its last block is computed again, since a token is drawn after its last
        token; it is written to a block of its own, never to the shared one.
        """
        seq.target = len(seq.tokens)
        if seq.computed == seq.target:
            last = seq.computed // self.pool.block_size - 1
            self.pool.release([seq.blocks[last]])
            seq.blocks[last] = seq.blocks.pop()
            seq.computed -= self.pool.block_size
            seq.published = last
            seq.cached = seq.computed
        self.admit(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes it out of whatever queue it is in. Its blocks stay its own."""
        for queue in (self.block_wait, self.waiting, self.running, self.reserved):
            if seq in queue:
                queue.remove(seq)
        seq.state = State.ENDED

    def _insert(self, seq: Sequence) -> None:
        """Keeps `running` ordered by age: the youngest is preempted first and the oldest always finishes."""
        index = len(self.running)
        while index and self.running[index - 1].arrived > seq.arrived:
            index -= 1
        self.running.insert(index, seq)

    # ── reservations ───────────────────────────────────────────────────────────────────────────────────────────────

    def grants(self) -> Iterator[Sequence]:
        """Gives blocks for the prompt plus one (if it can ever need that one) to waiting reservations; yields each that
        it served.

        Whoever had to make room comes back first: new reservations would else take every block that it waits for.
        """
        if self.waiting:
            return
        for seq in list(islice(self.block_wait, LOOKAHEAD)):
            if len(self.running) + len(self.reserved) >= self.max_batch:
                return
            if self._grant(seq):
                self.block_wait.remove(seq)
                for ahead in self.block_wait:
                    if ahead.arrived < seq.arrived:
                        ahead.overtaken += 1
                yield seq
            elif seq.overtaken >= OVERTAKES:
                return

    def _grant(self, seq: Sequence) -> bool:
        found = self._take_prefix(seq, seq.prompt_len)
        room = self.pool.blocks_for(max(seq.full_length, seq.prompt_len + 1)) - len(found)
        # The one more must not be asked for where all that it can ever hold fits: in a small pool it may not exist.
        wanted = min(self.pool.blocks_for(seq.prompt_len) + 1 - len(found), room)
        fresh = self.pool.allocate(wanted, found[-1] if found else None, room)
        if fresh is None:
            self.pool.release(found)
            return False
        seq.blocks = found + fresh
        seq.held = seq.cached = seq.computed = len(found) * self.pool.block_size
        seq.published = len(found)
        seq.state = State.RESERVED
        self.reserved.append(seq)
        return True

    def _take_prefix(self, seq: Sequence, upto: int) -> list[int]:
        """Shares the cached blocks of the first `upto` tokens."""
        found = self.pool.match(seq.digests[: upto // self.pool.block_size])
        self.pool.share(found)
        return found

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to compute. Marks its tokens as computed and its draws as
        pending; the caller must launch it."""
        preempted: list[Sequence] = []
        revoked: list[Sequence] = []
        rows = self._decode_rows(preempted, revoked)
        budget = self.token_budget - len(rows)
        for seq in [seq for seq in self.running if seq.prefilling]:
            budget -= self._chunk(seq, budget, rows)
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seq.in_flight or not self._start(seq):
                break
            budget -= self._chunk(seq, budget, rows)
        if not rows and not preempted and not revoked:
            return None
        for row in rows:
            row.seq.computed += row.count
            row.seq.in_flight += 1
            row.seq.pending += row.sample
        self.steps += 1
        return Step(self.steps, tuple(rows), tuple(preempted), tuple(revoked))

    def _decode_rows(self, preempted: list[Sequence], revoked: list[Sequence]) -> list[Row]:
        rows: list[Row] = []
        for seq in list(self.running):
            if seq.state is not State.RUNNING or seq.prefilling or seq.exhausted or seq.single:
                continue
            while seq.state is State.RUNNING and not self._grow(seq):
                self._make_room(preempted, revoked)
            if seq.state is State.RUNNING:
                rows.append(Row(seq, seq.computed, 1, True))
        return rows

    def _grow(self, seq: Sequence) -> bool:
        if seq.computed < len(seq.blocks) * self.pool.block_size:
            return True
        fresh = self.pool.allocate(1, seq.blocks[-1])
        if fresh is None:
            return False
        seq.blocks += fresh
        return True

    def _make_room(self, preempted: list[Sequence], revoked: list[Sequence]) -> None:
        """Frees blocks: the youngest reservation whose transfer has not begun, else the youngest running sequence."""
        youngest_first = sorted(self.reserved, key=lambda seq: -seq.arrived)
        victim = next((seq for seq in youngest_first if self.revoke(seq)), None)
        if victim is not None:
            self.reserved.remove(victim)
            revoked.append(victim)
        else:
            victim = self.running.pop()
            preempted.append(victim)
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.computed = victim.published = victim.held = 0
        victim.target = len(victim.tokens) + victim.pending
        self.enqueue(victim)

    def _chunk(self, seq: Sequence, budget: int, rows: list[Row]) -> int:
        count = min(budget, seq.target - seq.computed)
        if count <= 0:
            return 0
        rows.append(Row(seq, seq.computed, count, seq.computed + count == seq.target))
        return count

    def _start(self, seq: Sequence) -> bool:
        """Moves the first waiting sequence into the batch with blocks for all it must prefill, if there is room."""
        if len(self.running) + len(self.reserved) >= self.max_batch:
            self.blocked_on = "batch"
            return False
        seq.target = len(seq.tokens)
        # The last token is always computed, since a token is drawn after it; so are all whose log-probability is asked.
        reusable = 0 if seq.request.prompt_logprobs is not None and not seq.generated else seq.target - 1
        found = self._take_prefix(seq, reusable)
        wanted = self.pool.blocks_for(seq.target) - len(found)
        room = self.pool.blocks_for(seq.full_length) - len(found)
        fresh = self.pool.allocate(wanted, found[-1] if found else None, room)
        if fresh is None:
            self.pool.release(found)
            self.blocked_on = "blocks"
            return False
        self.waiting.popleft()
        seq.blocks = found + fresh
        seq.computed = len(found) * self.pool.block_size
        seq.published = len(found)
        if not seq.generated:
            seq.cached = seq.computed
            seq.prompt_logprobs.clear()  # a prompt that was preempted half-way is computed from its start again
        seq.state = State.RUNNING
        self._insert(seq)
        return True
