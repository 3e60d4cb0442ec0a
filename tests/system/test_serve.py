"""`diptych serve` as an operator runs it: a process, its two ends (a signal, a violent death), and what it leaves.

The first part needs no Ray; the second is the whole service on a Ray cluster of its own. Most are started where
somebody would who has just cloned the project: in a folder that holds one, which must not shadow the installed package
in any process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest

from diptych.cluster.processes import alive, descendants
from diptych.contract.errors import DiptychError
from diptych.router.client import Client, ask
from diptych.v1 import inference_pb2 as pb
from tests.support.ray_lock import ray_lock

LIMIT = 120.0
PARIS = "The capital of France is"
USUAL = " Paris.\n\nThe answer is: "


class Serve:
    """One `diptych serve` process: what it said, and all the processes that it ever had."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []
        self.address = ""
        self.members: set[int] = {process.pid}

    async def until_ready(self) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT):
            while not self.address:
                line = (await self.process.stderr.readline()).decode()
                assert line, self.said
                self.said.append(line)
                if found := re.match(r"Ready: .* on (\S+)\. Try: diptych generate", line):
                    self.address = found[1]
        self.note()

    def note(self) -> None:
        self.members |= set(descendants(self.process.pid))

    async def end(self, how: signal.Signals) -> int:
        """Sends the signal; returns the exit code once the process is gone and its output read."""
        self.note()
        self.process.send_signal(how)
        async with asyncio.timeout(LIMIT):
            assert self.process.stderr is not None
            self.said += (await self.process.stderr.read()).decode().splitlines(keepends=True)
            return await self.process.wait()

    def left(self) -> list[int]:
        return [pid for pid in self.members if alive(pid)]


@asynccontextmanager
async def serve(model: Path, folder: Path, *arguments: str) -> AsyncIterator[Serve]:
    """folder: where it is started."""
    (folder / "diptych" / "router").mkdir(parents=True)
    script = Path(sys.executable).with_name("diptych")
    command = [str(script), "serve", "--model", os.path.relpath(model, folder), "--port", "0", *arguments]
    caches = ["--set", "prefill.cache_bytes=67108864", "--set", "decode.cache_bytes=67108864"]
    running = Serve(
        await asyncio.create_subprocess_exec(
            *command, *caches, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    )
    try:
        await running.until_ready()
        yield running
    finally:
        running.note()
        for pid in running.left():
            os.kill(pid, signal.SIGKILL)
        await running.process.wait()


async def text_of(client: Client, request: pb.GenerateRequest) -> str:
    return "".join([piece.text async for piece in client.stream(request, timeout=LIMIT)])


async def until(look: Callable[[], bool], limit: float = 30.0) -> None:
    async with asyncio.timeout(limit):
        while not look():
            await asyncio.sleep(0.05)


async def worker(client: Client, role: str) -> pb.Worker | None:
    """The ready worker of a role, if the router is connected to one."""
    found = [each for each in (await client.server_info()).workers if each.role == role and each.connected]
    return found[0] if found else None


async def drains_at_ctrl_c(running: Serve) -> None:
    """A stream that runs when the signal comes is finished, in whole."""
    async with Client(running.address) as client:
        request = ask(PARIS, max_tokens=40, temperature=0.0, ignore_eos=True)
        pieces = client.stream(request, timeout=LIMIT)
        await anext(pieces)
        ending = asyncio.create_task(running.end(signal.SIGINT))
        rest = [piece async for piece in pieces]
        assert rest[-1].usage.completion_tokens == 40
        assert await ending == 0
    assert any(line.startswith("Stopping") for line in running.said)
    assert running.left() == []


async def test_serve_answers_and_drains(demo_model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    async with serve(demo_model, tmp_path, "--ray", "none", "--trace", trace.name) as running:
        async with Client(running.address) as client:
            assert await text_of(client, ask(PARIS, max_tokens=9, temperature=0.0)) == USUAL
        await drains_at_ctrl_c(running)
    command = [sys.executable, "-m", "diptych.cli", "trace", "show", str(trace)]
    shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert "2 requests" in shown.stdout
    assert "Stages add up" in shown.stdout


async def test_colocated_workers_answer_alike(demo_model: Path, tmp_path: Path) -> None:
    async with serve(demo_model, tmp_path, "--ray", "none", "--roles", "colocated") as running:
        async with Client(running.address) as client:
            assert await text_of(client, ask(PARIS, max_tokens=9, temperature=0.0)) == USUAL
            assert [each.role for each in (await client.server_info()).workers] == ["colocated"]
        # Nobody tells the workers when their launcher dies: each has to notice.
        await running.end(signal.SIGKILL)
        await until(lambda: running.left() == [])


@pytest.mark.parametrize("ray", ["none", pytest.param("local", marks=[pytest.mark.ray, pytest.mark.slow])])
@pytest.mark.parametrize(
    ("file", "content", "word"),
    [("config.json", {"intermediate_size": 1000}, "mlp"), ("tokenizer.json", {"added_tokens": None}, "tokenizer")],
)
async def test_what_only_a_worker_or_the_router_can_refuse(
    demo_model: Path, tmp_path: Path, ray: str, file: str, content: dict[str, object], word: str
) -> None:
    """Found after the start has begun: still one sentence, and nothing is left running."""
    others = set(descendants(os.getpid()))  # services that other tests of this process share
    for each in demo_model.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps(json.loads((demo_model / file).read_text()) | content))
    with ray_lock() if ray == "local" else nullcontext():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "diptych.cli", "serve", "--model", str(tmp_path), "--port", "0", "--ray", ray),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), LIMIT)
    assert process.returncode == 2, said
    assert said.decode().splitlines()[-1].startswith("diptych: ")
    assert word in said.decode().splitlines()[-1]
    assert [pid for pid in descendants(os.getpid()) if alive(pid) and pid not in others] == []


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_the_service_on_ray_replaces_a_killed_worker_and_leaves_nothing(
    demo_model: Path, tmp_path: Path, data: int
) -> None:
    sizes = ("--set", f"prefill.data={data}", "--set", f"decode.data={data}")
    with ray_lock():
        async with serve(demo_model, tmp_path, "--ray", "local", *sizes) as running:
            async with Client(running.address) as client:
                request = ask(PARIS, max_tokens=9, temperature=0.0)
                answers = await asyncio.gather(*(text_of(client, request) for _ in range(4)))
                assert answers == [USUAL] * 4
                await kill_decode_under(client)
                await until_replaced(client)
                assert await text_of(client, request) == USUAL
            running.note()
            await drains_at_ctrl_c(running)
            assert any("decode-0 ready again" in line for line in running.said)


async def kill_decode_under(client: Client) -> None:
    """A stream whose decode worker dies ends at once, with an error that says so."""
    decode = await worker(client, "decode")
    assert decode is not None
    pieces = client.stream(ask(PARIS, max_tokens=400, temperature=0.0, ignore_eos=True), timeout=LIMIT)
    await anext(pieces)
    await anext(pieces)
    os.kill(decode.pids[-1], signal.SIGKILL)
    with pytest.raises(DiptychError) as caught:
        await asyncio.wait_for(drawn(pieces), 5)
    assert caught.value.code == "DecodeLost"


async def drawn(pieces: AsyncIterator[pb.GenerateStreamResponse]) -> int:
    return len([piece async for piece in pieces])


async def until_replaced(client: Client) -> None:
    async with asyncio.timeout(60):
        while not (await client.server_info()).ready:
            await asyncio.sleep(0.1)
