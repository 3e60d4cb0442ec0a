"""Keeps the configured worker groups running: starts each, waits for its end, replaces it under a new epoch.

Owns which incarnation of a group is the current one (never two at a time) and the state that a launcher shows. Does not
know whether groups are Ray actors or plain processes: it is given a `launch` that makes an `Incarnation`.

A group that fails before it was ever ready is not tried again: its launcher is told and gives up. One that was ready
once is replaced for ever, after a pause that doubles from `FIRST_PAUSE` to `LONGEST_PAUSE` while starts keep failing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import msgspec

from diptych.cluster.config import Group
from diptych.contract.errors import DiptychError, Internal, from_wire
from diptych.contract.limits import Limits
from diptych.contract.wire import WorkerInfo
from diptych.workers.channel import Loading

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
log = logging.getLogger(__name__)


class Incarnation(Protocol):
    """One life of one group, from launch to its last process's end.

    loaded: how far it is while it starts.
    """

    loaded: Loading

    async def start(self) -> WorkerInfo:
        """Waits until it is ready. Raises a `DiptychError` with one sentence if it cannot be. May be repeated."""

    async def wait(self) -> str:
        """Waits for its end, wanted or not, and says why. Never raises. May be repeated."""

    async def stop(self, drain: bool) -> None:
        """Ends all its processes and frees what was booked for it, within the limits; `drain` lets requests finish
        first. Also called on one that ended by itself or never started. May be repeated."""


Launch = Callable[[Group, str], Awaitable[Incarnation]]
"""Makes the incarnation of a group with an epoch; raises a `DiptychError` when there is no place for it."""


class GroupState(msgspec.Struct, frozen=True):
    """What a launcher shows of a group. seconds: how long it has been in this state. starts: incarnations so far.
    what, loaded: of the start, what is under way and its share that is done, 0 to 1."""

    name: str
    state: Literal["placing", "loading", "ready", "replacing", "failed", "stopped"]
    seconds: float
    starts: int
    what: str = ""
    loaded: float = 0.0
    code: str = ""
    message: str = ""


class _Slot:
    """The current incarnation of one group."""

    def __init__(self, group: Group, now: float) -> None:
        self.group = group
        self.incarnation: Incarnation | None = None
        self.info: WorkerInfo | None = None
        self.was_ready = False
        self.starts = 0
        self.error: DiptychError | None = None
        self.state: Literal["placing", "loading", "ready", "replacing", "failed", "stopped"] = "placing"
        self.since = now

    def loaded(self) -> Loading:
        return self.incarnation.loaded if self.incarnation else Loading()

    def enter(self, state: Literal["placing", "loading", "ready", "replacing", "failed", "stopped"]) -> None:
        self.state = state
        self.since = time.monotonic()


class Supervisor:
    """started, ended: called when a group has become ready and when it is gone (to keep a table, say)."""

    def __init__(
        self,
        groups: Sequence[Group],
        launch: Launch,
        limits: Limits,
        started: Callable[[WorkerInfo], None],
        ended: Callable[[WorkerInfo], None],
    ) -> None:
        self._launch = launch
        self._limits = limits
        self._started = started
        self._ended = ended
        self._slots = [_Slot(group, time.monotonic()) for group in groups]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, adopted: dict[str, Incarnation] | None = None) -> None:
        """Begins to run every group; those in `adopted` (by group name) live already and are only waited for."""
        for slot in self._slots:
            slot.incarnation = (adopted or {}).get(slot.group.name)
            slot.was_ready = slot.incarnation is not None
            self._tasks.append(asyncio.create_task(self._run(slot), name=f"supervise {slot.group.name}"))

    def states(self) -> list[GroupState]:
        now = time.monotonic()
        return [
            GroupState(
                name=slot.group.name,
                state=slot.state,
                seconds=now - slot.since,
                starts=slot.starts,
                what=slot.loaded().what,
                loaded=slot.loaded().share,
                code=slot.error.code if slot.error else "",
                message=str(slot.error) if slot.error else "",
            )
            for slot in self._slots
        ]

    def failure(self) -> DiptychError | None:
        """Why the service cannot start, once a group has failed for good."""
        for slot in self._slots:
            if slot.state == "failed" and slot.error is not None:
                return from_wire(slot.error.code, f"{slot.group.name}: {slot.error}")
        return None

    def ready(self) -> bool:
        return all(slot.state == "ready" for slot in self._slots)

    async def stop(self, drain: bool) -> None:
        """Stops replacing, then ends all groups at once. Afterwards nothing of them is left that could be ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*(self._end(slot, drain) for slot in self._slots))
        for slot in self._slots:
            slot.enter("stopped")

    async def _run(self, slot: _Slot) -> None:
        pause = FIRST_PAUSE
        while True:
            if await self._bring_up(slot):
                pause = FIRST_PAUSE
                await self._stay(slot)
            elif not slot.was_ready:
                return slot.enter("failed")
            slot.enter("replacing")
            gone = False
            while not gone:  # what may still live is never replaced: that would be two at a time
                gone = await self._end(slot, drain=False)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _bring_up(self, slot: _Slot) -> bool:
        """True when the slot's incarnation is ready; it is left in the slot either way, for `_end`."""
        try:
            if slot.incarnation is None:
                slot.enter("placing")
                slot.starts += 1
                slot.incarnation = await self._launch(slot.group, secrets.token_hex(8))
            slot.enter("loading")
            slot.info = await self._within_limit(slot, slot.incarnation)
        except DiptychError as error:
            log.warning("%s did not start: %s", slot.group.name, error)
            slot.error = error
            return False
        except Exception as error:  # a fork or Ray that fails is a failed start, never the silent end of this task
            log.exception("%s did not start", slot.group.name)
            slot.error = _internal(error)
            return False
        slot.error = None
        slot.was_ready = True
        self._started(slot.info)
        slot.enter("ready")
        return True

    async def _within_limit(self, slot: _Slot, incarnation: Incarnation) -> WorkerInfo:
        limit = self._limits.group_start
        try:
            return await asyncio.wait_for(incarnation.start(), limit)
        except TimeoutError:
            raise Internal(f"{slot.group.name} was not ready within limits.group_start ({limit:g} s).") from None

    async def _stay(self, slot: _Slot) -> None:
        assert slot.incarnation is not None
        try:
            slot.error = Internal(await slot.incarnation.wait())
            log.warning("%s ended: %s", slot.group.name, slot.error)
        except Exception as error:  # one that cannot be watched is replaced
            log.exception("%s cannot be watched", slot.group.name)
            slot.error = _internal(error)

    async def _end(self, slot: _Slot, drain: bool) -> bool:
        """True when nothing is left of the slot's incarnation; may be repeated when something may be."""
        incarnation, info = slot.incarnation, slot.info
        slot.info = None
        if info is not None:
            self._ended(info)
        try:
            if incarnation is not None:
                await incarnation.stop(drain)
        except Exception as error:
            log.exception("%s could not be ended", slot.group.name)
            slot.error = _internal(error)
            return False
        slot.incarnation = None
        return True


def _internal(error: Exception) -> Internal:
    said = " ".join(str(error).split())[:300].rstrip(".")
    return Internal(f"{type(error).__name__}: {said}." if said else f"{type(error).__name__}.")
