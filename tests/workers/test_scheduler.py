"""The scheduler's policy alone, without a model: who waits, who makes room, who comes back first."""

from __future__ import annotations

from diptych.contract.request import Key, Request, Stopping
from diptych.workers.blocks import BlockPool, changes
from diptych.workers.scheduler import Scheduler, Step
from diptych.workers.sequence import Sequence, State

SIZE = 4


def make(blocks: int, max_batch: int = 8, budget: int = 64, revocable: bool = True) -> Scheduler:
    return Scheduler([BlockPool(blocks, SIZE)], max_batch, budget, lambda seq: revocable)


def lanes(count: int, blocks: int, max_batch: int = 8, budget: int = 64) -> Scheduler:
    return Scheduler([BlockPool(blocks, SIZE) for _ in range(count)], max_batch, budget)


def sequence(name: str, prompt: int, tokens: int, base: int = 0) -> Sequence:
    return Sequence(Request(Key(name), tuple(range(base, base + prompt)), Stopping(tokens)), "s", SIZE)


def commit(scheduler: Scheduler, step: Step) -> None:
    """What the engine does with a step's results, without a model: token 1 for each row that draws."""
    for row in step.rows:
        seq = row.seq
        seq.in_flight -= 1
        seq.pending -= row.sample
        if row.sample:
            seq.tokens.append(1)
        if row.sample and seq.generated >= seq.request.stopping.max_tokens:
            finish(scheduler, seq)


def finish(scheduler: Scheduler, seq: Sequence) -> None:
    scheduler.remove(seq)
    scheduler.lane(seq).pool.release(seq.blocks)
    seq.blocks = []


def arrive(scheduler: Scheduler, seq: Sequence) -> None:
    """Its KV came: as after a hand-over."""
    seq.computed = seq.target = seq.prompt_len
    seq.tokens.append(1)
    scheduler.admit(seq)


def test_who_made_room_comes_back_before_new_reservations() -> None:
    """A steady supply of small reservations would else take every block that a preempted sequence waits for."""
    scheduler = make(blocks=8, revocable=False)
    old, young = sequence("old", 8, 20), sequence("young", 8, 20, base=100)
    for seq in (old, young):
        scheduler.reserve(seq)
    for seq in list(scheduler.grants()):
        arrive(scheduler, seq)
    served = 0
    for turn in range(200):
        scheduler.reserve(sequence(f"small-{turn}", 3, 2, base=1000 + turn))
        for seq in list(scheduler.grants()):
            served += 1
            arrive(scheduler, seq)
        step = scheduler.schedule()
        if step is not None:
            commit(scheduler, step)
        if {old.state, young.state} == {State.ENDED}:
            break
    assert {old.state, young.state} == {State.ENDED}, f"starved while {served} newer ones were served"


def test_the_youngest_reservation_goes_before_a_running_sequence() -> None:
    scheduler = make(blocks=5)
    running, first, second = sequence("running", 4, 14), sequence("first", 3, 4, 50), sequence("second", 3, 4, 90)
    for seq in (running, first, second):
        scheduler.reserve(seq)
    granted = list(scheduler.grants())
    arrive(scheduler, running)
    assert granted[0] is running
    revoked: list[Sequence] = []
    while not revoked:
        step = scheduler.schedule()
        assert step is not None
        assert not step.preempted
        revoked += step.revoked
        commit(scheduler, step)
    assert revoked[0] is granted[-1], "the youngest"
    assert revoked[0].state in (State.WAITING, State.RUNNING), "it is prefilled here, as soon as there is room"
    assert running.state is State.RUNNING
    scheduler.lanes[0].pool.check_integrity([seq.blocks for seq in (running, first, second)])


def test_a_victim_with_a_step_in_flight_does_not_start_again_in_the_same_turn() -> None:
    """Its old row's commit would publish blocks of its new table that nothing has computed."""
    scheduler = make(blocks=8, budget=6)
    old, young = sequence("old", 8, 12), sequence("young", 15, 2, base=200)
    scheduler.enqueue(old)
    while old.prefilling:
        step = scheduler.schedule()
        assert step is not None
        commit(scheduler, step)
    scheduler.enqueue(young)
    first = scheduler.schedule()
    assert first is not None
    assert young in [row.seq for row in first.rows]
    assert young.in_flight == 1
    scheduler._make_room(scheduler.lanes[0], preempted := [], [])
    assert preempted == [young]
    second = scheduler.schedule()
    assert second is None or young not in [row.seq for row in second.rows]
    commit(scheduler, first)


