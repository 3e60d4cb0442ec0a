"""An engine in this process, its channel a pair of lists: what tests of the loop speak to."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diptych.contract.request import Key, Request, Sampling, Stopping
from diptych.contract.wire import Ended, Generate, Load, Step, ToWorker, pack, to_router
from diptych.workers.channel import Deliver, Emit, Launch, Report, ToEngine, ToFront
from diptych.workers.engine_process import build
from diptych.workers.parallel.orders import Line
from diptych.workers.settings import WorkerSettings

GREEDY = Sampling(temperature=0.0)


class Loop:
    """The engine's channel; a waiting engine would sleep, so an idle turn that brings nothing is the end."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, Ended] = {}
        self.load: Load | None = None  # the last that was reported

    def wait(self, seconds: float) -> Iterator[ToEngine]:
        found, self.inbox = self.inbox, []
        yield from found

    def wake(self) -> None:
        pass

    def send(self, message: ToFront) -> None:
        if isinstance(message, Report):
            self.load = message.load
        told = to_router.decode(message.message) if isinstance(message, Emit) else None
        if isinstance(told, Step):
            for token in told.tokens:
                assert token.position == len(self.tokens[token.key.request])
                assert token.key.request not in self.ended, "a token after the end"
                self.tokens[token.key.request] += token.ids
        elif isinstance(told, Ended):
            assert told.key.request not in self.ended, "ended twice"
            self.ended[told.key.request] = told


class Harness:
    def __init__(self, model: Path, lines: Sequence[Line] = (), **settings: Any) -> None:
        """lines: to the ranks that follow."""
        given = {"cache_blocks": 128, "threads": 2, "max_batch": 8, "token_budget": 64} | settings
        self.loop: Any = Loop()
        launch = Launch(WorkerSettings(model=str(model), role="colocated", **given), b"s", "0", "test")
        self.engine, self.up = build(launch, self.loop, lines)

    def say(self, message: ToWorker, session: str = "s") -> None:
        self.loop.inbox.append(Deliver(session, pack(message)))

    def ask(self, name: str, prompt: tuple[int, ...], tokens: int, sampling: Sampling = GREEDY, **more: Any) -> None:
        self.say(Generate(Request(Key(name), prompt, Stopping(tokens, ignore_eos=True), sampling, **more)))

    def run(self, turns: int = 3000) -> None:
        """Until nothing is left to do."""
        for _ in range(turns):
            self.engine.turn()
            if not self.engine.sequences and not self.loop.inbox and not self.engine._busy:
                break
        assert not self.engine.sequences
        self.engine.check_integrity()
        assert all(pool.available == pool.num_blocks for pool in self.engine.pools)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(100, 40_000) for _ in range(length))
