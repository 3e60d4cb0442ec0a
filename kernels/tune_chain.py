"""The sweep's second half: products raced where they run, between their neighbours in a chain of decoder layers.

An op repeated in a graph starts beside the end of its own kind. In a layer it starts beside the end of another, whose
blocks hold other amounts of shared memory and registers, and dependent launch makes the difference count: of 15 µs a
layer that the first half promised at 32 rows, a step gained 4. So the first half proposes and this one decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diptych.kernels.batch import Batch
from diptych.kernels.dataflow import LIBRARY, Choice, Fusion
from diptych.kernels.rope import Rope
from diptych.kernels.timing import Replay, paired

log = logging.getLogger(__name__)

LAYERS = 4
CONTEXT = 1024
PAGE = 64
AHEAD = (0, 256, 1024)
GAIN = 0.998
"""A trial's time over the best so far's, at most, to take its place; and the upper quartile must be under 1."""
Shape = tuple[int, int, Fusion]


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer with a dense feed-forward part."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int

    @property
    def products(self) -> tuple[Shape, Shape, Shape, Shape]:
        """(K, N, fusion) of qkv, attention's output, gate and up, down."""
        mixed = self.heads * self.head_dim
        return (
            (self.hidden, mixed + 2 * self.kv_heads * self.head_dim, "norm"),
            (mixed, self.hidden, "plain"),
            (self.hidden, 2 * self.width, "norm_gate"),
            (self.width, self.hidden, "plain"),
        )


class Chain:
    """LAYERS layers of random weights, together larger than the L2 cache, over `rows` sequences of CONTEXT tokens."""

    def __init__(self, shape: LayerShape, rows: int, dtype: torch.dtype) -> None:
        self.shape, self.rows = shape, rows
        random = torch.randn

        def matrices(k: int, n: int) -> list[Tensor]:
            return [random(n, k, dtype=dtype, device="cuda").mul_(k**-0.5) for _ in range(LAYERS)]

        self.weights = [matrices(k, n) for k, n, _ in shape.products]
        self.norm = torch.ones(shape.hidden, dtype=dtype, device="cuda")
        self.x = random(rows, shape.hidden, dtype=dtype, device="cuda")
        pages = CONTEXT // PAGE
        cache = (LAYERS, 2, rows * pages, PAGE, shape.kv_heads, shape.head_dim)
        self.cache = random(cache, dtype=dtype, device="cuda")
        angles = torch.zeros(CONTEXT, shape.head_dim, device="cuda")
        self.rope = Rope(angles + 1, angles)
        table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
        self.batch = Batch(
            token_ids=torch.zeros(rows, dtype=torch.int64, device="cuda"),
            positions=torch.full((rows,), CONTEXT - 1, dtype=torch.int64, device="cuda"),
            slots=table[:, -1].long() * PAGE + PAGE - 1,
            query_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
            context_lens=torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda"), block_tables=table,
            query_lens=(), contexts=(), tables=(), max_query=1, max_context=CONTEXT,
        )  # fmt: skip

    def replay(self, choices: Mapping[Shape, Choice]) -> Replay:
        """One graph of all layers; its time is of all of them."""
        return Replay([lambda: self._run(choices)])

    def _run(self, choices: Mapping[Shape, Choice]) -> Tensor:
        from diptych.kernels.triton.products import product
        from diptych.kernels.triton.rope_attention import rope_attention

        s, norm = self.shape, (self.norm, 1e-5)
        qkv, out, gate_up, down = (choices[key] for key in s.products)
        x = self.x
        for layer in range(LAYERS):
            w_qkv, w_out, w_gate_up, w_down = (weights[layer] for weights in self.weights)
            mixed = rope_attention(
                product(x, w_qkv, norm=norm, choice=qkv), self.batch, self.cache[layer, 0], self.cache[layer, 1],
                self.rope, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, scale=s.head_dim**-0.5,
            )  # fmt: skip
            x = product(mixed, w_out, residual=x, choice=out)
            inner = product(x, w_gate_up, norm=norm, gate=True, choice=gate_up)
            x = product(inner, w_down, residual=x, choice=down)
        return x


def refine(
    chain: Chain,
    start: Mapping[Shape, Choice],
    contenders: Mapping[Shape, Sequence[Choice]],
    say: Callable[[str], None],
) -> dict[Shape, Choice]:
    """The best choices found by changing one product at a time, largest first, beginning with `start`."""
    best = {key: start[key] for key in chain.shape.products}
    incumbent = chain.replay(best)
    first = incumbent.time(9).us

    def challenge(key: Shape, choices: Sequence[Choice]) -> None:
        nonlocal incumbent
        for choice in choices:
            if choice == best[key]:
                continue
            try:
                trial = chain.replay({**best, key: choice})
            except Exception as error:  # noqa: BLE001 - a candidate that does not fit this GPU is no candidate
                log.debug("%s: %s", choice, error)
                continue
            _, _, ratio, (_, high) = paired(trial, incumbent, 9)
            if ratio < GAIN and high < 1.0:
                best[key], incumbent = choice, trial

    largest_first = sorted(chain.shape.products, key=lambda key: -key[0] * key[1])
    for key in largest_first:
        challenge(key, contenders[key])
    for key in largest_first:  # the neighbours are others now
        if best[key] != LIBRARY:
            challenge(key, [replace(best[key], early=not best[key].early)])
            challenge(key, [replace(best[key], ahead=ahead) for ahead in AHEAD])
    say(f"a chain of {LAYERS} layers, M={chain.rows}: {first:.1f} µs, refined {incumbent.time(9).us:.1f} µs")
    return best
