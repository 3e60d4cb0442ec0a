"""Every family at several ranks against one: logits, greedy tokens, what is loaded, what travels."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.model.config import ModelConfig
from diptych.workers.model.loader import load
from diptych.workers.model.parameters import cut, parameters
from diptych.workers.parallel.group import Group
from diptych.workers.parallel.layout import ExpertTable, Grid, Shard
from tests.support.families import FAMILIES, Tiny, make_tiny
from tests.support.paged import Driver
from tests.support.ranks import decoder_of, grid_decoder_of, run_ranks, shard_of

_PROMPTS = [list(range(3, 26)), [5, 9, 13, 17, 21], [44]]
_COUNT = 4
_DIVISIBLE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 95}
_CASES = [
    (name, spread) for name in FAMILIES for spread in ((False, True) if "mix" in name or "moe" in name else (False,))
]


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    """8 query heads on 2 KV heads and 95 words: 4 ranks are more than KV heads, and no rank count divides the words."""
    made = {}
    for name, (_, keys) in FAMILIES.items():
        own = _DIVISIBLE if "head_dim" not in keys else {**_DIVISIBLE, "head_dim": keys["head_dim"]}
        made[name] = make_tiny(name, tmp_path_factory.mktemp("tiny"), own)
    return made


def _run(group: Group, cases: list[tuple[str, Path, bool]]) -> list[tuple[Tensor, list[list[Tensor]]]]:
    found = []
    for _, folder, spread in cases:
        decoder = decoder_of(group, folder, spread)
        logits = Driver(decoder, block_size=4, scattered=True).logits(_PROMPTS[0], chunk=8)
        found.append((logits, Driver(decoder, block_size=4).greedy_logits(_PROMPTS, _COUNT)))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parity(tinies: dict[str, Tiny], size: int) -> None:
    """Each rank's logits are the same bits; their error is at most 4 times that of transformers in float32."""
    cases = [(name, tinies[name].folder, spread) for name, spread in _CASES]
    ranks = run_ranks(size, _run, cases)
    for index, (name, _, spread) in enumerate(cases):
        tiny, (logits, greedy) = tinies[name], ranks[0][index]
        for other in ranks[1:]:
            assert torch.equal(other[index][0], logits), (name, spread)
            assert all(
                torch.equal(a, b)
                for x, y in zip(other[index][1], greedy, strict=True)
                for a, b in zip(x, y, strict=True)
            )
        exact, theirs = _of(tiny.exact, _PROMPTS[0]), _of(tiny.theirs, _PROMPTS[0])
        allowed = 4 * (theirs.double() - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
        assert (logits.double() - exact).abs().max() <= allowed, (name, spread)
        for rows, own in zip(greedy, Driver(tiny.ours, block_size=4).greedy(_PROMPTS, _COUNT), strict=True):
            assert [int(row.argmax()) for row in rows] == own, (name, spread)


@torch.inference_mode()
def _of(model: Any, prompt: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([prompt])).logits[0]
    return found


def _smollm2(group: Group, folder: Path) -> list[list[int]]:
    return Driver(decoder_of(group, folder)).greedy([[504, 3575, 282, 4649, 314], list(range(400, 450))], 8)


def test_smollm2_at_three_ranks(demo_model: Path) -> None:
    """9 query heads and 3 KV heads."""
    ranks = run_ranks(3, _smollm2, demo_model)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0][0][:3] == [7042, 30, 198]


