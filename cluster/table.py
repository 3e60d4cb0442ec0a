"""The table of live workers: pure logic, shared by the local registry server and the Ray controller.

Owns entries, their age and the version. Knows no clock and no network: every call is given the time, in seconds of one
monotonic clock. The version rises whenever what `table` answers changes, and never because an entry was only renewed.
It starts from the given number, so that a restarted owner can go on above its predecessor's.
"""

from __future__ import annotations

from diptych.contract.registry import Table
from diptych.contract.wire import WorkerInfo


class WorkerTable:
    """drop_after: seconds after which an entry that was not renewed is gone."""

    def __init__(self, drop_after: float, version: int = 0) -> None:
        self._drop_after = drop_after
        self._version = version
        self._entries: dict[str, tuple[WorkerInfo, float]] = {}

    def renew(self, info: WorkerInfo, now: float) -> None:
        """Adds or refreshes; may be repeated."""
        self._sweep(now)
        known = self._entries.get(info.id)
        self._entries[info.id] = (info, now)
        if known is None or known[0] != info:
            self._version += 1

    def remove(self, worker_id: str, now: float) -> None:
        """Drops at once; an unknown id is ignored."""
        self._sweep(now)
        if self._entries.pop(worker_id, None) is not None:
            self._version += 1

    def table(self, now: float) -> Table:
        """The entries that are not older than `drop_after`, sorted by id."""
        self._sweep(now)
        return Table(self._version, tuple(self._entries[worker_id][0] for worker_id in sorted(self._entries)))

    def _sweep(self, now: float) -> None:
        late = [key for key, (_, renewed) in self._entries.items() if now - renewed > self._drop_after]
        for worker_id in late:
            del self._entries[worker_id]
        self._version += bool(late)
