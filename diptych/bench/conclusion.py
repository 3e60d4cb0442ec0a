"""A comparison in words: which configuration pays where, and where the lines of two cross.

Says so, too, where one does not pay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from diptych.bench.compare import Cell, crossings, pairs_of
from diptych.bench.stats import ALPHA


def conclusion(cells: Sequence[Cell], names: Sequence[str]) -> list[str]:
    """For each workload and load who is better than whom at what, then where lines cross, by load and by the prompt's
    share of the tokens."""
    return [*_verdicts([cell for cell in cells if cell.rounds], names), *_crossings(cells, names)]


def _verdicts(cells: Sequence[Cell], names: Sequence[str]) -> Iterator[str]:
    for cell in cells:
        where = f"{cell.workload} ({cell.share:.0%} of the tokens are prompt), {cell.load}"
        rows, alike = cell.verdicts(names), []
        for at, (a, b) in enumerate(pairs_of(len(names))):
            better = {name: row["pairs"][at]["better"] for name, row in rows.items()}
            wins: dict[str, list[str]] = {
                side: [name for name, winner in better.items() if winner == side] for side in (names[a], names[b])
            }
            if not any(wins.values()):
                alike.append(f"{names[a]} and {names[b]}")
                continue
            first, second = sorted(wins, key=lambda side: not wins[side])
            tail = f", and loses {', '.join(wins[second])}" if wins[second] else ""
            yield f"{where}: {first} pays against {second} in {', '.join(wins[first])}{tail}."
        if alike:
            which = "neither pays" if len(names) == 2 else f"nothing between {'; '.join(alike)}"
            yield f"{where}: {which}; no difference is beyond chance (p > {ALPHA})."
        if len(names) > 2 and not any(names[0] in _winners(row) for row in rows.values()):
            yield f"{where}: {names[0]} pays against none of the others."


def _winners(row: dict[str, Any]) -> set[str]:
    return {pair["better"] for pair in row["pairs"]}


def _crossings(cells: Sequence[Cell], names: Sequence[str]) -> Iterator[str]:
    for what, (a, b), found in lines_crossing(cells, names):
        for name, places in found.items():
            at = ", ".join(f"{place:g}" for place in places)
            yield f"{what}: the lines of {name} of {names[a]} and {names[b]} cross at {at}."


Crossing = tuple[str, tuple[int, int], dict[str, list[float]]]


def lines_crossing(cells: Sequence[Cell], names: Sequence[str]) -> Iterator[Crossing]:
    """(of what, the two sides, by metric the places): by load of each workload, by share of each load."""
    measured = [cell for cell in cells if cell.rounds]
    for pair in pairs_of(len(names)):
        for workload in dict.fromkeys(cell.workload for cell in measured):
            points = [(cell.load.level, cell) for cell in measured if cell.workload == workload]
            if found := crossings(points, names, pair):
                yield f"{workload}, by load", pair, found
        for load in dict.fromkeys(str(cell.load) for cell in measured):
            shares = [(cell.share, cell) for cell in measured if str(cell.load) == load]
            if found := crossings(shares, names, pair):
                yield f"{load}, by the prompt's share of the tokens", pair, found
