"""How tokens are drawn, through the whole service: cases S1, S2, S3 and what goes with them."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest

from diptych.router.client import Client
from diptych.v1 import inference_pb2 as pb
from tests.support.asking import LIMIT, PARIS, USUAL, asks, both, fresh, ids, refused, usual
from tests.support.serving import Running, running, small

STORY = "Once upon a time"
DOWN_TO_NOTHING = [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-45]


# ── S1 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def seeded(**options: Any) -> pb.GenerateRequest:
    return asks(STORY, **{"seed": 42, "temperature": 0.8, "max_tokens": 16} | options)


async def neighbour(client: Client, number: int, draw: random.Random) -> None:
    """Another length, perhaps greedy, perhaps later."""
    await asyncio.sleep(draw.random() * 0.2)
    request = asks(STORY + " there was" * number, temperature=draw.choice([0.0, 1.0]), max_tokens=4 + 3 * number)
    await client.generate(request, timeout=LIMIT)


async def beside(client: Client, count: int, draw: random.Random) -> list[int]:
    """R's ids while `count` requests without a seed come and go."""
    others = [asyncio.create_task(neighbour(client, number, draw)) for number in range(count)]
    await asyncio.sleep(draw.random() * 0.2)
    answer = await client.generate(seeded(cache_salt=fresh()), timeout=LIMIT)
    await asyncio.gather(*others)
    return ids(answer)


async def test_a_seed_does_not_depend_on_the_neighbours(client: Client, colocated: Running) -> None:
    draw = random.Random(1)
    alone = ids(await client.generate(seeded(), timeout=LIMIT))
    assert len(alone) == 16

    async def drawn_beside(service: Client, counts: tuple[int, ...]) -> None:
        assert ids(await both(service, seeded())) == alone
        for count in counts:
            assert await beside(service, count, draw) == alone

    async with Client(colocated.address) as other:  # another process, that prefills in other chunks
        await asyncio.gather(drawn_beside(client, (1, 2, 4, 7)), drawn_beside(other, (4,)))


async def test_chunks_of_another_size_draw_the_same(client: Client, colocated: Running) -> None:
    request = asks(f"{STORY}, {PARIS} Paris. " * 8 + STORY, seed=7, temperature=0.8, max_tokens=12)
    async with Client(colocated.address) as other:
        here, there = await asyncio.gather(both(client, request), both(other, request))
    assert ids(here) == ids(there)


async def test_without_a_seed_two_differ(client: Client) -> None:
    unseeded = asks(STORY, temperature=0.8, max_tokens=8)
    drawn = await asyncio.gather(*(client.generate(unseeded, timeout=LIMIT) for _ in range(6)))
    assert len({tuple(ids(each)) for each in drawn}) > 1


@pytest.mark.slow
async def test_a_seed_survives_a_restart_and_many_neighbours(client: Client, demo_model: Path, tmp_path: Path) -> None:
    alone = ids(await client.generate(seeded(), timeout=LIMIT))
    draw = random.Random(2)
    for _ in range(8):
        for count in (1, 2, 4, 7):
            assert await beside(client, count, draw) == alone
    with running(
        demo_model, tmp_path, *small(prefill__token_budget=3, decode__token_budget=3, decode__max_batch=2)
    ) as again:
        async with Client(again.address) as other:
            assert ids(await both(other, seeded())) == alone


# ── S2 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_tiny_temperature_is_greedy(either: Client) -> None:
    requests = [asks(temperature=temperature, max_tokens=7, logprobs=2) for temperature in DOWN_TO_NOTHING]
    for answer in await asyncio.gather(*(both(either, request) for request in requests)):
        assert ids(answer) == [7042, 30, 198, 198, 504, 2988, 314]
        told = [each.logprob for each in answer.choices[0].logprobs]
        assert len(told) == 7
        assert all(map(math.isfinite, told))
        assert all(math.isfinite(top.logprob) for each in answer.choices[0].logprobs for top in each.top)


@pytest.mark.parametrize("temperature", [-1, math.nan, math.inf, 1e308])
async def test_an_absurd_temperature_is_refused_by_name(client: Client, temperature: float) -> None:
    usual_beside = asyncio.create_task(usual(client))
    for method in ("Generate", "GenerateStream"):
        refusal = await refused(client, asks(temperature=temperature, max_tokens=7), method)
        assert (refusal.status.name, refusal.code) == ("INVALID_ARGUMENT", "InvalidRequest")
        assert "temperature" in refusal.details
    await usual_beside


# ── S3 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("token", "bias"), [(49_152, 5), (-1, 5), (7042, 1000), (7042, math.nan), (2**40, 1)])
async def test_a_bias_outside_the_vocabulary_is_refused_by_name(client: Client, token: int, bias: float) -> None:
    """Keys that are no numbers and values that are none cannot be written in this protocol."""
    usual_beside = asyncio.create_task(usual(client))
    for method in ("Generate", "GenerateStream"):
        refusal = await refused(client, asks(logit_bias={token: bias}, max_tokens=7), method)
        assert (refusal.status.name, refusal.code) == ("INVALID_ARGUMENT", "InvalidRequest")
        assert f"logit_bias[{token}]" in refusal.details
    await usual_beside


async def test_a_bias_moves_the_first_token_too(either: Client) -> None:
    usual_beside = asyncio.create_task(usual(either))
    unmoved, moved = await asyncio.gather(
        both(either, asks(logit_bias={49_151: -100}, max_tokens=9)),
        both(either, asks(logit_bias={7042: -100}, max_tokens=3, logprobs=0)),
    )
    assert unmoved.choices[0].text == USUAL
    assert ids(moved)[0] == 260
    assert abs(moved.choices[0].logprobs[0].logprob - -2.7407) < 2e-3, "the model's own, before the bias"
    await usual_beside


# ── the rest of sampling, apart and together ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.7},
        {"top_k": 5, "min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"min_tokens": 10, "stop_token_ids": [28, 30]},
    ],
)
async def test_both_kinds_of_workers_draw_alike(client: Client, colocated: Running, options: dict[str, Any]) -> None:
    request = seeded(**options)
    async with Client(colocated.address) as other:
        here, there = await asyncio.gather(both(client, request), both(other, request))
    assert ids(here) == ids(there)


async def test_a_penalty_counts_the_token_of_prefill(either: Client) -> None:
    """` \\n` would come twice in a row; a frequency penalty must know of the one before it, whoever drew that."""
    answer = await both(either, asks(max_tokens=4, repetition_penalty=10.0))
    assert len(set(ids(answer))) == 4
    assert not set(ids(answer)[1:]) & {7042}
