"""The decoder: embedding, layers of attention and feed-forward, norm, head. One class for every family.

Owns the weights and the rotary tables. Knows nothing of requests, of blocks' owners or of sampling. A product's weight
is held in the form that its device reads fastest (`pack_weight`). In a group it holds one rank's part: the parallel
layers know the group, and what stands between them is the same at one rank and at several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.kernels.batch import Batch
from diptych.kernels.invariance import batch_invariant
from diptych.kernels.linear import pack_weight
from diptych.kernels.moe import Experts
from diptych.kernels.norm_gate_up import norm_gate_up
from diptych.kernels.norm_linear import norm_linear
from diptych.kernels.rms_norm import rms_norm
from diptych.kernels.rope_attention import Unified, rope_attention
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.loader import Weights
from diptych.workers.model.rope import rope_tables
from diptych.workers.parallel.experts import SpreadExperts
from diptych.workers.parallel.group import Group, Groups
from diptych.workers.parallel.layers import Embedding, Head, Mixture, RowLinear, SlicedExperts
from diptych.workers.parallel.layout import WHOLE, Shard, even, kv_share


class Cache(Protocol):
    """`k[layer]`, `v[layer]`: [blocks, block_size, kv_heads, head_dim], see `rope_attention`."""

    @property
    def k(self) -> Sequence[Tensor]: ...
    @property
    def v(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's weights; names and shapes as in `parameters`. Either gate_up and down are set, or experts."""

    attention_norm: Tensor
    qkv: Tensor
    out: RowLinear
    mlp_norm: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gate_up: Tensor | None = None
    down: RowLinear | None = None
    experts: Mixture | None = None


class Decoder:
    """Runs batches over a paged KV cache.

    observe: None, or what is called with a layer's index and its qkv product [T, (heads + 2 · kv_heads) · head_dim]
    before it is normalised, rotated and used; it must leave it as it is.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        group: Group | None = None,
        shard: Shard = WHOLE,
        max_positions: int | None = None,
        everyone: Group | None = None,
        batch_invariant: bool = False,
        unified: Unified | None = None,
    ) -> None:
        """Takes `weights` over and empties it, so that no plain copy outlives its packed one.

        group: the ranks that share this one's tokens. shard: this rank's; `weights` are what it holds. max_positions:
        the longest context to prepare for; the model's own by default. everyone: all ranks, over which experts are
        spread; `group` by default. batch_invariant: on a GPU, a token's bits do not depend on its batch. unified: how
        decode takes its softmax on a GPU.
        """
        self.config = config
        self.batch_invariant = batch_invariant
        self.unified = unified
        self.observe: Callable[[int, Tensor], None] | None = None
        table = weights.pop("embedding")
        head = pack_weight(table if config.tied else weights.pop("head"))
        self.embedding = Embedding(table, group)
        self.head = Head(weights.pop("norm"), config.eps, head, config.vocab, group)
        groups = Groups(group, everyone or group)
        self.layers = tuple(_layer(weights, config, index, groups, shard) for index in range(config.layers))
        self.rope = rope_tables(config.rope, max_positions or config.max_positions, self.device)
        self.scale = config.head_dim**-0.5
        self.heads = len(even(config.heads, shard.rank, shard.ranks))
        self.kv_heads = len(kv_share(config.kv_heads, shard.rank, shard.ranks))
        assert not weights, f"unused weights: {sorted(weights)}"

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        """Hidden states [T, H] of the batch's tokens, before the last norm; their keys and values are in `cache`."""
        with batch_invariant(self.batch_invariant):
            x = self.embedding(batch.token_ids)
            for index, layer in enumerate(self.layers):
                x = self._attention(x, index, layer, batch, cache)
                x = self._feed_forward(x, layer)
        return x

    @torch.inference_mode()
    def idle(self) -> None:
        """Takes part, with no token of its own, in a step in which other data ranks have some."""
        nothing = self.embedding.weight.new_empty((0, self.config.hidden))
        for layer in self.layers:
            if isinstance(layer.experts, SpreadExperts):
                layer.experts(nothing)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] float32 of some rows of `__call__`'s result: the same bits at every rank."""
        with batch_invariant(self.batch_invariant):
            return self.head(hidden)

    def check(self) -> None:
        """Raises `Internal` when another rank did not come to a sum of a step that is done."""
        if self.embedding.group is not None:
            self.embedding.group.check()

    def read_bytes(self) -> int:
        """Bytes of this rank's matrices that every decode step reads; experts, of which it reads some, not counted."""
        found = [self.head.weight]
        for layer in self.layers:
            found += [layer.qkv, layer.out.weight]
            if layer.gate_up is not None and layer.down is not None:
                found += [layer.gate_up, layer.down.weight]
        return sum(matrix.numel() * matrix.element_size() for matrix in found)

    def expert_load(self) -> tuple[int, ...]:
        """Tokens that each expert was given since the start, all layers together; empty where nobody counts."""
        counted = [layer.experts.load for layer in self.layers if isinstance(layer.experts, SpreadExperts)]
        return tuple(torch.stack(counted).sum(0).tolist()) if counted else ()

    def _attention(self, x: Tensor, index: int, layer: Layer, batch: Batch, cache: Cache) -> Tensor:
        config = self.config
        qkv = norm_linear(x, layer.attention_norm, config.eps, layer.qkv, layer.qkv_bias)
        if self.observe is not None:
            self.observe(index, qkv)
        mixed = rope_attention(
            qkv,
            batch,
            cache.k[index],
            cache.v[index],
            self.rope,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=config.head_dim,
            scale=self.scale,
            window=config.windows[index],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=config.eps,
            unified=self.unified,
        )
        return layer.out(mixed, residual=x)

    def _feed_forward(self, x: Tensor, layer: Layer) -> Tensor:
        config = self.config
        if layer.gate_up is not None and layer.down is not None:
            inner = norm_gate_up(x, layer.mlp_norm, config.eps, layer.gate_up)
            return layer.down(inner, residual=x)
        assert layer.experts is not None
        return x + layer.experts(rms_norm(x, layer.mlp_norm, config.eps))


