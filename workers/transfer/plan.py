"""Who sends which heads to whom, and which token ranges travel in which messages. Pure: no sockets, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from diptych.workers.cache import KVLayout
from diptych.workers.parallel.layout import Grid, kv_share


@dataclass(frozen=True)
class Route:
    """KV heads [head, head_end) of the model, held at rank `source` of a prefill data rank and wanted at rank `target`
    of a decode data rank, each counted within its data rank; `from_head` and `to_head`: where the first of them stands
    in either rank's cache."""

    source: int
    target: int
    head: int
    head_end: int
    from_head: int
    to_head: int

    @property
    def heads(self) -> int:
        return self.head_end - self.head


def routes(kv_heads: int, sources: int, targets: int) -> tuple[Route, ...]:
    """All links between a data rank of prefill, of `sources` ranks, and one of decode, of `targets`.

    Every rank of decode gets each of its heads exactly once. Where several ranks of prefill hold a head, neighbouring
    ranks of decode take it from different ones.
    """
    found: list[Route] = []
    for target in range(targets):
        wanted = kv_share(kv_heads, target, targets)
        taken: dict[int, list[int]] = {}
        for head in wanted:
            holders = [source for source in range(sources) if head in kv_share(kv_heads, source, sources)]
            taken.setdefault(holders[target % len(holders)], []).append(head)
        for source, heads in taken.items():
            start = kv_share(kv_heads, source, sources).start
            at = heads[0]
            found.append(Route(source, target, at, heads[-1] + 1, at - start, at - wanted.start))
    return tuple(found)


def links(kv_heads: int, sources: Grid, targets: Grid) -> Iterator[tuple[int, int]]:
    """All links between two groups, as their ranks in the group: every data rank of prefill may send to every one of
    decode."""
    for source in range(sources.data):
        for target in range(targets.data):
            yield from links_between(kv_heads, sources, targets, source, target)


def links_between(kv_heads: int, sources: Grid, targets: Grid, source: int, target: int) -> Iterator[tuple[int, int]]:
    """Those that carry a sequence from prefill's data rank `source` to decode's `target`."""
    for route in routes(kv_heads, sources.tensor, targets.tensor):
        yield sources.members(source)[route.source], targets.members(target)[route.target]


@dataclass(frozen=True)
class Slice:
    """Tokens [first, first + count) of all layers and some KV heads, one message's payload: [layers, k/v, tokens,
    heads, dim], contiguous."""

    first: int
    count: int

    def shape(self, layout: KVLayout, heads: int) -> tuple[int, int, int, int, int]:
        return (layout.layers, 2, self.count, heads, layout.head_dim)


def token_bytes(layout: KVLayout, heads: int) -> int:
    """Bytes of one token in all layers and `heads` heads."""
    return layout.token_bytes // layout.kv_heads * heads


def plan(layout: KVLayout, heads: int, first: int, end: int, message_bytes: int) -> list[Slice]:
    """Messages that carry `heads` heads of tokens [first, end), each at most `message_bytes` (at least one token).

    A few large messages rather than one a layer: message count, not bandwidth, bounds a hand-over.
    """
    tokens = max(1, message_bytes // token_bytes(layout, heads))
    # Even pieces: the last one small would cost a message and save nothing.
    pieces = -(-(end - first) // tokens)
    bounds = [first + (end - first) * index // pieces for index in range(pieces + 1)] if pieces else []
    return [Slice(start, stop - start) for start, stop in pairwise(bounds)]
