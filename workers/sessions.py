"""A worker group's internal gRPC service: the sessions of its routers.

Owns their opening (both sides prove that they hold the service's secret), what waits to be sent to each, and what all
are told of the group's load and cached prefixes. Does not read requests: messages pass between router and engine as
they came.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from itertools import islice

import grpc
import msgspec

from diptych.contract.errors import DiptychError, LayoutMismatch, Unauthenticated
from diptych.contract.limits import Limits
from diptych.contract.wire import (
    BEAT,
    PROTOCOL,
    SESSION_METHOD,
    Challenge,
    Hello,
    Load,
    Proof,
    Welcome,
    WorkerInfo,
    hello_proof,
    pack,
    to_worker,
)
from diptych.workers.channel import Deliver, SessionGone

log = logging.getLogger("diptych.front")

OUTBOX = 10_000
SNAPSHOT = 4096  # digests that a new session is told: a hint of what is cached, the newest first
MAX_MESSAGE = 64 << 20


def now_pair() -> tuple[int, int]:
    """(monotonic, wall) in ns, read together."""
    return time.monotonic_ns(), time.time_ns()


class Session:
    """One router's open stream: what waits to be sent to it."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.outbox: asyncio.Queue[bytes | None] = asyncio.Queue(OUTBOX)

    def put(self, message: bytes | None) -> None:
        """A router that takes nothing for so long that its outbox fills has lost its session."""
        try:
            self.outbox.put_nowait(message)
        except asyncio.QueueFull:
            while not self.outbox.empty():
                self.outbox.get_nowait()
            self.outbox.put_nowait(None)


class Sessions:
    """`serve` once; `info` is set before a router can know the address. told: takes what is for the engine."""

    def __init__(
        self, name: str, secret: bytes, epoch: str, limits: Limits, told: Callable[[Deliver | SessionGone], None]
    ) -> None:
        self.name, self.secret, self.epoch, self.limits, self.told = name, secret, epoch, limits, told
        self.info: WorkerInfo | None = None
        self.load = Load(clock=(0, 0))
        self._held: dict[bytes, None] = {}  # digests of cached prefix blocks, for sessions that open later
        self._open: dict[str, Session] = {}
        self._server: grpc.aio.Server | None = None
        self._ended = False

    async def serve(self, host: str) -> str:
        """The address at which routers open sessions from now on."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.max_send_message_length", MAX_MESSAGE),
                ("grpc.keepalive_time_ms", int(self.limits.lease * 500)),
                ("grpc.keepalive_timeout_ms", int(self.limits.lease * 500)),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        service, method = SESSION_METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        return f"{host}:{port}"

    def put(self, session: str, message: bytes) -> None:
        """What the engine says to one router; dropped when that one has left."""
        if (found := self._open.get(session)) is not None:
            found.put(message)

    def note(self, load: Load) -> None:
        """What the engine says of itself."""
        relinked = load.links != self.load.links
        self.load = load
        self._held |= dict.fromkeys(load.gained)
        for digest in load.lost:
            self._held.pop(digest, None)
        if load.gained or load.lost or relinked:
            # Deltas must reach every session once, and a new link is usable now; the rest waits for the heartbeat.
            for session in self._open.values():
                session.put(pack(self._stamped()))
            self.load = msgspec.structs.replace(self.load, gained=(), lost=())

    def end(self) -> None:
        """Every session ends, with the group's end as its reason."""
        self._ended = True
        for session in self._open.values():
            session.put(None)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.2)

    def _stamped(self) -> Load:
        return msgspec.structs.replace(self.load, clock=now_pair())

    async def _session(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        """A router's stream. While it is open its requests live here; its end cancels them all."""
        try:
            async with asyncio.timeout(self.limits.handshake):
                hello = self._hello(await anext(requests))
                nonce = secrets.token_bytes(32)
                yield pack(
                    Challenge(nonce, hello_proof(self.secret, "worker", hello.nonce, nonce, self.epoch), self.epoch)
                )
                self._check(await anext(requests), hello, nonce)
        except (StopAsyncIteration, TimeoutError):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "The opening was not completed.")
        except DiptychError as error:
            await context.abort(getattr(grpc.StatusCode, error.grpc), str(error))
        assert self.info is not None
        session = Session(f"{hello.router}/{hello.session}/{nonce.hex()[:8]}")
        self._open[session.id] = session
        reader = asyncio.create_task(self._read(requests, session))
        try:
            yield pack(Welcome(self.info, now_pair()))
            held = tuple(islice(reversed(self._held), SNAPSHOT))
            yield pack(msgspec.structs.replace(self._stamped(), gained=held))
            async for message in self._outgoing(session):
                yield message
        finally:
            reader.cancel()
            del self._open[session.id]
            self.told(SessionGone(session.id))
        if self._ended:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"Worker {self.name} has ended.")

    async def _outgoing(self, session: Session) -> AsyncIterator[bytes]:
        """What the engine says, and a load at every heartbeat however busy the rest is."""
        beat = time.monotonic()
        while True:
            left = beat + self.limits.heartbeat - time.monotonic()
            if left <= 0:
                beat = time.monotonic()
                yield pack(self._stamped())
                continue
            try:
                message = await asyncio.wait_for(session.outbox.get(), left)
            except TimeoutError:
                continue
            if message is None:
                return
            yield message

    async def _read(self, requests: AsyncIterator[bytes], session: Session) -> None:
        """Until the router leaves, says nothing for the lease, or the stream breaks in any way."""
        try:
            while True:
                message = await asyncio.wait_for(anext(requests), self.limits.lease)
                if message != BEAT:
                    self.told(Deliver(session.id, message))
        except Exception as error:  # noqa: BLE001 - however it ended, the session is over
            log.debug("session %s ended: %r", session.id, error)
        session.put(None)

    def _hello(self, message: bytes) -> Hello:
        hello = self._decode(message)
        if not isinstance(hello, Hello):
            raise Unauthenticated("The first message must be Hello.")
        if hello.protocol != PROTOCOL:
            raise LayoutMismatch(f"This worker speaks protocol {PROTOCOL}, the router {hello.protocol}.")
        return hello

    def _check(self, message: bytes, hello: Hello, nonce: bytes) -> None:
        proof = self._decode(message)
        expected = hello_proof(self.secret, "router", hello.nonce, nonce, self.epoch)
        if not isinstance(proof, Proof) or not hmac.compare_digest(proof.proof, expected):
            raise Unauthenticated("The router does not hold this service's secret.")

    def _decode(self, message: bytes) -> object:
        try:
            return to_worker.decode(message)
        except msgspec.MsgspecError as error:
            raise Unauthenticated(f"What came is no message of this protocol ({error}).") from error
