"""Which products `diptych tune` sweeps for a model and a group."""

from __future__ import annotations

import pytest

from diptych.bench.shapes import SHAPES
from diptych.contract.errors import ConfigInvalid
from diptych.tuning import rank_shapes
from diptych.workers.model.config import ModelConfig


def test_a_rank_of_a_dense_model() -> None:
    config = ModelConfig.from_dict(SHAPES["Llama-3-8B"])
    whole, layer = rank_shapes(config, 1)
    assert whole == (
        (4096, 6144, "norm"), (4096, 4096, "plain"), (4096, 128256, "norm"), (4096, 28672, "norm_gate"),
        (14336, 4096, "plain"),
    )  # fmt: skip
    assert layer is not None
    assert set(layer.products) == set(whole) - {(4096, 128256, "norm")}
    halves, _ = rank_shapes(config, 2)
    assert halves == (
        (4096, 3072, "norm"), (2048, 4096, "plain"), (4096, 64128, "norm"), (4096, 14336, "norm_gate"),
        (7168, 4096, "plain"),
    )  # fmt: skip


def test_more_ranks_than_kv_heads_keep_one_each() -> None:
    shapes, _ = rank_shapes(ModelConfig.from_dict(SHAPES["Llama-3-8B"]), 16)
    assert shapes[0] == (4096, (2 + 2) * 128, "norm")


def test_experts_are_not_products_of_one_weight() -> None:
    shapes, layer = rank_shapes(ModelConfig.from_dict(SHAPES["Mixtral-8x7B"]), 2)
    assert len(shapes) == 3
    assert layer is None


def test_ranks_that_do_not_divide_are_refused() -> None:
    for ranks in (0, 3):
        with pytest.raises(ConfigInvalid, match=str(ranks)):
            rank_shapes(ModelConfig.from_dict(SHAPES["Llama-3-8B"]), ranks)
