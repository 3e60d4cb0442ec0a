"""The JSON files of a model's folder: each value is checked as it is handed out.

Whatever a file holds, a reader gets a value of the kind that it asked for, or raises `ModelUnsupported` with the file,
the key and the value. Imports no torch: a launcher and a router read these files too.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from diptych.contract.errors import ModelUnsupported

SIZE_LIMIT = (1 << 31) - 1  # what indexes of 32 bits reach
_SHOWN = 80


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelUnsupported` in one sentence that names it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ModelUnsupported(f"{path} is missing; the folder must be in Hugging Face's layout.") from None
    except RecursionError:
        raise ModelUnsupported(f"{path} cannot be read: it nests too deeply.") from None
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{path} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise ModelUnsupported(f"{path} must hold a JSON object.")
    return found


def weight_map(path: Path) -> dict[str, str]:
    """Of the index of a checkpoint in several files: each tensor's file, all of them in the index's own folder."""
    named = read_json(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ModelUnsupported(f"{path} has no weight_map.")
    for name in named.values():
        if not isinstance(name, str) or not name or not name.isprintable() or Path(name).name != name:
            raise ModelUnsupported(f"{path} names the file {shown(name)}, which is not in its own folder.")
    return named


def shown(value: object) -> str:
    """A value of a file as a message shows it: on one line, and not all of it where it is long."""
    return _cut(value if isinstance(value, str) and value.isprintable() and value else repr(value))


class Values:
    """What a JSON object holds. A key whose value is null counts as absent; `default` stands in for it, and where there
    is none the key is demanded. Every method raises `ModelUnsupported` for a value of another kind.

    file: for messages. seen: the keys that were asked for."""

    def __init__(self, found: dict[str, Any], file: str) -> None:
        self.found, self.file = found, file
        self.seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, be it with null."""
        return key in self.found

    def given(self) -> dict[str, Any]:
        """All that is not null."""
        return {key: value for key, value in self.found.items() if value is not None}

    def value(self, key: str, default: Any = None) -> Any:
        """Unchecked."""
        self.seen.add(key)
        found = self.found.get(key)
        return default if found is None else found

    def size(self, key: str, default: int | None = None, most: int = SIZE_LIMIT) -> int:
        """A positive whole number."""
        return self._whole(key, default, 1, most, "a positive whole number")

    def size_or_none(self, key: str, default: int | None = None) -> int | None:
        return None if self.value(key, default) is None else self.size(key, default)

    def count(self, key: str, default: int) -> int:
        """A whole number, 0 or more."""
        return self._whole(key, default, 0, SIZE_LIMIT, "a whole number of at least 0")

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A finite number above 0, and at least `least`."""
        found = self._demanded(key, default)
        if _is_number(found) and found > 0 and found >= least:
            return float(found)
        raise self.wrong(key, f"a number of at least {least:g}" if least else "a positive number")

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.value(key, default)
        if not isinstance(found, bool):
            raise self.wrong(key, "true or false")
        return found

    def text(self, key: str, default: str = "") -> str:
        found = self.value(key, default)
        if not isinstance(found, str):
            raise self.wrong(key, "a text")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts of a list; none where the key is absent."""
        return tuple(self._list(key, str, "a list of texts"))

    def wholes(self, key: str) -> tuple[int, ...]:
        """The whole numbers of a list; none where the key is absent."""
        return tuple(self._list(key, int, "a list of whole numbers"))

    def ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """One token id, a list of them, or nothing."""
        found = self.value(key, default)
        if found is None:
            return ()
        ids = found if isinstance(found, list) else [found]
        if not all(_is_whole(each) and 0 <= each <= SIZE_LIMIT for each in ids):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(ids)

    def table(self, key: str) -> Values:
        """The object inside; an empty one where the key is absent. Its messages name both keys."""
        found = self.value(key, {})
        if not isinstance(found, dict):
            raise self.wrong(key, "an object")
        return Values(found, f"{key} of {self.file}")

    def wrong(self, key: str, must: str) -> ModelUnsupported:
        """The error that the key's value is not what it must be."""
        return ModelUnsupported(f"{self.file} gives {key} = {_cut(repr(self.found.get(key)))}; it must be {must}.")

    def _whole(self, key: str, default: int | None, least: int, most: int, must: str) -> int:
        found = self._demanded(key, default)
        if not _is_whole(found) or found < least:
            raise self.wrong(key, must)
        if found > most:
            raise self.wrong(key, f"at most {most:,}")
        return int(found)

    def _demanded(self, key: str, default: Any) -> Any:
        found = self.value(key, default)
        if found is None:
            raise ModelUnsupported(f"{self.file} does not give {key}.")
        return found

    def _list(self, key: str, kind: type, must: str) -> list[Any]:
        found = self.value(key, [])
        if not isinstance(found, list) or not all(type(each) is kind for each in found):
            raise self.wrong(key, must)
        return found


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Finite as a float: JSON's whole numbers have no end, and Python reads NaN and Infinity."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
