"""What a router knows of the model without opening its weights: config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from diptych.contract.errors import ModelUnsupported


class ModelFacts(msgspec.Struct, frozen=True):
    """end_ids: the model's own end tokens; generation_config.json's win over config.json's."""

    name: str
    architecture: str
    vocabulary: int
    max_context: int
    end_ids: tuple[int, ...]


def model_facts(folder: Path, name: str = "") -> ModelFacts:
    """Raises `ModelUnsupported` naming the file, or the key that is missing in it."""
    config = _read(folder / "config.json")
    text = config.get("text_config", config)
    generation = folder / "generation_config.json"
    ends = _ids(_read(generation).get("eos_token_id")) if generation.is_file() else ()
    return ModelFacts(
        name=name or folder.resolve().name,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        vocabulary=_count(folder, text, "vocab_size"),
        max_context=_count(folder, text, "max_position_embeddings"),
        end_ids=ends or _ids(text.get("eos_token_id")) or _ids(config.get("eos_token_id")),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelUnsupported(f"{file} is missing: the model folder must be in Hugging Face's layout.") from None
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{file} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise ModelUnsupported(f"{file} must hold a JSON object.")
    return content


def _count(folder: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelUnsupported(f"{folder / 'config.json'} has no valid {key!r}.")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) and all(isinstance(item, int) for item in value) else ()
