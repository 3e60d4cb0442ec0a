"""Starts that cannot succeed, through the command line (and case L1): exit code not 0, one sentence that names what is
wrong, no process left. What cannot be served is never ready first."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.serving import Command, Running, small

LIMIT = 60.0
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def linked(model: Path, folder: Path, but: tuple[str, ...] = ()) -> Path:
    """A folder with the model's files, except those in `but`; none may be written to."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name not in but:
            (folder / file.name).symlink_to(file)
    return folder


def fails(tmp_path: Path, *arguments: str, code: int = 2) -> str:
    """The one sentence of a start that fails."""
    command = Command(tmp_path, "--port", "0", *small(), *arguments)
    try:
        assert command.ended(LIMIT) == code, command.said()
        said = command.said()
        assert "Ready" not in said
        assert "Traceback" not in said
        sentences = re.findall(r"^diptych: (.+)$", said, re.MULTILINE)
        assert len(sentences) == 1, said
        assert sentences[0].endswith("."), said
        assert command.left() == []
    finally:
        command.bury()
    return str(sentences[0])


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "/nowhere/at-all does not exist" in fails(tmp_path, "--model", "/nowhere/at-all")


def test_no_model_at_all(tmp_path: Path) -> None:
    assert "--model" in fails(tmp_path)


def test_a_file_in_place_of_a_folder(tmp_path: Path, demo_model: Path) -> None:
    assert WEIGHTS in fails(tmp_path, "--model", str(demo_model / WEIGHTS))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def holding(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: _write(folder / name, content.encode())


def changed(name: str, **values: object) -> Callable[[Path], None]:
    return lambda folder: _write(folder / name, json.dumps(json.loads((folder / name).read_text()) | values).encode())


def cut(folder: Path) -> None:
    whole = (folder / WEIGHTS).resolve()
    _write(folder / WEIGHTS, whole.read_bytes()[: whole.stat().st_size // 2])


def slow(*values: object) -> object:
    """What only a worker finds, seconds after the start has begun."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _write(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without("config.json"), "config.json is missing"),
        (holding("config.json", "{"), "config.json cannot be read"),
        (without("tokenizer.json"), "tokenizer.json is missing"),
        (without(WEIGHTS), "holds neither model.safetensors nor"),
        (cut, "model.safetensors is damaged or cut short"),
        (holding(WEIGHTS, "not safetensors at all"), "model.safetensors is damaged"),
        (changed("config.json", architectures=["GPT2LMHeadModel"]), "names GPT2LMHeadModel; supported are"),
        (holding("tokenizer.json", "[]"), "tokenizer.json"),
        (changed("config.json", attn_logit_softcapping=30.0), "attn_logit_softcapping"),
        slow(changed("config.json", intermediate_size=1000), "config.json asks for"),
        slow(changed("config.json", num_hidden_layers=29), "which no layer of this model uses"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_that_cannot_be_served(
    demo_model: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    folder = linked(demo_model, tmp_path / "model")
    spoil(folder)
    assert words in fails(tmp_path, "--model", str(folder), "--roles", "colocated")


def test_a_port_in_use(demo_model: Path, tmp_path: Path, apart: Running) -> None:
    """Somebody else's, and another Diptych's, which would share it without a word."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in fails(tmp_path, "--model", str(demo_model), "--port", port)
    port = apart.address.rpartition(":")[2]
    assert port in fails(tmp_path, "--model", str(demo_model), "--port", port)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("decode.threads=0", "decode.threads"),
        ("limits.heartbeat=99", "limits.heartbeat"),
    ],
)
def test_a_wrong_setting(demo_model: Path, tmp_path: Path, setting: str, words: str) -> None:
    assert words in fails(tmp_path, "--model", str(demo_model), "--set", setting)


# ── L1 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def sharded(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in two shards with their index."""
    folder = linked(demo_model, tmp_path_factory.mktemp("sharded") / "model", but=(WEIGHTS,))
    weights = load_file(demo_model / WEIGHTS)
    names = sorted(weights)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    placed = {}
    for number, half in enumerate(halves, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in half}, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(half, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def one_less(folder: Path) -> None:
    weights = load_file(folder / SECOND)
    del weights["model.norm.weight"]
    (folder / SECOND).unlink()
    save_file(weights, folder / SECOND)


def half(folder: Path) -> None:
    whole = (folder / SECOND).resolve()
    _write(folder / SECOND, whole.read_bytes()[: whole.stat().st_size // 2])


def surplus(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.99.mlp.up_proj.weight"] = SECOND
    _write(folder / INDEX, json.dumps(index).encode())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without(SECOND), SECOND),
        (half, SECOND),
        (one_less, "model.norm.weight"),
        slow(surplus, "model.layers.99.mlp.up_proj.weight"),
    ],
    ids=["missing", "cut", "a tensor less", "a tensor more"],
)
def test_a_shard_that_is_not_whole(sharded: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in sharded.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    spoil(folder)
    assert words in fails(tmp_path, "--model", str(folder), "--roles", "colocated")
    shutil.rmtree(folder)
