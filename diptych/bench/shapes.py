"""Shapes of well-known models, as their `config.json` gives them: for measurements with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diptych.contract.errors import ConfigInvalid

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_3_8B = _LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192,
    "eos_token_id": 128001,
}  # fmt: skip
LLAMA_2_7B = LLAMA_3_8B | {
    "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000, "rope_theta": 10000.0,
    "eos_token_id": 2, "max_position_embeddings": 4096,
}  # fmt: skip
MIXTRAL_8X7B = LLAMA_3_8B | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "rope_theta": 1e6,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
    "eos_token_id": 2,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 40960, "eos_token_id": 151645, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-2-7B": LLAMA_2_7B, "Llama-3-8B": LLAMA_3_8B, "Mixtral-8x7B": MIXTRAL_8X7B, "Qwen3-30B-A3B": QWEN3_30B_A3B,
}  # fmt: skip


def write_shape(name: str, folder: Path, layers: int | None = None) -> Path:
    """A model's folder that holds its `config.json` and nothing else. layers: fewer than it has."""
    config = SHAPES[name] | ({"num_hidden_layers": layers} if layers else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def varied(folder: Path, made: Path, **keys: Any) -> Path:
    """In `made` the same config.json but for some keys, without weights. Raises `ConfigInvalid`."""
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{folder / 'config.json'} cannot be read: {error}.") from None
    if (layers := keys.get("num_hidden_layers")) and "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][:layers]
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(raw | keys))
    return made
