"""A GPU's own account of a step: which kernel ran from when to when (CUPTI, by way of torch.profiler), and which
operator each belongs to.

The step that is timed is the one that is used, without borders in it, so that dependent launches overlap as they always
do. Which operator a kernel belongs to is found apart, from the same step with a tiny kernel at every border: both run
the same kernels in the same order, and their names are compared.

A kernel owns the time from the end of all before it, or its own start if that is later, until its own end: one that was
let in early waits for its predecessor. Time in which no kernel runs is an operator of its own. So the pieces add up to
the step by construction, and none is a remainder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

from diptych.profile.work import Operator

MARK = "spin_kernel"
"""In the name of the kernel that `torch.cuda._sleep` launches: a border when short, a pause before a step when long."""
_PAUSE = 50_000  # ns; a border takes one to two thousand
_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


class Untold(Exception):
    """The device's account is missing or does not fit; says how."""


@dataclass(frozen=True)
class Kernel:
    """Work of the device, copies and fills included. start, end: ns of one clock."""

    name: str
    start: int
    end: int

    @property
    def is_mark(self) -> bool:
        return MARK in self.name


Step = tuple[Kernel, ...]


def parse(trace: str) -> list[Kernel]:
    """Of a trace in Chrome's format what ran on the device, in order of start. Decimals, since microseconds with
    fractions since 1970 do not fit a float."""
    events = json.loads(trace, parse_float=Decimal, strict=False)["traceEvents"]
    found = [
        Kernel(event["name"], int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000))
        for event in events
        if event.get("cat") in _KINDS and event.get("ph") == "X" and event["ts"] > 0
    ]
    return sorted(found, key=lambda kernel: (kernel.start, kernel.end))


def steps_of(kernels: Sequence[Kernel]) -> list[Step]:
    """Cut at the pauses before each step. What came before the first pause is of no step."""
    found: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.is_mark and kernel.end - kernel.start >= _PAUSE:
            found.append([])
        elif found:
            found[-1].append(kernel)
    return [tuple(step) for step in found if step]


def names(step: Step) -> tuple[str, ...]:
    return tuple(kernel.name for kernel in step)


@dataclass(frozen=True)
class Order:
    """Of a step's kernels, in order, the names and whose they are."""

    names: tuple[str, ...]
    owners: tuple[Operator, ...]


def order_of(marked: Step, pieces: Sequence[Operator]) -> Order:
    """marked: a step with a mark at every border. pieces: whose the time between two marks is, one fewer than marks.
    Raises `Untold`."""
    between: list[list[str]] = [[]]
    for kernel in marked:
        if kernel.is_mark:
            between.append([])
        else:
            between[-1].append(kernel.name)
    before, *inside, after = between
    if len(inside) != len(pieces) or before or after:
        raise Untold(
            f"a step with marks has {len(inside)} pieces instead of {len(pieces)}, {len(before)} kernels before the"
            f" first mark and {len(after)} after the last"
        )
    return Order(
        tuple(name for some in inside for name in some),
        tuple(owner for some, owner in zip(inside, pieces, strict=True) for _ in some),
    )


def difference(step: Step, order: Order) -> str:
    """Where a step's kernels are others than those of the step that had marks."""
    found = names(step)
    at = next((i for i, (a, b) in enumerate(zip(found, order.names, strict=False)) if a != b), None)
    at = min(len(found), len(order.names)) if at is None else at
    here, there = (",".join(some[at : at + 2])[:160] or "nothing" for some in (found, order.names))
    return (
        f"a step has {len(found)} kernels and {len(order.names)} with marks; they differ from the {at}th on, where it"
        f" has {here} and the other {there}"
    )


def cut(step: Step, owners: Sequence[Operator], idle: Operator) -> dict[Operator, float]:
    """Seconds of each operator, from the first kernel's start to the last one's end."""
    found: dict[Operator, int] = {idle: 0}
    until = step[0].start
    for kernel, owner in zip(step, owners, strict=True):
        found[idle] += max(0, kernel.start - until)
        found[owner] = found.get(owner, 0) + max(0, kernel.end - max(until, kernel.start))
        until = max(until, kernel.end)
    return {operator: ns / 1e9 for operator, ns in found.items()}


def middle(steps: Sequence[dict[Operator, float]]) -> dict[Operator, float]:
    """The mean over the half of the steps in the middle, by how long they took."""
    ordered = sorted(steps, key=lambda step: sum(step.values()))
    aside = len(ordered) // 4
    kept = ordered[aside : len(ordered) - aside]
    return {operator: sum(step[operator] for step in kept) / len(kept) for operator in kept[0]}


@dataclass(frozen=True)
class Account:
    """operators: seconds of each in a step, idle time included. steps: how many were whole; broken: how many not.
    kernels: of a step."""

    operators: dict[Operator, float]
    steps: int
    broken: int
    kernels: int


def account(kernels: Sequence[Kernel], pieces: Sequence[Operator], idle: Operator) -> Account:
    """Of one trace that holds steps as they are and steps with marks. It may lack events, at its start above all, and
    never has too many: of the steps with marks the longest says what is whole. Raises `Untold`."""
    if not kernels:
        raise Untold("CUPTI told of no kernel")
    told = steps_of(kernels)
    marked, bare = ([step for step in told if any(k.is_mark for k in step) == has] for has in (True, False))
    if not marked or not bare:
        raise Untold(f"of {len(told)} steps {len(marked)} have marks")
    order = order_of(max(marked, key=len), pieces)
    usable = [step for step in bare if names(step) == order.names]
    if not usable:
        raise Untold(difference(max(bare, key=len), order))
    times = middle([cut(step, order.owners, idle) for step in usable])
    return Account(times, len(usable), len(bare) - len(usable), len(order.names))


def mark() -> None:
    """A border: a kernel that does nothing, known by its name."""
    torch.cuda._sleep(0)  # type: ignore[no-untyped-call]


@contextmanager
def traced(found: list[Kernel]) -> Iterator[None]:
    """Appends to `found` what the device did while the block ran. Raises `Untold` when that cannot be asked."""
    try:
        with _profiler() as profiler:
            yield
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory(prefix="diptych-profile-") as made:
            path = Path(made) / "trace.json"
            profiler.export_chrome_trace(str(path))
            found += parse(path.read_text(errors="replace"))
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        raise Untold(f"torch.profiler failed: {type(error).__name__}: {error}") from error


def _profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA])
