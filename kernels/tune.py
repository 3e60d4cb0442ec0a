"""The sweep behind the dataflow: finds, for each [K, N, dtype, M], the fastest product on the GPU at hand.

`diptych tune` calls `tune`. Candidates come from a pure function of the problem; kernels are compiled by a pool of
processes, then timed one after the other in captured graphs whose weights rotate past the L2 cache. Our kernel is
chosen only where it beats the library by more than MARGIN; among those that come near, the chain of a decoder's layers
decides (`tune_chain`).
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diptych.contract.errors import ConfigInvalid
from diptych.kernels.dataflow import LIBRARY, TABLES, Choice, Problem, table_name
from diptych.kernels.timing import Replay, paired
from diptych.kernels.triton.common import multiprocessors
from diptych.kernels.triton.streamed import can_stream
from diptych.kernels.tune_chain import Chain, LayerShape, Shape, refine

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MARGIN = 0.99
AHEAD = (256, 1024)
SHARED_MEMORY = 220 * 1024
ROTATE_BYTES = 400 << 20
NEAR = 1.1
CONTENDERS = 8
"""So many of a problem's fastest, none slower than NEAR times the fastest or the library, go into the chain."""


@dataclass(frozen=True)
class Finding:
    """What is chosen for a problem, its time alone and the library's. times: (µs, candidate), fastest first."""

    problem: Problem
    choice: Choice
    us: float
    library_us: float
    times: tuple[tuple[float, Choice], ...] = ()

    def contenders(self) -> list[Choice]:
        """The fastest of each kind, and of all; also those that are a little slower than the library, which starts
        after its predecessor's end."""
        best = self.times[0][0] if self.times else self.us
        ours = [(us, c) for us, c in self.times if us < NEAR * min(best, self.library_us)][:CONTENDERS]
        kinds = {c.kind: c for us, c in reversed(self.times) if us < NEAR * self.library_us}
        return list(dict.fromkeys([self.choice, *(c for _, c in ours), *kinds.values(), LIBRARY]))


def decoder_shapes(
    hidden: int, heads: int, kv_heads: int, head_dim: int, width: int | None, vocab: int
) -> tuple[Shape, ...]:
    """The products of one decoder: qkv, attention's output, the vocabulary's head and, unless its feed-forward layers
    are experts (width None), gate_up and down."""
    attention: tuple[Shape, ...] = (
        (hidden, (heads + 2 * kv_heads) * head_dim, "norm"),
        (heads * head_dim, hidden, "plain"),
        (hidden, vocab, "norm"),
    )
    return attention if width is None else (*attention, (hidden, 2 * width, "norm_gate"), (width, hidden, "plain"))


@dataclass(frozen=True)
class Gpu:
    """What candidates depend on. streams: whether the copy engine feeds products there (Hopper)."""

    multiprocessors: int = 132
    streams: bool = True

    @classmethod
    def here(cls) -> Gpu:
        device = torch.device("cuda", torch.cuda.current_device())
        return cls(multiprocessors(device), can_stream(device))


def candidates(problem: Problem, gpu: Gpu) -> list[Choice]:
    """Legal launches worth a try, in no order."""
    found = []
    if problem.m <= 4 and problem.m != 3:
        found += _gemv_candidates(problem)
    if problem.m > 1:
        found += _flat_candidates(problem, gpu.multiprocessors)
    if problem.dtype != "float32" and gpu.streams:
        found += _streamed_candidates(problem, gpu.multiprocessors)
    return [replace(c, early=starts_next_early(problem, c, gpu.multiprocessors)) for c in found]


def starts_next_early(problem: Problem, choice: Choice, multiprocessors: int = 132) -> bool:
    """Whether the next kernel's blocks may come in while this one runs. Not where this one's blocks come in several
    waves, whose places they would take: gate_up so cost 0.25 ms of a 4.0 ms step, while qkv and o so saved 0.02 ms
    each. One op repeated cannot show it, so it is a rule and not swept."""
    gate = 2 if problem.fusion == "norm_gate" else 1
    return choice.kind in ("flat", "streamed") or (
        choice.kind == "gemv" and problem.n // gate <= 4 * multiprocessors * choice.bn
    )


def _gemv_candidates(problem: Problem) -> list[Choice]:
    gate = 2 if problem.fusion == "norm_gate" else 1
    tiles = [(bn, bk) for bn in (2, 4, 8, 16, 32) for bk in (256, 512, 1024)]
    return [
        Choice("gemv", bn, bk, 1, warps, stages)
        for bn, bk in tiles
        for warps in (4, 8)
        for stages in (3, 4, 6, 8)
        if 1024 <= bn * bk <= 8192 // (gate * max(1, problem.m // 2))
        and bn * bk * gate * problem.m <= 64 * 32 * warps
        and 24 << 10 <= bn * bk * 2 * gate * stages <= 110 << 10
    ]