def _layer(weights: Weights, config: ModelConfig, index: int, groups: Groups, shard: Shard) -> Layer:
    prefix, group = f"layers.{index}.", groups.sharing
    own = {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}
    layer = Layer(
        attention_norm=own.pop("attention_norm"),
        qkv=pack_weight(own.pop("qkv")),
        qkv_bias=own.pop("qkv_bias", None),
        q_norm=own.pop("q_norm", None),
        k_norm=own.pop("k_norm", None),
        out=RowLinear(pack_weight(own.pop("out")), own.pop("out_bias", None), group),
        mlp_norm=own.pop("mlp_norm"),
        gate_up=pack_weight(own.pop("gate_up")) if "gate_up" in own else None,
        down=RowLinear(pack_weight(own.pop("down")), None, group) if "down" in own else None,
        experts=_mixture(own, config, groups, shard) if "router" in own else None,
    )
    assert not own, f"unused weights: {sorted(own)}"
    return layer


def _mixture(own: Weights, config: ModelConfig, groups: Groups, shard: Shard) -> Mixture:
    assert config.moe is not None
    (group, everyone), moe = groups, config.moe
    router = pack_weight(own.pop("router"))
    gate_up, down = _pack_experts(own.pop("experts_gate_up")), _pack_experts(own.pop("experts_down"))
    if shard.experts is not None and everyone is not None:
        return SpreadExperts(router, gate_up, down, moe.top_k, moe.normalise, shard.experts, everyone, group)
    return SlicedExperts(router, gate_up, down, moe.top_k, moe.normalise, group)


def _pack_experts(weights: Tensor) -> Experts:
    return weights if weights.is_cuda else tuple(pack_weight(expert) for expert in weights)
