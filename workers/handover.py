"""The engine's side of transfers: which links there are, who holds which blocks for them, what they reported.

Called by the engine's main thread only. Link threads post events into a queue that `events` empties. A transfer that
leaves holds its blocks like a sequence does (`holds`), until its own completion; one that arrives writes through a
landing, which is closed before its blocks are given away.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from diptych.contract import telemetry
from diptych.contract.errors import DecodeLost, DiptychError, PrefillLost
from diptych.contract.request import Key
from diptych.contract.wire import Stage, WorkerInfo
from diptych.workers.blocks import BlockPool
from diptych.workers.cache import KVCache
from diptych.workers.sequence import Sequence
from diptych.workers.settings import WorkerSettings
from diptych.workers.transfer.landing import Landing, Landings
from diptych.workers.transfer.pair import transport_for
from diptych.workers.transfer.receiver import Arrived, Forsaken, PeerDown, PeerUp, Receiver, ReceiverEvent
from diptych.workers.transfer.sender import (
    LinkDown,
    LinkUp,
    SendClosed,
    SendFinish,
    SendLink,
    SendStats,
    SendTokens,
)

if TYPE_CHECKING:
    from diptych.workers.engine import Engine

log = logging.getLogger("diptych.handover")

RETRY_FIRST, RETRY_LAST = 0.5, 10.0  # seconds between two attempts to link to the same worker


Event = ReceiverEvent | LinkUp | LinkDown | SendClosed


class Handover:
    """All links of one engine. `receiver` exists at workers that decode, `send_links` at those that prefill."""

    def __init__(
        self,
        settings: WorkerSettings,
        me: str,
        epoch: str,
        secret: bytes,
        digest: str,
        pool: BlockPool,
        cache: KVCache,
        wake: Callable[[], None],
    ) -> None:
        self.settings, self.me, self.secret, self.digest = settings, me, secret, digest
        self.pool, self.cache, self._wake = pool, cache, wake
        self.holds: dict[Key, list[int]] = {}
        self._links: dict[str, SendLink] = {}
        self._up: set[str] = set()
        self._peers: dict[str, int] = {}
        self._retry: dict[str, tuple[float, float]] = {}  # decode worker → (pause after a failure, not before)
        self._carriers: dict[Key, str] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.landings = Landings()
        self.transport = transport_for(settings.device, settings.transport)
        self.receiver: Receiver | None = None
        if settings.role == "decode":
            self.receiver = Receiver(
                secret,
                epoch,
                digest,
                cache.layout,
                self.landings,
                settings.host,
                settings.device,
                self.transport,
                settings.limits,
                settings.message_bytes,
                self._post,
            )
            self.receiver.start()

    def _post(self, event: Event) -> None:
        self._events.put(event)
        self._wake()

    def links(self) -> tuple[str, ...]:
        """Ids of the workers to which, or from which, a link is ready."""
        return tuple(sorted(self._up | set(self._peers)))

    # ── prefill ────────────────────────────────────────────────────────────────────────────────────────────────────

    def reconcile(self, workers: Iterable[WorkerInfo]) -> None:
        """Makes links to decode workers that have none. A link whose worker left ends by itself, by its socket."""
        if self.settings.role != "prefill":
            return
        now = time.monotonic()
        wanted = [worker for worker in workers if worker.role == "decode" and worker.digest == self.digest]
        self._retry = {worker.id: self._retry[worker.id] for worker in wanted if worker.id in self._retry}
        for worker in wanted:
            pause, due = self._retry.get(worker.id, (RETRY_FIRST, 0.0))
            if worker.id not in self._links and now >= due:
                self._retry[worker.id] = (min(2 * pause, RETRY_LAST), now + pause)
                settings = self.settings
                link = SendLink(
                    worker,
                    self.me,
                    self.secret,
                    self.digest,
                    self.cache,
                    settings.host,
                    self.transport,
                    settings.limits,
                    settings.message_bytes,
                    self._post,
                    settings.send_delay_s,
                )
                self._links[worker.id] = link
                link.start()

    def send(self, seq: Sequence, upto: int) -> None:
        """Queues the tokens that decode lacks, up to `upto` computed ones. A missing link ends the request."""
        assert seq.decode is not None
        if upto <= seq.sent or not self._begin(seq):
            return
        self._links[seq.decode].queue(SendTokens(seq.key, tuple(seq.blocks), seq.sent, upto))
        seq.sent = upto

    def finish(self, seq: Sequence, first_token: int) -> None:
        """Queues what is left, then the end mark with the token that seeds decode."""
        assert seq.decode is not None
        if self._begin(seq):
            self.send(seq, seq.prompt_len)
            self._links[seq.decode].queue(SendFinish(seq.key, seq.prompt_len, first_token))

    def _begin(self, seq: Sequence) -> bool:
        """Makes the transfer a holder of the sequence's blocks; False when there is no link to carry it."""
        assert seq.decode is not None
        if seq.key in self.holds:
            return True
        if seq.decode not in self._up:
            error = DecodeLost(f"There is no link to decode worker {seq.decode} any more.")
            self._post(SendClosed(seq.key, error, SendStats()))
            return False
        self.pool.share(seq.blocks)
        self.holds[seq.key] = list(seq.blocks)
        self._carriers[seq.key] = seq.decode
        return True

    # ── decode ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, seq: Sequence) -> None:
        """Opens the sequence's granted blocks to its prefill worker's link."""
        assert seq.prefill is not None
        if seq.prefill not in self._peers:
            self._post(Forsaken(seq.key, PrefillLost(f"There is no link from prefill worker {seq.prefill}.")))
        self.landings.open(Landing(self.cache, seq.key, seq.prefill, seq.blocks, seq.held, seq.prompt_len))

    def revoke(self, seq: Sequence) -> bool:
        """Takes a reservation back unless anything has arrived for it."""
        return self.landings.close(seq.key, unless_begun=True)

    def cancel(self, seq: Sequence, error: DiptychError) -> None:
        """The sequence has ended: nothing is written to its blocks after this returns, and nothing more is sent. What
        is being read for a transfer stays held until that transfer has ended."""
        self.landings.close(seq.key)
        carrier = self._carriers.get(seq.key)
        if carrier is not None:
            self._links[carrier].cancel(seq.key, error.code, str(error))

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def events(self, engine: Engine) -> None:
        """Applies what link threads have reported."""
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            self._apply(event, engine)
            engine.report_due()

    def _apply(self, event: Event, engine: Engine) -> None:
        if isinstance(event, Arrived):
            landing = event.landing
            self.landings.close(landing.key)
            engine.arrived(landing.key, event.first_token, self._receive_stage(landing))
        elif isinstance(event, Forsaken):
            engine.forsake(event.key, event.error)
        elif isinstance(event, SendClosed):
            self._release(event.key)
            peer = self._carriers.pop(event.key, "")
            engine.handed(event.key, event.error, self._send_stage(event, peer))
        elif isinstance(event, LinkUp):
            self._up.add(event.peer)
            self._retry.pop(event.peer, None)
        elif isinstance(event, LinkDown):
            self._link_down(event, engine)
        elif isinstance(event, PeerUp):
            self._peers[event.peer] = self._peers.get(event.peer, 0) + 1
        else:
            self._peer_down(event, engine)

    def _release(self, key: Key) -> None:
        held = self.holds.pop(key, None)
        if held is not None:
            self.pool.release(held)

    def _link_down(self, event: LinkDown, engine: Engine) -> None:
        """The thread has ended, so it reads nothing any more: all that it still held is released."""
        log.warning("link to %s is down: %s", event.peer, event.error)
        self._up.discard(event.peer)
        self._links.pop(event.peer, None)
        for key in [key for key, peer in self._carriers.items() if peer == event.peer]:
            del self._carriers[key]
            self._release(key)
            engine.handed(key, event.error, None)
        engine.lose_decode(event.peer, event.error)

    def _peer_down(self, event: PeerDown, engine: Engine) -> None:
        log.warning("link from %s is down: %s", event.peer, event.error)
        left = self._peers.get(event.peer, 0) - 1
        if left > 0:
            self._peers[event.peer] = left
            return  # it has linked anew; what the old link owed ends with the sender's own word
        self._peers.pop(event.peer, None)
        for key in self.landings.from_sender(event.peer):
            engine.forsake(key, event.error)

    def _receive_stage(self, landing: Landing) -> Stage | None:
        if not landing.messages:
            return None
        attributes = {
            telemetry.BYTES: landing.bytes,
            telemetry.MESSAGES: landing.messages,
            telemetry.WIRE_NS: landing.wire_ns,
            telemetry.UNPACK_NS: landing.unpack_ns,
            telemetry.PEER: landing.sender,
            telemetry.TRANSPORT: self.transport,
        }
        return Stage(telemetry.TRANSFER_RECEIVE, landing.first_ns, landing.last_ns, attributes)

    def _send_stage(self, event: SendClosed, peer: str) -> Stage | None:
        stats = event.stats
        if not stats.messages:
            return None
        attributes = {
            telemetry.BYTES: stats.bytes,
            telemetry.MESSAGES: stats.messages,
            telemetry.PACK_NS: stats.pack_ns,
            telemetry.WAIT_NS: stats.wait_ns,
            telemetry.WIRE_NS: stats.wire_ns,
            telemetry.PEER: peer,
            telemetry.TRANSPORT: self.transport,
        }
        return Stage(telemetry.TRANSFER_SEND, stats.first_ns, stats.last_ns, attributes)
