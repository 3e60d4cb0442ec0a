"""The dataflow's tables and the sweep's candidates: pure functions, no GPU."""

from __future__ import annotations

import json
import logging

import pytest

from diptych.kernels.dataflow import LIBRARY, TABLES, Choice, Problem, Table, choose, table, table_name
from diptych.kernels.tune import SHARED_MEMORY, Finding, Gpu, candidates, decoder_shapes, merged, starts_next_early

LLAMA_3_8B = decoder_shapes(4096, 32, 8, 128, 14336, 128256)


def test_smallest_tuned_rows_that_hold_the_problem() -> None:
    gemv, flat = Choice("gemv", 8, 256), Choice("flat", 64, 128)
    rows = {"1": {"choice": gemv.__dict__}, "16": {"choice": flat.__dict__}}
    found = Table.parse({"device": "x", "entries": {"64x32:bfloat16:plain": rows}})
    assert [found.choose(Problem(64, 32, m, "bfloat16", "plain")) for m in (1, 2, 16, 17)] == [
        gemv,
        flat,
        flat,
        LIBRARY,
    ]
    assert found.choose(Problem(64, 33, 1, "bfloat16", "plain")) is None


def test_an_untuned_shape_goes_to_the_library_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for m in (1, 2, 3):
            assert choose("NVIDIA H200", Problem(77, 55, m, "bfloat16", "plain")) == LIBRARY
    assert len(caplog.records) == 1
    assert "77x55" in caplog.text


def test_the_shipped_table_serves_llama_3() -> None:
    shipped = table("NVIDIA H200")
    assert (TABLES / table_name("NVIDIA H200")).exists()
    for k, n, fusion in LLAMA_3_8B:
        assert shipped.choose(Problem(k, n, 1, "bfloat16", fusion)) != LIBRARY
        assert shipped.choose(Problem(k, n, 512, "bfloat16", fusion)) == LIBRARY


@pytest.mark.parametrize("gpu", [Gpu(132, True), Gpu(108, False)], ids=["hopper", "ampere"])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 64, 128])
@pytest.mark.parametrize(("k", "n", "fusion"), LLAMA_3_8B)
def test_candidates_fit_the_gpu(k: int, n: int, fusion: str, m: int, gpu: Gpu) -> None:
    problem = Problem(k, n, m, "bfloat16", fusion)  # type: ignore[arg-type]
    found = candidates(problem, gpu)
    assert found
    assert any(c.kind == "streamed" for c in found) is gpu.streams
    assert len(set(found)) == len(found)
    gate = 2 if fusion == "norm_gate" else 1
    for c in found:
        rows = 0 if c.kind == "gemv" else max(16, m)
        assert (c.bn * gate + rows) * c.bk * 2 * c.stages <= SHARED_MEMORY
        assert c.split == 1 or c.kind in ("flat", "streamed")
        assert c.kind != "streamed" or c.split == 1 or fusion == "plain" or (fusion == "norm" and c.apart)


def test_a_launch_of_many_waves_keeps_its_successor_out() -> None:
    gate_up = Problem(4096, 28672, 1, "bfloat16", "norm_gate")
    assert not starts_next_early(gate_up, Choice("gemv", 8, 512))
    assert starts_next_early(Problem(4096, 4096, 1, "bfloat16", "plain"), Choice("gemv", 8, 256))


def test_findings_are_merged_into_what_was_known(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "gpu.json"
    for m in (1, 2):
        finding = Finding(Problem(8, 8, m, "bfloat16", "plain"), LIBRARY, 1.0, 1.0)
        path.write_text(json.dumps(merged(path, "gpu", [finding])))
    assert sorted(json.loads(path.read_text())["entries"]["8x8:bfloat16:plain"]) == ["1", "2"]


def test_a_chain_is_offered_the_near_ones_and_the_best_of_each_kind() -> None:
    problem = Problem(4096, 4096, 32, "bfloat16", "plain")
    flat, other, slow = Choice("flat", 64, 64), Choice("flat", 128, 64), Choice("flat", 64, 128)
    far, worse = Choice("streamed", 64, 64), Choice("gemv", 8, 256)
    times = ((10.0, flat), (10.5, other), (11.5, slow), (12.0, far), (17.0, worse))
    found = Finding(problem, flat, 10.0, 15.0, times).contenders()
    assert found == [flat, other, far, LIBRARY]


def test_where_the_library_wins_the_chain_still_sees_ours_that_come_near() -> None:
    problem = Problem(4096, 4096, 128, "bfloat16", "plain")
    near = Choice("streamed", 64, 64)
    assert Finding(problem, LIBRARY, 15.0, 15.0, ((15.9, near),)).contenders() == [LIBRARY, near]
