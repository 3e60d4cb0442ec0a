"""`diptych bench engine` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.cli import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.families import make_tiny

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("mixtral", folder)
    return folder


def test_the_engine_alone(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--cache-bytes", "4000000", "--out", str(tmp_path)]
    assert main(["bench", "engine", str(tiny), "--rows", "2x16x6", "--rounds", "1", *out]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = line["rows"][0]
    assert (row["batch"], row["prompt"], row["new"]) == (2, 16, 6)
    assert row["floor_ms"] > 0
    assert row["prefill_tokens_s"] > 0
    assert (tmp_path / "bench-engine.json").exists()


def test_rows_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "Llama-3-8B", "--rows", "1x2"]) == 2
    assert "'1x2'" in capsys.readouterr().err
    assert main(["bench", "engine", "/no/such"]) == 2
