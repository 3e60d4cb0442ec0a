"""A service's worker groups as plain processes on this machine, without Ray: what most tests use, and `--ray none`.

Owns the processes and the registry server; replaces a group that ends, by the same supervisor as the Ray controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from diptych.cluster.config import Group
from diptych.cluster.devices import spread
from diptych.cluster.registry import RegistryClient, RegistryServer
from diptych.cluster.supervisor import Supervisor
from diptych.cluster.worker_process import Down, Launch, Stop, Up, from_process, receive, send
from diptych.contract.errors import Internal, from_wire
from diptych.contract.limits import Limits
from diptych.contract.wire import WorkerInfo
from diptych.workers.channel import Loading


class LocalGroup:
    """The `Incarnation` of a group whose front is a child process; the engines are that process's children."""

    def __init__(self, group: Group, process: asyncio.subprocess.Process, limits: Limits) -> None:
        self.name = group.name
        self.process = process
        self.loaded = Loading()
        self._limits = limits
        self._up: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._down: asyncio.Future[Down] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def launch(cls, group: Group, secret: bytes, registry: str, epoch: str, limits: Limits) -> LocalGroup:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "diptych.cluster.worker_process", str(theirs.fileno())]
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env=os.environ | {"PYTHONSAFEPATH": "1"},  # the current folder may hold a clone of the same name
                )
            except BaseException:
                ours.close()
                raise
        made = cls(group, process, limits)
        reader, made._writer = await asyncio.open_connection(sock=ours)
        send(made._writer, Launch(group.settings, secret, registry, epoch))
        made._reading = asyncio.create_task(made._read(reader))
        return made

    async def start(self) -> WorkerInfo:
        await asyncio.wait((self._up, self._down), return_when=asyncio.FIRST_COMPLETED)
        if self._up.done():
            return self._up.result()
        down = self._down.result()
        raise from_wire(down.code or Internal.__name__, down.message)

    async def wait(self) -> str:
        return (await asyncio.shield(self._down)).message

    async def stop(self, drain: bool) -> None:
        """Asks, waits within the limits, then kills the front and all that it started (it leads a session)."""
        if self._writer is not None and not self._down.done():
            send(self._writer, Stop(drain))
        limit = self._limits.kill + (self._limits.drain if drain else 0.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._down), limit + 1.0)
        await self._bury()
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()

    async def _bury(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), self._limits.kill)
        with contextlib.suppress(ProcessLookupError):  # nobody of the session is left
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (data := await receive(reader)) is not None:
            match from_process.decode(data):
                case Loading() as loaded:
                    self.loaded = loaded
                case Up(info=info):
                    self._up.set_result(info)
                case Down() as down:
                    self._settle(down)
        code = await self.process.wait()
        self._settle(Down(Internal.__name__, f"The process of {self.name} died ({_exit(code)})."))

    def _settle(self, down: Down) -> None:
        if not self._down.done():
            self._down.set_result(down)


class LocalCluster:
    """All groups of a service without Ray. `start` returns when every group is ready, or raises and leaves nothing."""

    def __init__(self, groups: Sequence[Group], secret: bytes, limits: Limits) -> None:
        self.registry = RegistryServer(secret, limits)
        self._secret = secret
        self._limits = limits
        self.members: dict[str, LocalGroup] = {}
        self.supervisor = Supervisor(spread(groups), self._launch, limits, lambda info: None, self._ended)

    async def start(self) -> None:
        await self.open()
        try:
            while not self.supervisor.ready():
                if failure := self.supervisor.failure():
                    raise failure
                await asyncio.sleep(0.02)
        except BaseException:
            await self.stop(drain=False)
            raise

    async def open(self) -> None:
        """Begins to start the groups; `supervisor` tells how far they are."""
        await self.registry.start()
        self.supervisor.start()

    def registry_client(self) -> RegistryClient:
        """A `Registry` for a router of this service; call after `open`."""
        return RegistryClient(self.registry.address, self._secret)

    async def stop(self, drain: bool = True) -> None:
        await self.supervisor.stop(drain)
        await self.registry.stop()

    async def _launch(self, group: Group, epoch: str) -> LocalGroup:
        member = await LocalGroup.launch(group, self._secret, self.registry.address, epoch, self._limits)
        self.members[group.name] = member
        return member

    def _ended(self, info: WorkerInfo) -> None:
        self.registry.remove(info.id)


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
