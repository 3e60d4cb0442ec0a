"""Batch invariance: one kernel a product and one for attention, all cut the same way whatever runs beside a token.

What makes a token's bits depend on its batch is choosing: another product at another number of rows, keys divided over
as many blocks as the batch leaves free, decode's kernel here and prefill's there. Inside `batch_invariant` nothing is
chosen. Launchers ask `is_batch_invariant`; the decoder enters it, so a captured step keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from diptych.kernels.dataflow import Choice, Problem

ROWS = 64
"""Rows of x that a block of the fixed product takes; of a batch's rows the last block's are padded."""
PLACES = 132
"""Blocks that K is split for. A number, not the device's: the sums must not depend on it."""

_on: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """While `on`, operators called in this context give a row the same bits in every batch."""
    before = _on.set(on)
    try:
        yield
    finally:
        _on.reset(before)


def is_batch_invariant() -> bool:
    return _on.get()


def fixed_choice(problem: Problem) -> Choice:
    """The one product for a weight: a function of K, N, dtype and fusion, never of M."""
    wide = problem.dtype == "float32"
    bn, bk = (64, 32) if wide else (128, 64)
    tiles = -(-problem.n // (2 if problem.fusion == "norm_gate" else 1) // bn)
    split = max(s for s in (1, 2, 4, 8) if s == 1 or (tiles * s <= PLACES and problem.k >= 4 * s * bk))
    return Choice("flat", bn, bk, split, 4, 3, apart=problem.fusion != "plain", rows=ROWS)
