"""Where KV may be written: one landing for each request whose blocks a decode engine has granted.

The engine's main thread opens and closes landings; link threads write through them. A landing is written and closed
under its own lock: once `close` has returned, nobody writes to its blocks again and they may be given away at once. A
late piece of a closed landing is read off the wire into the link's staging and dropped there.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Condition, Lock
from time import monotonic_ns

import torch

from diptych.contract.errors import Cancelled, TransferCorrupt
from diptych.contract.request import Key
from diptych.kernels.pack import unpack_tokens
from diptych.workers.cache import KVCache
from diptych.workers.transfer.events import Stats
from diptych.workers.transfer.plan import Route

REMEMBERED = 4096  # closed keys: what still comes for one of them is not waited with


class _Part:
    """What one link brings: tokens [received, total) of its route's heads are still due, in order."""

    def __init__(self, route: Route, held: int) -> None:
        self.route = route
        self.received = held
        self.messages = 0
        self.finished = False


class Landing:
    """The blocks of one reserved sequence at this rank: tokens [held, total) are due from each route that ends here.
    All come from one data rank of the sender, the first that brings something.

    Links are named as (data rank, rank within it) of their source."""

    def __init__(
        self, cache: KVCache, key: Key, sender: str, routes: Iterable[Route], blocks: list[int], held: int, total: int
    ) -> None:
        self.cache = cache
        self.key = key
        self.sender = sender
        self.total = total
        self.stats = Stats()
        self._from: int | None = None
        self._parts = {route.source: _Part(route, held) for route in routes}
        self._blocks = list(blocks)
        self._lock = Lock()
        self._open = True

    @property
    def begun(self) -> bool:
        return self.stats.messages > 0

    def write(self, slab: torch.Tensor, source: tuple[int, int], first: int, count: int, wire: tuple[int, int]) -> bool:
        """Copies one checked piece into its blocks; False when the landing is closed. wire: (start, end) in ns."""
        with self._lock:
            if not self._open:
                return False
            part = self._part(source)
            if first != part.received or first + count > self.total:
                raise TransferCorrupt(
                    f"Tokens {first} to {first + count} came where token {part.received} of {self.total} was due."
                )
            start, stats, route = monotonic_ns(), self.stats, part.route
            pages = self.cache.pages[..., route.to_head : route.to_head + route.heads, :]
            unpack_tokens(slab, pages, self._blocks, first, count)
            if slab.is_cuda:  # launched is not written: the blocks may be given away as soon as the lock is free
                torch.cuda.current_stream(slab.device).synchronize()
            part.received += count
            part.messages += 1
            stats.bytes += slab.numel() * slab.element_size()
            stats.messages += 1
            stats.first_ns = stats.first_ns or wire[0]
            stats.last_ns = monotonic_ns()
            stats.wire(*wire)
            stats.copy_ns += stats.last_ns - start
            return True

    def _part(self, source: tuple[int, int]) -> _Part:
        data_rank, rank = source
        if self._from is None:
            self._from = data_rank
        if data_rank != self._from:
            raise TransferCorrupt(f"KV came from data rank {data_rank} where the first came from {self._from}.")
        return self._parts[rank]

    def finish(self, source: tuple[int, int], total: int, messages: int) -> bool:
        """A link has brought all of its part; True when it was the last one, and the landing is closed then. Raises
        `TransferCorrupt` when it was not all, `Cancelled` when nobody waits for it any more."""
        with self._lock:
            if not self._open:
                raise Cancelled("Decode no longer waits for this request.")
            part = self._part(source)
            due, got = (self.total, self.total, part.messages), (part.received, total, messages)
            if due != got:
                raise TransferCorrupt(f"Decode holds (tokens, of, messages) {got} where {due} were due.")
            part.finished = True
            done = all(part.finished for part in self._parts.values())
            self._open = not done
            return done

    def close(self, unless_begun: bool = False) -> bool:
        """No write happens after this returned True. With `unless_begun` a landing that has received anything stays
        open, and False is returned."""
        with self._lock:
            if unless_begun and self.begun:
                return False
            self._open = False
            return True


class Landings:
    """All open landings of an engine, by key. Thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._by_key: dict[Key, Landing] = {}
        self._closed: dict[Key, None] = {}  # the last ones, oldest first

    def open(self, landing: Landing) -> None:
        with self._changed:
            self._by_key[landing.key] = landing
            self._closed.pop(landing.key, None)
            self._changed.notify_all()

    def find(self, key: Key, limit: float = 0.0) -> Landing | None:
        """limit: seconds to wait for one that was neither opened nor closed yet."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._by_key or key in self._closed, limit)
            return self._by_key.get(key)

    def close(self, key: Key, unless_begun: bool = False) -> bool:
        """Closes and forgets it; True as well when there is none."""
        landing = self.find(key)
        if landing is not None and not landing.close(unless_begun):
            return False
        with self._changed:
            self._by_key.pop(key, None)
            self._closed[key] = None
            if len(self._closed) > REMEMBERED:
                del self._closed[next(iter(self._closed))]
            self._changed.notify_all()
        return True