def _flat_candidates(problem: Problem, multiprocessors: int) -> list[Choice]:
    gate = 2 if problem.fusion == "norm_gate" else 1
    n, bm = problem.n // gate, max(16, 1 << (problem.m - 1).bit_length())
    separate = (False, True) if problem.fusion != "plain" and problem.m > 4 else (False,)
    found = []
    for bn, warps, apart in itertools.product((64, 128), (4, 8), separate):
        if (bn < 128 and warps == 8) or bm * bn * gate > 128 * 32 * warps:
            continue
        for bk in (64, 128, 256):
            if problem.fusion != "plain" and not apart and bm * bk > 64 * 32 * warps:
                continue  # the squares of x live in registers
            stage = (bn * gate + bm) * bk * 2
            depths = [s for s in (8, 6, 5, 4, 3) if stage * s <= SHARED_MEMORY][:1]
            depths += [s for s in (8, 6, 4, 3) if stage * s <= SHARED_MEMORY // 2][:1]
            for split in (1, 2, 4):
                blocks = -(-n // bn) * split
                if split > 1 and (blocks > 3 * multiprocessors or problem.k // split < 4 * bk):
                    continue
                for stages in sorted(set(depths)):
                    found.append(Choice("flat", bn, bk, split, warps, stages, apart=apart))
    return found


def _streamed_candidates(problem: Problem, multiprocessors: int) -> list[Choice]:
    gate = 2 if problem.fusion == "norm_gate" else 1
    n, bm = problem.n // gate, max(16, 1 << (problem.m - 1).bit_length())
    found = []
    for (bn, warps), bk, blocks in itertools.product(((64, 4), (128, 4), (128, 8), (256, 8)), (64, 128), (1, 2)):
        tiles, stage = -(-n // bn), (bn * gate + bm) * bk * 2
        stages = min(12, SHARED_MEMORY // blocks // stage)
        if gate * bn * bm > 128 * 32 * warps or stages < 2:
            continue
        if blocks == 2 and bm >= 128 and (warps == 8 or problem.fusion != "plain"):
            continue  # two such blocks leave a thread fewer registers than its accumulators take
        wave = multiprocessors * blocks
        splits = {1, *(s for s in (multiprocessors // tiles, wave // tiles) if 1 < s <= 8 and problem.k >= 2 * s * bk)}
        for apart in (False, True) if problem.fusion != "plain" else (False,):
            divided = problem.fusion == "plain" or (problem.fusion == "norm" and apart)
            for split in splits if divided else {1}:
                found.append(Choice("streamed", bn, bk, split, warps, stages, apart=apart, blocks=blocks))
    return found


def tune(
    shapes: Iterable[Shape],
    *,
    rows: Iterable[int] = ROWS,
    dtype: torch.dtype = torch.bfloat16,
    folder: Path = TABLES,
    limit_s: float = 600.0,
    layer: LayerShape | None = None,
    say: Callable[[str], None] = log.info,
) -> Path:
    """Sweeps shapes (K, N, fusion), then races the best of `layer`'s in its chain; merges each finding into this GPU's
    table and returns its path. Stops sweeping after `limit_s`. Raises `ConfigInvalid` where nothing can be written."""
    device, until = torch.cuda.get_device_name(), time.monotonic() + limit_s
    path = folder / table_name(device)
    keep(path, device, ())
    name = str(dtype).removeprefix("torch.")
    problems = [Problem(k, n, m, name, fusion) for k, n, fusion in shapes for m in rows]
    compile_all(problems, say)
    findings: list[Finding] = []
    bench: Bench | None = None
    for problem in problems:
        if time.monotonic() > until:
            say(f"out of time before {problem}")
            break
        if bench is None or not bench.serves(problem):
            bench = Bench(problem, dtype)
        findings.append(bench.find(problem, say))
        keep(path, device, findings[-1:])
    bench = None
    if layer is not None:
        for m in rows:
            keep(path, device, in_chain(layer, [f for f in findings if f.problem.m == m], dtype, say))
    return path


def keep(path: Path, device: str, findings: Iterable[Finding]) -> None:
    """Into the table, whole or not at all: an interrupted sweep loses only what it was timing."""
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(merged(path, device, findings), indent=1) + "\n")
        new.replace(path)
    except OSError as error:
        raise ConfigInvalid(f"The table {path} cannot be written: {error.strerror}.") from error


def in_chain(
    layer: LayerShape, findings: list[Finding], dtype: torch.dtype, say: Callable[[str], None]
) -> list[Finding]:
    """The findings of one number of rows, those of `layer`'s products as its chain decides."""
    found = {(f.problem.k, f.problem.n, f.problem.fusion): f for f in findings}
    if not all(key in found for key in layer.products):
        return findings  # out of time before
    chain = Chain(layer, findings[0].problem.m, dtype)
    start = {key: found[key].choice for key in layer.products}
    best = refine(chain, start, {key: found[key].contenders() for key in layer.products}, say)
    for key, choice in best.items():
        if choice != found[key].choice:
            say(f"{found[key].problem.key} M={chain.rows}: in the chain {choice}")
    return [f if best.get(key, f.choice) == f.choice else alone(f, best[key], dtype) for key, f in found.items()]


def alone(finding: Finding, choice: Choice, dtype: torch.dtype) -> Finding:
    """The same problem with another choice and that one's time."""
    bench, m = Bench(finding.problem, dtype), finding.problem.m
    ours, theirs, _, _ = paired(bench.replay(m, choice), bench.replay(m, LIBRARY), 11)
    return replace(finding, choice=choice, us=ours.us, library_us=theirs.us)


def merged(path: Path, device: str, findings: Iterable[Finding]) -> dict[str, Any]:
    import triton

    data: dict[str, Any] = {"device": device, "entries": {}}
    if path.exists():
        data = json.loads(path.read_text())
    data.update(torch=torch.__version__, triton=triton.__version__, date=time.strftime("%Y-%m-%d"))
    for f in findings:
        row = {"choice": asdict(f.choice), "us": round(f.us, 2), "library_us": round(f.library_us, 2)}
        data["entries"].setdefault(f.problem.key, {})[str(f.problem.m)] = row
    return data


class Bench:
    """Weights of one shape, enough of them that none is in the L2 cache when its turn comes."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        self.k, self.n, self.fusion, self.dtype = problem.k, problem.n, problem.fusion, dtype
        copies = max(2, -(-ROTATE_BYTES // (self.k * self.n * dtype.itemsize)))
        shape = (copies, self.n, self.k)
        self.weights = torch.randn(shape, dtype=dtype, device="cuda").mul_(self.k**-0.5).unbind()
        self.norm = torch.randn(self.k, dtype=dtype, device="cuda")

    def serves(self, problem: Problem) -> bool:
        return (self.k, self.n, self.fusion) == (problem.k, problem.n, problem.fusion)

    def replay(self, m: int, choice: Choice) -> Replay:
        from diptych.kernels.triton.products import product

        x = torch.randn(m, self.k, dtype=self.dtype, device="cuda")
        residual = torch.randn(m, self.n, dtype=self.dtype, device="cuda") if self.fusion == "plain" else None
        norm = None if self.fusion == "plain" else (self.norm, 1e-5)

        def call(weight: Tensor) -> Callable[[], object]:
            gate = self.fusion == "norm_gate"
            return lambda: product(x, weight, norm=norm, gate=gate, residual=residual, choice=choice)

        rounds = max(1, 24 // len(self.weights))
        return Replay([call(w) for _ in range(rounds) for w in self.weights])

    def find(self, problem: Problem, say: Callable[[str], None]) -> Finding:
        library = self.replay(problem.m, LIBRARY)
        library_us = library.time(9).us
        times = self._race(problem.m, candidates(problem, Gpu.here()))
        leaders = [choice for _, choice in times[:1]]
        times += self._race(problem.m, [replace(c, ahead=ahead) for c in leaders for ahead in AHEAD])
        best = Finding(problem, LIBRARY, library_us, library_us)
        for _, choice in sorted(times, key=lambda t: t[0])[:3]:
            ours, theirs, ratio, _ = paired(self.replay(problem.m, choice), library, 11)
            if ratio < MARGIN and ours.us < best.us:
                best = Finding(problem, choice, ours.us, theirs.us)
        best = replace(best, times=tuple(sorted(times, key=lambda t: t[0])))
        say(f"{problem.key} M={problem.m}: {best.choice} {best.us:.1f} µs, library {best.library_us:.1f} µs")
        return best

    def _race(self, m: int, choices: list[Choice]) -> list[tuple[float, Choice]]:
        times = []
        for choice in choices:
            try:
                times.append((self.replay(m, choice).time(3).us, choice))
            except Exception as error:  # noqa: BLE001 - a candidate that does not fit this GPU is no candidate
                log.debug("%s: %s", choice, error)
        return sorted(times, key=lambda t: t[0])


def compile_all(problems: list[Problem], say: Callable[[str], None]) -> None:
    """Compiles every candidate into Triton's cache, which the timing process then reads."""
    start = time.monotonic()
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    jobs: dict[tuple[Any, ...], tuple[Problem, Choice]] = {}
    gpu = Gpu.here()
    for problem in problems:
        for choice in candidates(problem, gpu):
            rows = problem.m if choice.kind == "gemv" else max(16, 1 << (problem.m - 1).bit_length())
            jobs.setdefault((problem.key, rows, choice), (problem, choice))
    work = list(jobs.values())
    parts = [work[i::workers] for i in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, parts))
    say(f"compiled {len(jobs)} kernels in {time.monotonic() - start:.0f} s")


def _compile(jobs: list[tuple[Problem, Choice]]) -> None:
    from diptych.kernels.triton.products import product

    for problem, choice in jobs:
        dtype = getattr(torch, problem.dtype)
        x = torch.zeros(problem.m, problem.k, dtype=dtype, device="cuda")
        weight = torch.zeros(problem.n, problem.k, dtype=dtype, device="cuda")
        norm = None if problem.fusion == "plain" else (weight[0], 1e-5)
        residual = torch.zeros(problem.m, problem.n, dtype=dtype, device="cuda") if norm is None else None
        try:
            product(x, weight, norm=norm, gate=problem.fusion == "norm_gate", residual=residual, choice=choice)
        except Exception as error:  # noqa: BLE001 - the timing process meets it again and skips it
            log.debug("%s: %s", choice, error)
