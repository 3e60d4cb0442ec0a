"""Who holds what in a group of ranks: heads, rows of products, experts. Pure: no tensors, no processes.

A group is a grid of `data` × `tensor` ranks. The `tensor` ranks of one data rank share the model and one part of the
batch; data ranks have a whole model each, and sequences and blocks of their own. Experts are sliced over the ranks of a
data rank, or spread whole over all ranks of the group.

Ranks of a data rank divide query heads evenly. KV heads are divided evenly too, or, when there are more ranks than
heads, each is held by several ranks. The vocabulary is divided into slices of one length, of which the last may stand
out over its end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from diptych.contract.errors import ConfigInvalid


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of a model that a layout must divide. experts: 0 without any. width: of the dense feed-forward
    layers; expert_width: of an expert's."""

    heads: int
    kv_heads: int
    width: int
    experts: int = 0
    expert_width: int = 0


class Grid(NamedTuple):
    """The ranks of a group, numbered data rank after data rank."""

    data: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    @property
    def text(self) -> str:
        return f"{self.data} × {self.tensor} = {self.ranks} ranks" if self.data > 1 else f"{self.ranks} ranks"

    def place(self, rank: int) -> tuple[int, int]:
        """The rank's (data rank, place among the ranks that share it)."""
        return divmod(rank, self.tensor)

    def members(self, data_rank: int) -> range:
        """The ranks that share a data rank."""
        return range(data_rank * self.tensor, (data_rank + 1) * self.tensor)


def may_share_a_gpu() -> bool:
    """Whether ranks may run on one GPU, as NCCL's own switch says: for tests on a small host."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def refuse_bad_layout(sizes: ModelSizes, grid: Grid, spread_experts: bool, name: str = "A group") -> None:
    """Raises `ConfigInvalid` with the numbers when the ranks of `grid` cannot divide such a model."""
    if spread_experts and not sizes.experts:
        raise ConfigInvalid(f"{name} is to spread experts over its ranks, but the model has none.")
    if spread_experts and sizes.experts < grid.ranks:
        raise ConfigInvalid(f"{name} cannot spread {sizes.experts} experts over {grid.text}.")
    ranks = grid.tensor
    if ranks == 1:
        return
    if grid.data > 1:
        name = f"Each data rank of {name}"
    if sizes.heads % ranks:
        raise ConfigInvalid(f"{name} of {ranks} ranks cannot divide the model's {sizes.heads} attention heads.")
    if sizes.kv_heads % ranks and ranks % sizes.kv_heads:
        raise ConfigInvalid(
            f"{name} of {ranks} ranks can neither divide the model's {sizes.kv_heads} KV heads nor hold each of them on"
            f" equally many ranks."
        )
    if sizes.width % ranks:
        raise ConfigInvalid(f"{name} of {ranks} ranks cannot divide the feed-forward width {sizes.width}.")
    if sizes.experts and not spread_experts and sizes.expert_width % ranks:
        raise ConfigInvalid(f"{name} of {ranks} ranks cannot divide the experts' width {sizes.expert_width}.")


def even(count: int, rank: int, ranks: int) -> range:
    """The rank's share of `count` things that `ranks` divides."""
    share = count // ranks
    return range(rank * share, (rank + 1) * share)


def kv_share(kv_heads: int, rank: int, ranks: int) -> range:
    """The KV heads that a rank holds: its share, or the one head that its query heads read."""
    if ranks <= kv_heads:
        return even(kv_heads, rank, ranks)
    head = rank * kv_heads // ranks
    return range(head, head + 1)


def padded_share(count: int, rank: int, ranks: int) -> range:
    """The rank's slice of `count` rows; all slices are equally long, and those at the end may reach past `count`."""
    share = -(-count // ranks)
    return range(rank * share, (rank + 1) * share)


@dataclass(frozen=True)
class ExpertTable:
    """Which rank holds each expert. A table rather than a formula, so that experts may be placed by their load."""

    owners: tuple[int, ...]
    ranks: int

    @classmethod
    def even(cls, experts: int, ranks: int) -> ExpertTable:
        """Neighbours together, as evenly as the numbers allow."""
        return cls(tuple(expert * ranks // experts for expert in range(experts)), ranks)

    def held(self, rank: int) -> tuple[int, ...]:
        """The rank's experts, in the order in which it holds them."""
        return tuple(expert for expert, owner in enumerate(self.owners) if owner == rank)


@dataclass(frozen=True)
class Shard:
    """One rank's place: `rank` of the `ranks` that share data rank `data_rank`. experts: how whole experts are spread
    over the whole group; None where each rank holds a slice of every expert."""

    rank: int = 0
    ranks: int = 1
    experts: ExpertTable | None = None
    data_rank: int = 0

    @property
    def held(self) -> tuple[int, ...] | None:
        """The whole experts that it holds, where they are spread."""
        return self.experts.held(self.data_rank * self.ranks + self.rank) if self.experts else None


WHOLE = Shard()
