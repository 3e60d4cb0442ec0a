"""The sampler: each option against its definition, and a draw that is a function of (seed, position) alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from diptych.contract.request import Sampling, Stopping
from diptych.contract.wire import Logprob
from diptych.kernels.sampling import uniform
from diptych.workers.sampler import Sampler, SampleRow, prompt_logprobs

_VOCAB = 1000
_STOPPING = Stopping(max_tokens=100, end_ids=(2,))


def _logits(rows: int, seed: int = 0, spread: float = 3.0, vocab: int = _VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def _row(sampling: Sampling, position: int = 0, **others: object) -> SampleRow:
    return SampleRow(sampling, _STOPPING, position, **others)  # type: ignore[arg-type]


def _draws(logits: Tensor, sampling: Sampling, count: int) -> Counter[int]:
    """Tokens drawn for `count` positions from the same row of logits."""
    rows = [_row(sampling, position) for position in range(count)]
    return Counter(token for token, _ in Sampler(_VOCAB).sample(logits.expand(count, -1), rows))


def _one(logits: Tensor, row: SampleRow) -> int:
    return Sampler(_VOCAB).sample(logits, [row])[0][0]


OPTIONS = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(temperature=0.8, seed=42),
    "top-k": Sampling(temperature=1.2, top_k=7, seed=1),
    "top-p": Sampling(temperature=0.9, top_p=0.8, seed=2),
    "top-p of nearly all": Sampling(temperature=5.0, top_p=0.99, seed=2),
    "min-p": Sampling(min_p=0.1, seed=3),
    "everything": Sampling(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.02, seed=4, repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=0.2, logit_bias=((5, 2.0), (17, -100.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_neighbours_change_nothing(name: str) -> None:
    """Case S1 where it begins: a row beside every other option, in every place of the batch, bitwise."""
    history = {"prompt_ids": (5, 6, 7, 5), "output_ids": (9, 9, 11), "logprobs": 4}
    rows = [_row(sampling, 3, **history) for sampling in OPTIONS.values()]
    index, logits = list(OPTIONS).index(name), _logits(len(rows), vocab=49_152)
    sampler = Sampler(49_152)
    alone = sampler.sample(logits[index : index + 1], [rows[index]])[0]
    for size in range(2, len(rows) + 1):
        for first in range(len(rows) - size + 1):
            if first <= index < first + size:
                beside = sampler.sample(logits[first : first + size], rows[first : first + size])
                assert beside[index - first] == alone


def test_the_draw_follows_the_distribution() -> None:
    logits, count = _logits(1, spread=1.0), 20_000
    drawn = _draws(logits, Sampling(temperature=0.5, seed=9), count)
    shares = (logits[0].double() / 0.5).softmax(-1)
    expected = shares * count
    common = expected > 5
    found = torch.tensor([float(drawn[token]) for token in range(_VOCAB)])
    chi = ((found[common] - expected[common]) ** 2 / expected[common]).sum()
    freedom = int(common.sum())
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_uniform_is_uniform_and_depends_on_both() -> None:
    draws = [uniform(seed, position) for seed in range(100) for position in range(100)]
    values = torch.tensor(draws)
    assert 0 <= min(draws) < max(draws) < 1
    assert len(set(draws)) == len(draws)
    histogram = torch.histc(values, 20, 0, 1)
    assert ((histogram - 500).abs() < 5 * math.sqrt(500)).all()
    assert uniform(2**63 - 1, 10**9) < 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-45, 0.0])
def test_tiny_temperature(temperature: float) -> None:
    """Case S2: every one is greedy or draws what greedy takes, and what is reported is finite."""
    logits = _logits(3, spread=30.0)
    logits[2] *= 1e4
    row = _row(Sampling(temperature=temperature, seed=1), logprobs=3)
    for found, best in zip(Sampler(_VOCAB).sample(logits, [row] * 3), logits.argmax(-1).tolist(), strict=True):
        assert found[0] == best
        assert found[1] is not None
        assert math.isfinite(found[1].logprob)


def test_top_k_keeps_k() -> None:
    logits = _logits(1, spread=0.1)
    assert set(_draws(logits, Sampling(top_k=4), 500)) == set(logits.topk(4).indices[0].tolist())
    assert set(_draws(logits, Sampling(top_k=1), 20)) == {int(logits.argmax())}
    assert len(_draws(logits, Sampling(top_k=_VOCAB + 5), 500)) > 200


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.51, 2), (0.75, 2), (0.8, 4), (1.0, 4), (0.0, 1)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    logits = torch.full((1, _VOCAB), float("-inf"))
    logits[0, [30, 20, 10, 40]] = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    expected = {30, 20, 10, 40} if kept == 4 else set([30, 20][:kept])  # the last two are equals: both stay
    assert set(_draws(logits, Sampling(top_p=top_p), 400)) == expected


def test_top_p_past_the_candidates_is_the_same_by_sorting() -> None:
    """Flat logits need more than the few hundred candidates that are looked at first."""
    logits, top_p = _logits(1, spread=0.5), 0.9
    ordered = logits[0].softmax(-1).sort(descending=True)
    kept = int(((ordered.values.double().cumsum(-1) - ordered.values) < top_p).sum())
    assert kept > 512
    drawn = _draws(logits, Sampling(top_p=top_p), 20_000)
    assert set(drawn) <= set(ordered.indices[:kept].tolist())
    assert len(drawn) > 0.95 * kept


def test_min_p_is_relative_to_the_best() -> None:
    logits = torch.full((1, _VOCAB), -50.0)
    logits[0, :4] = torch.tensor([0.4, 0.3, 0.05, 0.01]).log()
    assert set(_draws(logits, Sampling(min_p=0.1), 500)) == {0, 1, 2}


def test_repetition_counts_prompt_and_output() -> None:
    logits = torch.zeros(1, _VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([4.0, 3.9, 3.8])
    penalised = Sampling(temperature=0, repetition_penalty=1.1)
    assert _one(logits, _row(penalised)) == 5
    assert _one(logits, _row(penalised, prompt_ids=(5, 5))) == 6
    assert _one(logits, _row(penalised, prompt_ids=(5,), output_ids=(6,))) == 7
    negative = torch.full((1, _VOCAB), -2.0)
    negative[0, 8] = -1.9
    assert _one(negative, _row(penalised, prompt_ids=(8,))) != 8


def test_presence_and_frequency_count_output_only() -> None:
    logits = torch.zeros(1, _VOCAB)
    logits[0, [5, 6]] = torch.tensor([4.0, 3.0])
    assert _one(logits, _row(Sampling(temperature=0, presence_penalty=1.5), prompt_ids=(5,))) == 5
    assert _one(logits, _row(Sampling(temperature=0, presence_penalty=1.5), output_ids=(5,))) == 6
    assert _one(logits, _row(Sampling(temperature=0, presence_penalty=0.9), output_ids=(5, 5, 5))) == 5
    assert _one(logits, _row(Sampling(temperature=0, frequency_penalty=0.4), output_ids=(5, 5))) == 5
    assert _one(logits, _row(Sampling(temperature=0, frequency_penalty=0.4), output_ids=(5, 5, 5))) == 6


def test_bias_and_stop_mask() -> None:
    logits = torch.zeros(1, _VOCAB)
    logits[0, [2, 5, 6]] = torch.tensor([9.0, 8.0, 7.0])
    greedy = Sampling(temperature=0)

    def drawn(stopping: Stopping, position: int) -> int:
        return _one(logits, SampleRow(greedy, stopping, position))

    assert _one(logits, _row(Sampling(temperature=0, logit_bias=((2, -100.0), (6, 2.0))))) == 6
    assert _one(logits, _row(Sampling(temperature=0, logit_bias=((_VOCAB - 1, 100.0),)))) == _VOCAB - 1
    early = Stopping(max_tokens=9, min_tokens=3, end_ids=(2,), stop_ids=(5, 10**6))
    assert [drawn(early, position) for position in range(4)] == [6, 6, 6, 2]
    ignoring = Stopping(max_tokens=9, min_tokens=3, end_ids=(2,), stop_ids=(5,), ignore_eos=True)
    assert drawn(ignoring, 0) == 2  # ignored ends are no stops, so they may be drawn


def test_logprobs_are_of_the_model_itself() -> None:
    logits = _logits(3)
    kept = logits.clone()
    rows = [
        _row(Sampling(temperature=0.3, top_k=2, seed=5, logit_bias=((7, 50.0),)), logprobs=5),
        _row(Sampling(temperature=0)),
        _row(Sampling(temperature=0), logprobs=0),
    ]
    found = Sampler(_VOCAB).sample(logits, rows)
    assert torch.equal(logits, kept)
    shares = logits.double().log_softmax(-1)
    token, entry = found[0]
    assert token == 7
    assert isinstance(entry, Logprob)
    assert entry.logprob == pytest.approx(float(shares[0, 7]), abs=1e-5)
    assert [i for i, _ in entry.top] == shares[0].topk(5).indices.tolist()
    assert [v for _, v in entry.top] == pytest.approx(shares[0].topk(5).values.tolist(), abs=1e-5)
    assert found[1][1] is None
    assert found[2][1] is not None
    assert found[2][1].top == ()


@pytest.mark.parametrize("length", [1, 63, 150])
def test_prompt_logprobs(length: int) -> None:
    logits = _logits(length)
    following: Sequence[int] = [(7 * i) % _VOCAB for i in range(length)]
    shares = logits.double().log_softmax(-1)
    found = prompt_logprobs(logits, following, 2)
    assert len(found) == length
    for row, token, entry in zip(shares, following, found, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()


def test_a_row_of_nan_hurts_nobody_else() -> None:
    logits = _logits(2)
    logits[0] = float("nan")
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=30, seed=3)
    token, _ = Sampler(_VOCAB).sample(logits, [_row(sampling)] * 2)[1]
    assert token == _one(logits[1:], _row(sampling))
