"""The control socket beside each two-rank group: framed messages, a mutual challenge, and the peer's liveness.

It carries no KV. It exists because a group alone tells neither when to post (a send or receive whose peer is late spins
on a GPU), nor promptly that the peer died while the link is idle: a closed socket does, within milliseconds.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import Literal, TypeVar

import msgspec

from diptych.contract.errors import (
    DiptychError,
    Internal,
    LayoutMismatch,
    TransferFailed,
    TransferTimeout,
    Unauthenticated,
    from_wire,
)
from diptych.contract.request import Key
from diptych.contract.wire import PROTOCOL
from diptych.workers.parallel.layout import Grid


class LinkHello(msgspec.Struct, frozen=True, tag=True):
    """The sender's first message. pair: unique name of the group to be made. source, target: the ranks at its ends, in
    groups whose ranks are `sources` and `targets`."""

    pair: str
    sender: str
    receiver_epoch: str
    digest: str
    transport: str
    nonce: bytes
    source: int = 0
    sources: Grid = Grid()
    target: int = 0
    targets: Grid = Grid()
    protocol: int = PROTOCOL


class LinkChallenge(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes
    proof: bytes


class LinkProof(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class LinkOpen(msgspec.Struct, frozen=True, tag=True):
    """Both sides now make the group through the receiver's store."""

    store_host: str
    store_port: int


class LinkRefused(msgspec.Struct, frozen=True, tag=True):
    code: str
    message: str


class LinkReady(msgspec.Struct, frozen=True, tag=True):
    """The receiver has warmed the group up and waits for pieces."""


class Piece(msgspec.Struct, frozen=True, tag=True):
    """Announces a payload of tokens [first, first + count). The sender launches it at `Ready`."""

    key: Key
    number: int
    first: int
    count: int
    bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The receive is posted."""

    number: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The payload left the staging slot. wanted: False when nobody here waits for this request any more."""

    key: Key
    number: int
    wanted: bool


