"""Membership's one interface: a Ray actor in service, a small local server in tests without Ray."""

from __future__ import annotations

from typing import Protocol

import msgspec

from diptych.contract.wire import WorkerInfo


class Table(msgspec.Struct, frozen=True):
    """A versioned snapshot of the workers that renewed their entry within `limits.registry_drop`."""

    version: int
    workers: tuple[WorkerInfo, ...]


class Registry(Protocol):
    """Soft state that workers renew. Every call is bounded in time, may be repeated, and raises `Internal` (it never
    hangs) when the registry is gone: callers then go on with their last table."""

    async def renew(self, info: WorkerInfo) -> None:
        """Registers or refreshes an entry. Called by fronts only, every `limits.register`."""

    async def remove(self, worker_id: str) -> None:
        """Drops an entry at once; unknown ids are ignored."""

    async def table(self) -> Table:
        """The table now. Routers poll it each second."""
