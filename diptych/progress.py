"""What a terminal shows while a service starts and runs: a line for each change, and how far the weights are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.status import Status

from diptych.cluster.supervisor import GroupState


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
        return ", ".join(f"{group.name} {group.state} {group.loaded:.0%} {group.seconds:.0f} s" for group in waiting)
