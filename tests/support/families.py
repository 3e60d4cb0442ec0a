"""Tiny models of every family, with random weights, made by transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {}),
    "llama2, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama2, bias on all four": ("Llama", {"attention_bias": True}),
    "llama2, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3, "head_dim": 16}),
    "mistral, window": ("Mistral", {"sliding_window": 9}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, window of later layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, window": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": False}),
    "qwen3_moe, normalised": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, a dense layer": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe, every second layer": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 2}),
    "phi3": ("Phi3", {}),
    "phi3, partial rotary": ("Phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
}


@dataclass(frozen=True)
class Tiny:
    """The same weights three times: ours, transformers' in float32 and in float64."""

    folder: Path
    ours: Decoder
    theirs: Any
    exact: Any


def make_tiny(name: str, folder: Path, other: dict[str, Any] | None = None) -> Tiny:
    """Saves a random model of the family into `folder` and loads it as ours. other: keys that differ from the usual."""
    import transformers

    family, keys = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**_SMALL | keys | (other or {}))
    return tiny_of(config, family, folder)


def tiny_of(config: Any, family: str, folder: Path, seed: int = 0) -> Tiny:
    import transformers

    torch.manual_seed(seed)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter_name.endswith(("norm.weight", "bias")):  # ones and zeros at first, which would hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(folder)
    read = ModelConfig.from_folder(folder)
    ours = Decoder(read, load(folder, read, torch.float32))
    # The default for experts, a grouped product, has no float64.
    kind: Any = getattr(transformers, f"{family}ForCausalLM")
    exact = kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    return Tiny(folder, ours, theirs, exact)
