"""One open stream to every worker of the registry's table, and what the workers say about themselves on it.

Owns connecting (with the mutual challenge of `contract.wire`), reconnecting, the lease, and the last known load, links,
cached prefixes and clock of each worker. Does not know requests: messages about them are passed on as they come, in
order; the end of a session is told once.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections import deque
from typing import Any, Protocol

import grpc
import msgspec

from diptych.contract import wire
from diptych.contract.errors import DiptychError, LayoutMismatch, Unauthenticated, WorkerLost
from diptych.contract.limits import Limits
from diptych.contract.registry import Registry, Table
from diptych.contract.wire import WorkerInfo
from diptych.router.clocks import Clock

log = logging.getLogger(__name__)

POLL = 1.0
MAX_MESSAGE = 64 << 20
MAX_OUTGOING = 100_000
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class Listener(Protocol):
    """Who is told. Called on the event loop; must neither block nor raise."""

    def on_message(self, session: Session, message: wire.Granted | wire.Step | wire.Ended) -> None:
        """In the order in which the worker sent them."""

    def on_lost(self, session: Session, error: DiptychError) -> None:
        """The session has ended: what ran on it is gone. Told once, after its last message."""

    def on_change(self) -> None:
        """A worker has come, gone, or got or lost a link: what waits may have a place now."""


class Session:
    """An open session. `send` never blocks: what cannot be sent any more is covered by `on_lost`.

    unreported: requests sent there that its last load message may not count yet. outstanding: this router's requests
    there; both are kept by whoever sends.
    """

    def __init__(self, worker: WorkerInfo, router: str, secret: bytes, limits: Limits) -> None:
        self.worker = worker
        self.load = wire.Load(clock=(0, 0))
        self.clock = Clock()
        self.prefixes: dict[bytes, None] = {}
        self.unreported = 0
        self.outstanding = 0
        self.open = False
        self.was_open = False
        self._broken: DiptychError | None = None
        self._router = router
        self._secret = secret
        self._limits = limits
        self._outgoing: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._heard = time.monotonic()
        self._call: Any = None

    @property
    def id(self) -> str:
        return self.worker.id

    def send(self, message: msgspec.Struct) -> None:
        if not self.open:
            return
        if len(self._outgoing) >= MAX_OUTGOING:
            self._break(f"{self.id} takes no messages any more.")
            return
        self._outgoing.append(wire.pack(message))
        self._wake.set()

    async def run(self, listener: Listener) -> None:
        """Connects, serves until the stream ends, tells the listener. Raises what ended it."""
        async with grpc.aio.insecure_channel(self.worker.address, options=_options(self._limits)) as channel:
            method: Any = channel.stream_stream(wire.SESSION_METHOD, _as_it_is, _as_it_is)
            self._call = method()
            tasks: list[asyncio.Task[None]] = []
            try:
                async with asyncio.timeout(self._limits.handshake):
                    await self._shake_hands()
                self.open = self.was_open = True
                listener.on_change()
                tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._watch())]
                await self._read(listener)
            except asyncio.CancelledError:
                if self._broken is None:
                    raise
                raise self._broken from None
            finally:
                for task in tasks:
                    task.cancel()
                self._call.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.open = False

    async def _shake_hands(self) -> None:
        nonce = secrets.token_bytes(32)
        await self._call.write(wire.pack(wire.Hello(self._router, secrets.token_hex(8), nonce)))
        challenge = await self._answer(wire.Challenge)
        expected = wire.hello_proof(self._secret, "worker", nonce, challenge.nonce, self.worker.epoch)
        if challenge.epoch != self.worker.epoch:
            raise WorkerLost(f"{self.id} was replaced by another process at {self.worker.address}.")
        if not hmac.compare_digest(challenge.proof, expected):
            raise Unauthenticated(f"{self.id} did not prove that it knows the service's secret.")
        proof = wire.hello_proof(self._secret, "router", nonce, challenge.nonce, self.worker.epoch)
        sent = time.monotonic_ns()
        await self._call.write(wire.pack(wire.Proof(proof)))
        welcome = await self._answer(wire.Welcome)
        self.clock.sent(sent, welcome.clock[0])
        self._saw_clock(welcome.clock)
        self.worker = welcome.worker

    async def _answer(self, kind: type[Any]) -> Any:
        data = await self._call.read()
        if data is EOF:
            raise WorkerLost(f"{self.id} closed the session: {await self._call.details() or 'no reason given'}.")
        message = wire.to_router.decode(data)
        if not isinstance(message, kind):
            raise LayoutMismatch(f"{self.id} answered {type(message).__name__} where {kind.__name__} was due.")
        return message

    async def _read(self, listener: Listener) -> None:
        while (data := await self._call.read()) is not EOF:
            self._heard = time.monotonic()
            message = wire.to_router.decode(data)
            if isinstance(message, wire.Load):
                self._on_load(message, listener)
            elif isinstance(message, wire.Granted | wire.Step | wire.Ended):
                listener.on_message(self, message)
        raise WorkerLost(f"{self.id} ended its session.")

    def _on_load(self, load: wire.Load, listener: Listener) -> None:
        self._saw_clock(load.clock)
        changed = set(load.links) != set(self.load.links) or load.draining != self.load.draining
        self.load = load
        self.unreported = 0
        self.prefixes |= dict.fromkeys(load.gained)
        for digest in load.lost:  # in both: gained and lost again, most likely; a miss costs less than a false hope
            self.prefixes.pop(digest, None)
        most = 2 * max(self.worker.total_blocks * self.worker.data, 1)
        while len(self.prefixes) > most:  # a hint, so the oldest may go
            del self.prefixes[next(iter(self.prefixes))]
        if changed:
            listener.on_change()

    def _saw_clock(self, clock: tuple[int, int]) -> None:
        self.clock.received(clock[0], time.monotonic_ns())

    async def _write(self) -> None:
        while True:
            while self._outgoing:
                await self._call.write(self._outgoing.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _watch(self) -> None:
        """The lease. A loop that was itself held up longer than a heartbeat gives the messages that wait a chance."""
        self._heard = time.monotonic()
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._limits.heartbeat)
            self.send(wire.Beat())
            now = time.monotonic()
            if now - before > 2 * self._limits.heartbeat:
                continue
            if now - self._heard > self._limits.lease:
                self._break(f"{self.id} was silent for {now - self._heard:.1f} s.")
                return

    def _break(self, why: str) -> None:
        """Ends the stream from our side; what waits in `_read` sees it as a cancellation."""
        self._broken = WorkerLost(why)
        self._call.cancel()


def _as_it_is(data: bytes) -> bytes:
    return data


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.keepalive_time_ms", int(limits.lease * 1000)),
        ("grpc.keepalive_timeout_ms", int(limits.lease * 1000)),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a new session connects at once, whatever the last one met
    ]


class Sessions:
    """Keeps a session to each worker of the table. `start` and `stop` once each; all in one event loop."""

    def __init__(self, registry: Registry, secret: bytes, limits: Limits, listener: Listener) -> None:
        self.router = f"router-{secrets.token_hex(4)}"
        self.table = Table(0, ())
        self._registry = registry
        self._secret = secret
        self._limits = limits
        self._listener = listener
        self._sessions: dict[str, Session] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._poller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._poller = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([self._poller] if self._poller else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def open(self) -> list[Session]:
        """Sessions over which work can be sent now, draining workers' included."""
        return [session for session in self._sessions.values() if session.open]

    def find(self, worker_id: str) -> Session | None:
        session = self._sessions.get(worker_id)
        return session if session is not None and session.open else None

    async def _poll(self) -> None:
        failing = False
        while True:
            try:
                async with asyncio.timeout(5 * POLL):
                    self._adopt(await self._registry.table())
                failing = False
            except Exception:  # the last table serves on, whatever the registry's trouble is
                log.log(logging.DEBUG if failing else logging.WARNING, "no table; the last one is kept", exc_info=True)
                failing = True
            await asyncio.sleep(POLL)

    def _adopt(self, table: Table) -> None:
        """New entries get a session. One that left the table keeps its session: the stream is the better witness."""
        self.table = table
        for info in table.workers:
            if info.id not in self._tasks:
                self._tasks[info.id] = asyncio.create_task(self._hold(info))

    async def _hold(self, info: WorkerInfo) -> None:
        """One session's life. Its task leaves the books at the end, so that the next poll makes a new one."""
        session = Session(info, self.router, self._secret, self._limits)
        self._sessions[info.id] = session
        error: BaseException = WorkerLost(f"{info.id} is gone.")
        try:
            await session.run(self._listener)
        except asyncio.CancelledError:
            raise
        except grpc.aio.AioRpcError as failure:
            error = WorkerLost(
                f"The session to {info.id} broke: {(failure.details() or failure.code().name).rstrip('.')}."
            )
        except Exception as failure:  # whatever it was, the session is over and the next poll tries again
            log.debug("session to %s", info.id, exc_info=True)
            error = failure
        finally:
            del self._sessions[info.id], self._tasks[info.id]
        log.log(logging.WARNING if session.was_open else logging.INFO, "session to %s: %r", info.id, error)
        if session.was_open:
            self._listener.on_lost(session, error if isinstance(error, DiptychError) else WorkerLost(str(error)))
