"""The demo model's folder: found when it is there, made once, and one clear error otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diptych.cluster import demo_model
from diptych.contract.errors import ConfigInvalid


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    return tmp_path


def _convert_fast(source: Path, folder: Path) -> None:
    """Stands for the 15 s of the real conversion, which the session's fixture has run already."""
    assert source.suffix == ".gguf"
    (folder / "config.json").write_text("{}")


def test_made_once(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_convert", _convert_fast)
    made = demo_model.ensure_demo_model()
    assert made == empty / "models" / demo_model.NAME
    monkeypatch.delattr(demo_model, "_convert")
    assert demo_model.ensure_demo_model() == made
    assert [path.name for path in made.parent.iterdir()] == [demo_model.NAME]


def test_two_at_once(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes while this one converts: its folder stays, ours goes."""

    def overtaken(source: Path, folder: Path) -> None:
        _convert_fast(source, folder)
        first = empty / "models" / demo_model.NAME
        first.mkdir()
        (first / "config.json").write_text("theirs")

    monkeypatch.setattr(demo_model, "_convert", overtaken)
    made = demo_model.ensure_demo_model()
    assert (made / "config.json").read_text() == "theirs"
    assert len(list(made.parent.iterdir())) == 1


def test_a_conversion_that_fails_leaves_nothing(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Path, folder: Path) -> None:
        _convert_fast(source, folder)
        raise RuntimeError("disk full")

    monkeypatch.setattr(demo_model, "_convert", fails)
    with pytest.raises(RuntimeError, match="disk full"):
        demo_model.ensure_demo_model()
    assert not list((empty / "models").iterdir())


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigInvalid, match="DIPTYCH_CACHE"):
        demo_model.ensure_demo_model()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigInvalid, match="pip install"):
        demo_model.ensure_demo_model()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", "/one")
    assert demo_model.cache_folder() == Path("/one")
    monkeypatch.delenv("DIPTYCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert demo_model.cache_folder() == Path("/two/diptych")
