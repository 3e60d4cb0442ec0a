"""The supervisor's rules, over incarnations that live in this process: when to replace, when to give up, never two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from diptych.cluster.config import Group, validate
from diptych.cluster.supervisor import Supervisor
from diptych.contract.errors import CapacityExceeded, Internal, ModelUnsupported
from diptych.contract.limits import Limits
from diptych.contract.wire import WorkerInfo
from diptych.workers.channel import Loading
from tests.cluster.test_registry import info


class Life:
    """An incarnation that starts as its world says and ends when told."""

    def __init__(self, world: World, name: str, epoch: str) -> None:
        self.world, self.name, self.epoch = world, name, epoch
        self.loaded = Loading()
        self.ended = asyncio.Event()

    async def start(self) -> WorkerInfo:
        await self.world.start(self)
        return info(f"{self.name}-{self.epoch}")

    async def wait(self) -> str:
        await self.ended.wait()
        return "The engine ended."

    async def stop(self, drain: bool) -> None:
        if self.world.no_end:
            self.world.no_end -= 1
            raise OSError("Interrupted system call")
        self.world.living.discard(self)
        self.ended.set()


class World:
    """Makes lives, and holds that no two of one group live at once."""

    def __init__(self) -> None:
        self.living: set[Life] = set()
        self.lives: list[Life] = []
        self.registered: set[str] = set()
        self.error: Exception | None = None
        self.no_fork = 0
        self.no_end = 0
        self.no_place = 0
        self.hang = False

    async def launch(self, group: Group, epoch: str) -> Life:
        if self.no_place:
            self.no_place -= 1
            raise CapacityExceeded("No node could give it its CPU 1.")
        if self.no_fork:
            self.no_fork -= 1
            raise OSError("Cannot allocate memory")
        life = Life(self, group.name, epoch)
        assert group.name not in {other.name for other in self.living}
        self.living.add(life)
        self.lives.append(life)
        return life

    async def start(self, life: Life) -> None:
        if self.hang:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error

    def of(self, name: str) -> Life:
        return next(life for life in self.living if life.name == name)


@asynccontextmanager
async def supervised(world: World, limits: Limits | None = None) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(
        validate({"model": "m"}).groups(),
        world.launch,
        limits or Limits(),
        lambda worker: world.registered.add(worker.id),
        lambda worker: world.registered.discard(worker.id),
    )
    supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop(drain=False)
    assert world.living == set()
    assert world.registered == set()
    assert {state.state for state in supervisor.states()} == {"stopped"}


async def until(good: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not good():
            await asyncio.sleep(0.01)


async def test_a_group_that_ends_is_replaced_under_a_new_epoch() -> None:
    world = World()
    async with supervised(world) as supervisor:
        await until(supervisor.ready)
        before, other = world.of("decode-0"), world.of("prefill-0")
        before.ended.set()
        await until(lambda: before not in world.living and supervisor.ready())
        assert world.of("decode-0").epoch != before.epoch
        assert world.of("prefill-0") is other
        assert [state.starts for state in supervisor.states()] == [1, 2]
        assert len(world.registered) == 2


async def test_what_fails_before_it_was_ever_ready_is_not_tried_again() -> None:
    world = World()
    world.error = ModelUnsupported("hidden_act 'mish' is not supported.")
    async with supervised(world) as supervisor:
        await until(lambda: supervisor.failure() is not None)
        failure = supervisor.failure()
        assert isinstance(failure, ModelUnsupported)
        assert "prefill-0: hidden_act 'mish'" in str(failure)
        await until(lambda: {state.state for state in supervisor.states()} == {"failed"})
        assert len(world.lives) == 2


async def test_what_was_ready_once_is_tried_until_it_is_ready_again() -> None:
    world = World()
    async with supervised(world) as supervisor:
        await until(supervisor.ready)
        world.no_place = 1
        world.of("decode-0").ended.set()
        await until(lambda: supervisor.states()[1].starts == 2)
        assert "No node" in supervisor.states()[1].message
        assert supervisor.failure() is None
        await until(supervisor.ready)
        assert supervisor.states()[1].starts == 3


async def test_a_fork_that_fails_is_a_failed_start() -> None:
    """At first it is the service's failure; later it is tried again."""
    world = World()
    world.no_fork = 2
    async with supervised(world) as supervisor:
        await until(lambda: {state.state for state in supervisor.states()} == {"failed"})
        assert isinstance(supervisor.failure(), Internal)
        assert "Cannot allocate memory" in str(supervisor.failure())
    world = World()
    async with supervised(world) as supervisor:
        await until(supervisor.ready)
        world.no_fork = 1
        world.of("decode-0").ended.set()
        await until(lambda: supervisor.ready() and supervisor.states()[1].starts == 3)


async def test_what_cannot_be_ended_is_not_replaced_before_it_is() -> None:
    """`World` holds that no two live at once."""
    world = World()
    async with supervised(world) as supervisor:
        await until(supervisor.ready)
        world.no_end = 1
        world.of("decode-0").ended.set()
        await until(lambda: supervisor.ready() and supervisor.states()[1].starts == 2)
        assert world.no_end == 0


async def test_a_start_that_takes_too_long_is_ended() -> None:
    world = World()
    world.hang = True
    limits = Limits(group_start=0.2, handshake=0.1)
    async with supervised(world, limits) as supervisor:
        await until(lambda: supervisor.failure() is not None)
        failure = supervisor.failure()
        assert isinstance(failure, Internal)
        assert "limits.group_start (0.2 s)" in str(failure)


async def test_stopping_while_groups_start_leaves_nothing() -> None:
    world = World()
    world.hang = True
    async with supervised(world) as supervisor:
        await until(lambda: len(world.living) == 2)
        assert {state.state for state in supervisor.states()} == {"loading"}
