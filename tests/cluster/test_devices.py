"""Groups that only say `cuda` do not all land on the first GPU."""

from __future__ import annotations

import pytest

from diptych.cluster.config import validate
from diptych.cluster.devices import VISIBLE, count, lent_device, spread


def devices(gpus: int, **prefill: object) -> list[str]:
    tree = {"model": "m", "prefill": {"count": 2, "device": "cuda"} | prefill, "decode": {"device": "cuda"}}
    return [group.settings.device for group in spread(validate(tree).groups(), gpus)]


def test_groups_take_turns_on_the_gpus() -> None:
    assert devices(2) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices(1) == ["cuda:0", "cuda:0", "cuda:0"]
    assert devices(8, device="cuda:5") == ["cuda:5", "cuda:5", "cuda:0"]
    assert devices(8, device="cpu") == ["cpu", "cpu", "cuda:0"]
    assert devices(0) == ["cuda", "cuda", "cuda"]


def test_a_lent_gpu_is_taken_by_its_index_among_the_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    assert lent_device("cuda", [3]) == "cuda:3"
    assert lent_device("cuda", [3, 2]) == "cuda:2"
    assert lent_device("cuda", []) == "cuda"
    assert lent_device("cuda:1", [3]) == "cuda:1"
    assert lent_device("cpu", [3]) == "cpu"
    monkeypatch.setenv(VISIBLE, "2,3")
    assert lent_device("cuda", ["3"]) == "cuda:1"


def test_hidden_gpus_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")
    assert count() == 0
    monkeypatch.setenv(VISIBLE, "GPU-a,GPU-b")
    assert count() == 2
