"""The engine's decode step on a GPU: captured once, replayed for each token.

The device itself writes what a replay drew, and where the next token goes, into its inputs: no step waits for the host.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.kernels.batch import Batch
from diptych.kernels.sampling import greedy
from diptych.workers.cache import KVCache
from diptych.workers.model.decoder import Decoder


class DecodeGraph:
    """tables: [B, blocks] int32, of sequences that all have `start` tokens when they begin to decode."""

    def __init__(self, decoder: Decoder, cache: KVCache, tables: np.ndarray, start: int) -> None:
        self.decoder, self.cache, self.size = decoder, cache, cache.layout.block_size
        # One column more: after the last token the device looks for the block of one that never comes.
        self.tables = torch.from_numpy(np.pad(tables, ((0, 0), (0, 1)))).to(decoder.device)
        self.start, self.at = start, -1
        self.first = self.tables[:, start // self.size].long() * self.size + start % self.size
        self.batch = self._batch()
        self._step()  # compiles and loads kernels, and takes scratch, outside the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._step()

    def _batch(self) -> Batch:
        count, device = len(self.tables), self.decoder.device
        return Batch(
            token_ids=torch.zeros(count, dtype=torch.int64, device=device),
            positions=torch.full((count,), self.start, dtype=torch.int64, device=device),
            slots=self.first.clone(),
            query_start=torch.arange(count + 1, dtype=torch.int32, device=device),
            context_lens=torch.full((count,), self.start + 1, dtype=torch.int32, device=device),
            block_tables=self.tables,
            query_lens=(), contexts=(), tables=(), max_query=1, max_context=self.tables.shape[1] * self.size,
        )  # fmt: skip

    @torch.inference_mode()
    def _step(self) -> None:
        from diptych.kernels.triton.sampling import advance

        batch = replace(self.batch)  # the same tensors, but nothing derived from them in a step before
        ids = greedy(self.decoder.logits(self.decoder(batch, self.cache)))
        advance(ids, batch.token_ids, batch.positions, batch.slots, batch.context_lens, batch.block_tables, self.size)

    def step(self, last: Tensor, at: int) -> Tensor:
        """Feeds `last` [B] at position `at`, which is `start` or follows the step before; the tokens drawn, valid until
        the next step."""
        batch = self.batch
        if at != self.at:
            assert at == self.start
            batch.token_ids.copy_(last)
            batch.positions.fill_(at)
            batch.slots.copy_(self.first)
            batch.context_lens.fill_(at + 1)
        self.graph.replay()
        self.at = at + 1
        return batch.token_ids
