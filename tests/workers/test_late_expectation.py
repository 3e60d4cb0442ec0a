"""KV that reaches a rank before its group's first rank has told it of the sequence."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch

from diptych.contract.limits import Limits
from diptych.contract.request import Key
from diptych.contract.wire import WorkerInfo
from diptych.workers.cache import KVCache
from diptych.workers.parallel.layout import Grid
from diptych.workers.transfer.events import Arrived, Event, PeerUp, SendClosed
from diptych.workers.transfer.landing import Landing, Landings
from diptych.workers.transfer.plan import routes
from diptych.workers.transfer.receiver import Receiver
from diptych.workers.transfer.sender import SendFinish, SendLink, SendTokens

ONE, TWO = Grid(), Grid(1, 2)
HEADS, TOKENS, RANK = 2, 40, 1
LIMITS = Limits(progress=8.0)
(ROUTE,) = (route for route in routes(HEADS, 1, 2) if route.target == RANK)


class _Asked(Landings):
    """Tells when a link looks for a landing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def find(self, key: Key, limit: float = 0.0) -> Landing | None:
        self.asked.set()
        return super().find(key, limit)


class _Link:
    """From a prefill worker of one rank to the second rank of a decode worker."""

    def __init__(self) -> None:
        self.landings, self.events = _Asked(), queue.SimpleQueue[Event]()
        self.source = KVCache(2, 4, 16, HEADS, 8)
        self.source.data.copy_(torch.randn(self.source.data.shape))
        self.target = KVCache(2, 8, 16, 1, 8)
        receiver = Receiver(
            b"s", "0", "digest", RANK, TWO, HEADS, self.target.layout, self.landings, "127.0.0.1", "cpu", "gloo",
            LIMITS, 1 << 10, self.events.put,
        )  # fmt: skip
        receiver.start()
        peer = WorkerInfo("decode", "decode", "", (receiver.address,) * 2, "0", "digest", 0, (0,), 16, 8, 64)
        self.sender = SendLink(
            peer, "prefill", b"s", "digest", self.source, ROUTE, (0, RANK), (ONE, TWO), receiver.address,
            "127.0.0.1", "gloo", LIMITS, 1 << 10, self.events.put,
        )  # fmt: skip
        self.sender.start()
        while not isinstance(self.events.get(timeout=20.0), PeerUp):
            pass

    def send(self, key: Key) -> None:
        self.sender.queue(SendTokens(key, (0, 1, 2), 0, TOKENS))
        self.sender.queue(SendFinish(key, TOKENS, 7))

    def expect(self, key: Key) -> None:
        self.landings.open(Landing(self.target, key, "prefill", [ROUTE], [5, 2, 7], 0, TOKENS))

    def until(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.events.get(timeout=20.0), kind):
            pass
        return event


def test_it_waits_for_the_order() -> None:
    """Several messages: the first is held, none is lost."""
    link, key = _Link(), Key("r")
    link.send(key)
    assert link.landings.asked.wait(20.0)
    link.expect(key)
    assert isinstance(arrived := link.until(Arrived), Arrived)
    assert arrived.first_token == 7
    closed = link.until(SendClosed)
    assert isinstance(closed, SendClosed)
    assert closed.failure is None
    assert closed.stats.messages > 1
    sent = link.source.pages[:, :, :3, :, ROUTE.from_head].reshape(2, 2, 48, 8)[:, :, :TOKENS]
    came = link.target.pages[:, :, [5, 2, 7], :, 0].reshape(2, 2, 48, 8)[:, :, :TOKENS]
    assert torch.equal(sent, came)


def test_what_was_cancelled_is_not_waited_with() -> None:
    """Whether the order to close came before anything or after the beginning."""
    link = _Link()
    for key, opened in ((Key("never"), False), (Key("once"), True)):
        if opened:
            link.expect(key)
        link.landings.close(key)
        begun = time.monotonic()
        link.send(key)
        closed = link.until(SendClosed)
        assert isinstance(closed, SendClosed)
        assert closed.failure is not None
        assert closed.failure.code == "Cancelled"
        assert time.monotonic() - begun < LIMITS.progress / 4


def test_an_order_that_never_comes_is_waited_for_with_a_limit() -> None:
    landings, begun = Landings(), time.monotonic()
    assert landings.find(Key("r"), 0.2) is None
    assert 0.2 <= time.monotonic() - begun < 2.0


@pytest.mark.parametrize("count", [1, 5000])
def test_closed_keys_are_remembered_but_not_for_ever(count: int) -> None:
    landings = Landings()
    for number in range(count):
        landings.close(Key(str(number)))
    begun = time.monotonic()
    assert landings.find(Key(str(count - 1)), 30.0) is None
    assert time.monotonic() - begun < 1.0
    assert len(landings._closed) <= 4096
