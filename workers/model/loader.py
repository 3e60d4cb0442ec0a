"""Fills a decoder's tensors from a folder of safetensors, one checkpoint tensor at a time.

Each merged tensor is allocated once and its parts are copied in, so a model is never in memory twice; a rank of a group
reads only its own slices. Nothing is used unset: tensors are filled with NaN first and every part is ticked off. The
checkpoint's format is known here only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diptych.contract.errors import ModelUnsupported
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.parameters import Cut, Parameter, cut, parameters
from diptych.workers.model.values import weight_map
from diptych.workers.parallel.layout import WHOLE, Shard

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
    shard: Shard = WHOLE,
) -> Weights:
    """The decoder's tensors by name (`parameters`), of `dtype` on `device`; of them what `shard` holds.

    load_format: auto reads safetensors (one file, or the shards of an index); dummy draws random weights. progress:
    called with (bytes done, bytes in all) after each checkpoint tensor. Raises `ModelUnsupported` in one sentence with
    the name of the file or tensor that is missing, cut short, of another shape, or that no layer uses.
    """
    wanted = {parameter.name: cut(parameter, shard) for parameter in parameters(config)}
    if load_format == "dummy":
        return {name: _random(own, dtype, device) for name, own in wanted.items()}
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


@dataclass
class _Filling:
    """The tensors being filled. places: to which parameter each checkpoint tensor belongs. open: by parameter, the
    checkpoint tensors that nobody has looked at yet."""

    weights: Weights
    places: dict[str, Cut] = field(default_factory=dict)
    open: dict[str, set[str]] = field(default_factory=dict)
    tied_head: Any = None

    @classmethod
    def of(cls, wanted: dict[str, Cut], dtype: torch.dtype, device: torch.device | str) -> _Filling:
        filling = cls({})
        for name, own in wanted.items():
            unset = 0.0 if own.padded else float("nan")
            filling.weights[name] = torch.full(own.shape, unset, dtype=dtype, device=device)
            filling.open[name] = {part.source for part in own.parameter.parts}
            filling.places |= dict.fromkeys(own.pieces, own)
        return filling

    def put(self, source: str, found: Any) -> int:
        """Copies what is wanted of a checkpoint's tensor (`get_slice`), and returns its bytes."""
        own = self.places[source]
        shape, pieces = own.pieces[source]
        if tuple(found.get_shape()) != shape:
            raise ModelUnsupported(
                f"Tensor {source} has shape {found.get_shape()}; config.json asks for {list(shape)}."
            )
        name, size = own.parameter.name, 0
        for piece in pieces:
            tensor = found[piece.take or slice(None)]
            if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                raise ModelUnsupported(f"Tensor {source} is {tensor.dtype}: quantised checkpoints are not supported.")
            self.weights[name][piece.region].copy_(tensor)
            size = math.prod(shape) * tensor.dtype.itemsize
        if source in {part.source for part in own.parameter.instead}:
            self.open[name].clear()
        self.open[name].discard(source)
        return size

    def set_aside(self, source: str, found: Any, config: ModelConfig, path: Path) -> int:
        """A tensor that has no place. A tied head is compared with the embedding, whose part it must be."""
        if not _ignored({source}, config):
            raise ModelUnsupported(f"{path} holds tensor {source}, which no layer of this model uses.")
        if source == "lm_head.weight":
            ((_, pieces),) = self.places["model.embed_tokens.weight"].pieces.values()
            self.tied_head = [(piece.region, found[piece.take or slice(None)]) for piece in pieces]
        return 0

    def check_complete(self, folder: str | Path) -> None:
        for sources in self.open.values():
            if sources:
                raise ModelUnsupported(f"Tensor {min(sources)} is missing from {folder}.")
        embedding = self.weights["embedding"]
        for region, head in self.tied_head or ():
            if not torch.equal(embedding[region], head.to(embedding)):
                raise ModelUnsupported(
                    f"{folder} holds lm_head.weight unlike the embedding, but config.json ties the two."
                )
        self.tied_head = None


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read and the tensors that the index places in each; None without an index."""
    if (folder / _INDEX).is_file():
        files: dict[Path, set[str] | None] = {}
        for tensor, name in weight_map(folder / _INDEX).items():
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


def _fill_from(path: Path, named: set[str] | None, filling: _Filling, config: ModelConfig) -> Iterator[int]:
    """Yields the bytes of each tensor read. A tensor in the file that the index does not place there is surplus too."""
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            if named is not None and (absent := named - present):
                raise ModelUnsupported(f"Tensor {min(absent)} is missing from {path}, where the index places it.")
            for source in sorted(present):
                found = file.get_slice(source)
                if source in filling.places:
                    yield filling.put(source, found)
                else:
                    yield filling.set_aside(source, found, config, path)
    except (SafetensorError, OSError) as error:
        raise ModelUnsupported(f"The weight file {path} is damaged or cut short: {error}.") from error


def _ignored(names: set[str], config: ModelConfig) -> set[str]:
    """Tensors that older checkpoints hold though their values follow from the configuration or from other tensors."""
    return {n for n in names if n.endswith(".rotary_emb.inv_freq") or (config.tied and n == "lm_head.weight")}


def _random(own: Cut, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Reproducible, the same at every rank, and small enough that activations stay finite in any depth."""
    parameter: Parameter = own.parameter
    if parameter.kind == "norm":
        return torch.ones(parameter.shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(sum(parameter.name.encode()) * 7919 + len(parameter.name))
    fan_in = parameter.shape[-1]
    noise = torch.empty(parameter.shape, dtype=dtype, device=device)
    noise.normal_(0.0, min(0.02, fan_in**-0.5), generator=generator)
    if own.shape == parameter.shape:
        return noise
    held = torch.zeros(own.shape, dtype=dtype, device=device)
    for piece in own.whole:
        held[piece.region].copy_(noise[piece.take])
    return held


def dtype_of(name: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """What a setting of dtype means here: auto is the checkpoint's own on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "float32" if torch.device(device).type == "cpu" else (config.dtype or "bfloat16")
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelUnsupported(f"dtype {name!r} is not one that weights can have.")
    return found
