"""The unified maximum found from a model's own scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diptych.contract.errors import ConfigInvalid, ModelUnsupported
from diptych.workers.model.calibration import BINS, WINDOW, calibrate, fullest_window, read, save
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 256, "eos_token_id": 1,
}  # fmt: skip


def test_window_covers_the_rows_and_every_score_is_counted(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(CONFIG)
    decoder = Decoder(config, load("", config, torch.float32, "cpu", "dummy"))
    prompts = [list(range(20)), list(range(50, 90))]
    found = calibrate(decoder, prompts)
    assert sum(found.histogram) == 2 * 4 * sum(n * (n + 1) // 2 for n in map(len, prompts))
    assert len(found.histogram) == BINS
    assert found.rows_inside == 1.0
    assert found.scores[0] - 1e-3 <= found.phi <= found.scores[1] + 1e-3
    with pytest.raises(ConfigInvalid, match="diptych calibrate"):
        read(tmp_path)
    save(found, tmp_path)
    assert read(tmp_path) == found


def test_an_outlier_does_not_move_the_window() -> None:
    maxima = torch.cat((torch.linspace(0, 20, 999), torch.tensor([200.0])))[torch.randperm(1000)]
    assert fullest_window(maxima, 60.0) == (10.0, 0.999)


def test_the_window_is_the_fullest_of_all() -> None:
    torch.manual_seed(0)
    maxima = torch.cat((torch.randn(60) * 8, torch.randn(40) * 2 + 35)).double()
    for reach in (0.0, 1.0, 10.0, 500.0):
        phi, share = fullest_window(maxima, reach)
        starts = maxima.unsqueeze(1)
        fullest = ((maxima >= starts) & (maxima <= starts + 2 * reach)).sum(1).max()
        assert share == fullest / len(maxima)
        assert ((maxima - phi).abs() <= reach + 1e-9).sum() == fullest


def test_the_window_is_that_of_the_served_dtype() -> None:
    config = ModelConfig.from_dict(CONFIG)
    decoder = Decoder(config, load("", config, torch.float32, "cpu", "dummy"))
    found = calibrate(decoder, [list(range(20))], served=torch.float16)
    assert (found.low, found.high) == (WINDOW[torch.float16], WINDOW[torch.float16])
    assert decoder.observe is None
    with pytest.raises(ModelUnsupported, match="float64"):
        calibrate(decoder, [list(range(20))], served=torch.float64)
