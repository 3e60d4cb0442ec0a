"""Prompts of every kind end inside the model's vocabulary, or are refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from diptych.contract.errors import InvalidRequest
from diptych.router.client import ask
from diptych.router.facts import model_facts
from diptych.router.prepare import Preparer
from diptych.router.settings import RouterSettings
from diptych.router.validate import Room
from diptych.v1 import inference_pb2 as pb
from tests.router.service import loaded

ROOM = Room(context=1000, cache=1000, prompt=1000)


@pytest.fixture
async def preparer(demo_model: Path) -> AsyncIterator[Preparer]:
    """Of a model that lacks the rows of most of its tokenizer's tokens."""
    facts = msgspec.structs.replace(model_facts(demo_model), vocabulary=300)
    made = Preparer(loaded(demo_model), facts, RouterSettings())
    yield made
    made.close()


async def refusal(preparer: Preparer, asked: pb.GenerateRequest) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await preparer.prepare(asked.SerializeToString(), ROOM, (16,))
    return str(refused.value)


async def test_a_token_that_the_model_does_not_have_is_named(preparer: Preparer) -> None:
    said = await refusal(preparer, ask("Hello there"))
    assert said.startswith("text holds 'Hello', token ")
    assert "outside the vocabulary (0 to 299)" in said
    said = await refusal(preparer, ask(messages=[{"role": "user", "content": "Hello there"}]))
    assert said.startswith("chat holds '")
    assert (await refusal(preparer, ask(token_ids=[1, 300]))).startswith("token_ids.ids[1] is 300")
