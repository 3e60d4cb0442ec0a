"""Who holds what in a group of ranks: heads, rows of products, experts. Pure: no tensors, no processes.

Ranks divide query heads evenly. KV heads are divided evenly too, or, when there are more ranks than heads, each is held
by several ranks. The vocabulary is divided into slices of one length, of which the last may stand out over its end.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def refuse_bad_layout(sizes: ModelSizes, ranks: int, spread_experts: bool, name: str = "A group") -> None:
    """Raises `ConfigInvalid` with the numbers when `ranks` ranks cannot divide such a model."""
    if spread_experts and not sizes.experts:
        raise ConfigInvalid(f"{name} is to spread experts over its ranks, but the model has none.")
    if spread_experts and sizes.experts < ranks:
        raise ConfigInvalid(f"{name} cannot spread {sizes.experts} experts over {ranks} ranks.")
    if ranks == 1:
        return
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
    """One rank's place in a group. experts: how whole experts are spread; None where each rank holds a slice of every
    expert."""

    rank: int = 0
    ranks: int = 1
    experts: ExpertTable | None = None


WHOLE = Shard()
