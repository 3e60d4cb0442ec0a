"""One schema for file and flags: precedence, and one clear sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.cluster.config import Config, EngineConfig, GroupConfig, load_config, validate
from diptych.contract.errors import ConfigInvalid
from diptych.serving import at_nodes
from diptych.workers.settings import WorkerSettings


def test_defaults_make_one_worker_of_each_role() -> None:
    groups = validate({"model": "m"}).groups()
    assert [group.name for group in groups] == ["prefill-0", "decode-0"]
    assert {group.settings.role for group in groups} == {"prefill", "decode"}
    assert all(group.resources == {"CPU": 1.0} for group in groups)


def test_file_then_flags_then_sets(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("model: a\nservice: {port: 1}\ndecode: {count: 2, cache_blocks: 7}\nlimits: {progress: 3}\n")
    config = load_config(file, {"service.port": 2, "model": None}, ["decode.count=3", "prefill.threads=1"])
    assert (config.model, config.service.port, config.decode.count) == ("a", 2, 3)
    assert config.limits.progress == 3
    decode = [group.settings for group in config.groups() if group.settings.role == "decode"]
    assert [settings.name for settings in decode] == ["decode-0", "decode-1", "decode-2"]
    assert decode[0].cache_blocks == 7
    assert decode[0].limits.progress == 3
    assert config.cpus() == 1 + 3 + 1


def test_colocated_replaces_both_roles() -> None:
    config = validate({"model": "m", "roles": "colocated", "colocated": {"count": 2}, "engine": {"block_size": 32}})
    assert [group.name for group in config.groups()] == ["colocated-0", "colocated-1"]
    assert {group.settings.block_size for group in config.groups()} == {32}


def test_blocks_are_longer_where_a_group_is_on_a_gpu() -> None:
    gpu = {"decode": {"device": "cuda"}, "engine": {"dtype": "float32", "transport": "gloo"}}
    for tree, size in (({}, 16), (gpu, 64), ({"engine": {"block_size": 8}}, 8)):
        assert {group.settings.block_size for group in validate({"model": "m", **tree}).groups()} == {size}


@pytest.mark.parametrize(
    ("engine", "group", "words"),
    [
        ({"batch_invariant": True}, {}, "engine.batch_invariant.*prefill-0 is on device cpu"),
        ({"softmax": "unified"}, {}, "engine.softmax = unified.*prefill-0 is on device cpu"),
        ({"batch_invariant": True}, {"device": "cuda", "tensor": 2}, "one rank a group.*prefill-0 has"),
        ({"transport": "gloo"}, {"device": "cuda", "tensor": 2}, "transport = gloo.*of prefill-0.*NCCL"),
        ({"batch_invariant": True, "softmax": "unified"}, {"device": "cuda"}, "unset one"),
    ],
)
def test_a_mode_that_cannot_be_is_refused(engine: dict[str, object], group: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        validate({"model": "m", "engine": engine, "prefill": group, "decode": group}).groups()


def test_a_gpu_group_books_its_gpus() -> None:
    for own, gpus in (({"gpus": 2}, 2.0), ({"data": 2, "tensor": 4}, 8.0)):
        config = validate({"model": "m", "prefill": {"device": "cuda"}, "decode": {"device": "cuda"} | own})
        assert config.groups()[1].resources == {"CPU": 1.0, "GPU": gpus}, "one bundle of one placement group"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"modle": "m"}, ["modle"]),
        ({"decode": {"blocks": 3}}, ["decode.blocks"]),
        ({"decode": {"count": -1}}, ["decode.count", "-1"]),
        ({"service": {"port": 70000}}, ["service.port", "70000"]),
        ({"service": {"port": "http"}}, ["service.port", "http"]),
        ({"roles": "both"}, ["roles", "both"]),
        ({"limits": {"leese": 1}}, ["limits", "leese"]),
        ({"limits": {"lease": "soon"}}, ["limits", "lease"]),
        ({"limits": {"heartbeat": 20}}, ["limits.heartbeat", "limits.lease"]),
        ({"limits": {"progress": 0}}, ["limits.progress"]),
    ],
)
def test_a_mistake_is_named(tree: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        validate(tree)
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence


def test_a_missing_role_is_named() -> None:
    with pytest.raises(ConfigInvalid, match=r"decode\.count"):
        validate({"model": "m", "decode": {"count": 0}}).groups()


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"decode": {"token_budget": 64}}, r"decode\.token_budget \(64\).*decode\.max_batch \(64\)"),
        ({"roles": "colocated", "colocated": {"token_budget": 3, "max_batch": 4}}, r"\(3\).*\(4\)"),
        ({"decode": {"device": "cuda", "tensor": 4, "gpus": 2}}, r"decode\.gpus is 2, but decode is to run 4 ranks"),
        ({"engine": {"transport": "nccl"}}, r"nccl.*prefill\.device is cpu"),
        ({"decode": {"device": "cuda:1"}}, r"prefill\.device is cpu and decode\.device is cuda.*engine\.dtype"),
        (
            {"decode": {"device": "cuda"}, "engine": {"dtype": "float32"}},
            r"prefill\.device is cpu and decode\.device is cuda.*engine\.transport",
        ),
    ],
)
def test_what_a_group_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, tree: dict[str, object], words: str
) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(ConfigInvalid, match=words):
        validate({"model": "m"} | tree).groups()


def test_a_prefill_worker_may_take_small_steps() -> None:
    assert validate({"model": "m", "prefill": {"token_budget": 3}}).groups()[0].settings.token_budget == 3


@pytest.mark.parametrize("text", ["- a list", "a: [", "just words"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigInvalid, match=r"bad\.yaml"):
        load_config(file)


def test_missing_file_and_malformed_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigInvalid, match="KEY=VALUE"):
        load_config(sets=["decode.count"])
    with pytest.raises(ConfigInvalid, match="model is not a section"):
        load_config(flags={"model": "m"}, sets=["model.x=1"])


def test_every_setting_of_a_worker_can_be_reached_and_has_one_default() -> None:
    """Each stands in exactly one section, with the worker's own default; the rest is composed."""
    composed = {"model", "role", "name", "service", "limits"}
    own, shared = set(GroupConfig.model_fields), set(EngineConfig.model_fields)
    assert not own & shared
    assert (own | shared) - {"count", "cpus", "gpus"} == set(WorkerSettings.__struct_fields__) - composed
    default = WorkerSettings(model="m", role="prefill")
    (made, _) = (group.settings for group in validate({"model": "m"}).groups())
    assert all(getattr(made, name) == getattr(default, name) for name in own | shared if hasattr(default, name))


def test_in_a_joined_cluster_groups_take_their_nodes_address_unless_told() -> None:
    hosts = {
        given: {group.settings.host for group in at_nodes(validate({"model": "m", "engine": engine})).groups()}
        for given, engine in {"default": {}, "set": {"host": "127.0.0.1"}}.items()
    }
    assert hosts == {"default": {""}, "set": {"127.0.0.1"}}


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().model = "other"  # type: ignore[misc]
