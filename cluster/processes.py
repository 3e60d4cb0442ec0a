"""Facts about processes, read from Linux's /proc: who descends from whom, who lives, and how much memory they use."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """All processes below `pid` now, without itself."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def alive(pid: int) -> bool:
    """False for a zombie too: it holds nothing any more."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def memory(pid: int) -> int:
    """Bytes of physical memory, shared pages divided among those who share them; 0 if it is gone."""
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:  # gone, or a kernel thread
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


class MemoryWatch:
    """Samples the memory of this process and all below it until `stop`, which returns the peak in bytes."""

    def __init__(self, every: float = 0.5) -> None:
        self._every = every
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak

    def _run(self) -> None:
        while True:
            own = os.getpid()
            self._peak = max(self._peak, sum(memory(pid) for pid in [own, *descendants(own)]))
            if self._done.wait(self._every):
                return


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on: the fields after the command, which may itself hold spaces and brackets."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it ended while we looked
        return None
