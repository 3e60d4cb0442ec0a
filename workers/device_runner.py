"""Executes steps ahead of the host: made for a GPU, and runs on a CPU too, where tests hold its logic.

A step's inputs are staged in pinned memory and copied in one piece while the step before runs. A token that was drawn
but not yet committed is fed to the next step on the device. Decode steps replay a CUDA graph from a ladder of batch
sizes, padded with rows that read and write a block of their own; steps with chunks of prompts run eagerly.

    engine:  schedule(n+1) ─ launch(n+1) ─ commit(n) ─ schedule(n+2) …
    device:  … step n ────────────┤ step n+1 ──────────────┤
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from diptych.contract.request import Sampling, Stopping
from diptych.contract.wire import Logprob
from diptych.kernels.batch import Batch
from diptych.kernels.feed import feed
from diptych.kernels.sampling import greedy
from diptych.workers.cache import KVCache, KVLayout
from diptych.workers.model.decoder import Decoder
from diptych.workers.runner import Drawn, Launch, Launched, Runner, sample_row
from diptych.workers.sampler import Sampler, SampleRow
from diptych.workers.scheduler import Row, Step
from diptych.workers.settings import WorkerSettings

log = logging.getLogger("diptych.runner")

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
STEPS = ((512, 64), (sys.maxsize, 128))  # above those: (up to, by)
HOST = -1  # feedback: the token is known on the host


def ladder(max_batch: int) -> list[int]:
    """Batch sizes to capture, rising, the last of them `max_batch`. A batch of more than 16 rows is padded by less than
    half of them, one of more than 64 by less than a third."""
    sizes = list(LADDER)
    for end, step in STEPS:
        while sizes[-1] < min(end, max_batch):
            sizes.append(sizes[-1] + step)
    return [*(size for size in sizes if size < max_batch), max_batch]


@dataclass(frozen=True)
class Pending:
    """A launch whose results are on their way to the host. kept: logits, when a row asked for log-probabilities."""

    step: Step
    started: int
    ready: torch.cuda.Event | None
    ids: torch.Tensor
    rows: Sequence[SampleRow]
    kept: torch.Tensor | None
    prompt: dict[int, list[Logprob]]
    sampler: Sampler

    def result(self) -> Launch:
        if self.ready is not None:
            self.ready.synchronize()
        tokens: list[int] = self.ids.tolist()
        logprobs: list[Logprob | None] = [None] * len(tokens)
        if self.kept is not None:
            logprobs = self.sampler.logprobs(self.kept, tokens, self.rows)
        drawn = [Drawn(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
        return Launch(self.step, drawn, self.prompt, self.started, monotonic_ns())


class _Graph:
    """One captured decode step of `size` rows: its inputs, in one tensor, and what it leaves.

    logits: [size, vocab] float32, in memory that all sizes share: they hold until the next replay of any of them.
    """

    def __init__(self, owner: DeviceRunner, size: int) -> None:
        self.size = size
        self.width = owner.width
        self.inputs = torch.zeros(size * (5 + self.width), dtype=torch.int32, device=owner.device)
        self.host = [torch.zeros_like(self.inputs, device="cpu").pin_memory() for _ in range(2)]
        self.query_start = torch.arange(size + 1, dtype=torch.int32, device=owner.device)
        self.turn = 0
        owner.pad(self.host[0].numpy(), 0, size)
        self.inputs.copy_(self.host[0])
        owner.decode(self)  # compiles and loads kernels, and warms the allocator, outside the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=owner.pool, capture_error_mode="thread_local"):
            logits = owner.decode(self)
        owner.pool = self.graph.pool()
        # Let go of, their memory stays the pool's, which lives as long as its graphs, and the next size takes it too.
        # Owned, those of all sizes would add up: 4 GB at 1,024 rows and a vocabulary of 152,000.
        self.logits = _unowned(logits)

    def column(self, buffer: Any, index: int) -> Any:
        return buffer[index * self.size : (index + 1) * self.size]


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory on the GPU, which whoever holds this does not keep."""
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.float32
    lent = {"shape": tuple(tensor.shape), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=lent), device=tensor.device)


