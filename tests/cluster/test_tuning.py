"""`diptych calibrate` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from diptych.cli import main
from diptych.workers.model.calibration import read

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, shallow_model: Path) -> Path:
    """The demo model's first layers as a folder of our own, which says that it was saved in float16."""
    made = tmp_path / "model"
    made.mkdir()
    for file in shallow_model.iterdir():
        (made / file.name).symlink_to(file)
    change(made / "config.json", torch_dtype="float16", dtype=None)
    return made


def change(file: Path, **keys: Any) -> None:
    content = json.loads(file.read_text()) | keys
    file.unlink()
    file.write_text(json.dumps(content))


def calibrate(folder: Path, text: str, *more: str) -> int:
    prompts = folder.parent / "prompts.txt"
    prompts.write_text(text)
    return main(["calibrate", "--model", str(folder), "--prompts", str(prompts), *more])


def test_a_cpu_finds_the_window_of_the_models_own_dtype(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(folder, "The capital of France is Paris.\n\nWater boils at 100 degrees.\n") == 0
    said, found = capsys.readouterr(), read(folder)
    assert found.high == 10.0  # float16's
    assert "100.0000% of the rows are inside" in said.out
    assert "Warning" not in said.err


def test_a_window_that_holds_few_rows_is_kept_with_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["model.layers.0.self_attn.q_proj.weight"] *= 20
    (folder / WEIGHTS).unlink()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    assert calibrate(folder, "The capital of France is Paris.\n") == 0
    said, found = capsys.readouterr(), read(folder)
    assert 0.5 < found.rows_inside < 0.99
    assert f"only {found.rows_inside:.2%} of the rows are inside" in said.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Paris.\n\n" + "word " * 9000, "prompts.txt:3: this prompt has 9001 tokens, and the model accepts 8192"),
        ("Paris.\n~~\n", "prompts.txt:2: this prompt has no token"),
        ("\n \n", "holds no prompt"),
    ],
    ids=["too long", "without a token", "none"],
)
def test_a_prompt_that_cannot_be_run_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    change(folder / "tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": "~"}, "content": ""})
    assert calibrate(folder, text) == 2
    assert words in refusal(capsys)
    assert not (folder / "unified_maximum.json").exists()


def test_a_tokenizer_beyond_the_models_vocabulary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "config.json", vocab_size=100)
    assert calibrate(folder, "Paris.") == 2
    assert "the model's vocabulary ends at 99" in refusal(capsys)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta"])
def test_a_device_that_is_none(folder: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert calibrate(folder, "Paris.", "--device", device) == 2
    assert f"--device {device}" in refusal(capsys).replace("takes cpu, cuda or cuda:N, not ", "").replace("'", "")


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err.strip()
    assert said.startswith("diptych: ")
    assert "\n" not in said
    return said
