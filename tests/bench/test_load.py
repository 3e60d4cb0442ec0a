"""The load generator against the stub, which is a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diptych.bench.alarm import Alarm
from diptych.bench.load import Record, clock, closed_loop, generator, open_loop
from diptych.bench.selftest import self_test, stub
from diptych.bench.serve import Bench, Load, Workload, search
from diptych.bench.stats import Objective
from diptych.bench.workload import Tokens, from_lengths, poisson
from diptych.cli import main
from diptych.contract.errors import ConfigInvalid


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with stub(4) as found:
        yield found


async def test_open_and_closed_loop_with_turns(address: str) -> None:
    records: list[Record] = []
    chats = list(from_lengths("20x8", 3, 10, Tokens(1000, 0)))
    async with generator(address, ended=records.append) as made:
        await closed_loop(made, chats, 4, asyncio.Event())
        assert [record.tokens for record in records] == [8] * 30
        assert sorted({record.prompt for record in records}) == [20, 48, 76]  # history: what was asked and answered
        assert {len(record.pieces) for record in records} == {4}
        records.clear()
        started = clock()
        await open_loop(made, chats, poisson(50.0, 1), asyncio.Event())
        assert clock() - started >= max(poisson(50.0, 1)(chats))
        assert len(records) == 30
    assert all(record.sent >= record.due for record in records)


async def test_an_alarm_rings_when_it_should() -> None:
    """Never early, and not rounded up to whole milliseconds as a loop's own timers: how late is the machine's matter,
    so the best of many counts."""
    late = []
    with contextlib.closing(Alarm()) as alarm:
        for ms in (0.3, 1.2, 0.7, 2.1, -5.0) * 10:
            due = clock() + ms / 1e3
            await asyncio.wait_for(alarm.at(due), 10.0)
            late.append(clock() - due)
        assert min(late) >= 0
        assert min(late) < 0.5e-3
        waiting = asyncio.create_task(alarm.at(clock() + 100.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await alarm.at(clock())  # set anew


def test_who_measures_goes_first_and_who_is_measured_does_not() -> None:
    """In a process of its own: threads of a pool keep what they began with."""
    script = """
import os, subprocess, sys
from diptych.bench.priority import ahead, as_others
show = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
with ahead() as said:
    print(said, os.sched_getscheduler(0), flush=True)
    subprocess.run(show)
    subprocess.run(show, preexec_fn=as_others)
print(os.sched_getscheduler(0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    said, inside, child, measured, after = done.stdout.split()
    policy = str(os.SCHED_RR if said == "real-time" else os.SCHED_OTHER)
    assert (inside, child) == (policy, policy)
    assert measured == after == str(os.SCHED_OTHER)


async def test_a_run_that_is_stopped_keeps_what_ended(address: str) -> None:
    class Log(io.StringIO):
        def write(self, line: str) -> int:
            ended.append(line)
            if len(ended) == 10:
                stop.set()
            return len(line)

    stop, ended = asyncio.Event(), list[str]()
    workload = Workload(lengths="20x8", count=1000)
    made = Bench(address, 1000, 4096, workload, stop, log=Log())
    records = await asyncio.wait_for(made.run(Load(rate=50.0)), 60.0)
    assert 10 <= len(records) < 900
    assert all(record.ok for record in records)


async def test_the_search_brackets_the_load(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that keeps the objective up to 100 requests/s."""

    async def run(self: Bench, load: Load, label: str = "") -> list[Record]:
        took = 0.1 if load.level <= 100 else 2.0
        return [Record(0.0, 0.0, 1, 1, [(took, 1), (took + 0.1, 1)])] * 10

    monkeypatch.setattr(Bench, "run", run)
    made = Bench(address, 1000, 4096, Workload(lengths="20x8"), asyncio.Event())
    told: list[dict[str, Any]] = []
    found = await search(made, Load(rate=10.0), Objective.parse("ttft=500ms"), 0.9, told.append)
    assert 90 <= found["kept_up_to"] <= 100 < found["failed_at"] <= 110
    assert told[0]["kept"]
    with pytest.raises(ConfigInvalid, match="too few requests"):
        await search(made, Load(rate=10.0), Objective.parse("ttft=1ms"), 0.9, told.append)


async def test_the_self_test() -> None:
    """Its bars are for a machine of its own; here only that it measures."""
    found = await self_test(seconds=0.5, rate=200.0)
    assert found["closed"]["errors"] == 0
    assert found["closed"]["requests_s"] > 100
    assert found["open"][1]["receiving_ms"]["p50"] > 0
    for each in found["open"]:
        assert each["added_ms"]["p50"] >= max(each["receiving_ms"]["p50"], each["sending_ms"]["p50"])


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "diptych.cli", "bench", "serve", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


async def test_the_command_and_its_line(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--address", address, "--lengths", "32x8", "--requests", "40", "--rate", "100,200"]
    process = command(*arguments, "--objective", "ttft=5s", "--out", str(tmp_path))
    out, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0, err
    line = json.loads(out.splitlines()[-1])
    assert line["benchmark"] == "bench-serve"
    assert line["scheduling"] in ("real-time", "ordinary")
    assert {"commit", "torch", "machine", "date"} <= set(line)
    assert [row["level"] for row in line["rows"]] == [100, 200]
    assert line["rows"][0]["met"] == 1.0
    assert line == json.loads((tmp_path / "bench-serve.json").read_text())
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 80


async def test_an_interrupted_command_reports(address: str, tmp_path: Path) -> None:
    process = command("--address", address, "--rate", "20", "--requests", "10000", "--out", str(tmp_path))
    async with asyncio.timeout(40):
        while not (tmp_path / "requests.jsonl").exists() or not (tmp_path / "requests.jsonl").read_text():
            await asyncio.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 130
    assert "Interrupted" in err
    line = json.loads(out.splitlines()[-1])
    assert line["interrupted"]
    assert line["rows"][0]["answered"] >= 1


async def test_a_broken_trace_is_one_error(address: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,48,x\n")
    process = command("--address", address, "--trace", str(trace), "--recorded", "1")
    _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 2
    assert err.strip().splitlines() == [f"diptych: {trace}:2 is broken: '2023-11-16 18:17:03.9,48,x'."]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--model", "/no/such"], "/no/such"),
        (["--address", "127.0.0.1:1"], "127.0.0.1:1"),
        (["--search"], "--objective"),
        (["--objective", "ttft=0ms"], "met by no request"),
        (["--recorded", "1"], "--trace"),
        (["--model", "x", "--address", "y:1"], "either"),
        (["--compare", "roles=colocated", "roles=disaggregated"], "--model"),
        (["--compare", "127.0.0.1:1"], "needs two"),
        (["--compare", "a:=127.0.0.1:1", "a:=127.0.0.1:2"], "Several configurations are called 'a'"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], word: str) -> None:
    assert main(["bench", "serve", *arguments]) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert word in said[0]
