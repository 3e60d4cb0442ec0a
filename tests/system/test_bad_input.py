"""What a client may send wrongly: each gets one clear error with the right status and the error's code behind it, at
once, and a request that runs beside it answers as always. No block is lost."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from diptych.router.client import Client, ask
from diptych.v1 import inference_pb2 as pb
from tests.support.asking import PARIS, Refusal, asks, refused, until_idle, usual

MIB = 1 << 20
METHODS = ("Generate", "GenerateStream")

PROMPTS: dict[str, tuple[pb.GenerateRequest, str]] = {
    "none at all": (ask(), "prompt is missing"),
    "empty text": (asks(""), "prompt is empty"),
    "no ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt is empty"),
    "no messages": (pb.GenerateRequest(chat=pb.Chat()), "chat.messages is empty"),
    "longer than the context, as text": (asks("word " * 9000), "context of 8192"),
    "longer than the context, as ids": (asks([504] * 9000), "9000 tokens"),
    "longer than any context": (asks("x" * (3 * MIB)), "context"),
    "with its answer": (asks([504] * 8000, max_tokens=500), "max_tokens is 500"),
    "an id past the vocabulary": (asks([504, 49_152]), "token_ids.ids[1] is 49152"),
    "a negative id": (asks([-1]), "token_ids.ids[0] is -1"),
    "no role": (pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(text="x")])), "chat.messages[0].role"),
    "no content": (pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role=pb.ROLE_USER)])), "content is missing"),
    "both flags": (
        asks(
            None,
            messages=[{"role": "assistant", "content": "x"}],
            continue_final_message=True,
            add_generation_prompt=True,
        ),
        "exclude each other",
    ),
    "a user's message continued": (
        asks(None, messages=[{"role": "user", "content": "x"}], continue_final_message=True),
        "continue_final_message",
    ),
    "tools that are no JSON": (asks(None, messages=[{"role": "user", "content": "x"}], tools_json="{"), "tools_json"),
}

PARAMETERS: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, math.nan, math.inf, 1e300)],
    *[("top_p", value) for value in (0.0, -1.0, 1.1, math.nan)],
    *[("top_k", value) for value in (-1, 2**40)],
    *[("min_p", value) for value in (-0.1, 1.5)],
    *[("seed", value) for value in (-1, -(2**63))],
    *[("repetition_penalty", value) for value in (0.0, -1.0, 11.0)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("frequency_penalty", value) for value in (-2.1, math.inf)],
    *[("max_tokens", value) for value in (0, -5, 2**40)],
    *[("min_tokens", value) for value in (-1, 17)],
    *[("stop", value) for value in ([""], ["x" * 257], [str(n) for n in range(17)])],
    *[("stop_token_ids", value) for value in ([-1], [49_152], list(range(65)))],
    *[("n", value) for value in (0, -1, 17, 2**40)],
    *[("logprobs", value) for value in (-1, 21)],
    *[("prompt_logprobs", value) for value in (-1, 21)],
    *[("logit_bias", value) for value in ({49_152: 1.0}, {5: 101.0}, dict.fromkeys(range(1025), 1.0))],
    *[("model", value) for value in ("another", "")],
    ("cache_salt", "x" * 257),
]


def check(refusal: Refusal, words: str) -> None:
    """The client's fault, in one sentence that names what is wrong."""
    assert (refusal.status.name, refusal.code) == ("INVALID_ARGUMENT", "InvalidRequest"), refusal
    assert words in refusal.details, refusal.details
    assert "\n" not in refusal.details
    assert len(refusal.details) < 500


@pytest.fixture(autouse=True)
async def beside(client: Client) -> Any:
    """A request that runs while others are refused; afterwards nothing is held anywhere."""
    running = asyncio.create_task(usual(client))
    yield
    await running
    await until_idle(client)


async def test_prompts(client: Client) -> None:
    for name, (request, words) in PROMPTS.items():
        for method in METHODS:
            refusal = await refused(client, request, method)
            assert refusal.status.name == "INVALID_ARGUMENT", (name, refusal)
            check(refusal, words)


async def test_parameters(client: Client) -> None:
    for number, (field, value) in enumerate(PARAMETERS):
        options = {"max_tokens": 16} | {field: value}
        check(await refused(client, asks(PARIS, **options), METHODS[number % 2]), field)


async def test_a_prompt_larger_than_every_cache(client: Client) -> None:
    refusal = await refused(client, asks([504] * 5000, max_tokens=8))
    assert (refusal.status.name, refusal.code) == ("RESOURCE_EXHAUSTED", "CapacityExceeded")
    assert "5008" in refusal.details
    assert "4096" in refusal.details


async def test_bytes_that_are_no_request(client: Client) -> None:
    invalid = pb.GenerateRequest(cache_salt="xxxx", text="yyyy").SerializeToString()
    for method in METHODS:
        check(await refused(client, invalid.replace(b"yyyy", b"\xff\xfe\xc0\x80"), method), "UTF-8")
        check(await refused(client, invalid.replace(b"xxxx", b"\xed\xa0\x80x"), method), "UTF-8")
        check(await refused(client, b"\x0a\xff\xff\xff\xff", method), "no valid")
        check(await refused(client, b"", method), "prompt is missing")


async def test_a_field_that_nobody_knows_is_refused(client: Client) -> None:
    unknown = bytes([(15 << 3) | 0, 1])  # field 15, a number
    check(await refused(client, asks(max_tokens=1).SerializeToString() + unknown), "field number 15")
    inside = pb.GenerateRequest(text="x").SerializeToString() + bytes([(4 << 3) | 2, 2]) + unknown
    check(await refused(client, inside), "sampling")


async def test_messages_that_are_too_long(client: Client) -> None:
    """Up to twice the limit our own sentence; beyond that gRPC ends the call without reading it."""
    for method in METHODS:
        check(await refused(client, asks("x" * (5 * MIB)), method), "4194304")
        refusal = await refused(client, asks("x" * (20 * MIB)), method)
        assert refusal.status.name == "RESOURCE_EXHAUSTED"
        assert "larger than max" in refusal.details


async def test_an_unknown_method_is_unimplemented(client: Client) -> None:
    assert (await refused(client, b"", "Nothing")).status.name == "UNIMPLEMENTED"
