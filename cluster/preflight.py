"""What can be known to be wrong before anything starts: the model's folder, looked at without loading it.

Takes milliseconds and imports no torch. The configuration is read as a worker reads it; tokenizer and weights are
checked in depth only at the start. This spares an operator the wait for a cluster when the folder cannot work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from diptych.contract.errors import ConfigInvalid, ModelUnsupported
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.values import read_json, weight_map
from diptych.workers.parallel.layout import refuse_bad_layout
from diptych.workers.settings import UNIFIED_MAXIMUM, WorkerSettings

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # the format's own


def model_folder(name: str) -> Path:
    """The folder of a path, or of a model that the local hub cache holds already; nothing is downloaded.

    Raises `ConfigInvalid` saying what to do."""
    if not name:
        raise ConfigInvalid("No model was named: pass --model FOLDER, or run `diptych demo`.")
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ConfigInvalid(f"The model {name} is a file; pass the folder that holds config.json and safetensors.")
    return _cached(name)


def check_model(folder: Path, *, weights: bool = True) -> None:
    """Raises `ModelUnsupported` naming the file (and the key, or the architecture) that cannot work."""
    ModelConfig.from_folder(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelUnsupported(
            f"The tokenizer {folder / 'tokenizer.json'} is missing; copy it from the model's source."
        )
    read_json(folder / "tokenizer.json")
    if weights:
        _check_weights(folder)


def check_layout(folder: Path, groups: Iterable[WorkerSettings]) -> None:
    """Raises `ConfigInvalid` with the numbers when a group's ranks cannot divide the model."""
    sizes = ModelConfig.from_folder(folder).sizes
    for group in groups:
        if group.tensor > 1 or group.spread_experts:
            refuse_bad_layout(sizes, group.grid, group.spread_experts, group.name)


def check_context(folder: Path, groups: Iterable[WorkerSettings]) -> None:
    """Raises `ConfigInvalid` when a group is to hold longer contexts than the model accepts."""
    positions = ModelConfig.from_folder(folder).max_positions
    for group in groups:
        group.context(positions)


def check_unified_maximum(folder: Path, groups: Iterable[WorkerSettings]) -> None:
    """Raises `ConfigInvalid` when a group's softmax needs a calibration that the model's folder does not hold."""
    path = folder / UNIFIED_MAXIMUM
    if not path.is_file() and any(group.softmax == "unified" for group in groups):
        raise ConfigInvalid(
            f"engine.softmax = unified needs {path}: run `diptych calibrate --model {folder} --prompts FILE` first."
        )


def _cached(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigInvalid(f"The model folder {name} does not exist.")
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise ConfigInvalid(
            f"{name} is neither a folder nor a model in the local hub cache; Diptych downloads nothing by itself."
        ) from None


def _check_weights(folder: Path) -> None:
    if (folder / _INDEX).is_file():
        for name in sorted(set(weight_map(folder / _INDEX).values())):
            _check_safetensors(folder / name)
    elif (folder / _SINGLE).is_file():
        _check_safetensors(folder / _SINGLE)
    else:
        raise ModelUnsupported(f"{folder} holds neither {_SINGLE} nor {_INDEX}; only safetensors are read.")


def _check_safetensors(path: Path) -> None:
    """The header must parse, and the file be as long as its header says."""
    if not path.is_file():
        raise ModelUnsupported(f"The weight file {path} is missing, which the index names.")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ModelUnsupported(f"The weight file {path} is damaged or cut short: its header is not whole.")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            needed = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise ModelUnsupported(f"The weight file {path} is damaged: its header cannot be read.") from None
    if size != needed:
        raise ModelUnsupported(f"The weight file {path} is damaged or cut short: {size} bytes of {needed}.")