def test_a_whole_prompt_in_the_cache_is_computed_in_a_block_of_its_own() -> None:
    """Case K1's shape at decode: the last block is never written where others read it."""
    scheduler = make(blocks=12)
    first = sequence("first", 8, 4)
    scheduler.reserve(first)
    list(scheduler.grants())
    first.publish(scheduler.lanes[0].pool.publish, 8)
    shared = list(first.blocks[:2])
    second = sequence("second", 8, 4)
    scheduler.reserve(second)
    assert list(scheduler.grants()) == [second]
    assert (second.held, second.blocks[:2]) == (8, shared)
    scheduler.localise(second)
    assert second.blocks[0] == shared[0]
    assert second.blocks[1] not in shared
    assert (second.computed, second.cached) == (4, 4)
    step = scheduler.schedule()
    assert step is not None
    assert [(row.start, row.count, row.sample) for row in step.rows if row.seq is second] == [(4, 4, True)]
    scheduler.lanes[0].pool.check_integrity([first.blocks, second.blocks])


def test_a_small_one_passes_a_large_one_a_bounded_number_of_times() -> None:
    scheduler = make(blocks=8)
    blocker, large = sequence("blocker", 12, 4), sequence("large", 24, 4, 100)
    scheduler.reserve(blocker)
    list(scheduler.grants())
    scheduler.reserve(large)
    passed = 0
    for n in range(10):
        small = sequence(f"small-{n}", 3, 2, 1000 + 10 * n)
        scheduler.reserve(small)
        for seq in list(scheduler.grants()):
            passed += 1
            finish(scheduler, seq)
    assert passed == 4
    finish(scheduler, blocker)
    assert next(iter(scheduler.grants())) is large


def test_new_sequences_go_where_least_is_to_be_computed() -> None:
    scheduler = lanes(2, blocks=64, budget=16)
    made = [sequence(name, prompt, 4, 1000 * n) for n, (name, prompt) in enumerate([("a", 40), ("b", 4), ("c", 4)])]
    for seq in made:
        scheduler.enqueue(seq)
    step = scheduler.schedule()
    assert step is not None
    assert [(row.seq, row.seq.data_rank, row.count) for row in step.rows] == [
        (made[0], 0, 16),
        (made[1], 1, 4),
        (made[2], 1, 4),
    ], "rows stand in the order of data ranks, and each has a budget of its own"


def test_a_prefix_is_looked_for_where_it_is_until_that_batch_is_too_long() -> None:
    scheduler = lanes(2, blocks=256)
    first = sequence("first", 9, 40)
    scheduler.reserve(first)
    list(scheduler.grants())
    arrive(scheduler, first)
    first.publish(scheduler.lane(first).pool.publish, 8)
    followed = []
    for n in range(4):
        other = sequence(f"other-{n}", 9, 40)
        scheduler.reserve(other)
        assert list(scheduler.grants()) == [other]
        followed.append((other.data_rank, other.held))
    assert followed == [(0, 8), (0, 8), (1, 0), (0, 8)]


def test_a_victim_of_one_data_rank_starts_again_at_another_with_room() -> None:
    """The pool that it left is full of those that stayed."""
    scheduler = lanes(2, blocks=8)
    old, young, third = sequence("old", 12, 16), sequence("young", 12, 16, 100), sequence("third", 28, 2, 200)
    scheduler.reserve(third)
    list(scheduler.grants())
    arrive(scheduler, third)
    for seq in (old, young):
        scheduler.reserve(seq)
        list(scheduler.grants())
        arrive(scheduler, seq)
    assert (third.data_rank, old.data_rank, young.data_rank) == (0, 1, 1)
    preempted: list[Sequence] = []
    while young.state is not State.ENDED:
        step = scheduler.schedule()
        assert step is not None
        preempted += step.preempted
        commit(scheduler, step)
        for lane in scheduler.lanes:
            lane.pool.check_integrity([seq.blocks for seq in lane.running])
    assert preempted == [young]
    assert (old.data_rank, young.data_rank) == (1, 0)


def test_what_one_data_rank_loses_and_another_holds_is_not_lost() -> None:
    pools = [BlockPool(4, SIZE), BlockPool(4, SIZE)]
    for pool in pools:
        taken = pool.allocate(1)
        assert taken is not None
        pool.publish(taken[0], b"both")
        pool.release(taken)
    assert changes(pools) == ((b"both",), ())
    pools[0].drop_cache()
    assert changes(pools) == ((b"both",), ())
    pools[1].drop_cache()
    assert changes(pools) == ((), (b"both",))
