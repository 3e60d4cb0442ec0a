"""The whole service on a CPU against transformers, and its two arrangements against each other.

    python -m benchmarks.service_cpu [--rounds 10] [--quick]

SmolLM2-135M, fp32, two torch threads on both sides of every comparison, alternated in one run. Each figure is the
median over rounds with its range; the last line is JSON. Sampling, streaming over gRPC, router and hand-over are inside
what is measured of the service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from diptych.cluster.demo_model import ensure_demo_model
from diptych.router.client import Client, ask

PROMPT, NEW, THREADS = 128, 128, 2


@dataclass
class Timing:
    """Arrival times of one request's tokens, seconds since it was sent."""

    sent: float
    at: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.at[0]

    @property
    def gap(self) -> float:
        return self.at[1] - self.at[0]

    @property
    def tpot(self) -> float:
        return (self.at[-1] - self.at[0]) / (len(self.at) - 1)

    @property
    def itl(self) -> list[float]:
        return [b - a for a, b in zip(self.at[1:], self.at[2:], strict=False)]


_draw = random.Random(0)


def prompt(length: int = PROMPT) -> list[int]:
    """Fresh random tokens, so that no prefix cache helps."""
    return [_draw.randrange(100, 40_000) for _ in range(length)]


async def timed(client: Client, tokens: list[int], new: int = NEW) -> Timing:
    request = ask(token_ids=tokens, max_tokens=new, temperature=0.0, ignore_eos=True)
    request.response.token_ids = True
    timing = Timing(time.perf_counter())
    async for piece in client.stream(request):
        timing.at += [time.perf_counter() - timing.sent] * len(piece.token_ids)
    assert len(timing.at) == new, f"{len(timing.at)} tokens of {new}"
    return timing


