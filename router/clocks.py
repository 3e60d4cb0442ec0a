"""Another process's monotonic clock, seen from ours.

Owns two bounds on `offset = ours − theirs`, in ns: something that we sent before they saw it gives a lower one,
something that they sent before we saw it an upper one. Bounds grow apart with time, since clocks drift, until a tighter
pair of events replaces them. On one machine the clocks are the same, so an interval that holds 0 means 0.
"""

from __future__ import annotations

DRIFT = 1e-4  # ns a ns: twice what the worst quartz does


class Clock:
    """Fed by a session; read when spans are drawn."""

    def __init__(self) -> None:
        self._low: tuple[int, int] | None = None  # (offset, our time of it)
        self._high: tuple[int, int] | None = None

    def sent(self, ours: int, theirs: int) -> None:
        """We sent at `ours` what they received not later than `theirs`."""
        low = self._low
        if low is None or ours - theirs > low[0] - DRIFT * (ours - low[1]):
            self._low = (ours - theirs, ours)

    def received(self, theirs: int, ours: int) -> None:
        """They sent at `theirs` what we received at `ours`."""
        high = self._high
        if high is None or ours - theirs < high[0] + DRIFT * (ours - high[1]):
            self._high = (ours - theirs, ours)

    def estimate(self) -> tuple[int, int]:
        """(offset, its error), ns: add the offset to a time of theirs. Without any event: (0, 0)."""
        low = self._low[0] if self._low else None
        high = self._high[0] if self._high else None
        if low is None or high is None:
            known = high if low is None else low
            return known or 0, 0
        if low <= 0 <= high:
            return 0, max(high, -low)
        return (low + high) // 2, abs(high - low) // 2
