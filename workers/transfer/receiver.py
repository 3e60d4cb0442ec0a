"""The receiving side of links: a listener for a decode engine, and a thread for each link that knocked.

The wire writes only into the link's two staging slots; a checked slot is copied into blocks through a landing, which
the engine may close at any moment. So a cancel frees blocks at once, and staging lives as long as its link.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import BoundedSemaphore, Thread
from time import monotonic_ns
from typing import Any

import torch

from diptych.contract.errors import (
    Cancelled,
    DiptychError,
    Internal,
    LayoutMismatch,
    PrefillLost,
    TransferCorrupt,
    TransferFailed,
    from_wire,
)
from diptych.contract.limits import Limits
from diptych.contract.request import Key
from diptych.workers.cache import KVLayout
from diptych.workers.parallel.layout import Grid
from diptych.workers.transfer.control import (
    Abandon,
    Accepted,
    Control,
    Done,
    Finish,
    Frame,
    LinkHello,
    LinkReady,
    Piece,
    Ping,
    Pong,
    Ready,
    answer,
)
from diptych.workers.transfer.events import Arrived, Begun, Event, Failure, Forsaken, PeerDown, PeerUp
from diptych.workers.transfer.landing import Landing, Landings
from diptych.workers.transfer.pair import (
    RECEIVER,
    Pair,
    Slots,
    Transport,
    connect_store,
    host_store,
    make_pair,
    open_pair,
)
from diptych.workers.transfer.plan import Route, Slice, routes, token_bytes

log = logging.getLogger("diptych.transfer")

STRANGERS = 64  # connections whose opening is not complete, each at most `limits.handshake` old


class Receiver(Thread):
    """Listens for links on a port of the kernel's choice, starts a `ReceiveLink` for each, owns the engine's store."""

    def __init__(
        self,
        secret: bytes,
        epoch: str,
        digest: str,
        rank: int,
        grid: Grid,
        kv_heads: int,
        layout: KVLayout,
        landings: Landings,
        host: str,
        device: str,
        transport: Transport,
        limits: Limits,
        message_bytes: int,
        post: Callable[[Event], None],
    ) -> None:
        """rank: this one, of `grid`'s. kv_heads: of the model; layout: of this rank's cache."""
        super().__init__(name="link-listener", daemon=True)
        self.rank, self.grid, self.kv_heads = rank, grid, kv_heads
        self.secret, self.epoch, self.digest, self.layout, self.landings = secret, epoch, digest, layout, landings
        self.host, self.limits, self.post = host, limits, post
        self.device, self.transport = device, transport
        self.message_bytes = max(message_bytes, layout.token_bytes)
        self.store, self.store_address = host_store(host, limits.handshake)
        self._listener = socket.create_server((host, 0), backlog=64)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._strangers = BoundedSemaphore(STRANGERS)

    def known(self) -> None:
        """A connection's opening is over, well or ill."""
        self._strangers.release()

    def run(self) -> None:
        """Lives as long as the process: an error of one connection (or too many open files) must not keep prefill
        workers from linking to a decode worker that looks healthy."""
        self._listener.settimeout(self.limits.heartbeat)
        while True:
            try:
                sock, _ = self._listener.accept()
                if self._strangers.acquire(blocking=False):
                    ReceiveLink(self, sock).start()
                else:
                    sock.close()
            except TimeoutError:
                continue
            except (OSError, RuntimeError):
                log.exception("a link was not taken")
                time.sleep(self.limits.heartbeat)


@dataclass
class _Incoming:
    piece: Piece
    works: list[Any]
    start: int


