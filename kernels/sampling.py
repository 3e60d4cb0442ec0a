"""Drawing one token a row from logits. The draw is a pure function of (seed, position) and of the row's own logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SampleParams:
    """How each of B rows is drawn, as tensors [B] on the logits' device. A feature that no row of the batch uses is
    None and costs nothing.

    temperature: float32, > 0; 0 marks a greedy row. seed: int64 >= 0. position: int64, index of the generated token.
    top_k: int64, 0 is off. top_p: float32, 1 is off. min_p: float32, 0 is off.
    """

    temperature: Tensor
    seed: Tensor
    position: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
