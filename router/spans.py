"""Draws a finished request's trace from what its stages tell, as `contract.telemetry` describes the tree.

Owns the mapping of every process's clock to wall time and the stitching of stages into the two chains. A chain's
borders are events, never differences: the router's own marks, and stages that workers measured; a stage that crosses
processes starts where the stage before it ended. What the chain does not explain is an attribute, not a stage.

Uses OpenTelemetry's API only, and draws in a thread of its own: the loop only opens the root.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from diptych.contract import telemetry as names
from diptych.contract.wire import Stage
from diptych.router.call import Call
from diptych.router.choice import Choice, Part

log = logging.getLogger(__name__)

_EPOCH = time.time_ns() - time.monotonic_ns()
_TRANSFER = (names.TRANSFER_SEND, names.TRANSFER_RECEIVE)
MAX_WAITING = 4096  # calls, each with its prompt and stages: what a stalled exporter may cost in memory
_propagator = TraceContextTextMapPropagator()


class Bar(msgspec.Struct):
    """One span to draw; start, end: ns on our monotonic clock."""

    name: str
    start: int
    end: int
    attributes: dict[str, Any] = {}


class Chains(msgspec.Struct):
    """One choice's bars. spine: contiguous from the request's arrival to the last delivery. first: the delivery of the
    first token, which leaves the spine. handover, transfers: on it and under it. beside: what explains no time of its
    own."""

    spine: list[Bar]
    first: Bar | None
    transfers: list[Bar]
    beside: list[Bar]

    @property
    def explained(self) -> int:
        return sum(bar.end - bar.start for bar in self.spine)


class Artist:
    """`open` and `draw` on the loop; `close` draws what is left. provider: the process's own if None. places: calls
    that may wait to be drawn; one more is dropped, and counted in `dropped`."""

    def __init__(self, model: str, provider: trace.TracerProvider | None = None, places: int = MAX_WAITING) -> None:
        self._tracer = (provider or trace.get_tracer_provider()).get_tracer("diptych.router")
        self._model = model
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="spans")
        self._places = threading.Semaphore(places)
        self.dropped = 0

    def open(self, received: int, metadata: Mapping[str, str]) -> tuple[Span, str]:
        """(the root span, its traceparent). Its parent is the client's, when it sent one."""
        parent = _propagator.extract(metadata)
        root = self._tracer.start_span(
            names.REQUEST, context=parent, kind=SpanKind.SERVER, start_time=received + _EPOCH
        )
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context=trace.set_span_in_context(root))
        return root, carrier.get("traceparent", "")

    def draw(self, call: Call) -> None:
        """The call must be over. Costs the caller nothing when nothing is recorded."""
        if not call.root.is_recording():
            return
        if self._places.acquire(blocking=False):
            self._hand.submit(self._draw, call).add_done_callback(self._drawn)
            return
        self.dropped += 1
        if self.dropped == 1:
            log.warning("traces come faster than they can be drawn: some are dropped")

    def close(self) -> None:
        self._hand.shutdown(wait=True)
        if self.dropped:
            log.warning("%d traces were dropped", self.dropped)

    def _drawn(self, future: Future[None]) -> None:
        self._places.release()
        error = future.exception()
        if error is not None:
            log.error("a trace could not be drawn", exc_info=error)

    def _draw(self, call: Call) -> None:
        context = trace.set_span_in_context(call.root)
        ends = [self._choice(call, choice, context) for choice in call.choices]
        if call.prepared_at:
            self._bar(Bar(names.ROUTER_PREPARE, call.received, call.prepared_at), context)
        end, unexplained = max(ends, default=(call.ended_at or call.received, 0))
        self._close_root(call, end, unexplained)

    def _close_root(self, call: Call, end: int, unexplained: int) -> None:
        root = call.root
        firsts = [choice.marks.first_delivered for choice in call.choices if choice.marks.first_delivered]
        terminal = next((choice.terminal.reason for choice in call.choices if choice.terminal), "error")
        if call.error is not None:
            terminal = "cancelled" if call.error.code == "Cancelled" else "error"
            root.set_attribute(names.ERROR_CODE, call.error.code)
            root.set_status(Status(StatusCode.ERROR, str(call.error)))
        root.set_attributes({names.TERMINAL: terminal, names.UNEXPLAINED_NS: unexplained, names.REQUEST_ID: call.id})
        if firsts:
            root.set_attribute(names.TTFT_NS, min(firsts) - call.received)
        root.set_attributes({names.GEN_AI_OPERATION: "text_completion", names.GEN_AI_MODEL: self._model})
        if call.prepared is not None:
            root.set_attribute(names.GEN_AI_INPUT_TOKENS, len(call.prepared.prompt))
            root.set_attribute(names.GEN_AI_OUTPUT_TOKENS, sum(choice.next for choice in call.choices))
            reasons = [choice.terminal.reason for choice in call.choices if choice.terminal]
            root.set_attribute(names.GEN_AI_FINISH_REASONS, reasons)
        root.end(end + _EPOCH)

    def _choice(self, call: Call, choice: Choice, context: Context) -> tuple[int, int]:
        """Draws one choice; returns (its end, what its spine does not explain of the request's time up to there)."""
        assert choice.terminal is not None
        failed = choice.terminal.error
        end = choice.marks.last_delivered if failed is None and choice.marks.last_delivered else choice.terminal.at
        chains = stitch(call, choice, end)
        unexplained = end - call.received - chains.explained
        attempt = self._tracer.start_span(
            names.ATTEMPT,
            context=context,
            start_time=call.prepared_at + _EPOCH,
            attributes={
                names.ATTEMPT_NUMBER: choice.attempt,
                names.CHOICE: choice.index,
                names.WORKER: list(choice.parts),
                names.TERMINAL: choice.terminal.reason,
                names.UNEXPLAINED_NS: unexplained,
            },
        )
        if failed is not None:
            attempt.set_attribute(names.ERROR_CODE, failed.code)
            attempt.set_status(Status(StatusCode.ERROR, str(failed)))
        self._bars(chains, trace.set_span_in_context(attempt))
        attempt.end(end + _EPOCH)
        return end, unexplained

    def _bars(self, chains: Chains, inside: Context) -> None:
        under = inside
        for bar in chains.spine:
            if bar.name == names.ROUTER_PREPARE:
                continue  # of all choices together: the root's own child
            drawn = self._bar(bar, inside)
            if bar.name == names.HANDOVER:
                under = trace.set_span_in_context(drawn)
        for bar in [*chains.beside, *([chains.first] if chains.first else [])]:
            self._bar(bar, inside)
        for bar in chains.transfers:
            self._bar(bar, under)

    def _bar(self, bar: Bar, context: Context) -> Span:
        span = self._tracer.start_span(
            bar.name, context=context, start_time=bar.start + _EPOCH, attributes=bar.attributes
        )
        span.end(bar.end + _EPOCH)
        return span


