"""The decoder alone against transformers' generate, SmolLM2 in float32 on a CPU: milliseconds a decode step by batch.

    python benchmarks/decoder_cpu.py [--threads 2] [--rounds 5] [--batches 1 2 4 8]

Both run in this process, by turns, from the same 128 prompt tokens a sequence, with our sampler on one side and
transformers' own loop (dynamic cache) on theirs. A table of medians and fastest rounds, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in an engine: two processes on few cores

import torch
import transformers

from diptych.cluster.demo_model import ensure_demo_model
from diptych.contract.request import Sampling, Stopping
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.sampler import Sampler, SampleRow
from tests.support.paged import Driver

_PROMPT, _NEW = 128, 32


def _ours(decoder: Decoder, prompts: list[list[int]]) -> float:
    """Milliseconds a step."""
    driver, sampler = Driver(decoder), Sampler(decoder.config.vocab)
    blocks = [driver.blocks_for(_PROMPT + _NEW) for _ in prompts]
    for prompt, own in zip(prompts, blocks, strict=True):
        driver.prefill(prompt, own)
    row, last = SampleRow(Sampling(temperature=0), Stopping(max_tokens=_NEW), 0), [prompt[-1] for prompt in prompts]
    started = perf_counter()
    for step in range(_NEW):
        hidden = driver.run([([token], _PROMPT + step, own) for token, own in zip(last, blocks, strict=True)])
        last = [token for token, _ in sampler.sample(decoder.logits(hidden), [row] * len(prompts))]
    return (perf_counter() - started) / _NEW * 1e3


def _theirs(model: Any, prompts: list[list[int]]) -> float:
    """Milliseconds a step: what more tokens cost beyond the first."""
    ids = torch.tensor(prompts)

    def seconds(count: int) -> float:
        started = perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
        return perf_counter() - started

    first = seconds(1)
    return (seconds(_NEW + 1) - first) / _NEW * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    folder = ensure_demo_model()
    config = ModelConfig.from_folder(folder)
    decoder = Decoder(config, load(folder, config, torch.float32))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sides: dict[str, Callable[[list[list[int]]], float]] = {
        "diptych": lambda prompts: _ours(decoder, prompts),
        "transformers": lambda prompts: _theirs(model, prompts),
    }
    results: dict[int, dict[str, list[float]]] = {}
    print(f"{'batch':>5}  {'diptych':>16}  {'transformers':>16}  ratio of medians")
    for batch in given.batches:
        prompts = [[(97 * i + 31 * n) % config.vocab for i in range(_PROMPT)] for n in range(batch)]
        results[batch] = {name: [] for name in sides}
        for _ in range(given.rounds):
            for name, run in sides.items():
                results[batch][name].append(run(prompts))
        medians = {name: statistics.median(values) for name, values in results[batch].items()}
        cells = [f"{medians[name]:7.1f} ({min(values):5.1f})" for name, values in results[batch].items()]
        print(f"{batch:5}  {cells[0]:>16}  {cells[1]:>16}  {medians['diptych'] / medians['transformers']:.2f}")
    print(json.dumps({"torch": torch.__version__, "threads": given.threads, "ms_a_step": results}))


if __name__ == "__main__":
    main()
