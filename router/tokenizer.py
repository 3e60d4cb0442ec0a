"""Token ids ↔ bytes of text, for one model folder.

Owns the loaded tokenizer and a table with every token's bytes. Knows neither chat templates (`chat`) nor streams
(`detokenizer`). Everything here is read-only after `load`, so that threads may share it.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from diptych.contract.errors import InvalidRequest, ModelUnsupported

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """`pieces[id]` is what a token adds to the text: its bytes, nothing for control tokens.

    controls: control tokens' text → id. added: those and other added tokens (such as <think>), which have a meaning of
    their own as well. `source` is transformers' own tokenizer, kept for its chat template.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        state = json.loads(source.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None
        self.state: dict[str, Any] = state
        self._encoder = Backend.from_str(json.dumps(state))
        self.added: dict[str, int] = {token["content"]: token["id"] for token in state["added_tokens"]}
        self.controls = {token["content"]: token["id"] for token in state["added_tokens"] if token["special"]}
        self.names: dict[int, str] = {index: text for text, index in self._encoder.get_vocab().items()}
        self.pieces = self._table(_byte_level(state["decoder"]))
        self.longest = max((len(piece) for piece in self.pieces), default=1)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises `ModelUnsupported` naming the folder when it has no tokenizer that we can serve."""
        if not folder.is_dir():
            raise ModelUnsupported(f"The model folder {folder} does not exist.")
        with _torch_unseen():
            from transformers import AutoTokenizer
        try:
            source = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # its parsers raise whatever they like
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
            raise ModelUnsupported(f"The tokenizer in {folder} is missing or cannot be read ({why}).") from error
        if getattr(source, "backend_tokenizer", None) is None:
            raise ModelUnsupported(f"The tokenizer in {folder} has no tokenizer.json, which Diptych needs.")
        return cls(source)

    @property
    def eos_id(self) -> int | None:
        return self.source.eos_token_id  # type: ignore[no-any-return]

    def encode(self, text: str) -> tuple[int, ...]:
        """A raw prompt: control tokens in it are control tokens, and what the model's tokenizer puts around a text
        (such as a first token) is put around it."""
        return tuple(self._encoder.encode(text, add_special_tokens=True).ids)

    def text(self, ids: Iterable[int]) -> str:
        """All of it, control tokens shown by their name, incomplete characters as U+FFFD."""
        return b"".join(self.piece_or_name(token) for token in ids).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        return self.piece_or_name(token).decode("utf-8", "replace")

    def piece_or_name(self, token: int) -> bytes:
        if token >= len(self.pieces):
            return b""  # rows of the embedding that no token uses
        return self.pieces[token] or self.names.get(token, "").encode()

    def open_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of an incomplete character at the end of `ids`, else nothing."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(self.piece_or_name(token) for token in ids[-4:]))
        return decoder.getstate()[0]

    def _table(self, byte_level: bool) -> list[bytes]:
        to_byte = _from_printable()
        table = [b""] * (max(self.names, default=-1) + 1)
        for index, text in self.names.items():
            if text in self.controls:
                continue
            table[index] = text.encode() if text in self.added else _piece(text, byte_level, to_byte)
        return table


@contextlib.contextmanager
def _torch_unseen() -> Iterator[None]:
    """transformers looks for torch when it is first imported, and then loads all of it, though a tokenizer needs none:
    a router is ready 2 s of a core sooner without, and holds 174 MB in place of 440. A process that has loaded either
    goes on as it was."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # it would say that there are no models without torch
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python takes for a module that is not to be found
    try:
        yield
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[quiet]
        else:
            os.environ[quiet] = before


def _piece(text: str, byte_level: bool, to_byte: dict[str, int]) -> bytes:
    if byte_level:
        return b"".join(bytes([to_byte[char]]) if char in to_byte else char.encode() for char in text)
    byte = _BYTE_PIECE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()


def _byte_level(decoder: dict[str, Any] | None) -> bool:
    """Whether tokens spell bytes as printable characters (else: pieces with ▁ for a space and <0x..> for a byte)."""
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    named = ", ".join(sorted(kinds)) or "none"
    raise ModelUnsupported(f"The tokenizer's decoder ({named}) is not supported: it must be ByteLevel or ByteFallback.")


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    inner = decoder.get("decoders", [])
    return {decoder["type"]} - {"Sequence"} | {kind for each in inner for kind in _kinds(each)}


def _from_printable() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + rank): byte for rank, byte in enumerate(other)}


def must_be_text(field: str, text: str) -> str:
    """Returns `text`, or raises `InvalidRequest` when it holds halves of characters (possible through JSON escapes)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field} holds half a character (a lone surrogate), which is no valid text.") from None
    return text
