"""The model's own configuration: what `config.json` and `generation_config.json` say, as one frozen value.

Every key is handled, known to change no number of a forward pass, or refused by name: a key that nobody reads is how a
model gives silently different numbers. Defaults are those of transformers' class of the same architecture. Knows
nothing of weights or devices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.contract.errors import ModelUnsupported
from diptych.workers.model.family import FAMILIES, HARMLESS, Family
from diptych.workers.model.rope import RopeConfig


@dataclass(frozen=True)
class MoeConfig:
    """sparse: for each layer, whether it has experts. width: an expert's F. normalise: the top_k weights sum to 1."""

    experts: int
    top_k: int
    width: int
    normalise: bool
    sparse: tuple[bool, ...]


@dataclass(frozen=True)
class ModelConfig:
    """hidden, heads, …: sizes. windows: a layer's sliding window, or None. bias: of the qkv product; out_bias: of the
    attention's output. max_positions: the longest context. end_ids: tokens that end a generation. fused: the checkpoint
    holds qkv and gate_up merged already. dtype: in which the checkpoint was saved, if it says so."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    max_positions: int
    end_ids: tuple[int, ...]
    tied: bool = False
    bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    moe: MoeConfig | None = None
    dtype: str | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads the folder of a model in Hugging Face's layout. Raises `ModelUnsupported`."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelUnsupported(f"The model folder {folder} does not exist.")
        raw = _read_json(folder / "config.json", required=True)
        config = cls.from_dict(raw)
        ends = _end_ids(_read_json(folder / "generation_config.json", required=False).get("eos_token_id"))
        return config if not ends else cls(**{**config.__dict__, "end_ids": ends})

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """The same from the contents of `config.json` alone."""
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        read = _Reader(raw, family)
        heads, hidden, layers = (
            read.size("num_attention_heads"),
            read.size("hidden_size"),
            read.size("num_hidden_layers"),
        )
        kv_heads = read.size("num_key_value_heads", heads)
        head_dim = read.size("head_dim", hidden // heads)
        max_positions = read.size("max_position_embeddings", family.max_positions)
        if heads % kv_heads:
            raise ModelUnsupported(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
        has_bias = bool(read.value("attention_bias", False)) if family.bias == "optional" else family.bias == "qkv"
        config = cls(
            architecture=architecture,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            width=read.size("intermediate_size"),
            vocab=read.size("vocab_size"),
            eps=float(read.value("rms_norm_eps", family.eps)),
            rope=RopeConfig.from_dict(raw, family, head_dim, max_positions),
            windows=_windows(read, family, layers),
            max_positions=max_positions,
            end_ids=_end_ids(read.value("eos_token_id", family.end_id)),
            tied=bool(read.value("tie_word_embeddings", False)),
            bias=has_bias,
            out_bias=has_bias and family.bias == "optional",
            qk_norm=family.qk_norm,
            fused=family.fused,
            moe=_moe(read, family, layers),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
        )
        read.refuse_rest()
        return config

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and self.moe.sparse[layer]


class _Reader:
    """Hands out values and remembers which keys were asked for."""

    def __init__(self, raw: dict[str, Any], family: Family) -> None:
        self.raw = raw
        self.family = family
        self.seen: set[str] = set()

    def value(self, key: str, default: Any) -> Any:
        self.seen.add(key)
        found = self.raw.get(key)
        return default if found is None else found

    def size(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ModelUnsupported(f"config.json gives {key} = {found!r}; it must be a positive whole number.")
        return found

    def refuse_rest(self) -> None:
        if (act := self.value("hidden_act", "silu")) != "silu":
            raise ModelUnsupported(f"hidden_act {act!r} is not supported; only silu is.")
        for key, value in self.raw.items():
            ignored = key in self.seen or key in HARMLESS or key in self.family.harmless or key.startswith("_")
            if not ignored and value not in (None, False) and value != {} and value != []:
                raise ModelUnsupported(
                    f"config.json sets {key}, which is not supported for {self.family.architecture}."
                )


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ModelUnsupported(f"{path} is missing: {path.parent} is not a model folder in Hugging Face's layout.")
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ModelUnsupported(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelUnsupported(f"{path} does not hold a JSON object.")
    return found


def _architecture(raw: dict[str, Any]) -> str:
    named = raw.get("architectures") or []
    for architecture in named:
        if architecture in FAMILIES:
            return str(architecture)
    found = ", ".join(map(str, named)) or "no architecture"
    raise ModelUnsupported(f"config.json names {found}; supported are {', '.join(FAMILIES)}.")


def _end_ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and item >= 0 for item in values):
        raise ModelUnsupported(f"eos_token_id {value!r} is neither a token id nor a list of them.")
    return tuple(values)


def _windows(read: _Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Three spellings: a window of all layers (mistral), one behind `use_sliding_window` (qwen3_moe), and one of the
    layers past `max_window_layers` or named by `layer_types` (qwen2, qwen3)."""
    if family.window == "none":
        return (None,) * layers
    size = read.value("sliding_window", None if "sliding_window" in read.raw else family.window_size)
    if family.window != "all" and not read.value("use_sliding_window", False):
        size = None
    if family.window != "layers":
        return (size,) * layers
    first = read.value("max_window_layers", 28)
    derived = ["sliding_attention" if size is not None and i >= first else "full_attention" for i in range(layers)]
    types = read.value("layer_types", derived)
    known = {"full_attention": None, "sliding_attention": size}
    if len(types) != layers or not set(types) <= set(known) or (size is None and "sliding_attention" in types):
        raise ModelUnsupported(f"layer_types {types} does not fit {layers} layers with sliding_window {size}.")
    return tuple(known[kind] for kind in types)


def _moe(read: _Reader, family: Family, layers: int) -> MoeConfig | None:
    if family.moe is None:
        return None
    experts = read.size("num_local_experts" if "num_local_experts" in read.raw else "num_experts", family.moe.experts)
    top_k = read.size("num_experts_per_tok", family.moe.top_k)
    if top_k > experts:
        raise ModelUnsupported(f"num_experts_per_tok {top_k} is more than the {experts} experts.")
    dense, step = set(read.value("mlp_only_layers", [])), read.value("decoder_sparse_step", 1)
    width_key = "moe_intermediate_size" if family.moe.own_width else "intermediate_size"
    return MoeConfig(
        experts=experts,
        top_k=top_k,
        width=read.size(width_key, 768 if family.moe.own_width else None),
        normalise=family.moe.always_normalise or bool(read.value("norm_topk_prob", False)),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )
