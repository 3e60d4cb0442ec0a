"""The survey's table 6: tokens/s at batch 1 with 1,024 tokens in and 128 out, ours and transformers'."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from diptych.bench.engine import Bench
from diptych.profile.memory import tidy

PROMPT, NEW, ROUNDS = 1024, 128, 3
CACHE_BYTES = 4 << 30  # one sequence of the largest shape; the whole card would have to be given back after
PUBLISHED = {
    "Hugging Face": 39, "LightLLM": 74, "DeepSpeed": 81, "OpenPPL": 81, "vLLM": 90, "TensorRT-LLM": 93,
    "FlashDecoding++": 107,
}  # fmt: skip
"""Tokens/s of Llama-2-7B on an A100, as published there (arXiv 2404.14294)."""


def table6(plan: Any, told: Callable[[str], None]) -> dict[str, Any]:
    """Whole generations, prefill included, the best of some; ours through the engine's own loop."""
    runs = {"diptych": _ours, "transformers": _theirs}
    rows = []
    for name in plan.engines:
        told(name)
        tidy(plan.device)
        seconds = runs[name](plan)
        rate = round(NEW / min(seconds), 2)
        rows.append({"engine": name, "tokens_s": rate, "seconds": [round(each, 4) for each in seconds]})
    return {"prompt": PROMPT, "new": NEW, "batch": 1, "rows": rows, "published_a100_llama_2_7b": PUBLISHED}


def _ours(plan: Any) -> list[float]:
    options = argparse.Namespace(
        device=str(plan.device), budget=PROMPT, context=PROMPT + NEW, no_graphs=False,
        threads=torch.get_num_threads(), cache_bytes=CACHE_BYTES if plan.device.type == "cuda" else 0,
    )  # fmt: skip
    bench = Bench(plan.folder, plan.form, 1, options)
    bench.run(1, PROMPT, 8)
    return [bench.run(1, PROMPT, NEW) for _ in range(ROUNDS)]


def _theirs(plan: Any) -> list[float]:
    from diptych.profile.theirs import Theirs

    engine = Theirs(plan.folder, plan.config, plan.dtype, plan.device, plan.form)
    return [engine.generate(PROMPT, NEW) for _ in range(ROUNDS)]
