"""Which workers take a request: a pure function of what it needs and of a snapshot of the workers.

Only a pair with a ready link and equal digests is chosen. Among the workers that are not busier than the others,
decode is chosen by room, then by the prefix it holds, then by load; prefill likewise. Bounding affinity by load keeps a
popular prefix from starving the other workers (and from drowning its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from diptych.contract.wire import Role

SLACK = 2  # requests that a worker may be ahead of the idlest one and still be chosen for its prefix
STRETCH = 1.25


class View(msgspec.Struct, frozen=True):
    """One worker, as last heard. busy: requests that run or wait there, as far as we know, for each of its data
    ranks. total_blocks: of one of those; free_blocks: of all. prefixes: digests that it
    says to hold (a hint)."""

    id: str
    role: Role
    digest: str
    block_size: int
    total_blocks: int
    free_blocks: int
    max_context: int
    busy: int
    links: frozenset[str]
    prefixes: Mapping[bytes, None]
    draining: bool = False


class Need(msgspec.Struct, frozen=True):
    """prompt: its tokens. total: with all that may be generated. digests: of the prompt's blocks, by block size.
    turn: any number; takes turns between workers that are otherwise equal."""

    prompt: int
    total: int
    digests: Mapping[int, Sequence[bytes]]
    turn: int = 0

    @property
    def single(self) -> bool:
        """One token: prefill draws it, and nothing is decoded."""
        return self.total == self.prompt + 1


class Route(msgspec.Struct, frozen=True):
    """prefill and decode; or prefill alone, for a single token; or one worker that does both (`both`)."""

    prefill: str | None = None
    decode: str | None = None
    both: str | None = None


class NoRoute(msgspec.Struct, frozen=True):
    """Why a request must wait."""

    cause: str


def choose(need: Need, workers: Iterable[View]) -> Route | NoRoute:
    """Where to send it now, or why nowhere. No side effects."""
    able = [worker for worker in workers if not worker.draining]
    colocated = [worker for worker in able if worker.role == "colocated" and _holds(worker, need.total)]
    prefills = [worker for worker in able if worker.role == "prefill" and _holds(worker, need.prompt)]
    if need.single and prefills + colocated:
        best = _best(need, prefills + colocated)
        return Route(both=best.id) if best.role == "colocated" else Route(prefill=best.id)
    decodes = [worker for worker in able if worker.role == "decode" and _holds(worker, need.total)]
    paired = [worker for worker in decodes if any(_linked(prefill, worker) for prefill in prefills)]
    if not paired + colocated:
        return NoRoute(_cause(able, prefills, decodes))
    decode = _best(need, paired + colocated)
    if decode.role == "colocated":
        return Route(both=decode.id)
    prefill = _best(need, [worker for worker in prefills if _linked(worker, decode)])
    return Route(prefill=prefill.id, decode=decode.id)


def _best(need: Need, workers: list[View]) -> View:
    """workers: at least one."""
    limit = SLACK + STRETCH * min(worker.busy for worker in workers)
    count = len(workers)

    def rank(index: int) -> tuple[bool, int, int, int]:
        worker = workers[index]
        held = cached_blocks(need, worker)
        lacks_room = worker.free_blocks < need.prompt // worker.block_size + 1 - held
        return lacks_room, -held, worker.busy, (index - need.turn) % count

    return workers[min((i for i in range(count) if workers[i].busy <= limit), key=rank)]


def cached_blocks(need: Need, worker: View) -> int:
    """Leading blocks of the prompt that the worker says to hold."""
    held = 0
    for digest in need.digests.get(worker.block_size, ()):
        if digest not in worker.prefixes:
            break
        held += 1
    return held


def _holds(worker: View, tokens: int) -> bool:
    return tokens <= min(worker.total_blocks * worker.block_size, worker.max_context)


def _linked(prefill: View, decode: View) -> bool:
    return prefill.digest == decode.digest and decode.id in prefill.links and prefill.id in decode.links


def _cause(able: list[View], prefills: list[View], decodes: list[View]) -> str:
    if not able:
        return "no worker is connected"
    if not any(worker.role != "decode" for worker in able):
        return "no prefill worker is connected"
    if not any(worker.role != "prefill" for worker in able):
        return "no decode worker is connected"
    if not prefills or not decodes:
        return "no connected worker has room for so many tokens"
    return "no link between a prefill and a decode worker is ready"
