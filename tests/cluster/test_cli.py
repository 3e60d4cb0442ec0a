"""The command line as a person meets it: exit codes, and one sentence for each mistake."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from diptych.cli import main


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) <= 2, lines  # "Starting …" may come first
    assert lines[-1].startswith("diptych: ")
    return lines[-1]


def test_a_missing_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such" in fails(capsys, "serve", "--model", "/no/such", "--ray", "none")
    assert "--model" in fails(capsys, "serve")


def test_a_mistake_in_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("modle: x\n")
    assert "'modle'" in fails(capsys, "serve", "--config", str(tmp_path / "c.yaml"))
    assert "decode.blocks" in fails(capsys, "serve", "--set", "decode.blocks=4")
    assert "service.port" in fails(capsys, "serve", "--port", "99999")
    assert "decode.count" in fails(capsys, "serve", "--decode", "-2")


def test_a_role_without_workers(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    assert "prefill.count" in fails(capsys, "serve", "--model", str(demo_model), "--prefill", "0", "--ray", "none")


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert port in fails(capsys, "serve", "--model", str(demo_model), "--port", port, "--ray", "none")


def test_a_ray_cluster_that_is_not_there(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    said = fails(capsys, "serve", "--model", str(demo_model), "--port", "0", "--ray", "127.0.0.1:1")
    assert "127.0.0.1:1" in said
    assert "--ray local" in said


def test_a_trace_file_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be read" in fails(capsys, "trace", "show", str(tmp_path / "none"))


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["serve", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert "diptych 0" in capsys.readouterr().out
