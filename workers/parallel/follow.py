"""The loop of every rank but the first: takes orders and carries them out, until the first rank is gone.

Keeps of each sequence what a runner reads (tokens, block table, what its draw asks for) and nothing else. The ranks
that share a data rank draw the same tokens from the same logits, and so need not be told them. Of those that share
another data rank than the group's first rank does, the first one answers with what they drew.
"""

from __future__ import annotations

import logging
from collections import deque

from diptych.contract.errors import Internal
from diptych.workers.parallel.orders import (
    AbandonOrder,
    Answer,
    CloseOrder,
    CommitOrder,
    ExpectOrder,
    FinishOrder,
    Line,
    Order,
    PeersOrder,
    RowOrder,
    SendOrder,
    StepOrder,
)
from diptych.workers.runner import Launched, Runner
from diptych.workers.scheduler import Row, Step
from diptych.workers.sequence import Sequence
from diptych.workers.transfer.links import Links

log = logging.getLogger("diptych.follower")


class Follower:
    """One rank. `run` returns when the first rank is gone; it raises when this rank cannot stay in step."""

    def __init__(self, runner: Runner, line: Line, links: Links, answers: bool = False) -> None:
        """answers: the first rank must be told what is drawn here."""
        self.runner, self.line, self.links, self.answers = runner, line, links, answers
        self.sequences: dict[int, Sequence] = {}
        self._launched: deque[Launched] = deque()
        self._drawn: list[int] = []

    def run(self) -> None:
        try:
            while True:
                self.obey(self.line.order())
        except EOFError:
            log.info("the first rank is gone; ending")

    def obey(self, order: Order) -> None:
        if isinstance(order, StepOrder):
            self._step(order)
        elif isinstance(order, CommitOrder):
            self._commit(order.ahead)
        elif isinstance(order, PeersOrder):
            self.links.reconcile(order.workers)
        elif isinstance(order, ExpectOrder):
            self.links.expect(order.key, order.sender, list(order.blocks), order.held, order.total)
        elif isinstance(order, CloseOrder):
            self.links.close(order.key)
        elif isinstance(order, SendOrder):
            self._commit(order.ahead)
            self.links.send(order.peer, order.key, order.blocks, order.first, order.end)
        elif isinstance(order, FinishOrder):
            self.links.finish(order.peer, order.key, order.total, order.first_token)
        elif isinstance(order, AbandonOrder):
            self.links.abandon(order.peer, order.key, order.code, order.message)

    def _step(self, order: StepOrder) -> None:
        self._commit(order.ahead)
        if self._drawn != list(order.drawn):
            raise Internal(f"Before step {order.number} this rank drew {self._drawn}, the first {list(order.drawn)}.")
        self._drawn.clear()
        for handle in order.closed:
            del self.sequences[handle]
        for opened in order.opened:
            seq = Sequence(opened.request, "", self.runner.block_size, hashed=False)
            seq.tokens += opened.output
            self.sequences[opened.handle] = seq
        rows = tuple(self._row(row) for row in order.rows)
        self._launched.append(self.runner.launch(Step(order.number, rows)))
        self._commit(order.keep)

    def _row(self, order: RowOrder) -> Row:
        seq = self.sequences[order.handle]
        seq.blocks[order.keep :] = order.blocks
        return Row(seq, order.start, order.count, order.sample)

    def _commit(self, ahead: int) -> None:
        while len(self._launched) > ahead:
            launch = self._launched.popleft().result()
            self.runner.decoder.check()
            drawn = iter(launch.drawn)
            for row in launch.step.rows:
                if row.sample:
                    token = next(drawn).token
                    row.seq.tokens.append(token)
                    self._drawn.append(token)
            if self.answers:
                told = tuple((drawn.token, drawn.logprob) for drawn in launch.drawn)
                self.line.send(Answer(launch.step.number, told, launch.prompt))
