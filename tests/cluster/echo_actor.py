"""A worker actor without a model: a real process that registers and can be killed, for the controller's own tests."""

from __future__ import annotations

import asyncio
import os

import msgspec

from diptych.cluster.ray_group import Failed, Started, WorkerActor
from diptych.contract.registry import Registry
from diptych.contract.wire import WorkerInfo
from diptych.workers.channel import Loading
from diptych.workers.settings import WorkerSettings


class EchoActor(WorkerActor):
    """Ready at once; a model named `broken` cannot start."""

    def __init__(self, settings: bytes, secret: bytes, registry: Registry, epoch: str) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=WorkerSettings)
        self._registry = registry
        self._epoch = epoch
        self._loaded = Loading()
        self._ended = asyncio.Event()

    async def start(self) -> bytes:
        if self._settings.model == "broken":
            return msgspec.msgpack.encode(Failed("ModelUnsupported", "Architecture X is not supported."))
        await self._registry.renew(self._info())
        return msgspec.msgpack.encode(Started(self._info()))

    async def wait(self) -> str:
        await self._ended.wait()
        return "stopped"

    async def stop(self, drain: bool) -> None:
        self._ended.set()

    def _info(self) -> WorkerInfo:
        settings = self._settings
        return WorkerInfo(
            id=f"{settings.name}-{self._epoch}",
            role=settings.role,
            address="127.0.0.1:1",
            links=("127.0.0.1:2",),
            epoch=self._epoch,
            digest="d",
            pid=os.getpid(),
            engine_pids=(),
            block_size=settings.block_size,
            total_blocks=1,
            max_context=64,
        )
