"""What a load consists of: chats of one or several turns, each with its tokens and, in a recorded one, its time.

Owns the formats of workloads (lengths, files of prompts, public traces). Knows no server and no clock.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from diptych.contract.errors import ConfigInvalid

FIRST_ID = 100
"""Random tokens start here: most vocabularies keep their control tokens below."""
MOONCAKE_BLOCK = 512
"""Tokens that one hash id of Mooncake's traces stands for."""


@dataclass(frozen=True)
class Turn:
    """What one turn adds to the chat's history (token ids, or a text that the service tokenises), and the answer."""

    tokens: tuple[int, ...]
    new: int
    text: str | None = None


@dataclass(frozen=True)
class Chat:
    """at: seconds after the start at which the first turn was recorded to come; 0 where nothing was recorded."""

    turns: tuple[Turn, ...]
    at: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer at the end of the last turn."""
        return sum(len(turn.tokens) + turn.new for turn in self.turns)


class Tokens:
    """Random token ids of a vocabulary; the same seed gives the same ones."""

    def __init__(self, vocab: int, seed: int | str) -> None:
        self.low = min(FIRST_ID, vocab // 2)
        self.vocab, self.draw, self.seed = vocab, random.Random(seed), seed

    def fresh(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw.choices(range(self.low, self.vocab), k=count))

    def block(self, name: int, count: int) -> tuple[int, ...]:
        """Always the same tokens for a name: how prefixes that a trace shares are shared again."""
        return tuple(random.Random(f"{self.seed}:{name}").choices(range(self.low, self.vocab), k=count))


def from_lengths(spec: str, turns: int, count: int, tokens: Tokens) -> Iterator[Chat]:
    """`count` chats of PROMPTxNEW tokens a turn; each side a number or a range (100-200x16)."""
    prompts, news = _lengths(spec)
    for _ in range(count):
        yield Chat(
            tuple(Turn(tokens.fresh(tokens.draw.randint(*prompts)), tokens.draw.randint(*news)) for _ in range(turns))
        )


def _lengths(spec: str) -> tuple[tuple[int, int], tuple[int, int]]:
    try:
        prompt, new = (_range(side) for side in spec.split("x"))
    except ValueError:
        raise ConfigInvalid(f"Lengths {spec!r} are not PROMPTxNEW, as 128x64 or 100-200x16-32.") from None
    return prompt, new


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


def from_prompts(path: Path) -> Iterator[Chat]:
    """JSON lines: {"prompt": TEXT or "tokens": [ids], "max_tokens": N}."""
    for number, line in _lines(path):
        raw = _json(path, number, line)
        text, ids, new = raw.get("prompt"), raw.get("tokens"), raw.get("max_tokens")
        valid = (isinstance(text, str) and text) or (isinstance(ids, list) and ids and all(type(i) is int for i in ids))
        if not valid or type(new) is not int or new < 1:
            raise ConfigInvalid(f'{path}:{number}: a line must hold "prompt" or "tokens", and "max_tokens" above 0.')
        yield Chat((Turn(tuple(ids or ()), new, text),))


def from_trace(path: Path, tokens: Tokens, shrink: float = 1.0) -> Iterator[Chat]:
    """Azure's CSV or Mooncake's JSON lines, told by their first line. shrink: divides all lengths."""
    first = next((line for _, line in _lines(path)), "")
    if first.startswith("TIMESTAMP,ContextTokens,GeneratedTokens"):
        return _azure(path, tokens, shrink)
    if first.startswith("{") and "hash_ids" in first:
        return _mooncake(path, tokens, shrink)
    raise ConfigInvalid(f"{path} is neither an Azure trace (CSV) nor a Mooncake trace (JSON lines with hash_ids).")


def _azure(path: Path, tokens: Tokens, shrink: float) -> Iterator[Chat]:
    start: datetime | None = None
    for number, line in _lines(path):
        if number == 1:
            continue
        try:
            stamp, prompt, new = next(csv.reader([line]))
            at = datetime.fromisoformat(stamp[:26])
            lengths = int(prompt), int(new)
        except (ValueError, StopIteration):
            raise _broken(path, number, line) from None
        if min(lengths) < 0:
            raise _broken(path, number, line)
        start = start or at
        turn = Turn(tokens.fresh(_shrunk(lengths[0], shrink)), _shrunk(lengths[1], shrink))
        yield Chat((turn,), (at - start).total_seconds())


def _mooncake(path: Path, tokens: Tokens, shrink: float) -> Iterator[Chat]:
    """A hash id names one block of the prompt and all before it; equal ids are equal tokens."""
    size = max(1, round(MOONCAKE_BLOCK / shrink))
    for number, line in _lines(path):
        raw = _json(path, number, line)
        try:
            at, prompt, new = float(raw["timestamp"]), int(raw["input_length"]), int(raw["output_length"])
            ids = [int(name) for name in raw["hash_ids"]]
        except (KeyError, TypeError, ValueError):
            raise _broken(path, number, line) from None
        length = _shrunk(prompt, shrink)
        shared = [token for name in ids for token in tokens.block(name, size)][:length]
        rest = tokens.fresh(length - len(shared))
        yield Chat((Turn((*shared, *rest), _shrunk(new, shrink)),), at / 1e3)


def _shrunk(length: int, shrink: float) -> int:
    return max(1, round(length / shrink))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} cannot be read: {error}.") from None


def _json(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except ValueError:
        raise _broken(path, number, line) from None
    if not isinstance(raw, dict):
        raise _broken(path, number, line)
    return raw


def _broken(path: Path, number: int, line: str) -> ConfigInvalid:
    return ConfigInvalid(f"{path}:{number} is broken: {line[:80]!r}.")


def taken(chats: Iterator[Chat], count: int, limit: int) -> tuple[list[Chat], int]:
    """The first `count` chats that fit a context of `limit` tokens, and how many were left out because they do not."""
    found: list[Chat] = []
    left_out = 0
    for chat in chats:
        if chat.longest > limit:
            left_out += 1
        else:
            found.append(chat)
        if len(found) == count:
            break
    if not found:
        raise ConfigInvalid(f"No request of the workload fits the service's context of {limit} tokens; see --shrink.")
    return found, left_out


Arrivals = Callable[[Sequence[Chat]], list[float]]


def poisson(rate: float, seed: int) -> Arrivals:
    """Exponential gaps, `rate` chats a second in the mean."""

    def times(chats: Sequence[Chat]) -> list[float]:
        draw, at, found = random.Random(seed), 0.0, []
        for _ in chats:
            at += draw.expovariate(rate)
            found.append(at)
        return found

    return times


def recorded(scale: float) -> Arrivals:
    """As recorded, `scale` times as fast."""

    def times(chats: Sequence[Chat]) -> list[float]:
        start = chats[0].at
        return [(chat.at - start) / scale for chat in chats]

    return times
