"""The routing policy over thousands of simulated requests: always a pair that can work, never a starved worker."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from diptych.router.routing import SLACK, Need, NoRoute, Route, View, cached_blocks, choose

BLOCK = 16
CACHED = 400  # prefix blocks that a simulated worker keeps


@dataclass
class Worker:
    id: str
    role: str
    links: set[str] = field(default_factory=set)
    digest: str = "d"
    busy: int = 0
    served: int = 0
    total: int = 4000
    draining: bool = False
    prefixes: dict[bytes, None] = field(default_factory=dict)

    def view(self) -> View:
        return View(
            self.id, self.role, self.digest, BLOCK, self.total, self.total - 10 * self.busy, 8192, self.busy,  # type: ignore[arg-type]
            frozenset(self.links), self.prefixes, self.draining,
        )  # fmt: skip

    def keep(self, digests: tuple[bytes, ...]) -> None:
        self.prefixes |= dict.fromkeys(digests)
        while len(self.prefixes) > CACHED:
            del self.prefixes[next(iter(self.prefixes))]


def fleet(prefills: int, decodes: int) -> dict[str, Worker]:
    workers = {f"p{n}": Worker(f"p{n}", "prefill") for n in range(prefills)}
    workers |= {f"d{n}": Worker(f"d{n}", "decode") for n in range(decodes)}
    for one in workers.values():
        one.links = {other.id for other in workers.values() if other.role != one.role}
    return workers


def need(family: int, tail: int, blocks: int = 20, total: int | None = None, turn: int = 0) -> Need:
    """A prompt of `blocks` blocks; the first 15 are its family's."""
    digests = tuple(b"%d-%d" % (family, n) if n < 15 else b"%d-%d-%d" % (family, tail, n) for n in range(blocks))
    return Need(blocks * BLOCK, blocks * BLOCK + 50 if total is None else total, {BLOCK: digests}, turn)


Pick = Callable[[Need, dict[str, Worker]], Route | NoRoute]


def simulate(workers: dict[str, Worker], requests: int, pick: Pick, families: int = 30, seed: int = 1) -> float:
    """Poisson arrivals near the fleet's capacity; returns the share of prompt blocks that prefill found cached."""
    draw, now, hits, blocks = random.Random(seed), 0.0, 0, 0
    ends: list[tuple[float, str]] = []
    for number in range(requests):
        now += draw.expovariate(8.0)
        while ends and ends[0][0] <= now:
            workers[heapq.heappop(ends)[1]].busy -= 1
        family = min(int(draw.paretovariate(0.9)), families)  # the first family has half of everything
        asked = need(family, number, turn=number)
        route = pick(asked, workers)
        assert isinstance(route, Route)
        prefill, decode = workers[route.prefill or ""], workers[route.decode or ""]
        assert decode.id in prefill.links
        assert prefill.id in decode.links
        hits += cached_blocks(asked, prefill.view())
        blocks += 20
        for worker, seconds in ((prefill, 0.3), (decode, 2.0)):
            worker.busy += 1
            worker.served += 1
            worker.keep(tuple(asked.digests[BLOCK]))
            heapq.heappush(ends, (now + draw.expovariate(1 / seconds), worker.id))
            others = [other.busy for other in workers.values() if other.role == worker.role]
            assert worker.busy <= SLACK + 1.25 * min(others) + 1
    return hits / blocks


def ours(asked: Need, workers: dict[str, Worker]) -> Route | NoRoute:
    return choose(asked, [worker.view() for worker in workers.values()])


def idlest(asked: Need, workers: dict[str, Worker]) -> Route | NoRoute:
    """What a policy that knows no prefixes would do."""
    return ours(Need(asked.prompt, asked.total, {}, asked.turn), workers)


def test_thousands_of_requests() -> None:
    workers = fleet(3, 5)
    hits = simulate(workers, 4000, ours)
    blind = simulate(fleet(3, 5), 4000, idlest)
    assert hits > blind + 0.05, f"affinity finds {hits:.2f} of the blocks, without it {blind:.2f}"
    for role in ("prefill", "decode"):
        served = [worker.served for worker in workers.values() if worker.role == role]
        assert min(served) > 0.4 * max(served), f"a popular prefix starves nobody: {served}"


def test_equal_workers_take_turns() -> None:
    workers = fleet(2, 4)
    chosen = [ours(Need(10, 20, {}, turn), workers) for turn in range(40)]
    for decode in ("d0", "d1", "d2", "d3"):
        assert sum(isinstance(route, Route) and route.decode == decode for route in chosen) == 10


def test_what_is_never_chosen() -> None:
    workers = fleet(2, 2)
    workers["p0"].draining = True
    workers["d0"].digest = "another"
    assert ours(need(1, 1), workers) == Route(prefill="p1", decode="d1")
    workers["d1"].links.discard("p1")
    assert ours(need(1, 1), workers) == NoRoute("no link between a prefill and a decode worker is ready")
    workers["d1"].links.add("p1")
    workers["d1"].total = 10
    assert ours(need(1, 1), workers) == NoRoute("no link between a prefill and a decode worker is ready")
    workers["d0"].digest = "d"
    assert ours(need(1, 1), workers) == Route(prefill="p1", decode="d0")


def test_a_worker_without_room_comes_last() -> None:
    workers = fleet(1, 2)
    workers["d0"].keep(tuple(need(1, 1).digests[BLOCK]))
    assert ours(need(1, 1), workers) == Route(prefill="p0", decode="d0")
    full = [View(**{**_fields(w.view()), "free_blocks": 0 if w.id == "d0" else 100}) for w in workers.values()]
    assert choose(need(1, 2, blocks=40), full) == Route(prefill="p0", decode="d1")


def test_a_single_token_needs_no_decode() -> None:
    workers = fleet(1, 0)
    assert ours(need(1, 1, total=321), workers) == Route(prefill="p0")
    assert ours(need(1, 1), workers) == NoRoute("no decode worker is connected")


@pytest.mark.parametrize("total", [321, 400])
def test_colocated(total: int) -> None:
    assert ours(need(1, 1, total=total), {"c": Worker("c", "colocated")}) == Route(both="c")


def test_nobody() -> None:
    assert ours(need(1, 1), {}) == NoRoute("no worker is connected")
    assert ours(need(1, 1), fleet(0, 2)) == NoRoute("no prefill worker is connected")


def _fields(view: View) -> dict[str, object]:
    return {name: getattr(view, name) for name in view.__struct_fields__}
