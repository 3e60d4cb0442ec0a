"""The decoder: embedding, layers of attention and feed-forward, norm, head. One class for every family.

Owns the weights and the rotary tables. Knows nothing of requests, of blocks' owners or of sampling. A product's weight
is held in the form that its device reads fastest (`pack_weight`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.kernels.batch import Batch
from diptych.kernels.embedding import embedding
from diptych.kernels.linear import linear, pack_weight
from diptych.kernels.moe import Experts, moe
from diptych.kernels.norm_gate_up import norm_gate_up
from diptych.kernels.norm_linear import norm_linear
from diptych.kernels.rms_norm import rms_norm
from diptych.kernels.rope_attention import rope_attention
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.loader import Weights


class Cache(Protocol):
    """`k[layer]`, `v[layer]`: [blocks, block_size, kv_heads, head_dim], see `rope_attention`."""

    @property
    def k(self) -> Sequence[Tensor]: ...
    @property
    def v(self) -> Sequence[Tensor]: ...


class Group(Protocol):
    """The ranks that share one decoder; today there is one, and None stands for it."""

    rank: int
    size: int


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's weights; names and shapes as in `parameters`. Either gate_up and down are set, or experts: the
    router's weight, the experts' gate_up and their down."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    experts: tuple[Tensor, Experts, Experts] | None = None


_PRODUCTS = ("qkv", "out", "gate_up", "down")


class Decoder:
    """Runs batches over a paged KV cache."""

    def __init__(
        self, config: ModelConfig, weights: Weights, group: Group | None = None, max_positions: int | None = None
    ) -> None:
        """Takes `weights` over and empties it, so that no plain copy outlives its packed one.

        max_positions: the longest context to prepare for; the model's own by default.
        """
        if group is not None and group.size != 1:
            raise NotImplementedError("A decoder divided over several ranks is not there yet.")
        self.config = config
        self.embedding = weights.pop("embedding")
        self.head = pack_weight(self.embedding if config.tied else weights.pop("head"))
        self.norm = weights.pop("norm")
        self.layers = tuple(_layer(weights, index) for index in range(config.layers))
        self.rope = config.rope.tables(max_positions or config.max_positions, self.embedding.device)
        self.scale = config.head_dim**-0.5
        assert not weights, f"unused weights: {sorted(weights)}"

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        """Hidden states [T, H] of the batch's tokens, before the last norm; their keys and values are in `cache`."""
        x = embedding(batch.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            x = self._attention(x, index, layer, batch, cache)
            x = self._feed_forward(x, layer)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] float32 of some rows of `__call__`'s result."""
        return norm_linear(hidden, self.norm, self.config.eps, self.head, out_dtype=torch.float32)

    def _attention(self, x: Tensor, index: int, layer: Layer, batch: Batch, cache: Cache) -> Tensor:
        config = self.config
        qkv = norm_linear(x, layer.attention_norm, config.eps, layer.qkv, layer.qkv_bias)
        mixed = rope_attention(
            qkv,
            batch,
            cache.k[index],
            cache.v[index],
            self.rope,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=self.scale,
            window=config.windows[index],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=config.eps,
        )
        return linear(mixed, layer.out, layer.out_bias, residual=x)

    def _feed_forward(self, x: Tensor, layer: Layer) -> Tensor:
        config = self.config
        if layer.gate_up is not None and layer.down is not None:
            inner = norm_gate_up(x, layer.mlp_norm, config.eps, layer.gate_up)
            return linear(inner, layer.down, residual=x)
        assert config.moe is not None
        assert layer.experts is not None
        inner = rms_norm(x, layer.mlp_norm, config.eps)
        return x + moe(inner, *layer.experts, config.moe.top_k, config.moe.normalise)


def _layer(weights: Weights, index: int) -> Layer:
    prefix = f"layers.{index}."
    own = {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}
    experts = None
    if "router" in own:
        router = pack_weight(own.pop("router"))
        experts = (router, _pack_experts(own.pop("experts_gate_up")), _pack_experts(own.pop("experts_down")))
    for name in _PRODUCTS:
        if name in own:
            own[name] = pack_weight(own.pop(name))
    return Layer(**own, experts=experts)


def _pack_experts(weights: Tensor) -> Experts:
    return weights if weights.is_cuda else tuple(pack_weight(expert) for expert in weights)
