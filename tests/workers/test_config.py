"""Reading config.json: spellings, defaults, end tokens, and refusals that name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.contract.errors import ModelUnsupported
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.family import FAMILIES
from diptych.workers.model.rope import frequencies

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def _read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(_LLAMA | changes)


def _folder(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_theta": 100000.0, "rope_scaling": None}, 1e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}, 1e5),
        ({"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}, 1e5),
        ({"rope_theta": 100000.0, "rope_parameters": {"rope_type": "default"}}, 1e5),
        ({}, 1e4),
    ],
)
def test_both_spellings_of_the_rotary_base(keys: dict[str, Any], theta: float) -> None:
    assert _read(**keys).rope.theta == theta


def test_both_spellings_of_the_rotary_type() -> None:
    old, new = ({"rope_scaling": {key: "linear", "factor": 2.0}} for key in ("type", "rope_type"))
    assert _read(**old).rope == _read(**new).rope
    assert torch.equal(frequencies(_read(**old).rope) * 2, frequencies(_read().rope))


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    for architecture, family in FAMILIES.items():
        theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))()
        raw = _LLAMA | {"architectures": [architecture]}
        raw |= {"num_key_value_heads": 4} if family.moe is None else {}
        ours = ModelConfig.from_dict(raw)
        assert ours.eps == theirs.rms_norm_eps, architecture
        assert ours.max_positions == theirs.max_position_embeddings, architecture
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"], architecture
        assert ours.windows[0] == theirs.sliding_window if family.window != "none" else True, architecture
        assert ours.end_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,)), architecture
        if ours.moe is not None:
            assert ours.moe.top_k == theirs.num_experts_per_tok
            assert ours.moe.experts == theirs.num_local_experts
            assert ours.moe.normalise is getattr(theirs, "norm_topk_prob", True)


def test_end_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    """Case L3, as far as it is the configuration's."""
    config = _LLAMA | {"eos_token_id": 7}
    assert ModelConfig.from_folder(_folder(tmp_path, config)).end_ids == (7,)
    assert ModelConfig.from_folder(_folder(tmp_path, config, {"eos_token_id": [2, 30]})).end_ids == (2, 30)
    assert ModelConfig.from_folder(_folder(tmp_path, config, {"temperature": 0.6})).end_ids == (7,)
    assert ModelConfig.from_folder(_folder(tmp_path, config | {"eos_token_id": [2, 30]}, {})).end_ids == (2, 30)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "no architecture"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}}, "rope_scaling"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"eos_token_id": "two"}, "eos_token_id"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3}, "experts"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'; it must be a list of texts"),
        ({"architectures": [7]}, r"architectures = \[7\]"),
        ({"hidden_size": None}, "does not give hidden_size"),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; it must be at most"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps = 'tiny'; it must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'; it must be true or false"),
        ({"attention_bias": [1]}, "attention_bias"),
        ({"hidden_act": {"a": 1}}, "hidden_act"),
        ({"torch_dtype": 16}, "torch_dtype"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"rope_theta": 0}, "rope_theta = 0"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'; it must be an object"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type of|rope_type = "),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"rope_scaling of config\.json gives factor = 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor = '2'"),
        ({"rope_parameters": _LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor = 4 and high_freq_factor = 4"),
        ({"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 0.5}}, "original_max_position_embeddings"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.02}, "rotary embedding of 0"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "4096"}, "sliding_window = '4096'"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [[0]]}, "mlp_only_layers"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**9}, "num_experts"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": []}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": [{}, {}]}, "layer_types"),
        ({"a\nb": 1}, r"sets 'a\\nb'"),
    ],
)
def test_what_is_refused_is_named(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        _read(**keys)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelUnsupported, match=r"config\.json is missing"):
        ModelConfig.from_folder(tmp_path)
    for content, words in (
        ("{", "cannot be read"),
        ("[" * 100_000, "nests too deeply"),
        ("3", "must hold a JSON object"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelUnsupported, match=words):
            ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff{}")
    with pytest.raises(ModelUnsupported, match=r"config\.json cannot be read"):
        ModelConfig.from_folder(tmp_path)


def test_harmless_keys_are_passed_over() -> None:
    read = _read(
        transformers_version="4.40.0", torch_dtype="bfloat16", use_cache=True, _name_or_path="x", is_llama_config=True,
        rope_interleaved=False, pretraining_tp=1, initializer_range=0.04, attention_dropout=0.0,
    )  # fmt: skip
    assert read.dtype == "bfloat16"


def test_the_readme_names_every_architecture() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert [name for name in FAMILIES if name not in readme] == []
