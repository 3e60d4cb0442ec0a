"""Requests that end early: dropped, aborted, out of time (case A3 over gRPC), or stopped. Work ends on both workers
within two seconds, every block is free again, and each trace tells how it ended."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diptych.cluster.traces import Span
from diptych.contract import telemetry as names
from diptych.contract.errors import Cancelled, DeadlineExceeded
from diptych.router.client import Client
from diptych.v1 import inference_pb2 as pb
from tests.support.asking import LIMIT, asks, drawn, fresh, ids, refused, until, until_idle, usual
from tests.support.serving import Running

SOON = 2.0


def endless(**options: Any) -> pb.GenerateRequest:
    options.setdefault("prompt", "Once upon a time")
    return asks(max_tokens=2000, ignore_eos=True, **options)


def parent() -> tuple[str, str]:
    """(a trace's id, the traceparent of its client)."""
    trace = secrets.token_hex(16)
    return trace, f"00-{trace}-{secrets.token_hex(8)}-01"


async def test_a_dropped_stream_ends_the_work(either: Client) -> None:
    pieces = either.stream(endless(n=2), timeout=LIMIT)
    for _ in range(3):
        await anext(pieces)
    await pieces.aclose()
    await until_idle(either, SOON)


async def test_a_dropped_unary_call_ends_the_work(either: Client) -> None:
    asking = asyncio.create_task(either.generate(endless(), timeout=LIMIT))
    before = drawn(await either.server_info())
    await until(either, lambda info: sum(drawn(info).values()) > sum(before.values()))
    asking.cancel()
    await until_idle(either, SOON)


async def test_abort_by_the_requests_id(either: Client) -> None:
    pieces = either.stream(endless(), timeout=LIMIT)
    first = await anext(pieces)
    begun = time.monotonic()
    assert await either.abort(first.request_id)
    with pytest.raises(Cancelled, match="aborted"):
        await listen(pieces, [])
    assert time.monotonic() - begun < SOON
    await until_idle(either, SOON)
    assert not await either.abort(first.request_id)
    assert not await either.abort("req-0")


async def test_abort_needs_an_id(client: Client) -> None:
    refusal = await refused(client, b"", "Abort")
    assert (refusal.status.name, refusal.code) == ("INVALID_ARGUMENT", "InvalidRequest")
    assert "request_id" in refusal.details


async def test_cancels_before_the_first_token(apart: Running, client: Client) -> None:
    """A3 (c), and at every moment shortly after: of a prompt that takes prefill a while."""
    traces = []
    for number in range(20):
        trace, header = parent()
        asked = endless(prompt=f"{number} " * (100 + 20 * number), cache_salt=fresh())
        asking = asyncio.create_task(client.generate(asked, timeout=LIMIT, traceparent=header))
        if number > 4:  # the others may leave before the server knows of them
            await until(client, lambda info: info.requests)
            traces.append(trace)
        await asyncio.sleep(number * 0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await until_idle(client, SOON)
    for trace in traces:
        assert ended(apart.spans(trace)) == ("cancelled", "Cancelled")
    await usual(client)


async def test_deadlines_pass_wherever_a_request_is(apart: Running, client: Client) -> None:
    """A3 (d): twenty at once, each with 300 ms, in queues, in prefill and in decode."""
    parents = [parent() for _ in range(20)]

    async def late(number: int) -> None:
        asked = endless(prompt="a " * (1 + 10 * number), cache_salt=fresh())
        with pytest.raises(DeadlineExceeded):
            await client.generate(asked, timeout=0.3, traceparent=parents[number][1])

    await asyncio.gather(*map(late, range(20)))
    await until_idle(client, SOON)
    # On a busy machine a call may be late before the server has read it.
    for spans in apart.known({trace for trace, _ in parents}, 10).values():
        assert ended(spans) == ("error", "DeadlineExceeded")
    await usual(client)


async def test_all_kinds_of_leaving_at_once(client: Client) -> None:
    """A3, mixed: dropped after the first piece, dropped before, aborted, late."""

    async def leave(number: int) -> None:
        asked = endless(prompt="Once upon a time " * (1 + number))
        pieces = client.stream(asked, timeout=0.3 if number % 4 == 3 else LIMIT)
        if number % 4 == 3:
            with pytest.raises(DeadlineExceeded):
                await listen(pieces, [])
        elif number % 4 == 2:
            reading = asyncio.ensure_future(anext(pieces))
            await asyncio.sleep(0.1)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        else:
            first = await anext(pieces)
            if number % 4:
                assert await client.abort(first.request_id)
        await pieces.aclose()

    await asyncio.gather(*map(leave, range(20)))
    await until_idle(client, SOON)
    await usual(client)


async def test_a_deadline_in_a_stream_comes_after_what_was_said(either: Client) -> None:
    said: list[int] = []
    with pytest.raises(DeadlineExceeded):
        await listen(either.stream(endless(), timeout=1.5), said)
    assert said
    await until_idle(either, SOON)


async def test_a_stop_string_cancels_decode(apart: Running, client: Client) -> None:
    """Usage counts to the match; decode does not run on to the limit."""
    before = drawn(await client.server_info())
    trace, header = parent()
    answer = await client.generate(
        asks(max_tokens=1000, ignore_eos=True, stop=["The a"]), timeout=LIMIT, traceparent=header
    )
    assert (answer.choices[0].text, answer.choices[0].stop_string) == (" Paris.\n\n", "The a")
    assert (answer.usage.completion_tokens, len(ids(answer))) == (6, 6)
    await until_idle(client, SOON)
    after = drawn(await client.server_info())
    assert sum(after.values()) - sum(before.values()) < 20
    assert ended(apart.spans(trace)) == ("stop", None)


async def listen(pieces: AsyncIterator[pb.GenerateStreamResponse], said: list[int]) -> None:
    async for piece in pieces:
        said += piece.token_ids


def ended(spans: list[Span]) -> tuple[str, str | None]:
    """How a trace's one root says that it ended. Its spans are all closed: an open one is never exported, and no
    span has a parent that is missing."""
    roots = [span for span in spans if span.name == names.REQUEST]
    assert len(roots) == 1
    known = {span.id for span in spans}
    assert all(span.parent in known for span in spans if span is not roots[0])
    return roots[0].attributes[names.TERMINAL], roots[0].attributes.get(names.ERROR_CODE)
