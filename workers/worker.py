"""A worker group's front: a process without torch that serves routers and keeps its engines.

Owns the group's life (it lives and dies as one) and the registry entry. The same class runs in a Ray actor and in a
plain process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial

from diptych.contract.errors import DiptychError, Internal
from diptych.contract.registry import Registry
from diptych.contract.wire import WorkerInfo
from diptych.workers.channel import Drain, Emit, Fatal, Peers, Report
from diptych.workers.engines import Engines, Progress
from diptych.workers.sessions import Sessions
from diptych.workers.settings import WorkerSettings

log = logging.getLogger("diptych.front")


class Worker:
    """One worker group. `start` once, then `wait`; `stop` at any time, repeatedly."""

    def __init__(
        self,
        settings: WorkerSettings,
        secret: bytes,
        registry: Registry,
        epoch: str = "",
        progress: Progress | None = None,
    ) -> None:
        self.settings, self.registry = settings, registry
        self.limits = settings.limits
        self.epoch = epoch or secrets.token_hex(8)
        self.id = f"{settings.name or settings.role}-{self.epoch[:8]}"
        self.info: WorkerInfo | None = None
        self.engines = Engines(settings, self.id, progress)
        self._secret = secret
        self._sessions = Sessions(
            self.id, secret, self.epoch, self.limits, lambda message: self.engines.first.send(message)
        )
        self._heard = time.monotonic()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    # ── life ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> WorkerInfo:
        """Starts the engine and serves; returns the registered entry. Raises the engine's own error in one sentence, or
        `Internal` when it is not up within `limits.group_start`; nothing is left running then."""
        try:
            await self.engines.start(self._secret, self.epoch)
            ups = await asyncio.wait_for(self.engines.up(), self.limits.group_start)
            address = await self._sessions.serve(self.settings.host)
        except TimeoutError as error:
            await self.stop(drain=False)
            raise Internal(f"Worker {self.id} was not up within {self.limits.group_start:.0f} s.") from error
        except BaseException:
            await self.stop(drain=False)
            raise
        up = ups[0]
        self.info = self._sessions.info = WorkerInfo(
            id=self.id,
            role=self.settings.role,
            address=address,
            links=tuple(rank.link for rank in ups),
            epoch=self.epoch,
            digest=up.digest,
            pid=os.getpid(),
            engine_pids=tuple(rank.pid for rank in ups),
            block_size=up.block_size,
            total_blocks=up.total_blocks,
            max_context=up.max_context,
            transport=up.transport,
            device=up.device,
            data=self.settings.data,
        )
        background = [self._pump, self._renew, self._watch]
        background += [partial(self._follow, index) for index in range(1, len(self.engines))]
        self._tasks = [asyncio.create_task(self._guarded(run)) for run in background]
        await self._register()
        return self.info

    async def wait(self) -> str:
        """Returns when the group has ended, with the reason in one sentence."""
        return await asyncio.shield(self._ended)

    async def stop(self, drain: bool = True) -> None:
        """Ends the group: with `drain` it first finishes what it has, within `limits.drain`."""
        if drain and not self._ended.done() and self.info is not None:
            self.engines.first.send(Drain())
            deadline = time.monotonic() + self.limits.drain
            # What the load says before the engine has taken note of the drain is old.
            while time.monotonic() < deadline and (not self._sessions.load.draining or self._busy()):
                await asyncio.sleep(0.05)
        await self._end("It was stopped.")

    def _busy(self) -> bool:
        load = self._sessions.load
        return bool(load.running or load.waiting or load.reserved)

    async def _end(self, reason: str) -> None:
        """Idempotent. Kills the engine first, so that nothing of the group outlives the sessions' end by more than
        `limits.kill`."""
        if self._stopping:
            await asyncio.shield(self._ended)
            return
        self._stopping = True
        try:
            self.engines.kill()
            self._sessions.end()
            current = asyncio.current_task()
            for task in self._tasks:
                if task is not current:
                    task.cancel()
            await self._leave()
        finally:
            if not self._ended.done():
                self._ended.set_result(reason)

    async def _leave(self) -> None:
        """What can be done for others, each with a limit; a process that the kernel cannot reap (a faulty device) must
        not keep the group's end from being told."""
        if not await self.engines.gone():
            log.error("an engine of %s was killed and is not gone after %.0f s", self.id, self.limits.kill)
        await self._sessions.stop()
        if self.info is not None:
            try:
                await asyncio.wait_for(self.registry.remove(self.id), self.limits.heartbeat)
            except (DiptychError, TimeoutError) as error:
                log.info("the registry did not take the leave of %s: %r", self.id, error)
        self.engines.close()

    async def _guarded(self, run: Callable[[], Awaitable[None]]) -> None:
        """A background task that fails ends the group: half a front would look healthy for ever."""
        try:
            await run()
        except Exception as error:
            log.exception("a background task of %s failed", self.id)
            await self._end(f"The front failed: {error!r}")

    # ── background ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _pump(self) -> None:
        """From the engine to the sessions, until the engine is gone: then so is the group."""
        reason = "The engine ended."
        try:
            while True:
                message = await self.engines.first.receive()
                if isinstance(message, Emit):
                    self._sessions.put(message.session, message.message)
                elif isinstance(message, Report):
                    self._heard = time.monotonic()
                    self._sessions.note(message.load)
                elif isinstance(message, Fatal):
                    reason = f"{message.code}: {message.message}"
                    log.error("engine of %s: %s", self.id, reason)
        except EOFError:
            pass
        await self._end(reason)

    async def _follow(self, index: int) -> None:
        """Until a rank that follows is gone: then so is the group, whatever its first rank still waits for."""
        reason = f"Rank {index} of {len(self.engines)} ended."
        try:
            while True:
                message = await self.engines.channel(index).receive()
                if isinstance(message, Fatal):
                    reason = f"Rank {index} of {len(self.engines)} failed: {message.code}: {message.message}"
                    log.error("%s: %s", self.id, reason)
        except EOFError:
            pass
        await self._end(reason)

    async def _register(self) -> None:
        """So that the table knows the group when `start` returns; `_renew` goes on trying where that failed."""
        assert self.info is not None
        try:
            await asyncio.wait_for(self.registry.renew(self.info), self.limits.register)
        except (DiptychError, TimeoutError) as error:
            log.warning("registry: %s", error)

    async def _renew(self) -> None:
        """Keeps the registry entry and, for prefill, the engine's list of decode workers. A registry that is gone for
        `limits.orphan` ends the group: nobody could reach or stop it any more."""
        assert self.info is not None
        seen = time.monotonic()
        while True:
            try:
                await asyncio.wait_for(self.registry.renew(self.info), self.limits.register)
                table = await asyncio.wait_for(self.registry.table(), self.limits.register)
                seen = time.monotonic()
                if self.settings.role == "prefill":
                    self.engines.first.send(Peers(table.workers))
            except (DiptychError, TimeoutError) as error:
                log.warning("registry: %s", error)
                if time.monotonic() - seen > self.limits.orphan:
                    await self._end(f"The registry was gone for {self.limits.orphan:.0f} s.")
                    return
            await asyncio.sleep(self.limits.register / 4)

    async def _watch(self) -> None:
        """Forward progress is health: an engine reports after each step and at each heartbeat; one that does neither
        within `limits.step` is dead, whatever its process does."""
        self._heard = time.monotonic()
        while True:
            await asyncio.sleep(self.limits.heartbeat)
            if time.monotonic() - self._heard > self.limits.step:
                await self._end(f"The engine completed no step for {self.limits.step:.0f} s.")
                return
