"""Groups that only say `cuda` do not all land on the first GPU."""

from __future__ import annotations

import pytest

from diptych.cluster.config import validate
from diptych.cluster.devices import VISIBLE, count, lent_device, spread
from diptych.contract.errors import ConfigInvalid


def devices(gpus: int, **prefill: object) -> list[str]:
    tree = {"model": "m", "prefill": {"count": 2, "device": "cuda"} | prefill, "decode": {"device": "cuda"}}
    if prefill.get("device") == "cpu":  # what both sides must then share
        tree["engine"] = {"dtype": "float32", "transport": "gloo"}
    return [group.settings.device for group in spread(validate(tree).groups(), gpus)]


def test_groups_take_turns_on_the_gpus() -> None:
    assert devices(2) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices(1) == ["cuda:0", "cuda:0", "cuda:0"]
    assert devices(8, device="cuda:5") == ["cuda:5", "cuda:5", "cuda:0"]
    assert devices(8, device="cpu") == ["cpu", "cpu", "cuda:0"]
    assert devices(0) == ["cuda", "cuda", "cuda"]


def test_a_group_takes_a_gpu_for_each_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert devices(8, data=2, tensor=2) == ["cuda:0", "cuda:4", "cuda:0"]
    with pytest.raises(ConfigInvalid, match=r"prefill-0 of 2 × 2 = 4 ranks needs 4 GPUs, and this machine has 3\."):
        devices(3, data=2, tensor=2)
    with pytest.raises(ConfigInvalid, match=r"prefill-0 of 2 ranks needs 2 GPUs, and this machine has 1\."):
        devices(1, tensor=2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert devices(1, data=2) == ["cuda:0", "cuda:0", "cuda:0"]


def test_a_lent_gpu_is_taken_by_its_index_among_the_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    assert lent_device("cuda", [3]) == "cuda:3"
    assert lent_device("cuda", [3, 2]) == "cuda:2"
    with pytest.raises(ConfigInvalid, match=r"the GPUs 0, 2, 3,"):
        lent_device("cuda", [3, 0, 2])
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
