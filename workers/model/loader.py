"""Fills a decoder's tensors from a folder of safetensors, one checkpoint tensor at a time.

Each merged tensor is allocated once and its parts are copied in, so a model is never in memory twice. Nothing is used
unset: tensors are filled with NaN first and every part is ticked off. The checkpoint's format is known here only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diptych.contract.errors import ModelUnsupported
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.parameters import Parameter, Part, parameters

Progress = Callable[[int, int], None]
Weights = dict[str, Tensor]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    progress: Progress | None = None,
) -> Weights:
    """The decoder's tensors by name (`parameters`), of `dtype` on `device`.

    load_format: auto reads safetensors (one file, or the shards of an index); dummy draws random weights. progress:
    called with (bytes done, bytes in all) after each checkpoint tensor. Raises `ModelUnsupported` in one sentence with
    the name of the file or tensor that is missing, cut short, of another shape, or that no layer uses.
    """
    wanted = {parameter.name: parameter for parameter in parameters(config)}
    if load_format == "dummy":
        return {name: _random(parameter, dtype, device) for name, parameter in wanted.items()}
    filling = _Filling.of(wanted, dtype, device)
    files = _files(Path(folder))
    named_anywhere = {name for named in files.values() for name in named or ()}
    if surplus := named_anywhere - set(filling.places) - _ignored(named_anywhere, config):
        raise ModelUnsupported(f"The index of {folder} names {min(surplus)}, which no layer of this model uses.")
    total, done = sum(path.stat().st_size for path in files), 0
    for path, named in files.items():
        for tensor_bytes in _fill_from(path, named, filling, config):
            done += tensor_bytes
            if progress is not None:
                progress(min(done, total), total)
    filling.check_complete(folder)
    if progress is not None:
        progress(total, total)
    return filling.weights


@dataclass(frozen=True)
class _Place:
    parameter: Parameter
    part: Part


@dataclass
class _Filling:
    """The tensors being filled. places: where each checkpoint tensor belongs. open: parts that nobody filled yet."""

    weights: Weights
    places: dict[str, _Place] = field(default_factory=dict)
    open: dict[str, set[str]] = field(default_factory=dict)
    tied_head: Tensor | None = None

    @classmethod
    def of(cls, wanted: dict[str, Parameter], dtype: torch.dtype, device: torch.device | str) -> _Filling:
        filling = cls({n: torch.full(p.shape, float("nan"), dtype=dtype, device=device) for n, p in wanted.items()})
        for parameter in wanted.values():
            filling.open[parameter.name] = {part.source for part in parameter.parts}
            for part in (*parameter.parts, *parameter.instead):
                filling.places[part.source] = _Place(parameter, part)
        return filling

    def put(self, source: str, tensor: Tensor) -> None:
        place = self.places[source]
        if tuple(tensor.shape) != place.part.shape:
            raise ModelUnsupported(
                f"Tensor {source} has shape {list(tensor.shape)}; config.json asks for {list(place.part.shape)}."
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelUnsupported(f"Tensor {source} is {tensor.dtype}: quantised checkpoints are not supported.")
        self.weights[place.parameter.name][place.part.region].copy_(tensor)
        if place.part in place.parameter.instead:
            self.open[place.parameter.name].clear()
        self.open[place.parameter.name].discard(source)

    def set_aside(self, source: str, tensor: Tensor, config: ModelConfig, path: Path) -> None:
        """A tensor that has no place. A tied head is kept (mapped from its file) until the embedding is known too."""
        if not _ignored({source}, config):
            raise ModelUnsupported(f"{path} holds tensor {source}, which no layer of this model uses.")
        if source == "lm_head.weight":
            self.tied_head = tensor

    def check_complete(self, folder: str | Path) -> None:
        for sources in self.open.values():
            if sources:
                raise ModelUnsupported(f"Tensor {min(sources)} is missing from {folder}.")
        embedding = self.weights["embedding"]
        if self.tied_head is not None and not torch.equal(embedding, self.tied_head.to(embedding)):
            raise ModelUnsupported(f"{folder} holds lm_head.weight unlike the embedding, but config.json ties the two.")
        self.tied_head = None


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read and the tensors that the index places in each; None without an index."""
    if (folder / _INDEX).is_file():
        files: dict[Path, set[str] | None] = {}
        for tensor, name in _weight_map(folder / _INDEX).items():
            names = files.setdefault(folder / name, set())
            assert names is not None
            names.add(tensor)
        for path in files:
            if not path.is_file():
                raise ModelUnsupported(f"The weight file {path} is missing; the index names it.")
        return files
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    raise ModelUnsupported(f"{folder} holds neither {_SINGLE} nor {_INDEX}; only safetensors are read.")


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())["weight_map"]
        names = {str(tensor): str(name) for tensor, name in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"{path} is not a valid index of safetensors: {error}.") from error
    for name in names.values():
        if Path(name).name != name:
            raise ModelUnsupported(f"{path} names the file {name!r}, which is not in its own folder.")
    return names


def _fill_from(path: Path, named: set[str] | None, filling: _Filling, config: ModelConfig) -> Iterator[int]:
    """Yields the bytes of each tensor read. A tensor in the file that the index does not place there is surplus too."""
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            if named is not None and (absent := named - present):
                raise ModelUnsupported(f"Tensor {min(absent)} is missing from {path}, where the index places it.")
            for source in sorted(present):
                tensor = file.get_tensor(source)
                if source in filling.places:
                    filling.put(source, tensor)
                else:
                    filling.set_aside(source, tensor, config, path)
                yield tensor.nbytes
    except (SafetensorError, OSError) as error:
        raise ModelUnsupported(f"The weight file {path} is damaged or cut short: {error}.") from error


def _ignored(names: set[str], config: ModelConfig) -> set[str]:
    """Tensors that older checkpoints hold though their values follow from the configuration or from other tensors."""
    return {n for n in names if n.endswith(".rotary_emb.inv_freq") or (config.tied and n == "lm_head.weight")}


def _random(parameter: Parameter, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Reproducible, and small enough that activations stay finite in any depth."""
    if parameter.kind == "norm":
        return torch.ones(parameter.shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(sum(parameter.name.encode()) * 7919 + len(parameter.name))
    fan_in = parameter.shape[-1]
    noise = torch.empty(parameter.shape, dtype=dtype, device=device)
    return noise.normal_(0.0, min(0.02, fan_in**-0.5), generator=generator)


def dtype_of(name: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """What a setting of dtype means here: auto is the checkpoint's own on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "float32" if torch.device(device).type == "cpu" else (config.dtype or "bfloat16")
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelUnsupported(f"dtype {name!r} is not one that weights can have.")
    return found
