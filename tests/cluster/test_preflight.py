"""What cannot work is refused before anything starts, in one sentence that names it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diptych.cluster import ports
from diptych.cluster.config import validate
from diptych.cluster.ports import PortLease
from diptych.cluster.preflight import check_context, check_model, check_unified_maximum, model_folder
from diptych.contract.errors import ConfigInvalid, ModelUnsupported


@pytest.fixture
def folder(tmp_path: Path, demo_model: Path) -> Path:
    """The demo model's folder, its files linked, so that a test may break one."""
    made = tmp_path / "model"
    shutil.copytree(demo_model, made, copy_function=lambda source, target: Path(target).symlink_to(source))
    return made


def broken(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def cut(path: Path) -> None:
    whole = path.resolve()
    with whole.open("rb") as file:
        broken(path, file.read(whole.stat().st_size // 1000))


def other_architecture(path: Path) -> None:
    broken(path, json.dumps(json.loads(path.read_text()) | {"architectures": ["GPT2LMHeadModel"]}).encode())


def test_a_unified_maximum_must_be_calibrated(tmp_path: Path) -> None:
    on_gpu = {"device": "cuda"}
    config = validate({"model": "m", "engine": {"softmax": "unified"}, "prefill": on_gpu, "decode": on_gpu})
    groups = [group.settings for group in config.groups()]
    with pytest.raises(ConfigInvalid, match="diptych calibrate"):
        check_unified_maximum(tmp_path, groups)
    (tmp_path / "unified_maximum.json").write_text("{}")
    check_unified_maximum(tmp_path, groups)


def test_a_context_beyond_the_models_positions_is_refused(folder: Path) -> None:
    """SmolLM2 accepts 8,192."""
    for asked, words in ((8192, ""), (0, ""), (8193, "engine.max_context is 8193, and the model in .* accepts 8192")):
        config = validate({"model": str(folder), "engine": {"max_context": asked}})
        groups = [group.settings for group in config.groups()]
        if not words:
            check_context(folder, groups)
            assert groups[0].context(8192) == 8192
            continue
        with pytest.raises(ConfigInvalid, match=words):
            check_context(folder, groups)
        with pytest.raises(ConfigInvalid, match=words):
            groups[0].context(8192)
    left_out = json.loads((folder / "config.json").read_text())
    del left_out["max_position_embeddings"]
    broken(folder / "config.json", json.dumps(left_out).encode())
    with pytest.raises(ConfigInvalid, match="accepts 2048"):  # what such a family accepts if its model says nothing
        check_context(folder, groups)


def test_a_whole_model_passes(folder: Path) -> None:
    assert model_folder(str(folder)) == folder.resolve()
    check_model(folder)


@pytest.mark.parametrize(
    ("file", "breaking", "word"),
    [
        ("config.json", lambda path: path.unlink(), "missing"),
        ("config.json", lambda path: broken(path, b"{"), "cannot be read"),
        ("config.json", lambda path: broken(path, b"[]"), "JSON object"),
        ("config.json", other_architecture, "GPT2LMHeadModel"),
        ("tokenizer.json", lambda path: path.unlink(), "missing"),
        ("tokenizer.json", cut, "cannot be read"),
        ("model.safetensors", lambda path: path.unlink(), "neither"),
        ("model.safetensors", cut, "cut short"),
        ("model.safetensors", lambda path: broken(path, b"\xff" * 64), "header"),
        ("model.safetensors", lambda path: broken(path, (8).to_bytes(8, "little") + b"not json"), "header"),
        ("model.safetensors", lambda path: broken(path, b""), "cut short"),
    ],
)
def test_a_file_that_is_missing_or_broken_is_named(
    folder: Path, file: str, breaking: Callable[[Path], None], word: str
) -> None:
    breaking(folder / file)
    with pytest.raises(ModelUnsupported) as caught:
        check_model(folder)
    assert file in str(caught.value)
    assert word in str(caught.value)


def test_a_shard_that_the_index_names_must_be_there(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-2-of-2.safetensors"}}))
    with pytest.raises(ModelUnsupported, match=r"model-2-of-2\.safetensors"):
        check_model(folder)


@pytest.mark.parametrize("name", ["", "./nowhere", "/no/such/folder", "nobody/has-this-model"])
def test_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        model_folder(name)
    assert name in str(caught.value)


def test_a_port_in_use_is_named_also_when_it_is_shared() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigInvalid, match=f"Port {port}.*in use"):
            PortLease.take("127.0.0.1", port)


def test_a_port_belongs_to_one_service() -> None:
    lease = PortLease.take("127.0.0.1", 0)
    with pytest.raises(ConfigInvalid, match="another Diptych service"):
        PortLease.take("127.0.0.1", lease.port)
    lease.release()
    PortLease.take("127.0.0.1", lease.port).release()


def test_a_lease_leaves_no_file_and_two_never_hold_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lease = PortLease.take("127.0.0.1", 0)
    assert len(list(tmp_path.iterdir())) == 1
    lease.release()
    lease.release()
    assert not list(tmp_path.iterdir())
    path, holders, most = tmp_path / "lock", list[int](), list[int]()

    def hold(_: int) -> bool:
        try:
            file = ports._locked(path)
        except BlockingIOError:
            return False
        holders.append(file)
        most.append(len(holders))
        time.sleep(0.0001)  # others come
        holders.remove(file)
        path.unlink()
        os.close(file)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(hold, range(2000))) > 1
    assert max(most) == 1


def test_a_held_port_is_no_obstacle_to_routers_that_share_it() -> None:
    lease = PortLease.take("127.0.0.1", 0)
    with socket.socket() as router:
        router.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        router.bind(("127.0.0.1", lease.port))
        router.listen()
        with socket.create_connection(("127.0.0.1", lease.port), timeout=5):
            router.accept()[0].close()
    lease.release()
