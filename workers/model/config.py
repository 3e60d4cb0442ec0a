"""The model's own configuration: what `config.json` and `generation_config.json` say, as one frozen value.

Every key is handled, known to change no number of a forward pass, or refused by name: a key that nobody reads is how a
model gives silently different numbers. Defaults are those of transformers' class of the same architecture. Knows
nothing of weights or devices, and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diptych.contract.errors import ModelUnsupported
from diptych.workers.model.family import FAMILIES, HARMLESS, Family
from diptych.workers.model.rope_config import RopeConfig
from diptych.workers.model.values import Values, read_json, shown
from diptych.workers.parallel.layout import ModelSizes

MOST_LAYERS = MOST_EXPERTS = 4096  # of which lists are made; far beyond any model


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
        """Reads the folder of a model in Hugging Face's layout. Raises `ModelUnsupported` in one sentence."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelUnsupported(f"The model folder {folder} does not exist.")
        file, generation = folder / "config.json", folder / "generation_config.json"
        config = cls.from_dict(read_json(file), str(file))
        ends = Values(read_json(generation), str(generation)).ids("eos_token_id") if generation.is_file() else ()
        return replace(config, end_ids=ends) if ends else config

    @classmethod
    def from_dict(cls, raw: dict[str, Any], file: str = "config.json") -> ModelConfig:
        """The same from the contents of `config.json` alone. file: its name, for messages."""
        read = Values(raw, file)
        family = FAMILIES[_architecture(read)]
        heads, hidden = read.size("num_attention_heads"), read.size("hidden_size")
        layers = read.size("num_hidden_layers", most=MOST_LAYERS)
        kv_heads = read.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelUnsupported(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
        head_dim = _head_dim(read, hidden, heads)
        max_positions = read.size("max_position_embeddings", family.max_positions)
        has_bias = read.flag("attention_bias") if family.bias == "optional" else family.bias == "qkv"
        config = cls(
            architecture=family.architecture,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            width=read.size("intermediate_size"),
            vocab=read.size("vocab_size"),
            eps=read.number("rms_norm_eps", family.eps),
            rope=RopeConfig.of(read, family, head_dim, max_positions),
            windows=_windows(read, family, layers),
            max_positions=max_positions,
            end_ids=read.ids("eos_token_id", family.end_id),
            tied=read.flag("tie_word_embeddings"),
            bias=has_bias,
            out_bias=has_bias and family.bias == "optional",
            qk_norm=family.qk_norm,
            fused=family.fused,
            moe=_moe(read, family, layers),
            dtype=read.text("dtype") or read.text("torch_dtype") or None,
        )
        _refuse_rest(read, family)
        return config

    @property
    def sizes(self) -> ModelSizes:
        """What a group's ranks must divide."""
        experts, expert_width = (self.moe.experts, self.moe.width) if self.moe else (0, 0)
        return ModelSizes(self.heads, self.kv_heads, self.width, experts, expert_width)

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and self.moe.sparse[layer]


def _architecture(read: Values) -> str:
    named = read.texts("architectures")
    for architecture in named:
        if architecture in FAMILIES:
            return architecture
    found = ", ".join(map(shown, named)) or "no architecture"
    raise ModelUnsupported(f"{read.file} names {found}; supported are {', '.join(FAMILIES)}.")


def _head_dim(read: Values, hidden: int, heads: int) -> int:
    if read.value("head_dim") is None and hidden % heads:
        raise ModelUnsupported(
            f"{read.file} gives no head_dim, and its hidden_size {hidden} is not a multiple of num_attention_heads"
            f" {heads}."
        )
    return read.size("head_dim", hidden // heads)


def _refuse_rest(read: Values, family: Family) -> None:
    if (act := read.text("hidden_act", "silu")) != "silu":
        raise ModelUnsupported(f"hidden_act {shown(act)} is not supported; only silu is.")
    for key, value in read.found.items():
        ignored = key in read.seen or key in HARMLESS or key in family.harmless or key.startswith("_")
        if not ignored and value not in (None, False) and value != {} and value != []:
            raise ModelUnsupported(f"{read.file} sets {shown(key)}, which is not supported for {family.architecture}.")


def _windows(read: Values, family: Family, layers: int) -> tuple[int | None, ...]:
    """Three spellings: a window of all layers (mistral), one behind `use_sliding_window` (qwen3_moe), and one of the
    layers past `max_window_layers` or named by `layer_types` (qwen2, qwen3)."""
    if family.window == "none":
        return (None,) * layers
    size = read.size_or_none("sliding_window", None if "sliding_window" in read else family.window_size)
    if family.window != "all" and not read.flag("use_sliding_window"):
        size = None
    if family.window != "layers":
        return (size,) * layers
    first = read.count("max_window_layers", 28)
    derived = ["sliding_attention" if size is not None and i >= first else "full_attention" for i in range(layers)]
    types = derived if read.value("layer_types") is None else list(read.texts("layer_types"))
    known = {"full_attention": None, "sliding_attention": size}
    if len(types) != layers or not set(types) <= set(known) or (size is None and "sliding_attention" in types):
        raise ModelUnsupported(
            f"{read.file} gives layer_types = {shown(types)}, which does not fit {layers} layers with"
            f" sliding_window {size}."
        )
    return tuple(known[kind] for kind in types)


def _moe(read: Values, family: Family, layers: int) -> MoeConfig | None:
    if family.moe is None:
        return None
    key = "num_local_experts" if "num_local_experts" in read else "num_experts"
    experts = read.size(key, family.moe.experts, most=MOST_EXPERTS)
    top_k = read.size("num_experts_per_tok", family.moe.top_k)
    if top_k > experts:
        raise ModelUnsupported(f"num_experts_per_tok {top_k} is more than the {experts} experts.")
    dense, step = set(read.wholes("mlp_only_layers")), read.size("decoder_sparse_step", 1)
    width_key = "moe_intermediate_size" if family.moe.own_width else "intermediate_size"
    return MoeConfig(
        experts=experts,
        top_k=top_k,
        width=read.size(width_key, 768 if family.moe.own_width else None),
        normalise=family.moe.always_normalise or read.flag("norm_topk_prob"),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )
