"""Results for people: tables of a terminal, and the plots of each kind of run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.bench import plots
from diptych.bench.compare import Cell

_COLUMNS = ("p50", "p99")
HEAD = (
    f"{'':34} {'req/s':>7} {'tok/s':>8}  {'TTFT p50':>8} {'p99':>8}  {'TPOT p50':>8} {'p99':>7}"
    f"  {'ITL p50':>8} {'p99':>8}  {'E2E p50':>8} {'p99':>8} ms"
)


def row(found: dict[str, Any]) -> str:
    cells = [f"{found['load'][:34]:34} {found.get('requests_s', 0):7.2f} {found.get('output_tokens_s', 0):8.1f} "]
    for name, width in (("ttft_ms", (8, 8)), ("tpot_ms", (8, 7)), ("itl_ms", (8, 8)), ("e2e_ms", (8, 8))):
        values = found.get(name)
        texts = [f"{values[which]:.1f}" if values else "–" for which in _COLUMNS]
        cells.append(" ".join(f"{text:>{size}}" for text, size in zip(texts, width, strict=True)) + " ")
    if "met" in found:
        cells.append(f" met {found['met']:.0%}, goodput {found['goodput_requests_s']:.2f}/s")
    if found["errors"]:
        cells.append(f" errors {found['errors']}")
    return " ".join(cells).rstrip()


def searched(found: dict[str, Any]) -> str:
    limit = f"fails at {found['failed_at']:g}" if found["failed_at"] else "was not seen to fail"
    return f"The objective is kept ({found['share']:.0%} of requests) up to a load of {found['kept_up_to']:g}; {limit}."


def self_test(found: dict[str, Any]) -> str:
    closed = found["closed"]
    said = [
        f"The generator against a stub: {closed['requests_s']} requests/s and {closed['tokens_s']} tokens/s"
        f" ({closed['concurrency']} at once, {found['messages_a_request']} messages a request; {found['scheduling']}"
        " priority)."
    ]
    said += [
        f"  at {each['rate']:g}/s (Poisson): {each['requests_s']} requests/s, {each['tokens_s']} tokens/s; adds"
        f" {each['sending_ms']['p50']} ms (p99 {each['sending_ms']['p99']}) sending and at most"
        f" {each['receiving_ms']['p50']} ms (p99 {each['receiving_ms']['p99']}) receiving, {each['added_ms']['p50']} ms"
        f" (p99 {each['added_ms']['p99']}) together"
        for each in found["open"]
    ]
    return "\n".join(said)


def verdicts(cell: Cell, names: Sequence[str]) -> str:
    said = [f"{cell.workload}, {cell.load}: medians over rounds [range], then two by two"]
    for name, found in cell.verdicts(names).items():
        said.append(f"  {name}")
        for side, spread in found["sides"].items():
            values = f"{spread['median']:.2f} [{spread['min']:.2f}–{spread['max']:.2f}]"
            said.append(f"    {side:24} {values:>32}")
        for pair in found["pairs"]:
            ratio = f"{pair['ratio']:.3f}" if pair["ratio"] is not None else "–"
            better = f"{pair['better']} is better" if pair["better"] else "no difference beyond chance"
            p = f"p {pair['p']:.4f}" + (f", of several {pair['p_holm']:.4f}" if len(found["pairs"]) > 1 else "")
            said.append(f"    {pair['b']} / {pair['a']}: × {ratio}, {p}: {better}")
    return "\n".join(said)


def draw(folder: Path, name: str, found: dict[str, Any]) -> None:
    """The plots of a result, beside it."""
    if name == "bench-serve" and found["rows"]:
        _draw_levels(folder, name, found["rows"])
    elif name == "bench-compare" and found["cells"]:
        _draw_compared(folder, name, found)


def _draw_levels(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    rows = sorted((row for row in rows if "ttft_ms" in row), key=lambda row: row["level"])
    levels = [row["level"] for row in rows]
    with plots.figure(folder, name, f"{rows[0].get('workload', '')}: latency against load", 2) as axes:
        for axis, metric, label in ((axes[0], "ttft_ms", "TTFT"), (axes[1], "itl_ms", "inter-token latency")):
            named = {which: [row[metric][which] if metric in row else 0 for row in rows] for which in ("p50", "p99")}
            plots.lines(axis, levels, named, "load", f"{label}, ms")


def _draw_compared(folder: Path, name: str, found: dict[str, Any]) -> None:
    cells, names = found["cells"], found["configurations"]
    workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
    metrics = [each for each in ("ttft_ms p50", "itl_ms p99", "output_tokens_s") if each in cells[0]["verdicts"]]
    if not metrics:
        return
    with plots.figure(folder, name, " against ".join(names), len(metrics), len(workloads)) as grid:
        axes = list(grid) if len(metrics) * len(workloads) > 1 else [grid]
        for line, workload in enumerate(workloads):
            of = sorted((cell for cell in cells if cell["workload"] == workload), key=lambda cell: cell["level"])
            for column, metric in enumerate(metrics):
                axis = axes[line * len(metrics) + column]
                usable = [cell for cell in of if metric in cell["verdicts"]]
                for side, colour in zip(names, plots.COLOURS, strict=False):
                    values = [cell["verdicts"][metric]["sides"][side] for cell in usable]
                    middle = [value["median"] for value in values]
                    spread = [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]
                    levels = [cell["level"] for cell in usable]
                    axis.errorbar(levels, middle, spread, marker="o", markersize=3, capsize=3, label=side, color=colour)
                axis.set(xlabel="load", ylabel=metric.replace("_", " "), title=workload)
                axis.legend(fontsize=7)
