"""Whatever stands in a model's JSON files: a configuration that can be used, or one sentence of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.cluster.preflight import check_context, check_layout, check_model
from diptych.contract.errors import ConfigInvalid, ModelUnsupported
from diptych.router.facts import model_facts
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.family import FAMILIES
from diptych.workers.model.parameters import parameters
from diptych.workers.model.rope import frequencies
from diptych.workers.settings import WorkerSettings

BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 1e4},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -1, 0, 2]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _base(name: str) -> dict[str, Any]:
    switch = {"use_sliding_window": True} if FAMILIES[name].window in ("switch", "layers") else {}
    return BASE | switch | {"architectures": [name]}


class _Watched(dict[str, Any]):
    """Notes the keys that a reader asks for, also those that it finds absent."""

    def __init__(self, content: dict[str, Any], asked: set[str]) -> None:
        super().__init__(content)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def _read_keys() -> tuple[list[str], list[str]]:
    """The keys that are read of config.json, and of the rotary embedding's object in it, over all families."""
    outer, inner = set[str](), set[str]()
    for name, family in FAMILIES.items():
        for rope in ROPES:
            if rope.get("rope_type", "default") in family.rope_types:
                raw = _base(name) | {"rope_parameters": _Watched(rope, inner)}
                ModelConfig.from_dict(_Watched(raw, outer))
    return sorted(outer), sorted(inner)


OUTER, INNER = _read_keys()


def test_the_keys_are_found() -> None:
    assert {"decoder_sparse_step", "sliding_window", "architectures", "layer_types", "rope_scaling"} <= set(OUTER)
    assert {"factor", "high_freq_factor", "partial_rotary_factor", "type"} <= set(INNER)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json that would work, but for a value or two of the keys that are read."""
    rope = dict(draw(st.sampled_from(ROPES)))
    rope |= draw(st.dictionaries(st.sampled_from(INNER), JSON, max_size=2))
    raw = _base(draw(st.sampled_from(list(FAMILIES))))
    raw |= {draw(st.sampled_from(["rope_parameters", "rope_scaling"])): rope} if rope else {}
    return raw | draw(st.dictionaries(st.sampled_from(OUTER), JSON, max_size=2))


@settings(max_examples=600, deadline=None)
@given(contents())
def test_any_value_gives_a_configuration_or_one_sentence(raw: dict[str, Any]) -> None:
    try:
        config = ModelConfig.from_dict(raw)
    except ModelUnsupported as error:
        said = str(error)
        assert said.isprintable(), said
        assert said.endswith(".")
        assert len(said) < 400
        return
    assert len(config.windows) == config.layers
    assert all(window is None or window > 0 for window in config.windows)
    if config.head_dim < 1 << 16:
        assert 2 * len(frequencies(config.rope)) == config.rope.dim <= config.head_dim
        assert frequencies(config.rope).isfinite().all()
    if config.layers < 100 and (config.moe is None or config.moe.experts < 200):
        assert all(min(parameter.shape) > 0 for parameter in parameters(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "tokenizer.json").write_text("{}")
    return made


@settings(max_examples=100, deadline=None)
@given(raw=contents(), ends=JSON)
def test_launcher_and_router_refuse_the_same_way(folder: Path, raw: dict[str, Any], ends: Any) -> None:
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    group = WorkerSettings(model=str(folder), role="decode", tensor=2, max_context=64)
    outcomes = []
    for check in (
        lambda: check_model(folder, weights=False),
        lambda: check_context(folder, [group]),
        lambda: check_layout(folder, [group]),
        lambda: model_facts(folder),
    ):
        try:
            check()
            outcomes.append("")
        except ModelUnsupported as error:
            outcomes.append(str(error))
        except ConfigInvalid:
            outcomes.append("")  # a model that works, but not for this group
    assert len(set(outcomes)) == 1, outcomes


@pytest.mark.parametrize("placed", [{"x": []}, {"x": "../a.safetensors"}, {"x": "a\nb"}, {"x": ""}, [], "x", {}])
def test_an_index_that_is_none(folder: Path, placed: Any) -> None:
    (folder / "config.json").write_text(json.dumps(_base("LlamaForCausalLM")))
    (folder / "generation_config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(ModelUnsupported, match=r"model\.safetensors\.index\.json"):
        check_model(folder)


def test_launcher_and_router_read_it_without_torch() -> None:
    code = "import sys, diptych.cluster.preflight, diptych.router.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
