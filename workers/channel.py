"""The line between a front and its engine: length-prefixed msgpack frames over an inherited socket pair.

Each end sees the other's death as the end of the stream, at once: a front kills its group then, an engine exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import struct
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from diptych.contract.errors import Internal
from diptych.contract.wire import Load, WorkerInfo
from diptych.workers.settings import WorkerSettings


class Launch(msgspec.Struct, frozen=True, tag=True):
    """A front's first frame. The secret travels here and in no environment or command line."""

    settings: WorkerSettings
    secret: bytes
    epoch: str
    id: str
    rank: int = 0


class Deliver(msgspec.Struct, frozen=True, tag=True):
    """A router's message, as it came."""

    session: str
    message: bytes


class Peers(msgspec.Struct, frozen=True, tag=True):
    """All workers that are registered now (to a prefill engine, which makes links to those that decode)."""

    workers: tuple[WorkerInfo, ...]


class SessionGone(msgspec.Struct, frozen=True, tag=True):
    """A router's session ended: so does everything it holds here."""

    session: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new; go on with what is here."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far a start is: first the weights (in bytes), then the decode steps that are captured as graphs."""

    what: Literal["weights", "graphs"] = "weights"
    done: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.done / self.total if self.total else 0.0


class Up(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready."""

    link: str
    digest: str
    block_size: int
    total_blocks: int
    max_context: int
    pid: int
    device: str
    transport: str


class Emit(msgspec.Struct, frozen=True, tag=True):
    """A message for a router, packed."""

    session: str
    message: bytes


class Report(msgspec.Struct, frozen=True, tag=True):
    """The engine's load, after a step or at a heartbeat: an engine that sends none for `limits.step` is dead. The front
    stamps its clock and sends it on."""

    load: Load


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine's last words."""

    code: str
    message: str


ToEngine = Launch | Deliver | Peers | SessionGone | Drain
ToFront = Loading | Up | Emit | Report | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)
MAX_FRAME = 64 << 20


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return struct.pack("<I", len(body)) + body


class EngineChannel:
    """The engine's end. `wait` sleeps on the socket and on `wake`, which any thread may call."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.setblocking(True)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._buffer = bytearray()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a wake-up is pending already
            self._waker.send(b"w")

    def wait(self, seconds: float) -> Iterator[ToEngine]:
        """Sleeps at most `seconds`, then yields what has come. Raises EOFError when the front is gone."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
                continue
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError("the front is gone")
            self._buffer += data
        yield from self._frames()

    def first(self) -> Launch:
        """Blocks for the launch frame; the launcher writes it before anything else."""
        while True:
            for message in self.wait(60.0):
                if not isinstance(message, Launch):
                    raise Internal(f"{type(message).__name__} came before Launch.")
                return message

    def _frames(self) -> Iterator[ToEngine]:
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from("<I", self._buffer)
            if len(self._buffer) < 4 + size:
                return
            body = bytes(memoryview(self._buffer)[4 : 4 + size])
            del self._buffer[: 4 + size]
            yield _to_engine.decode(body)

    def send(self, message: ToFront) -> None:
        self.sock.sendall(frame(message))


class FrontChannel:
    """The front's end, on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def over(cls, sock: socket.socket) -> FrontChannel:
        return cls(*await asyncio.open_connection(sock=sock, limit=MAX_FRAME))

    def send(self, message: ToEngine) -> None:
        """Queues a frame; the engine reads at every step, so what gathers here is bounded by what routers may send."""
        if not self.writer.is_closing():
            self.writer.write(frame(message))

    async def receive(self) -> ToFront:
        """The next frame, or EOFError when the engine is gone."""
        try:
            (size,) = struct.unpack("<I", await self.reader.readexactly(4))
            result: Any = _to_front.decode(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the engine is gone") from error
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        self.writer.close()
