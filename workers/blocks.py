"""The block pool: the only owner of block ids. Knows counts and digests; knows neither tensors, requests nor roles.

Every block is in exactly one of three states, held in `_state`, one byte a block:

    FREE    nobody holds it, it holds nothing
    CACHED  nobody holds it, it holds a published prefix block, found again by its digest; oldest evicted first
    HELD    `_refs[block]` ≥ 1 holders: sequences and transfers alike
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

FREE, CACHED, HELD = 0, 1, 2


def changes(pools: Sequence[BlockPool]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Digests (gained, lost) by any of the pools since the last call, netted out: none stands in both, and none is lost
    that one of them still holds."""
    touched = dict.fromkeys(digest for pool in pools for digest in pool.gained + pool.lost)
    for pool in pools:
        pool.gained.clear()
        pool.lost.clear()
    gained = tuple(digest for digest in touched if any(pool.holds(digest) for pool in pools))
    kept = set(gained)
    return gained, tuple(digest for digest in touched if digest not in kept)


class BlockPool:
    """Fixed-size blocks with reference counts and a prefix cache.

    Not thread-safe: the engine's main thread alone calls it. Nothing here blocks. `allocate` is all or nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._state = bytearray(num_blocks)
        self._refs = [0] * num_blocks
        self._cursor = 0
        self._lru: OrderedDict[int, None] = OrderedDict()  # CACHED blocks, oldest first
        self._by_digest: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._free = num_blocks
        self.gained: list[bytes] = []
        self.lost: list[bytes] = []

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give now: free ones and cached ones that nobody holds."""
        return self._free + len(self._lru)

    @property
    def cached(self) -> int:
        return len(self._lru)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int, after: int | None = None, room: int = 0) -> list[int] | None:
        """`count` blocks with one holder each, or None (and no change) when there are not enough.

        after: the block that precedes them in their sequence. room: how many blocks the sequence may come to hold.
        Both are hints that keep a sequence's blocks consecutive, which lets attention on a CPU read them without a
        copy: growth takes the next block if that is free, and a new sequence is placed in a gap as large as its room,
        past the one that was placed last.
        """
        if count > self.available:
            return None
        taken: list[int] = []
        if after is not None:
            while len(taken) < count and after + 1 < self.num_blocks and self._state[after + 1] == FREE:
                after += 1
                taken.append(self._take(after))
        missing = count - len(taken)
        if missing:
            taken += self._place(missing, max(room, missing))
        return taken

    def _place(self, count: int, room: int) -> list[int]:
        if self._free < count:
            self._evict(count - self._free)
        for want in (room, count):
            for origin in (self._cursor, 0):
                start = self._state.find(bytes(want), origin)
                if start >= 0:
                    self._cursor = start + want
                    return [self._take(block) for block in range(start, start + count)]
        taken: list[int] = []
        start = 0
        while len(taken) < count:
            start = self._state.index(FREE, start)
            taken.append(self._take(start))
        return taken

    def _take(self, block: int) -> int:
        self._state[block] = HELD
        self._refs[block] = 1
        self._free -= 1
        return block

    def _evict(self, count: int) -> None:
        for _ in range(count):
            block, _ = self._lru.popitem(last=False)
            self._forget(block)
            self._state[block] = FREE
            self._free += 1

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block)
        del self._by_digest[digest]
        self.lost.append(digest)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest cached prefix of the chain. They are not held yet: call `share` before anything
        else is allocated."""
        found: list[int] = []
        if self.prefix_cache:
            for digest in digests:
                block = self._by_digest.get(digest)
                if block is None:
                    break
                found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each block, which must be HELD or CACHED."""
        for block in blocks:
            if self._state[block] == CACHED:
                del self._lru[block]
                self._state[block] = HELD
            assert self._state[block] == HELD, f"block {block} is free and cannot be shared"
            self._refs[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a held, complete block findable. The first holder of a digest keeps it; a second copy stays private."""
        if not self.prefix_cache or digest in self._by_digest or block in self._digest_of:
            return
        assert self._state[block] == HELD
        self._by_digest[digest] = block
        self._digest_of[block] = digest
        self.gained.append(digest)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one holder of each. Later blocks of a chain become the older ones, so that eviction eats a chain from
        its end and never leaves a tail whose head is gone."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} was released once too often"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._digest_of:
                self._state[block] = CACHED
                self._lru[block] = None
            else:
                self._state[block] = FREE
                self._free += 1

    def drop_cache(self) -> int:
        """Evicts every cached block that nobody holds; returns how many. Held ones stay findable."""
        count = len(self._lru)
        self._evict(count)
        return count

    def holds(self, digest: bytes) -> bool:
        """Whether `match` would find it."""
        return digest in self._by_digest

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the counts equal those of the holders' block tables, given as all there are."""
        counts = Counter(block for table in holders for block in table)
        for block in range(self.num_blocks):
            refs, state = self._refs[block], self._state[block]
            assert refs == counts[block], f"block {block} has {refs} holders on record and {counts[block]} in truth"
            assert (state == HELD) == (refs > 0), f"block {block} is in state {state} with {refs} holders"
            assert (state == CACHED) == (block in self._lru)
        assert self._free == self._state.count(FREE)
        assert {block: digest for digest, block in self._by_digest.items()} == self._digest_of
        assert all(block in self._digest_of for block in self._lru)
