"""The survey's anatomy of inference (arXiv 2404.14294), measured: operators of a step, latency and memory of a
generation.

Owns how it is measured; knows engines by `Subject` and nothing of tables and plots.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Protocol

import torch

from diptych.kernels.ceilings import Ceilings
from diptych.profile.memory import MemoryCurve, Sizes, workspace
from diptych.profile.recorder import Recorder, Timed
from diptych.profile.steps import Measured, measure, steps_of
from diptych.profile.work import CATEGORIES, Operator
from diptych.workers.memory import weight_bytes
from diptych.workers.model.config import ModelConfig

_CURVE = 400  # points of a memory curve that are kept


class Subject(Protocol):
    """An engine under measurement. `begin` prepares; then `prefill` and any number of `decode` (each one token a
    sequence), or `without_cache`. `repeated`: the next decode step as a function that may be called any number of times
    and captured; it moves nothing on. weight_bytes: of parameters. held_bytes: with copies in other forms."""

    name: str
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    held_bytes: int

    def begin(self, batch: int, context: int, new: int) -> None: ...
    def prefill(self) -> None: ...
    def decode(self) -> None: ...
    def repeated(self) -> Callable[[], None]: ...
    def without_cache(self) -> None: ...
    def cache_bytes(self) -> int: ...
    def expected_cache(self, batch: int, tokens: int) -> int: ...
    def labelled(self, recorder: Recorder) -> AbstractContextManager[None]: ...


def room(rounds: int) -> int:
    """Tokens that `phases` generates after a prompt."""
    return 4 * rounds + 1


def phases(
    engine: Subject, batch: int, context: int, rounds: int, done: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Prefill of `context` tokens and decode after them, operator by operator; `add_walls` completes the rows."""
    engine.begin(batch, context, room(rounds))
    engine.prefill()
    engine.decode()
    found = []
    for phase, times in (("prefill", max(2, rounds // 2)), ("decode", 2 * rounds)):
        step = engine.prefill
        if phase == "decode":
            engine.prefill()
            # A graph does the same step again and again; a CPU's takes each token as it comes.
            step = engine.repeated() if engine.device.type == "cuda" else engine.decode
        steps = steps_of(engine, step)
        row = {"engine": engine.name, "phase": phase, "batch": batch, "context": context, "captured": steps.captured}
        found.append(row | _phase(measure(steps, times, engine.device)))
        done()
    return found


def _phase(found: Measured) -> dict[str, Any]:
    """step_ms: of a step as it is; recorded_over_step: what recording makes of it. Where the step is a graph, what a
    host's launching adds is seen in a generation's latencies alone."""
    total = sum(timed.seconds for timed in found.operators.values())
    shares = {
        kind: sum(timed.seconds for operator, timed in found.operators.items() if operator.category == kind) / total
        for kind in CATEGORIES
    }
    return {
        "method": found.method, "step_ms": round(found.step * 1e3, 4),
        "median_ms": round(statistics.median(found.plain) * 1e3, 4),
        "operators_ms": round(total * 1e3, 4), "operators_over_step": round(total / found.step, 4),
        "recorded_over_step": round(found.recorded / found.step, 4), "note": found.note, **found.details,
        "shares": {kind: round(share, 4) for kind, share in shares.items()},
        "operators": [_row(o, t, total) for o, t in found.operators.items() if t.seconds > 0],
    }  # fmt: skip


def _row(operator: Operator, timed: Timed, total: float) -> dict[str, Any]:
    work = timed.work
    return {
        "name": operator.name, "category": operator.category, "shape": list(operator.shape), "calls": timed.calls,
        "ms": round(timed.seconds * 1e3, 4), "share": round(timed.seconds / total, 4),
        "gflop": round(work.flops / 1e9, 9), "megabytes": round(work.moved / 1e6, 9),
    }  # fmt: skip


def add_walls(phases: list[dict[str, Any]], limits: Ceilings) -> None:
    """To each row its intensity (FLOP/byte), the wall that it stands at, the time that the machine needs at least, and
    how many times that it took."""
    for row in (row for phase in phases for row in phase["operators"]):
        flops, moved = row["gflop"] * 1e9, row["megabytes"] * 1e6
        intensity = flops / moved if moved else 0.0
        floor = limits.floor(flops, moved) * 1e3
        row |= {
            "intensity": round(intensity, 2),
            "wall": "" if not moved else "compute" if intensity > limits.ridge else "memory",
            "floor_ms": round(floor, 4),
            "times_floor": round(row["ms"] / floor, 2) if floor else None,
        }


def generation(engine: Subject, batch: int, context: int, new: int, baseline: int) -> dict[str, Any]:
    """One generation with its latencies and its memory on one time axis. baseline: bytes in use before the model."""
    engine.begin(batch, context, new)
    if engine.device.type == "cuda":  # kernels are compiled and loaded at these shapes' first use
        engine.prefill()
        engine.decode()
        torch.cuda.synchronize(engine.device)
    at: list[float] = []
    with MemoryCurve(engine.device, baseline) as curve:
        for step in (engine.prefill, *[engine.decode] * (new - 1)):
            step()
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            at.append(perf_counter() - curve.start)
    expected, measured = predicted(engine, batch, context, new), engine.cache_bytes()
    return {
        "engine": engine.name, "batch": batch, "context": context, "new": new,
        "first_token_ms": round(at[0] * 1e3, 3),
        "per_token_ms": round((at[-1] - at[0]) / (new - 1) * 1e3, 3),
        "generation_ms": round(at[-1] * 1e3, 3),
        "tokens_s": round(batch * new / at[-1], 2), "requests_s": round(batch / at[-1], 4),
        "sizes": {
            "model": {"predicted": expected.weights, "measured": engine.weight_bytes},
            "cache": {"predicted": expected.cache, "measured": measured},
            "held": engine.held_bytes, "workspace": expected.workspace,
            "peak": {"predicted": expected.peak, "measured": curve.peak},
        },
        "token_s": [round(each, 5) for each in at],
        "memory": [[round(second, 4), size] for second, size in _thinned(curve.samples)],
    }  # fmt: skip


def predicted(engine: Subject, batch: int, context: int, new: int) -> Sizes:
    """From the configuration alone, but for the copies that an engine holds of its weights."""
    config, dtype = engine.config, engine.dtype
    return Sizes(
        weights=weight_bytes(config, dtype),
        held=weight_bytes(config, dtype) + engine.held_bytes - engine.weight_bytes,
        cache=engine.expected_cache(batch, context + new),
        workspace=workspace(config, batch * context, batch, dtype.itemsize),
    )


def _thinned(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Of each stretch the largest, so that a short peak stays."""
    size = -(-len(samples) // _CURVE)
    return [max(samples[at : at + size], key=lambda each: each[1]) for at in range(0, len(samples), size)]


def without_cache(engine: Subject, batch: int, context: int, new: int) -> dict[str, Any]:
    """The same generation with and without a KV cache, milliseconds a token."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    engine.begin(batch, context, new)
    engine.prefill()
    for name, step in (("with", engine.decode), ("without", engine.without_cache)):
        for _ in range(new):
            started = perf_counter()
            step()
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            times[name].append(perf_counter() - started)
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return {
        "engine": engine.name, "batch": batch, "context": context, "new": new,
        "with_cache_ms": round(medians["with"], 3), "without_cache_ms": round(medians["without"], 3),
        "ratio": round(medians["without"] / medians["with"], 2),
    }  # fmt: skip
