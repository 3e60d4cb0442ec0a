"""A worker group's front: a process without torch that serves routers and keeps its engines.

Owns the group's life (it lives and dies as one), the internal gRPC service with its sessions, and the registry entry.
Does not read requests: a session's messages pass between router and engine as they came. The same class runs in a Ray
actor and in a plain process.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import grpc
import msgspec

from diptych.contract.errors import DiptychError, Internal, LayoutMismatch, Unauthenticated, from_wire
from diptych.contract.registry import Registry
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
from diptych.workers.channel import (
    Deliver,
    Drain,
    Emit,
    Fatal,
    FrontChannel,
    Launch,
    Loading,
    Peers,
    Report,
    SessionGone,
    Up,
)
from diptych.workers.settings import WorkerSettings

log = logging.getLogger("diptych.front")

OUTBOX = 10_000
SNAPSHOT = 4096  # digests that a new session is told: a hint of what is cached, the newest first


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


class _RankEnded(Exception):
    """A rank's process ended and did not say why."""


@dataclass
class _Rank:
    """One engine process. loaded: how far its weights are."""

    process: subprocess.Popen[bytes]
    channel: FrontChannel
    loaded: tuple[int, int] = (0, 0)


class Worker:
    """One worker group. `start` once, then `wait`; `stop` at any time, repeatedly."""

    def __init__(
        self,
        settings: WorkerSettings,
        secret: bytes,
        registry: Registry,
        epoch: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.settings, self.secret, self.registry = settings, secret, registry
        self.limits = settings.limits
        self.epoch = epoch or secrets.token_hex(8)
        self.id = f"{settings.name or settings.role}-{self.epoch[:8]}"
        self.progress = progress
        self.info: WorkerInfo | None = None
        self._sessions: dict[str, Session] = {}
        self._load = Load(clock=(0, 0))
        self._heard = time.monotonic()
        self._held: dict[bytes, None] = {}  # digests of cached prefix blocks, for sessions that open later
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._ranks: list[_Rank] = []
        self._server: grpc.aio.Server | None = None
        self._stopping = False

    # ── life ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> WorkerInfo:
        """Starts the engine and serves; returns the registered entry. Raises the engine's own error in one sentence, or
        `Internal` when it is not up within `limits.group_start`; nothing is left running then."""
        try:
            await self._spawn()
            ups = await asyncio.wait_for(self._until_up(), self.limits.group_start)
            address = await self._serve()
        except TimeoutError as error:
            await self.stop(drain=False)
            raise Internal(f"Worker {self.id} was not up within {self.limits.group_start:.0f} s.") from error
        except BaseException:
            await self.stop(drain=False)
            raise
        up = ups[0]
        self.info = WorkerInfo(
            id=self.id,
            role=self.settings.role,
            address=address,
            links=tuple(rank.link for rank in ups),
            epoch=self.epoch,
            digest=up.digest,
            pid=os.getpid(),
            engine_pids=tuple(rank.pid for rank in ups),
            block_size=up.block_size,
            total_blocks=up.total_blocks,
            max_context=up.max_context,
            transport=up.transport,
            device=up.device,
            data=self.settings.data,
        )
        background = [self._pump, self._renew, self._watch]
        background += [partial(self._follow, index) for index in range(1, len(self._ranks))]
        self._tasks = [asyncio.create_task(self._guarded(run)) for run in background]
        await self._register()
        return self.info

    @property
    def _engine(self) -> FrontChannel:
        """To the first rank, which schedules for all."""
        return self._ranks[0].channel

    async def _spawn(self) -> None:
        """A process a rank. The first gets a line to each of the others."""
        count = self.settings.grid.ranks
        lines = [socket.socketpair() for _ in range(count - 1)]
        given = [[first for first, _ in lines], *[[other] for _, other in lines]]
        for index, own in enumerate(given):
            await self._spawn_rank(index, own)
        for own in given:
            for sock in own:
                sock.close()

    async def _spawn_rank(self, index: int, lines: list[socket.socket]) -> None:
        ours, theirs = socket.socketpair()
        threads = str(self.settings.threads)
        environment = (
            CPU_MANNERS
            | os.environ
            | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
            | NCCL_SURVIVES
            | {"PYTHONSAFEPATH": "1"}
        )
        numbers = [sock.fileno() for sock in (theirs, *lines)]
        process = subprocess.Popen(  # noqa: ASYNC220 - a fork takes milliseconds; asyncio's child watcher is not needed
            [sys.executable, "-m", "diptych.workers.engine_process", *map(str, numbers)],
            pass_fds=numbers,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        rank = _Rank(process, await FrontChannel.over(ours))
        self._ranks.append(rank)  # so that it is ended too if the next one fails to start
        rank.channel.send(Launch(self.settings, self.secret, self.epoch, self.id, index))

    async def _until_up(self) -> list[Up]:
        """Every rank's `Up`. Where several fail, the one that says why is raised rather than one that merely ended."""
        waits = [asyncio.create_task(self._until_rank_up(rank)) for rank in self._ranks]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            if any(wait.done() and wait.exception() for wait in waits):
                await asyncio.wait(waits, timeout=self.limits.kill)
                errors = [error for wait in waits if wait.done() and (error := wait.exception())]
                first = min(errors, key=lambda error: isinstance(error, _RankEnded))
                raise Internal(str(first)) if isinstance(first, _RankEnded) else first
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()

    async def _until_rank_up(self, rank: _Rank) -> Up:
        while True:
            try:
                message = await rank.channel.receive()
            except EOFError as error:
                raise _RankEnded(
                    f"The engine of {self.id} ended while it started (exit code {self._exit_code(rank)})."
                ) from error
            if isinstance(message, Up):
                return message
            if isinstance(message, Fatal):
                raise from_wire(message.code, message.message)
            if isinstance(message, Loading) and self.progress is not None:
                rank.loaded = (message.done, message.total)
                self.progress(sum(r.loaded[0] for r in self._ranks), sum(r.loaded[1] for r in self._ranks))

    async def _serve(self) -> str:
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.max_send_message_length", 64 << 20),
                ("grpc.keepalive_time_ms", int(self.limits.lease * 500)),
                ("grpc.keepalive_timeout_ms", int(self.limits.lease * 500)),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        service, method = SESSION_METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = self._server.add_insecure_port(f"{self.settings.host}:0")
        await self._server.start()
        return f"{self.settings.host}:{port}"

    async def wait(self) -> str:
        """Returns when the group has ended, with the reason in one sentence."""
        return await asyncio.shield(self._ended)

    async def stop(self, drain: bool = True) -> None:
        """Ends the group: with `drain` it first finishes what it has, within `limits.drain`."""
        if drain and not self._ended.done() and self.info is not None:
            self._engine.send(Drain())
            deadline = time.monotonic() + self.limits.drain
            # What the load says before the engine has taken note of the drain is old.
            while time.monotonic() < deadline and (not self._load.draining or self._busy()):
                await asyncio.sleep(0.05)
        await self._end("It was stopped.")

    def _busy(self) -> bool:
        load = self._load
        return bool(load.running or load.waiting or load.reserved)

    async def _end(self, reason: str) -> None:
        """Idempotent. Kills the engine first, so that nothing of the group outlives the sessions' end by more than
        `limits.kill`."""
        if self._stopping:
            await asyncio.shield(self._ended)
            return
        self._stopping = True
        try:
            for rank in self._ranks:
                rank.process.kill()
            for session in self._sessions.values():
                session.put(None)
            current = asyncio.current_task()
            for task in self._tasks:
                if task is not current:
                    task.cancel()
            await self._leave()
        finally:
            if not self._ended.done():
                self._ended.set_result(reason)

    async def _leave(self) -> None:
        """What can be done for others, each with a limit; a process that the kernel cannot reap (a faulty device) must
        not keep the group's end from being told."""
        codes = await asyncio.gather(*(asyncio.to_thread(self._exit_code, rank) for rank in self._ranks))
        if None in codes:
            log.error("an engine of %s was killed and is not gone after %.0f s", self.id, self.limits.kill)
        if self._server is not None:
            await self._server.stop(0.2)
        if self.info is not None:
            try:
                await asyncio.wait_for(self.registry.remove(self.id), self.limits.heartbeat)
            except (DiptychError, TimeoutError) as error:
                log.info("the registry did not take the leave of %s: %r", self.id, error)
        for rank in self._ranks:
            rank.channel.close()

    def _exit_code(self, rank: _Rank) -> int | None:
        try:
            return rank.process.wait(self.limits.kill)
        except subprocess.TimeoutExpired:
            return None

    async def _guarded(self, run: Callable[[], Awaitable[None]]) -> None:
        """A background task that fails ends the group: half a front would look healthy for ever."""
        try:
            await run()
        except Exception as error:
            log.exception("a background task of %s failed", self.id)
            await self._end(f"The front failed: {error!r}")

    # ── background ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _pump(self) -> None:
        """From the engine to the sessions, until the engine is gone: then so is the group."""
        reason = "The engine ended."
        try:
            while True:
                message = await self._engine.receive()
                if isinstance(message, Emit):
                    session = self._sessions.get(message.session)
                    if session is not None:
                        session.put(message.message)
                elif isinstance(message, Report):
                    self._note(message)
                elif isinstance(message, Fatal):
                    reason = f"{message.code}: {message.message}"
                    log.error("engine of %s: %s", self.id, reason)
        except EOFError:
            pass
        await self._end(reason)

    async def _follow(self, index: int) -> None:
        """Until a rank that follows is gone: then so is the group, whatever its first rank still waits for."""
        reason = f"Rank {index} of {len(self._ranks)} ended."
        try:
            while True:
                message = await self._ranks[index].channel.receive()
                if isinstance(message, Fatal):
                    reason = f"Rank {index} of {len(self._ranks)} failed: {message.code}: {message.message}"
                    log.error("%s: %s", self.id, reason)
        except EOFError:
            pass
        await self._end(reason)

    def _note(self, report: Report) -> None:
        self._heard = time.monotonic()
        relinked = report.load.links != self._load.links
        self._load = report.load
        self._held |= dict.fromkeys(report.load.gained)
        for digest in report.load.lost:
            self._held.pop(digest, None)
        if report.load.gained or report.load.lost or relinked:
            # Deltas must reach every session once, and a new link is usable now; the rest waits for the heartbeat.
            for session in self._sessions.values():
                session.put(pack(self._stamped()))
            self._load = msgspec.structs.replace(self._load, gained=(), lost=())

    def _stamped(self) -> Load:
        return msgspec.structs.replace(self._load, clock=now_pair())

    async def _register(self) -> None:
        """So that the table knows the group when `start` returns; `_renew` goes on trying where that failed."""
        assert self.info is not None
        try:
            await asyncio.wait_for(self.registry.renew(self.info), self.limits.register)
        except (DiptychError, TimeoutError) as error:
            log.warning("registry: %s", error)

    async def _renew(self) -> None:
        """Keeps the registry entry and, for prefill, the engine's list of decode workers. A registry that is gone for
        `limits.orphan` ends the group: nobody could reach or stop it any more."""
        assert self.info is not None
        seen = time.monotonic()
        while True:
            try:
                await asyncio.wait_for(self.registry.renew(self.info), self.limits.register)
                table = await asyncio.wait_for(self.registry.table(), self.limits.register)
                seen = time.monotonic()
                if self.settings.role == "prefill":
                    self._engine.send(Peers(table.workers))
            except (DiptychError, TimeoutError) as error:
                log.warning("registry: %s", error)
                if time.monotonic() - seen > self.limits.orphan:
                    await self._end(f"The registry was gone for {self.limits.orphan:.0f} s.")
                    return
            await asyncio.sleep(self.limits.register / 4)

    async def _watch(self) -> None:
        """Forward progress is health: an engine reports after each step and at each heartbeat; one that does neither
        within `limits.step` is dead, whatever its process does."""
        self._heard = time.monotonic()
        while True:
            await asyncio.sleep(self.limits.heartbeat)
            if time.monotonic() - self._heard > self.limits.step:
                await self._end(f"The engine completed no step for {self.limits.step:.0f} s.")
                return

    # ── sessions ───────────────────────────────────────────────────────────────────────────────────────────────────

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
        self._sessions[session.id] = session
        reader = asyncio.create_task(self._read(requests, session))
        try:
            yield pack(Welcome(self.info, now_pair()))
            held = tuple(islice(reversed(self._held), SNAPSHOT))
            yield pack(msgspec.structs.replace(self._stamped(), gained=held))
            async for message in self._outgoing(session):
                yield message
        finally:
            reader.cancel()
            del self._sessions[session.id]
            self._engine.send(SessionGone(session.id))
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"Worker {self.id} has ended.")

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
                    self._engine.send(Deliver(session.id, message))
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


# Two engines of two threads on two cores ruin each other while libgomp's threads spin for long (p50 of a step at
# batch 8: 63 ms with this, 173 to 225 without). malloc re-uses a step's large tensors instead of mapping them anew.
CPU_MANNERS = {
    "GOMP_SPINCOUNT": "1000",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}

# NCCL must not take the process down when a peer dies: errors are handled by the link that meets them.
NCCL_SURVIVES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
