"""Tables of the rotary embedding; read by `rope_attention`, made by the model from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rope:
    """Cosines and sines of every position, in the "two halves" form.

    Of a head's D elements the first R are rotated, pair (i, i + R/2) by angle position * f_i; the rest pass unchanged:

        y[i]       = x[i] * cos_i - x[i + R/2] * sin_i
        y[i + R/2] = x[i + R/2] * cos_i + x[i] * sin_i          i < R/2

    cos: [P, R] float32, the R/2 cosines twice. sin: [P, R] float32, the negated R/2 sines, then the sines, so that
    y = x * cos + roll(x, R/2) * sin. Attention scaling of a family that has it is multiplied in already.
    """

    cos: Tensor
    sin: Tensor

    @property
    def dim(self) -> int:
        """R, the rotated part of a head."""
        return self.cos.shape[1]
