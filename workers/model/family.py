"""What tells one family of models from another: a row each. Numbers are the defaults of transformers' own classes, for
configurations that leave a key out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MoeFamily:
    """own_width: experts have `moe_intermediate_size`, not `intermediate_size`. always_normalise: there is no
    `norm_topk_prob`. experts, top_k: defaults."""

    own_width: bool
    always_normalise: bool
    experts: int
    top_k: int


@dataclass(frozen=True)
class Family:
    """bias: of attention: none, qkv (always, on those three) or optional (`attention_bias`, on all four products).
    window: see `config._windows`; window_size: its default. partial: whether the family reads
    `partial_rotary_factor`. rope_types: those that its transformers class takes. fused: qkv and gate_up are merged in
    the checkpoint. harmless: keys of this family that change no number of a forward pass without dropout."""

    architecture: str
    theta: float = 10_000.0
    eps: float = 1e-6
    max_positions: int = 32_768
    end_id: int | None = None
    bias: Literal["none", "qkv", "optional"] = "none"
    qk_norm: bool = False
    window: Literal["none", "all", "switch", "layers"] = "none"
    window_size: int | None = None
    moe: MoeFamily | None = None
    partial: bool = False
    fused: bool = False
    rope_types: tuple[str, ...] = ("default", "linear", "llama3")
    harmless: frozenset[str] = frozenset()


_ROUTER_LOSS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", max_positions=2048, end_id=2, bias="optional"),
        Family("MistralForCausalLM", max_positions=131_072, end_id=2, window="all", window_size=4096),
        Family("Qwen2ForCausalLM", bias="qkv", window="layers", window_size=4096),
        Family("Qwen3ForCausalLM", bias="optional", qk_norm=True, window="layers", window_size=4096),
        Family(
            "MixtralForCausalLM",
            theta=1e6,
            eps=1e-5,
            max_positions=131_072,
            end_id=2,
            window="all",
            moe=MoeFamily(own_width=False, always_normalise=True, experts=8, top_k=2),
            harmless=_ROUTER_LOSS,
        ),
        Family(
            "Qwen3MoeForCausalLM",
            bias="optional",
            qk_norm=True,
            window="switch",
            window_size=4096,
            moe=MoeFamily(own_width=True, always_normalise=False, experts=128, top_k=8),
            harmless=_ROUTER_LOSS | {"max_window_layers"},
        ),
        Family(
            "Phi3ForCausalLM",
            eps=1e-5,
            max_positions=4096,
            end_id=32_000,
            window="all",
            partial=True,
            fused=True,
            rope_types=("default",),
            harmless=frozenset({"original_max_position_embeddings", "resid_pdrop", "embd_pdrop"}),
        ),
    )
}

HARMLESS = frozenset(
    {
        # what the model is called and where it comes from
        "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map",
        "transformers.js_config", "is_llama_config",
        # tokens: text is the router's matter; end tokens are read elsewhere
        "bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class",
        # training and other heads
        "initializer_range", "attention_dropout", "id2label", "label2id", "problem_type", "classifier_dropout",
        "pretraining_tp", "num_labels", "finetuning_task",
        # how transformers runs it
        "use_cache", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward",
        "cache_implementation", "is_decoder", "attn_implementation", "gradient_checkpointing",
    }
)  # fmt: skip
