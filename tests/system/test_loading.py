"""What a checkpoint's configuration says reaches the answers: cases L2 and L3, through the whole service.

The rest of L2's spellings are compared with transformers where the model is tested.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych.contract import telemetry as names
from diptych.router.client import Client
from tests.support.asking import LENGTH, LIMIT, PARIS, STOP, USUAL, asks, both, fresh, ids, until_idle
from tests.support.serving import Running, running, small

STORY = "Once upon a time"
RIGHT = [28, 260, 2240, 282, 23324, 27108, 436, 253, 15114, 39228, 28, 351]
LINEAR = {"rope_type": "linear", "factor": 2.0}


def variant(model: Path, folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    """The model with keys of config.json replaced (None takes one out) and another generation_config.json or none."""
    folder.mkdir()
    for file in model.iterdir():
        if not file.name.endswith("config.json") or file.name == "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    whole = json.loads((model / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@asynccontextmanager
async def served(
    model: Path,
    tmp_path: Path,
    config: dict[str, Any],
    generation: dict[str, Any] | None = None,
    roles: str = "colocated",
) -> AsyncIterator[tuple[Running, Client]]:
    folder = variant(model, tmp_path / "model", config, generation)
    with running(folder, tmp_path / "service", "--roles", roles, *small()) as service:
        async with Client(service.address) as client:
            yield service, client
            await until_idle(client)


# ── L2 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_base_inside_rope_parameters(either: Client) -> None:
    assert ids(await both(either, asks(STORY, max_tokens=12))) == RIGHT


async def test_the_base_at_the_top_and_end_tokens_of_config_json_alone(demo_model: Path, tmp_path: Path) -> None:
    """L2 (a), and L3 without a generation_config.json."""
    top = {"rope_parameters": None, "rope_theta": 100000.0, "rope_scaling": None, "eos_token_id": [2, 30]}
    async with served(demo_model, tmp_path, top) as (_, client):
        story, answer = await asyncio.gather(
            both(client, asks(STORY, max_tokens=12)), both(client, asks(max_tokens=16))
        )
        assert ids(story) == RIGHT
        assert (ids(answer), answer.choices[0].text) == ([7042, 30], " Paris")


@pytest.mark.slow
async def test_no_base_is_the_default(demo_model: Path, tmp_path: Path) -> None:
    async with served(demo_model, tmp_path, {"rope_parameters": None}) as (_, client):
        drawn = ids(await both(client, asks(STORY, max_tokens=12)))
        assert (drawn == RIGHT, drawn[7]) == (False, 32562)


@pytest.mark.slow
async def test_both_bases_and_both_names_of_a_type(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    async with served(demo_model, tmp_path / "c", {"rope_theta": 10000.0}) as (_, client):
        assert ids(await both(client, asks(STORY, max_tokens=12))) == RIGHT
    drawn = []
    for number, scaling in enumerate((LINEAR, {"type": "linear", "factor": 2.0})):
        (tmp_path / str(number)).mkdir()
        changed = {"rope_parameters": None, "rope_theta": 100000.0, "rope_scaling": scaling}
        async with served(demo_model, tmp_path / str(number), changed) as (_, client):
            drawn.append(ids(await both(client, asks(STORY, max_tokens=12))))
    assert drawn[0] == drawn[1] != RIGHT


# ── L3 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_several_end_tokens(demo_model: Path, tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 30]}
    async with served(demo_model, tmp_path, {}, generation, "disaggregated") as (service, client):
        answer, on, later = await asyncio.gather(
            both(client, asks(max_tokens=16)),
            both(client, asks(max_tokens=16, ignore_eos=True)),
            both(client, asks(max_tokens=16, min_tokens=4)),
        )
        choice = answer.choices[0]
        assert (ids(answer), choice.text, choice.finish_reason) == ([7042, 30], " Paris", STOP)
        assert (choice.completion_tokens, choice.stop_token_id) == (2, 30)
        assert list((await client.model_info()).end_token_ids) == [2, 30]
        assert (len(ids(on)), on.choices[0].text.startswith(USUAL)) == (16, True)
        assert on.choices[0].finish_reason == LENGTH
        assert len(ids(later)) >= 4
        assert not {2, 30} & set(ids(later)[:4])
        await ends_on_prefill(service, client, f"{PARIS} Paris", 30)


@pytest.mark.slow
async def test_an_end_token_that_is_the_first(demo_model: Path, tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 7042]}
    async with served(demo_model, tmp_path, {}, generation, "disaggregated") as (service, client):
        await ends_on_prefill(service, client, PARIS, 7042)


async def ends_on_prefill(service: Running, client: Client, prompt: str, token: int) -> None:
    """The first token ends the request: it is all there is, and nothing is handed over."""
    answer = await both(client, asks(prompt, max_tokens=16, cache_salt=fresh()))
    assert (ids(answer), answer.choices[0].text, answer.choices[0].finish_reason) == ([token], "", STOP)
    trace = secrets.token_hex(16)
    header = f"00-{trace}-{secrets.token_hex(8)}-01"
    await client.generate(asks(prompt, max_tokens=16, cache_salt=fresh()), timeout=LIMIT, traceparent=header)
    spans = {span.name for span in service.spans(trace)}
    assert not spans & {names.TRANSFER_SEND, names.TRANSFER_RECEIVE, names.DECODE_STEPS}
