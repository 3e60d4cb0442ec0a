"""`diptych profile` on a real GPU: timelines of graphs, borders in them, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.cli import main
from diptych.profile import timeline
from diptych.profile.borders import graph_border, stream_border
from diptych.profile.ours import Ours
from diptych.profile.steps import Launched, by_timeline, measure, steps_of
from diptych.profile.theirs import Theirs
from diptych.workers.model.config import ModelConfig
from tests.support.families import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module", params=["llama3", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    make_tiny(request.param, made)
    return made


def tokens(kind: Any, folder: Path, device: str, count: int = 6) -> list[list[int]]:
    engine = kind(folder, ModelConfig.from_folder(folder), torch.float32, torch.device(device), "auto")
    engine.begin(2, 14, count + 1)  # past the border of a block
    found = []
    for step in (engine.prefill, *[engine.decode] * count, engine.prefill, engine.decode):
        step()
        found.append(engine.last.tolist())
    return found


def test_a_replayed_decode_draws_the_tokens_of_the_cpu(folder: Path) -> None:
    expected = tokens(Ours, folder, "cpu")
    assert tokens(Ours, folder, "cuda") == expected
    assert tokens(Theirs, folder, "cuda") == expected


def test_a_border_costs_microseconds() -> None:
    for border in (graph_border(), stream_border()):
        assert 0 < border.empty < 20e-6
        assert border.around < 20e-6


def test_a_device_tells_of_each_replay_of_a_graph_in_every_session() -> None:
    """Kernels in order with the names that were captured; a second session must not find CUPTI gone."""
    x = torch.ones(1 << 20, device="cuda")
    x.mul_(1).add_(1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):
            x.mul_(1)
            timeline.mark()
            x.add_(1)
    for _ in range(2):
        kernels: list[timeline.Kernel] = []
        with timeline.traced(kernels):
            for _ in range(8):
                torch.cuda.synchronize()
                torch.cuda._sleep(1_000_000)
                graph.replay()
        told = [step for step in timeline.steps_of(kernels) if len(step) == 9]
        assert len(told) >= 4, [(kernel.name[:40], kernel.end - kernel.start) for kernel in kernels]
        assert [kernel.is_mark for kernel in told[0]] == [False, True, False] * 3, timeline.names(told[0])


@pytest.mark.parametrize("kind", [Ours, Theirs])
@pytest.mark.parametrize("launched", [False, True])
def test_a_timeline_of_a_step(folder: Path, kind: Any, launched: bool) -> None:
    """Its operators fill the step that the profiler saw."""
    config = ModelConfig.from_folder(folder)
    engine = kind(folder, config, torch.bfloat16, torch.device("cuda"), "dummy")
    engine.begin(1, 64, 40)
    for step in (engine.prefill, None):
        if step is None:
            engine.prefill()
            step = engine.repeated()
        step()
        steps = Launched(engine, step) if launched else steps_of(engine, step)
        found = by_timeline(steps, 10)
        total = sum(timed.seconds for timed in found.operators.values())
        rows = {operator.name: round(timed.seconds * 1e6, 2) for operator, timed in found.operators.items()}
        told = (f"captured {steps.captured}, step {found.step * 1e6:.1f}, recorded {found.recorded * 1e6:.1f},"
                f" sum {total * 1e6:.1f} us, {found.details}, {rows}")  # fmt: skip
        print(told)
        assert 0.7 * found.recorded <= total <= 1.05 * found.recorded, told
        assert all(timed.seconds > 0 for operator, timed in found.operators.items() if timed.calls), told
        assert any(operator.category == "attention" for operator in found.operators), told


def test_borders_stand_in_where_there_is_no_timeline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "parse", lambda text: [])
    engine = Ours(folder, ModelConfig.from_folder(folder), torch.bfloat16, torch.device("cuda"), "dummy")
    engine.begin(1, 64, 40)
    engine.prefill()
    found = measure(steps_of(engine, engine.repeated()), 5, engine.device)
    assert (found.method, found.note) == ("borders", "no timeline: CUPTI told of no kernel")
    assert found.operators


def test_the_command(folder: Path, tmp_path: Path) -> None:
    limits = ["--context", "32,64", "--new", "4", "--rounds", "2", "--dtype", "bfloat16", "--device", "cuda"]
    assert main(["profile", str(folder), *limits, "--out", str(tmp_path / "profile.json")]) == 0
    found = json.loads((tmp_path / "profile.json").read_text())
    ours = [phase for phase in found["phases"] if phase["engine"] == "diptych"]
    assert [phase["captured"] for phase in ours] == [True, True] * 2
    assert {phase["method"] for phase in found["phases"]} == {"timeline"}, [p["note"] for p in found["phases"]]
    for phase in ours:
        assert phase["shares"]["attention"] > 0
        assert phase["shares"]["linear"] > 0
    for run in found["generations"]:
        for name in ("model", "cache"):
            assert run["sizes"][name]["predicted"] == run["sizes"][name]["measured"], (run["engine"], name)
