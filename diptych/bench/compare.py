"""Two configurations in one run, by turns: which one pays, by how much, at which loads, and whether chance would do.

Owns the comparison's plan and its words. A round runs both, the first one alternating, with the same arrivals; p is the
sign-flip test's over the rounds' differences.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.bench.load import Record
from diptych.bench.serve import Bench, Load, Told
from diptych.bench.stats import Objective, crossing, sign_flip, summary

ALPHA = 0.05
_LOWER = {"ttft_ms": "p50", "tpot_ms": "p50", "itl_ms": "p99", "e2e_ms": "p50"}
_HIGHER = ("output_tokens_s", "goodput_requests_s")


@dataclass
class Cell:
    """Runs of both sides at one workload and load: for each metric, a value a round."""

    workload: str
    load: Load
    share: float
    values: tuple[dict[str, list[float]], dict[str, list[float]]] = field(default_factory=lambda: ({}, {}))

    def add(self, side: int, found: dict[str, Any]) -> None:
        for name, value in metrics(found).items():
            self.values[side].setdefault(name, []).append(value)

    def verdicts(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """For each metric both medians with their spread, the median ratio b/a, p, and who is better if anyone is."""
        rows = {}
        for name in self.values[0]:
            a, b = self.values[0][name], self.values[1].get(name, [])
            count = min(len(a), len(b))
            if count:
                rows[name] = verdict(name, a[:count], b[:count], names)
        return rows


def metrics(found: dict[str, Any]) -> dict[str, float]:
    values = {f"{name} {which}": found[name][which] for name, which in _LOWER.items() if name in found}
    return values | {name: found[name] for name in _HIGHER if name in found}


def verdict(name: str, a: list[float], b: list[float], names: Sequence[str]) -> dict[str, Any]:
    """ratio: the median of b / a over the rounds where a is not 0, with its range; None if there is none."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    ratios = [y / x for x, y in zip(a, b, strict=True) if x]
    p, apart = sign_flip(differences), statistics.fmean(differences)
    better = ""
    if p <= ALPHA and apart:
        better = names[(apart > 0) if name in _HIGHER else (apart < 0)]
    return {
        names[0]: _spread(a), names[1]: _spread(b),
        "ratio": round(statistics.median(ratios), 4) if ratios else None,
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)] if ratios else None,
        "p": round(p, 4), "better": better,
    }  # fmt: skip


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": min(values), "max": max(values)}


async def compare(
    sides: Sequence[Bench],
    names: Sequence[str],
    loads: Sequence[Load],
    rounds: int,
    objective: Objective | None,
    told: Told,
) -> list[Cell]:
    """`rounds` rounds at every load. An interruption leaves the rounds that were whole."""
    workload = sides[0].workload
    cells = [Cell(str(workload), load, _prompt_share(sides[0])) for load in loads]
    for turn in range(rounds):
        for cell in cells:
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            found: dict[int, dict[str, Any]] = {}
            for side in order:
                sides[side].runs = turn  # both see the same prompts
                records: list[Record] = await sides[side].run(cell.load, f"{names[side]}, {cell.load}")
                if sides[side].stop.is_set():
                    return cells
                found[side] = summary(records, objective)
            for side, values in found.items():
                cell.add(side, values)
                told({"configuration": names[side], "load": str(cell.load), "round": turn + 1, **values})
    return cells


def _prompt_share(side: Bench) -> float:
    """Prompt tokens over all tokens of the workload."""
    chats, _ = side.workload.chats(side.vocab, side.context)
    turns = [turn for chat in chats for turn in chat.turns]
    prompt, new = sum(len(turn.tokens) for turn in turns), sum(turn.new for turn in turns)
    return prompt / (prompt + new)


def crossings(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """For each metric, the load levels at which the two sides' medians cross (cells of one workload)."""
    ordered = sorted(cells, key=lambda cell: cell.load.level)
    found = {}
    for name in ordered[0].values[0] if ordered else ():
        usable = [cell for cell in ordered if name in cell.values[0] and name in cell.values[1]]
        points = [[statistics.median(cell.values[side][name]) for cell in usable] for side in (0, 1)]
        if where := crossing([cell.load.level for cell in usable], *points):
            found[name] = [round(level, 3) for level in where]
    return found


def conclusion(cells: Sequence[Cell], names: Sequence[str]) -> list[str]:
    """In words: for each workload and load who is better at what, then where the lines cross."""
    said = []
    for cell in cells:
        if not (rows := cell.verdicts(names)):
            continue  # interrupted before it was measured
        wins = [[name for name, row in rows.items() if row["better"] == side] for side in names]
        where = f"{cell.workload} ({cell.share:.0%} of the tokens are prompt), {cell.load}"
        for side, other, won, lost in ((names[0], names[1], *wins), (names[1], names[0], *wins[::-1])):
            if won:
                tail = f", and loses {', '.join(lost)}" if lost else ""
                said.append(f"{where}: {side} pays against {other} in {', '.join(won)}{tail}.")
                break
        else:
            said.append(f"{where}: neither pays; no difference is beyond chance (p > {ALPHA}).")
    for workload in dict.fromkeys(cell.workload for cell in cells):
        for name, levels in crossings([cell for cell in cells if cell.workload == workload]).items():
            said.append(f"{workload}: the lines of {name} cross at {', '.join(f'{level:g}' for level in levels)}.")
    return said
