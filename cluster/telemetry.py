"""OpenTelemetry's SDK, set up in the one process that draws spans; every other module uses the API only.

Owns where spans go: a file of OTLP JSON lines, an OTLP/gRPC collector, both, or nowhere. Does not know what the spans
mean. Exporting never delays a request: spans wait in a bounded queue and are dropped beyond it, and `stop` takes five
seconds at most, since the SDK alone waits half a minute for a collector that is down.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from diptych.cluster.config import TelemetryConfig

STOP_LIMIT = 5.0
DELAY_MS = 500
QUEUE = 1 << 16


class FileSpanExporter(SpanExporter):
    """Appends each batch as one line of OTLP JSON (what a collector's file exporter writes).

    Several processes may append to one file: a line is one write to a file opened for appending.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        line = json.dumps(_otlp_json(spans), separators=(",", ":")).encode() + b"\n"
        return SpanExportResult.SUCCESS if os.write(self._file, line) == len(line) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        os.close(self._file)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class Telemetry:
    """The running set-up of one process. `stop` flushes what is queued, within `STOP_LIMIT` whatever the collector
    does; spans that end later are dropped."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self.provider = provider

    def stop(self) -> bool:
        """False if something may be lost because the limit was reached."""
        if self.provider is None:
            return True
        stopper = threading.Thread(target=self.provider.shutdown, name="telemetry-stop", daemon=True)
        stopper.start()
        stopper.join(STOP_LIMIT)
        return not stopper.is_alive()


def start_telemetry(config: TelemetryConfig, service: str, version: str, *, install: bool = True) -> Telemetry:
    """Makes the provider; with `install`, as this process's global one. None is made when nothing would be exported."""
    exporters = _exporters(config)
    if not exporters:
        return Telemetry(None)
    resource = Resource.create(
        {
            "service.name": service,
            "service.version": version,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "process.pid": os.getpid(),
            "host.name": socket.gethostname(),
        }
    )
    # Stopped by its owner, once: not a second time, and unbounded, when the interpreter ends.
    provider = TracerProvider(
        resource=resource, sampler=ParentBased(TraceIdRatioBased(config.sample)), shutdown_on_exit=False
    )
    for exporter in exporters:
        provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=QUEUE, schedule_delay_millis=DELAY_MS, max_export_batch_size=512
            )
        )
    if install:
        trace.set_tracer_provider(provider)
    return Telemetry(provider)


def _exporters(config: TelemetryConfig) -> list[SpanExporter]:
    exporters: list[SpanExporter] = []
    if config.file is not None:
        exporters.append(FileSpanExporter(config.file))
    if config.endpoint:
        secure = config.endpoint.startswith("https://")
        exporters.append(OTLPSpanExporter(endpoint=config.endpoint, insecure=not secure, timeout=STOP_LIMIT))
    return exporters


def _otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """OTLP's JSON differs from protobuf's: ids are hex, enumerations are numbers."""
    tree: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in tree["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                _ids_to_hex(span)
                for link in span.get("links", ()):
                    _ids_to_hex(link)
    return tree


def _ids_to_hex(item: dict[str, Any]) -> None:
    for name in ("traceId", "spanId", "parentSpanId"):
        if item.get(name):
            item[name] = base64.b64decode(item[name]).hex()
