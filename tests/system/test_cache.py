"""The prefix cache and the queue, through the whole service: cases K1 and K2."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.router.client import Client
from tests.support.asking import (
    LENGTH,
    LIMIT,
    asks,
    both,
    fresh,
    ids,
    near,
    pieces_of,
    refused,
    until_idle,
)
from tests.support.serving import Running, running, small

WHOLE = [
    *(504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 330, 3444, 282, 253, 7557, 4158, 5634, 351, 253),
    *(2244, 1833, 30, 2018, 338, 1074, 269, 1191, 314, 441, 4231, 30, 36363, 3287, 35343, 670, 1924, 28, 284),
    *(2180, 2022, 3468, 30, 1550, 281, 7268, 28, 536, 347, 260, 12990, 536, 30, 378, 1584, 5615, 28035, 260),
    *(18421, 28, 564, 260, 1796, 9444, 4364),
]
NEXT = [260, 18421, 30, 378, 808, 288, 2801, 28, 260, 1596, 288, 3134]


# ── K1 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_whole_prompt_is_in_the_cache(either: Client) -> None:
    assert len(WHOLE) == 64
    salt = fresh()
    for cached in (0, 48, 48):
        answer = await either.generate(asks(WHOLE, max_tokens=12, cache_salt=salt), timeout=LIMIT)
        assert (ids(answer), answer.usage.cached_tokens) == (NEXT, cached)
    streamed, shorter, cold = await asyncio.gather(
        pieces_of(either, asks(WHOLE, max_tokens=12, cache_salt=salt)),
        both(either, asks(WHOLE[:63], max_tokens=13, cache_salt=salt)),
        either.generate(asks(WHOLE[:63], max_tokens=13, cache_salt=fresh()), timeout=LIMIT),
    )
    assert [token for piece in streamed for token in piece.token_ids] == NEXT
    assert streamed[-1].usage.cached_tokens == 48
    assert ids(shorter) == ids(cold)
    await until_idle(either)


async def test_prompt_logprobs_of_a_cached_prompt(either: Client) -> None:
    salt = fresh()
    request = asks(WHOLE, max_tokens=12, cache_salt=salt, prompt_logprobs=2)
    cold = await either.generate(request, timeout=LIMIT)
    warm = await either.generate(request, timeout=LIMIT)
    assert ids(cold) == ids(warm) == NEXT
    assert len(warm.prompt.logprobs) == 64
    assert [each.HasField("logprob") for each in warm.prompt.logprobs] == [False] + [True] * 63
    assert near(warm.prompt.logprobs, cold.prompt.logprobs)


async def test_two_copies_at_once_on_an_empty_cache(either: Client) -> None:
    salt = fresh()
    two = [either.generate(asks(WHOLE, max_tokens=12, cache_salt=salt), timeout=LIMIT) for _ in range(2)]
    choices = both(either, asks(WHOLE, n=2, max_tokens=12, cache_salt=fresh()))
    assert [ids(answer) for answer in await asyncio.gather(*two, choices)] == [NEXT] * 3
    await until_idle(either)


async def test_salts_keep_caches_apart(client: Client) -> None:
    mine, yours = fresh(), fresh()
    for salt, cached in ((mine, 0), (yours, 0), (mine, 48)):
        answer = await client.generate(asks(WHOLE, max_tokens=2, cache_salt=salt), timeout=LIMIT)
        assert answer.usage.cached_tokens == cached


# ── K2 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=["prefill", "decode"])
def cramped(
    request: pytest.FixtureRequest, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A service whose worker of one role has room for 128 tokens."""
    sizes = {f"{request.param}__cache_blocks": 8, "engine__max_context": 1024}
    with running(shallow_model, tmp_path_factory.mktemp("cramped"), *small(**sizes)) as service:
        yield service


def noise(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(100, 40_000) for _ in range(length)]


async def test_a_request_that_can_never_fit_is_refused_at_once(cramped: Running) -> None:
    async with Client(cramped.address) as client:
        for method in ("Generate", "GenerateStream"):
            refusal = await refused(client, asks(noise(200), max_tokens=10), method)
            assert (refusal.status.name, refusal.code) == ("RESOURCE_EXHAUSTED", "CapacityExceeded")
            assert "128" in refusal.details
            assert "200" in refusal.details or "210" in refusal.details
            assert refusal.seconds < 1
        small_ones = [asks(noise(10 + n), max_tokens=10, ignore_eos=True) for n in range(5)]
        answers = await asyncio.gather(*(client.generate(request, timeout=LIMIT) for request in small_ones))
        assert [len(ids(answer)) for answer in answers] == [10] * 5
        await until_idle(client)


@pytest.mark.parametrize("cramped", ["decode"], indirect=True)  # only decode's sequences grow
async def test_every_size_up_to_the_largest_finishes(cramped: Running) -> None:
    """A grant is for the prompt and one block more: also where that block is the one too many."""
    async with Client(cramped.address) as client:
        before = ids(await client.generate(asks(max_tokens=9), timeout=LIMIT))
        info = await client.model_info()
        assert (info.max_prompt, info.max_context) == (127, 128)
        for prompt, length in ((96, 32), (112, 2), (113, 15), (120, 8), (127, 1)):
            request = asks(noise(prompt), max_tokens=length, ignore_eos=True)
            answer = await client.generate(request, timeout=30)
            assert (len(ids(answer)), answer.choices[0].finish_reason) == (length, LENGTH)
        await until_idle(client)
        assert ids(await client.generate(asks(max_tokens=9), timeout=LIMIT)) == before


async def test_the_largest_finishes_and_one_token_more_is_refused(cramped: Running) -> None:
    async with Client(cramped.address) as client:
        info = await client.model_info()
        rest = info.max_context - info.max_prompt
        answer = await client.generate(asks(noise(info.max_prompt), max_tokens=min(rest, 4)), timeout=30)
        assert answer.usage.completion_tokens == min(rest, 4)
        for prompt, length in ((info.max_prompt + 1, 1), (info.max_prompt, rest + 1), (8, info.max_context - 7)):
            refusal = await refused(client, asks(noise(prompt), max_tokens=length))
            assert refusal.code in ("CapacityExceeded", "InvalidRequest")
            assert refusal.seconds < 1
            assert str(info.max_context) in refusal.details or str(info.max_prompt) in refusal.details
        await until_idle(client)


@pytest.mark.parametrize("cramped", ["decode"], indirect=True)
async def test_a_cache_that_is_full_lets_all_finish(cramped: Running) -> None:
    """Five requests that cannot be held at once: they wait, or are preempted, and answer as they would alone."""
    async with Client(cramped.address) as client:
        before = ids(await client.generate(asks(max_tokens=9), timeout=LIMIT))
        requests = [asks(noise(20 + n), max_tokens=24, ignore_eos=True) for n in range(5)]
        together = await asyncio.gather(*(client.generate(request, timeout=LIMIT) for request in requests))
        for request, answer in list(zip(requests, together, strict=True))[::4]:
            assert ids(await client.generate(request, timeout=LIMIT)) == ids(answer)
        await until_idle(client)
        assert ids(await client.generate(asks(max_tokens=9), timeout=LIMIT)) == before
