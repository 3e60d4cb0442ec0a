"""Every parameter that can never work is refused, by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from diptych.contract.errors import CapacityExceeded, InvalidRequest
from diptych.router.client import ask
from diptych.router.facts import ModelFacts
from diptych.router.validate import Order, Room, check_ids, order, parse, stopping
from diptych.v1 import inference_pb2 as pb

FACTS = ModelFacts("m", "LlamaForCausalLM", 49_152, 8192, (2,))
ROOM = Room(context=100, cache=80, prompt=60)


def made(**options: Any) -> Order:
    return order(ask("x", **options), FACTS, max_choices=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", 101),
        ("top_p", 0), ("top_p", 1.5), ("top_p", math.nan), ("top_k", -1), ("top_k", 2**40),
        ("min_p", -0.1), ("min_p", 2), ("seed", -1), ("repetition_penalty", 0), ("repetition_penalty", math.inf),
        ("presence_penalty", 3), ("frequency_penalty", -2.5),
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 2**40), ("min_tokens", -1),
        ("n", 0), ("n", -1), ("n", 5), ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", 21),
        ("stop", [""]), ("stop", ["x" * 257]), ("stop", [str(n) for n in range(17)]),
        ("stop_token_ids", [-1]), ("stop_token_ids", [49_152]), ("stop_token_ids", list(range(65))),
        ("logit_bias", {49_152: 5.0}), ("logit_bias", {-1: 5.0}), ("logit_bias", {7042: 1000.0}),
        ("logit_bias", {7042: math.nan}), ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("model", "another"), ("cache_salt", "x" * 257),
    ],
)  # fmt: skip
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(**{field: value})
    assert field in str(refused.value)


def test_the_key_of_a_bias_is_named() -> None:
    with pytest.raises(InvalidRequest, match="49152"):
        made(logit_bias={49_152: 5.0})


def test_min_above_max() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        made(min_tokens=5, max_tokens=4)


def test_defaults_and_bounds() -> None:
    plain = made()
    assert (plain.n, plain.max_tokens, plain.logprobs, plain.stop) == (1, None, None, ())
    assert plain.sampling.temperature == 1.0
    assert plain.sampling.seed != made().sampling.seed
    tiny = made(temperature=1e-45, seed=2**63 - 1, logprobs=0, n=4, top_p=1, logit_bias={49_151: -100.0})
    assert tiny.sampling.greedy
    assert tiny.logprobs == 0
    assert tiny.sampling.logit_bias == ((49_151, -100.0),)


def test_the_prompt_fits() -> None:
    assert stopping(made(), 10, FACTS, ROOM).max_tokens == 70
    assert stopping(made(max_tokens=70), 10, FACTS, ROOM).max_tokens == 70
    with pytest.raises(CapacityExceeded, match="81"):
        stopping(made(max_tokens=71), 10, FACTS, ROOM)
    with pytest.raises(InvalidRequest, match="90"):
        stopping(made(max_tokens=91), 10, FACTS, ROOM)
    with pytest.raises(CapacityExceeded, match="61"):
        stopping(made(max_tokens=5), 61, FACTS, ROOM)
    with pytest.raises(InvalidRequest, match="100 tokens"):
        stopping(made(), 100, FACTS, ROOM)
    with pytest.raises(InvalidRequest, match="empty"):
        stopping(made(), 0, FACTS, ROOM)


def test_ids_are_in_the_vocabulary() -> None:
    assert check_ids([0, 49_151], FACTS) == (0, 49_151)
    for bad in (-1, 49_152):
        with pytest.raises(InvalidRequest, match=r"ids\[1\]"):
            check_ids([0, bad], FACTS)


def test_bytes_that_are_no_message() -> None:
    good = ask("grüß", max_tokens=3)
    assert parse(good.SerializeToString(), pb.GenerateRequest, 1000) == good
    for bad in (b"\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a\x7fabc"):
        with pytest.raises(InvalidRequest, match="UTF-8"):
            parse(bad, pb.GenerateRequest, 1000)
    with pytest.raises(InvalidRequest, match="2000"):
        parse(b"x" * 2000, pb.GenerateRequest, 1000)


def test_a_field_that_is_not_offered_is_refused() -> None:
    later = ask("x", max_tokens=3).SerializeToString()
    with pytest.raises(InvalidRequest, match="GenerateRequest holds field number 99"):
        parse(later + b"\x98\x06\x01", pb.GenerateRequest, 1000)
    nested = b"\x22\x03\x98\x06\x01"  # sampling, with field 99 in it
    with pytest.raises(InvalidRequest, match="sampling"):
        parse(nested, pb.GenerateRequest, 1000)
