"""The desk: every request that this router has accepted, from admission to the last worker's goodbye.

Owns the books (calls by id, choices by key), the queue of choices that find no worker, deadlines, and how long a choice
that has ended is kept for what its workers still tell. Hears the sessions; asks `routing` where to send what.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable

from diptych.contract.errors import CapacityExceeded, DiptychError
from diptych.contract.request import Key
from diptych.contract.wire import Cancel, Ended, Granted, Step
from diptych.router.call import Call
from diptych.router.choice import Choice, Part
from diptych.router.facts import ModelFacts
from diptych.router.routing import Need, NoRoute, Route, View, choose
from diptych.router.sessions import Session, Sessions
from diptych.router.settings import RouterSettings
from diptych.router.validate import Room

log = logging.getLogger(__name__)


class Desk:
    """`sessions` is set once, before anything is admitted. on_over: told of each call when nothing can happen to it any
    more (its trace can be drawn)."""

    sessions: Sessions

    def __init__(self, settings: RouterSettings, facts: ModelFacts, on_over: Callable[[Call], None]) -> None:
        self._settings = settings
        self._on_over = on_over
        self._room = Room(facts.max_context, facts.max_context, facts.max_context)
        self._turns = itertools.count()
        self._calls: dict[str, Call] = {}
        self._choices: dict[Key, Choice] = {}
        self._waiting: dict[Key, Choice] = {}
        self._empty = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._lingering: dict[Key, asyncio.TimerHandle] = {}

    # ── what the server asks ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def active(self) -> int:
        return len(self._calls)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def room(self) -> Room:
        """The most that any worker takes, or took before it was lost; of the model alone before workers are known."""
        infos = [*(session.worker for session in self.sessions.open()), *self.sessions.table.workers]
        whole = [info for info in infos if info.role != "prefill"]
        fill = [info for info in infos if info.role != "decode"]
        if whole and fill:
            self._room = Room(
                context=max(info.max_context for info in whole),
                cache=max(info.total_blocks * info.block_size for info in whole),
                prompt=max(info.total_blocks * info.block_size for info in fill),
            )
        return self._room

    def block_sizes(self) -> set[int]:
        return {session.worker.block_size for session in self.sessions.open()}

    def ready(self) -> bool:
        """Whether a request sent now would find workers."""
        return isinstance(choose(Need(1, 3, {}), self._views()), Route)

    def open(self, call: Call) -> None:
        """Takes a call into the books, or raises `CapacityExceeded`. From here on `call.leave` must be called."""
        if len(self._calls) >= self._settings.max_active:
            raise CapacityExceeded(f"This router holds {len(self._calls)} requests already.")
        self._calls[call.id] = call
        self._timers[call.id] = asyncio.get_running_loop().call_later(max(call.time_left, 0), call.expire)
        call.on_choice_ended, call.on_choice_closed, call.on_over = self._ended, self._closed, self._over

    def start(self, call: Call) -> None:
        """Sends every choice to workers, or lets it wait for some."""
        for choice in call.choices:
            self._choices[choice.key] = choice
        for choice in call.choices:
            if choice.terminal is None and not self._place(choice):
                self._wait(choice)

    def abort(self, request_id: str, error: DiptychError) -> bool:
        call = self._calls.get(request_id)
        if call is not None:
            call.fail(error)
        return call is not None

    async def drained(self, limit: float) -> None:
        """Waits, for at most `limit` seconds, until workers have told the ends of what was cancelled."""
        self._empty = asyncio.Event()
        if self._calls:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._empty.wait()
        for choice in list(self._choices.values()):
            choice.close_if_over(give_up=True)

    # ── what sessions tell (`sessions.Listener`) ───────────────────────────────────────────────────────────────────

    def on_message(self, session: Session, message: Granted | Step | Ended) -> None:
        if isinstance(message, Step):
            for out in message.tokens:
                choice, part = self._find(out.key, session)
                if choice is None:
                    session.send(Cancel(out.key, "unknown here"))
                elif part is not None:
                    choice.on_tokens(part, out, message.drawn)
            return
        choice, part = self._find(message.key, session)
        if choice is None or part is None:
            return
        if isinstance(message, Granted):
            choice.on_granted(message)
        else:
            choice.on_ended(part, message)

    def on_lost(self, session: Session, error: DiptychError) -> None:
        for choice in list(self._choices.values()):
            part = choice.parts.get(session.id)
            if part is not None:
                choice.on_lost(part, error)

    def on_change(self) -> None:
        for choice in list(self._waiting.values()):
            if self._place(choice):
                self._waiting.pop(choice.key, None)

    # ── placing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, choice: Choice) -> bool:
        call = choice.owner
        assert isinstance(call, Call)
        assert call.prepared is not None
        prompt = len(call.prepared.prompt)
        total = prompt + call.prepared.stopping.max_tokens
        route = choose(Need(prompt, total, call.prepared.digests, next(self._turns)), self._views())
        if isinstance(route, NoRoute):
            choice.cause = route.cause
            return False
        ends = (self.sessions.find(name) if name else None for name in (route.prefill, route.decode, route.both))
        choice.begin(call.request(choice), *ends)
        return True

    def _wait(self, choice: Choice) -> None:
        if len(self._waiting) >= self._settings.max_queue:
            choice.fail(CapacityExceeded(f"{len(self._waiting)} requests wait already, because {choice.cause}."))
        else:
            self._waiting[choice.key] = choice

    def _views(self) -> list[View]:
        return [_view(session) for session in self.sessions.open()]

    def _find(self, key: Key, session: Session) -> tuple[Choice | None, Part | None]:
        """A message of an older attempt, or from a worker that has no part in it, finds no part."""
        choice = self._choices.get(key)
        return choice, choice.parts.get(session.id) if choice is not None else None

    # ── ends ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ended(self, choice: Choice) -> None:
        """Its workers' own ends are waited for as long as a session may be silent, then it is given up."""
        self._waiting.pop(choice.key, None)
        loop = asyncio.get_running_loop()
        self._lingering[choice.key] = loop.call_later(self._settings.limits.lease, self._give_up, choice)

    def _give_up(self, choice: Choice) -> None:
        silent = [name for name, part in choice.parts.items() if not part.closed]
        log.warning("%s: no end was told by %s", choice.key, ", ".join(silent))
        choice.release_all("nobody waits for it any more")
        choice.close_if_over(give_up=True)

    def _closed(self, choice: Choice) -> None:
        self._choices.pop(choice.key, None)
        timer = self._lingering.pop(choice.key, None)
        if timer is not None:
            timer.cancel()

    def _over(self, call: Call) -> None:
        if self._calls.pop(call.id, None) is None:
            return
        self._timers.pop(call.id).cancel()
        self._on_over(call)
        if not self._calls:
            self._empty.set()


def _view(session: Session) -> View:
    info, load = session.worker, session.load
    busy = max(load.running + load.waiting + load.reserved + session.unreported, session.outstanding)
    return View(
        id=info.id,
        role=info.role,
        digest=info.digest,
        block_size=info.block_size,
        total_blocks=info.total_blocks,
        free_blocks=load.free_blocks,
        max_context=info.max_context,
        busy=-(-busy // info.data),
        links=frozenset(load.links),
        prefixes=session.prefixes,
        draining=load.draining,
    )
