"""The text of one choice: tokens in, text out, stop strings obeyed, tokens counted up to what ended it.

Owns the choice's detokenizer and matcher. Does not know where tokens come from nor who reads the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from diptych.contract.request import Stopping
from diptych.router.detokenizer import Detokenizer
from diptych.router.stops import StopMatcher


class Delta(msgspec.Struct, frozen=True):
    """text: what may go out now. used: how many of the given tokens count. stop: the stop string that ended it."""

    text: str
    used: int
    stop: str | None = None


class TextStream:
    """stopping: its stop ids' text is never shown, and its first `min_tokens` tokens pass the stop strings by."""

    def __init__(self, detokenizer: Detokenizer, stopping: Stopping, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stop_ids = stopping.stops
        self._min_tokens = stopping.min_tokens
        self.count = 0

    def push(self, ids: Sequence[int]) -> Delta:
        """In the order of positions. After a delta with `stop`, push nothing more."""
        shown: list[str] = []
        for used, token in enumerate(ids, 1):
            self.count += 1
            text, stop = self._one(token)
            shown.append(text)
            if stop is not None:
                return Delta("".join(shown), used, stop)
        return Delta("".join(shown), len(ids))

    def finish(self) -> Delta:
        """The rest, when generation has ended without a stop string. Call it once."""
        text, stop = self._matcher.push(self._detokenizer.finish())
        return Delta(text, 0, stop) if stop is not None else Delta(text + self._matcher.finish(), 0)

    def _one(self, token: int) -> tuple[str, str | None]:
        if token in self._stop_ids and self.count > self._min_tokens:
            return "", None
        text = self._detokenizer.push(token)
        return (text, None) if self.count <= self._min_tokens else self._matcher.push(text)
