"""Plain processes, SmolLM2's first layers, one gloo pair: the path that everything else stands on, and what must
survive there.

Either side may be killed, requests may be aborted at any moment: each ends in one typed terminal event, and afterwards
every block is free (the engines check their books whenever they fall idle).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diptych.cluster.config import Group
from diptych.cluster.local import LocalCluster
from diptych.contract.limits import Limits
from diptych.contract.request import Key, Request, Sampling, Stopping
from diptych.contract.wire import Cancel, Ended, Prefill, Reserve, Start, WorkerInfo
from diptych.workers.settings import WorkerSettings
from tests.support.probe import LIMIT, Probe, hand_over
from tests.support.shallow import LAYERS

PARIS = (504, 3575, 282, 4649, 314)
GREEDY = Sampling(temperature=0.0)
TOKEN_BYTES = LAYERS * 2 * 3 * 64 * 4
SECRET = b"a secret of these tests alone"


def group(model: Path, role: str, **more: object) -> Group:
    common = {"model": str(model), "name": role, "cache_blocks": 256, "check_integrity": True, "threads": 1}
    return Group(WorkerSettings(role=role, **(common | more)), {})  # type: ignore[arg-type]


@asynccontextmanager
async def cluster_of(*groups: Group) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(groups, SECRET, Limits())
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop(drain=False)


async def infos(cluster: LocalCluster) -> dict[str, WorkerInfo]:
    return {info.role: info for info in cluster.registry.table().workers}


@asynccontextmanager
async def linked(cluster: LocalCluster) -> AsyncIterator[tuple[Probe, Probe]]:
    """Sessions with the two workers once their link is ready."""
    found = await infos(cluster)
    async with Probe(found["prefill"], SECRET) as prefill, Probe(found["decode"], SECRET) as decode:
        await prefill.until(lambda load: decode.info.id in load.links)
        await decode.until(lambda load: prefill.info.id in load.links)
        yield prefill, decode


def request(name: str, prompt: tuple[int, ...] = PARIS, tokens: int = 9, **more: object) -> Request:
    return Request(Key(name), prompt, Stopping(tokens, ignore_eos=True), GREEDY, **more)  # type: ignore[arg-type]


def long_prompt(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(100, 40_000) for _ in range(length))


@pytest.fixture(scope="module")
def usual(shallow_model: Path) -> list[int]:
    """What the model says to `PARIS` in one process."""
    from tests.support.engine import Harness  # here: the router that `test_limits` stops shares this file's helpers

    harness = Harness(shallow_model)
    harness.ask("usual", PARIS, 9)
    harness.run()
    return harness.loop.tokens["usual"]


async def test_hand_over(shallow_model: Path, usual: list[int]) -> None:
    # A prompt of a hundred tokens takes several chunks and several messages.
    small = {"token_budget": 40, "message_bytes": 25 * TOKEN_BYTES, "max_batch": 32}
    async with cluster_of(group(shallow_model, "prefill", **small), group(shallow_model, "decode", **small)) as cluster:
        async with linked(cluster) as (prefill, decode):
            await one_request(prefill, decode, usual)
            await what_decode_holds_is_not_sent(prefill, decode)
            await an_end_at_the_first_token_moves_nothing(prefill, decode, usual[0])
            await many_at_once(prefill, decode)
            await aborted_at_any_moment(prefill, decode)


async def one_request(prefill: Probe, decode: Probe, usual: list[int]) -> None:
    outcome = await hand_over(prefill, decode, request("one"))
    assert outcome.tokens == usual
    assert (outcome.prefill.reason, outcome.prefill.generated) == ("handed", 1)
    assert outcome.decode is not None
    assert (outcome.decode.reason, outcome.decode.generated) == ("length", 8)
    await prefill.until_free()
    await decode.until_free()


async def what_decode_holds_is_not_sent(prefill: Probe, decode: Probe) -> None:
    prompt = long_prompt(100, 1)
    first = await hand_over(prefill, decode, request("first", prompt))
    forked = await hand_over(prefill, decode, request("forked", prompt[:60] + long_prompt(40, 2)))
    assert first.granted is not None
    assert forked.granted is not None
    assert (first.granted.held, forked.granted.held) == (0, 48)
    assert forked.prefill.cached == 48
    sent = [
        stage.attributes["diptych.bytes"] for o in (first, forked) for stage in o.prefill.stages if "send" in stage.name
    ]
    assert sent == [100 * TOKEN_BYTES, 52 * TOKEN_BYTES]
    same = request("same", prompt)
    await decode.send(Reserve(same, prefill.info.id))
    granted = await asyncio.wait_for(decode.parts[same.key].granted, LIMIT)
    assert (granted.held, granted.local) == (96, True), "four tokens are not worth a prefill worker"
    ended = await asyncio.wait_for(decode.parts[same.key].ended, LIMIT)
    assert decode.parts[same.key].tokens == first.tokens
    assert (ended.cached, ended.generated) == (96, 9)


async def an_end_at_the_first_token_moves_nothing(prefill: Probe, decode: Probe, first: int) -> None:
    ends = Request(Key("ends"), PARIS, Stopping(16, end_ids=(first,)), GREEDY)
    outcome = await hand_over(prefill, decode, ends)
    assert (outcome.tokens, outcome.prefill.reason, outcome.prefill.stop_id) == ([first], "stop", first)
    assert not any("transfer" in stage.name for stage in outcome.prefill.stages)
    await decode.send(Cancel(ends.key))
    await decode.until_free()
    alone = Request(Key("alone"), PARIS, Stopping(1), GREEDY)
    await prefill.send(Prefill(alone, None))
    ended = await asyncio.wait_for(prefill.parts[alone.key].ended, LIMIT)
    assert (prefill.parts[alone.key].tokens, ended.reason) == ([first], "length")


async def many_at_once(prefill: Probe, decode: Probe) -> None:
    requests = [request(f"many-{n}", long_prompt(20 + 13 * n, 50 + n), 12) for n in range(8)]
    together = await asyncio.gather(*(hand_over(prefill, decode, each) for each in requests))
    for each, found in zip(requests, together, strict=True):
        alone = await hand_over(
            prefill, decode, Request(Key(each.key.request, 1), each.prompt, each.stopping, GREEDY, salt="x")
        )
        assert found.tokens == alone.tokens
    await prefill.until_free()
    await decode.until_free()


async def aborted_at_any_moment(prefill: Probe, decode: Probe) -> None:
    """Cancels on both sides at a random moment, in either order; every part that was begun ends once."""
    draw = random.Random(7)
    for number in range(40):
        asked = request(f"abort-{number}", long_prompt(draw.randrange(5, 160), number), 40)
        driving = asyncio.create_task(hand_over(prefill, decode, asked))
        await asyncio.sleep(draw.random() * 0.25)
        sides = [prefill, decode]
        draw.shuffle(sides)
        for side in sides:
            await side.send(Cancel(asked.key))
        driving.cancel()
    await prefill.until_free()
    await decode.until_free()


async def test_a_dead_peer_is_a_typed_error(shallow_model: Path, usual: list[int]) -> None:
    """Kills each side's engine while KV is on its way: the other side's part ends with a typed error at once, its
    blocks return, the group is replaced and serves."""
    slow = group(shallow_model, "prefill", send_delay_s=0.5, message_bytes=25 * TOKEN_BYTES)
    async with cluster_of(slow, group(shallow_model, "decode")) as cluster:
        for victim in ("prefill", "decode"):
            await kill_while_sending(cluster, victim)
        async with linked(cluster) as (prefill, decode):
            assert (await hand_over(prefill, decode, request("after"))).tokens == usual


async def kill_while_sending(cluster: LocalCluster, victim: str) -> None:
    async with linked(cluster) as (prefill, decode):
        asked = request(f"kill-{victim}", long_prompt(200, 3))
        await decode.send(Reserve(asked, prefill.info.id))
        await prefill.send(Prefill(asked, decode.info.id))
        granted = await asyncio.wait_for(decode.parts[asked.key].granted, LIMIT)
        await prefill.send(Start(asked.key, granted.held))
        await asyncio.wait_for(prefill.parts[asked.key].first.wait(), LIMIT)
        dying, living = (prefill, decode) if victim == "prefill" else (decode, prefill)
        os.kill(dying.info.engine_pids[0], signal.SIGKILL)
        ended: Ended = await asyncio.wait_for(living.parts[asked.key].ended, 5.0)
        assert (ended.reason, ended.code) == ("error", "PrefillLost" if victim == "prefill" else "DecodeLost"), ended
        await asyncio.wait_for(dying.broken.wait(), 5.0)
        await living.until_free(5.0)
    async with asyncio.timeout(LIMIT):
        while (now := (await infos(cluster)).get(victim)) is None or now.id == dying.info.id:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
async def test_blocks_of_an_aborted_transfer_are_safe_to_give_away(shallow_model: Path, rounds: int) -> None:
    """Case D2: the sender is slowed, A is aborted after its first message, B needs A's blocks and gets its own text."""
    sizes = {"message_bytes": 11 * TOKEN_BYTES}
    slow = group(shallow_model, "prefill", send_delay_s=0.05, **sizes)
    async with cluster_of(slow, group(shallow_model, "decode", cache_blocks=9, **sizes)) as cluster:
        async with linked(cluster) as (prefill, decode):
            draw = random.Random(2)
            prompts = [long_prompt(110, 10 + n) for n in range(3)]
            alone = [
                (await hand_over(prefill, decode, request(f"alone-{n}", p, 6))).tokens for n, p in enumerate(prompts)
            ]
            for number in range(rounds):
                a = request(f"a-{number}", long_prompt(110, 100 + number), 6)
                driving = asyncio.create_task(hand_over(prefill, decode, a))
                await asyncio.wait_for(decode.parts[a.key].granted, LIMIT)
                await asyncio.sleep(draw.random() * 0.4)  # the moment is what varies
                for side in (decode, prefill):
                    await side.send(Cancel(a.key))
                driving.cancel()
                which = number % len(prompts)
                b = request(f"b-{number}", prompts[which], 6, salt=str(number))
                assert (await hand_over(prefill, decode, b)).tokens == alone[which]
            await decode.until_free()
            await prefill.until_free()
