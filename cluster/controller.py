"""The one named Ray actor that owns a service's worker table and keeps its groups running.

Ray restarts it when it dies; its state is soft. A restarted controller adopts the groups that live under its service's
name, so that none is ever made twice, and answers `table` only when those are in it: routers never see an empty table
that means nothing. It ends everything when its launcher has been silent for `limits.orphan`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any, cast

import msgspec
import ray
from ray.actor import ActorHandle

from diptych.cluster.config import Group
from diptych.cluster.ray_group import RayLauncher, WorkerActor
from diptych.cluster.ray_registry import NAMESPACE, controller_name
from diptych.cluster.supervisor import GroupState, Supervisor
from diptych.cluster.table import WorkerTable
from diptych.contract.limits import Limits
from diptych.contract.wire import WorkerInfo

log = logging.getLogger(__name__)
_info = msgspec.msgpack.Decoder(WorkerInfo)


class Status(msgspec.Struct, frozen=True):
    """The answer to a launcher's `ping`."""

    groups: tuple[GroupState, ...]
    ready: bool
    code: str
    message: str
    pid: int


class Controller:
    """Every method may be repeated; all but `stop` return at once."""

    def __init__(
        self, service: str, groups: bytes, secret: bytes, limits: bytes, actor: type[WorkerActor] = WorkerActor
    ) -> None:
        self._service = service
        self._groups = msgspec.msgpack.decode(groups, type=list[Group])
        self._limits = msgspec.msgpack.decode(limits, type=Limits)
        # A restarted controller must answer with higher versions than its predecessor did: wall time only rises here.
        self._rows = WorkerTable(self._limits.registry_drop, version=time.time_ns() // 1_000_000)
        self._launcher = RayLauncher(service, secret, self._limits, actor)
        self._supervisor = Supervisor(self._groups, self._launcher.launch, self._limits, self._started, self._ended)
        self._adopted = asyncio.Event()
        self._pinged = time.monotonic()
        self._tasks = [asyncio.create_task(self._open()), asyncio.create_task(self._watch_launcher())]

    async def ping(self) -> bytes:
        """The launcher's lease, and the state of the groups."""
        self._pinged = time.monotonic()
        failure = self._supervisor.failure()
        status = Status(
            groups=tuple(self._supervisor.states()),
            ready=self._supervisor.ready(),
            code=failure.code if failure else "",
            message=str(failure) if failure else "",
            pid=os.getpid(),
        )
        return msgspec.msgpack.encode(status)

    async def renew(self, info: bytes) -> bytes:
        self._rows.renew(_info.decode(info), time.monotonic())
        return b""

    async def remove(self, worker_id: str) -> bytes:
        self._rows.remove(worker_id, time.monotonic())
        return b""

    async def table(self) -> bytes:
        await self._adopted.wait()
        return msgspec.msgpack.encode(self._rows.table(time.monotonic()))

    async def stop(self, drain: bool) -> None:
        """Ends all groups; the caller then kills this actor."""
        for task in self._tasks:
            task.cancel()
        await self._supervisor.stop(drain)

    async def _open(self) -> None:
        """Adopts first; each adopted group's entry is in the table before the first answer, or its start has failed."""
        try:
            adopted = self._launcher.adopt(self._groups)
        except Exception:
            log.exception("what a predecessor left cannot be adopted; Ray starts this controller again")
            os._exit(1)
        self._supervisor.start(dict(adopted))
        await asyncio.gather(*(group.start() for group in adopted.values()), return_exceptions=True)
        self._adopted.set()

    async def _watch_launcher(self) -> None:
        while time.monotonic() - self._pinged < self._limits.orphan:
            await asyncio.sleep(self._limits.heartbeat)
        log.warning("No word from the launcher for %g s: ending the service.", self._limits.orphan)
        await asyncio.gather(self._end_application(), self._supervisor.stop(drain=False))
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _end_application(self) -> None:
        """The routers, which the launcher would have ended. Serve's calls block, so they get a thread, and a limit: a
        Serve that does not answer must not keep this actor alive."""
        try:
            await asyncio.wait_for(asyncio.to_thread(_delete_application, self._service), self._limits.drain + 20.0)
        except Exception:
            log.exception("the routers could not be ended")

    def _started(self, info: WorkerInfo) -> None:
        self._rows.renew(info, time.monotonic())

    def _ended(self, info: WorkerInfo) -> None:
        self._rows.remove(info.id, time.monotonic())


def _delete_application(name: str) -> None:
    """The Serve application `name`, if there is one, and Serve itself when it then holds nothing."""
    from ray import serve  # here: it takes a second to load, and only an orphan needs it

    if name in serve.status().applications:
        serve.delete(name)
        if not serve.status().applications:
            serve.shutdown()  # type: ignore[no-untyped-call]


def make_controller(
    service: str, groups: list[Group], secret: bytes, limits: Limits, actor: type[WorkerActor] = WorkerActor
) -> ActorHandle[Any]:
    """Creates the controller, which begins to start the groups at once. Raises ValueError if the service has one."""
    options = {
        "name": controller_name(service),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": 1000,
        "num_cpus": 0,
    }
    packed = msgspec.msgpack.encode(groups), secret, msgspec.msgpack.encode(limits)
    made = ray.remote(Controller).options(**options).remote(service, *packed, actor)
    return cast("ActorHandle[Any]", made)