class DeviceRunner(Runner):
    """One rank's model and memory, run ahead. `overlap` is 1: a step may be launched before the last is committed."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        max_batch: int,
        max_context: int,
        graphs: bool = True,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """cache: with one block more than the pool knows of, for padded rows. progress: called with (sizes captured,
        sizes in all), before the first and after each."""
        super().__init__(decoder, cache, sampler)
        self.overlap = 1
        self.device = cache.data.device
        self.width = -(-max_context // self.block_size)
        self.max_context = max_context
        self.trash = cache.num_blocks - 1
        self.drawn = torch.zeros(max_batch + 1, dtype=torch.int64, device=self.device)
        self.pool: Any = None
        self._graphs: list[_Graph] = []
        self.on_gpu = self.device.type == "cuda"
        self._ids = [torch.zeros(max_batch, dtype=torch.int64, pin_memory=self.on_gpu) for _ in range(2)]
        self._turn = 0
        self.softmax_counts = torch.zeros(2, dtype=torch.int64, pin_memory=self.on_gpu)
        self._order: dict[int, int] = {}  # of the last launch: id(sequence) → its row among the drawn ones
        sizes = ladder(max_batch) if graphs and self.on_gpu else []
        with torch.inference_mode():
            for done, size in enumerate(reversed(sizes)):  # the largest first: the others fit its memory
                progress(done, len(sizes))
                self._graphs.insert(0, _Graph(self, size))
        if sizes:
            progress(len(sizes), len(sizes))

    # ── the captured part ──────────────────────────────────────────────────────────────────────────────────────────

    def decode(self, graph: _Graph) -> torch.Tensor:
        """From the graph's inputs to logits [size, vocab] float32; leaves greedy tokens in `drawn`."""
        size, inputs = graph.size, graph.inputs
        tokens, positions, slots = feed(inputs[: 4 * size].view(4, size), self.drawn)
        batch = Batch(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            query_start=graph.query_start,
            context_lens=inputs[4 * size : 5 * size],
            block_tables=inputs[5 * size :].view(size, self.width),
            query_lens=(),
            contexts=(),
            tables=(),
            max_query=1,
            max_context=self.max_context,
        )
        logits = self.decoder.logits(self.decoder(batch, self.cache))
        self.drawn[:size] = greedy(logits)
        return logits

    def pad(self, buffer: np.ndarray, start: int, size: int) -> None:
        """Rows [start, size) of a graph's staged inputs become harmless: one token in a block that nobody owns."""
        columns = buffer[: 5 * size].reshape(5, size)
        columns[:, start:] = np.array([0, HOST, 0, self.trash * self.block_size, 1])[:, None]
        buffer[5 * size :].reshape(size, self.width)[start:, :1] = self.trash

    # ── launching ──────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        started = monotonic_ns()
        rows = step.rows
        if not rows:
            self._order = {}
            return self._idle(step, started)
        picked = [row for row in rows if row.sample]
        decode_only = all(row.count == 1 and row.sample for row in rows)
        graph = next((graph for graph in self._graphs if graph.size >= len(rows)), None) if decode_only else None
        prompt: dict[int, list[Logprob]] = {}
        if graph is not None:
            logits = self._replay(graph, rows)
        else:
            logits, prompt = self._eager(rows)
        samples = [sample_row(row) for row in picked]
        plain = all(row.sampling.greedy and not self.sampler.changes(row) for row in samples)
        if picked and not (graph is not None and plain):
            self.drawn[: len(picked)] = self.sampler.ids(logits[: len(picked)], samples)
        self._order = {id(row.seq): index for index, row in enumerate(picked)}
        asked = any(row.logprobs is not None for row in samples)
        self._turn = 1 - self._turn
        ids = self._ids[self._turn][: len(picked)]
        ids.copy_(self.drawn[: len(picked)], non_blocking=True)
        if self.decoder.unified is not None:
            self.softmax_counts.copy_(self.decoder.unified.counts, non_blocking=True)
        kept = logits[: len(picked)].clone() if asked else None
        ready = None
        if self.on_gpu:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return Pending(step, started, ready, ids, samples, kept, prompt, self.sampler)

    def _feed(self, row: Row) -> tuple[int, int]:
        """A decode row's (token, feedback): its token if the host knows it, else the last launch's row that drew it."""
        seq = row.seq
        if row.start < len(seq.tokens):
            return seq.tokens[row.start], HOST
        return 0, self._order[id(seq)]

    def _replay(self, graph: _Graph, rows: Sequence[Row]) -> torch.Tensor:
        graph.turn = 1 - graph.turn
        host = graph.host[graph.turn]
        staged, size, block_size = host.numpy(), graph.size, self.block_size
        columns = staged[: 5 * size].reshape(5, size)
        tables = staged[5 * size :].reshape(size, self.width)
        for index, row in enumerate(rows):
            blocks, at = row.seq.blocks, row.start
            columns[:, index] = (*self._feed(row), at, blocks[at // block_size] * block_size + at % block_size, at + 1)
            tables[index, : len(blocks)] = blocks
        self.pad(staged, len(rows), size)
        graph.inputs.copy_(host, non_blocking=True)
        graph.graph.replay()
        return graph.logits

    def _eager(self, rows: Sequence[Row]) -> tuple[torch.Tensor, dict[int, list[Logprob]]]:
        fed = [self._feed(row) if row.count == 1 else (0, HOST) for row in rows]
        batch = self._batch(rows, [token for token, _ in fed])
        ends = (np.cumsum([row.count for row in rows]) - 1).tolist()
        waiting = [(end, feedback) for end, (_, feedback) in zip(ends, fed, strict=True) if feedback != HOST]
        if waiting:
            where, source = (torch.tensor(column, device=self.device) for column in zip(*waiting, strict=True))
            batch.token_ids[where] = self.drawn[source]
        hidden = self.decoder(batch, self.cache)
        picks = [end for end, row in zip(ends, rows, strict=True) if row.sample]
        logits = self.decoder.logits(hidden[torch.tensor(picks, device=self.device)]) if picks else hidden[:0]
        return logits, self._prompt_logprobs(rows, hidden, ends)


@torch.inference_mode()
def rehearse(decoder: Decoder, sampler: Sampler, layout: KVLayout, settings: WorkerSettings, context: int) -> None:
    """The largest step there can be, over a cache of its own: what it allocates on its way is the workspace that must
    stay free. It has as many tokens as any step may have, then logits of `max_batch` rows and draws from them, biased
    ones beside a greedy one, which keep the most copies. context: the longest sequence; the step is made of as many as
    it takes."""
    size, device = layout.block_size, decoder.device
    tokens = max(settings.token_budget, settings.max_batch)
    lengths = [min(context, tokens - start) for start in range(0, tokens, context)]
    each = -(-min(context, tokens) // size)
    tables = tuple(tuple(range(index * each, (index + 1) * each)) for index in range(len(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    starts = torch.cat([torch.full((length,), index * each * size) for index, length in enumerate(lengths)]).to(device)
    cache = KVCache.of(layout, each * len(lengths), device)
    batch = Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=starts + positions,
        query_start=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        query_lens=tuple(lengths),
        contexts=tuple(lengths),
        tables=tables,
        max_query=max(lengths),
        max_context=max(lengths),
    )
    hidden = decoder(batch, cache)
    logits = decoder.logits(hidden[: settings.max_batch])
    greedy_row, biased = (Sampling(temperature, logit_bias=((0, 0.0),)) for temperature in (0.0, 1.0))
    sampler.ids(logits, [SampleRow(each, Stopping(1), 0) for each in [greedy_row] + [biased] * (len(logits) - 1)])
