"""The decoder's parallel layers: products whose result is spread over a group's ranks, and what brings it together.

Each works without a group too, and is then the plain operator. Column-parallel products (qkv, gate and up) need no
layer of their own: a rank multiplies by its rows and nobody waits. What returns from here is whole at every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.kernels.embedding import embedding
from diptych.kernels.linear import linear
from diptych.kernels.moe import Experts, moe
from diptych.kernels.norm_linear import norm_linear
from diptych.workers.parallel.group import Group


@dataclass(frozen=True, eq=False)
class RowLinear:
    """y = Σ over ranks of x_rank · weight_rankᵀ (+ bias) + residual: attention's output and the feed-forward's.

    The ranks' parts are added up before the residual joins, so that a large residual is rounded once and not at every
    rank. weight: [N, K / ranks]. bias: [N], whole."""

    weight: Tensor
    bias: Tensor | None
    group: Group | None

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.group is None:
            return linear(x, self.weight, self.bias, residual=residual)
        return self.group.sum(linear(x, self.weight), self.bias, residual)


@dataclass(frozen=True, eq=False)
class Embedding:
    """Rows of the vocabulary's table, of which each rank holds a slice; others' tokens add zeros."""

    weight: Tensor
    group: Group | None

    def __call__(self, ids: Tensor) -> Tensor:
        if self.group is None:
            return embedding(ids, self.weight)
        local = ids - self.group.rank * self.weight.shape[0]
        absent = (local < 0) | (local >= self.weight.shape[0])
        rows = embedding(local.masked_fill_(absent, 0), self.weight)
        return self.group.sum(rows.masked_fill_(absent[:, None], 0))


@dataclass(frozen=True, eq=False)
class Head:
    """The last norm and the product with the vocabulary: logits [rows, vocab] float32, gathered from the ranks' slices,
    whose last ones may hold rows past the vocabulary's end."""

    norm: Tensor
    eps: float
    weight: Tensor
    vocab: int
    group: Group | None

    def __call__(self, hidden: Tensor) -> Tensor:
        own = norm_linear(hidden, self.norm, self.eps, self.weight, out_dtype=torch.float32)
        if self.group is None:
            return own
        slices = self.group.gather(own)  # [ranks, rows, vocab / ranks]
        return slices.transpose(0, 1).reshape(len(hidden), -1)[:, : self.vocab].contiguous()


class Mixture(Protocol):
    """A layer's experts: [T, H], normalised already, to [T, H]."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class SlicedExperts:
    """Every rank computes a slice of every expert's width, and the slices' results are added up."""

    router: Tensor
    gate_up: Experts
    down: Experts
    top_k: int
    normalise: bool
    group: Group | None

    def __call__(self, x: Tensor) -> Tensor:
        y = moe(x, self.router, self.gate_up, self.down, self.top_k, self.normalise)
        return y if self.group is None else self.group.sum(y)
