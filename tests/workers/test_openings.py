"""A peer that dies or stalls while a link's two-rank group is made: the other end is told within a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from diptych.contract.errors import TransferFailed, TransferTimeout
from diptych.contract.limits import Limits
from diptych.workers.transfer.pair import Pair, open_pair
from tests.support.openings import receiver_goes, sender_goes

PATIENT = Limits(handshake=9.0, progress=9.0)
HASTY = Limits(handshake=1.0, progress=9.0)
AT_ONCE = 2.0


def test_a_sender_that_dies() -> None:
    took, next_one = sender_goes("cpu", PATIENT, silent=False)
    assert took < AT_ONCE
    assert next_one < AT_ONCE, "what is left of the first keeps the second waiting"


def test_a_sender_that_stalls() -> None:
    took, _ = sender_goes("cpu", HASTY, silent=True)
    assert HASTY.handshake <= took < HASTY.handshake + AT_ONCE


def test_a_receiver_that_dies() -> None:
    took, code = receiver_goes("cpu", PATIENT, silent=False)
    assert (took < AT_ONCE, code) == (True, "DecodeLost")


def test_a_receiver_that_stalls() -> None:
    took, code = receiver_goes("cpu", HASTY, silent=True)
    assert HASTY.handshake <= took < HASTY.handshake + AT_ONCE
    assert code == "TransferTimeout"


class _Held:
    """A pair whose library does not return until it is let go, as NCCL's may."""

    def __init__(self) -> None:
        self.go, self.closed = threading.Event(), threading.Event()

    def make(self) -> Pair:
        self.go.wait(30.0)
        pair: Any = self
        return pair

    def close(self) -> None:
        self.closed.set()


def _gone() -> None:
    raise TransferFailed("The link's peer closed its connection.")


@pytest.mark.parametrize(
    ("alive", "limit", "error"), [(_gone, 30.0, TransferFailed), (lambda: None, 0.2, TransferTimeout)]
)
@pytest.mark.parametrize("where", ["make", "first"])
def test_a_library_that_does_not_return_is_given_up(
    alive: Callable[[], None], limit: float, error: type[Exception], where: str
) -> None:
    """And its pair is closed if it ever does."""
    held = _Held()
    pair: Any = held

    def first(made: Pair) -> None:
        held.make()

    make, then = (held.make, lambda made: None) if where == "make" else (lambda: pair, first)
    with pytest.raises(error):
        open_pair(make, then, alive, limit)
    assert not held.closed.is_set()
    held.go.set()
    assert held.closed.wait(5.0)


def test_what_the_library_raises_is_raised_and_the_pair_closed() -> None:
    held = _Held()
    pair: Any = held

    def first(made: Pair) -> None:
        raise TransferFailed("broken")

    with pytest.raises(TransferFailed, match="broken"):
        open_pair(lambda: pair, first, lambda: None, 5.0)
    assert held.closed.is_set()
