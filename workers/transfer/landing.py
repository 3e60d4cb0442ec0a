"""Where KV may be written: one landing for each request whose blocks a decode engine has granted.

The engine's main thread opens and closes landings; link threads write through them. A landing is written and closed
under its own lock: once `close` has returned, nobody writes to its blocks again and they may be given away at once. A
late piece of a closed landing is read off the wire into the link's staging and dropped there.
"""

from __future__ import annotations

from threading import Lock
from time import monotonic_ns

import torch

from diptych.contract.errors import TransferCorrupt
from diptych.contract.request import Key
from diptych.kernels.pack import unpack_tokens
from diptych.workers.cache import KVCache


class Landing:
    """The blocks of one reserved sequence: tokens [held, total) are due, in order."""

    def __init__(self, cache: KVCache, key: Key, sender: str, blocks: list[int], held: int, total: int) -> None:
        self.cache = cache
        self.key = key
        self.sender = sender
        self.total = total
        self.held = held
        self.received = held
        self.bytes = 0
        self.messages = 0
        self.wire_ns = 0
        self.unpack_ns = 0
        self.first_ns = 0
        self.last_ns = 0
        self._busy_until = 0
        self._blocks = list(blocks)
        self._lock = Lock()
        self._open = True

    @property
    def begun(self) -> bool:
        return self.messages > 0

    def write(self, slab: torch.Tensor, first: int, count: int, wire: tuple[int, int]) -> bool:
        """Copies one checked piece into its blocks; False when the landing is closed. wire: (start, end) in ns."""
        with self._lock:
            if not self._open:
                return False
            if first != self.received or first + count > self.total:
                raise TransferCorrupt(
                    f"Tokens {first} to {first + count} came where token {self.received} of {self.total} was due."
                )
            start = monotonic_ns()
            unpack_tokens(slab, self.cache.pages, self._blocks, first, count)
            if slab.is_cuda:  # launched is not written: the blocks may be given away as soon as the lock is free
                torch.cuda.current_stream(slab.device).synchronize()
            self.received += count
            self.bytes += slab.numel() * slab.element_size()
            self.messages += 1
            self.first_ns = self.first_ns or wire[0]
            self.last_ns = monotonic_ns()
            # Payloads may overlap on the wire: the union of their intervals, so that bytes over it is a true rate.
            self.wire_ns += max(0, wire[1] - max(wire[0], self._busy_until))
            self._busy_until = max(self._busy_until, wire[1])
            self.unpack_ns += self.last_ns - start
            return True

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
        self._lock = Lock()
        self._by_key: dict[Key, Landing] = {}

    def open(self, landing: Landing) -> None:
        with self._lock:
            self._by_key[landing.key] = landing

    def find(self, key: Key) -> Landing | None:
        with self._lock:
            return self._by_key.get(key)

    def close(self, key: Key, unless_begun: bool = False) -> bool:
        """Closes and forgets it; True as well when there is none."""
        landing = self.find(key)
        if landing is None:
            return True
        if not landing.close(unless_begun):
            return False
        with self._lock:
            self._by_key.pop(key, None)
        return True

    def from_sender(self, sender: str) -> list[Key]:
        with self._lock:
            return [key for key, landing in self._by_key.items() if landing.sender == sender]