class Finish(msgspec.Struct, frozen=True, tag=True):
    """All pieces were sent: the receiver now must hold `total` prompt tokens. first_token seeds decode."""

    key: Key
    total: int
    first_token: int
    pieces: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Finish`: an empty code when the sequence was handed over whole; the sender releases its blocks."""

    key: Key
    code: str = ""
    message: str = ""


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """The sender will send no more of this request."""

    key: Key
    code: str
    message: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    pass


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


Frame = (
    LinkHello | LinkChallenge | LinkProof | LinkOpen | LinkRefused | LinkReady
    | Piece | Ready | Done | Finish | Accepted | Abandon | Ping | Pong
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
MAX_FRAME = 1 << 20


class Control:
    """One end of a control socket, used by one thread. Every read and write has a limit."""

    def __init__(self, sock: socket.socket, limit: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.limit = limit
        self._buffer = bytearray()

    def write(self, frame: Frame) -> None:
        body = _encoder.encode(frame)
        self.sock.settimeout(self.limit)
        try:
            self.sock.sendall(struct.pack("<I", len(body)) + body)
        except TimeoutError as error:
            raise TransferTimeout(f"The link's peer took no message for {self.limit:.0f} s.") from error
        except OSError as error:
            raise TransferFailed(f"The link's peer is gone ({error}).") from error

    def read(self, limit: float | None = None) -> Frame:
        """The next frame, within `limit` seconds (the link's own by default): `TransferTimeout` after it,
        `TransferFailed` when the peer is gone."""
        deadline = time.monotonic() + (self.limit if limit is None else limit)
        while (frame := self._parse()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    f"The link's peer said nothing for {self.limit if limit is None else limit:.1f} s."
                )
            self._fill(left)
        return frame

    def poll(self) -> Frame | None:
        """The next frame if it is here already."""
        frame = self._parse()
        if frame is None:
            try:
                self._fill(0.0)
            except TransferTimeout:
                return None
            frame = self._parse()
        return frame

    def check(self) -> None:
        """Raises `TransferFailed` when the peer is gone; never waits."""
        self.sock.settimeout(0.0)
        try:
            if not self.sock.recv(1, socket.MSG_PEEK):
                raise TransferFailed("The link's peer closed its connection.")
        except BlockingIOError:
            return
        except OSError as error:
            raise TransferFailed(f"The link's peer is gone ({error}).") from error

    def _fill(self, limit: float) -> None:
        self.sock.settimeout(limit)
        try:
            data = self.sock.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            if limit == 0.0:
                raise TransferTimeout("Nothing to read.") from None
            return
        except OSError as error:
            raise TransferFailed(f"The link's peer is gone ({error}).") from error
        if not data:
            raise TransferFailed("The link's peer closed its connection.")
        self._buffer += data

    def _parse(self) -> Frame | None:
        if len(self._buffer) < 4:
            return None
        (size,) = struct.unpack_from("<I", self._buffer)
        if size > MAX_FRAME:
            raise TransferFailed(
                f"The link's peer announced a message of {size} bytes; it does not speak this protocol."
            )
        if len(self._buffer) < 4 + size:
            return None
        body = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"The link's peer sent what is no message of this protocol ({error}).") from error

    def close(self) -> None:
        self.sock.close()


def _proof(secret: bytes, side: Literal["sender", "receiver"], hello: LinkHello, nonce: bytes) -> bytes:
    text = b"|".join(
        [
            b"diptych-link",
            side.encode(),
            hello.pair.encode(),
            hello.sender.encode(),
            hello.receiver_epoch.encode(),
            hello.nonce,
            nonce,
        ]
    )
    return hmac.new(secret, text, hashlib.sha256).digest()


def knock(control: Control, secret: bytes, hello: LinkHello) -> LinkOpen:
    """The sender's half of the opening: proves to know the secret, and that the other side does. The secret itself
    crosses no connection."""
    control.write(hello)
    challenge = _expect(control, LinkChallenge)
    if not hmac.compare_digest(challenge.proof, _proof(secret, "receiver", hello, challenge.nonce)):
        raise Unauthenticated("The link's receiver does not hold this service's secret.")
    control.write(LinkProof(_proof(secret, "sender", hello, challenge.nonce)))
    return _expect(control, LinkOpen)


def answer(
    control: Control, secret: bytes, epoch: str, digest: str, transport: str, store: tuple[str, int]
) -> LinkHello:
    """The receiver's half. Refuses, in this order, a stranger, another epoch, another layout, another transport; a
    stranger learns nothing but that it is one."""
    hello = _expect(control, LinkHello)
    nonce = secrets.token_bytes(32)
    control.write(LinkChallenge(nonce, _proof(secret, "receiver", hello, nonce)))
    proof = _expect(control, LinkProof)
    refusal: DiptychError | None = None
    if not hmac.compare_digest(proof.proof, _proof(secret, "sender", hello, nonce)):
        refusal = Unauthenticated("The link's sender does not hold this service's secret.")
    elif hello.receiver_epoch != epoch:
        refusal = TransferFailed(
            f"This is epoch {epoch}; the sender looks for {hello.receiver_epoch}, which has ended."
        )
    elif (hello.digest, hello.protocol) != (digest, PROTOCOL):
        refusal = LayoutMismatch(
            f"Prefill and decode do not match: digest {hello.digest} and protocol {hello.protocol} against {digest} and"
            f" {PROTOCOL}. Model, dtype, block size and version must be the same."
        )
    elif hello.transport != transport:
        refusal = LayoutMismatch(f"The sender's transport is {hello.transport} and the receiver's is {transport}.")
    if refusal is not None:
        control.write(LinkRefused(refusal.code, str(refusal)))
        raise refusal
    control.write(LinkOpen(*store))
    return hello


T = TypeVar("T", bound=msgspec.Struct)


def _expect(control: Control, kind: type[T]) -> T:
    frame = control.read()
    if isinstance(frame, LinkRefused):
        raise from_wire(frame.code, frame.message)
    if not isinstance(frame, kind):
        raise Internal(f"The link's peer sent {type(frame).__name__} where {kind.__name__} was due.")
    return frame
