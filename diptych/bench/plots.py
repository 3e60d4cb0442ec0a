"""Drawings of results, as PNG and SVG. matplotlib is an extra (`pip install 'diptych[bench]'`); without it a run goes
on and says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLOURS = ("#2f6fb0", "#d1652b", "#3d8f5f", "#8a5aa8", "#b03a48", "#6b6b6b", "#c2a12e", "#4aa3a3")


def can_draw() -> bool:
    try:
        import matplotlib
    except ImportError:
        print("No plots: matplotlib is not installed (pip install 'diptych[bench]').", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    return True


@contextmanager
def figure(folder: Path, name: str, title: str, columns: int = 1, rows: int = 1) -> Iterator[Any]:
    """Axes of one figure, [rows][columns] flattened, or the only ones; saved as NAME.png and NAME.svg at the end."""
    import matplotlib.pyplot as plt

    # The same drawing is the same file: no dates and no random ids in it.
    with plt.rc_context({"svg.hashsalt": name, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        made, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
        try:
            yield axes.flatten() if rows * columns > 1 else axes
            made.suptitle(title, fontsize=10)
            folder.mkdir(parents=True, exist_ok=True)
            made.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
            made.savefig(folder / f"{name}.svg", metadata={"Date": None})
        finally:
            plt.close(made)


def lines(axes: Any, xs: Sequence[float], named: Mapping[str, Sequence[float]], x_label: str, y_label: str) -> None:
    for (name, ys), colour in zip(named.items(), COLOURS * 4, strict=False):
        axes.plot(xs, ys, marker="o", markersize=3, label=name, color=colour)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(fontsize=8)


def distribution(axes: Any, named: Mapping[str, Sequence[float]], x_label: str) -> None:
    """The share of samples up to x, for each name."""
    for (name, values), colour in zip(named.items(), COLOURS * 4, strict=False):
        ordered = sorted(values)
        if ordered:
            axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name, color=colour)
    axes.set(xlabel=x_label, ylabel="share of samples", ylim=(0, 1.02))
    axes.legend(fontsize=8)


def stacked(axes: Any, labels: Sequence[str], parts: Mapping[str, Sequence[float]], y_label: str) -> None:
    """A bar a label, its parts on top of each other."""
    base = [0.0] * len(labels)
    for (name, values), colour in zip(parts.items(), COLOURS * 4, strict=False):
        if any(values):
            axes.bar(labels, values, bottom=base, label=name, color=colour, width=0.7)
            base = [low + value for low, value in zip(base, values, strict=True)]
    axes.set(ylabel=y_label)
    axes.tick_params(axis="x", labelrotation=30, labelsize=7)
    axes.legend(fontsize=7)
