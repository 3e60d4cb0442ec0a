"""The trace reader: from an OTLP file alone, where each request's time went.

Owns reading the file and adding up; draws nothing live and asks no process. Every number is a recorded stage or a sum
of recorded stages; what the stages of a request do not cover is shown as unexplained, never spread over them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

from diptych.contract import telemetry as names
from diptych.contract.errors import ConfigInvalid

_BESIDE = (names.TRANSFER_SEND, names.TRANSFER_RECEIVE, names.FIRST_DELIVERY)
"""Stages that always overlap others. Every other child of an attempt lies on its chain to the last token, unless it
says itself that it does not."""


class Span(msgspec.Struct, frozen=True):
    """start, end: ns since the epoch. process: the pid of the process that exported it."""

    trace: str
    id: str
    parent: str
    name: str
    start: int
    end: int
    attributes: dict[str, Any]
    process: int

    @property
    def ns(self) -> int:
        return self.end - self.start


class Transfer(msgspec.Struct, frozen=True):
    """The KV of one hand-over as its receiver measured it. wire_ns: the time that bytes were on the wire."""

    bytes: int
    messages: int
    wire_ns: int
    sender: int
    receiver: int

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.wire_ns if self.wire_ns else 0.0


class Story(msgspec.Struct, frozen=True):
    """One attempt of one choice of one request. ns throughout.

    spine: the contiguous stages from arrival to the end, in order. first: the first token's delivery, if there was one.
    """

    request: str
    choice: int
    attempt: int
    terminal: str
    prompt: int
    cached: int
    output: int
    router: int
    arrived: int
    ended: int
    spine: tuple[Span, ...]
    first: Span | None
    transfer: Transfer | None

    @property
    def total(self) -> int:
        return self.ended - self.arrived

    @property
    def ttft(self) -> int | None:
        return self.first.end - self.arrived if self.first else None

    def before_first(self) -> list[Span]:
        """Stages up to the first token drawn; all of them if none was."""
        return [stage for stage in self.spine if self.first is None or stage.end <= self.first.start]

    def after_first(self) -> list[Span]:
        return list(self.spine[len(self.before_first()) :])

    def unexplained(self) -> tuple[int, int]:
        """What the stages do not cover of (the time to the first token, the whole time)."""
        total = self.total - sum(stage.ns for stage in self.spine)
        if self.first is None:
            return 0, total
        assert self.ttft is not None
        return self.ttft - self.first.ns - sum(stage.ns for stage in self.before_first()), total


def read_spans(path: Path) -> list[Span]:
    """All spans of an OTLP JSON-lines file. Raises `ConfigInvalid` with the line that is none."""
    spans: list[Span] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"The trace file {path} cannot be read: {error}.") from None
    for number, line in enumerate(lines, 1):
        try:
            spans += _spans(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigInvalid(f"Line {number} of {path} is no OTLP trace: {error!r}.") from None
    return spans


def stories(spans: Iterable[Span]) -> list[Story]:
    """Every attempt in the file, in the order of arrival."""
    children: dict[tuple[str, str], list[Span]] = defaultdict(list)
    roots = []
    for span in spans:
        children[span.trace, span.parent].append(span)
        if span.name == names.REQUEST:
            roots.append(span)
    told = [story for root in roots for story in _told(root, children)]
    return sorted(told, key=lambda story: (story.arrived, story.request, story.choice, story.attempt))


def show(path: Path, console: Console) -> int:
    """Prints the tables of a trace file; returns the number of attempts in it."""
    told = stories(read_spans(path))
    for part in report(told):
        console.print(part)
    return len(told)


def report(told: list[Story]) -> list[RenderableType]:
    """The two tables, and the check that the stages add up."""
    if not told:
        return ["The trace holds no request."]
    return [_first_table(told), _last_table(told), _verdict(told)]


def _told(root: Span, children: dict[tuple[str, str], list[Span]]) -> list[Story]:
    below = children[root.trace, root.id]
    shared = [span for span in below if span.name == names.ROUTER_PREPARE]
    attempts = [span for span in below if span.name == names.ATTEMPT]
    return [_story(root, attempt, shared, children) for attempt in attempts or [root]]


def _story(root: Span, attempt: Span, shared: list[Span], children: dict[tuple[str, str], list[Span]]) -> Story:
    own = children[root.trace, attempt.id] if attempt is not root else []
    spine = sorted([*shared, *(span for span in own if not _beside(span))], key=lambda span: span.start)
    inside = [below for span in own for below in children[root.trace, span.id]] + own
    return Story(
        request=str(root.attributes.get(names.REQUEST_ID, root.trace[:12])),
        choice=int(attempt.attributes.get(names.CHOICE, 0)),
        attempt=int(attempt.attributes.get(names.ATTEMPT_NUMBER, 0)),
        terminal=str(attempt.attributes.get(names.ERROR_CODE) or attempt.attributes.get(names.TERMINAL, "?")),
        prompt=int(root.attributes.get(names.GEN_AI_INPUT_TOKENS, 0)),
        cached=max((int(span.attributes.get(names.CACHED_TOKENS, 0)) for span in own), default=0),
        output=int(
            attempt.attributes.get(names.GEN_AI_OUTPUT_TOKENS, root.attributes.get(names.GEN_AI_OUTPUT_TOKENS, 0))
        ),
        router=root.process,
        arrived=root.start,
        ended=attempt.end,
        spine=tuple(spine),
        first=next((span for span in own if span.name == names.FIRST_DELIVERY), None),
        transfer=_transfer(inside),
    )


def _beside(span: Span) -> bool:
    return span.name in _BESIDE or bool(span.attributes.get(names.BESIDE))


def _transfer(spans: list[Span]) -> Transfer | None:
    sent = next((span for span in spans if span.name == names.TRANSFER_SEND), None)
    received = next((span for span in spans if span.name == names.TRANSFER_RECEIVE), None)
    measured = received or sent
    if measured is None:
        return None
    return Transfer(
        bytes=int(measured.attributes.get(names.BYTES, 0)),
        messages=int(measured.attributes.get(names.MESSAGES, 0)),
        wire_ns=int(measured.attributes.get(names.WIRE_NS, 0)),
        sender=int(sent.attributes.get(names.PID, 0)) if sent else 0,
        receiver=int(received.attributes.get(names.PID, 0)) if received else 0,
    )


def _first_table(told: list[Story]) -> Table:
    table = Table(title="To the first token (ms)", title_justify="left")
    columns = ("prepare", "route", "dispatch", "grant wait", "queue", "prefill", "chunks", "deliver")
    _head(table, "request", "prompt", "cached", *columns, "= TTFT", "unexplained", "prefill pid")
    for story in told:
        stages = story.before_first()
        gap, _ = story.unexplained()
        table.add_row(
            _name(story),
            str(story.prompt),
            str(story.cached),
            _ms(stages, names.ROUTER_PREPARE),
            _ms(stages, names.ROUTER_ROUTE),
            _ms(stages, names.ROUTER_DISPATCH),
            _ms(stages, names.PREFILL_GRANT_WAIT, names.DECODE_GRANT),
            _ms(stages, names.PREFILL_QUEUE),
            _ms(stages, names.PREFILL_CHUNK),
            str(sum(stage.name == names.PREFILL_CHUNK for stage in stages)),
            _ms([story.first] if story.first else [], names.FIRST_DELIVERY),
            f"{story.ttft / 1e6:.2f}" if story.ttft is not None else "-",
            f"{gap / 1e6:.2f}",
            _pid(stages, names.PREFILL_CHUNK),
        )
    return table


def _last_table(told: list[Story]) -> Table:
    table = Table(title="To the last token (ms)", title_justify="left")
    columns = ("first drawn", "hand-over", "KV MB", "GB/s", "queue", "decode", "preempted", "deliver", "= total")
    _head(table, "request", "tokens", *columns, "unexplained", "pids: router, prefill → decode", "ended")
    for story in told:
        table.add_row(*_last_row(story))
    return table


def _last_row(story: Story) -> list[str]:
    later = story.after_first()
    moved = story.transfer
    # After a preemption, decode prefills again: that is time lost to the preemption.
    lost = sum(stage.ns for stage in later if stage.name in (names.DECODE_PREEMPTED, names.PREFILL_CHUNK))
    pids = [str(story.router), _pid(story.before_first(), names.PREFILL_CHUNK)]
    return [
        _name(story),
        str(story.output),
        f"{sum(stage.ns for stage in story.before_first()) / 1e6:.2f}",
        _ms(later, names.HANDOVER),
        f"{moved.bytes / 1e6:.2f}" if moved else "-",
        f"{moved.gb_per_s:.2f}" if moved else "-",
        _ms(later, names.DECODE_QUEUE),
        _ms(later, names.DECODE_STEPS),
        f"{lost / 1e6:.2f}",
        _ms(later, names.LAST_DELIVERY),
        f"{story.total / 1e6:.2f}",
        f"{story.unexplained()[1] / 1e6:.2f}",
        f"{', '.join(pids)} → {_pid(later, names.DECODE_STEPS)}",
        story.terminal,
    ]


def _verdict(told: list[Story]) -> str:
    moved = [story.transfer for story in told if story.transfer]
    gaps = [gap for story in told for gap in story.unexplained()]
    worst = max(abs(gap) for gap in gaps)
    within = all(adds_up(story) for story in told)
    kv = f"{sum(transfer.bytes for transfer in moved) / 1e6:.2f} MB of KV in {len(moved)} hand-overs"
    verdict = "add up" if within else "do NOT add up"
    return f"{len(told)} requests, {kv}. Stages {verdict}; the largest unexplained time is {worst / 1e6:.3f} ms."


def adds_up(story: Story) -> bool:
    """Whether the stages explain both times within 1 % or 0.5 ms, whichever is more."""
    first, total = story.unexplained()
    return abs(first) <= max(0.01 * (story.ttft or 0), 5e5) and abs(total) <= max(0.01 * story.total, 5e5)


def _head(table: Table, *titles: str) -> None:
    for title in titles:
        table.add_column(title, justify="left" if title in ("request", "ended") else "right")


def _name(story: Story) -> str:
    tail = f" #{story.choice}" if story.choice else ""
    return story.request.removeprefix("req-")[:8] + tail + (f" try {story.attempt}" if story.attempt > 1 else "")


def _ms(stages: Iterable[Span], *wanted: str) -> str:
    return f"{sum(stage.ns for stage in stages if stage.name in wanted) / 1e6:.2f}"


def _pid(stages: Iterable[Span], name: str) -> str:
    pids = {stage.attributes.get(names.PID) for stage in stages if stage.name == name}
    return ", ".join(sorted(str(pid) for pid in pids if pid)) or "-"


def _spans(tree: dict[str, Any]) -> list[Span]:
    return [
        _span(span, int(_attributes(resource.get("resource", {})).get("process.pid", 0)))
        for resource in tree["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _span(span: dict[str, Any], process: int) -> Span:
    return Span(
        trace=span["traceId"],
        id=span["spanId"],
        parent=span.get("parentSpanId", ""),
        name=span["name"],
        start=int(span["startTimeUnixNano"]),
        end=int(span["endTimeUnixNano"]),
        attributes=_attributes(span),
        process=process,
    )


def _attributes(item: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: _value(entry["value"]) for entry in item.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_value(entry) for entry in value["arrayValue"].get("values", ())]
    return next((value[kind] for kind in ("stringValue", "doubleValue", "boolValue") if kind in value), None)
