"""`diptych serve` as its own process, for tests that only speak gRPC to it: started once, shared by many.

Nothing here runs in an event loop, so that a fixture may outlive the loops of the tests that use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from diptych.cluster.traces import Span, read_spans
from diptych.contract import telemetry as names
from diptych.contract.errors import ConfigInvalid

T = TypeVar("T")

START = 100.0
CHUNK = 96  # tokens of a step: a prompt of some lines is prefilled in several
_MARK = "DIPTYCH_TEST_MARK"


class Command:
    """One `diptych serve`: its process, what it says, and every process that it made, known by a mark in their
    environment (a child that was orphaned has it too)."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = secrets.token_hex(8)
        self.said_file = folder / f"serve-{self.mark}.log"
        with self.said_file.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diptych.cli", "serve", "--ray", "none", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=os.environ | {_MARK: self.mark},
            )

    def said(self) -> str:
        return self.said_file.read_text(errors="replace")

    def ended(self, limit: float) -> int:
        """Its exit code; every process of it is ended when this returns or raises."""
        try:
            return self.process.wait(limit)
        finally:
            self.kill()

    def left(self) -> list[int]:
        """Processes that live though the command has ended (or all of them while it runs)."""
        marked = f"{_MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it ended while we looked
                    if marked in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """For the end of a test that failed: nothing of it may outlive the test."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def bury(self) -> None:
        self.kill()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Running:
    """A service that is ready at `address`."""

    def __init__(self, command: Command, address: str, trace: Path) -> None:
        self.command, self.address, self.trace = command, address, trace

    def spans(self, trace: str, limit: float = 15.0) -> list[Span]:
        """The spans of one trace, once its root is in the file (the router draws it when every worker has answered)."""
        return self.known({trace}, 1, limit)[trace]

    def request(self, request_id: str, limit: float = 15.0) -> Span:
        """The root of the request with that id."""

        def root() -> list[Span]:
            try:
                spans = read_spans(self.trace)
            except ConfigInvalid:  # a line that is being written
                return []
            return [span for span in spans if span.attributes.get(names.REQUEST_ID) == request_id]

        return until(root, limit)[0]

    def known(self, traces: set[str], least: int, limit: float = 15.0) -> dict[str, list[Span]]:
        """The traces among `traces` whose root is in the file, once those are at least `least`."""

        def found() -> dict[str, list[Span]]:
            whole: dict[str, list[Span]] = {}
            try:
                for span in read_spans(self.trace):
                    if span.trace in traces:
                        whole.setdefault(span.trace, []).append(span)
            except ConfigInvalid:  # a line that is being written
                return {}
            rooted = {k: v for k, v in whole.items() if any(span.name == names.REQUEST for span in v)}
            return rooted if len(rooted) >= least else {}

        return until(found, limit)


def until(look: Callable[[], T], limit: float) -> T:
    """The first true thing that `look` returns."""
    end = time.monotonic() + limit
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"not seen within {limit} s")
        time.sleep(0.05)


@contextmanager
def running(model: Path, folder: Path, *arguments: str) -> Iterator[Running]:
    """Starts the service and waits until it is ready; stops it at the end and checks that nothing of it is left."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.jsonl"
    command = Command(folder, "--model", str(model), "--port", "0", "--trace", str(trace), *arguments)
    try:
        yield Running(command, _ready(command), trace)
        command.process.send_signal(signal.SIGINT)
        code = command.process.wait(30.0)
        assert (code, command.left()) == (0, []), command.said()
    finally:
        command.bury()


def _ready(command: Command) -> str:
    def address() -> str:
        found = re.search(r"^Ready: .* on (\S+)\. Try:", command.said(), re.MULTILINE)
        assert found or command.process.poll() is None, command.said()
        return found[1] if found else ""

    return until(address, START)


def small(**settings: object) -> list[str]:
    """Arguments for two cores: a torch thread an engine, a small cache whose books are checked, quick heartbeats.
    settings: further ones, `__` for a dot."""
    chosen: dict[str, object] = {"engine.check_integrity": True, "limits.heartbeat": 0.2}
    for role in ("prefill", "decode", "colocated"):
        chosen |= {f"{role}.threads": 1, f"{role}.cache_blocks": 256, f"{role}.token_budget": CHUNK}
    chosen |= {name.replace("__", "."): value for name, value in settings.items()}
    return [part for name, value in chosen.items() for part in ("--set", f"{name}={value}")]
