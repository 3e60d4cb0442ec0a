"""The OTLP file as other programs read it, and a stop that is bounded when the collector is down."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from diptych.cluster.config import TelemetryConfig
from diptych.cluster.telemetry import start_telemetry


def test_the_file_holds_otlp_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.jsonl"
    telemetry = start_telemetry(TelemetryConfig(file=path), "diptych", "0", install=False)
    assert telemetry.provider is not None
    tracer = telemetry.provider.get_tracer("test")
    root = tracer.start_span("root", start_time=10, attributes={"n": 3, "s": "é"})
    root.end(end_time=20)
    assert telemetry.stop()
    (line,) = path.read_text().splitlines()
    (resource,) = json.loads(line)["resourceSpans"]
    (span,) = resource["scopeSpans"][0]["spans"]
    context = root.get_span_context()
    assert span["traceId"] == f"{context.trace_id:032x}"
    assert span["spanId"] == f"{context.span_id:016x}"
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("10", "20")
    assert span["kind"] == 1
    assert {"key": "n", "value": {"intValue": "3"}} in span["attributes"]
    assert "service.instance.id" in {item["key"] for item in resource["resource"]["attributes"]}


def test_nothing_to_export_makes_no_provider() -> None:
    telemetry = start_telemetry(TelemetryConfig(), "diptych", "0", install=False)
    assert telemetry.provider is None
    assert telemetry.stop()


def test_stop_is_bounded_when_the_collector_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1.0
    monkeypatch.setattr("diptych.cluster.telemetry.STOP_LIMIT", limit)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = TelemetryConfig(file=tmp_path / "t", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        telemetry = start_telemetry(config, "diptych", "0", install=False)
        assert telemetry.provider is not None
        telemetry.provider.get_tracer("test").start_span("lost").end()
        started = time.monotonic()
        telemetry.stop()
        assert time.monotonic() - started < limit + 1
    assert "lost" in (tmp_path / "t").read_text()
