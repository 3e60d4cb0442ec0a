"""Executes a step: turns rows into a batch, runs the decoder, draws tokens. Owns the model, the cache's memory and the
sampler; knows no queues.

`launch` may return before the device is done; `Launch.result` waits for it. On a CPU both happen at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import monotonic_ns
from typing import Protocol

import msgspec
import numpy as np
import torch

from diptych.contract.wire import Logprob
from diptych.kernels.batch import Batch
from diptych.workers.cache import KVCache
from diptych.workers.model.decoder import Decoder
from diptych.workers.sampler import Sampler, SampleRow, prompt_logprobs
from diptych.workers.scheduler import Row, Step

PROMPT_ROWS = 64


class Drawn(msgspec.Struct, frozen=True):
    """The token drawn for a row, and the log-probabilities of prompt tokens that its chunk was asked for."""

    token: int
    logprob: Logprob | None


@dataclass(frozen=True)
class Launch:
    """A launched step, already done where launching is computing.

    drawn: for each row with `sample`, in order. prompt: prompt log-probabilities by row index.
    started, finished: ns, from before the batch was built until the tokens were on the host."""

    step: Step
    drawn: list[Drawn]
    prompt: dict[int, list[Logprob]]
    started: int
    finished: int

    def result(self) -> Launch:
        return self


class Launched(Protocol):
    """A step that was launched and may still run."""

    @property
    def step(self) -> Step: ...

    def result(self) -> Launch:
        """Waits for the device; the step's results."""
        ...


def sample_row(row: Row) -> SampleRow:
    """What the token after this row's last one is drawn for."""
    seq, request = row.seq, row.seq.request
    return SampleRow(
        sampling=request.sampling,
        stopping=request.stopping,
        position=row.start + row.count - seq.prompt_len,
        prompt_ids=request.prompt,
        output_ids=seq.tokens[seq.prompt_len :] if seq.needs_output else (),
        logprobs=request.logprobs,
    )


class Runner:
    """One rank's model and memory. `alone`: a step that fails here leaves no other rank out of step."""

    alone = True

    def __init__(self, decoder: Decoder, cache: KVCache, sampler: Sampler) -> None:
        self.decoder = decoder
        self.cache = cache
        self.sampler = sampler
        self.block_size = cache.layout.block_size
        self.overlap = 0  # steps that may be launched before the last one is committed
        self.softmax_counts = torch.zeros(2, dtype=torch.int64)
        """On the host: rows of decode attention that left the unified maximum's window, and all of them."""

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        started = monotonic_ns()
        rows = step.rows
        if not rows:
            return self._idle(step, started)
        batch = self._batch(rows)
        hidden = self.decoder(batch, self.cache)
        ends = (np.cumsum([row.count for row in rows]) - 1).tolist()
        picks = [end for end, row in zip(ends, rows, strict=True) if row.sample]
        prompt = self._prompt_logprobs(rows, hidden, ends)
        drawn: list[Drawn] = []
        if picks:
            wanted = hidden if len(picks) == len(hidden) else hidden[torch.tensor(picks, device=hidden.device)]
            logits = self.decoder.logits(wanted)
            found = self.sampler.sample(logits, [sample_row(row) for row in rows if row.sample])
            drawn = [Drawn(token, logprob) for token, logprob in found]
        return Launch(step, drawn, prompt, started, monotonic_ns())

    def _idle(self, step: Step, started: int) -> Launch:
        """An empty step: only other data ranks have work."""
        self.decoder.idle()
        return Launch(step, [], {}, started, monotonic_ns())

    def _batch(self, rows: Seq[Row], unknown: Seq[int] = ()) -> Batch:
        """unknown: for each row, the token that stands in where its only one is not on the host yet."""
        block_size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for index, row in enumerate(rows):
            blocks = row.seq.blocks
            span = range(row.start, row.start + row.count)
            tokens += row.seq.tokens[row.start : row.start + row.count] or [unknown[index]]
            positions += span
            slots += [blocks[at // block_size] * block_size + at % block_size for at in span]
        counts = tuple(row.count for row in rows)
        contexts = tuple(row.start + row.count for row in rows)
        tables = tuple(
            tuple(row.seq.blocks[: -(-context // block_size)]) for row, context in zip(rows, contexts, strict=True)
        )
        width = max(len(table) for table in tables)
        padded = np.zeros((len(rows), width), dtype=np.int32)
        for index, table in enumerate(tables):
            padded[index, : len(table)] = table
        device = self.cache.data.device
        return Batch(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=torch.from_numpy(padded).to(device),
            query_lens=counts,
            contexts=contexts,
            tables=tables,
            max_query=max(counts),
            max_context=max(contexts),
        )

    def _prompt_logprobs(self, rows: Seq[Row], hidden: torch.Tensor, ends: Seq[int]) -> dict[int, list[Logprob]]:
        """For rows whose request asks: the log-probability of each prompt token that follows a token of this chunk.

        Logits of a few rows at a time: a whole chunk's would take gigabytes at a large vocabulary.
        """
        found: dict[int, list[Logprob]] = {}
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            seq, count = row.seq, row.seq.request.prompt_logprobs
            following = seq.tokens[row.start + 1 : min(row.start + row.count + 1, seq.prompt_len)]
            if count is None or not following or seq.generated:
                continue
            first, found[index] = end + 1 - row.count, []
            for at in range(0, len(following), PROMPT_ROWS):
                part = following[at : at + PROMPT_ROWS]
                logits = self.decoder.logits(hidden[first + at : first + at + len(part)])
                found[index] += prompt_logprobs(logits, part, count)
        return found
