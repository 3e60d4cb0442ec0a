"""The rotary embedding's tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diptych.kernels.rope import Rope
from diptych.workers.model.rope_config import RopeConfig


def rope_tables(config: RopeConfig, positions: int, device: torch.device | str = "cpu") -> Rope:
    """The tables of positions 0 … positions - 1, computed in float32 as transformers does."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies(config)
    cos, sin = angles.cos(), angles.sin()
    return Rope(torch.cat((cos, cos), 1).to(device), torch.cat((-sin, sin), 1).to(device))


def frequencies(config: RopeConfig) -> Tensor:
    """Radians a position of each pair: [dim / 2] float32."""
    plain = 1.0 / (config.theta ** (torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim))
    if config.kind == "linear":
        return plain / config.factor
    return _ramp(config, plain) if config.kind == "llama3" else plain


def _ramp(config: RopeConfig, plain: Tensor) -> Tensor:
    """Turns within the original context: at most `low` → divided, at least `high` → kept, linear between."""
    share = (config.original / (2 * math.pi / plain) - config.low) / (config.high - config.low)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / config.factor + share * plain
