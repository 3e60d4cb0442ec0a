"""Which token ranges travel in which messages. Pure: no sockets, no tensors, either direction."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from diptych.contract.errors import LayoutMismatch
from diptych.workers.cache import KVLayout


@dataclass(frozen=True)
class Slice:
    """Tokens [first, first + count) of layers [layer, layer_end) and KV heads [head, head_end), one message's payload:
    [layers, k/v, tokens, heads, dim], contiguous."""

    first: int
    count: int
    layer: int
    layer_end: int
    head: int
    head_end: int

    def shape(self, layout: KVLayout) -> tuple[int, int, int, int, int]:
        return (self.layer_end - self.layer, 2, self.count, self.head_end - self.head, layout.head_dim)

    def bytes(self, layout: KVLayout) -> int:
        layers, two, count, heads, dim = self.shape(layout)
        return layers * two * count * heads * dim * layout.torch_dtype.itemsize


def plan(source: KVLayout, target: KVLayout, first: int, end: int, message_bytes: int) -> list[Slice]:
    """Messages that carry tokens [first, end) of all layers, each at most `message_bytes` (at least one token).

    A few large messages rather than one a layer: message count, not bandwidth, bounds a hand-over. Raises
    `LayoutMismatch` when the two sides hold different things.
    """
    if source != target:
        raise LayoutMismatch(f"The sender's KV cache is {source} and the receiver's is {target}; they must be equal.")
    tokens = max(1, message_bytes // source.token_bytes)
    # Even pieces: the last one small would cost a message and save nothing.
    pieces = -(-(end - first) // tokens)
    bounds = [first + (end - first) * index // pieces for index in range(pieces + 1)] if pieces else []
    return [Slice(start, stop - start, 0, source.layers, 0, source.kv_heads) for start, stop in pairwise(bounds)]
