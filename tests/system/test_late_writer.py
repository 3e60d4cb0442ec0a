"""Case D2 over gRPC, at length: A ends while its KV is still being written, and B gets A's blocks at once.

The sender is slowed, the cache of decode holds one of them only, and its books are checked whenever it falls idle.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from diptych.contract.errors import DeadlineExceeded, DiptychError
from diptych.router.client import Client
from diptych.v1 import inference_pb2 as pb
from tests.support.asking import LIMIT, asks, fresh, ids, until, until_idle, usual, worker
from tests.support.serving import running, small

ROUNDS = 50


def noise(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(250)]


def asked(seed: int) -> pb.GenerateRequest:
    return asks(noise(seed), max_tokens=6, ignore_eos=True, cache_salt=fresh())


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_next_user_of_the_blocks_gets_its_own_text(demo_model: Path, tmp_path: Path) -> None:
    slowed = small(
        prefill__send_delay_s=0.05, prefill__token_budget=512, engine__message_bytes=1 << 20, decode__cache_blocks=20
    )
    draw = random.Random(4)
    with running(demo_model, tmp_path, *slowed) as service:
        async with Client(service.address) as client:
            alone = [ids(await client.generate(asked(seed), timeout=LIMIT)) for seed in range(3)]
            for number in range(ROUNDS):
                end = "kill" if number % 8 == 7 else ("drop", "deadline", "abort")[number % 3]
                await ended_at_any_moment(client, asked(100 + number), draw.random() * 0.8, end)
                b = await client.generate(asked(number % 3), timeout=LIMIT)
                assert ids(b) == alone[number % 3], f"round {number}, {end}"
            await until_idle(client)
            await usual(client)


async def ended_at_any_moment(client: Client, a: pb.GenerateRequest, moment: float, end: str) -> None:
    """A is dropped, aborted or late, or its prefill worker dies, `moment` seconds after decode has reserved for it."""
    first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        async for piece in client.stream(a, timeout=0.2 + moment if end == "deadline" else LIMIT):
            if not first.done():
                first.set_result(piece.request_id)

    reading = asyncio.create_task(read())
    if end == "abort":
        await asyncio.wait((first, reading), timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(moment / 2)
        await client.abort(first.result())
    elif end != "deadline":
        await until(client, lambda info: info.requests)
        await asyncio.sleep(moment)
        if end == "drop":
            reading.cancel()
        else:
            await kill_prefill(client)
    await asyncio.wait((reading,), timeout=LIMIT)
    if not reading.cancelled() and (error := reading.exception()):
        assert isinstance(error, DiptychError), error
        assert end != "deadline" or isinstance(error, DeadlineExceeded)


async def kill_prefill(client: Client) -> None:
    victim = worker(await client.server_info(), "prefill")
    assert victim is not None
    os.kill(victim.pids[-1], signal.SIGKILL)
