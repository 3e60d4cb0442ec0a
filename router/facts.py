"""What a router knows of the model without opening its weights: config.json and generation_config.json."""

from __future__ import annotations

from pathlib import Path

import msgspec

from diptych.workers.model.config import ModelConfig


class ModelFacts(msgspec.Struct, frozen=True):
    """end_ids: the model's own end tokens; generation_config.json's win over config.json's."""

    name: str
    architecture: str
    vocabulary: int
    max_context: int
    end_ids: tuple[int, ...]


def model_facts(folder: Path, name: str = "") -> ModelFacts:
    """Raises `ModelUnsupported` naming the file, and the key in it that cannot work."""
    config = ModelConfig.from_folder(folder)
    return ModelFacts(
        name=name or folder.resolve().name,
        architecture=config.architecture,
        vocabulary=config.vocab,
        max_context=config.max_positions,
        end_ids=config.end_ids,
    )
