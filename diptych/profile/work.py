"""What an operator has to do, from its shapes alone: FLOPs and the bytes that must move at least once.

Bytes count weights, inputs and results once each, as if everything else stayed in registers and caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Category = Literal["attention", "linear", "MoE routing", "MoE index", "MoE experts", "other"]
CATEGORIES: tuple[Category, ...] = ("attention", "linear", "MoE routing", "MoE index", "MoE experts", "other")


@dataclass(frozen=True)
class Operator:
    """shape: [M, K, N] of a product y[M, N] = x[M, K] · W[N, K]ᵀ; what it means elsewhere is the operator's matter."""

    name: str
    category: Category
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Work:
    flops: float = 0.0
    moved: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.moved + other.moved)


def product(m: int, k: int, n: int, item: int) -> Work:
    return Work(2.0 * m * k * n, float(item) * (m * k + k * n + m * n))


def rows(count: int, width: int, item: int, flops_each: float = 4.0) -> Work:
    """Something that reads and writes each element once, as a norm."""
    return Work(flops_each * count * width, 2.0 * item * count * width)


def attention(
    queries: int, context: int, sequences: int, heads: int, kv_heads: int, dim: int, item: int, window: int | None
) -> Work:
    """Causal attention of the last `queries` of `context` tokens: both products, keys and values read and written,
    queries read, the result written."""
    first = context - queries + 1
    reach = context if window is None else window
    short = max(0, min(context, reach) - first + 1)  # queries that see all before them
    pairs = short * (2 * first + short - 1) // 2 + (queries - short) * reach
    read = min(context, reach + queries - 1)
    elements = 2 * kv_heads * dim * (read + queries) + 2 * heads * dim * queries
    return Work(4.0 * heads * dim * pairs * sequences, float(item) * elements * sequences)
