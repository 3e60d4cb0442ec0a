"""A whole decode step in one CUDA graph, real decoder, random weights: time a token against the floor.

    python -m benchmarks.decode_step [--only 1x1024] [--no-dependent-launch]

A replay is: embedding, the layers (five launches each), head, greedy draw, and the kernel that makes the next step's
batch from the drawn tokens on the GPU. The floor is (bytes of all layers' weights and of the head, plus K and V of the
mean context: prompt + half of what is generated) over the read-only bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass

import torch

from diptych.bench.shapes import SHAPES
from diptych.kernels.batch import Batch
from diptych.kernels.ceilings import read_bandwidth
from diptych.kernels.triton import common
from diptych.kernels.triton.sampling import advance, greedy
from diptych.workers.cache import KVCache
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.settings import block_size_on


@dataclass(frozen=True)
class Row:
    """bar: at most so many floors. peer_ms: vLLM 0.25.1 on the same card."""

    model: str
    batch: int
    prompt: int
    generated: int
    bar: float
    peer_ms: float | None


ROWS = (
    Row("Llama-3-8B", 1, 1024, 128, 1.20, 4.97),
    Row("Llama-3-8B", 32, 1024, 128, 1.22, 6.35),
    Row("Llama-3-8B", 128, 1024, 128, 1.30, 11.1),
    Row("Llama-3-8B", 32, 8000, 64, 1.12, 13.3),
    Row("Llama-2-7B", 1, 1024, 128, 1.15, None),
)


class DecodeGraph:
    """One captured step of `sequences` sequences that start at `prompt` cached tokens (random keys and values)."""

    def __init__(
        self, decoder: Decoder, sequences: int, prompt: int, generated: int, page: int = block_size_on("cuda")
    ) -> None:
        config = decoder.config
        pages = -(-(prompt + generated + 2) // page)
        self.cache = KVCache(
            config.layers, sequences * pages, page, config.kv_heads, config.head_dim, torch.bfloat16, "cuda"
        )
        for layer in self.cache.data.unbind():
            layer.normal_()
        self.prompt, self.page, self.decoder = prompt, page, decoder
        table = torch.randperm(sequences * pages, device="cuda").int().view(sequences, pages)
        self.batches = [self._batch(table), self._batch(table)]
        with torch.inference_mode():
            self._step(self.batches[0])  # compiles; its own batch, whose work lists are not the captured one's
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step(self.batches[1])
        self.reset()

    def _batch(self, table: torch.Tensor) -> Batch:
        n, at = table.shape[0], self.prompt
        return Batch(
            token_ids=torch.randint(0, self.decoder.config.vocab, (n,), device="cuda"),
            positions=torch.full((n,), at, dtype=torch.int64, device="cuda"),
            slots=table[:, at // self.page].long() * self.page + at % self.page,
            query_start=torch.arange(n + 1, dtype=torch.int32, device="cuda"),
            context_lens=torch.full((n,), at + 1, dtype=torch.int32, device="cuda"), block_tables=table,
            query_lens=(), contexts=(), tables=(), max_query=1, max_context=table.shape[1] * self.page,
        )  # fmt: skip

    def _step(self, b: Batch) -> None:
        ids = greedy(self.decoder.logits(self.decoder(b, self.cache)))
        advance(ids, b.token_ids, b.positions, b.slots, b.context_lens, b.block_tables, self.page)

    def reset(self) -> None:
        fresh, b = self._batch(self.batches[1].block_tables), self.batches[1]
        for name in ("token_ids", "positions", "slots", "context_lens"):
            getattr(b, name).copy_(getattr(fresh, name))

    def generate(self, steps: int) -> float:
        """Milliseconds a step."""
        self.reset()
        self.graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(steps):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps


def weight_bytes(decoder: Decoder) -> int:
    return decoder.read_bytes()


def measure(row: Row, decoder: Decoder, read: float, rounds: int = 5) -> dict[str, object]:
    graph = DecodeGraph(decoder, row.batch, row.prompt, row.generated)
    times = [graph.generate(row.generated - 2) for _ in range(rounds)]
    ms = statistics.median(times)
    token = graph.cache.layout.token_bytes
    moved = weight_bytes(decoder) + token * row.batch * (row.prompt + row.generated / 2)
    floor = moved / read * 1e3
    return {
        "model": row.model, "batch": row.batch, "prompt": row.prompt, "ms": round(ms, 4), "floor_ms": round(floor, 4),
        "times_floor": round(ms / floor, 4), "bar": row.bar, "spread": round((max(times) - min(times)) / ms, 4),
        "vllm_ms": row.peer_ms, "gigabytes": round(moved / 1e9, 2),
    }  # fmt: skip


def make_decoder(model: str) -> Decoder:
    config = ModelConfig.from_dict(SHAPES[model])
    weights = load("", config, torch.bfloat16, "cuda", "dummy")
    return Decoder(config, weights)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--no-dependent-launch", action="store_true")
    args = parser.parse_args()
    common.DEPENDENT = not args.no_dependent_launch
    read, results, model, decoder = read_bandwidth(), [], "", None
    print(f"read-only bandwidth {read / 1e12:.3f} TB/s; floor = (weights + K,V of prompt + half of the generated) / it")
    for row in ROWS:
        if args.only and args.only != f"{row.batch}x{row.prompt}":
            continue
        if decoder is None or row.model != model:
            del decoder
            gc.collect()
            model, decoder = row.model, make_decoder(row.model)
        found = measure(row, decoder, read)
        results.append(found)
        print("{model:11} {batch:4} x {prompt:<5} {ms:8.3f} ms  floor {floor_ms:6.3f} ms ({gigabytes} GB)"
              "  {times_floor:.3f} x floor, at most {bar}  (spread {spread:.2%}, vLLM {vllm_ms} ms)".format(**found),
              flush=True)  # fmt: skip
        gc.collect()
        torch.cuda.empty_cache()
    run = {"date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "decode_step", **run, "read_tb_s": round(read / 1e12, 3), "rows": results}))


if __name__ == "__main__":
    main()
