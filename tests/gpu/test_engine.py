"""The engine on a GPU gives the CPU reference's tokens in fp32: captured or not, alone and batched; and, in its
batch-invariant mode, its own tokens in bf16, whatever runs beside a request."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from diptych.contract.request import Sampling
from diptych.workers.cache import KVCache, KVLayout
from diptych.workers.device_runner import DeviceRunner, ladder
from diptych.workers.model.calibration import Calibration, save
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.sampler import Sampler
from tests.support.engine import GREEDY, Harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEEDED = Sampling(temperature=0.9, seed=7, top_k=40, top_p=0.95)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped queries whose greedy margins are wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.2, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def requests() -> list[tuple[str, tuple[int, ...], int, Sampling]]:
    draw = random.Random(3)
    kinds = [GREEDY, GREEDY, SEEDED, PENALISED]
    found = []
    for n in range(10):
        prompt = tuple(draw.randrange(1, 512) for _ in range(draw.randrange(3, 150)))
        found.append((f"r{n}", prompt, draw.randrange(1, 40), kinds[n % 4]))
    return found


def run(folder: Path, together: bool, **settings: object) -> dict[str, list[int]]:
    return drive(Harness(folder, **({"dtype": "float32", "cache_blocks": 160} | settings)), together)


def drive(harness: Harness, together: bool) -> dict[str, list[int]]:
    for name, prompt, tokens, sampling in requests():
        harness.ask(name, prompt, tokens, sampling, salt="" if together else name)
        if not together:
            harness.run()
    harness.run()
    return dict(harness.loop.tokens)


def preempted(harness: Harness) -> bool:
    return any(stage.name == "decode.preempted" for ended in harness.loop.ended.values() for stage in ended.stages)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> dict[str, list[int]]:
    return run(tiny, together=False)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("together", [False, True])
def test_the_gpu_gives_the_tokens_of_the_cpu(
    tiny: Path, reference: dict[str, list[int]], graphs: bool, together: bool
) -> None:
    assert run(tiny, together, device="cuda", graphs=graphs) == reference


def test_preemption_on_a_gpu(tiny: Path, reference: dict[str, list[int]]) -> None:
    harness = Harness(tiny, dtype="float32", device="cuda", cache_blocks=22, prefix_cache=False)
    for name, prompt, tokens, sampling in requests():
        harness.ask(name, prompt, tokens, sampling)
    harness.run()
    assert harness.loop.tokens == reference
    assert preempted(harness)


@pytest.fixture(scope="module")
def invariant(tiny: Path) -> dict[str, list[int]]:
    return run(tiny, False, dtype="bfloat16", device="cuda", batch_invariant=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"graphs": False},
        {"token_budget": 40},
        {"prefix_cache": False, "cache_blocks": 22},
        {"max_batch": 3, "token_budget": 17},
    ],
    ids=["together", "eagerly", "in chunks", "preempted", "in small batches"],
)
def test_batch_invariance_in_bf16(tiny: Path, invariant: dict[str, list[int]], settings: dict[str, object]) -> None:
    """Bitwise: drawn tokens and greedy ones are those of each request alone."""
    given = {"dtype": "bfloat16", "device": "cuda", "batch_invariant": True, "cache_blocks": 160} | settings
    harness = Harness(tiny, **given)
    assert drive(harness, True) == invariant
    assert preempted(harness) is (given["cache_blocks"] == 22)


@pytest.mark.parametrize(("phi", "all_again"), [(0.0, False), (500.0, True)])
def test_a_unified_maximum_gives_the_same_tokens(
    tiny: Path, reference: dict[str, list[int]], phi: float, all_again: bool
) -> None:
    save(Calibration(phi, 60.0, 60.0, 1.0, (0.0, 0.0), ()), tiny)
    harness = Harness(tiny, dtype="float32", device="cuda", cache_blocks=160, softmax="unified")
    assert drive(harness, True) == reference
    again, rows = harness.engine.runner.softmax_counts.tolist()
    assert rows > 0
    assert again == rows if all_again else again < rows


def test_captured_sizes_share_the_memory_of_their_logits() -> None:
    """And their capture is told from the first to the last."""
    vocab, most = 1 << 17, 64
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
            "num_attention_heads": 4, "vocab_size": vocab, "max_position_embeddings": 256,
        }
    )  # fmt: skip
    decoder = Decoder(config, load("", config, torch.bfloat16, "cuda", "dummy"))
    cache = KVCache.of(KVLayout(1, 4, 16, 64, "bfloat16"), 5, "cuda")
    told: list[tuple[int, int]] = []
    before = torch.cuda.memory_allocated()
    runner = DeviceRunner(
        decoder, cache, Sampler(vocab, "cuda"), most, 256, progress=lambda done, total: told.append((done, total))
    )
    kept = torch.cuda.memory_allocated() - before
    sizes = ladder(most)
    assert [graph.logits.shape for graph in runner._graphs] == [(size, vocab) for size in sizes]
    assert kept < sum(sizes) * vocab * 4 // 2
    assert told == [(done, len(sizes)) for done in range(len(sizes) + 1)]


def test_where_the_default_mode_differs_in_bf16_the_margin_was_small(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone and batched, the default mode may draw other tokens where kernels round otherwise: only between tokens
    whose logits in float32 are closer than four roundings of the largest one to bf16, and rarely."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    alone, together = (run(tiny, how, dtype="bfloat16", device="cuda") for how in (False, True))
    greedy = [(name, prompt) for name, prompt, _, sampling in requests() if sampling is GREEDY]
    margins = []
    for name, prompt in greedy:
        pairs = enumerate(zip(alone[name], together[name], strict=True))
        at = next((index for index, (one, other) in pairs if one != other), None)
        if at is None:
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *alone[name][:at]]])).logits[0, -1]
        bound = 4 * 2.0**-8 * float(logits.abs().max())
        margin = abs(float(logits[alone[name][at]] - logits[together[name][at]]))
        margins.append(margin)
        assert margin <= bound, (name, at, margin, bound)
    with capsys.disabled():
        print(f"\n{len(margins)} of {len(greedy)} greedy requests differ, margins {margins}")
    assert len(margins) < len(greedy)