def _anonymous() -> int:
    """Bytes of memory that are this process's own (pages of the mapped checkpoint are the system's cache)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def _load_measured(group: Group, folder: Path) -> tuple[int, int]:
    config = ModelConfig.from_folder(folder)
    shard = shard_of(group, config, False)
    torch.full((1 << 20,), 1.0).sum()
    peak = before = _anonymous()
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(2e-4):
            peak = max(peak, _anonymous())

    watch = threading.Thread(target=look)
    watch.start()
    weights = load(folder, config, torch.float32, shard=shard)
    done.set()
    watch.join()
    return peak - before, sum(tensor.nbytes for tensor in weights.values())


def test_a_rank_reads_only_its_share(demo_model: Path) -> None:
    """SmolLM2 at three ranks: memory while loading is at most the share and a tenth, and the shares make the model."""
    config = ModelConfig.from_folder(demo_model)
    whole = sum(torch.Size(parameter.shape).numel() * 4 for parameter in parameters(config))
    for peak, share in run_ranks(3, _load_measured, demo_model):
        assert share < whole / 3 * 1.01
        assert peak <= share * 1.1, (peak, share)


def test_shards_cover_the_model(tinies: dict[str, Tiny]) -> None:
    """Put together again, with KV heads that several ranks hold counted once, the shards have every number."""
    for name, spread in _CASES:
        folder = tinies[name].folder
        config = ModelConfig.from_folder(folder)
        whole = load(folder, config, torch.float32)
        seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
        for rank in range(4):
            shard = Shard(rank, 4, ExpertTable.even(config.moe.experts, 4) if spread and config.moe else None)
            part = load(folder, config, torch.float32, shard=shard)
            for parameter in parameters(config):
                for piece in cut(parameter, shard).whole:
                    assert torch.equal(part[parameter.name][piece.region], whole[parameter.name][piece.take])
                    seen[parameter.name][piece.take] = True
        assert all(found.all() for found in seen.values()), name


def _traffic(group: Group, folder: Path) -> int:
    """Bytes that a rank sends in one step, with logits for two rows."""
    decoder = decoder_of(group, folder)
    driver = Driver(decoder, block_size=4)
    group.traffic.bytes = 0
    decoder.logits(driver.prefill(_PROMPTS[0], driver.blocks_for(len(_PROMPTS[0])))[-2:])
    return group.traffic.bytes


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_a_step_follow_the_formula(tinies: dict[str, Tiny], size: int) -> None:
    """One sum of [T, H] for the embedding and two a layer; one gather of the rows' logits."""
    config = ModelConfig.from_folder(tinies["llama2"].folder)
    tokens, rows, width = len(_PROMPTS[0]), 2, -(-config.vocab // size)
    one_sum = 2 * (size - 1) * (tokens * config.hidden * 4) // size
    due = (1 + 2 * config.layers) * one_sum + (size - 1) * rows * width * 4
    assert run_ranks(size, _traffic, tinies["llama2"].folder) == [due] * size


_WORK = [(_PROMPTS[0], _PROMPTS[1]), (_PROMPTS[2], None), (None, _PROMPTS[0])]


def _data_ranks(group: Group, grid: Grid, cases: list[tuple[Path, bool]]) -> list[list[Tensor | None]]:
    """Logits of this data rank's prompts, in chunks of 8; it idles while the others have more chunks."""
    own, _ = grid.place(group.rank)
    found = []
    for folder, spread in cases:
        decoder = grid_decoder_of(group, grid, folder, spread)
        logits: list[Tensor | None] = []
        for prompts in _WORK:
            prompt = prompts[own]
            steps = [-(-len(prompt) // 8) if prompt else 0 for prompt in prompts]
            logits.append(Driver(decoder, block_size=4, scattered=True).logits(prompt, chunk=8) if prompt else None)
            for _ in range(max(steps) - steps[own]):
                decoder.idle()
        found.append(logits)
    return found


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2)])
def test_parity_of_data_ranks(tinies: dict[str, Tiny], grid: Grid) -> None:
    """Prompts of unlike lengths beside each other, and beside nothing; dense, experts sliced, experts spread."""
    names = [("llama2", False), ("mixtral", False), ("mixtral", True), ("qwen3_moe, a dense layer", True)]
    ranks = run_ranks(grid.ranks, _data_ranks, grid, [(tinies[name].folder, spread) for name, spread in names])
    for index, (name, spread) in enumerate(names):
        tiny = tinies[name]
        for turn, prompts in enumerate(_WORK):
            for rank, found in enumerate(ranks):
                prompt, logits = prompts[grid.place(rank)[0]], found[index][turn]
                if prompt is None:
                    assert logits is None
                    continue
                exact, theirs = _of(tiny.exact, prompt), _of(tiny.theirs, prompt)
                allowed = 4 * (theirs.double() - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
                assert (logits.double() - exact).abs().max() <= allowed, (name, spread, rank)
                first = ranks[grid.members(grid.place(rank)[0]).start][index][turn]
                assert torch.equal(logits, first)


def _data_traffic(group: Group, grid: Grid, folder: Path, spread: bool) -> int:
    """Bytes that a rank sends to other data ranks in a step that both have part in."""
    decoder = grid_decoder_of(group, grid, folder, spread)
    driver = Driver(decoder, block_size=4)
    group.traffic.bytes = 0
    decoder.logits(driver.prefill(_PROMPTS[0], driver.blocks_for(len(_PROMPTS[0]))))
    return group.traffic.bytes


def test_replicas_of_a_dense_model_and_sliced_experts_exchange_nothing(tinies: dict[str, Tiny]) -> None:
    for name in ("llama2", "mixtral"):
        assert run_ranks(2, _data_traffic, Grid(2, 1), tinies[name].folder, False) == [0, 0]
