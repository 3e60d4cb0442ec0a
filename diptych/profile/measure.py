"""The plan of `diptych profile` carried out: what is measured in which order.

One engine is in memory at a time, so that its memory is its own. Latencies come before any timeline: once it was asked
for one, CUPTI slows a process's launches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.bench.shapes import varied
from diptych.kernels.ceilings import Ceilings, ceilings
from diptych.profile import anatomy, memory
from diptych.profile.anatomy import Subject, add_walls
from diptych.profile.ours import Ours
from diptych.profile.theirs import Theirs
from diptych.workers.model.config import ModelConfig

if TYPE_CHECKING:
    from diptych.profile.commands import Plan

Told = Callable[[str], None]


def measure(plan: Plan, found: dict[str, Any], told: Told) -> None:
    """Fills `found` as it goes, so that an interruption keeps what is there. told: each step, when it begins."""
    found["dtype"] = str(plan.dtype).removeprefix("torch.")
    with _walls(plan, found):
        if plan.shown & {"latency", "cache"}:
            for name in plan.engines:
                _measure_generations(plan, name, found, told)
        if "softmax" in plan.shown:
            from diptych.profile.softmax import softmax_range

            told("Range of attention scores")
            found["softmax"] = softmax_range(plan.folder, plan.dtype, plan.device)
        if "table6" in plan.shown:
            from diptych.profile.table6 import table6

            found["table6"] = table6(plan, lambda engine: told(f"Table 6: {engine}"))
        if "operators" in plan.shown:
            for name in plan.engines:
                _measure_operators(plan, name, found, told)
        if "mha" in plan.shown:
            _measure_heads(plan, found, told)


@contextmanager
def _walls(plan: Plan, found: dict[str, Any]) -> Iterator[None]:
    """The machine's ceilings, measured before and after; the better is the ceiling, as others may use the machine."""
    limits = ceilings(plan.device, plan.dtype)
    try:
        yield
    finally:
        try:
            again = ceilings(plan.device, plan.dtype)
        except RuntimeError:  # a device that failed measures no more
            again = limits
        limits = Ceilings(max(limits.read, again.read), max(limits.flops, again.flops))
        found["ceilings"] = {
            "read_gb_s": round(limits.read / 1e9, 2), "gflop_s": round(limits.flops / 1e9, 1),
            "ridge": round(limits.ridge, 1),
        }  # fmt: skip
        add_walls(found.get("phases", []), limits)


def make(name: str, plan: Plan, folder: Path | None = None, config: ModelConfig | None = None) -> Subject:
    kind = Ours if name == "diptych" else Theirs
    form = plan.form if folder is None else "dummy"
    return kind(folder or plan.folder, config or plan.config, plan.dtype, plan.device, form)


def _runs(plan: Plan) -> list[tuple[int, int]]:
    """(batch, context)."""
    return [(batch, context) for batch in plan.batches for context in plan.contexts]


def _measure_generations(plan: Plan, name: str, found: dict[str, Any], told: Told) -> None:
    memory.tidy(plan.device)
    _warm(plan, name)
    memory.tidy(plan.device)
    baseline = memory.used(plan.device)
    engine = make(name, plan)
    _step_once(engine)  # weights that are mapped from a file are read when they are first needed
    memory.tidy(plan.device)
    if "latency" in plan.shown:
        for batch, context in _runs(plan):
            told(f"{name}: generation, {batch} x {context}")
            memory.tidy(plan.device)
            found.setdefault("generations", []).append(anatomy.generation(engine, batch, context, plan.new, baseline))
    if "cache" in plan.shown:
        told(f"{name}: without a KV cache")
        few = min(plan.new, 8)
        found.setdefault("without_cache", []).append(anatomy.without_cache(engine, 1, min(plan.contexts), few))
    del engine
    memory.tidy(plan.device)


def _measure_operators(plan: Plan, name: str, found: dict[str, Any], told: Told) -> None:
    engine = make(name, plan)
    _step_once(engine)
    for batch, context in _runs(plan):
        phases = anatomy.phases(
            engine, batch, context, plan.rounds,
            lambda at=f"{batch} x {context}": told(f"{name}: operators, {at}"),  # type: ignore[misc]
        )  # fmt: skip
        found.setdefault("phases", []).extend(phases)
    del engine
    memory.tidy(plan.device)


def _warm(plan: Plan, name: str) -> None:
    """One layer of it: libraries set themselves up at their first call, and that is not the model's memory or time."""
    with tempfile.TemporaryDirectory() as made:
        folder = varied(plan.folder, Path(made), num_hidden_layers=1)
        engine = make(name, plan, folder, ModelConfig.from_folder(folder))
        _step_once(engine)


def _step_once(engine: Subject) -> None:
    engine.begin(1, 16, 4)
    engine.prefill()
    engine.decode()


def _measure_heads(plan: Plan, found: dict[str, Any], told: Told) -> None:
    """The same shape with as many KV heads as query heads, and with its own; both with random weights."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        for kv_heads in dict.fromkeys((plan.config.heads, plan.config.kv_heads)):
            folder = varied(plan.folder, Path(made) / str(kv_heads), num_key_value_heads=kv_heads)
            engine = make("diptych", plan, folder, ModelConfig.from_folder(folder))
            for context in plan.contexts:
                told(f"{kv_heads} KV heads, context {context}")
                decode = anatomy.phases(engine, plan.batches[0], context, plan.rounds)[1]
                operators = [each for each in decode["operators"] if each["category"] == "attention"]
                rows.append({
                    "heads": plan.config.heads, "kv_heads": kv_heads, "batch": plan.batches[0], "context": context,
                    "cache_bytes": engine.expected_cache(plan.batches[0], context), "step_ms": decode["step_ms"],
                    "attention_ms": round(sum(each["ms"] for each in operators), 4),
                    "attention_share": decode["shares"]["attention"],
                })  # fmt: skip
            del engine  # before the next: two at once may not fit
            memory.tidy(plan.device)
    found["heads"] = rows
