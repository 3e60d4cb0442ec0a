"""One client's request: its choices, its deadline, and what waits to be sent to the client.

Owns the request's id and its root span; its error is the first one of any choice, which ends the others. Pieces that
the client is slow to take grow together, so that no slow client holds up a token or costs a message a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from diptych.contract.errors import Cancelled, DeadlineExceeded, DiptychError
from diptych.contract.request import Key, Request
from diptych.contract.wire import Logprob
from diptych.router.choice import Choice, Terminal
from diptych.router.prepare import Prepared
from diptych.router.text import TextStream


@dataclass(slots=True)
class Piece:
    """More of one choice. finish: set in its last piece."""

    choice: Choice
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: Terminal | None = None

    def add(self, text: str, ids: tuple[int, ...], logprobs: tuple[Logprob, ...]) -> None:
        if text:
            self.text.append(text)
        self.ids += ids
        self.logprobs += logprobs

    def worth_sending(self, tokens: bool) -> bool:
        """tokens: whether the client sees them, else only text counts."""
        return bool(self.text or self.finish or (tokens and self.ids))


class Call:
    """received: ns on our monotonic clock; seconds: its time, counted from then. left: the client's handler is through
    with it. Made by the desk, which is told by `on_over` when nothing can happen to it any more."""

    def __init__(self, request_id: str, received: int, seconds: float, root: Span, traceparent: str) -> None:
        self.id = request_id
        self.received = received
        self.seconds = seconds
        self.root = root
        self.traceparent = traceparent
        self.prepared_at = 0
        self.prepared: Prepared | None = None
        self.choices: list[Choice] = []
        self.error: DiptychError | None = None
        self.left = False
        self.ended_at = 0
        self.on_choice_ended: Callable[[Choice], None] = lambda _: None
        self.on_choice_closed: Callable[[Choice], None] = lambda _: None
        self.on_over: Callable[[Call], None] = lambda _: None
        self._outbox: dict[int, Piece] = {}
        self._news = asyncio.Event()
        self._known = asyncio.Event()

    # ── the desk's side ────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, prepared: Prepared, stream: Callable[[], TextStream]) -> None:
        """Makes the choices; each begins with the echo, when asked for."""
        self.prepared_at = time.monotonic_ns()
        self.prepared = prepared
        for index in range(prepared.order.n):
            choice = Choice(self, index, stream(), Key(f"{self.id}-{index}"))
            self.choices.append(choice)
            if prepared.echo:
                self.on_text(choice, prepared.echo, (), ())

    def request(self, choice: Choice) -> Request:
        """What workers are sent for this choice, with the time that is left now."""
        assert self.prepared is not None
        return self.prepared.request(choice.key, choice.index, max(self.time_left, 0.001), self.traceparent)

    @property
    def time_left(self) -> float:
        return self.seconds - (time.monotonic_ns() - self.received) / 1e9

    def expire(self) -> None:
        waiting = next((choice.cause for choice in self.choices if not choice.parts and choice.cause), "")
        tokens = sum(choice.next for choice in self.choices)
        where = f"while it waited: {waiting}" if waiting else f"after {tokens} tokens"
        self.fail(DeadlineExceeded(f"The request's {self.seconds:.3g} s ran out {where}."))

    def fail(self, error: DiptychError) -> None:
        """Ends every choice that has not ended."""
        if self.error is None and not self.done:
            self.error = error
        for choice in self.choices:
            choice.fail(error)
        self._news.set()
        self._known.set()

    # ── choices' side (`choice.Owner`) ─────────────────────────────────────────────────────────────────────────────

    def on_text(self, choice: Choice, text: str, ids: tuple[int, ...], logprobs: tuple[Logprob, ...]) -> None:
        self._piece(choice).add(text, ids, logprobs)
        self._news.set()

    def on_terminal(self, choice: Choice) -> None:
        assert choice.terminal is not None
        self.ended_at = choice.terminal.at
        self.on_choice_ended(choice)
        if choice.terminal.error is not None:
            self.error = self.error or choice.terminal.error
            self.fail(self.error)
            return
        self._piece(choice).finish = choice.terminal
        self._news.set()
        self.on_prompt_known(choice)

    def on_prompt_known(self, choice: Choice) -> None:
        if all(each.prompt_known for each in self.choices):
            self._known.set()

    def on_closed(self, choice: Choice) -> None:
        self.on_choice_closed(choice)
        self._over_if_over()

    def _piece(self, choice: Choice) -> Piece:
        return self._outbox.setdefault(choice.index, Piece(choice))

    # ── the handler's side ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def done(self) -> bool:
        return bool(self.choices) and all(choice.terminal is not None for choice in self.choices)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What has come since the last time, until every choice has ended. Raises the request's error at once."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self.error is not None:
                raise self.error
            over = self.done
            yield [self._outbox.pop(piece.choice.index) for piece in self._worth_sending()]
            if over:
                return

    def _worth_sending(self) -> list[Piece]:
        order = self.prepared.order if self.prepared is not None else None
        tokens = order is not None and (order.token_ids or order.logprobs is not None)
        return [piece for piece in self._outbox.values() if piece.worth_sending(tokens)]

    async def collect(self) -> list[Piece]:
        """Everything, a piece a choice, when every choice has ended."""
        whole = {choice.index: Piece(choice) for choice in self.choices}
        async for fresh in self.pieces():
            for piece in fresh:
                whole[piece.choice.index].add("".join(piece.text), tuple(piece.ids), tuple(piece.logprobs))
                whole[piece.choice.index].finish = piece.finish
        return list(whole.values())

    async def prompt_known(self, limit: float) -> None:
        """Waits until the workers have told what they know of the prompt (its cached tokens, its log-probabilities).
        That was long ago, except after a stop string in the first tokens; then it is a matter of a message."""
        try:
            async with asyncio.timeout(limit):
                await self._known.wait()
        except TimeoutError:
            return  # told with what is known: a worker that has gone since tells nothing

    def delivered(self, piece: Piece, at: int) -> None:
        """The piece was given to the transport."""
        marks = piece.choice.marks
        if piece.choice.next:
            marks.first_delivered = marks.first_delivered or at
            marks.last_delivered = at

    def leave(self) -> None:
        """The handler is through: normally, by an error, or because the client dropped the call."""
        if not self.done and self.error is None:
            late = self.time_left <= 0.05  # its own deadline ends the client's call a moment before ours
            self.fail(DeadlineExceeded("The client's deadline passed.") if late else Cancelled("The client left."))
        self.ended_at = self.ended_at or time.monotonic_ns()
        self.left = True
        self._over_if_over()

    def _over_if_over(self) -> None:
        if self.left and all(choice.closed for choice in self.choices):
            self.on_over(self)
