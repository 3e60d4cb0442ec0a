"""An engine of several ranks: the first in this process, each other in one of its own."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from diptych.workers import engine_process
from diptych.workers.channel import Launch
from diptych.workers.device_runner import DeviceRunner
from diptych.workers.parallel.orders import Line
from diptych.workers.runner import Runner
from diptych.workers.settings import WorkerSettings
from tests.support.engine import Harness

_context = multiprocessing.get_context("forkserver")


class _Unheard:
    """A follower's channel: nobody listens to its progress here."""

    def send(self, message: object) -> None:
        pass


def _follow(sock: socket.socket, settings: WorkerSettings, rank: int, lent: bool) -> None:
    torch.set_num_threads(1)
    if not lent:
        engine_process.lend = _keep
    channel: Any = _Unheard()
    follower, _ = engine_process.build_follower(Launch(settings, b"s", "0", "test", rank), channel, Line(sock))
    follower.run()
    _release(follower.runner)


def _keep(*_: object) -> None:
    """Lends nothing."""


def _release(runner: Runner) -> None:
    """Captured graphs go before the communicator that they hold: NCCL, when it ends, waits for them."""
    if isinstance(runner, DeviceRunner):
        runner._graphs.clear()


@contextmanager
def following(model: Path, lent: bool = True, **settings: Any) -> Iterator[Harness]:
    """The others must end well when the first is gone. lent: GPUs may lend each other memory for small sums."""
    whole = engine_process.lend
    engine_process.lend = whole if lent else _keep
    given = {"cache_blocks": 128, "threads": 1, "max_batch": 8, "token_budget": 64} | settings
    launched = WorkerSettings(model=str(model), role="colocated", **given)
    lines, members = [], []
    for rank in range(1, launched.grid.ranks):
        ours, theirs = socket.socketpair()
        member = _context.Process(target=_follow, args=(theirs, launched, rank, lent), daemon=True)
        member.start()
        theirs.close()
        lines.append(Line(ours))
        members.append(member)
    try:
        harness = Harness(model, lines, **given)
        yield harness
        leading: Any = harness.engine.runner
        _release(leading.runner)
        for line in lines:
            line.sock.shutdown(socket.SHUT_RDWR)  # a thread of ours reads it: closing alone would tell nobody
        for member in members:
            member.join(20.0)
            assert member.exitcode == 0
    finally:
        engine_process.lend = whole
        for member in members:
            member.kill()
            member.join()
