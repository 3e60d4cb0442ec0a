"""`Registry` in a service on Ray: the controller actor, found by its name from any process of the cluster."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from diptych.contract.errors import Internal
from diptych.contract.registry import Table
from diptych.contract.wire import WorkerInfo

NAMESPACE = "diptych"

_encoder = msgspec.msgpack.Encoder()
_table = msgspec.msgpack.Decoder(Table)


def controller_name(service: str) -> str:
    return f"{service}-controller"


class RayRegistry:
    """May be pickled and sent to any actor. limit: seconds a call may take before it fails with `Internal`.

    The controller's handle outlives its restarts. Only where it is gone for good is it looked up again, and in a
    thread: Ray's look-up blocks for as long as its control plane is silent."""

    def __init__(self, service: str, limit: float = 1.5) -> None:
        self._service = service
        self._limit = limit
        self._actor: ActorHandle[Any] | None = None
        self._looking: asyncio.Future[ActorHandle[Any]] | None = None

    def __getstate__(self) -> tuple[str, float]:
        return self._service, self._limit

    def __setstate__(self, state: tuple[str, float]) -> None:
        self._service, self._limit = state
        self._actor = self._looking = None

    async def renew(self, info: WorkerInfo) -> None:
        packed = _encoder.encode(info)
        await self._call(lambda controller: controller.renew.remote(packed))

    async def remove(self, worker_id: str) -> None:
        await self._call(lambda controller: controller.remove.remote(worker_id))

    async def table(self) -> Table:
        return _table.decode(await self._call(lambda controller: controller.table.remote()))

    async def _call(self, send: Callable[[ActorHandle[Any]], Any]) -> bytes:
        try:
            async with asyncio.timeout(self._limit):
                answer: bytes = await send(self._actor or await self._look_up())
        except (RayError, ValueError, TimeoutError) as error:
            if isinstance(error, ActorDiedError):
                self._actor = None
            reason = str(error).strip().splitlines()
            raise Internal(
                f"The controller of {self._service} does not answer ({(reason or ['timeout'])[0]})."
            ) from None
        return answer

    async def _look_up(self) -> ActorHandle[Any]:
        """One look-up at a time, however many callers give up on it."""
        if self._looking is None:
            find = functools.partial(ray.get_actor, controller_name(self._service), namespace=NAMESPACE)
            self._looking = asyncio.get_running_loop().run_in_executor(None, find)
            self._looking.add_done_callback(self._found)
        return await asyncio.shield(self._looking)

    def _found(self, looking: asyncio.Future[ActorHandle[Any]]) -> None:
        self._looking = None
        if not looking.cancelled() and looking.exception() is None:
            self._actor = looking.result()
