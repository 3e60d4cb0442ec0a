"""The range of attention scores before softmax, over real texts: what a unified maximum (arXiv 2311.01282) relies on.

Dummy weights cannot show it: random queries and keys are nearly orthogonal, trained ones are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.demo import PROMPTS
from diptych.router.tokenizer import Tokenizer
from diptych.workers.model.calibration import BINS, REACH, calibrate
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load

SHARE = 0.9999
PUBLISHED = {"Llama-2-7B": (-16.8, 6.5), "ChatGLM2-6B": (-10.5, 13.7), "OPT-6.7B": (-496.8, 363.5)}
"""Windows for more than 99.99 % of all scores, as published there."""
_MODULES = ("argparse", "statistics", "logging", "heapq", "datetime", "textwrap", "random", "decimal", "zipfile")
_TOKENS = 512


def texts() -> list[str]:
    """Real texts that every machine has: the demo's prompts, and what Python's own modules say of themselves."""
    found = list(PROMPTS)
    for name in _MODULES:
        try:
            found.append(importlib.import_module(name).__doc__ or "")
        except ImportError:
            continue
    return [text for text in found if text.strip()]


def softmax_range(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    config = ModelConfig.from_folder(folder)
    tokenizer = Tokenizer.load(folder)
    prompts = [list(tokenizer.encode(text))[:_TOKENS] for text in texts()]
    decoder = Decoder(config, load(folder, config, dtype, device))
    found = calibrate(decoder, prompts)
    low, high = window(found.histogram, SHARE)
    return {
        "prompts": len(prompts), "tokens": sum(map(len, prompts)), "scores": sum(found.histogram),
        "smallest": round(found.scores[0], 3), "largest": round(found.scores[1], 3), "bin": 2 * REACH / BINS,
        "share": SHARE, "window": [low, high], "share_inside": round(inside(found.histogram, low, high), 6),
        "unified_maximum": {"phi": round(found.phi, 3), "reach": found.high, "rows_inside": found.rows_inside},
        "histogram": list(found.histogram),
    }  # fmt: skip


def window(counts: Sequence[int], share: float) -> tuple[float, float]:
    """The window, in whole bins, that leaves out half of 1 - `share` at most on each side."""
    total, width = sum(counts), 2 * REACH / BINS
    allowed = (1 - share) / 2 * total
    low, left = 0, counts[0]
    while left <= allowed:
        low += 1
        left += counts[low]
    high, right = BINS - 1, counts[-1]
    while right <= allowed:
        high -= 1
        right += counts[high]
    return -REACH + low * width, -REACH + (high + 1) * width


def inside(counts: Sequence[int], low: float, high: float) -> float:
    width = 2 * REACH / BINS
    first, last = round((low + REACH) / width), round((high + REACH) / width)
    return sum(counts[first:last]) / sum(counts)
