"""The rotary embedding's configuration, in both spellings, and its tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diptych.contract.errors import ModelUnsupported
from diptych.kernels.rope import Rope
from diptych.workers.model.family import Family

_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


@dataclass(frozen=True)
class RopeConfig:
    """kind: default, linear (all frequencies divided by `factor`) or llama3 (long waves divided by `factor`, short ones
    kept, a ramp between: Llama 3.1's). dim: the rotated part of a head."""

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    original: int = 0

    @classmethod
    def from_dict(cls, raw: dict[str, Any], family: Family, head_dim: int, max_positions: int) -> RopeConfig:
        """Reads config.json. Newer files keep everything in `rope_parameters`, older ones the base in `rope_theta` and
        the rest in `rope_scaling`, whose type is `type` or `rope_type`. Where both speak, the inner value wins, as in
        transformers; two dictionaries that differ are refused."""
        inner, outer = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
        if inner and outer and inner != outer:
            raise ModelUnsupported("config.json sets both rope_parameters and rope_scaling, and they differ.")
        found = {key: value for key, value in (inner or outer).items() if value is not None}
        kind = found.pop("rope_type", None) or found.get("type", "default")
        found.pop("type", None)
        if kind not in family.rope_types:
            raise ModelUnsupported(f"rope_type {kind!r} is not supported for {family.architecture}.")
        theta = found.pop("rope_theta", None) or raw.get("rope_theta") or family.theta
        partial = found.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
        if partial != 1.0 and not family.partial:
            raise ModelUnsupported(f"partial_rotary_factor {partial} is not supported for {family.architecture}.")
        if kind == "llama3":
            found.setdefault("original_max_position_embeddings", max_positions)
        _check_keys(found, kind)
        return cls(
            theta=float(theta),
            dim=int(head_dim * partial),
            kind=kind,
            factor=float(found.get("factor", 1.0)),
            low=float(found.get("low_freq_factor", 1.0)),
            high=float(found.get("high_freq_factor", 1.0)),
            original=int(found.get("original_max_position_embeddings", 0)),
        )

    def tables(self, positions: int, device: torch.device | str = "cpu") -> Rope:
        """The tables of positions 0 … positions - 1, computed in float32 as transformers does."""
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * self.frequencies()
        cos, sin = angles.cos(), angles.sin()
        return Rope(torch.cat((cos, cos), 1).to(device), torch.cat((-sin, sin), 1).to(device))

    def frequencies(self) -> Tensor:
        """Radians a position of each pair: [dim / 2] float32."""
        plain = 1.0 / (self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim))
        if self.kind == "linear":
            return plain / self.factor
        return self._ramp(plain) if self.kind == "llama3" else plain

    def _ramp(self, plain: Tensor) -> Tensor:
        """Turns within the original context: at most `low` → divided, at least `high` → kept, linear between."""
        share = (self.original / (2 * math.pi / plain) - self.low) / (self.high - self.low)
        share = share.clamp(0.0, 1.0)
        return (1 - share) * plain / self.factor + share * plain


def _check_keys(found: dict[str, Any], kind: str) -> None:
    if missing := _KEYS[kind] - set(found):
        raise ModelUnsupported(
            f"rope_type {kind!r} needs {', '.join(sorted(missing))}, which config.json does not give."
        )
    if surplus := set(found) - _KEYS[kind]:
        if kind == "default" and surplus <= {"factor", "original_max_position_embeddings"}:
            return
        raise ModelUnsupported(f"rope_type {kind!r} does not know {', '.join(sorted(surplus))}.")
