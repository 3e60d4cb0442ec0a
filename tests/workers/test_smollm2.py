"""A real model: SmolLM2 in float32 gives the tokens and log-probabilities of transformers, alone and in any company."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.contract.request import Sampling, Stopping
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.model.rope import rope_tables
from diptych.workers.sampler import Sampler, SampleRow, prompt_logprobs
from tests.support.paged import Driver, Row

_PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little girl named",
    "Q: What is the boiling point of water in degrees Celsius?\nA:",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Photosynthesis is the process by which",
    "The three most important things to remember when learning to swim are:\n1.",
    "In 1969, the first human beings walked on the Moon. The mission was called Apollo 11, and its crew consisted of",
]
_USUAL = [504, 3575, 282, 4649, 314]
_ONCE = [6403, 1980, 253, 655]
_COUNT = 64


@pytest.fixture(scope="module")
def ours(demo_model: Path) -> Decoder:
    config = ModelConfig.from_folder(demo_model)
    return Decoder(config, load(demo_model, config, torch.float32))


@pytest.fixture(scope="module")
def theirs(demo_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


@torch.inference_mode()
def _their_logits(model: Any, text: Sequence[int]) -> Tensor:
    found: Tensor = model(torch.tensor([list(text)])).logits[0]
    return found


@pytest.mark.timeout(300)  # 8 s of computing, but of both cores
@pytest.mark.parametrize("alone", [2, pytest.param(len(_PROMPTS), marks=pytest.mark.slow)])
def test_the_same_64_tokens_alone_and_together(ours: Decoder, theirs: Any, tokenizer: Any, alone: int) -> None:
    """All together, and the first `alone` by themselves too (the next test compares bits, of fewer tokens). One full
    pass of transformers over prompt and our tokens says at each position what its own greedy decoding would have taken
    there. Where its two best are nearer than twice the largest error between us, either is right."""
    prompts = [tokenizer(text)["input_ids"] for text in _PROMPTS]
    together = Driver(ours, num_blocks=128, scattered=True).greedy_logits(prompts, _COUNT, chunk=16)
    excused = 0
    for number, (prompt, rows) in enumerate(zip(prompts, together, strict=True)):
        tokens = [int(row.argmax()) for row in rows]
        if number < alone:
            assert Driver(ours, num_blocks=16).greedy([prompt], _COUNT) == [tokens]
        reference = _their_logits(theirs, prompt + tokens[:-1])[len(prompt) - 1 :]
        best = reference.topk(2).values
        bound = 2 * (torch.stack(rows) - reference).abs().max()
        assert bound < 0.01
        wrong = reference.argmax(-1) != torch.tensor(tokens)
        assert not (wrong & (best[:, 0] - best[:, 1] > bound)).any()
        excused += int(wrong.sum())
    assert excused <= 0.01 * _COUNT * len(prompts)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """However many cores this process has: bits must not depend on where the work is split."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_logits_bitwise_alone_or_together(ours: Decoder) -> None:
    prompts = [_USUAL, _ONCE, list(range(100, 180)), [1]]
    together = Driver(ours).greedy_logits(prompts, 4)
    for prompt, rows in zip(prompts, together, strict=True):
        (alone,) = Driver(ours).greedy_logits([prompt], 4)
        assert all(torch.equal(a, b) for a, b in zip(alone, rows, strict=True))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("chunk", [1, 7, 61, 333])
def test_decode_bitwise_beside_a_prompt(ours: Decoder, chunk: int) -> None:
    """A chunk of another's prompt in the same step makes every tensor larger and splits work over threads elsewhere."""
    driver = Driver(ours)
    prompt, blocks, others = list(range(300, 380)), driver.blocks_for(81), driver.blocks_for(chunk)
    driver.prefill(prompt, blocks)
    row: Row = ([5], 80, blocks)
    alone = driver.run([row])[0]
    assert torch.equal(driver.run([row, (range(1000, 1000 + chunk), 0, others)])[0], alone)
    assert torch.equal(driver.run([(range(1000, 1000 + chunk), 0, others), row])[-1], alone)


def test_usual_text_and_its_logprobs(ours: Decoder) -> None:
    """The ground values of the usual prompt: ids, log-probabilities of the answer, of the prompt, and alternatives."""
    driver = Driver(ours)
    assert driver.greedy([_USUAL], 9) == [[7042, 30, 198, 198, 504, 2988, 314, 42, 216]]
    (rows,) = driver.greedy_logits([_USUAL], 4)
    row = SampleRow(Sampling(temperature=0), Stopping(max_tokens=4), 0, logprobs=3)
    found = Sampler(49_152).sample(torch.stack(rows), [row] * 4)
    assert [token for token, _ in found] == [7042, 30, 198, 198]
    entries = [entry for _, entry in found if entry is not None]
    assert [entry.logprob for entry in entries] == pytest.approx([-0.2581, -0.3801, -1.0093, -0.8793], abs=0.002)
    assert [value for _, value in entries[0].top] == pytest.approx([-0.2581, -2.7407, -4.3844], abs=0.002)
    prompt = prompt_logprobs(driver.logits(_USUAL)[:-1], _USUAL[1:], 0)
    assert [entry.logprob for entry in prompt] == pytest.approx([-11.5393, -0.3376, -2.4387, -0.4509], abs=0.002)


