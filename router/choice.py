"""One choice of a request: one sequence, from the moment it looks for workers to its one terminal event.

    waiting ─▶ running ─▶ ended ─▶ closed        (ended straight from waiting, too)

Owns the order of tokens, the text, which worker still works on it, and the compare-and-set of the terminal event. What
comes after that event is counted and dropped; the choice closes when every part has told its end, or was given up.
Everything runs on the event loop and nothing here waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from diptych.contract.errors import DecodeLost, DiptychError, Internal, PrefillLost, WorkerLost, from_wire
from diptych.contract.request import Key, Request
from diptych.contract.wire import Cancel, Ended, Generate, Granted, Logprob, Prefill, Reserve, Start, TokenOut
from diptych.router.sessions import Session
from diptych.router.text import TextStream


class Terminal(msgspec.Struct, frozen=True):
    """How a choice ended. at: ns on our monotonic clock. error: for `cancelled` and `error`."""

    reason: Literal["stop", "length", "cancelled", "error"]
    at: int
    stop_string: str | None = None
    stop_id: int | None = None
    error: DiptychError | None = None


@dataclass(slots=True)
class Part:
    """A worker's share. released: it was told to cancel, so that its end is expected and means nothing."""

    session: Session
    sent: int
    ended: Ended | None = None
    lost: DiptychError | None = None
    released: bool = False

    @property
    def closed(self) -> bool:
        return self.ended is not None or self.lost is not None


class Owner(Protocol):
    """The call that a choice belongs to. None of these may raise."""

    def on_text(self, choice: Choice, text: str, ids: tuple[int, ...], logprobs: tuple[Logprob, ...]) -> None:
        """More of the answer, in order."""

    def on_terminal(self, choice: Choice) -> None:
        """Exactly once, after the last `on_text`."""

    def on_prompt_known(self, choice: Choice) -> None:
        """What workers tell about the prompt has come. Perhaps twice, perhaps never."""

    def on_closed(self, choice: Choice) -> None:
        """Exactly once, after `on_terminal`: no worker holds anything for it any more, as far as we can know."""


@dataclass(slots=True)
class Marks:
    """When what happened, ns on our monotonic clock; drawn times are on the worker's."""

    routed: int = 0
    first_drawn: int = 0
    first_ready: int = 0
    first_delivered: int = 0
    last_drawn: int = 0
    last_delivered: int = 0


