"""The whole service with both roles on one GPU: what a client sees a token cost, beside what the engine's step costs.

    python -m benchmarks.service_gpu --model FOLDER [--batch 32] [--prompt 1024] [--new 128] [--share 0.44]

Random weights (`--load-format dummy`) of the folder's shape; its tokenizer is used. `batch` streams at once over gRPC,
tokens streamed; prefill is idle while decode is timed. The engine's step is what the decode worker reports meanwhile.
Two processes share the card, so the payload goes through pinned memory by gloo; its speed is no link's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.service_cpu import Timing, percentile, prompt, service, spread, timed
from diptych.router.client import Client


async def lone(client: Client, length: int, count: int) -> dict[str, Any]:
    found = [await timed(client, prompt(length), 32) for _ in range(count)]
    step = statistics.median([gap for each in found for gap in each.itl])
    return {
        "ttft_ms": spread([each.ttft for each in found]),
        "step_ms": round(step * 1e3, 3),
        "first_to_second_ms": spread([each.gap for each in found]),
        "first_to_second_p95_ms": round(percentile([each.gap for each in found], 0.95) * 1e3, 3),
    }


async def together(client: Client, batch: int, length: int, new: int) -> dict[str, Any]:
    """All at once. While all decode: from the last first token to the first last one."""
    many = await asyncio.gather(*(timed(client, prompt(length), new) for _ in range(batch)))
    start = max(each.sent + each.at[1] for each in many)
    end = min(each.sent + each.at[-1] for each in many)
    gaps = [gap for each in many for gap in _inside(each, start, end)]
    return {
        "tpot_ms": round(statistics.median(_rate(each, start, end) for each in many) * 1e3, 3),
        "itl_p50_ms": round(percentile(gaps or [0.0], 0.5) * 1e3, 3),
        "itl_p99_ms": round(percentile(gaps or [0.0], 0.99) * 1e3, 3),
        "first_to_second_p50_ms": round(statistics.median(each.gap for each in many) * 1e3, 3),
        "output_tokens_s": round(batch * new / (max(each.sent + each.at[-1] for each in many) - many[0].sent)),
    }


def _inside(each: Timing, start: float, end: float) -> list[float]:
    at = [each.sent + t for t in each.at if start <= each.sent + t <= end]
    return [b - a for a, b in pairwise(at)]


def _rate(each: Timing, start: float, end: float) -> float:
    at = [each.sent + t for t in each.at if start <= each.sent + t <= end]
    return (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else float("nan")


async def run(options: argparse.Namespace) -> dict[str, Any]:
    settings = [
        "engine.load_format=dummy",
        f"engine.max_context={options.context}",
        "engine.prefix_cache=false",
        "engine.transport=gloo",
        "engine.message_bytes=33554432",
        *(f"{role}.{key}" for role in ("prefill", "decode") for key in (
            f"device={options.device}", f"memory_share={options.share}", f"max_batch={options.batch}",
            f"token_budget={options.budget}",
        )),
    ]  # fmt: skip
    results: dict[str, Any] = {}
    async with service(options.model, "disaggregated", *settings) as client:
        results["lone"] = await lone(client, options.prompt, 20)
        print(json.dumps(results), flush=True)
        await together(client, options.batch, options.prompt, options.new)
        results["together"] = [
            await together(client, options.batch, options.prompt, options.new) for _ in range(options.rounds)
        ]
        print(json.dumps(results), flush=True)
        info = await client.server_info()
        results["server"] = str(info).replace("\n", " ")[:2000]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.44)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    line = json.dumps(
        {"benchmark": "service_gpu", "date": time.strftime("%Y-%m-%d"), "results": asyncio.run(run(options))}
    )
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
