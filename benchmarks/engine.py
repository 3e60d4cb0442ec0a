"""The real engine loop in one process, without router or network: time a token, prefill rate, spread of steps.

    python -m benchmarks.engine [--device cuda] [--model llama-3-8b] [--rows 1x1024x128,32x1024x128] [--out FILE]

B sequences of L random prompt tokens, N generated each, greedy, no prefix cache; random weights. Time a token is
(T(N) - T(1)) / (N - 1) of whole runs, the way the peers were measured: scheduling, staging, sampling and the messages
that leave the engine are inside. Steps are the intervals between the messages of steps that all sequences share. The
floor is (weights of the layers and the head + K and V of the mean context) over the read-only bandwidth of this run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_step import MODELS
from diptych.contract.request import Key, Request, Sampling, Stopping
from diptych.contract.wire import Ended, Generate, Step, pack, to_router
from diptych.workers.channel import Deliver, Emit, Launch, ToEngine, ToFront
from diptych.workers.engine_process import build
from diptych.workers.settings import WorkerSettings

PEER_MS = {(1, 1024): 4.97, (32, 1024): 6.35, (128, 1024): 11.1, (32, 8000): 13.3}
PEER_PREFILL = {(1, 1024): 33_700, (32, 1024): 42_900, (128, 1024): 42_900, (32, 8000): 38_200}


class Loop:
    """The engine's channel, in this process."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.ended = 0
        self.steps: list[tuple[int, int]] = []

    def wait(self, seconds: float) -> Iterator[ToEngine]:
        found, self.inbox = self.inbox, []
        yield from found

    def wake(self) -> None:
        pass

    def send(self, message: ToFront) -> None:
        if isinstance(message, Emit):
            told = to_router.decode(message.message)
            if isinstance(told, Step):
                self.steps.append((told.drawn, len(told.tokens)))
            elif isinstance(told, Ended):
                assert told.reason == "length", told
                self.ended += 1


class Bench:
    def __init__(self, folder: Path, device: str, batch: int, budget: int, context: int, graphs: bool) -> None:
        settings = WorkerSettings(
            model=str(folder), role="colocated", device=device, load_format="dummy", prefix_cache=False,
            max_batch=batch, token_budget=budget, max_context=context, graphs=graphs, threads=torch.get_num_threads(),
        )  # fmt: skip
        self.loop: Any = Loop()
        self.engine, _ = build(Launch(settings, b"", "0", "bench"), self.loop)
        self.vocab = self.engine.runner.decoder.config.vocab
        self.draw = random.Random(0)
        self.serial = 0

    def run(self, batch: int, prompt: int, new: int) -> float:
        """Seconds from submission until all have ended."""
        prompts = [tuple(self.draw.randrange(self.vocab) for _ in range(prompt)) for _ in range(batch)]
        self.loop.ended, self.loop.steps = 0, []
        start = time.perf_counter()
        for ids in prompts:
            self.serial += 1
            stopping = Stopping(new, ignore_eos=True)
            request = Request(Key(str(self.serial)), ids, stopping, Sampling(temperature=0.0))
            self.loop.inbox.append(Deliver("bench", pack(Generate(request))))
        while self.loop.ended < batch:
            self.engine.turn()
        return time.perf_counter() - start

    def row(self, batch: int, prompt: int, new: int, rounds: int, read: float | None) -> dict[str, Any]:
        self.run(batch, prompt, new)  # compiles what a mix of chunks and decode steps needs
        ones = [self.run(batch, prompt, 1) for _ in range(rounds)]
        fulls, intervals = [], []
        for _ in range(rounds):
            fulls.append(self.run(batch, prompt, new))
            full = [drawn for drawn, count in self.loop.steps if count == batch]
            intervals += [(b - a) / 1e6 for a, b in pairwise(full[2:])]
        one = statistics.median(ones)
        tpots = [(full - one) / (new - 1) * 1e3 for full in fulls]
        intervals.sort()
        found: dict[str, Any] = {
            "batch": batch, "prompt": prompt, "new": new,
            "tpot_ms": round(statistics.median(tpots), 3),
            "tpot_range": (round(min(tpots), 3), round(max(tpots), 3)),
            "prefill_tokens_s": round(batch * prompt / one),
            "step_p50_ms": round(intervals[len(intervals) // 2], 3),
            "step_p99_ms": round(intervals[int(len(intervals) * 0.99)], 3),
            "vllm_ms": PEER_MS.get((batch, prompt)), "vllm_prefill": PEER_PREFILL.get((batch, prompt)),
        }  # fmt: skip
        if read is not None:
            moved = self._weight_bytes() + self.engine.runner.cache.layout.token_bytes * batch * (prompt + new / 2)
            floor = moved / read * 1e3
            found |= {"floor_ms": round(floor, 3), "times_floor": round(found["tpot_ms"] / floor, 3)}
            found["step_times_floor"] = round(found["step_p50_ms"] / floor, 3)
        return found

    def _weight_bytes(self) -> int:
        return self.engine.runner.decoder.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="Llama-3-8B", choices=MODELS)
    parser.add_argument("--rows", default="1x1024x128,32x1024x128,128x1024x128,32x8000x64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="fewer layers, to try it on a CPU")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [tuple(int(part) for part in row.split("x")) for row in options.rows.split(",")]
    read = None
    if options.device.startswith("cuda"):
        from benchmarks.ceilings import read_bandwidth

        read = read_bandwidth()
        print(f"read-only bandwidth {read / 1e12:.3f} TB/s")
    with tempfile.TemporaryDirectory() as folder:
        config = MODELS[options.model] | ({"num_hidden_layers": options.layers} if options.layers else {})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        batch = max(row[0] for row in rows)
        started = time.perf_counter()
        bench = Bench(Path(folder), options.device, batch, options.budget, options.context, not options.no_graphs)
        print(f"built in {time.perf_counter() - started:.1f} s, {bench.engine.pool.num_blocks} blocks", flush=True)
        found = []
        for row in rows:
            found.append(bench.row(*row, options.rounds, read))
            print(json.dumps(found[-1]), flush=True)
    gpu = torch.cuda.get_device_name() if read else "cpu"
    line = json.dumps(
        {"benchmark": "engine", "model": options.model, "date": time.strftime("%Y-%m-%d"), "gpu": gpu,
         "torch": torch.__version__, "read_tb_s": round(read / 1e12, 3) if read else None, "rows": found}
    )  # fmt: skip
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
