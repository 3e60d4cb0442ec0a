"""A worker that speaks the wire protocol in this process and draws tokens by a rule instead of a model.

It lets the router's own tests choose what happens when: which message is late, lost, or comes from a worker that dies.
What real workers do is tested in tests/system.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from diptych.contract import telemetry, wire
from diptych.contract.registry import Table
from diptych.contract.request import Key, Request
from diptych.contract.wire import Stage, WorkerInfo

SECRET = b"only for tests, 32 bytes of it.."
BLOCK = 16


def rule(prompt: tuple[int, ...], position: int) -> int:
    """Token `position` of the answer to `prompt`."""
    return 1000 + (sum(prompt) * 31 + position * 97) % 40_000


class Registry:
    """In memory; `gone` makes every call fail as a lost registry does."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerInfo] = {}
        self.gone = False

    async def renew(self, info: WorkerInfo) -> None:
        self.workers[info.id] = info

    async def remove(self, worker_id: str) -> None:
        self.workers.pop(worker_id, None)

    async def table(self) -> Table:
        if self.gone:
            raise ConnectionError("the registry is gone")
        return Table(1, tuple(self.workers.values()))


class Peer:
    """draw: the rule. pace: seconds a token. hold_…: events that the first token, a grant or a session waits for.

    received: every message that came, as it came. working: keys of requests that it works on.
    """

    def __init__(self, registry: Registry, role: wire.Role, name: str = "", secret: bytes = SECRET) -> None:
        self.registry, self.role, self.secret = registry, role, secret
        self.epoch = secrets.token_hex(8)
        self.id = f"{name or role}-{self.epoch[:6]}"
        self.draw: Callable[[tuple[int, ...], int], int] = rule
        self.pace = 0.001
        self.hold_first, self.hold_grant, self.hold_hello = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for hold in (self.hold_first, self.hold_grant, self.hold_hello):
            hold.set()
        self.mute = False
        self.local = False
        self.refuse: tuple[str, str] | None = None
        self.cached = 0
        self.total_blocks = 1000
        self.links: tuple[str, ...] = ()
        self.received: list[Any] = []
        self.working: dict[Key, asyncio.Task[None]] = {}
        self.granted: dict[Key, Request] = {}
        self.mesh: dict[str, Peer] = {}
        self._out: list[asyncio.Queue[bytes | None]] = []
        self._begun: dict[Key, asyncio.Event] = {}

    async def start(self) -> Peer:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service, method = wire.SESSION_METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.info = WorkerInfo(
            id=self.id, role=self.role, address=f"127.0.0.1:{port}", links=("",), epoch=self.epoch, digest="same",
            pid=1, engine_pids=(2,), block_size=BLOCK, total_blocks=self.total_blocks, max_context=8192,
        )  # fmt: skip
        await self.registry.renew(self.info)
        return self

    async def kill(self) -> None:
        """Dies: every stream breaks, the entry stays until somebody drops it."""
        await self.registry.remove(self.id)
        for task in self.working.values():
            task.cancel()
        await self._server.stop(None)

    def link(self, *others: Peer) -> None:
        for other in others:
            self.links, other.links = (*self.links, other.id), (*other.links, self.id)
            self.mesh[other.id], other.mesh[self.id] = other, self
            other.say(other.load())
        self.say(self.load())

    def load(self) -> wire.Load:
        return wire.Load(
            clock=(time.monotonic_ns(), time.time_ns()), running=len(self.working), links=self.links,
            free_blocks=self.total_blocks, total_blocks=self.total_blocks, experts=(5, 0, 7),
        )  # fmt: skip

    def say(self, message: Any) -> None:
        for queue in self._out:
            queue.put_nowait(wire.pack(message))

    # ── the session ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        hello: Any = wire.to_worker.decode(await anext(requests))
        await self.hold_hello.wait()
        nonce = secrets.token_bytes(32)
        proof = wire.hello_proof(self.secret, "worker", hello.nonce, nonce, self.epoch)
        yield wire.pack(wire.Challenge(nonce, proof, self.epoch))
        answer: Any = wire.to_worker.decode(await anext(requests))
        expected = wire.hello_proof(self.secret, "router", hello.nonce, nonce, self.epoch)
        if not hmac.compare_digest(answer.proof, expected):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
        yield wire.pack(wire.Welcome(self.info, (time.monotonic_ns(), time.time_ns())))
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._out.append(queue)
        queue.put_nowait(wire.pack(self.load()))
        reading, beating = asyncio.create_task(self._read(requests)), asyncio.create_task(self._beat())
        try:
            while (data := await queue.get()) is not None:
                if not self.mute:
                    yield data
        finally:
            self._out.remove(queue)
            reading.cancel()
            beating.cancel()
            for task in self.working.values():
                task.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.say(self.load())

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            if data == wire.BEAT:
                continue
            message: Any = wire.to_worker.decode(data)
            self.received.append(message)
            self._handle(message)

    def _handle(self, message: Any) -> None:
        if isinstance(message, wire.Cancel):
            self._cancel(message.key)
        elif isinstance(message, wire.Start):
            self._begun[message.key].set()
        else:
            key = message.request.key
            self._begun[key] = asyncio.Event()
            work = {wire.Reserve: self._decode, wire.Prefill: self._prefill, wire.Generate: self._both}[type(message)]
            self.working[key] = asyncio.create_task(work(message))

    def _cancel(self, key: Key) -> None:
        task = self.working.pop(key, None)
        if task is not None:
            task.cancel()
            self._end(key, "cancelled", code="Cancelled", message="cancelled")

    # ── the work ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _both(self, message: wire.Generate) -> None:
        at = time.monotonic_ns()
        await self.hold_first.wait()
        await self._run(message.request, 0, at)

    async def _decode(self, message: wire.Reserve) -> None:
        at, request = time.monotonic_ns(), message.request
        if self.refuse is not None:
            self._end(request.key, "error", code=self.refuse[0], message=self.refuse[1])
            return
        await self.hold_grant.wait()
        self.granted[request.key] = request
        self.say(wire.Granted(request.key, 0, self.local))
        if self.local:
            await self._run(request, 0, at)
            return
        await self._begun[request.key].wait()  # set by the prefill peer's hand-over
        await self._run(request, 1, at)

    async def _prefill(self, message: wire.Prefill) -> None:
        at, request = time.monotonic_ns(), message.request
        if message.decode is not None:
            await self._begun[request.key].wait()
        decode = self.mesh.get(message.decode or "")
        await self.hold_first.wait()
        token, drawn = self.draw(request.prompt, 0), time.monotonic_ns()
        out = wire.TokenOut(request.key, 0, (token,), self._logprobs(request, 1))
        stages = (Stage(telemetry.PREFILL_QUEUE, at, at), Stage(telemetry.PREFILL_CHUNK, at, drawn))
        self.say(wire.Step((out,), drawn))
        if token in request.stopping.stops:
            self._end(request.key, "stop", stop_id=token, stages=stages, generated=1)
        elif request.stopping.max_tokens == 1:
            self._end(request.key, "length", stages=stages, generated=1)
        else:
            if decode is not None and request.key in decode.granted:
                decode._begun[request.key].set()
            self._end(request.key, "handed", stages=stages, generated=1)

    async def _run(self, request: Request, first: int, at: int) -> None:
        begun, drawn = time.monotonic_ns(), 0
        opening = (
            (Stage(telemetry.PREFILL_CHUNK, at, begun),) if first == 0 else (Stage(telemetry.HANDOVER, at, begun),)
        )
        for position in range(first, request.stopping.max_tokens):
            await asyncio.sleep(self.pace)
            token, drawn = self.draw(request.prompt, position), time.monotonic_ns()
            out = wire.TokenOut(request.key, position, (token,), self._logprobs(request, 1))
            self.say(wire.Step((out,), drawn))
            if token in request.stopping.stops and position >= request.stopping.min_tokens:
                stages = (*opening, Stage(telemetry.DECODE_STEPS, begun, drawn))
                self._end(request.key, "stop", stop_id=token, stages=stages)
                return
        self._end(request.key, "length", stages=(*opening, Stage(telemetry.DECODE_STEPS, begun, drawn)))

    def _logprobs(self, request: Request, count: int) -> tuple[wire.Logprob, ...]:
        return () if request.logprobs is None else (wire.Logprob(-0.5, ((7, -0.5),)),) * count

    def _end(self, key: Key, reason: Any, **more: Any) -> None:
        self.working.pop(key, None)
        self.granted.pop(key, None)
        self.say(wire.Ended(key, reason, cached=self.cached, **more))
