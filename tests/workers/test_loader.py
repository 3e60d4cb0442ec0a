"""Loading weights: sharded and single files, and every way in which a checkpoint can be wrong (case L1)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych.contract.errors import ModelUnsupported
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import dtype_of, load
from tests.support.families import Tiny, make_tiny
from tests.support.paged import Driver

_PROMPT = list(range(3, 30))
_INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama2", tmp_path_factory.mktemp("single"))


@pytest.fixture
def sharded(tiny: Tiny, tmp_path: Path) -> Path:
    """The same model in two or more shards, free to be damaged."""
    tiny.theirs.save_pretrained(tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("model-0000*.safetensors"))) >= 2
    return tmp_path


def _load(folder: Path) -> dict[str, Tensor]:
    return load(folder, ModelConfig.from_folder(folder), torch.float32)


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / _INDEX).read_text())
    edit(index["weight_map"])
    (folder / _INDEX).write_text(json.dumps(index))


def _rewrite(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def _last_shard(folder: Path) -> Path:
    return max(folder.glob("model-0000*.safetensors"))


def test_shards_are_the_single_file(tiny: Tiny, sharded: Path) -> None:
    single, several = _load(tiny.folder), _load(sharded)
    assert single.keys() == several.keys()
    for name, tensor in single.items():
        assert torch.equal(tensor, several[name])
        assert not tensor.isnan().any()


def test_progress_ends_at_the_whole(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(
        sharded,
        ModelConfig.from_folder(sharded),
        torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in sharded.glob("*.safetensors"))


def test_a_missing_shard(sharded: Path) -> None:
    gone = _last_shard(sharded)
    gone.unlink()
    with pytest.raises(ModelUnsupported, match=gone.name):
        _load(sharded)


@pytest.mark.parametrize("share", [0.5, 0.001, 0.0])
def test_a_shard_cut_short(sharded: Path, share: float) -> None:
    cut = _last_shard(sharded)
    cut.write_bytes(cut.read_bytes()[: int(cut.stat().st_size * share)])
    with pytest.raises(ModelUnsupported, match=cut.name):
        _load(sharded)


def test_a_tensor_that_the_index_places_and_the_shard_lacks(sharded: Path) -> None:
    path = _last_shard(sharded)
    name = min(load_file(path))
    _rewrite(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelUnsupported, match=name):
        _load(sharded)


def test_a_tensor_that_nobody_places(sharded: Path) -> None:
    path = _last_shard(sharded)
    name = min(load_file(path))
    _rewrite(path, lambda tensors: tensors.pop(name))
    _edit_index(sharded, lambda weights: weights.pop(name))
    with pytest.raises(ModelUnsupported, match=name):
        _load(sharded)


def test_an_index_that_names_what_no_layer_uses(sharded: Path) -> None:
    _edit_index(sharded, lambda weights: weights.update({"model.layers.9.extra": _last_shard(sharded).name}))
    with pytest.raises(ModelUnsupported, match=r"model\.layers\.9\.extra"):
        _load(sharded)


def test_an_index_that_leaves_its_folder(sharded: Path) -> None:
    _edit_index(sharded, lambda weights: weights.update({"model.norm.weight": "../elsewhere.safetensors"}))
    with pytest.raises(ModelUnsupported, match="elsewhere"):
        _load(sharded)


@pytest.fixture
def single(tiny: Tiny, tmp_path: Path) -> Path:
    shutil.copytree(tiny.folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_surplus_shape_and_kind(single: Path) -> None:
    path, kept = single / "model.safetensors", (single / "model.safetensors").read_bytes()
    changes: list[tuple[str, Tensor]] = [
        ("model.layers.0.self_attn.extra.weight", torch.zeros(3)),
        ("model.norm.weight", torch.zeros(7)),
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(80, 48, dtype=torch.int8)),
        ("model.layers.1.mlp.down_proj.weight", torch.zeros(48, 80).to(torch.float8_e4m3fn)),
    ]
    for name, tensor in changes:
        _rewrite(path, lambda tensors, name=name, tensor=tensor: tensors.update({name: tensor}))  # type: ignore[misc]
        with pytest.raises(ModelUnsupported, match=name):
            _load(single)
        path.write_bytes(kept)


def test_no_weights_at_all(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match="safetensors"):
        _load(single)


def test_tied_head_may_be_repeated_but_not_differ(tmp_path: Path) -> None:
    tiny = make_tiny("llama2, tied", tmp_path)
    path = tmp_path / "model.safetensors"
    expected = Driver(tiny.ours).logits(_PROMPT)
    _rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    config = ModelConfig.from_folder(tmp_path)
    assert torch.equal(Driver(Decoder(config, _load(tmp_path))).logits(_PROMPT), expected)
    _rewrite(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ModelUnsupported, match=r"lm_head\.weight"):
        _load(tmp_path)


def test_merged_experts_are_read_as_well(tmp_path: Path) -> None:
    """Checkpoints that transformers' own module wrote hold all experts of a layer in one tensor."""
    tiny = make_tiny("mixtral", tmp_path)
    expected = Driver(tiny.ours).logits(_PROMPT)
    merged = {name: tensor.contiguous() for name, tensor in tiny.theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in merged)
    save_file(merged, tmp_path / "model.safetensors")
    config = ModelConfig.from_folder(tmp_path)
    assert torch.equal(Driver(Decoder(config, _load(tmp_path))).logits(_PROMPT), expected)


def test_dummy_weights(tiny: Tiny, tmp_path: Path) -> None:
    config = ModelConfig.from_folder(tiny.folder)
    first, second = (load(tmp_path, config, torch.float32, load_format="dummy") for _ in range(2))
    assert {name: tensor.shape for name, tensor in first.items()} == {n: t.shape for n, t in _load(tiny.folder).items()}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert Driver(Decoder(config, first)).logits(_PROMPT).isfinite().all()


def test_bfloat16_checkpoint_and_dtypes(single: Path) -> None:
    _rewrite(single / "model.safetensors", lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    config = ModelConfig.from_folder(single)
    for dtype in (torch.float32, torch.bfloat16):
        decoder = Decoder(config, load(single, config, dtype))
        logits = Driver(decoder).logits(_PROMPT)
        assert decoder.dtype == dtype
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()
    assert dtype_of("auto", config, "cpu") == torch.float32
    assert dtype_of("auto", config, "cuda") == torch.float32  # the configuration's own
    with pytest.raises(ModelUnsupported, match="int7"):
        dtype_of("int7", config, "cpu")
