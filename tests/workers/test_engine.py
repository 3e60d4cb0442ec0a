"""The engine loop in this process, without front or router: policies, overlap, ends, and what its books say after."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from diptych.contract.request import Key, Request, Sampling, Stopping
from diptych.contract.wire import Cancel, Generate
from diptych.workers.channel import SessionGone
from tests.support.engine import GREEDY, Harness, prompt_of

REQUESTS = [
    ("plain", prompt_of(5, 1), 12, GREEDY),
    ("chunked", prompt_of(150, 2), 9, GREEDY),
    ("seeded", prompt_of(20, 3), 16, Sampling(temperature=0.8, seed=42, top_p=0.9)),
    ("penalised", prompt_of(12, 4), 16, Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)),
    ("one", prompt_of(33, 5), 1, GREEDY),
    ("again", prompt_of(150, 2), 9, GREEDY),
]


@pytest.fixture(scope="module")
def alone(shallow_model: Path) -> dict[str, list[int]]:
    """Each request by itself, at depth 0: what every other arrangement must give too."""
    harness = Harness(shallow_model)
    for name, prompt, tokens, sampling in REQUESTS:
        harness.ask(name, prompt, tokens, sampling, salt=name)
        harness.run()
    return harness.loop.tokens


@pytest.mark.parametrize("overlap", [0, 1])
def test_together_and_overlapped_give_the_tokens_of_alone(
    shallow_model: Path, alone: dict[str, list[int]], overlap: int
) -> None:
    harness = Harness(shallow_model, overlap=overlap)
    for name, prompt, tokens, sampling in REQUESTS:
        harness.ask(name, prompt, tokens, sampling)
    harness.run()
    assert harness.loop.tokens == alone
    assert all(ended.reason == "length" for ended in harness.loop.ended.values())


@pytest.mark.parametrize("overlap", [0, 1])
def test_preemption_changes_no_token(shallow_model: Path, alone: dict[str, list[int]], overlap: int) -> None:
    """14 blocks hold neither all prompts nor all that is generated: the youngest make room and come back."""
    harness = Harness(shallow_model, overlap=overlap, cache_blocks=14, prefix_cache=False)
    for name, prompt, tokens, sampling in REQUESTS:
        harness.ask(name, prompt, tokens, sampling)
    for n in range(4):
        harness.ask(f"more-{n}", prompt_of(30, 10 + n), 40)
    harness.run()
    assert {name: harness.loop.tokens[name] for name in alone} == alone
    stages = [stage.name for ended in harness.loop.ended.values() for stage in ended.stages]
    assert "decode.preempted" in stages


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_stop_token_wastes_a_slot_and_nothing_else(demo_model: Path, overlap: int) -> None:
    harness = Harness(demo_model, overlap=overlap)
    paris = (504, 3575, 282, 4649, 314)
    harness.say(Generate(Request(Key("stop"), paris, Stopping(20, end_ids=(198,)), GREEDY)))
    harness.say(Generate(Request(Key("min"), paris, Stopping(20, min_tokens=4, end_ids=(2, 30)), GREEDY)))
    harness.run()
    assert harness.loop.tokens["stop"] == [7042, 30, 198]
    assert (harness.loop.ended["stop"].reason, harness.loop.ended["stop"].stop_id) == ("stop", 198)
    assert not {2, 30} & set(harness.loop.tokens["min"][:4])


@pytest.mark.parametrize("overlap", [0, 1])
def test_ends_at_any_moment(shallow_model: Path, overlap: int) -> None:
    """Cancels, a router's leave and deadlines between any two turns: each request ends once, blocks return."""
    harness = Harness(shallow_model, overlap=overlap, cache_blocks=40)
    draw = random.Random(5)
    for n in range(30):
        limit = 0.05 if n % 5 == 0 else 600.0
        harness.ask(f"r{n}", prompt_of(draw.randrange(3, 120), n), draw.randrange(1, 30), deadline_s=limit)
        for _ in range(draw.randrange(4)):
            harness.engine.turn()
        if n % 2:
            harness.say(Cancel(Key(f"r{draw.randrange(n + 1)}")))
        if n == 20:
            harness.loop.inbox.append(SessionGone("s"))
    harness.run()
    assert set(harness.loop.ended) == {f"r{n}" for n in range(30)}
    assert {"cancelled", "error", "length"} >= {ended.reason for ended in harness.loop.ended.values()}


def test_a_cancel_that_overtakes_is_remembered(shallow_model: Path) -> None:
    harness = Harness(shallow_model)
    harness.say(Cancel(Key("early")))
    harness.ask("early", prompt_of(5, 1), 5)
    harness.run()
    assert harness.loop.ended["early"].code == "Cancelled"


def test_what_never_fits_is_refused_at_once_with_both_numbers(shallow_model: Path) -> None:
    """Case K2, at the engine: 128 tokens of room."""
    harness = Harness(shallow_model, cache_blocks=8)
    harness.ask("large", prompt_of(200, 1), 10)
    for n in range(5):
        harness.ask(f"small-{n}", prompt_of(10, n), 10)
    harness.ask("largest", prompt_of(100, 2), 29)
    harness.ask("one more", prompt_of(100, 3), 30)
    harness.run()
    refused = harness.loop.ended["large"]
    assert (refused.code, refused.generated) == ("CapacityExceeded", 0)
    assert "209" in refused.message
    assert "128" in refused.message
    assert all(harness.loop.ended[f"small-{n}"].reason == "length" for n in range(5))
    assert harness.loop.ended["largest"].reason == "length"
    assert harness.loop.ended["one more"].code == "CapacityExceeded"


def test_one_failing_step_ends_its_own_requests_only(shallow_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(shallow_model)
    launch = harness.engine.runner.launch
    harness.ask("bad", prompt_of(6, 1), 5)

    def fail(step: Any) -> Any:
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(harness.engine.runner, "launch", fail)
    harness.engine.turn()
    monkeypatch.setattr(harness.engine.runner, "launch", launch)
    harness.ask("good", prompt_of(6, 1), 5)
    harness.run()
    assert harness.loop.ended["bad"].code == "Internal"
    assert "planted" in harness.loop.ended["bad"].message
    assert harness.loop.ended["good"].reason == "length"
