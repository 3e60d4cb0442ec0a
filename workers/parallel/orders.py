"""The line between a group's first rank and each other one: orders out, reports back, framed over a socket pair.

An order says what to do, never why: queues, pools and requests' ends are the first rank's matter alone. Orders are
carried out one after another, so an order that gives a block away is never overtaken by one that uses it again. Each
end sees the other's death as the end of the stream.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from threading import Lock
from typing import Any

import msgspec

from diptych.contract.request import Key, Request
from diptych.contract.wire import Logprob, WorkerInfo
from diptych.workers.channel import frame
from diptych.workers.transfer.events import Event
from diptych.workers.transfer.links import Peer


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first order: where the group meets."""

    store_host: str
    store_port: int


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that stands in a step for the first time. output: tokens drawn elsewhere already."""

    handle: int
    request: Request
    output: tuple[int, ...]


class RowOrder(msgspec.Struct, frozen=True, array_like=True):
    """A row of a step. Its block table is the first `keep` blocks of the one known so far, then `blocks`."""

    handle: int
    start: int
    count: int
    sample: bool
    keep: int
    blocks: tuple[int, ...]


class StepOrder(msgspec.Struct, frozen=True, tag=True):
    """A data rank's part of a step, perhaps empty. Commit launched steps until `ahead` are left, forget `closed`,
    launch this one, commit until `keep` are left. drawn: all tokens of this data rank in the steps that the first rank
    committed since the last order; a rank that drew others must not go on."""

    number: int
    ahead: int
    keep: int
    drawn: tuple[int, ...]
    opened: tuple[Opened, ...]
    closed: tuple[int, ...]
    rows: tuple[RowOrder, ...]


class CommitOrder(msgspec.Struct, frozen=True, tag=True):
    """Commit launched steps until `ahead` are left: the first rank waits for what they drew."""

    ahead: int


class PeersOrder(msgspec.Struct, frozen=True, tag=True):
    """All decode workers that are registered now (prefill)."""

    workers: tuple[WorkerInfo, ...]


class ExpectOrder(msgspec.Struct, frozen=True, tag=True):
    """Open these blocks to the sender's links (decode)."""

    key: Key
    sender: str
    blocks: tuple[int, ...]
    held: int
    total: int


class CloseOrder(msgspec.Struct, frozen=True, tag=True):
    """Nothing is written to the key's blocks any more (decode)."""

    key: Key


class SendOrder(msgspec.Struct, frozen=True, tag=True):
    """Send tokens [first, end) of these blocks to a decode worker's data rank; the steps that computed them are
    committed when `ahead` launched ones are left. (prefill)"""

    peer: Peer
    key: Key
    blocks: tuple[int, ...]
    first: int
    end: int
    ahead: int


class FinishOrder(msgspec.Struct, frozen=True, tag=True):
    peer: Peer
    key: Key
    total: int
    first_token: int


class AbandonOrder(msgspec.Struct, frozen=True, tag=True):
    """What is queued for the key is skipped (prefill)."""

    peer: Peer
    key: Key
    code: str
    message: str


Order = Join | StepOrder | CommitOrder | PeersOrder | ExpectOrder | CloseOrder | SendOrder | FinishOrder | AbandonOrder


class Told(msgspec.Struct, frozen=True, tag=True):
    """What one of the rank's links reported."""

    event: Event


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What the first rank of another data rank drew in its part of a step. prompt: by the part's rows."""

    number: int
    drawn: tuple[tuple[int, Logprob | None], ...]
    prompt: dict[int, list[Logprob]]


_orders = msgspec.msgpack.Decoder(Order)
_told = msgspec.msgpack.Decoder(Told | Answer)


class Line:
    """One end of a line. `send` and `report` may be called by any thread, `order` and `told` by one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(True)
        self._buffer = bytearray()
        self._lock = Lock()

    def send(self, message: msgspec.Struct) -> None:
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """A packed message, which several lines may share. Raises EOFError when the other end is gone."""
        try:
            with self._lock:
                self.sock.sendall(data)
        except OSError as error:
            raise EOFError("the line's other end is gone") from error

    def order(self) -> Order:
        """The next order; blocks. Raises EOFError when the first rank is gone."""
        found: Order = _orders.decode(self._frame())
        return found

    def told(self) -> Told | Answer:
        """What the rank says next; blocks. Raises EOFError when the rank is gone."""
        found: Told | Answer = _told.decode(self._frame())
        return found

    def report(self, event: Event) -> None:
        """Tells the first rank what a link reported. When that rank is gone nobody needs it any more."""
        with contextlib.suppress(EOFError):
            self.send(Told(event))

    def _frame(self) -> Any:
        while True:
            if len(self._buffer) >= 4:
                (size,) = struct.unpack_from("<I", self._buffer)
                if len(self._buffer) >= 4 + size:
                    body = bytes(memoryview(self._buffer)[4 : 4 + size])
                    del self._buffer[: 4 + size]
                    return body
            try:
                data = self.sock.recv(1 << 20)
            except OSError as error:
                raise EOFError("the line's other end is gone") from error
            if not data:
                raise EOFError("the line's other end is gone")
            self._buffer += data
