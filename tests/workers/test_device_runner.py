"""What surrounds captured steps and runs without a GPU: the sizes to capture, and the step that measures workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.workers.cache import KVLayout
from diptych.workers.device_runner import ladder, rehearse
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.sampler import Sampler
from diptych.workers.settings import WorkerSettings

VOCAB, HIDDEN = 300, 64


@pytest.mark.parametrize("most", [1, 2, 3, 64, 100, 256, 257, 300, 320, 512, 513, 1000, 1024, 4096])
def test_no_batch_is_padded_much(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(17, most + 1):
        padded = next(size for size in sizes if size >= rows) - rows
        assert padded < rows / (3 if rows > 64 else 2), (rows, padded)


def test_the_ladder_goes_on_in_steps() -> None:
    assert ladder(64)[-3:] == [32, 48, 64]
    assert ladder(1024)[-9:] == [256, 320, 384, 448, 512, 640, 768, 896, 1024]


class _Largest(TorchDispatchMode):
    """Notes the most rows of every width that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dim() == 2:
            rows, width = made.shape
            self.rows[width] = max(self.rows.get(width, 0), rows)
        return made


@pytest.mark.parametrize(("budget", "batch"), [(48, 8), (8, 48), (40, 40)])
def test_the_rehearsal_has_the_rows_of_the_largest_step(budget: int, batch: int) -> None:
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 32,
        }
    )  # fmt: skip
    decoder = Decoder(config, load("", config, torch.float32, "cpu", "dummy"))
    tokens: list[int] = []
    decoder.observe = lambda index, qkv: tokens.append(qkv.shape[0])
    layout = KVLayout(config.layers, config.kv_heads, config.head_dim, 16, "float32")
    settings = WorkerSettings(model="", role="decode", max_batch=batch, token_budget=budget)
    with _Largest() as largest:
        rehearse(decoder, Sampler(VOCAB), layout, settings, 32)
    assert tokens == [max(budget, batch)] * config.layers
    assert largest.rows[VOCAB] == batch
