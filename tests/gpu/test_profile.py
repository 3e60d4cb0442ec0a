"""`diptych profile` on a real GPU: graphs, borders in them, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.cli import main
from diptych.profile.borders import graph_border, stream_border
from diptych.profile.ours import Ours
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


def test_the_command(folder: Path, tmp_path: Path) -> None:
    limits = ["--context", "32,64", "--new", "4", "--rounds", "2", "--dtype", "bfloat16", "--device", "cuda"]
    assert main(["profile", str(folder), *limits, "--out", str(tmp_path / "profile.json")]) == 0
    found = json.loads((tmp_path / "profile.json").read_text())
    ours = [phase for phase in found["phases"] if phase["engine"] == "diptych"]
    assert [phase["captured"] for phase in ours] == [False, True] * 2
    for phase in ours:
        assert phase["shares"]["attention"] > 0
        assert phase["shares"]["linear"] > 0
    for run in found["generations"]:
        for name in ("model", "cache"):
            assert run["sizes"][name]["predicted"] == run["sizes"][name]["measured"], (run["engine"], name)
