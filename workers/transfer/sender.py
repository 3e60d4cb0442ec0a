"""One link at prefill: a thread that owns a control socket and a pair, and sends what the engine queues, in order.

It never touches the engine's state: it reads blocks that the engine holds for it (a transfer is a holder like a
sequence), and reports through `post`. A request that was queued gets one `SendClosed`, after which the thread reads its
blocks no more; those queued when the thread had ended already are covered by its `LinkDown`.
"""

from __future__ import annotations

import queue
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread
from time import monotonic_ns

import torch

from diptych.contract.errors import DecodeLost, DiptychError, Internal, TransferFailed, from_wire
from diptych.contract.limits import Limits
from diptych.contract.request import Key
from diptych.contract.wire import WorkerInfo
from diptych.kernels.pack import pack_tokens
from diptych.workers.cache import KVCache
from diptych.workers.parallel.layout import Grid
from diptych.workers.transfer.control import (
    Abandon,
    Accepted,
    Control,
    Done,
    Finish,
    Frame,
    LinkHello,
    LinkReady,
    Piece,
    Ping,
    Pong,
    Ready,
    knock,
)
from diptych.workers.transfer.events import Failure, LinkDown, LinkUp, SendClosed, Stats
from diptych.workers.transfer.pair import SENDER, Pair, Slots, Transport, connect_store, make_pair, open_pair
from diptych.workers.transfer.plan import Route, Slice, plan, token_bytes


@dataclass(frozen=True)
class SendTokens:
    """Send tokens [first, end) of these blocks."""

    key: Key
    blocks: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True)
class SendFinish:
    key: Key
    total: int
    first_token: int


@dataclass(frozen=True)
class SendAbandon:
    key: Key
    code: str
    message: str


@dataclass
class _Flight:
    """A payload that is under way."""

    key: Key
    number: int
    works: list[object]
    start: int
    bytes: int = 0


@dataclass
class _Open:
    stats: Stats = field(default_factory=Stats)
    dropped: bool = False  # cancelled here, or no longer wanted there


