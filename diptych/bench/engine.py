"""`diptych bench engine`: the real engine loop in one process, without router or network: time a token, prefill rate,
spread of steps.

B sequences of L random prompt tokens, N generated each, greedy, no prefix cache; random weights. Time a token is
(T(N) - T(1)) / (N - 1) of whole runs, the way the peers were measured: scheduling, staging, sampling and the messages
that leave the engine are inside. Steps are the intervals between the messages of steps that all sequences share. The
floor is (weights of the layers and the head + K and V of the mean context) over the read-only bandwidth of this run;
of experts it counts those that uniform routing would touch.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from diptych.bench.about import interruptible, keep, result_line
from diptych.bench.shapes import SHAPES, write_shape
from diptych.bench.stats import percentile
from diptych.cluster.preflight import model_folder
from diptych.contract.errors import ConfigInvalid
from diptych.contract.request import Key, Request, Sampling, Stopping
from diptych.contract.wire import Ended, Generate, Step, pack, to_router
from diptych.kernels.ceilings import ceilings
from diptych.workers.channel import Deliver, Emit, Launch, ToEngine, ToFront
from diptych.workers.engine_process import build
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.parameters import parameters
from diptych.workers.settings import WorkerSettings, block_size_on


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
    """One engine. load_format: of its weights. batch: the most sequences at once."""

    def __init__(self, folder: Path, load_format: Literal["auto", "dummy"], batch: int, options: Any) -> None:
        self.config = ModelConfig.from_folder(folder)
        settings = WorkerSettings(
            model=str(folder), role="colocated", device=options.device, load_format=load_format, prefix_cache=False,
            max_batch=batch, token_budget=options.budget, max_context=min(options.context, self.config.max_positions),
            graphs=not options.no_graphs, threads=options.threads, cache_bytes=options.cache_bytes,
            block_size=block_size_on(options.device),
        )  # fmt: skip
        self.loop = Loop()
        channel: Any = self.loop
        self.engine, _ = build(Launch(settings, b"", "0", "bench"), channel)
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

    def row(self, batch: int, prompt: int, new: int, rounds: int, read: float) -> dict[str, Any]:
        self.run(batch, prompt, new)  # compiles what a mix of chunks and decode steps needs
        ones = [self.run(batch, prompt, 1) for _ in range(rounds)]
        fulls, intervals = [], []
        for _ in range(rounds):
            fulls.append(self.run(batch, prompt, new))
            full = [drawn for drawn, count in self.loop.steps if count == batch]
            intervals += [(b - a) / 1e6 for a, b in pairwise(full[2:])]
        one = statistics.median(ones)
        tpots = [(full - one) / (new - 1) * 1e3 for full in fulls]
        found: dict[str, Any] = {
            "batch": batch, "prompt": prompt, "new": new,
            "tpot_ms": round(statistics.median(tpots), 3),
            "tpot_range": (round(min(tpots), 3), round(max(tpots), 3)),
            "prefill_tokens_s": round(batch * prompt / one),
        }  # fmt: skip
        moved = self._weight_bytes(batch) + self.engine.runner.cache.layout.token_bytes * batch * (prompt + new / 2)
        floor = moved / read * 1e3
        found |= {"floor_ms": round(floor, 3), "times_floor": round(found["tpot_ms"] / floor, 3)}
        if intervals:
            found["step_p50_ms"] = round(percentile(intervals, 0.5), 3)
            found["step_p99_ms"] = round(percentile(intervals, 0.99), 3)
            found["step_times_floor"] = round(found["step_p50_ms"] / floor, 3)
        return found

    def _weight_bytes(self, batch: int) -> float:
        """What a decode step reads: all products, and of experts those that uniform routing would touch."""
        config, item = self.config, self.engine.runner.decoder.dtype.itemsize
        read = 0.0
        for parameter in parameters(config):
            size = math.prod(parameter.shape) * item
            if parameter.kind == "linear" or (parameter.name == "embedding" and config.tied):
                read += size
            elif parameter.kind == "experts" and config.moe is not None:
                read += size * (1 - (1 - config.moe.top_k / config.moe.experts) ** batch)
        return read


def run_engine(options: argparse.Namespace) -> int:
    rows = _rows(options.rows)
    torch.set_num_threads(options.threads)
    read = ceilings(options.device, torch.bfloat16 if options.device != "cpu" else torch.float32).read
    print(f"read-only bandwidth {read / 1e9:.1f} GB/s")
    found: list[dict[str, Any]] = []
    interrupted = False
    try:
        with interruptible(), tempfile.TemporaryDirectory() as made:
            shape = options.model in SHAPES
            folder = write_shape(options.model, Path(made), options.layers) if shape else model_folder(options.model)
            started = time.perf_counter()
            bench = Bench(folder, "dummy" if shape else "auto", max(row[0] for row in rows), options)
            print(
                f"built in {time.perf_counter() - started:.1f} s, {bench.engine.pools[0].num_blocks} blocks", flush=True
            )
            for row in rows:
                found.append(bench.row(*row, options.rounds, read))
                print(_told(found[-1]), flush=True)
    except KeyboardInterrupt:
        interrupted = True
    line = result_line(
        "engine", options.device, model=Path(options.model).name, read_gb_s=round(read / 1e9, 1), rows=found,
        interrupted=interrupted,
    )  # fmt: skip
    if options.out and options.out.suffix == ".json":
        options.out.write_text(line + "\n")
    elif options.out:
        keep(options.out, "bench-engine", line)
    print(line)
    return 130 if interrupted else 0


def _rows(text: str) -> list[tuple[int, int, int]]:
    found = []
    for row in text.split(","):
        try:
            batch, prompt, new = (int(part) for part in row.split("x"))
            valid = min(batch, prompt) >= 1 and new >= 2
        except ValueError:
            valid = False
        if not valid:
            raise ConfigInvalid(f"Row {row!r} is not BATCHxPROMPTxGENERATED with 2 or more generated, as 8x1024x128.")
        found.append((batch, prompt, new))
    return found


def _told(row: dict[str, Any]) -> str:
    said = f"{row['batch']:>4} x {row['prompt']:<6} {row['tpot_ms']:9.3f} ms a token"
    said += f"  {row['times_floor']:6.3f} x floor  prefill {row['prefill_tokens_s']:8} tokens/s"
    return said + f"  steps p50 {row.get('step_p50_ms', 0)} p99 {row.get('step_p99_ms', 0)} ms"
