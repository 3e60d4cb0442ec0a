"""Workers that die under load. The service of these tests is theirs alone, since its workers are killed.

Each request that a dead worker held ends at once in one typed error, everything else goes on, the worker is replaced,
and after a storm every worker's free blocks equal its total.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.traces import Span, adds_up, stories
from diptych.contract import telemetry as names
from diptych.contract.errors import DiptychError
from diptych.router.client import Client
from diptych.v1 import inference_pb2 as pb
from tests.support.asking import LIMIT, PARIS, asks, fresh, refused, until, until_idle, usual, worker
from tests.support.serving import Running, running, small

AT_ONCE = 2.0
LOSS = {"prefill": "PrefillLost", "decode": "DecodeLost"}


@pytest.fixture(scope="module")
def mortal(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(demo_model, tmp_path_factory.mktemp("mortal"), *small()) as service:
        yield service


def parent() -> tuple[str, str]:
    trace = secrets.token_hex(16)
    return trace, f"00-{trace}-{secrets.token_hex(8)}-01"


def ready(info: pb.GetServerInfoResponse) -> bool:
    """The service would take a request now, and nobody of the dead is listed any more."""
    return info.ready and all(each.connected for each in info.workers)


def running_at(info: pb.GetServerInfoResponse, role: str) -> int:
    found = worker(info, role)
    return found.running if found is not None else 0


async def kill(client: Client, role: str, front: bool = False) -> pb.Worker:
    """Kills the engine of a worker, or its front; returns what it was."""
    victim = worker(await client.server_info(), role)
    assert victim is not None
    os.kill(victim.pids[0] if front else victim.pids[-1], signal.SIGKILL)
    return victim


async def until_replaced(client: Client, dead: pb.Worker) -> None:
    await until(client, lambda info: ready(info) and dead.id not in {each.id for each in info.workers})


# ── one request ────────────────────────────────────────────────────────────────────────────────────────────────────


def long_prompt(role: str) -> str:
    """For prefill: enough chunks that it dies in the middle of them."""
    return f"{fresh()} " + "and so on " * (400 if role == "prefill" else 1)


@pytest.mark.parametrize(
    ("role", "front"), [("prefill", False), ("decode", False), pytest.param("decode", True, marks=pytest.mark.slow)]
)
async def test_a_killed_worker_is_a_typed_error_at_once(mortal: Running, role: str, front: bool) -> None:
    async with Client(mortal.address) as client:
        trace, header = parent()
        pieces = client.stream(asks(long_prompt(role), max_tokens=900, ignore_eos=True), LIMIT, header)
        ending: asyncio.Task[str] = asyncio.create_task(end_of(pieces))
        status = asyncio.create_task(refused(client, asks(long_prompt(role), max_tokens=900, ignore_eos=True)))
        await until(client, lambda info: running_at(info, role) > (role == "decode"))
        begun = time.monotonic()
        dead = await kill(client, role, front)
        assert await asyncio.wait_for(ending, AT_ONCE) == LOSS[role]
        refusal = await asyncio.wait_for(status, AT_ONCE)
        assert (refusal.status.name, refusal.code) == ("UNAVAILABLE", LOSS[role])
        assert time.monotonic() - begun < AT_ONCE
        waiting = asyncio.create_task(usual(client))  # it is not refused: it waits for the next worker
        check_lost(mortal.spans(trace), dead, LOSS[role])
        await until_replaced(client, dead)
        await waiting
        await until_idle(client)


async def end_of(pieces: Any) -> str:
    """How a stream ends: exactly once."""
    finished = 0
    try:
        async for piece in pieces:
            assert not finished, "something came after the end"
            finished += piece.finish_reason != pb.FINISH_REASON_UNSPECIFIED
    except DiptychError as error:
        assert not finished, "an error came after the end"
        return error.code
    assert finished == 1
    return "done"


def check_lost(spans: list[Span], dead: pb.Worker, code: str) -> None:
    """The attempt that the dead worker had is in the trace, with its name and what became of it."""
    attempt = next(span for span in spans if span.name == names.ATTEMPT)
    assert attempt.attributes[names.ERROR_CODE] == code
    assert dead.id in attempt.attributes[names.WORKER]
    assert attempt.ns > 0
    (told,) = stories(spans)
    assert told.terminal == code
    assert told.spine


# ── the storm ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_storm_leaves_every_block_free(mortal: Running) -> None:
    """Two thirds of the requests come before the kill, one third while nobody decodes."""
    draw = random.Random(5)
    async with Client(mortal.address) as client:
        parents = [parent() for _ in range(60)]
        plans = [plan(draw, number) for number in range(60)]
        calls = [one(client, *each, header) for each, (_, header) in zip(plans, parents, strict=True)]
        storm = [asyncio.create_task(call) for call in calls[:40]]
        await until(client, lambda info: sum(task.done() for task in storm) > 12 and running_at(info, "decode") > 1)
        dead = await kill(client, "decode")
        storm += [asyncio.create_task(call) for call in calls[40:]]
        ends = Counter(await asyncio.gather(*storm))
        await until_replaced(client, dead)
        await until_idle(client)
        await usual(client)
        check_ends(ends)
        # A client that left at once may have left before the server knew of it.
        known = mortal.known({trace for trace, _ in parents}, 60 - ends["left"] - ends["DeadlineExceeded"])
        for spans in known.values():
            check_one_end(spans)


def plan(draw: random.Random, number: int) -> tuple[str, pb.GenerateRequest, float, float]:
    """(kind, request, seconds until it begins, seconds after which it leaves or is late)."""
    kind = ("whole", "drop", "late", "bad", "abort", "whole")[number % 6]
    options: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 9, 30]), "n": draw.choice([1, 1, 2])}
    if kind in ("drop", "late", "abort"):
        options |= {"max_tokens": 500, "ignore_eos": True}
    if kind == "bad":
        options |= {"top_p": -1.0}
    prompt = f"{number} {PARIS} " * draw.choice([1, 2, 20])
    return kind, asks(prompt, seed=number, temperature=0.7, **options), draw.random() * 2, draw.random() * 1.5 + 0.05


async def one(client: Client, kind: str, request: pb.GenerateRequest, begin: float, leave: float, header: str) -> str:
    await asyncio.sleep(begin)
    pieces = client.stream(request, leave if kind == "late" else LIMIT, header)
    ending = asyncio.create_task(ends_of(client, pieces, kind))
    if kind == "drop":
        await asyncio.wait((ending,), timeout=leave)
        ending.cancel()
    end = (await asyncio.gather(ending, return_exceptions=True))[0]
    if isinstance(end, asyncio.CancelledError):
        return "left"
    if isinstance(end, BaseException):
        raise end
    return end


async def ends_of(client: Client, pieces: Any, kind: str) -> str:
    """Like `end_of`, for several choices, aborting at the first piece when that is the plan."""
    ended: Counter[int] = Counter()
    aborted = False
    try:
        async for piece in pieces:
            ended[piece.index] += piece.finish_reason != pb.FINISH_REASON_UNSPECIFIED
            if kind == "abort" and not aborted:
                aborted = await client.abort(piece.request_id)
    except DiptychError as error:
        return error.code
    finally:
        await pieces.aclose()
    assert set(ended.values()) == {1}, ended
    return "done"


def check_ends(ends: Counter[str]) -> None:
    """Every request has ended, in a way that somebody wanted or that the kill explains."""
    assert ends.total() == 60
    assert set(ends) <= {"done", "left", "Cancelled", "DeadlineExceeded", "InvalidRequest", "DecodeLost"}, ends
    assert ends["InvalidRequest"] == 10
    assert ends["DecodeLost"] > 0
    assert ends["done"] > 5
    assert ends["DeadlineExceeded"] > 0


def check_one_end(spans: list[Span]) -> None:
    """One root with one terminal event, an attempt a choice, and stages that add up where all has ended well."""
    assert sum(span.name == names.REQUEST for span in spans) == 1
    choices = [span.attributes[names.CHOICE] for span in spans if span.name == names.ATTEMPT]
    assert len(choices) == len(set(choices))
    root = next(span for span in spans if span.name == names.REQUEST)
    assert root.attributes[names.TERMINAL] in ("stop", "length", "cancelled", "error")
    if root.attributes[names.TERMINAL] in ("stop", "length"):
        assert all(adds_up(story) for story in stories(spans))
