"""Worker groups of several ranks through the whole service: prefill and decode of unequal sizes, a rank's death, bad
layouts. A small random model stands for one whose heads divide (its 2 KV heads on 4 ranks are held twice)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from diptych.cluster.traces import read_spans
from diptych.contract import telemetry as names
from diptych.contract.errors import DiptychError
from diptych.router.client import Client
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.parallel.layout import Grid
from tests.support.asking import LIMIT, asks, fresh, ids, until, until_idle, usual, worker
from tests.support.engine import prompt_of
from tests.support.families import make_tiny
from tests.support.paged import Driver
from tests.support.serving import running, small
from tests.system.test_starts import fails

AT_ONCE = 2.0
PROMPTS = [prompt_of(150, 1), prompt_of(5, 2), prompt_of(64, 3), prompt_of(37, 4)]
COUNT = 12
_SIZES = {
    "vocab_size": 49152,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def _folder(demo_model: Path, folder: Path, family: str) -> Path:
    """A tiny model that speaks the demo model's tokens."""
    make_tiny(family, folder, _SIZES)
    for file in demo_model.iterdir():
        if "token" in file.name or file.name in ("vocab.json", "merges.txt"):
            (folder / file.name).symlink_to(file)
    return folder


def _alone(folder: Path) -> list[list[int]]:
    config = ModelConfig.from_folder(folder)
    driver = Driver(Decoder(config, load(folder, config, torch.float32)))
    return driver.greedy(PROMPTS, COUNT)


@pytest.fixture(scope="module")
def dense(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder = _folder(demo_model, tmp_path_factory.mktemp("dense"), "llama2")
    return folder, _alone(folder)


@pytest.fixture(scope="module")
def mixture(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder = _folder(demo_model, tmp_path_factory.mktemp("mixture"), "qwen3_moe, normalised")
    return folder, _alone(folder)


async def _answers(client: Client) -> list[list[int]]:
    """All prompts at once, nothing of them in any cache."""
    salt = fresh()
    asking = [asks(list(prompt), max_tokens=COUNT, ignore_eos=True, cache_salt=salt) for prompt in PROMPTS]
    found = await asyncio.gather(*(client.generate(request, timeout=LIMIT) for request in asking))
    return [ids(answer) for answer in found]


def _sizes(prefill: Grid, decode: Grid) -> dict[str, int]:
    return {
        "prefill__data": prefill.data,
        "prefill__tensor": prefill.tensor,
        "decode__data": decode.data,
        "decode__tensor": decode.tensor,
    }


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Grid(1, 1), Grid(1, 2)),
        (Grid(1, 1), Grid(2, 1)),
        *(
            pytest.param(Grid(*prefill), Grid(*decode), marks=pytest.mark.slow)
            for prefill, decode in (
                ((1, 4), (1, 2)),
                ((1, 2), (1, 1)),
                ((1, 2), (1, 2)),
                ((1, 1), (1, 4)),
                ((2, 1), (1, 1)),
                ((2, 1), (2, 1)),
                ((1, 2), (2, 1)),
                ((2, 1), (2, 2)),
            )
        ),
    ],
)
async def test_groups_of_unequal_sizes(
    dense: tuple[Path, list[list[int]]], tmp_path: Path, prefill: Grid, decode: Grid
) -> None:
    folder, right = dense
    arguments = small(prefill__token_budget=64, **_sizes(prefill, decode))
    with running(folder, tmp_path, *arguments) as service:
        async with Client(service.address) as client:
            assert await _answers(client) == right
            info = await client.server_info()
            assert [len(each.pids) for each in sorted(info.workers, key=lambda each: each.role)] == [
                decode.ranks + 1,
                prefill.ranks + 1,
            ]
            assert [await _answers(client) for _ in range(2)] == [right, right]
            await until_idle(client)


