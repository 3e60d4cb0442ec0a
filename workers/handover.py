"""The engine's side of transfers: which workers are linked, who holds which blocks for a transfer, what was reported.

Called by the engine's main thread only. Links report events into a queue that `events` empties: this rank's own, and
those of the group's other ranks. What concerns a sequence is told to the links of all ranks that share its data rank. A
transfer that leaves holds its blocks like a sequence does until every link that carries it has ended it; one that
arrives is admitted when it is complete at every one of those ranks, and its landing is closed before its blocks are
given away.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from diptych.contract import telemetry
from diptych.contract.errors import DecodeLost, DiptychError
from diptych.contract.request import Key
from diptych.contract.wire import Stage, WorkerInfo
from diptych.workers.blocks import BlockPool
from diptych.workers.parallel.layout import Grid
from diptych.workers.parallel.lead import Followers
from diptych.workers.parallel.orders import (
    AbandonOrder,
    CloseOrder,
    ExpectOrder,
    FinishOrder,
    PeersOrder,
    SendOrder,
)
from diptych.workers.sequence import Sequence
from diptych.workers.settings import WorkerSettings
from diptych.workers.transfer.events import (
    Arrived,
    Begun,
    Event,
    Failure,
    Forsaken,
    LinkDown,
    LinkUp,
    PeerDown,
    PeerUp,
    SendClosed,
    Stats,
)
from diptych.workers.transfer.links import Links, Peer, grid_of
from diptych.workers.transfer.plan import links, links_between

if TYPE_CHECKING:
    from diptych.workers.engine import Engine

log = logging.getLogger("diptych.handover")

Pair = tuple[int, int]
"""A link's ranks: (source at prefill, target at decode)."""


@dataclass
class _Leaving:
    """A transfer that leaves, from our data rank `data_rank`. open: links that have not ended it. error: the first that
    one of them met."""

    peer: Peer
    data_rank: int
    open: set[Pair]
    blocks: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    error: DiptychError | None = None


@dataclass
class _Coming:
    """A reserved sequence, at our data rank `data_rank`. open: ranks of ours where it is not complete. begun: some of
    it has come."""

    sender: str
    data_rank: int
    open: set[int]
    begun: bool = False
    stats: Stats = field(default_factory=Stats)


@dataclass
class _Linked:
    """A linked worker, and its ranks. all: the links that there must be; up: those that are ready."""

    grid: Grid = field(default_factory=Grid)
    all: set[Pair] = field(default_factory=set)
    up: Counter[Pair] = field(default_factory=Counter)  # a new link may be there before the old one's end is known

    @property
    def ready(self) -> bool:
        return bool(self.all) and all(self.up[pair] > 0 for pair in self.all)


