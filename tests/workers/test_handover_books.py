"""The hand-over's books where a sequence is at another data rank than the engine: who is told, what is revoked."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from diptych.contract.request import Key, Request, Stopping
from diptych.workers.blocks import BlockPool
from diptych.workers.handover import Handover
from diptych.workers.parallel.layout import Grid
from diptych.workers.parallel.lead import Followers
from diptych.workers.parallel.orders import CloseOrder, ExpectOrder, Line
from diptych.workers.sequence import Sequence
from diptych.workers.settings import WorkerSettings
from diptych.workers.transfer.events import Begun


class OwnLinks:
    """The first rank's: only what is asked of them is noted."""

    address, transport = "", "gloo"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def expect(self, *given: object) -> None:
        self.asked.append("expect")

    def close(self, key: Key, unless_begun: bool = False) -> bool:
        self.asked.append("close")
        return True


class Silent:
    """In the engine's place."""

    def report_due(self) -> None:
        pass


def _handover(grid: Grid) -> tuple[Handover, OwnLinks, list[Line]]:
    pairs = [socket.socketpair() for _ in range(grid.ranks - 1)]
    settings = WorkerSettings(model="", role="decode", data=grid.data, tensor=grid.tensor)
    own: Any = OwnLinks()
    pools = [BlockPool(8, 4) for _ in range(grid.data)]
    followers = Followers([Line(ours) for ours, _ in pairs], grid)
    return Handover(settings, 2, pools, followers, lambda: None, lambda report: own), own, [Line(b) for _, b in pairs]


def _reserved(data_rank: int) -> Sequence:
    request = Request(Key(f"at-{data_rank}"), tuple(range(9)), Stopping(4))
    return Sequence(request, "s", 4, prefill="prefill", data_rank=data_rank, blocks=[1, 2, 3])


def test_only_the_ranks_of_a_sequences_data_rank_hear_of_it() -> None:
    handover, own, lines = _handover(Grid(2, 2))
    for data_rank, told in ((0, [0]), (1, [1, 2])):
        own.asked.clear()
        seq = _reserved(data_rank)
        handover.expect(seq)
        assert own.asked == (["expect"] if data_rank == 0 else [])
        assert handover.revoke(seq)
        for number in told:
            expected, closed = lines[number].order(), lines[number].order()
            assert isinstance(expected, ExpectOrder)
            assert isinstance(closed, CloseOrder)
            assert expected.key == closed.key == seq.key
    for line in lines:
        line.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            line.sock.recv(1)


def test_what_has_begun_to_come_at_another_data_rank_is_not_revoked() -> None:
    handover, _, _ = _handover(Grid(2, 1))
    engine: Any = Silent()
    seq = _reserved(1)
    handover.expect(seq)
    handover.post(Begun(seq.key, 1))
    handover.events(engine)
    assert not handover.revoke(seq)
