"""The trace of a request: one tree, contiguous chains that add up, an attempt span even for what was lost."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diptych.contract import telemetry as names
from diptych.contract.errors import DiptychError, Internal
from diptych.router.call import Call
from diptych.router.client import ask
from diptych.router.spans import Artist
from tests.router.service import Service, service, until

IDS = [504, 3575, 282]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TO_FIRST = (
    names.ROUTER_PREPARE,
    names.ROUTER_ROUTE,
    names.ROUTER_DISPATCH,
    names.PREFILL_GRANT_WAIT,
    names.PREFILL_QUEUE,
    names.PREFILL_CHUNK,
)
AFTER = (names.HANDOVER, names.DECODE_QUEUE, names.DECODE_STEPS, names.DECODE_PREEMPTED)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


async def drawn(s: Service, exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    await s.idle()
    await until(lambda: any(span.name == names.REQUEST for span in exporter.get_finished_spans()))
    found: dict[str, list[ReadableSpan]] = {}
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0):
        found.setdefault(span.name, []).append(span)
    exporter.clear()
    return found


def length(spans: Sequence[ReadableSpan]) -> int:
    return sum((span.end_time or 0) - (span.start_time or 0) for span in spans)


def contiguous(spans: Sequence[ReadableSpan]) -> None:
    for before, after in itertools.pairwise(spans):
        assert before.end_time == after.start_time, (before.name, after.name)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("colocated",)])
async def test_stages_add_up(
    demo_model: Path, tracing: TracerProvider, exporter: InMemorySpanExporter, roles: tuple[str, ...]
) -> None:
    async with service(demo_model, roles, tracing=tracing) as s:
        async for _ in s.client.stream(ask(token_ids=IDS, max_tokens=20), traceparent=PARENT):
            pass
        found = await drawn(s, exporter)
        root = found[names.REQUEST][0]
        assert root.parent is not None
        assert f"{root.parent.trace_id:032x}-{root.parent.span_id:016x}" in PARENT
        first = [span for name in TO_FIRST for span in found.get(name, [])]
        contiguous([*first, found[names.FIRST_DELIVERY][0]])
        rest = [span for name in AFTER for span in found.get(name, [])]
        contiguous([*first, *rest, found[names.LAST_DELIVERY][0]])
        assert root.attributes is not None
        assert length([*first, found[names.FIRST_DELIVERY][0]]) == root.attributes[names.TTFT_NS]
        assert length([*first, *rest, found[names.LAST_DELIVERY][0]]) == length([root])
        assert root.attributes[names.UNEXPLAINED_NS] == 0
        assert root.attributes[names.TERMINAL] == "length"
        ids = {span.context.span_id for spans in found.values() for span in spans if span.context}
        for spans in found.values():
            for span in spans:
                assert span is root or (span.parent is not None and span.parent.span_id in ids)
                assert (span.start_time or 0) >= (root.start_time or 0)
                assert (span.end_time or 0) <= (root.end_time or 0)


async def test_workers_are_told_the_trace(demo_model: Path, tracing: TracerProvider) -> None:
    async with service(demo_model, tracing=tracing) as s:
        await s.client.generate(ask(token_ids=IDS, max_tokens=2), traceparent=PARENT)
        assert s.prefill.received[0].request.traceparent.startswith("00-0af7651916cd43dd8448eb211c80319c-")


async def test_what_comes_after_a_stop_string_is_cut(
    demo_model: Path, tracing: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    async with service(demo_model, tracing=tracing) as s:
        answer = await s.client.generate(ask(token_ids=IDS, max_tokens=8))
        await drawn(s, exporter)
        stop = answer.choices[0].text.strip()[2:5]
        stopped = await s.client.generate(ask(token_ids=IDS, max_tokens=500, stop=[stop]))
        assert stopped.choices[0].stop_string == stop
        root = (await drawn(s, exporter))[names.REQUEST][0]
        assert root.attributes is not None
        assert root.attributes[names.UNEXPLAINED_NS] == 0
        assert root.attributes[names.TERMINAL] == "stop"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_lost_attempt_has_a_span(
    demo_model: Path, tracing: TracerProvider, exporter: InMemorySpanExporter, side: str
) -> None:
    async with service(demo_model, tracing=tracing) as s:
        s.prefill.hold_first.clear()
        asking = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=9)))
        await until(lambda: bool(s.prefill.working and s.decode.working))
        await s.peers.pop(side).kill()
        with pytest.raises(DiptychError):
            await asking
        found = await drawn(s, exporter)
        attempt, root = found[names.ATTEMPT][0], found[names.REQUEST][0]
        for span in (attempt, root):
            assert span.attributes is not None
            assert span.attributes[names.ERROR_CODE] == ("PrefillLost" if side == "prefill" else "DecodeLost")
            assert not span.status.is_ok
        assert attempt.attributes is not None
        assert len(attempt.attributes[names.WORKER]) == 2  # type: ignore[arg-type]


async def test_a_refused_request_has_a_root(
    demo_model: Path, tracing: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    async with service(demo_model, (), tracing=tracing) as s:
        with pytest.raises(DiptychError):
            await s.client.generate(ask(token_ids=IDS, temperature=-1))
        found = await drawn(s, exporter)
        assert list(found) == [names.REQUEST]
        assert (found[names.REQUEST][0].attributes or {})[names.ERROR_CODE] == "InvalidRequest"


async def test_what_failed_by_a_bug_says_so(
    demo_model: Path, tracing: TracerProvider, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the trace and to the client, before the first token and after the last."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with service(demo_model, tracing=tracing) as s:
        for owner, name in ((s.router._preparer, "prepare"), (s.router._replies, "whole")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, broken)
                with pytest.raises(Internal, match="ZeroDivisionError"):
                    await s.client.generate(ask(token_ids=IDS, max_tokens=2))
            root = (await drawn(s, exporter))[names.REQUEST][0]
            assert (root.attributes or {})[names.ERROR_CODE] == "Internal"


async def test_traces_that_nobody_takes_are_dropped_and_counted() -> None:
    gate = threading.Event()

    class Slow(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            gate.wait(10)

    provider = TracerProvider()
    provider.add_span_processor(Slow())
    artist = Artist("m", provider, places=2)
    for number in range(5):
        root, traceparent = artist.open(time.monotonic_ns(), {})
        artist.draw(Call(f"req-{number}", time.monotonic_ns(), 1.0, root, traceparent))
    assert artist.dropped == 3
    gate.set()
    await asyncio.to_thread(artist.close)
