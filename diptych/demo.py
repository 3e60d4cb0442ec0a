"""`diptych demo`: a whole service on this machine, several real prompts at once, and where their time went.

Everything that it shows comes through the public gRPC interface or from the trace file; the trace is read by a process
of its own, after the service has gone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from diptych.cluster.config import Config, validate
from diptych.cluster.demo_model import ensure_demo_model
from diptych.cluster.processes import MemoryWatch
from diptych.progress import Progress
from diptych.router.client import Client, ask
from diptych.serving import start_service

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "Give me three tips for learning a language.",
)
MAX_TOKENS = 48


async def run_demo(trace: Path | None) -> int:
    """Returns 0 when every prompt was answered and the reader found them all."""
    started = time.monotonic()
    memory = MemoryWatch()
    with tempfile.TemporaryDirectory(prefix="diptych-demo-") as folder:
        file = trace or Path(folder) / "trace.jsonl"
        with Progress() as progress:
            progress.say("Preparing the demo model.")
            model = await asyncio.to_thread(ensure_demo_model)
            service = await start_service(_config(model, file), progress.watch)
            try:
                progress.say(f"Ready on {service.address} after {time.monotonic() - started:.1f} s.")
                await _answer_all(service.address, PROMPTS)
            finally:
                progress.say("Stopping.")
                await service.stop()
        code = _read(file)
    print(f"Peak memory of all processes together: {memory.stop() / 2**30:.2f} GiB.")
    return code


def _config(model: Path, trace: Path) -> Config:
    """A cluster of its own and a free port, whatever else runs on the machine."""
    return validate(
        {
            "model": str(model),
            "ray": "local",
            "service": {"name": "diptych-demo", "port": 0},
            "prefill": {"cache_bytes": 256 << 20},
            "decode": {"cache_bytes": 256 << 20},
            "telemetry": {"file": str(trace)},
        }
    )


async def _answer_all(address: str, prompts: Sequence[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for number, prompt in enumerate(prompts, 1):
        console.print(f"[{number}] > {prompt}", markup=False)
    started = time.monotonic()
    async with Client(address) as client:
        await asyncio.gather(*(_answer(client, number, prompt, started) for number, prompt in enumerate(prompts, 1)))


async def _answer(client: Client, number: int, prompt: str, started: float) -> None:
    """Prints the answer as it comes, a line at a time, so that answers that stream at once stay readable."""
    request = ask(messages=[{"role": "user", "content": prompt}], max_tokens=MAX_TOKENS, temperature=0.0)
    line, first = "", 0.0
    async for piece in client.stream(request):
        first = first or time.monotonic() - started
        line += piece.text
        while (cut := _line_end(line)) is not None:
            print(f"[{number}] {line[:cut].rstrip()}", flush=True)
            line = line[cut:].lstrip(" \n")
    took = time.monotonic() - started
    print(f"[{number}] {line}".rstrip() + f"   ({first:.2f} s to the first token, {took:.2f} s in all)", flush=True)


def _line_end(text: str, width: int = 60) -> int | None:
    """Where a line that is complete ends: at a line break, or at a space once it is wide."""
    if "\n" in text.lstrip("\n"):
        return text.index("\n", len(text) - len(text.lstrip("\n"))) + 1
    cut = text.rfind(" ")
    return cut + 1 if cut >= width else None


def _read(file: Path) -> int:
    print(f"\nThe trace, read from {file} by another process:")
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "diptych.cli", "trace", "show", str(file)], timeout=60).returncode
