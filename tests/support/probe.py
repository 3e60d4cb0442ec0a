"""A session with one worker, as a router opens it: what tests of workers speak to, without router, Ray or text."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from diptych.contract.request import Key, Request
from diptych.contract.wire import (
    BEAT,
    SESSION_METHOD,
    Challenge,
    Ended,
    Granted,
    Hello,
    Load,
    Prefill,
    Proof,
    Reserve,
    Start,
    Step,
    ToWorker,
    WorkerInfo,
    hello_proof,
    pack,
    to_router,
)

LIMIT = 60.0


@dataclass
class Part:
    """What one worker said about one request."""

    ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, object] = field(default_factory=dict)
    granted: asyncio.Future[Granted] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[Ended] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def tokens(self) -> list[int]:
        return [self.ids[position] for position in sorted(self.ids)]


class Probe:
    """`async with Probe(info, secret) as probe`: an open session."""

    def __init__(self, info: WorkerInfo, secret: bytes) -> None:
        self.info, self.secret = info, secret
        self.parts: dict[Key, Part] = defaultdict(Part)
        self.load = Load(clock=(0, 0))
        self.broken = asyncio.Event()
        self._changed = asyncio.Event()
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._nonce = secrets.token_bytes(32)

    async def __aenter__(self) -> Probe:
        self.channel = grpc.aio.insecure_channel(self.info.address)
        self.call = self.channel.stream_stream(SESSION_METHOD)(self._messages())
        await self.send(Hello("probe", secrets.token_hex(4), self._nonce))
        challenge = to_router.decode(await asyncio.wait_for(self.call.read(), LIMIT))
        assert isinstance(challenge, Challenge)
        proof = hello_proof(self.secret, "router", self._nonce, challenge.nonce, challenge.epoch)
        await self.send(Proof(proof))
        self.reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reader.cancel()
        self._outbox.put_nowait(None)
        self.call.cancel()
        await self.channel.close()

    async def send(self, message: ToWorker) -> None:
        self._outbox.put_nowait(pack(message))

    async def _messages(self) -> AsyncIterator[bytes]:
        while True:
            try:
                message = await asyncio.wait_for(self._outbox.get(), 0.3)
            except TimeoutError:
                message = BEAT
            if message is None:
                return
            yield message

    async def until(self, condition: object, limit: float = LIMIT) -> None:
        """Waits for a load message that satisfies `condition(load)`."""
        async with asyncio.timeout(limit):
            while not condition(self.load):  # type: ignore[operator]
                self._changed.clear()
                await self._changed.wait()

    async def until_free(self, limit: float = LIMIT) -> None:
        await self.until(
            lambda load: (
                load.total_blocks
                and load.free_blocks == load.total_blocks
                and not load.running + load.waiting + load.reserved
            ),
            limit,
        )

    async def _read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self._apply(to_router.decode(message))
        except grpc.aio.AioRpcError:
            pass
        self.broken.set()

    def _apply(self, message: object) -> None:
        if isinstance(message, Step):
            for token in message.tokens:
                part = self.parts[token.key]
                for offset, id in enumerate(token.ids):
                    assert token.position + offset not in part.ids, "a position came twice"
                    part.ids[token.position + offset] = id
                    if token.logprobs:
                        part.logprobs[token.position + offset] = token.logprobs[offset]
                part.first.set()
        elif isinstance(message, Granted):
            part = self.parts[message.key]
            if not part.granted.done():
                part.granted.set_result(message)
        elif isinstance(message, Ended):
            assert not self.parts[message.key].ended.done(), "a request ended twice"
            self.parts[message.key].ended.set_result(message)
        elif isinstance(message, Load):
            self.load = message
            self._changed.set()


@dataclass
class Outcome:
    tokens: list[int]
    prefill: Ended
    decode: Ended | None
    prefill_part: Part
    decode_part: Part | None
    granted: Granted | None


async def hand_over(prefill: Probe, decode: Probe, request: Request) -> Outcome:
    """One request the way a router drives it: reserve and prefill at once, the grant passed on."""
    key = request.key
    near, far = prefill.parts[key], decode.parts[key]
    await decode.send(Reserve(request, prefill.info.id))
    await prefill.send(Prefill(request, decode.info.id))
    granted = await asyncio.wait_for(asyncio.shield(far.granted), LIMIT)
    assert not granted.local
    await prefill.send(Start(key, granted.held))
    ended = await asyncio.wait_for(asyncio.shield(near.ended), LIMIT)
    last = await asyncio.wait_for(asyncio.shield(far.ended), LIMIT) if ended.reason == "handed" else None
    return Outcome(near.tokens + (far.tokens if last else []), ended, last, near, far, granted)
