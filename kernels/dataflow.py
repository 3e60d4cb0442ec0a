"""The heuristic dataflow: which product runs for [K, N, dtype, M] (Hong et al., arXiv 2311.01282, §5).

A pure function of a problem and of tables found by a sweep on the GPU at hand (`kernels/tune.py`); knows no tensor. A
shape nobody tuned goes to the library, with one log line.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLES = Path(__file__).parent / "tables"
log = logging.getLogger(__name__)

Fusion = Literal["plain", "norm", "norm_gate"]


@dataclass(frozen=True)
class Problem:
    """y[M, N] = f(x[M, K]) · Wᵀ. fusion: what rides with it; with "norm_gate" N counts gate and up together."""

    k: int
    n: int
    m: int
    dtype: str
    fusion: Fusion

    @property
    def key(self) -> str:
        return f"{self.k}x{self.n}:{self.dtype}:{self.fusion}"


@dataclass(frozen=True)
class Choice:
    """block: BN, BK and, with "flat" and "streamed", the number of splits of K; warps, stages: of the launch; ahead:
    columns of W brought into L2 before the predecessor's end; early: the next kernel may start as soon as there is
    room; apart: RMSNorm runs as a launch of its own before; blocks: of "streamed" on one multiprocessor at a time;
    rows: of x that a block of "flat" takes, 0 for all of them."""

    kind: Literal["gemv", "flat", "streamed", "library"]
    bn: int = 0
    bk: int = 0
    split: int = 1
    warps: int = 4
    stages: int = 1
    ahead: int = 0
    early: bool = False
    apart: bool = False
    blocks: int = 1
    rows: int = 0


LIBRARY = Choice("library")


@dataclass(frozen=True)
class Table:
    """What a sweep found on one kind of GPU: for each key, (largest M it serves, choice), ascending in M."""

    device: str
    entries: dict[str, tuple[tuple[int, Choice], ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Table:
        entries = {
            key: tuple((int(m), Choice(**row["choice"])) for m, row in sorted(rows.items(), key=lambda r: int(r[0])))
            for key, rows in data["entries"].items()
        }
        return cls(data["device"], entries)

    def choose(self, problem: Problem) -> Choice | None:
        """The choice of the smallest tuned M that holds this one; the library above all of them; None: never tuned."""
        rows = self.entries.get(problem.key)
        if rows is None:
            return None
        return next((choice for m, choice in rows if m >= problem.m), LIBRARY)


def table_name(device: str) -> str:
    return device.lower().replace(" ", "-") + ".json"


@cache
def table(device: str) -> Table:
    """The table of a GPU by its name, as `torch.cuda.get_device_name` gives it; empty where nobody tuned."""
    path = TABLES / table_name(device)
    if not path.exists():
        return Table(device)
    return Table.parse(json.loads(path.read_text()))


@cache
def choose(device: str, problem: Problem) -> Choice:
    found = table(device).choose(problem)
    if found is None:
        _warn_once(device, problem.key)
        return LIBRARY
    return found


@cache
def _warn_once(device: str, key: str) -> None:
    help_ = "" if ":float32:" in key else " (`diptych tune`, with the group's --tensor, may find a faster one)"
    log.warning("no tuned product for %s on %s: the library serves it%s", key, device, help_)
