"""What a terminal shows while a service starts and runs: a line for each change, and how far weights and graphs are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.status import Status

from diptych.cluster.supervisor import GroupState

_CELLS = 12


class Progress:
    """`watch` may be called as often as one likes: only changes are printed, and what moves is redrawn in place (on a
    terminal only)."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._moving: Status | None = None
        self._seen: dict[str, str] = {}

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._moving = self._console.status("Starting")
            self._moving.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._moving is not None:
            self._moving.stop()

    def say(self, sentence: str) -> None:
        self._console.print(sentence, markup=False)

    def watch(self, groups: Sequence[GroupState]) -> None:
        for group in groups:
            if self._seen.get(group.name) != group.state:
                self._seen[group.name] = group.state
                # A short state may fall between two looks: the reason stays with those that follow it.
                why = f": {group.message}" if group.message else ""
                self.say(f"  {group.name} {group.state}{' again' if group.starts > 1 else ''}{why}")
        if self._moving is not None:
            self._moving.update(self._moment(groups))

    def _moment(self, groups: Sequence[GroupState]) -> str:
        waiting = [group for group in groups if group.state != "ready"]
        if not waiting:
            return "Serving; Ctrl-C stops"
        return ", ".join(map(_start, waiting))


def _start(group: GroupState) -> str:
    """How far one group's start is, with a bar while it loads weights or captures graphs."""
    far = f"{group.what} {_bar(group.loaded)} {group.loaded:.0%}" if group.state == "loading" else group.state
    return f"{group.name} {far} {group.seconds:.0f} s"


def _bar(share: float) -> str:
    full = int(share * _CELLS)
    return "━" * full + "╌" * (_CELLS - full)