class SendLink(Thread):
    """A link to one rank of a decode worker. The engine calls `queue`, `cancel` and `close`; none of them blocks."""

    def __init__(
        self,
        peer: WorkerInfo,
        me: str,
        secret: bytes,
        digest: str,
        cache: KVCache,
        route: Route,
        ends: tuple[int, int],
        grids: tuple[Grid, Grid],
        address: str,
        host: str,
        transport: Transport,
        limits: Limits,
        message_bytes: int,
        post: Callable[[LinkUp | LinkDown | SendClosed], None],
        delay_s: float = 0.0,
    ) -> None:
        """route: the heads that it carries. ends: the ranks that it connects, of `grids`. address: the receiving
        rank's."""
        super().__init__(name=f"send-{peer.id}-{ends[1]}", daemon=True)
        self.route, self.grids, self.address = route, grids, address
        self.source, self.target = ends
        self.peer, self.me, self.secret, self.digest = peer, me, secret, digest
        self.cache, self.host, self.limits, self.post, self.delay_s = cache, host, limits, post, delay_s
        self.message_bytes = max(message_bytes, token_bytes(cache.layout, route.heads))
        self.transport, self.device = transport, str(cache.data.device)
        self._jobs: queue.SimpleQueue[SendTokens | SendFinish | SendAbandon] = queue.SimpleQueue()
        self._cancelled: set[Key] = set()  # set.add and `in` are atomic under the interpreter's lock
        self._open: dict[Key, _Open] = {}
        self._flights: list[_Flight] = []
        self._numbers = 0
        self._control: Control | None = None
        self._pair: Pair | None = None

    # ── the engine's side ──────────────────────────────────────────────────────────────────────────────────────────

    def queue(self, job: SendTokens | SendFinish | SendAbandon) -> None:
        self._jobs.put(job)

    def cancel(self, key: Key, code: str, message: str) -> None:
        """What is queued for the key is skipped; `SendClosed` follows."""
        self._cancelled.add(key)
        self._jobs.put(SendAbandon(key, code, message))

    # ── the thread's side ──────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        error: DiptychError
        try:
            control = self._connect()
            self.post(LinkUp(self.peer.id, self.source, self.target))
            self._serve(control)
        except DiptychError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - a bug here must end the link, never leave requests waiting
            error = Internal(f"The link to {self.peer.id} failed: {failure!r}")
        if self._control is not None:
            self._control.close()
        if self._pair is not None:
            self._pair.close()
        if type(error) is TransferFailed:
            error = DecodeLost(f"The link to decode worker {self.peer.id} ended: {error}")
        self._fail_all(error)
        self.post(LinkDown(self.peer.id, self.source, self.target, Failure.of(error)))

    def _connect(self) -> Control:
        host, port = self.address.rsplit(":", 1)
        try:
            sock = socket.create_connection((host, int(port)), timeout=self.limits.handshake)
        except OSError as error:
            raise TransferFailed(f"Decode worker {self.peer.id} at {self.address} does not answer: {error}.") from error
        control = self._control = Control(sock, self.limits.handshake)
        name = uuid.uuid4().hex
        sources, targets = self.grids
        hello = LinkHello(
            name,
            self.me,
            self.peer.epoch,
            self.digest,
            self.transport,
            uuid.uuid4().bytes,
            self.source,
            sources,
            self.target,
            targets,
        )
        opened = knock(control, self.secret, hello)
        store = connect_store((opened.store_host, opened.store_port), self.limits.handshake)
        self._slots = Slots(self.message_bytes, self.device, self.transport)
        limits = self.limits
        self._pair = open_pair(
            lambda: make_pair(self.transport, store, name, SENDER, self.host, self.device, limits.progress),
            # The first message of a pair can take most of a second: not inside a request.
            lambda pair: pair.finish(pair.send(self._slots.wire(0, 0)), control.check),
            control.check,
            limits.handshake,
        )
        frame = control.read()
        if not isinstance(frame, LinkReady):
            raise Internal(f"The link's peer sent {type(frame).__name__} where LinkReady was due.")
        control.limit = limits.progress
        return control

    def _serve(self, control: Control) -> None:
        while True:
            if self._jobs.empty():
                self._settle()  # or a payload's end would be noted only when the next job comes
            try:
                job = self._jobs.get(timeout=self.limits.heartbeat)
            except queue.Empty:
                self._ping(control)
                continue
            if isinstance(job, SendTokens):
                self._send_tokens(control, job)
            elif isinstance(job, SendFinish):
                self._finish(control, job)
            elif isinstance(job, SendAbandon):
                self._abandon(control, job)

    def _ping(self, control: Control) -> None:
        self._settle()
        control.write(Ping())
        self._await(control, Pong)

    def _send_tokens(self, control: Control, job: SendTokens) -> None:
        entry = self._open.setdefault(job.key, _Open())
        for piece in plan(self.cache.layout, self.route.heads, job.first, job.end, self.message_bytes):
            if entry.dropped or job.key in self._cancelled:
                return
            self._send_piece(control, job, piece, entry)
            if self.delay_s:
                time.sleep(self.delay_s)

    def _send_piece(self, control: Control, job: SendTokens, piece: Slice, entry: _Open) -> None:
        layout, stats, route = self.cache.layout, entry.stats, self.route
        self._settle(keep=1)
        self._numbers += 1
        size = piece.count * token_bytes(layout, route.heads)
        start = monotonic_ns()
        stats.first_ns = stats.first_ns or start

        def pack(raw: torch.Tensor) -> None:
            slab = raw.view(layout.torch_dtype).view(piece.shape(layout, route.heads))
            pages = self.cache.pages[..., route.from_head : route.from_head + route.heads, :]
            pack_tokens(pages, job.blocks, piece.first, piece.count, slab)

        raw = self._slots.fill(self._numbers, size, pack)
        packed = monotonic_ns()
        control.write(Piece(job.key, self._numbers, piece.first, piece.count, size))
        self._await(control, Ready)
        ready = monotonic_ns()
        self._flights.append(_Flight(job.key, self._numbers, self._payload.send(raw), ready, size))
        stats.copy_ns += packed - start
        stats.wait_ns += ready - packed
        stats.bytes += size
        stats.messages += 1

    def _settle(self, keep: int = 0) -> None:
        """Waits until at most `keep` payloads are under way."""
        while len(self._flights) > keep:
            flight = self._flights.pop(0)
            self._payload.finish(flight.works, self._alive)
            entry = self._open.get(flight.key)
            if entry is not None:
                entry.stats.wire(flight.start, monotonic_ns())

    def _await(self, control: Control, kind: type[Frame]) -> Frame:
        """The next frame of that kind; takes note of `Done` on the way."""
        while True:
            frame = control.read()
            if isinstance(frame, Done):
                self._note(frame)
            elif isinstance(frame, kind):
                return frame
            else:
                raise Internal(f"The link's peer sent {type(frame).__name__} where {kind} was due.")

    @property
    def _payload(self) -> Pair:
        assert self._pair is not None
        return self._pair

    def _alive(self) -> None:
        assert self._control is not None
        self._control.check()

    def _note(self, done: Done) -> None:
        if not done.wanted and done.key in self._open:
            self._open[done.key].dropped = True

    def _finish(self, control: Control, job: SendFinish) -> None:
        entry = self._open.setdefault(job.key, _Open())
        if job.key in self._cancelled:
            return  # its SendAbandon is queued behind
        self._settle()
        control.write(Finish(job.key, job.total, job.first_token, entry.stats.messages))
        accepted = self._await(control, Accepted)
        assert isinstance(accepted, Accepted)
        self._close(job.key, from_wire(accepted.code, accepted.message) if accepted.code else None)

    def _abandon(self, control: Control, job: SendAbandon) -> None:
        self._cancelled.discard(job.key)
        if job.key not in self._open:
            return  # accepted before the cancel came
        self._settle()
        control.write(Abandon(job.key, job.code, job.message))
        self._close(job.key, from_wire(job.code, job.message))

    def _close(self, key: Key, error: DiptychError | None) -> None:
        entry = self._open.pop(key, None)
        if entry is not None:
            entry.stats.last_ns = monotonic_ns()
            failure = Failure.of(error) if error else None
            self.post(SendClosed(key, self.source, self.target, failure, entry.stats))

    def _fail_all(self, error: DiptychError) -> None:
        self._drain_jobs()
        for key in list(self._open):
            self._close(key, error)

    def _drain_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            self._open.setdefault(job.key, _Open())
