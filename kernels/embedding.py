"""Rows of the embedding table."""

from __future__ import annotations

from torch import Tensor


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """y[t] = weight[ids[t]]: a copy, bitwise.

    ids: [T] int64, each in [0, V). weight: [V, H]. Returns [T, H]. The same gather serves every device.
    """
    return embedding_reference(ids, weight)


def embedding_reference(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, ids)
