"""Stop strings over a text that comes in pieces.

The match that counts is the one that *ends* first; of several that end at the same character, the longest. Both are
properties of the text, not of how it was cut, so a stream and a whole answer stop alike. What may still become a match
is held back. Cost: one automaton step a character a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """A stop string with its failure table; `state` is how many of its characters the text's end matches."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._fall = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fall[length - 1]
            length += text[index] == text[length]
            self._fall[index] = length

    def step(self, char: str) -> bool:
        """Whether the text, with `char` added, ends in this pattern."""
        while self.state and self.text[self.state] != char:
            self.state = self._fall[self.state - 1]
        self.state += self.text[self.state] == char
        return self.state == len(self.text)


class StopMatcher:
    """stops: none empty. After a match, push nothing more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may go out now, the completed stop string or None). With a match the text ends before it."""
        if not self._patterns:
            return text, None
        whole = self._held + text
        for index, char in enumerate(text, len(self._held)):
            matched = [pattern.text for pattern in self._patterns if pattern.step(char)]
            if matched:
                stop = max(matched, key=len)
                self._held = ""
                return whole[: index + 1 - len(stop)], stop
        keep = max(pattern.state for pattern in self._patterns)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def finish(self) -> str:
        """What was held back: the text has ended, nothing can be completed any more."""
        held, self._held = self._held, ""
        return held
