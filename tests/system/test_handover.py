"""Prefill and decode apart, as a client sees it: cases D1 and D3, and that KV moves only where it must."""

from __future__ import annotations

import secrets

import pytest

from diptych.contract import telemetry as names
from diptych.router.client import Client
from diptych.v1 import inference_pb2 as pb
from tests.support.asking import LENGTH, LIMIT, PARIS_IDS, USUAL_IDS, asks, both, fresh, ids, near, until_idle
from tests.support.serving import Running

LOGPROBS = [-0.2581, -0.3801, -1.0093, -0.8793]
PROMPT_LOGPROBS = [-11.5393, -0.3376, -2.4387, -0.4509]
BEST = [(" Paris", -0.2581), (" the", -2.7407), (" London", -4.3844)]
WITHIN = 2e-3


async def traced(service: Running, client: Client, request: pb.GenerateRequest) -> set[str]:
    """Answers the request and returns the names of its spans."""
    trace = secrets.token_hex(16)
    await client.generate(request, timeout=LIMIT, traceparent=f"00-{trace}-{secrets.token_hex(8)}-01")
    return {span.name for span in service.spans(trace)}


# ── D1 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"stop": ["zzz"]}, {"logprobs": 1}, {"echo": True}])
async def test_one_token_is_one_token(either: Client, options: dict[str, object]) -> None:
    answer = await both(either, asks(max_tokens=1, **options))
    for choice in answer.choices:
        assert (list(choice.token_ids), choice.text[-6:]) == ([7042], " Paris")
        assert (choice.finish_reason, choice.completion_tokens) == (LENGTH, 1)
    assert answer.usage.completion_tokens == len(answer.choices)


async def test_one_token_comes_in_one_piece(either: Client) -> None:
    pieces = [piece async for piece in either.stream(asks(max_tokens=1), timeout=LIMIT)]
    assert [piece.text for piece in pieces if piece.text] == [" Paris"]
    assert sum(len(piece.token_ids) for piece in pieces) == 1
    assert pieces[-1].finish_reason == LENGTH


async def test_two_tokens_are_two(either: Client) -> None:
    answer = await both(either, asks(max_tokens=2))
    assert (ids(answer), answer.usage.completion_tokens) == ([7042, 30], 2)


async def test_nothing_moves_for_a_request_that_ends_at_its_first_token(apart: Running, client: Client) -> None:
    moved = {names.TRANSFER_SEND, names.TRANSFER_RECEIVE, names.HANDOVER, names.DECODE_STEPS}
    salt = {"cache_salt": fresh()}
    for request in (asks(max_tokens=1, **salt), asks(max_tokens=9, stop_token_ids=[7042], **salt)):
        assert not moved & await traced(apart, client, request)
    assert moved <= await traced(apart, client, asks(max_tokens=2, **salt))
    await until_idle(client)


async def test_what_decode_holds_is_prefilled_there(apart: Running, client: Client) -> None:
    """The second time decode lacks so little that no KV is sent at all; the answer is the same."""
    request = asks([*PARIS_IDS * 8, 30], max_tokens=4, cache_salt=fresh())
    assert names.TRANSFER_RECEIVE in await traced(apart, client, request)
    assert names.TRANSFER_RECEIVE not in await traced(apart, client, request)
    first = await client.generate(request, timeout=LIMIT)
    cold = asks([*PARIS_IDS * 8, 30], max_tokens=4, cache_salt=fresh())
    assert ids(first) == ids(await client.generate(cold, timeout=LIMIT))


# ── D3 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_first_token_has_its_logprob(either: Client) -> None:
    answer = await both(either, asks(max_tokens=4, logprobs=3))
    told = answer.choices[0].logprobs
    assert [each.id for each in told] == ids(answer) == USUAL_IDS[:4]
    assert [each.logprob for each in told] == pytest.approx(LOGPROBS, abs=WITHIN)
    assert all(len(each.top) == 3 for each in told)
    assert [(top.text, pytest.approx(top.logprob, abs=WITHIN)) for top in told[0].top] == BEST


async def test_the_prompts_logprobs(either: Client) -> None:
    answer = await both(either, asks(max_tokens=4, logprobs=3, prompt_logprobs=2, echo=True))
    prompt = answer.prompt.logprobs
    assert [each.id for each in prompt] == PARIS_IDS
    assert not prompt[0].HasField("logprob")
    assert [each.logprob for each in prompt[1:]] == pytest.approx(PROMPT_LOGPROBS, abs=WITHIN)
    assert [each.logprob for each in answer.choices[0].logprobs] == pytest.approx(LOGPROBS, abs=WITHIN)
    once = await both(either, asks(max_tokens=1, prompt_logprobs=2))
    assert near(once.prompt.logprobs, prompt)


async def test_no_alternatives_are_a_choice_of_their_own(client: Client) -> None:
    answer = await both(client, asks(max_tokens=4, logprobs=0))
    assert [len(each.top) for each in answer.choices[0].logprobs] == [0] * 4
    assert (await both(client, asks(max_tokens=4))).choices[0].logprobs == []


async def test_both_kinds_of_workers_tell_the_same_logprobs(client: Client, colocated: Running) -> None:
    request = asks("Once upon a time", max_tokens=12, logprobs=5, prompt_logprobs=5)
    async with Client(colocated.address) as other:
        here, there = await client.generate(request, timeout=LIMIT), await other.generate(request, timeout=LIMIT)
    assert ids(here) == ids(there)
    assert near(here.choices[0].logprobs, there.choices[0].logprobs)
    assert near(here.prompt.logprobs, there.prompt.logprobs)
