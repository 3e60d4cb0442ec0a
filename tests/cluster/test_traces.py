"""The trace reader adds up what a file says, shows what nobody explains, and refuses what is no trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from diptych.cluster.config import TelemetryConfig
from diptych.cluster.telemetry import start_telemetry
from diptych.cluster.traces import adds_up, read_spans, report, show, stories
from diptych.contract import telemetry as names
from diptych.contract.errors import ConfigInvalid

MS = 1_000_000
BASE = 1_700_000_000_000  # ms since the epoch
SPINE = [
    (names.ROUTER_ROUTE, 2, 3),
    (names.ROUTER_DISPATCH, 3, 5),
    (names.PREFILL_GRANT_WAIT, 5, 6),
    (names.PREFILL_QUEUE, 6, 7),
    (names.PREFILL_CHUNK, 7, 20),
    (names.PREFILL_CHUNK, 20, 40),
    (names.HANDOVER, 40, 50),
    (names.DECODE_QUEUE, 50, 51),
    (names.DECODE_STEPS, 51, 100),
    (names.DECODE_PREEMPTED, 100, 110),
    (names.PREFILL_CHUNK, 110, 120),
    (names.DECODE_STEPS, 120, 140),
    (names.LAST_DELIVERY, 140, 142),
]


def write(path: Path, spine: list[tuple[str, int, int]] = SPINE, choices: int = 1) -> None:
    """A trace file as a router would leave it, exported by the real exporter."""
    telemetry = start_telemetry(TelemetryConfig(file=path), "test", "0", install=False)
    assert telemetry.provider is not None
    tracer = telemetry.provider.get_tracer("test")
    from opentelemetry.trace import set_span_in_context

    def draw(name: str, start: int, end: int, parent: object, **attributes: object) -> object:
        context = set_span_in_context(parent) if parent else None  # type: ignore[arg-type]
        span = tracer.start_span(name, context=context, start_time=(BASE + start) * MS, attributes=attributes)  # type: ignore[arg-type]
        if name not in (names.REQUEST, names.ATTEMPT, names.HANDOVER):
            span.end((BASE + end) * MS)
        return span

    root = draw(names.REQUEST, 0, 142, None, **{names.REQUEST_ID: "req-12345678", names.GEN_AI_INPUT_TOKENS: 37})
    draw(names.ROUTER_PREPARE, 0, 2, root)
    for choice in range(choices):
        attempt = draw(names.ATTEMPT, 2, 142, root, **{names.CHOICE: choice, names.TERMINAL: "stop"})
        for name, start, end in spine:
            pid = 22 if name.startswith("decode") or start >= 100 else 11
            span = draw(name, start, end, attempt, **{names.PID: pid})
            if name == names.HANDOVER:
                moved = {names.BYTES: 8 * MS, names.WIRE_NS: 4 * MS, names.MESSAGES: 2}
                draw(names.TRANSFER_SEND, 30, 47, span, **moved, **{names.PID: 11})
                draw(names.TRANSFER_RECEIVE, 31, 48, span, **moved, **{names.PID: 22})
                span.end((BASE + end) * MS)  # type: ignore[attr-defined]
        draw(names.FIRST_DELIVERY, 40, 43, attempt)
        draw(names.DECODE_GRANT, 3, 5, attempt, **{names.BESIDE: True})
        attempt.end((BASE + 142) * MS)  # type: ignore[attr-defined]
    root.end((BASE + 142) * MS)  # type: ignore[attr-defined]
    assert telemetry.stop()


def test_stages_add_up_to_both_times(tmp_path: Path) -> None:
    write(tmp_path / "t")
    (story,) = stories(read_spans(tmp_path / "t"))
    assert (story.request, story.prompt, story.terminal) == ("req-12345678", 37, "stop")
    assert story.ttft == 43 * MS
    assert story.total == 142 * MS
    assert story.unexplained() == (0, 0)
    assert adds_up(story)
    assert story.after_first()[0].name == names.HANDOVER
    assert story.transfer is not None
    assert story.transfer.gb_per_s == pytest.approx(2.0)
    assert (story.transfer.sender, story.transfer.receiver) == (11, 22)


def test_a_gap_is_shown_as_unexplained(tmp_path: Path) -> None:
    write(tmp_path / "t", [stage for stage in SPINE if stage[0] not in (names.ROUTER_DISPATCH, names.DECODE_PREEMPTED)])
    (story,) = stories(read_spans(tmp_path / "t"))
    assert story.unexplained() == (2 * MS, 12 * MS)
    assert not adds_up(story)
    assert "do NOT add up" in str(report([story])[-1])


def test_the_tables_name_processes_and_rates(tmp_path: Path) -> None:
    write(tmp_path / "t", choices=2)
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    assert show(tmp_path / "t", console) == 2
    text = console.export_text()
    for shown in ("12345678", "12345678 #1", "11 → 22", "2.00", "8.00", "43.00", "142.00", "16.00 MB of KV in 2"):
        assert shown in text, text


def test_a_request_that_was_refused_is_told_too(tmp_path: Path) -> None:
    telemetry = start_telemetry(TelemetryConfig(file=tmp_path / "t"), "test", "0", install=False)
    assert telemetry.provider is not None
    root = telemetry.provider.get_tracer("test").start_span(
        names.REQUEST, attributes={names.ERROR_CODE: "InvalidRequest"}
    )
    root.end()
    telemetry.stop()
    (story,) = stories(read_spans(tmp_path / "t"))
    assert story.terminal == "InvalidRequest"
    assert story.ttft is None


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]})])
def test_a_file_that_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad").write_text(text)
    with pytest.raises(ConfigInvalid, match="Line 1"):
        read_spans(tmp_path / "bad")
    with pytest.raises(ConfigInvalid, match="nothing"):
        read_spans(tmp_path / "nothing")
