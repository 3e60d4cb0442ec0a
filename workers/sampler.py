"""From logits to tokens: applies what each request asks for and says how likely the model held what was drawn.

Owns no state between steps: penalties are counted from the tokens, the draw from (seed, position). Order: mask of stop
tokens, logit bias, penalties, temperature, top-k, top-p, min-p. Log-probabilities are of the model's own logits, before
all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.contract.request import Sampling, Stopping
from diptych.contract.wire import Logprob
from diptych.kernels.sampling import SampleParams, greedy, sample, uniform

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class SampleRow:
    """What one row of logits is drawn for. position: index of the token among the generated ones, 0 first. prompt_ids,
    output_ids: all tokens so far; read only when a penalty is set. logprobs: alternatives to report, None for off."""

    sampling: Sampling
    stopping: Stopping
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    logprobs: int | None = None


class Sampler:
    """Draws a token for each row of a step."""

    def __init__(self, vocab: int, device: torch.device | str = "cpu") -> None:
        self.vocab = vocab
        self.device = torch.device(device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[tuple[int, Logprob | None]]:
        """One (token, log-probability if asked for) a row. logits: [B, vocab] float32, one row each of `rows`, not
        modified. A row's result does not depend on the others. A batch without any option costs one argmax."""
        tokens: list[int] = self.ids(logits, rows).tolist()
        return list(zip(tokens, self.logprobs(logits, tokens, rows), strict=True))

    @torch.inference_mode()
    def ids(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """The tokens [B] int64 of `sample`, on the device: the host does not wait for them."""
        adjusted = self._adjust(logits, rows)
        drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        if len(drawn) == len(rows):
            ids = self._draw(adjusted, rows)
        else:
            ids = greedy(adjusted)
            if drawn:
                picked = torch.tensor(drawn, device=self.device)
                ids[picked] = self._draw(adjusted[picked], [rows[index] for index in drawn])
        return ids

    @staticmethod
    def changes(row: SampleRow) -> bool:
        """Whether the row's logits are adjusted before the draw."""
        return any(change.wanted(row) for change in _CHANGES)

    def _adjust(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Logits with masks, biases and penalties: the given tensor itself when no row asks for any."""
        adjusted = logits
        for index, row in enumerate(rows):
            changes = [change for change in _CHANGES if change.wanted(row)]
            if changes and adjusted is logits:
                adjusted = logits.clone()
            for change in changes:
                change.apply(adjusted[index], row)
        return adjusted

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        asked = [row.sampling for row in rows]
        chances = [uniform(row.sampling.seed, row.position) for row in rows]
        top_k = any(a.top_k for a in asked)
        top_p = any(a.top_p < 1 for a in asked)
        min_p = any(a.min_p > 0 for a in asked)
        params = SampleParams(
            temperature=self._tensor([a.temperature for a in asked]),
            uniform=self._tensor(chances, torch.float64),
            top_k=self._tensor([a.top_k for a in asked], torch.int64) if top_k else None,
            top_p=self._tensor([a.top_p for a in asked]) if top_p else None,
            min_p=self._tensor([a.min_p for a in asked]) if min_p else None,
        )
        return sample(logits, params)

    def logprobs(self, logits: Tensor, tokens: list[int], rows: Sequence[SampleRow]) -> list[Logprob | None]:
        """For each row that asks: how likely the model held its token, and the best alternatives."""
        found: list[Logprob | None] = [None] * len(rows)
        asked = [index for index, row in enumerate(rows) if row.logprobs is not None]
        if asked:
            most = max(row.logprobs or 0 for row in rows)
            entries = prompt_logprobs(
                logits[torch.tensor(asked, device=logits.device)], [tokens[i] for i in asked], most
            )
            for index, entry in zip(asked, entries, strict=True):
                found[index] = Logprob(entry.logprob, entry.top[: rows[index].logprobs])
        return found

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], count: int) -> list[Logprob]:
    """For each row the log-probability of the token that followed, and the `count` best alternatives, best first.

    logits: [T, vocab] float32. next_ids: T token ids.
    """
    entries: list[Logprob] = []
    for start in range(0, len(next_ids), _ROWS_AT_ONCE):
        ids = torch.tensor(next_ids[start : start + _ROWS_AT_ONCE], device=logits.device)
        shares = logits[start : start + len(ids)].log_softmax(-1)
        best = shares.topk(min(count, shares.shape[-1]), dim=-1)
        chosen = shares.gather(-1, ids.unsqueeze(-1)).squeeze(-1).tolist()
        for share, top_ids, top in zip(chosen, best.indices.tolist(), best.values.tolist(), strict=True):
            entries.append(Logprob(share, tuple(zip(top_ids, top, strict=True))))
    return entries


class _StopMask:
    """No stop token before `min_tokens`."""

    @staticmethod
    def wanted(row: SampleRow) -> bool:
        return row.position < row.stopping.min_tokens and bool(row.stopping.stops)

    @staticmethod
    def apply(logits: Tensor, row: SampleRow) -> None:
        ids = [stop for stop in row.stopping.stops if stop < logits.shape[0]]
        logits[torch.tensor(ids, device=logits.device, dtype=torch.int64)] = float("-inf")


class _Bias:
    @staticmethod
    def wanted(row: SampleRow) -> bool:
        return bool(row.sampling.logit_bias)

    @staticmethod
    def apply(logits: Tensor, row: SampleRow) -> None:
        ids, values = zip(*row.sampling.logit_bias, strict=True)
        logits.index_add_(0, *_pair(ids, values, logits))


class _Repetition:
    """Tokens of prompt and output: positive logits divided by the penalty, negative ones multiplied."""

    @staticmethod
    def wanted(row: SampleRow) -> bool:
        return row.sampling.repetition_penalty != 1

    @staticmethod
    def apply(logits: Tensor, row: SampleRow) -> None:
        ids = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=logits.device, dtype=torch.int64)
        penalty, found = row.sampling.repetition_penalty, logits[ids]
        logits[ids] = torch.where(found > 0, found / penalty, found * penalty)


class _Repeated:
    """Presence and frequency: each token of the output costs a fixed amount, and one for each time it stands there."""

    @staticmethod
    def wanted(row: SampleRow) -> bool:
        penalised = row.sampling.presence_penalty != 0 or row.sampling.frequency_penalty != 0
        return penalised and bool(row.output_ids)

    @staticmethod
    def apply(logits: Tensor, row: SampleRow) -> None:
        presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
        counts = Counter(row.output_ids)
        logits.index_add_(0, *_pair(tuple(counts), [-presence - frequency * n for n in counts.values()], logits))


_CHANGES = (_StopMask, _Bias, _Repetition, _Repeated)


def _pair(ids: Sequence[int], values: Sequence[float], logits: Tensor) -> tuple[Tensor, Tensor]:
    where = torch.tensor(ids, device=logits.device, dtype=torch.int64)
    return where, torch.tensor(values, device=logits.device, dtype=logits.dtype)