def test_bias_against_the_first_token(ours: Decoder) -> None:
    row = SampleRow(Sampling(temperature=0, logit_bias=((7042, -100.0),)), Stopping(max_tokens=1), 0)
    assert Sampler(49_152).sample(Driver(ours).logits(_USUAL)[-1:], [row]) == [(260, None)]


def _generate(
    ours: Decoder, others: Sequence[tuple[int, Sampling]], late: int, chunk: int | None, seed: int = 42
) -> list[int]:
    """Sixteen seeded tokens of one request among others: (prompt length, sampling) each, the last of which join after
    `late` steps."""
    driver, sampler = Driver(ours, scattered=True), Sampler(49_152)
    texts = [list(_ONCE), *([(31 * i + n) % 49_152 for i in range(n)] for n, _ in others)]
    asked = [Sampling(temperature=0.8, seed=seed), *(sampling for _, sampling in others)]
    lengths, blocks = [len(text) for text in texts], [driver.blocks_for(len(text) + 20) for text in texts]
    stopping = Stopping(max_tokens=16)
    joined = 1 if late else len(texts)
    for text, own in zip(texts, blocks, strict=True):  # all but the last token, so that all draws happen in the batch
        if len(text) > 1:
            driver.prefill(text[:-1], own, chunk)
    for step in range(16):
        joined = len(texts) if step >= late else joined
        rows: list[Row] = [(texts[i][-1:], len(texts[i]) - 1, blocks[i]) for i in range(joined)]
        drawn = [SampleRow(asked[i], stopping, len(texts[i]) - lengths[i]) for i in range(joined)]
        logits = ours.logits(driver.run(rows))
        for i, (token, _) in enumerate(sampler.sample(logits, drawn)):
            texts[i].append(token)
    return texts[0][len(_ONCE) :]


def test_a_seed_among_neighbours(ours: Decoder) -> None:
    """Case S1 without a service around it, on the first layers: what is drawn for whom does not depend on the depth."""
    ours = copy.copy(ours)
    ours.layers = ours.layers[:4]
    alone = _generate(ours, [], 0, None)
    greedy, free = Sampling(temperature=0), Sampling(temperature=1.0, top_p=0.9, seed=7)
    for count, late, chunk in ((1, 0, None), (2, 5, 2), (4, 0, 8), (7, 3, None), (7, 0, 3)):
        others = [(3 + 9 * i, greedy if i % 2 else free) for i in range(count)]
        assert _generate(ours, others, late, chunk) == alone
    assert _generate(ours, [], 0, None, seed=43) != alone


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 100000.0, "rope_scaling": None}, 39228),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}, 39228),
        ({"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}, 39228),
        ({}, None),
    ],
)
def test_rotary_base(ours: Decoder, demo_model: Path, keys: dict[str, Any], expected: int | None) -> None:
    """Case L2 (a) to (d) on the real weights."""
    tokens = Driver(_respelled(ours, demo_model, keys)).greedy([_ONCE], 12)[0]
    if expected is None:
        assert tokens[7] == 32562
    else:
        assert tokens == [28, 260, 2240, 282, 23324, 27108, 436, 253, 15114, 39228, 28, 351]


def test_linear_rope_in_both_spellings(ours: Decoder, theirs: Any, demo_model: Path) -> None:
    """Case L2 (e), (f)."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    keys = [{"rope_theta": 1e5, "rope_scaling": {name: "linear", "factor": 2.0}} for name in ("type", "rope_type")]
    first, second = (Driver(_respelled(ours, demo_model, k)).greedy_logits([_ONCE], 12)[0] for k in keys)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    changed = copy.deepcopy(theirs.config)
    changed.rope_parameters = {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}
    kept, theirs.model.rotary_emb = theirs.model.rotary_emb, LlamaRotaryEmbedding(changed)
    try:
        tokens = [int(row.argmax()) for row in first]
        reference = _their_logits(theirs, _ONCE + tokens[:-1])[len(_ONCE) - 1 :]
    finally:
        theirs.model.rotary_emb = kept
    assert (torch.stack(first) - reference).abs().max() < 0.01
    assert reference.argmax(-1).tolist() == tokens


def _respelled(ours: Decoder, folder: Path, keys: dict[str, Any]) -> Decoder:
    """The same weights under a config.json whose rotary keys are these."""
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if not key.startswith("rope_")} | keys
    changed = copy.copy(ours)
    changed.rope = rope_tables(ModelConfig.from_dict(raw).rope, 256)
    return changed


def test_a_chat_template_came_along(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert ids.count(2) == 2
