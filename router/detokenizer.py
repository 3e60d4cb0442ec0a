"""Tokens of one stream → text, as they come. Never gives out half a character before the stream's end.

Since a token is a run of bytes, the state is one incremental UTF-8 decoder: what a stream joins to is by construction
what the whole decodes to.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """pieces: every token's bytes. opened: bytes of a character that the prompt left incomplete; the stream completes
    it, or begins with one U+FFFD. show_opened: give it out even if no token follows (the prompt is echoed)."""

    def __init__(self, pieces: Sequence[bytes], opened: bytes = b"", show_opened: bool = False) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(opened)
        self._silent = bool(opened) and not show_opened

    def push(self, token: int) -> str:
        """The text that this token completes."""
        if token >= len(self._pieces):
            return ""
        piece = self._pieces[token]
        self._silent = self._silent and not piece
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left: nothing, or one U+FFFD. Call it once."""
        return "" if self._silent else self._decoder.decode(b"", True)
