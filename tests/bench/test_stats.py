"""From records to numbers."""

from __future__ import annotations

import pytest

from diptych.bench.load import Record
from diptych.bench.stats import Objective, crossing, percentile, sign_flip, summary
from diptych.contract.errors import ConfigInvalid


def record(due: float, sent: float, *pieces: tuple[float, int], error: str = "") -> Record:
    return Record(due, sent, 10, 4, list(pieces), error)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([3.0], 0.99) == 3


def test_latency_counts_from_when_a_request_was_due() -> None:
    late = record(1.0, 1.5, (2.0, 1), (2.2, 2), (2.6, 1))
    assert late.ttft == pytest.approx(1.0)
    assert late.e2e == pytest.approx(1.6)
    assert late.tpot == pytest.approx(0.2)
    assert late.itl == pytest.approx([0.2, 0.4])


def test_a_summary() -> None:
    records = [record(0.0, 0.0, (0.5, 1), (1.0, 3)), record(0.0, 0.1, (1.5, 1), (2.0, 3)), record(1.0, 1.0, error="X")]
    found = summary(records, Objective.parse("ttft=600ms,tpot=0.2s"))
    assert (found["answered"], found["errors"]) == (2, {"X": 1})
    assert found["requests_s"] == pytest.approx(1.0)
    assert found["output_tokens_s"] == pytest.approx(4.0)
    assert found["ttft_ms"]["p50"] == 500
    assert found["ttft_ms"]["p99"] == 1500
    assert found["met"] == pytest.approx(1 / 3, abs=1e-3)  # an error meets nothing
    assert found["goodput_requests_s"] == 0.5


@pytest.mark.parametrize("text", ["ttft", "ttft=x", "speed=3ms", "ttft=0ms", "ttft=-1s", "ttft=5", "tpot=infs"])
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="Objective"):
        Objective.parse(text)


def test_the_significance_of_paired_differences() -> None:
    assert sign_flip([1.0, 1.2, 0.9, 1.1, 1.0, 1.3]) == pytest.approx(2 / 64)
    assert sign_flip([1.0, -1.0, 0.5, -0.6]) > 0.5
    assert sign_flip([0.0, 0.0, 0.0]) == 1
    assert sign_flip([1.0] * 20) < 0.01
    assert sign_flip([]) == 1


def test_where_two_lines_cross() -> None:
    assert crossing([1, 2, 4], [1, 2, 4], [3, 3, 3]) == [3.0]
    assert crossing([1, 2], [1, 2], [3, 3]) == []
    assert crossing([1, 2, 3], [1, 3, 4], [3, 3, 3]) == [2]
    assert crossing([1, 2, 3], [1, 3, 1], [3, 3, 3]) == []
    assert crossing([1, 2], [3, 3], [3, 3]) == []
