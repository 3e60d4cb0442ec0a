"""The engine processes of a worker group, as its front keeps them: one a rank, started together, ended together.

Owns processes and the channels to them. Knows neither sessions nor the registry.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from diptych.contract.errors import Internal, from_wire
from diptych.workers.channel import Fatal, FrontChannel, Launch, Loading, Up
from diptych.workers.settings import WorkerSettings

Progress = Callable[[Loading], None]
"""How far all ranks together are."""


class _RankEnded(Exception):
    """A rank's process ended and did not say why."""


@dataclass
class _Rank:
    """loaded: how far its weights and its graphs are, by what they are."""

    process: subprocess.Popen[bytes]
    channel: FrontChannel
    loaded: dict[str, Loading] = field(default_factory=dict)


class Engines:
    """`start` once, then `up`; `kill` at any time, repeatedly, then `gone` and `close`."""

    def __init__(self, settings: WorkerSettings, name: str, progress: Progress | None = None) -> None:
        """name: of the group, in messages."""
        self.settings, self.name, self.progress = settings, name, progress
        self._ranks: list[_Rank] = []

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def first(self) -> FrontChannel:
        """To the first rank, which schedules for all."""
        return self._ranks[0].channel

    def channel(self, index: int) -> FrontChannel:
        return self._ranks[index].channel

    async def start(self, secret: bytes, epoch: str) -> None:
        """A process a rank. The first gets a line to each of the others."""
        count = self.settings.grid.ranks
        lines = [socket.socketpair() for _ in range(count - 1)]
        given = [[first for first, _ in lines], *[[other] for _, other in lines]]
        for index, own in enumerate(given):
            rank = await self._spawn(own)
            rank.channel.send(Launch(self.settings, secret, epoch, self.name, index))
        for own in given:
            for sock in own:
                sock.close()

    async def _spawn(self, lines: list[socket.socket]) -> _Rank:
        ours, theirs = socket.socketpair()
        threads = str(self.settings.threads)
        environment = (
            CPU_MANNERS
            | os.environ
            | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
            | NCCL_SURVIVES
            | {"PYTHONSAFEPATH": "1"}
        )
        numbers = [sock.fileno() for sock in (theirs, *lines)]
        process = subprocess.Popen(  # noqa: ASYNC220 - a fork takes milliseconds; asyncio's child watcher is not needed
            [sys.executable, "-m", "diptych.workers.engine_process", *map(str, numbers)],
            pass_fds=numbers,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        rank = _Rank(process, await FrontChannel.over(ours))
        self._ranks.append(rank)  # so that it is ended too if the next one fails to start
        return rank

    async def up(self) -> list[Up]:
        """Every rank's `Up`. Raises what stopped one of them: where several fail, the one that says why is raised
        rather than one that merely ended."""
        waits = [asyncio.create_task(self._until_up(rank)) for rank in self._ranks]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            if any(wait.done() and wait.exception() for wait in waits):
                await asyncio.wait(waits, timeout=self.settings.limits.kill)
                errors = [error for wait in waits if wait.done() and (error := wait.exception())]
                first = min(errors, key=lambda error: isinstance(error, _RankEnded))
                raise Internal(str(first)) if isinstance(first, _RankEnded) else first
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()

    async def _until_up(self, rank: _Rank) -> Up:
        while True:
            try:
                message = await rank.channel.receive()
            except EOFError as error:
                raise _RankEnded(
                    f"The engine of {self.name} ended while it started (exit code {self._exit_code(rank)})."
                ) from error
            if isinstance(message, Up):
                return message
            if isinstance(message, Fatal):
                raise from_wire(message.code, message.message)
            if isinstance(message, Loading) and self.progress is not None:
                rank.loaded[message.what] = message
                self.progress(together([each.loaded for each in self._ranks]))

    def kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()

    async def gone(self) -> bool:
        """Waits `limits.kill` at most; False if a process is still there then."""
        codes = await asyncio.gather(*(asyncio.to_thread(self._exit_code, rank) for rank in self._ranks))
        return None not in codes

    def running(self) -> bool:
        return any(rank.process.poll() is None for rank in self._ranks)

    def close(self) -> None:
        for rank in self._ranks:
            rank.channel.close()

    def _exit_code(self, rank: _Rank) -> int | None:
        try:
            return rank.process.wait(self.settings.limits.kill)
        except subprocess.TimeoutExpired:
            return None


def together(ranks: Sequence[Mapping[str, Loading]]) -> Loading:
    """What a group shows of its ranks: the sum of what all of them have begun, weights until the last is past them."""
    what: Literal["weights", "graphs"] = "graphs" if all("graphs" in rank for rank in ranks) else "weights"
    told = [rank[what] for rank in ranks if what in rank]
    return Loading(what, sum(each.done for each in told), sum(each.total for each in told))


# Two engines of two threads on two cores ruin each other while libgomp's threads spin for long (p50 of a step at
# batch 8: 63 ms with this, 173 to 225 without). malloc re-uses a step's large tensors instead of mapping them anew.
CPU_MANNERS = {
    "GOMP_SPINCOUNT": "1000",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}

# NCCL must not take the process down when a peer dies: errors are handled by the link that meets them.
NCCL_SURVIVES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