@asynccontextmanager
async def service(model: Path, roles: str, *settings: str) -> AsyncIterator[Client]:
    """`diptych serve` without Ray on a free port; Ray carries no request, so the path is the same."""
    threads = [f"--set={role}.threads={THREADS}" for role in ("prefill", "decode", "colocated")]
    command = [sys.executable, "-m", "diptych.cli", "serve", "--model", str(model), "--ray", "none", "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--roles",
        roles,
        *threads,
        *(f"--set={s}" for s in settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            while not (line := (await process.stdout.readline()).decode()).startswith("Ready"):
                if not line:
                    raise RuntimeError("the service ended while it started")
                print(line, end="", flush=True)
        address = line.split(" on ")[1].split()[0].rstrip(".")
        async with Client(address) as client:
            await timed(client, prompt(), 4)
            yield client
    finally:
        process.terminate()
        await process.wait()


class Peer:
    """transformers' own `generate`, in this process."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(THREADS)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def tpot(self, cache: str) -> float:
        """Seconds a token after the first: a run of NEW tokens less a run of one, over the tokens between."""
        ids = torch.tensor([prompt()])
        return (self._run(ids, NEW, cache) - self._run(ids, 1, cache)) / (NEW - 1)

    def _run(self, ids: torch.Tensor, new: int, cache: str) -> float:
        options = {"cache_implementation": "static"} if cache == "static" else {}
        start = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=2,
            **options,
        )
        return time.perf_counter() - start


def spread(values: list[float], scale: float = 1e3) -> dict[str, float]:
    return {
        "median": round(statistics.median(values) * scale, 2),
        "min": round(min(values) * scale, 2),
        "max": round(max(values) * scale, 2),
    }


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def against_transformers(client: Client, peer: Peer, rounds: int) -> dict[str, Any]:
    ours, theirs = [], {"dynamic": [], "static": []}  # type: ignore[var-annotated]
    for _ in range(rounds):
        for cache in theirs:
            theirs[cache].append(peer.tpot(cache))
        ours.append((await timed(client, prompt())).tpot)
    best = min(theirs, key=lambda cache: statistics.median(theirs[cache]))
    ratios = [a / b for a, b in zip(ours, theirs[best], strict=True)]
    return {
        "ms_a_token": spread(ours),
        "transformers_ms_a_token": {cache: spread(values) for cache, values in theirs.items()},
        "ratio_to_faster_cache": spread(ratios, 1),
    }


async def eight_against_one(client: Client, rounds: int) -> dict[str, Any]:
    """Tokens/s while all of 8 decode: the span from the last first token to the first last token."""
    ratios, one_rates, eight_rates = [], [], []
    for _ in range(rounds):
        one = await timed(client, prompt())
        many = await asyncio.gather(*(timed(client, prompt()) for _ in range(8)))
        start = max(each.sent + each.ttft for each in many)
        end = min(each.sent + each.at[-1] for each in many)
        count = sum(start < each.sent + at <= end for each in many for at in each.at)
        one_rates.append(1 / one.tpot)
        eight_rates.append(count / (end - start))
        ratios.append(eight_rates[-1] / one_rates[-1])
    return {
        "one_tokens_s": spread(one_rates, 1),
        "eight_tokens_s": spread(eight_rates, 1),
        "ratio": spread(ratios, 1),
    }


async def first_to_second(client: Client, count: int) -> dict[str, Any]:
    lone = [await timed(client, prompt(), 12) for _ in range(count)]
    step = statistics.median([statistics.median(each.itl) for each in lone])
    gaps = [each.gap for each in lone]
    gate = asyncio.Semaphore(4)

    async def loaded() -> Timing:
        async with gate:
            return await timed(client, prompt(), 24)

    many = await asyncio.gather(*(loaded() for _ in range(count)))
    loaded_step = statistics.median([gap for each in many for gap in each.itl])
    return {
        "lone_step_ms": round(step * 1e3, 2),
        "lone_gap_p95_ms": round(percentile(gaps, 0.95) * 1e3, 2),
        "lone_gap_bar_ms": round(2 * step * 1e3 + 15, 2),
        "loaded_step_ms": round(loaded_step * 1e3, 2),
        "loaded_gap_p50_ms": round(statistics.median(each.gap for each in many) * 1e3, 2),
        "loaded_gap_bar_ms": round(2.5 * loaded_step * 1e3 + 15, 2),
    }


async def with_long_arrivals(client: Client, rounds: int) -> dict[str, Any]:
    """Two streams decode while prompts of 768 tokens arrive, one after the other."""
    ttfts, long_ttfts, tpots, itls = [], [], [], []
    for _ in range(rounds):
        streams = [asyncio.create_task(timed(client, prompt(), 96)) for _ in range(2)]
        while not all(stream.done() for stream in streams):
            long_ttfts.append((await timed(client, prompt(768), 2)).ttft)
        for each in await asyncio.gather(*streams):
            ttfts.append(each.ttft)
            tpots.append(each.tpot)
            itls += each.itl
    return {
        "ttft_ms": spread(ttfts),
        "long_ttft_ms": spread(long_ttfts),
        "ms_a_token": spread(tpots),
        "itl_p50_ms": round(percentile(itls, 0.5) * 1e3, 2),
        "itl_p99_ms": round(percentile(itls, 0.99) * 1e3, 2),
    }


async def run(rounds: int, gaps: int, report: Callable[[str, Any], None]) -> dict[str, Any]:
    model = ensure_demo_model()
    peer = Peer(model)
    results: dict[str, Any] = {}
    async with service(model, "disaggregated") as client:
        for name, measured in (
            ("one request against transformers", against_transformers(client, peer, rounds)),
            ("eight against one", eight_against_one(client, rounds)),
            ("first to second token", first_to_second(client, gaps)),
            ("disaggregated, long prompts arriving", with_long_arrivals(client, max(2, rounds // 3))),
        ):
            results[name] = await measured
            report(name, results[name])
    for budget in (512, 128):
        async with service(model, "colocated", f"colocated.token_budget={budget}") as client:
            name = f"colocated (chunks of {budget}), long prompts arriving"
            results[name] = await with_long_arrivals(client, max(2, rounds // 3))
            report(name, results[name])
    return results


def about() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--gaps", type=int, default=50, help="requests of the first-to-second-token measurement")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    options = parser.parse_args()

    def report(name: str, values: Any) -> None:
        print(f"{name}\n  {json.dumps(values)}", flush=True)

    results = asyncio.run(run(options.rounds, options.gaps, report))
    line = json.dumps({"benchmark": "service_cpu", **about(), "results": results})
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
