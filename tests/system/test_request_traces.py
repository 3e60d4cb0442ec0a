"""Traces of real runs: one tree a request under the client's own span, whose stages touch and add up to the time to the
first token and to the whole time within 1 % or 0.5 ms; every wait has its cause."""

from __future__ import annotations

import asyncio
import secrets
from itertools import pairwise
from typing import Any

import pytest

from diptych.cluster.traces import Span, Story, adds_up, stories
from diptych.contract import telemetry as names
from diptych.router.client import Client
from diptych.v1 import inference_pb2 as pb
from tests.support.asking import LIMIT, PARIS, asks, fresh, until_idle
from tests.support.serving import CHUNK, Running

WAITS = {names.ROUTER_ROUTE, names.PREFILL_GRANT_WAIT, names.PREFILL_QUEUE, names.DECODE_GRANT, names.DECODE_QUEUE}
TO_FIRST = [names.ROUTER_PREPARE, names.ROUTER_ROUTE, names.ROUTER_DISPATCH]


def requests() -> list[pb.GenerateRequest]:
    """Short and long, one token and many, cached and not, several choices, ended by each kind of end."""
    salt = fresh()
    return [
        asks(max_tokens=9),
        asks(max_tokens=1),
        asks(max_tokens=2, cache_salt=salt),
        asks(f"{PARIS} " * 20, max_tokens=4, cache_salt=salt),
        asks(f"{PARIS} " * 20, max_tokens=4, cache_salt=fresh(), prompt_logprobs=0),
        asks("Once upon a time", max_tokens=12, n=2, seed=1, temperature=1.0),
        asks(max_tokens=40, ignore_eos=True, stop=["The a"]),
        asks(max_tokens=9, stop_token_ids=[7042]),
        asks(None, messages=[{"role": "user", "content": "Say hello."}], max_tokens=6, echo=True),
    ]


async def run(client: Client, request: pb.GenerateRequest, stream: bool) -> str:
    """Answers it; returns its trace."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    header = f"00-{trace}-{span}-01"
    if stream:
        async for _ in client.stream(request, timeout=LIMIT, traceparent=header):
            pass
    else:
        await client.generate(request, timeout=LIMIT, traceparent=header)
    return f"{trace}/{span}"


async def traces_of(service: Running, together: bool, stream: bool) -> list[tuple[pb.GenerateRequest, str, list[Span]]]:
    asked = requests()
    async with Client(service.address) as client:
        if together:
            told = await asyncio.gather(*(run(client, request, stream) for request in asked))
        else:
            told = [await run(client, request, stream) for request in asked]
        await until_idle(client)
    parts = [each.partition("/") for each in told]
    return [(request, span, service.spans(trace)) for request, (trace, _, span) in zip(asked, parts, strict=True)]


@pytest.mark.parametrize(
    ("service", "together", "stream"),
    [("apart", True, True), ("apart", False, False), ("colocated", True, False), ("colocated", False, True)],
)
async def test_stages_touch_and_add_up(
    request: pytest.FixtureRequest, service: str, together: bool, stream: bool
) -> None:
    running: Running = request.getfixturevalue(service)
    for asked, parent, spans in await traces_of(running, together, stream):
        check_tree(spans, parent)
        told = stories(spans)
        assert len(told) == max(asked.response.n, 1)
        for story in told:
            check_story(story, asked)


def check_tree(spans: list[Span], parent: str) -> None:
    """One root, under the client's span; every other span below it and within its time; every wait with its cause."""
    (root,) = [span for span in spans if span.name == names.REQUEST]
    assert root.parent == parent
    known = {span.id: span for span in spans}
    for span in spans:
        if span is not root:
            assert span.parent in known
        assert root.start <= span.start <= span.end, (span.name, span.start - root.start, span.ns)
        if span.name in WAITS and span.ns > 1_000_000 and span.name != names.ROUTER_ROUTE:
            assert span.attributes.get(names.CAUSE), span.name


def check_story(story: Story, asked: pb.GenerateRequest) -> None:
    assert adds_up(story), (asked, story.unexplained(), [(stage.name, stage.ns) for stage in story.spine])
    assert story.ttft is not None
    assert [stage.name for stage in story.spine[:3]] == TO_FIRST
    assert story.spine[0].start == story.arrived
    for earlier, later in pairwise(story.spine):
        assert later.start == earlier.end, (earlier.name, later.name, later.start - earlier.end)
    assert story.spine[-1].name == names.LAST_DELIVERY
    assert story.spine[-1].end == story.ended


async def test_a_long_prompt_shows_every_chunk_and_its_transfer(apart: Running, client: Client) -> None:
    asked = asks(f"{PARIS} " * 40, max_tokens=3, cache_salt=fresh())
    trace = (await run(client, asked, True)).partition("/")[0]
    spans = apart.spans(trace)
    by_name: dict[str, list[Any]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    chunks = [span.attributes[names.TOKENS] for span in by_name[names.PREFILL_CHUNK]]
    (story,) = stories(spans)
    assert (sum(chunks), len(chunks)) == (story.prompt, -(-story.prompt // CHUNK)), "a span for each chunk"
    (sent,), (received,) = by_name[names.TRANSFER_SEND], by_name[names.TRANSFER_RECEIVE]
    kv = story.prompt * 30 * 2 * 3 * 64 * 4
    assert sent.attributes[names.BYTES] == received.attributes[names.BYTES] == kv
    assert story.transfer is not None
    assert story.transfer.gb_per_s > 0
    pids = {span.attributes[names.PID] for span in (sent, received)} | {story.router}
    assert len(pids) == 3, "three processes had a part in it"


async def test_a_client_without_a_trace_gets_one(apart: Running, client: Client) -> None:
    answer = await client.generate(asks(max_tokens=2), timeout=LIMIT)
    span = apart.request(answer.request_id)
    assert span.parent == ""
    assert span.attributes[names.GEN_AI_OUTPUT_TOKENS] == 2


async def test_a_refused_request_has_a_trace(apart: Running, client: Client) -> None:
    trace = secrets.token_hex(16)
    pieces = client.stream(asks(top_p=-1.0), LIMIT, f"00-{trace}-{secrets.token_hex(8)}-01")
    with pytest.raises(Exception, match="top_p"):
        await anext(pieces)
    (root,) = apart.spans(trace)
    assert root.attributes[names.ERROR_CODE] == "InvalidRequest"