@pytest.mark.slow
async def test_sampling_penalties_and_logprobs_are_alike_at_every_rank(
    dense: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """A follower that drew another token would end its group."""
    folder, _ = dense
    options = {
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 7,
        "repetition_penalty": 1.2,
        "logprobs": 3,
        "prompt_logprobs": 1,
    }
    request = asks(list(PROMPTS[2]), max_tokens=30, ignore_eos=True, **options)
    found = []
    for tensor in (1, 2):
        arguments = small(colocated__tensor=tensor)
        with running(folder, tmp_path / str(tensor), "--roles", "colocated", *arguments) as service:
            async with Client(service.address) as client:
                found.append(ids(await client.generate(request, timeout=LIMIT)))
                await until_idle(client)
    assert found[0] == found[1]


@pytest.mark.slow
async def test_data_ranks_short_of_blocks(dense: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """Reservations are revoked, sequences preempted and requests cancelled while KV goes from each data rank of prefill
    to each of decode: what is finished is right, and the books of every pool agree."""
    folder, _ = dense
    draw = random.Random(5)
    prompts = [prompt_of(draw.choice((5, 40, 64, 100, 150)), 50 + n) for n in range(10)]
    config = ModelConfig.from_folder(folder)
    right = Driver(Decoder(config, load(folder, config, torch.float32))).greedy(prompts, 40)
    arguments = small(prefill__cache_blocks=24, decode__cache_blocks=16, **_sizes(Grid(2, 1), Grid(2, 1)))
    with running(folder, tmp_path, *arguments) as service:
        async with Client(service.address) as client:
            before = sorted(worker.id for worker in (await client.server_info()).workers)

            async def one(index: int) -> None:
                request = asks(list(prompts[index]), max_tokens=40, ignore_eos=True)
                asking = asyncio.create_task(client.generate(request, timeout=LIMIT))
                if draw.random() < 0.4:
                    await asyncio.sleep(draw.random() * 0.5)
                    asking.cancel()
                    await asyncio.wait([asking])
                else:
                    assert ids(await asking) == right[index]

            for _ in range(3):
                await asyncio.gather(*(one(draw.randrange(len(prompts))) for _ in range(24)))
                await until_idle(client)
            assert sorted(worker.id for worker in (await client.server_info()).workers) == before, "a group ended"
        assert any(span.name == names.DECODE_PREEMPTED for span in read_spans(service.trace))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "spread"),
    [
        (Grid(1, 2), Grid(1, 2), False),
        (Grid(1, 2), Grid(1, 2), True),
        (Grid(1, 1), Grid(2, 2), True),
        (Grid(2, 1), Grid(2, 1), False),
        (Grid(2, 1), Grid(2, 1), True),
    ],
)
async def test_experts(
    mixture: tuple[Path, list[list[int]]], tmp_path: Path, prefill: Grid, decode: Grid, spread: bool
) -> None:
    folder, right = mixture
    spreads = {"prefill__spread_experts": spread and prefill.ranks > 1, "decode__spread_experts": spread}
    arguments = small(**_sizes(prefill, decode), **spreads)
    with running(folder, tmp_path, *arguments) as service:
        async with Client(service.address) as client:
            assert await _answers(client) == right
            await until_idle(client)
            for each in (await client.server_info()).workers:
                counted = spreads[f"{each.role}__spread_experts"]
                assert len(each.expert_tokens) == (8 if counted else 0)
                assert bool(sum(each.expert_tokens)) == counted


@pytest.mark.slow
async def test_smollm2_at_three_ranks_says_what_it_always_says(demo_model: Path, tmp_path: Path) -> None:
    with running(demo_model, tmp_path, *small(prefill__tensor=3, decode__tensor=3)) as service:
        async with Client(service.address) as client:
            await usual(client)
            await until_idle(client)


@pytest.mark.parametrize(
    ("role", "size"),
    [
        pytest.param("prefill", "tensor", marks=pytest.mark.slow),
        ("decode", "tensor"),
        pytest.param("prefill", "data", marks=pytest.mark.slow),
        pytest.param("decode", "data", marks=pytest.mark.slow),
    ],
)
async def test_a_rank_that_dies_ends_its_group_and_nothing_else(
    dense: tuple[Path, list[list[int]]], tmp_path: Path, role: str, size: str
) -> None:
    folder, right = dense
    sizes = {f"prefill__{size}": 2, f"decode__{size}": 2}
    with running(folder, tmp_path, *small(prefill__token_budget=4, **sizes)) as service:
        async with Client(service.address) as client:
            request = asks(list(prompt_of(300, 9)), max_tokens=200, ignore_eos=True)
            asking = asyncio.create_task(client.generate(request, timeout=LIMIT))
            await until(client, lambda info: (found := worker(info, role)) is not None and found.running)
            dead = worker(await client.server_info(), role)
            assert dead is not None
            begun = time.monotonic()
            os.kill(dead.pids[-1], signal.SIGKILL)
            with pytest.raises(DiptychError) as lost:
                await asking
            assert time.monotonic() - begun < AT_ONCE
            assert lost.value.code == {"prefill": "PrefillLost", "decode": "DecodeLost"}[role]
            while any(Path(f"/proc/{pid}").exists() for pid in dead.pids):
                assert time.monotonic() - begun < AT_ONCE, "a process of the group outlived it"
                await asyncio.sleep(0.02)
            await until(client, lambda info: info.ready and dead.id not in {each.id for each in info.workers})
            assert await _answers(client) == right
            await until_idle(client)


def test_layouts_that_do_not_divide_are_refused_with_the_numbers(demo_model: Path, tmp_path: Path) -> None:
    model = ("--model", str(demo_model))
    said = fails(tmp_path, *model, "--set", "decode.tensor=2")
    assert said == "decode-0 of 2 ranks cannot divide the model's 9 attention heads."
    said = fails(tmp_path, *model, "--set", "decode.data=2", "--set", "decode.tensor=2")
    assert said == "Each data rank of decode-0 of 2 ranks cannot divide the model's 9 attention heads."
    said = fails(tmp_path, *model, "--set", "prefill.spread_experts=true")
    assert said == "prefill-0 is to spread experts over its ranks, but the model has none."
