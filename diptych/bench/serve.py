"""`diptych bench serve`: one load against one service, a sweep of loads, or a search for the most that it can take.

Owns the run's plan and what becomes of an interruption: what was measured until then is reported and kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from diptych.bench.load import Generator, Record, closed_loop, open_loop
from diptych.bench.service import Target, reached, served
from diptych.bench.stats import Objective, summary
from diptych.bench.workload import (
    Chat,
    Tokens,
    from_lengths,
    from_prompts,
    from_trace,
    poisson,
    recorded,
    taken,
)
from diptych.contract.errors import ConfigInvalid, Internal

_HALVINGS = 4  # of a search, after the bracket is found


@dataclass(frozen=True)
class Workload:
    """Exactly one of lengths, prompts and trace. count: chats of a run. shrink: divides a trace's lengths."""

    lengths: str = ""
    prompts: Path | None = None
    trace: Path | None = None
    count: int = 100
    turns: int = 1
    think: float = 0.0
    shrink: float = 1.0
    seed: int = 0

    def chats(self, vocab: int, context: int, run: int = 0) -> tuple[list[Chat], int]:
        """The chats of one run and how many did not fit. Runs of one seed differ where their tokens are random, and so
        do workloads: a prefix cache must not know a run's prompts from a run before it."""
        tokens = Tokens(vocab, f"{self.seed}:{run}:{self}")
        return taken(self._made(tokens), self.count, context)

    def _made(self, tokens: Tokens) -> Iterator[Chat]:
        if self.trace:
            return from_trace(self.trace, tokens, self.shrink)
        if self.prompts:
            return from_prompts(self.prompts)
        return from_lengths(self.lengths, self.turns, self.count, tokens)

    def __str__(self) -> str:
        return self.lengths or str((self.trace or self.prompts or Path()).name)


@dataclass(frozen=True)
class Load:
    """Exactly one: chats at once; Poisson arrivals a second; as recorded, so many times as fast."""

    concurrency: int | None = None
    rate: float | None = None
    scale: float | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return f"{self.rate:g} requests/s" if self.rate is not None else f"recorded × {self.scale:g}"

    @property
    def level(self) -> float:
        return next(float(value) for value in (self.concurrency, self.rate, self.scale) if value is not None)

    def at(self, level: float) -> Load:
        """The same kind at another level."""
        if self.concurrency is not None:
            return Load(concurrency=max(1, round(level)))
        return Load(rate=level) if self.rate is not None else Load(scale=level)


@dataclass
class Bench:
    """One service under loads. stop: set when the run is to end early. log: every request that ended, as it ends."""

    address: str
    vocab: int
    context: int
    workload: Workload
    stop: asyncio.Event
    warmup: int = 0
    timeout: float = 600.0
    log: TextIO | None = None
    runs: int = 0
    left_out: int = field(default=0, init=False)

    async def run(self, load: Load, label: str = "") -> list[Record]:
        """The records of one run; those that an interruption cut off have the error "interrupted"."""
        chats, self.left_out = self.workload.chats(self.vocab, self.context, self.runs)
        self.runs += 1
        records: list[Record] = []

        def ended(record: Record) -> None:
            records.append(record)
            self._keep(record, label or str(load))

        generator = Generator(self.address, self.timeout, ended)
        try:
            await self._drive(generator, chats, load)
        finally:
            await generator.close()
        return [record for record in records if record.error != "interrupted"]

    async def warm(self) -> None:
        """So many requests of the workload, not counted."""
        if self.warmup:
            chats, _ = self.workload.chats(self.vocab, self.context, run=999)
            generator = Generator(self.address, self.timeout)
            try:
                await closed_loop(generator, chats[: self.warmup], 4, self.stop)
            finally:
                await generator.close()

    async def _drive(self, generator: Generator, chats: list[Chat], load: Load) -> None:
        think = self.workload.think
        if load.concurrency is not None:
            await closed_loop(generator, chats, load.concurrency, self.stop, think)
        elif load.rate is not None:
            await open_loop(generator, chats, poisson(load.rate, self.workload.seed), self.stop, think)
        else:
            assert load.scale is not None
            await open_loop(generator, chats, recorded(load.scale), self.stop, think)

    def _keep(self, record: Record, label: str) -> None:
        if self.log is not None:
            start = record.due
            pieces = [[round(at - start, 6), count] for at, count in record.pieces]
            line = {"load": label, "prompt": record.prompt, "new": record.new, "late": round(record.sent - start, 6),
                    "pieces": pieces, "error": record.error}  # fmt: skip
            self.log.write(json.dumps(line) + "\n")
            self.log.flush()


@asynccontextmanager
async def bench(target: Target, workload: Workload, stop: asyncio.Event, **options: Any) -> AsyncIterator[Bench]:
    """The target, reached, asked for its model, and warmed."""
    async with reached(target) as address:
        model = await served(address)
        made = Bench(address, model.vocab, model.max_context, workload, stop, **options)
        await made.warm()
        yield made


Told = Callable[[dict[str, Any]], None]


async def sweep(made: Bench, loads: list[Load], objective: Objective | None, told: Told) -> None:
    """One run a load, told one by one. Raises `Internal` with the service's own code when nothing was answered."""
    for load in loads:
        if made.stop.is_set():
            return
        records = await made.run(load)
        if records:
            told({"load": str(load), "level": load.level, **_whole(summary(records, objective))})


def _whole(found: dict[str, Any]) -> dict[str, Any]:
    if not found["answered"]:
        raise Internal(f"None of {found['requests']} requests was answered: {found['errors']}.")
    return found


async def search(made: Bench, start: Load, objective: Objective, share: float, told: Told) -> dict[str, Any]:
    """The highest load of which `share` of the requests meet the objective: doubled from `start` until it fails, then
    halved. Raises `ConfigInvalid` when even a load far below `start` does not keep it."""
    best, failed = 0.0, 0.0
    level, tried = start.level, 0
    while not made.stop.is_set() and (not failed or not best or tried < _HALVINGS):
        records = await made.run(start.at(level), f"search {level:g}")
        if made.stop.is_set() or not records:
            break
        found = _whole(summary(records, objective))
        kept = found["met"] >= share
        told({"load": str(start.at(level)), "level": level, "kept": kept, **found})
        best, failed = (max(best, level), failed) if kept else (best, level)
        if not best and level <= start.level / 16:
            raise ConfigInvalid(f"The service meets {objective} for too few requests even at {start.at(level)}.")
        tried += bool(best and failed)
        level = (best + failed) / 2 if best and failed else level * 2 if best else level / 2
        if start.concurrency is not None:
            level = float(max(1, round(level)))
            if level in (best, failed):
                break
    return {"objective": objective.limits, "share": share, "kept_up_to": best, "failed_at": failed or None}