@dataclass(slots=True)
class Choice:
    """cause: why it waits for a worker, or waited last. late: messages that came after its terminal event."""

    owner: Owner
    index: int
    text: TextStream
    key: Key
    attempt: int = 0
    cause: str = ""
    terminal: Terminal | None = None
    closed: bool = False
    late: int = 0
    next: int = 0
    marks: Marks = field(default_factory=Marks)
    parts: dict[str, Part] = field(default_factory=dict)
    prefill: Part | None = None
    decode: Part | None = None
    both: Part | None = None
    first_from: Part | None = None
    last_from: Part | None = None
    granted: Granted | None = None
    _seen: int = 0
    _early: dict[int, tuple[Part, TokenOut, int]] = field(default_factory=dict)
    _ending: Ended | None = None
    _deferred: Ended | None = None

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, request: Request, prefill: Session | None, decode: Session | None, both: Session | None) -> None:
        """Sends every worker its part at once."""
        self.marks.routed = time.monotonic_ns()
        if both is not None:
            self.both = self._part(both)
            both.send(Generate(request))
            return
        if decode is not None and prefill is not None:
            self.decode = self._part(decode)
            decode.send(Reserve(request, prefill.id))
        if prefill is not None:
            self.prefill = self._part(prefill)
            prefill.send(Prefill(request, decode.id if decode is not None else None))

    def _part(self, session: Session) -> Part:
        part = self.parts[session.id] = Part(session, time.monotonic_ns())
        session.unreported += 1
        session.outstanding += 1
        return part

    def _release(self, part: Part, reason: str) -> None:
        if not part.closed and not part.released:
            part.released = True
            part.session.send(Cancel(self.key, reason))

    # ── what workers say ───────────────────────────────────────────────────────────────────────────────────────────

    def on_granted(self, granted: Granted) -> None:
        """A second grant, with `local`, means that decode had to take the first one back."""
        if self.terminal is not None or self.prefill is None:
            self.late += 1
            return
        self.granted = granted
        if granted.local:
            self._release(self.prefill, "decode prefills it itself")
        else:
            self.prefill.session.send(Start(self.key, granted.held, granted.data_rank))

    def on_tokens(self, part: Part, out: TokenOut, drawn: int) -> None:
        """Positions may come from two workers and cross; a position that was seen already is dropped."""
        if self.terminal is not None:
            self.late += 1
            return
        self._seen = max(self._seen, out.position + len(out.ids))
        if out.position > self.next:
            self._early[out.position] = (part, out, drawn)
            return
        self._deliver(part, out, drawn)
        while self._early and self.terminal is None and (position := min(self._early)) <= self.next:
            self._deliver(*self._early.pop(position))
        self._end_if_complete()

    def _deliver(self, part: Part, out: TokenOut, drawn: int) -> None:
        skip = self.next - out.position
        ids, logprobs = out.ids[skip:], out.logprobs[skip:]
        if not ids:
            return
        if self.next == 0:
            self.first_from, self.marks.first_drawn, self.marks.first_ready = part, drawn, time.monotonic_ns()
        self.last_from, self.marks.last_drawn = part, drawn
        delta = self.text.push(ids)
        self.next += delta.used
        self.owner.on_text(self, delta.text, ids[: delta.used], logprobs[: delta.used])
        if delta.stop is not None:
            self.finish(Terminal("stop", time.monotonic_ns(), stop_string=delta.stop))

    def on_ended(self, part: Part, ended: Ended) -> None:
        if part.closed:
            self.late += 1
            return
        part.ended = ended
        self._part_closed(part)
        if ended.stages:
            part.session.clock.sent(part.sent, ended.stages[0].start)
        if self.prompt_known:
            self.owner.on_prompt_known(self)
        if self.terminal is None:
            self._apply(part, ended)
        self.close_if_over()

    def _apply(self, part: Part, ended: Ended) -> None:
        if part.released:
            return
        if part is self.decode and ended.reason == "cancelled" and self._prefill_may_have_ended():
            self._deferred = ended  # prefill told it that nothing will come: prefill's word, on its session, decides
            return
        if part is self.prefill and ended.reason in ("handed", "cancelled"):
            # It handed over, or decode told it that it no longer waits: decode's word, on its own session, decides.
            if self.decode is not None and self._deferred is not None:
                self._fail_with(self.decode, self._deferred)
            return
        if ended.reason in ("stop", "length"):
            self._ending = ended
            if part is self.prefill and self.decode is not None:
                self._release(self.decode, "the first token was the last")
            self._end_if_complete()
            return
        self._fail_with(part, ended)

    def _prefill_may_have_ended(self) -> bool:
        """Whether prefill, which is still open, may have found that its first token was the last."""
        prefill = self.prefill
        open_still = prefill is not None and not prefill.closed and not prefill.released
        return open_still and self.granted is not None and self._seen <= 1

    def _fail_with(self, part: Part, ended: Ended) -> None:
        told = ended.message or f"{part.session.id} ended the request without a reason."
        self.fail(from_wire(ended.code, told) if ended.code else Internal(told))

    def on_lost(self, part: Part, error: DiptychError) -> None:
        """Its worker is gone. Prefill may go once decode has begun: then everything was handed over."""
        if part.closed:
            return
        part.lost = error
        self._part_closed(part)
        handed_over = part is self.prefill and self.next > 0 and self._seen > 1
        if self.terminal is None and not part.released and not handed_over:
            self.fail(self._loss(part, error))
        self.close_if_over()

    def _loss(self, part: Part, error: DiptychError) -> DiptychError:
        if part is self.prefill:
            return PrefillLost(f"The prefill worker was lost. {error}")
        if part is self.decode:
            return DecodeLost(f"The decode worker was lost. {error}")
        return WorkerLost(f"The worker was lost. {error}")

    def _part_closed(self, part: Part) -> None:
        part.session.outstanding -= 1

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_if_complete(self) -> None:
        """A worker has told the end, and every token up to it has come (prefill's first may be the last to come)."""
        ending = self._ending
        if ending is None or self.terminal is not None or self.next == 0 or self.next < self._seen:
            return
        rest = self.text.finish()
        self.owner.on_text(self, rest.text, (), ())
        reason: Literal["stop", "length"] = "stop" if ending.reason == "stop" or rest.stop else "length"
        self.finish(Terminal(reason, time.monotonic_ns(), rest.stop, ending.stop_id), release=False)

    def fail(self, error: DiptychError) -> bool:
        reason: Literal["cancelled", "error"] = "cancelled" if error.code == "Cancelled" else "error"
        return self.finish(Terminal(reason, time.monotonic_ns(), error=error))

    def finish(self, terminal: Terminal, release: bool = True) -> bool:
        """The compare-and-set: True for the one event that counts. release: cancel what workers still do for it."""
        if self.terminal is not None:
            self.late += 1
            return False
        self.terminal = terminal
        if release:
            self.release_all(str(terminal.error) if terminal.error else terminal.reason)
        self.owner.on_terminal(self)
        self.close_if_over()
        return True

    def release_all(self, reason: str) -> None:
        for part in self.parts.values():
            self._release(part, reason)

    def close_if_over(self, give_up: bool = False) -> None:
        if self.closed or self.terminal is None or not (give_up or all(part.closed for part in self.parts.values())):
            return
        for part in self.parts.values():
            if not part.closed:
                self._part_closed(part)
        self.closed = True
        self.owner.on_closed(self)

    # ── about the prompt ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def prompt_part(self) -> Part | None:
        """Who computes the prompt."""
        if self.both is not None:
            return self.both
        return self.decode if self.granted is not None and self.granted.local else self.prefill

    @property
    def prompt_known(self) -> bool:
        return self.prompt_part is None or self.prompt_part.closed

    @property
    def cached(self) -> int:
        return max((part.ended.cached for part in self.parts.values() if part.ended), default=0)

    @property
    def prompt_logprobs(self) -> tuple[Logprob, ...]:
        told = (part.ended.prompt_logprobs for part in self.parts.values() if part.ended)
        return max(told, key=len, default=())