class Handover:
    """All transfers of one worker group."""

    def __init__(
        self,
        settings: WorkerSettings,
        kv_heads: int,
        pools: Seq[BlockPool],
        followers: Followers,
        wake: Callable[[], None],
        own: Callable[[Callable[[Event], None]], Links],
    ) -> None:
        """kv_heads: of the model. own: makes this rank's links, given where they report."""
        self.settings, self.kv_heads, self.pools, self._wake = settings, kv_heads, tuple(pools), wake
        self.grid = settings.grid
        self.followers = followers
        self._leaving: dict[Key, _Leaving] = {}
        self._coming: dict[Key, _Coming] = {}
        self._peers: dict[str, _Linked] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._links = own(self.post)
        self.address, self.transport = self._links.address, self._links.transport

    def post(self, event: Event) -> None:
        """Takes a link's report; any thread may call it."""
        self._events.put(event)
        self._wake()

    def links(self) -> tuple[str, ...]:
        """Ids of the workers to which, or from which, every link is ready."""
        return tuple(sorted(id for id, peer in self._peers.items() if peer.ready))

    def held(self, data_rank: int) -> list[list[int]]:
        """Blocks of a data rank that transfers hold."""
        return [leaving.blocks for leaving in self._leaving.values() if leaving.data_rank == data_rank]

    def _tell(self, data_rank: int, order: msgspec.Struct) -> Links | None:
        """Orders the ranks that share a data rank; what this rank must do itself where it is one of them."""
        self.followers.order(order, data_rank)
        return self._links if data_rank == 0 else None

    # ── prefill ────────────────────────────────────────────────────────────────────────────────────────────────────

    def reconcile(self, workers: Iterable[WorkerInfo]) -> None:
        """Makes links to decode workers that have none."""
        if self.settings.role != "prefill":
            return
        workers = tuple(workers)
        for worker in workers:
            if worker.role == "decode":
                peer = self._peer(worker.id)
                peer.grid = grid_of(worker)
                peer.all = set(links(self.kv_heads, self.grid, peer.grid))
        self.followers.order(PeersOrder(workers))
        self._links.reconcile(workers)

    def _peer(self, id: str) -> _Linked:
        return self._peers.setdefault(id, _Linked())

    def send(self, seq: Sequence, upto: int) -> None:
        """Queues the tokens that decode lacks, up to `upto` computed ones. A missing link ends the request."""
        if upto <= seq.sent or (leaving := self._begin(seq)) is None:
            return
        blocks, first = tuple(seq.blocks), seq.sent
        own = self._tell(seq.data_rank, SendOrder(leaving.peer, seq.key, blocks, first, upto, self.followers.ahead))
        if own is not None:
            own.send(leaving.peer, seq.key, blocks, first, upto)
        seq.sent = upto

    def finish(self, seq: Sequence, first_token: int) -> None:
        """Queues what is left, then the end mark with the token that seeds decode."""
        leaving = self._begin(seq)
        if leaving is not None:
            self.send(seq, seq.prompt_len)
            own = self._tell(seq.data_rank, FinishOrder(leaving.peer, seq.key, seq.prompt_len, first_token))
            if own is not None:
                own.finish(leaving.peer, seq.key, seq.prompt_len, first_token)

    def _begin(self, seq: Sequence) -> _Leaving | None:
        """The sequence's transfer, which is made a holder of its blocks; None when there is no link to carry it."""
        if seq.key in self._leaving:
            return self._leaving[seq.key]
        assert seq.decode is not None
        linked, peer = self._peer(seq.decode), Peer(seq.decode, seq.decode_rank)
        if not linked.ready or peer.data_rank >= linked.grid.data:
            # The end is applied with the events, as any other, and not in the middle of a commit.
            self._leaving[seq.key] = _Leaving(peer, seq.data_rank, {(-1, -1)})
            error = DecodeLost(f"There is no link to decode worker {seq.decode} any more.")
            self.post(SendClosed(seq.key, -1, -1, Failure.of(error), Stats()))
            return None
        self.pools[seq.data_rank].share(seq.blocks)
        pairs = set(links_between(self.kv_heads, self.grid, linked.grid, seq.data_rank, peer.data_rank))
        leaving = self._leaving[seq.key] = _Leaving(peer, seq.data_rank, pairs, list(seq.blocks))
        return leaving

    # ── decode ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, seq: Sequence) -> None:
        """Opens the sequence's granted blocks to its prefill worker's links, at every rank that shares them."""
        assert seq.prefill is not None
        self._coming[seq.key] = _Coming(seq.prefill, seq.data_rank, set(self.grid.members(seq.data_rank)))
        order = ExpectOrder(seq.key, seq.prefill, tuple(seq.blocks), seq.held, seq.prompt_len)
        own = self._tell(seq.data_rank, order)
        if own is not None:
            own.expect(seq.key, seq.prefill, seq.blocks, seq.held, seq.prompt_len)

    def revoke(self, seq: Sequence) -> bool:
        """Takes a reservation back unless anything is known to have arrived for it. A rank that has got something
        meanwhile closes its landing before it carries out any order that uses the blocks again."""
        coming = self._coming.get(seq.key)
        if coming is not None and coming.begun:
            return False
        if not self._links.close(seq.key, unless_begun=True):
            return False
        self._forget(seq.key)
        return True

    def cancel(self, seq: Sequence, error: DiptychError) -> None:
        """The sequence has ended: nothing is written to its blocks after this returns, and nothing more is sent. What
        is being read for a transfer stays held until that transfer has ended."""
        self._links.close(seq.key)
        self._forget(seq.key)
        leaving = self._leaving.get(seq.key)
        if leaving is not None:
            own = self._tell(leaving.data_rank, AbandonOrder(leaving.peer, seq.key, error.code, str(error)))
            if own is not None:
                own.abandon(leaving.peer, seq.key, error.code, str(error))

    def _forget(self, key: Key) -> None:
        coming = self._coming.pop(key, None)
        if coming is not None:
            self._tell(coming.data_rank, CloseOrder(key))

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def events(self, engine: Engine) -> None:
        """Applies what links have reported."""
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            self._apply(event, engine)
            engine.report_due()

    def _apply(self, event: Event, engine: Engine) -> None:
        if isinstance(event, Arrived):
            self._arrived(event, engine)
        elif isinstance(event, Begun):
            if event.key in self._coming:
                self._coming[event.key].begun = True
        elif isinstance(event, Forsaken):
            engine.forsake(event.key, event.failure.error)
        elif isinstance(event, SendClosed):
            error = event.failure.error if event.failure else None
            self._closed(event.key, (event.source, event.target), error, event.stats, engine)
        elif isinstance(event, LinkUp):
            self._peer(event.peer).up[event.source, event.target] += 1
        elif isinstance(event, LinkDown):
            self._link_down(event, engine)
        elif isinstance(event, PeerUp):
            peer = self._peer(event.peer)
            peer.grid = event.sources
            peer.all = set(links(self.kv_heads, event.sources, self.grid))
            peer.up[event.source, event.target] += 1
        else:
            self._peer_down(event, engine)

    def _arrived(self, event: Arrived, engine: Engine) -> None:
        coming = self._coming.get(event.key)
        if coming is None:
            return  # it ended meanwhile
        coming.open.discard(event.target)
        coming.stats.join(event.stats)
        if not coming.open:
            self._links.close(event.key)
            self._forget(event.key)
            engine.arrived(event.key, event.first_token, self._receive_stage(coming))

    def _closed(self, key: Key, pair: Pair, error: DiptychError | None, stats: Stats, engine: Engine) -> None:
        """A link has ended a transfer. The first error ends the request, which lets the other links end theirs."""
        leaving = self._leaving.get(key)
        if leaving is None or pair not in leaving.open:
            return
        leaving.open.discard(pair)
        leaving.stats.join(stats)
        failed = leaving.error is not None
        leaving.error = leaving.error or error
        if not leaving.open:
            del self._leaving[key]
            self.pools[leaving.data_rank].release(leaving.blocks)
        if not failed and (leaving.error is not None or not leaving.open):
            engine.handed(key, leaving.error, self._send_stage(leaving))

    def _link_down(self, event: LinkDown, engine: Engine) -> None:
        """The thread has ended, so it reads nothing any more: all that it still held is released."""
        error = event.failure.error
        log.warning("link to %s is down: %s", event.peer, error)
        self._lose(event.peer, (event.source, event.target))
        for key in [key for key, leaving in self._leaving.items() if leaving.peer.id == event.peer]:
            self._closed(key, (event.source, event.target), error, Stats(), engine)
        engine.lose_decode(event.peer, error)

    def _peer_down(self, event: PeerDown, engine: Engine) -> None:
        error = event.failure.error
        log.warning("link from %s is down: %s", event.peer, error)
        if self._lose(event.peer, (event.source, event.target)):
            return  # it has linked anew; what the old link owed ends with the sender's own word
        data_rank, _ = self.grid.place(event.target)
        mine = ((key, coming) for key, coming in self._coming.items() if coming.data_rank == data_rank)
        for key in [key for key, coming in mine if coming.sender == event.peer]:
            engine.forsake(key, error)

    def _lose(self, id: str, pair: Pair) -> bool:
        """Whether another link of the same ranks is up."""
        peer = self._peer(id)
        peer.up[pair] = max(0, peer.up[pair] - 1)
        if not any(peer.up.values()):
            del self._peers[id]
        return peer.up[pair] > 0

    def _receive_stage(self, coming: _Coming) -> Stage | None:
        stats = coming.stats
        if not stats.messages:
            return None
        attributes: dict[str, int | str] = {telemetry.UNPACK_NS: stats.copy_ns, telemetry.PEER: coming.sender}
        return self._stage(telemetry.TRANSFER_RECEIVE, stats, attributes)

    def _send_stage(self, leaving: _Leaving) -> Stage | None:
        stats = leaving.stats
        if not stats.messages:
            return None
        attributes: dict[str, int | str] = {
            telemetry.PACK_NS: stats.copy_ns,
            telemetry.WAIT_NS: stats.wait_ns,
            telemetry.PEER: leaving.peer.id,
        }
        return self._stage(telemetry.TRANSFER_SEND, stats, attributes)

    def _stage(self, name: str, stats: Stats, attributes: dict[str, int | str]) -> Stage:
        shared: dict[str, int | str] = {
            telemetry.BYTES: stats.bytes,
            telemetry.MESSAGES: stats.messages,
            telemetry.WIRE_NS: stats.wire_ns,
            telemetry.TRANSPORT: self.transport,
        }
        return Stage(name, stats.first_ns, stats.last_ns, shared | attributes)
