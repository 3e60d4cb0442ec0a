"""Drives a decoder as the runner does, without a scheduler: rows of (tokens, start, blocks) become one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from diptych.kernels.batch import Batch
from diptych.workers.cache import KVCache
from diptych.workers.model.decoder import Decoder

Row = tuple[Sequence[int], int, Sequence[int]]


def make_batch(rows: Sequence[Row], block_size: int, device: torch.device | str = "cpu") -> Batch:
    """Each row: new tokens, position of the first of them, the sequence's blocks."""
    counts = tuple(len(tokens) for tokens, _, _ in rows)
    contexts = tuple(start + len(tokens) for tokens, start, _ in rows)
    tables = tuple(
        tuple(blocks[: -(-context // block_size)]) for (_, _, blocks), context in zip(rows, contexts, strict=True)
    )
    padded = np.zeros((len(rows), max(map(len, tables))), dtype=np.int32)
    for index, table in enumerate(tables):
        padded[index, : len(table)] = table
    places = [(start + i, blocks) for tokens, start, blocks in rows for i in range(len(tokens))]
    return Batch(
        token_ids=torch.tensor([token for tokens, _, _ in rows for token in tokens], device=device),
        positions=torch.tensor([at for at, _ in places], device=device),
        slots=torch.tensor(
            [blocks[at // block_size] * block_size + at % block_size for at, blocks in places], device=device
        ),
        query_start=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.from_numpy(padded).to(device),
        query_lens=counts,
        contexts=contexts,
        tables=tables,
        max_query=max(counts),
        max_context=max(contexts),
    )


@dataclass
class Driver:
    """A decoder and a cache. blocks: scattered over the cache, or side by side."""

    decoder: Decoder
    block_size: int = 16
    num_blocks: int = 256
    scattered: bool = False
    taken: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        config = self.decoder.config
        self.cache = KVCache(
            config.layers,
            self.num_blocks,
            self.block_size,
            self.decoder.kv_heads,
            config.head_dim,
            self.decoder.dtype,
            self.decoder.device,
        )
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.order: list[int] = order if self.scattered else list(range(self.num_blocks))

    def blocks_for(self, tokens: int) -> list[int]:
        count = -(-tokens // self.block_size)
        found = self.order[self.taken : self.taken + count]
        assert len(found) == count, "the test's cache is too small"
        self.taken += count
        return found

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Hidden states of all tokens of the rows."""
        return self.decoder(make_batch(rows, self.block_size, self.decoder.device), self.cache)

    def prefill(self, prompt: Sequence[int], blocks: Sequence[int], chunk: int | None = None) -> Tensor:
        """Hidden states of the whole prompt, computed in chunks."""
        size = chunk or len(prompt)
        parts = [self.run([(prompt[at : at + size], at, blocks)]) for at in range(0, len(prompt), size)]
        return torch.cat(parts)

    def logits(self, prompt: Sequence[int], chunk: int | None = None) -> Tensor:
        """[len(prompt), vocab]."""
        return self.decoder.logits(self.prefill(prompt, self.blocks_for(len(prompt)), chunk))

    def greedy(self, prompts: Sequence[Sequence[int]], count: int, chunk: int | None = None) -> list[list[int]]:
        """`count` tokens for each prompt, decoded together."""
        return [[int(row.argmax()) for row in rows] for rows in self.greedy_logits(prompts, count, chunk)]

    def greedy_logits(
        self, prompts: Sequence[Sequence[int]], count: int, chunk: int | None = None
    ) -> list[list[Tensor]]:
        """The logits from which each token of `greedy` is taken."""
        blocks = [self.blocks_for(len(prompt) + count) for prompt in prompts]
        found = [
            [self.decoder.logits(self.prefill(prompt, own, chunk)[-1:])[0]]
            for prompt, own in zip(prompts, blocks, strict=True)
        ]
        for step in range(count - 1):
            rows: list[Row] = [
                ([int(seen[-1].argmax())], len(prompt) + step, own)
                for seen, prompt, own in zip(found, prompts, blocks, strict=True)
            ]
            for seen, row in zip(found, self.decoder.logits(self.run(rows)), strict=True):
                seen.append(row)
        return found
