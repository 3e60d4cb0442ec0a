"""The load generator against a stub in a process of its own: how much it can send, and how much time it adds itself.

What it adds has two parts: from the moment at which a request is due until it is handed to gRPC, and from the moment at
which the stub hands a message to gRPC until it is noted. The second still holds gRPC's way through two processes, so it
is an upper bound, and so is their sum, taken of each request with the later of its messages.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from diptych.bench.load import Generator, Record, clock, closed_loop, open_loop
from diptych.bench.stats import percentile
from diptych.bench.workload import Tokens, from_lengths, poisson
from diptych.v1 import inference_pb2 as pb

_START, _PROMPT, _NEW, _PIECES = 30.0, 64, 64, 2


@asynccontextmanager
async def stub(pieces: int = _PIECES) -> AsyncIterator[str]:
    """The address of a stub that runs until the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "diptych.bench.stub", str(pieces), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield (await asyncio.wait_for(process.stdout.readline(), _START)).decode().strip()
    finally:
        process.terminate()
        await process.wait()


async def self_test(seconds: float = 3.0, rate: float = 1000.0, concurrency: int = 32) -> dict[str, Any]:
    """Throughput in a closed loop, then what is added to latency at Poisson arrivals of a tenth of it and of `rate`."""
    async with stub() as address:
        found: dict[str, Any] = {"prompt": _PROMPT, "new": _NEW, "messages_a_request": _PIECES}
        found["closed"] = await _most(address, seconds, concurrency)
        found["open"] = [await _added(address, each, seconds) for each in (rate / 10, rate)]
        return found


async def _most(address: str, seconds: float, concurrency: int) -> dict[str, Any]:
    records: list[Record] = []
    made = Generator(address, ended=records.append)
    try:
        for count in (200, int(1500 * seconds)):  # the first is the warm-up
            records.clear()
            chats = list(from_lengths(f"{_PROMPT}x{_NEW}", 1, count, Tokens(32_000, 0)))
            await closed_loop(made, chats, concurrency, asyncio.Event())
    finally:
        await made.close()
    took = max(record.end for record in records) - min(record.sent for record in records)
    return {
        "concurrency": concurrency,
        "requests_s": round(len(records) / took),
        "tokens_s": round(sum(record.tokens for record in records) / took),
        "errors": sum(not record.ok for record in records),
    }


async def _added(address: str, rate: float, seconds: float) -> dict[str, Any]:
    records: list[Record] = []
    received: list[float] = []
    slowest: dict[int, float] = {}

    def heard(record: Record, piece: pb.GenerateStreamResponse) -> None:
        received.append(clock() - int(piece.request_id) / 1e9)
        slowest[id(record)] = max(slowest.get(id(record), 0.0), received[-1])

    made = Generator(address, ended=records.append, heard=heard)
    chats = list(from_lengths(f"{_PROMPT}x{_NEW}", 1, int(rate * seconds), Tokens(32_000, 1)))
    try:
        await closed_loop(made, chats[:50], 8, asyncio.Event())
        records.clear()
        received.clear()
        slowest.clear()
        await open_loop(made, chats, poisson(rate, 0), asyncio.Event())
    finally:
        await made.close()
    sent = [record.sent - record.due for record in records]
    both = [record.sent - record.due + slowest[id(record)] for record in records if record.ok]
    took = max(record.end for record in records) - min(record.due for record in records)
    return {
        "rate": rate,
        "requests_s": round(len(records) / took),
        "tokens_s": round(sum(record.tokens for record in records) / took),
        "sending_ms": _spread(sent),
        "receiving_ms": _spread(received),
        "added_ms": _spread(both),
        "ttft_ms": _spread([record.ttft for record in records]),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    return {f"p{share * 100:g}": round(percentile(seconds, share) * 1e3, 3) for share in (0.5, 0.99)}