def stitch(call: Call, choice: Choice, end: int) -> Chains:
    """The choice's chains, cut off at `end`."""
    marks = choice.marks
    spine = [Bar(names.ROUTER_PREPARE, call.received, call.prepared_at)]
    cause = {names.CAUSE: choice.cause} if choice.cause else {}
    spine.append(Bar(names.ROUTER_ROUTE, call.prepared_at, marks.routed or end, cause))
    chains = Chains(spine, None, [], [])
    if not marks.routed:
        return chains
    source = choice.first_from or choice.prompt_part
    before, after = _split(source, marks.first_drawn)
    if before:
        spine.append(Bar(names.ROUTER_DISPATCH, marks.routed, before[0].start))
        spine += before
    if marks.first_delivered and before:
        chains.first = Bar(names.FIRST_DELIVERY, before[-1].end, marks.first_delivered)
    if choice.last_from is not source and choice.last_from is not None:
        after = _handover(choice, before)
    spine += after
    _cut(spine, _last_drawn(choice) or end)
    if marks.last_delivered and choice.terminal is not None and choice.terminal.error is None:
        spine.append(Bar(names.LAST_DELIVERY, spine[-1].end, marks.last_delivered))
    _beside(choice, source, chains)
    return chains


def _split(part: Part | None, first_drawn: int) -> tuple[list[Bar], list[Bar]]:
    """A worker's stages up to the first token, and those after it."""
    stages = [stage for stage in _stages(part) if stage.name not in _TRANSFER]
    if part is None or not first_drawn:
        return _bars(part, stages), []
    before = [stage for stage in stages if stage.end <= first_drawn]
    return _bars(part, before), _bars(part, stages[len(before) :])


def _handover(choice: Choice, before: list[Bar]) -> list[Bar]:
    """Decode's stages after the first token. The stage under way then, usually the hand-over, starts with that token:
    on the other worker's clock, so it cannot know it itself."""
    part = choice.last_from
    bars = [bar for bar in _bars(part, _stages(part)) if bar.name not in (*_TRANSFER, names.DECODE_GRANT)]
    if before:
        bars = [bar for bar in bars if bar.end > before[-1].end]
    if bars and before:
        bars[0].start = before[-1].end
    return bars


def _beside(choice: Choice, source: Part | None, chains: Chains) -> None:
    """Transfers, and the wait for decode's grant, which overlaps prefill's."""
    for part in choice.parts.values():
        for bar in _bars(part, _stages(part)):
            if bar.name in _TRANSFER:
                chains.transfers.append(bar)
            elif bar.name == names.DECODE_GRANT and part is not source:
                bar.attributes[names.BESIDE] = True
                chains.beside.append(bar)


def _cut(spine: list[Bar], limit: int) -> None:
    """What workers did after the last token that counts belongs to no chain."""
    while len(spine) > 1 and spine[-1].start >= limit:
        spine.pop()
    spine[-1].end = min(spine[-1].end, limit)


def _last_drawn(choice: Choice) -> int:
    if choice.terminal is None or choice.terminal.error is not None or choice.last_from is None:
        return 0
    return choice.marks.last_drawn + choice.last_from.session.clock.estimate()[0]


def _stages(part: Part | None) -> tuple[Stage, ...]:
    return part.ended.stages if part is not None and part.ended is not None else ()


def _bars(part: Part | None, stages: tuple[Stage, ...] | list[Stage]) -> list[Bar]:
    """Stages on our clock, with what is known of the process that measured them."""
    if part is None:
        return []
    info = part.session.worker
    offset, error = part.session.clock.estimate()
    common = {
        names.ROLE: info.role,
        names.WORKER: info.id,
        names.PID: info.engine_pids[0] if info.engine_pids else info.pid,
        names.CLOCK_OFFSET_NS: offset,
        names.CLOCK_ERROR_NS: error,
    }
    return [Bar(stage.name, stage.start + offset, stage.end + offset, common | stage.attributes) for stage in stages]
