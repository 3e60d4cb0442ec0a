"""Every family against transformers: logits and greedy tokens, through chunks, a paged cache and batched decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.families import FAMILIES, Tiny, make_tiny
from tests.support.paged import Driver

_PROMPTS = [list(range(3, 40)), [5, 9, 13, 17, 21], [90, 2, 60, 41, 7, 7, 7, 30, 55, 3, 12], [44]]
_COUNT = 24


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@torch.inference_mode()
def _logits(model: Any, prompt: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([prompt])).logits[0]
    return found


def _check(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """At most 4 times the error of transformers' own float32, and a rounding of the largest value for a lucky one."""
    allowed = 4 * (theirs.double() - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    error = (ours.double() - exact).abs().max()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("chunk", [None, 5, 16])
@pytest.mark.parametrize("scattered", [False, True])
def test_logits(tiny: Tiny, chunk: int | None, scattered: bool) -> None:
    prompt = _PROMPTS[0]
    ours = Driver(tiny.ours, block_size=4, scattered=scattered).logits(prompt, chunk)
    _check(ours, _logits(tiny.theirs, prompt), _logits(tiny.exact, prompt))


def test_decode_in_a_batch(tiny: Tiny) -> None:
    """The logits of every generated position, four sequences at once, against one full pass over the finished text."""
    driver = Driver(tiny.ours, block_size=4, scattered=True)
    for prompt, rows in zip(_PROMPTS, driver.greedy_logits(_PROMPTS, _COUNT, chunk=6), strict=True):
        tokens = [int(row.argmax()) for row in rows]
        text, first = prompt + tokens[:-1], len(prompt) - 1
        exact = _logits(tiny.exact, text)[first:]
        _check(torch.stack(rows), _logits(tiny.theirs, text)[first:], exact)
        best = exact.topk(2).values
        sure = (best[:, 0] - best[:, 1]) > 1e-3
        assert [t for t, s in zip(tokens, sure, strict=True) if s] == exact.argmax(-1)[sure].tolist()
        assert sure.sum() >= 0.9 * _COUNT


def test_alone_or_together_bitwise(tiny: Tiny) -> None:
    together = Driver(tiny.ours, block_size=4).greedy_logits(_PROMPTS, 6)
    for prompt, rows in zip(_PROMPTS, together, strict=True):
        (alone,) = Driver(tiny.ours, block_size=4).greedy_logits([prompt], 6)
        assert all(torch.equal(a, b) for a, b in zip(alone, rows, strict=True))


@pytest.mark.parametrize("top_k", [2, 4])
def test_topk_probabilities_with_and_without_normalisation(top_k: int, tmp_path: Path) -> None:
    """Case M1, as it was reported: the same model with the flag false and true."""
    from transformers import Qwen3MoeConfig

    prompt, found = [1, 5, 9, 13, 17, 21], {}
    for normalise in (False, True):
        config = Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=top_k,
            max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.5, norm_topk_prob=normalise,
        )  # fmt: skip
        model = _plain(config, tmp_path / str(normalise))
        driver = Driver(model.ours)
        found[normalise] = driver.logits(prompt)
        assert (found[normalise] - _logits(model.theirs, prompt)).abs().max() < 1e-4
        one_by_one = driver.logits(prompt, chunk=1)
        assert (one_by_one - _logits(model.theirs, prompt)).abs().max() < 1e-4
        if top_k == 2:
            tail = [63, 51, 38, 62] if normalise else [63, 51, 10, 59]
            assert driver.greedy([prompt], 8) == [[38, 15, 18, 10, *tail]]
    difference = (found[False] - found[True]).abs().max()
    assert difference < 1e-4 if top_k == 4 else abs(difference - 1.27) < 0.01


def _plain(config: Any, folder: Path) -> Tiny:
    """As transformers draws it with seed 0: norms stay ones."""
    import transformers

    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    from diptych.workers.model.config import ModelConfig
    from diptych.workers.model.decoder import Decoder
    from diptych.workers.model.loader import load

    read = ModelConfig.from_folder(folder)
    theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(folder).eval()
    return Tiny(folder, Decoder(read, load(folder, read, torch.float32)), theirs, theirs)
