"""The block pool as a state machine: whatever holders do, the books agree with them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from diptych.contract.prefix import block_digests
from diptych.workers.blocks import BlockPool

BLOCKS, SIZE = 24, 4


class PoolMachine(RuleBasedStateMachine):
    """Holders are block tables; prompts are drawn from few tokens so that prefixes are shared often."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.held: list[list[int]] = []

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40), room=st.integers(0, 12))
    def start(self, tokens: list[int], room: int) -> object:
        digests = block_digests(tokens, SIZE)
        found = self.pool.match(digests)
        self.pool.share(found)
        before = self.pool.available
        wanted = self.pool.blocks_for(len(tokens)) - len(found)
        fresh = self.pool.allocate(wanted, found[-1] if found else None, room)
        assert (fresh is None) == (wanted > before)
        if fresh is None:
            self.pool.release(found)
            return multiple()
        assert len(fresh) == len(set(fresh)) == wanted
        table = found + fresh
        for index, digest in enumerate(digests):
            self.pool.publish(table[index], digest)
        self.held.append(table)
        return table

    @rule(table=tables)
    def grow(self, table: list[int]) -> None:
        if any(table is held for held in self.held):
            fresh = self.pool.allocate(1, table[-1])
            if fresh is not None:
                table += fresh

    @rule(target=tables, table=tables)
    def share(self, table: list[int]) -> object:
        if not any(table is held for held in self.held):
            return multiple()
        self.pool.share(table)
        copy = list(table)
        self.held.append(copy)
        return copy

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        if any(table is held for held in self.held):
            self.held = [held for held in self.held if held is not table]
            self.pool.release(table)

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        assert self.pool.cached == 0

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity(self.held)
        used = {block for table in self.held for block in table}
        assert self.pool.available == BLOCKS - len(used)

    @invariant()
    def all_come_back(self) -> None:
        if not self.held:
            assert self.pool.available == BLOCKS


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_sequence_that_grows_beside_others_stays_consecutive() -> None:
    pool = BlockPool(64, SIZE)
    first, second = pool.allocate(2, room=10), pool.allocate(2, room=10)
    assert first is not None
    assert second is not None
    for _ in range(8):
        for table in (first, second):
            fresh = pool.allocate(1, table[-1])
            assert fresh is not None
            table += fresh
    assert first == list(range(first[0], first[0] + 10))
    assert second == list(range(second[0], second[0] + 10))


def test_a_salt_keeps_tenants_apart() -> None:
    tokens = list(range(12))
    assert block_digests(tokens, SIZE) == block_digests(tokens[:11] + [11], SIZE)
    assert not set(block_digests(tokens, SIZE, "a")) & set(block_digests(tokens, SIZE, "b"))


def test_eviction_takes_the_end_of_the_oldest_chain_first() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(16))
    table = pool.allocate(4)
    assert table is not None
    for block, digest in zip(table, block_digests(tokens, SIZE), strict=True):
        pool.publish(block, digest)
    pool.release(table)
    fresh = pool.allocate(1)
    assert fresh == [table[3]]
    assert pool.match(block_digests(tokens, SIZE)) == table[:3]


def test_releasing_twice_is_a_bug_that_shows() -> None:
    pool = BlockPool(4, SIZE)
    table = pool.allocate(2)
    assert table is not None
    pool.release(table)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(table)
