"""The load generator: sends chats to one router and notes when each piece of an answer arrives.

Owns clocks and calls; knows nothing of statistics. Open loop: every chat has a time at which it is due, and what the
client or the service was late counts (no coordinated omission). Closed loop: `concurrency` chats at once; a chat is due
when its predecessor in the slot has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from diptych.bench.alarm import Alarm
from diptych.bench.workload import Arrivals, Chat, Turn
from diptych.router.client import ERROR_KEY, SERVICE, ask
from diptych.v1 import inference_pb2 as pb

METHOD = f"/{SERVICE}/GenerateStream"
_CHANNELS = 4  # one connection's window is shared by all its streams
_LOOK = 0.1  # seconds between two looks at whether the run is to end
clock = time.perf_counter


@dataclass
class Record:
    """One request. due, sent: clock seconds. pieces: (clock seconds, tokens) of each message that brought tokens.
    error: the code of what ended it early; "interrupted" when this run did."""

    due: float
    sent: float
    prompt: int
    new: int
    pieces: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.pieces)

    @property
    def end(self) -> float:
        return self.pieces[-1][0] if self.pieces else self.sent

    @property
    def ttft(self) -> float:
        """From when it was due, as e2e."""
        return self.pieces[0][0] - self.due

    @property
    def e2e(self) -> float:
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first piece; None for an answer in one piece."""
        after = self.tokens - self.pieces[0][1]
        return (self.end - self.pieces[0][0]) / after if after else None

    @property
    def itl(self) -> list[float]:
        """Gaps between pieces: what a reader waits. A piece may hold several tokens."""
        return [b - a for (a, _), (b, _) in zip(self.pieces, self.pieces[1:], strict=False)]


class Generator:
    """Calls to one router over a few connections. `ended` is called with each record when it is complete, `heard` (for
    the self-test) with each message when it arrives."""

    def __init__(
        self,
        address: str,
        timeout: float = 600.0,
        ended: Callable[[Record], None] = lambda record: None,
        heard: Callable[[Record, pb.GenerateStreamResponse], None] | None = None,
    ) -> None:
        self.address, self.timeout, self.ended, self.heard = address, timeout, ended, heard
        options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._channels = [
            grpc.aio.insecure_channel(address, options=[*options, ("diptych.connection", number)])
            for number in range(_CHANNELS)
        ]
        self._calls: list[Any] = [
            channel.unary_stream(METHOD, None, pb.GenerateStreamResponse.FromString) for channel in self._channels
        ]
        self._next = 0

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(grace=None)

    async def chat(self, chat: Chat, due: float, think: float = 0.0, first: bytes | None = None) -> list[Record]:
        """All turns, each with the whole history before it. A turn is due `think` seconds after the last answer.
        first: the first turn's message, if it was made beforehand."""
        history: list[int] = []
        records: list[Record] = []
        for turn in chat.turns:
            history += turn.tokens
            message = first if first and not records else message_of(turn, history)
            said, record = await self._turn(message, Record(due, clock(), len(history), turn.new))
            records.append(record)
            if record.error:
                break
            history += said
            due = clock() + think
            if turn is not chat.turns[-1] and think:
                await asyncio.sleep(think)
        return records

    async def _turn(self, message: bytes, record: Record) -> tuple[list[int], Record]:
        self._next = (self._next + 1) % _CHANNELS
        call = self._calls[self._next](message, timeout=self.timeout)
        said: list[int] = []
        try:
            async for piece in call:
                if piece.token_ids:
                    record.pieces.append((clock(), len(piece.token_ids)))
                    said += piece.token_ids
                if self.heard is not None:
                    self.heard(record, piece)
                if piece.HasField("usage"):
                    record.prompt = piece.usage.prompt_tokens
        except grpc.aio.AioRpcError as error:
            record.error = _code(error)
        except asyncio.CancelledError:
            record.error = "interrupted"
            call.cancel()
            raise
        finally:
            self.ended(record)
        return said, record


@asynccontextmanager
async def generator(address: str, **options: Any) -> AsyncIterator[Generator]:
    made = Generator(address, **options)
    try:
        yield made
    finally:
        await made.close()


def message_of(turn: Turn, history: Sequence[int]) -> bytes:
    prompt: dict[str, Any] = {"text": turn.text} if turn.text is not None else {"token_ids": history}
    request = ask(**prompt, max_tokens=turn.new, temperature=0.0, ignore_eos=True)
    request.response.token_ids = True
    return request.SerializeToString()


def _code(error: grpc.aio.AioRpcError) -> str:
    trailing: Any = error.trailing_metadata()
    own = next((str(value) for key, value in trailing or () if key == ERROR_KEY), "")
    return own or error.code().name


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection of all objects stops everything for tens of milliseconds; a run's own garbage has no cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def open_loop(
    generator: Generator, chats: Sequence[Chat], arrivals: Arrivals, stop: asyncio.Event, think: float = 0.0
) -> None:
    """Sends every chat when it is due, whatever is still running."""
    messages = [message_of(chat.turns[0], chat.turns[0].tokens) for chat in chats]
    tasks: set[asyncio.Task[Any]] = set()
    with _no_collection(), contextlib.closing(Alarm()) as alarm:
        start = clock() + 0.02
        for chat, message, at in zip(chats, messages, arrivals(chats), strict=True):
            await _until(start + at, alarm, stop)
            if stop.is_set():
                break
            task = asyncio.create_task(generator.chat(chat, start + at, think, message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await _finish(tasks, stop)


async def closed_loop(
    generator: Generator, chats: Sequence[Chat], concurrency: int, stop: asyncio.Event, think: float = 0.0
) -> None:
    """`concurrency` chats at once until all are done."""
    waiting = iter([(chat, message_of(chat.turns[0], chat.turns[0].tokens)) for chat in chats])

    async def slot() -> None:
        for chat, message in waiting:
            await generator.chat(chat, clock(), think, message)

    with _no_collection():
        await _finish({asyncio.create_task(slot()) for _ in range(min(concurrency, len(chats)))}, stop)


async def _until(due: float, alarm: Alarm, stop: asyncio.Event) -> None:
    """Returns at `due`, or when the run is to end."""
    while (now := clock()) < due and not stop.is_set():
        await alarm.at(min(due, now + _LOOK))


async def _finish(tasks: set[asyncio.Task[Any]], stop: asyncio.Event) -> None:
    """Waits for all, or for the end of the run, at which what still runs is cancelled."""
    stopping = asyncio.create_task(stop.wait())
    pending = set(tasks)
    while pending and not stop.is_set():
        done, rest = await asyncio.wait({*pending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()  # a bug of ours must not pass for a request that failed
        pending = rest - {stopping}
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    stopping.cancel()