class ReceiveLink(Thread):
    """One link from one prefill worker, until its socket closes or anything about it fails."""

    def __init__(self, receiver: Receiver, sock: socket.socket) -> None:
        super().__init__(name="receive-link", daemon=True)
        self.receiver = receiver
        self.control = Control(sock, receiver.limits.handshake)
        self.sender = ""
        self.source = 0
        self._pair: Pair | None = None
        self._incoming: list[_Incoming] = []

    def run(self) -> None:
        error: DiptychError = TransferFailed("The link was closed.")
        try:
            try:
                self._open()
            finally:
                self.receiver.known()
            self.receiver.post(PeerUp(self.sender, self.source, self._sources, self.receiver.rank))
            self._serve()
        except DiptychError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - a bug here must end the link, never leave requests waiting
            error = Internal(f"The link from {self.sender} failed: {failure!r}")
        self.control.close()
        if self._pair is not None:
            self._pair.close()
        if type(error) is TransferFailed:
            error = PrefillLost(f"The link from prefill worker {self.sender} ended: {error}")
        if self.sender:
            self.receiver.post(PeerDown(self.sender, self.source, self.receiver.rank, Failure.of(error)))

    def _open(self) -> None:
        owner = self.receiver
        hello = answer(self.control, owner.secret, owner.epoch, owner.digest, owner.transport, owner.store_address)
        self._route = self._route_of(hello)
        self._slots = Slots(owner.message_bytes, owner.device, owner.transport)

        def first(pair: Pair) -> None:
            pair.finish(pair.receive(self._slots.clear(0, 0)), self.control.check)
            pair.answer(self.control.check)

        def make() -> Pair:
            # A connection of its own to the store: over a shared one, a pair that waits for its peer would keep all
            # others waiting.
            store = connect_store(owner.store_address, owner.limits.handshake)
            limit = owner.limits.progress
            return make_pair(owner.transport, store, hello.pair, RECEIVER, owner.host, owner.device, limit)

        self._pair = open_pair(make, first, self.control.check, owner.limits.handshake)
        self.control.write(LinkReady())
        self.control.limit = owner.limits.progress
        self.sender, self.source, self._sources = hello.sender, hello.source, hello.sources
        self._place = hello.sources.place(hello.source)
        self._far = owner.grid.place(owner.rank)[0] > 0  # the group's first rank has no landing of its own to look at

    def _route_of(self, hello: LinkHello) -> Route:
        owner = self.receiver
        (_, source), (_, target) = hello.sources.place(hello.source), owner.grid.place(owner.rank)
        if (hello.target, hello.targets) == (owner.rank, owner.grid) and hello.source < hello.sources.ranks:
            for route in routes(owner.kv_heads, hello.sources.tensor, owner.grid.tensor):
                if (route.source, route.target) == (source, target):
                    return route
        raise LayoutMismatch(
            f"Rank {hello.source} of {hello.sources.text} has nothing to send to rank {owner.rank} of"
            f" {owner.grid.text}, where it looked for rank {hello.target} of {hello.targets.text}; the model has"
            f" {owner.kv_heads} KV heads."
        )

    def _serve(self) -> None:
        while True:
            frame = self._next()
            if isinstance(frame, Piece):
                self._post(frame)
            elif isinstance(frame, Finish):
                self._complete_all()
                self._finish(frame)
            elif isinstance(frame, Abandon):
                self._complete_all()
                if frame.code != Cancelled.__name__:  # who cancelled prefill, the router, tells decode itself
                    self._forsake(frame.key, from_wire(frame.code, frame.message))
            elif isinstance(frame, Ping):
                self.control.write(Pong())
            else:
                raise Internal(f"The link's sender sent {type(frame).__name__}, which only a receiver may.")

    def _next(self) -> Frame:
        """The next frame; while payloads are under way they are finished as soon as no frame waits or both slots are
        taken, so that one piece is copied while the next is on the wire."""
        while self._incoming:
            frame = self.control.poll() if len(self._incoming) < 2 else None
            if frame is not None:
                return frame
            self._complete(self._incoming.pop(0))
        return self.control.read(self.receiver.limits.lease)

    def _post(self, piece: Piece) -> None:
        if not 0 < piece.bytes <= self.receiver.message_bytes:
            raise TransferCorrupt(
                f"A piece of {piece.bytes} bytes does not fit a slot of {self.receiver.message_bytes}."
            )
        assert self._pair is not None
        slot = self._slots.clear(piece.number, piece.bytes)
        start = monotonic_ns()
        self._incoming.append(_Incoming(piece, self._pair.receive(slot), start))
        self.control.write(Ready(piece.number))

    def _complete_all(self) -> None:
        while self._incoming:
            self._complete(self._incoming.pop(0))

    def _complete(self, incoming: _Incoming) -> None:
        assert self._pair is not None
        piece = incoming.piece
        self._pair.finish(incoming.works, self.control.check)
        end = monotonic_ns()
        self._pair.answer(self.control.check)
        self.control.write(Done(piece.key, piece.number, self._land(piece, (incoming.start, end))))

    def _landing(self, key: Key) -> Landing | None:
        """A rank that follows may be told to expect a sequence later than its KV comes: it carries orders out between
        steps, while the grant is on its way already. The sender hears nothing meanwhile."""
        owner = self.receiver
        return owner.landings.find(key, owner.limits.progress / 2 if owner.rank else 0.0)

    def _land(self, piece: Piece, wire: tuple[int, int]) -> bool:
        landing = self._landing(piece.key)
        layout, heads = self.receiver.layout, self._route.heads
        if landing is None or landing.sender != self.sender:
            return False
        shape = Slice(piece.first, piece.count).shape(layout, heads)
        due = piece.count * token_bytes(layout, heads)

        def unpack(raw: torch.Tensor) -> bool:
            slab = raw.view(layout.torch_dtype).view(shape)
            begun, written = landing.begun, landing.write(slab, self._place, piece.first, piece.count, wire)
            if written and not begun and self._far:
                self.receiver.post(Begun(piece.key, self.receiver.rank))
            return written

        try:
            if piece.bytes != due:
                raise TransferCorrupt(f"{piece.count} tokens came in {piece.bytes} bytes, not {due}.")
            return self._slots.empty(piece.number, piece.bytes, unpack)
        except TransferCorrupt as error:
            landing.close()
            self._forsake(piece.key, error)
            return False

    def _finish(self, frame: Finish) -> None:
        landing = self._landing(frame.key)
        if landing is None or landing.sender != self.sender:
            self.control.write(Accepted(frame.key, "Cancelled", "Decode no longer waits for this request."))
            return
        try:
            if landing.finish(self._place, frame.total, frame.pieces):
                self.receiver.post(Arrived(frame.key, self.receiver.rank, frame.first_token, landing.stats))
        except DiptychError as error:
            landing.close()
            if not isinstance(error, Cancelled):
                self._forsake(frame.key, error)
            self.control.write(Accepted(frame.key, error.code, str(error)))
            return
        self.control.write(Accepted(frame.key))

    def _forsake(self, key: Key, error: DiptychError) -> None:
        self.receiver.post(Forsaken(key, Failure.of(error)))
