"""Two or more configurations in one run, by turns: which one pays, by how much, at which loads, and whether chance
would do.

Owns the comparison's plan and its verdicts; their words are `conclusion`'s. A round runs every configuration with the
same arrivals, in an order that changes, so that each comes first and last equally often. Any two are compared by the
sign-flip test over the rounds' differences; of all pairs of one metric at one load the p are corrected after Holm.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from diptych.bench.load import Record
from diptych.bench.serve import Bench, Load, Told
from diptych.bench.stats import ALPHA, Objective, crossing, fewest_rounds, holm, least_p, sign_flip, summary

_LOWER = {"ttft_ms": "p50", "tpot_ms": "p50", "itl_ms": "p99", "e2e_ms": "p50"}
_HIGHER = ("output_tokens_s", "goodput_requests_s")


def pairs_of(sides: int) -> list[tuple[int, int]]:
    return list(combinations(range(sides), 2))


def enough_rounds(sides: int) -> int:
    """The fewest rounds after which a difference can be beyond chance."""
    return fewest_rounds(len(pairs_of(sides)))


def too_few(sides: int, rounds: int) -> str:
    """What to say when so many rounds cannot show any difference; empty when they can."""
    pairs = len(pairs_of(sides))
    if (least := pairs * least_p(rounds)) <= ALPHA:
        return ""
    return (
        f"{rounds} rounds can show no difference between {sides} configurations: with {pairs} pairs p is {least:.2g} at"
        f" best, above {ALPHA}. {enough_rounds(sides)} rounds can."
    )


def order(turn: int, sides: int) -> list[int]:
    """Of a round: forwards and backwards by turns, beginning one further every other time."""
    first = turn // 2 % sides
    forwards = [(first + at) % sides for at in range(sides)]
    return forwards if turn % 2 == 0 else forwards[::-1]


@dataclass
class Cell:
    """Runs of all sides at one workload and load. share: of prompt tokens in all tokens. rounds: for each, a side's
    metrics."""

    workload: str
    load: Load
    share: float
    rounds: list[list[dict[str, float]]] = field(default_factory=list)

    def add(self, found: Sequence[dict[str, Any]]) -> None:
        """found: of one round, the summary of each side."""
        self.rounds.append([metrics(each) for each in found])

    def names(self) -> list[str]:
        """Of the metrics that every side has in some round."""
        seen = {name: None for sides in self.rounds for side in sides for name in side}
        return [name for name in seen if all(self.values(name, side) for side in range(len(self.rounds[0])))]

    def values(self, name: str, side: int) -> list[float]:
        return [sides[side][name] for sides in self.rounds if name in sides[side]]

    def paired(self, name: str, a: int, b: int) -> list[tuple[float, float]]:
        """Of the rounds in which both have it."""
        return [(sides[a][name], sides[b][name]) for sides in self.rounds if name in sides[a] and name in sides[b]]

    def verdicts(self, sides: Sequence[str]) -> dict[str, dict[str, Any]]:
        """For each metric `sides`, their medians with spread, and `pairs`, every two of them compared."""
        return {name: self._verdict(name, sides) for name in self.names()}

    def _verdict(self, name: str, sides: Sequence[str]) -> dict[str, Any]:
        pairs = [(a, b, self.paired(name, a, b)) for a, b in pairs_of(len(sides))]
        found = [compared(values) | {"a": sides[a], "b": sides[b], "better": ""} for a, b, values in pairs]
        for (a, b, values), row, p in zip(pairs, found, holm([row["p"] for row in found]), strict=True):
            row["p_holm"] = round(p, 4)
            apart = sum(y - x for x, y in values)
            if p <= ALPHA and apart:
                row["better"] = sides[b] if (apart > 0) == (name in _HIGHER) else sides[a]
            row["p"] = round(row["p"], 4)
        return {"sides": {side: _spread(self.values(name, at)) for at, side in enumerate(sides)}, "pairs": found}


def metrics(found: dict[str, Any]) -> dict[str, float]:
    values = {f"{name} {which}": found[name][which] for name, which in _LOWER.items() if name in found}
    return values | {name: found[name] for name in _HIGHER if name in found}


def compared(values: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """ratio: the median of b / a over the rounds where a is not 0, with its range; None if there is none."""
    ratios = [b / a for a, b in values if a]
    return {
        "rounds": len(values), "ratio": round(statistics.median(ratios), 4) if ratios else None,
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)] if ratios else None,
        "p": sign_flip([b - a for a, b in values]),
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
        for at, cell in enumerate(cells):
            found: dict[int, dict[str, Any]] = {}
            for side in order(turn, len(sides)):
                sides[side].runs = turn * len(cells) + at  # all see the same prompts, and each of them once
                records: list[Record] = await sides[side].run(cell.load, f"{names[side]}, {cell.load}")
                if sides[side].stop.is_set():
                    return cells
                found[side] = summary(records, objective)
            cell.add([found[side] for side in range(len(sides))])
            for side, values in found.items():
                told(
                    {
                        "configuration": names[side],
                        "workload": cell.workload,
                        "load": str(cell.load),
                        "round": turn + 1,
                        **values,
                    }
                )
    return cells


def _prompt_share(side: Bench) -> float:
    """Prompt tokens over all tokens of the workload."""
    chats, _ = side.workload.chats(side.vocab, side.context)
    turns = [turn for chat in chats for turn in chat.turns]
    prompt, new = sum(len(turn.tokens) for turn in turns), sum(turn.new for turn in turns)
    return prompt / (prompt + new)


def crossings(
    points: Sequence[tuple[float, Cell]], names: Sequence[str], pair: tuple[int, int]
) -> dict[str, list[float]]:
    """For each metric where the medians of two sides cross. points: (level or share, cell). A crossing counts only
    between points of which one shows a difference beyond chance: any two lines that are alike cross somewhere."""
    ordered = sorted(((x, cell) for x, cell in points if cell.rounds), key=lambda point: point[0])
    at, found = pairs_of(len(names)).index(pair), {}
    for name in ordered[0][1].names() if ordered else ():
        usable = [(x, cell) for x, cell in ordered if name in cell.names()]
        lines = [[statistics.median(cell.values(name, side)) for _, cell in usable] for side in pair]
        sure = [x for x, cell in usable if cell.verdicts(names)[name]["pairs"][at]["better"]]
        xs = [x for x, _ in usable]
        where = [place for place in crossing(xs, *lines) if {*_around(xs, place)} & {*sure}]
        if where:
            found[name] = [round(x, 3) for x in where]
    return found


def _around(xs: Sequence[float], place: float) -> tuple[float, float]:
    return max(x for x in xs if x <= place), min(x for x in xs if x >= place)
