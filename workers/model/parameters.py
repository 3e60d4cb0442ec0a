"""Which tensors a decoder has, and from which tensors of a checkpoint each of them is put together.

Knows shapes and names only. Products that read the same input are merged: qkv, gate_up, and all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from diptych.workers.model.config import ModelConfig

Region = tuple[int | slice, ...]


@dataclass(frozen=True)
class Part:
    """A checkpoint's tensor and the region of the parameter that it fills. shape: of that tensor."""

    source: str
    shape: tuple[int, ...]
    region: Region = ()


@dataclass(frozen=True)
class Parameter:
    """One tensor of the decoder. kind: linear (read by a product), norm, bias or table.

    parts: what fills it; they cover it exactly. instead: another spelling of the same, as one set of parts.
    shard: the dimension along which a group of ranks divides it, part by part, or None when each rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    parts: tuple[Part, ...]
    shard: int | None = None
    instead: tuple[Part, ...] = ()


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """All of them, in the order of a forward pass."""
    hidden, vocab = config.hidden, config.vocab
    yield _whole("embedding", "model.embed_tokens.weight", (vocab, hidden), "table")
    for layer in range(config.layers):
        yield from _attention(config, layer)
        yield from _experts(config, layer) if config.is_sparse(layer) else _dense(config, layer)
    yield _whole("norm", "model.norm.weight", (hidden,), "norm")
    if not config.tied:
        yield _whole("head", "lm_head.weight", (vocab, hidden), "linear", shard=0)


def _whole(name: str, source: str, shape: tuple[int, ...], kind: str, shard: int | None = None) -> Parameter:
    return Parameter(name, shape, kind, (Part(source, shape),), shard)


def _merged(name: str, pieces: list[tuple[str, int]], rest: tuple[int, ...], kind: str, instead: str = "") -> Parameter:
    """Pieces (source, rows) on top of each other."""
    parts, start = [], 0
    for source, rows in pieces:
        parts.append(Part(source, (rows, *rest), (slice(start, start + rows),)))
        start += rows
    shape = (start, *rest)
    return Parameter(name, shape, kind, tuple(parts), 0, (Part(instead, shape),) if instead else ())


def _attention(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, source = f"layers.{layer}.", f"model.layers.{layer}."
    attention = source + "self_attn."
    q, kv, hidden = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.hidden
    yield _whole(here + "attention_norm", source + "input_layernorm.weight", (hidden,), "norm")
    pieces = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    if config.fused:
        pieces = [("qkv_proj", q + 2 * kv)]
    weights = [(f"{attention}{name}.weight", rows) for name, rows in pieces]
    yield _merged(here + "qkv", weights, (hidden,), "linear")
    if config.bias:
        yield _merged(here + "qkv_bias", [(f"{attention}{name}.bias", rows) for name, rows in pieces], (), "bias")
    if config.qk_norm:
        yield _whole(here + "q_norm", attention + "q_norm.weight", (config.head_dim,), "norm")
        yield _whole(here + "k_norm", attention + "k_norm.weight", (config.head_dim,), "norm")
    yield _whole(here + "out", attention + "o_proj.weight", (hidden, q), "linear", shard=1)
    if config.out_bias:
        yield _whole(here + "out_bias", attention + "o_proj.bias", (hidden,), "bias")
    yield _whole(here + "mlp_norm", source + "post_attention_layernorm.weight", (hidden,), "norm")


def _dense(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, source = f"layers.{layer}.", f"model.layers.{layer}.mlp."
    pieces = [(source + "gate_proj.weight", config.width), (source + "up_proj.weight", config.width)]
    if config.fused:
        pieces = [(source + "gate_up_proj.weight", 2 * config.width)]
    yield _merged(here + "gate_up", pieces, (config.hidden,), "linear")
    yield _whole(here + "down", source + "down_proj.weight", (config.hidden, config.width), "linear", shard=1)


def _experts(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Checkpoints hold an expert a tensor, under Mixtral's names or Qwen's, or all of them merged."""
    assert config.moe is not None
    here, experts, width, hidden = f"layers.{layer}.", config.moe.experts, config.moe.width, config.hidden
    merged = f"model.layers.{layer}.mlp."
    mixtral = config.architecture == "MixtralForCausalLM"
    source = f"model.layers.{layer}.block_sparse_moe." if mixtral else merged
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    router = Part(source + "gate.weight", (experts, hidden))
    yield Parameter(
        here + "router", router.shape, "table", (router,), None, (Part(merged + "gate.weight", router.shape),)
    )
    both, downs = [], []
    for expert in range(experts):
        name = f"{source}experts.{expert}."
        both.append(Part(f"{name}{gate}.weight", (width, hidden), (expert, slice(0, width))))
        both.append(Part(f"{name}{up}.weight", (width, hidden), (expert, slice(width, 2 * width))))
        downs.append(Part(f"{name}{down}.weight", (hidden, width), (expert,)))
    shape = (experts, 2 * width, hidden)
    yield Parameter(
        here + "experts_gate_up", shape, "experts", tuple(both), 1, (Part(merged + "experts.gate_up_proj", shape),)
    )
    shape = (experts, hidden, width)
    yield Parameter(
        here + "experts_down", shape, "experts", tuple(downs), 2, (Part(merged + "experts.down_proj", shape),)
    )
