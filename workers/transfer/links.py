"""All links of one rank: those that it sends over at prefill, those that it receives over at decode.

Called by the rank's main thread only; link threads report through `post`, which any thread may call. Knows blocks as
numbers: who holds them and until when is decided by the group's first rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from diptych.contract.errors import DecodeLost, PrefillLost
from diptych.contract.request import Key
from diptych.contract.wire import WorkerInfo
from diptych.workers.cache import KVCache
from diptych.workers.parallel.layout import Grid
from diptych.workers.settings import WorkerSettings
from diptych.workers.transfer.events import (
    Event,
    Failure,
    Forsaken,
    LinkUp,
    PeerUp,
    SendClosed,
    Stats,
)
from diptych.workers.transfer.landing import Landing, Landings
from diptych.workers.transfer.pair import transport_for
from diptych.workers.transfer.plan import Route, routes
from diptych.workers.transfer.receiver import Receiver
from diptych.workers.transfer.sender import SendFinish, SendLink, SendTokens

RETRY_FIRST, RETRY_LAST = 0.5, 10.0  # seconds between two attempts at the same link


class Peer(NamedTuple):
    """One data rank of a decode worker."""

    id: str
    data_rank: int


def grid_of(worker: WorkerInfo) -> Grid:
    return Grid(worker.data, len(worker.links) // worker.data)


class Links:
    """`receiver` exists at workers that decode, sending links at those that prefill."""

    def __init__(
        self,
        settings: WorkerSettings,
        me: str,
        epoch: str,
        secret: bytes,
        digest: str,
        rank: int,
        kv_heads: int,
        cache: KVCache,
        post: Callable[[Event], None],
    ) -> None:
        """me: the worker's id. rank: in its group, of `settings.grid`. kv_heads: of the model. post: takes events;
        link threads call it."""
        self.settings, self.me, self.secret, self.digest = settings, me, secret, digest
        self.rank, self.kv_heads, self.cache, self.post = rank, kv_heads, cache, post
        self.grid = settings.grid
        _, self.place = self.grid.place(rank)
        self.landings = Landings()
        self.transport = transport_for(settings.device, settings.transport)
        self._sends: dict[tuple[str, int], SendLink] = {}
        self._retry: dict[tuple[str, int], tuple[float, float]] = {}  # link → (pause after a failure, not before)
        self._targets: dict[str, Grid] = {}  # the ranks of a decode worker
        self._sources: dict[str, Grid] = {}  # and of a prefill worker
        self.receiver: Receiver | None = None
        if settings.role == "decode":
            self.receiver = Receiver(
                secret,
                epoch,
                digest,
                rank,
                self.grid,
                kv_heads,
                cache.layout,
                self.landings,
                settings.host,
                settings.device,
                self.transport,
                settings.limits,
                settings.message_bytes,
                self._report,
            )
            self.receiver.start()

    @property
    def address(self) -> str:
        return self.receiver.address if self.receiver else ""

    def _report(self, event: Event) -> None:
        if isinstance(event, PeerUp):
            self._sources[event.peer] = event.sources
        elif isinstance(event, LinkUp):
            self._retry.pop((event.peer, event.target), None)
        self.post(event)

    # ── prefill ────────────────────────────────────────────────────────────────────────────────────────────────────

    def reconcile(self, workers: Iterable[WorkerInfo]) -> None:
        """Makes links to decode workers that have none. A link whose worker left ends by itself, by its socket."""
        if self.settings.role != "prefill":
            return
        for key in [key for key, link in self._sends.items() if not link.is_alive()]:
            del self._sends[key]
        now = time.monotonic()
        wanted = [worker for worker in workers if worker.role == "decode" and worker.digest == self.digest]
        self._targets = {worker.id: grid_of(worker) for worker in wanted} | self._linked()
        self._retry = {key: due for key, due in self._retry.items() if key[0] in self._targets}
        for worker in wanted:
            for target, route in self._routes(worker.id):
                key = (worker.id, target)
                pause, due = self._retry.get(key, (RETRY_FIRST, 0.0))
                if key not in self._sends and now >= due:
                    self._retry[key] = (min(2 * pause, RETRY_LAST), now + pause)
                    self._connect(worker, target, route)

    def _linked(self) -> dict[str, Grid]:
        """Workers that links live to, though the table may have dropped them."""
        return {peer: self._targets[peer] for peer, _ in self._sends}

    def _routes(self, peer: str, data_rank: int | None = None) -> Iterator[tuple[int, Route]]:
        """From this rank to a decode worker's, by their number in its group: all of them, or one data rank's."""
        grid = self._targets.get(peer, Grid())
        found = routes(self.kv_heads, self.grid.tensor, grid.tensor)
        own = [route for route in found if route.source == self.place]
        for target in range(grid.data) if data_rank is None else [data_rank]:
            for route in own:
                yield grid.members(target)[route.target], route

    def _connect(self, worker: WorkerInfo, target: int, route: Route) -> None:
        settings = self.settings
        link = SendLink(
            worker,
            self.me,
            self.secret,
            self.digest,
            self.cache,
            route,
            (self.rank, target),
            (self.grid, grid_of(worker)),
            worker.links[target],
            settings.host,
            self.transport,
            settings.limits,
            settings.message_bytes,
            self._report,
            settings.send_delay_s,
        )
        self._sends[worker.id, target] = link
        link.start()

    def send(self, to: Peer, key: Key, blocks: Sequence[int], first: int, end: int) -> None:
        """Queues tokens [first, end) on each of this rank's links to the worker's data rank. Where one is missing the
        key is closed."""
        self._queue(to, key, SendTokens(key, tuple(blocks), first, end))

    def finish(self, to: Peer, key: Key, total: int, first_token: int) -> None:
        """Queues the end mark with the token that seeds decode."""
        self._queue(to, key, SendFinish(key, total, first_token))

    def _queue(self, to: Peer, key: Key, job: SendTokens | SendFinish) -> None:
        for target, _ in self._routes(*to):
            link = self._sends.get((to.id, target))
            if link is not None:
                link.queue(job)
            else:
                failure = Failure.of(DecodeLost(f"There is no link to decode worker {to.id} any more."))
                self.post(SendClosed(key, self.rank, target, failure, Stats()))

    def abandon(self, to: Peer, key: Key, code: str, message: str) -> None:
        """What is queued for the key is skipped; `SendClosed` follows on every link that knows it."""
        for target, _ in self._routes(*to):
            link = self._sends.get((to.id, target))
            if link is not None:
                link.cancel(key, code, message)

    # ── decode ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, key: Key, sender: str, blocks: list[int], held: int, total: int) -> None:
        """Opens a sequence's granted blocks to its prefill worker's links."""
        if sender not in self._sources:
            self.landings.close(key)
            self.post(Forsaken(key, Failure.of(PrefillLost(f"There is no link from prefill worker {sender}."))))
            return
        found = routes(self.kv_heads, self._sources[sender].tensor, self.grid.tensor)
        own = [route for route in found if route.target == self.place]
        self.landings.open(Landing(self.cache, key, sender, own, blocks, held, total))

    def close(self, key: Key, unless_begun: bool = False) -> bool:
        """Nothing is written to the key's blocks after this returned True."""
        return self.landings.close(key, unless_begun)
