"""A client's bytes → requests in tokens, off the event loop.

Owns the bounded executor in which messages are parsed and checked, templates rendered and prompts tokenised: none of
that may hold up the streams on the loop. Everything it is given and gives back is immutable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import msgspec

from diptych.contract.errors import CapacityExceeded, InvalidRequest
from diptych.contract.prefix import block_digests
from diptych.contract.request import Key, Request, Stopping
from diptych.router.chat import ChatTemplate
from diptych.router.conversation import conversation
from diptych.router.detokenizer import Detokenizer
from diptych.router.facts import ModelFacts
from diptych.router.settings import RouterSettings
from diptych.router.text import TextStream
from diptych.router.tokenizer import Tokenizer
from diptych.router.validate import MAX_SEED, Order, Room, check_ids, check_text_ids, order, parse, stopping
from diptych.v1 import inference_pb2 as pb

T = TypeVar("T")


class Prepared(msgspec.Struct, frozen=True):
    """One client's request, in tokens. echo: the text before every choice's. opened: bytes of the character that the
    prompt left incomplete. digests: of the prompt's blocks, by block size."""

    order: Order
    prompt: tuple[int, ...]
    stopping: Stopping
    echo: str
    opened: bytes
    digests: dict[int, tuple[bytes, ...]]

    def request(self, key: Key, index: int, deadline_s: float, traceparent: str) -> Request:
        """What workers are sent for choice `index`. Only the first asks for the prompt's log-probabilities."""
        asked = self.order
        seed = (asked.sampling.seed + index) & MAX_SEED
        return Request(
            key=key,
            prompt=self.prompt,
            stopping=self.stopping,
            sampling=msgspec.structs.replace(asked.sampling, seed=seed),
            logprobs=asked.logprobs,
            prompt_logprobs=asked.prompt_logprobs if index == 0 else None,
            deadline_s=deadline_s,
            salt=asked.salt,
            traceparent=traceparent,
        )


class Preparer:
    """Made and used in one event loop; `close` ends its threads."""

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts, settings: RouterSettings) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self._facts = facts
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="prepare")
        self._pending = 0

    async def prepare(self, data: bytes, room: Room, block_sizes: Iterable[int]) -> Prepared:
        """Raises `InvalidRequest`, or `CapacityExceeded` when too many requests wait for their turn."""
        return await self._run(lambda: self._prepare(data, room, tuple(block_sizes)))

    async def apart(self, work: Callable[[], T]) -> T:
        """Does what would hold the loop up in the executor. Never refused: it is the end of an accepted request."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def text_stream(self, prepared: Prepared) -> TextStream:
        detokenizer = Detokenizer(self.tokenizer.pieces, prepared.opened, prepared.order.echo)
        return TextStream(detokenizer, prepared.stopping, prepared.order.stop)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._pending >= self._settings.max_preparing:
            raise CapacityExceeded(f"{self._pending} requests are being prepared already.")
        self._pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._one_less)  # also when the caller has left: its work may still run
        return await asyncio.shield(future)

    def _one_less(self, future: asyncio.Future[T]) -> None:
        self._pending -= 1
        if not future.cancelled():
            future.exception()  # seen, even if nobody waits any more

    def _prepare(self, data: bytes, room: Room, block_sizes: tuple[int, ...]) -> Prepared:
        message = cast("pb.GenerateRequest", parse(data, pb.GenerateRequest, self._settings.max_message_bytes))
        asked = order(message, self._facts, self._settings.max_choices)
        prompt, text = self._prompt(message, room)
        limits = stopping(asked, len(prompt), self._facts, room)
        opened = self.tokenizer.open_bytes(prompt)
        return Prepared(
            order=asked,
            prompt=prompt,
            stopping=limits,
            echo=self._echo(prompt, text, opened) if asked.echo else "",
            opened=opened,
            digests={size: tuple(block_digests(prompt, size, asked.salt)) for size in block_sizes},
        )

    def _prompt(self, message: pb.GenerateRequest, room: Room) -> tuple[tuple[int, ...], str | None]:
        kind = message.WhichOneof("prompt")
        if kind == "text":
            self._must_be_able_to_fit(message.text, room)
            return self._known(self.tokenizer.encode(message.text), kind), message.text
        if kind == "chat":
            prompt, text = self.template.encode(conversation(message.chat))
            return self._known(prompt, kind), text
        if kind == "token_ids":
            return check_ids(message.token_ids.ids, self._facts), None
        raise InvalidRequest("The prompt is missing: set one of text, chat, token_ids.")

    def _known(self, prompt: tuple[int, ...], kind: str) -> tuple[int, ...]:
        return check_text_ids(prompt, kind, self._facts, self.tokenizer.token_text)

    def _must_be_able_to_fit(self, text: str, room: Room) -> None:
        """Seconds of tokenising are not spent on a text that even the longest tokens could not make fit."""
        least = len(text.encode()) // self.tokenizer.longest
        if least > room.context:
            raise InvalidRequest(f"The prompt has more than {least} tokens; the context is {room.context}.")

    def _echo(self, prompt: tuple[int, ...], text: str | None, opened: bytes) -> str:
        """Without the incomplete character at its end: the stream goes on from there."""
        if text is not None and not opened:
            return text
        whole = b"".join(self.tokenizer.piece_or_name(token) for token in prompt)
        return whole[: len(whole) - len(opened)].decode("utf-8", "replace")
