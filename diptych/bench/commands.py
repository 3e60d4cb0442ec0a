"""The command line of `diptych bench`: arguments to plans, results to tables, plots and the last line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

from diptych.bench import compare as comparing
from diptych.bench import plots, tables
from diptych.bench.about import keep, result_line
from diptych.bench.conclusion import conclusion, lines_crossing
from diptych.bench.priority import ahead
from diptych.bench.serve import Bench, Load, Workload, bench, search, sweep
from diptych.bench.service import Target, arguments_of
from diptych.bench.shapes import SHAPES
from diptych.bench.stats import Objective
from diptych.contract.errors import ConfigInvalid, DiptychError
from diptych.router.commands import DEFAULT_ADDRESS


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `bench serve` and `bench engine`."""
    made = commands.add_parser("bench", help="measure a service, or an engine alone")
    kinds = made.add_subparsers(required=True, metavar="WHAT")
    serve = kinds.add_parser("serve", help="a service, as its clients see it")
    _arguments(serve)
    serve.set_defaults(run=run_serve)
    engine = kinds.add_parser("engine", help="the engine's loop in one process, without router and network")
    _engine_arguments(engine)
    engine.set_defaults(run=_run_engine)


def _run_engine(args: argparse.Namespace) -> int:
    # As in an engine process: read once, when torch loads its threads. A thread spins a little, then sleeps.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from diptych.bench.engine import run_engine

    return run_engine(args)


def _engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"a folder, or a shape with random weights: {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--rows", default="1x1024x128", metavar="BxLxN,…", help="sequences x prompt x generated tokens")
    parser.add_argument("--rounds", type=_count, default=3)
    parser.add_argument("--budget", type=_count, default=8192, help="query tokens in one step")
    parser.add_argument("--context", type=_count, default=8192, help="the longest sequence")
    parser.add_argument("--cache-bytes", type=int, default=0, help="of the KV cache; 0 takes the engine's default")
    parser.add_argument("--layers", type=_count, help="fewer layers of a shape, to try it on a CPU")
    parser.add_argument("--threads", type=_count, default=2, help="torch threads on a CPU")
    parser.add_argument("--no-graphs", action="store_true", help="launch each kernel of a decode step by itself")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the JSON there (or FILE.json)")


def _arguments(parser: argparse.ArgumentParser) -> None:
    service = parser.add_argument_group("the service")
    service.add_argument("--address", metavar="HOST:PORT", help=f"one that runs (default: {DEFAULT_ADDRESS})")
    service.add_argument("--model", metavar="FOLDER", help="start one with this model for the run instead")
    service.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of that service")
    work = parser.add_argument_group("what is asked").add_mutually_exclusive_group()
    work.add_argument("--lengths", action="append", metavar="PROMPTxNEW", help="tokens, as 128x64 or 100-200x16-32")
    work.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines: "prompt" or "tokens", and "max_tokens"')
    work.add_argument("--trace", type=Path, metavar="FILE", help="Azure's CSV or Mooncake's JSON lines")
    parser.add_argument("--shrink", type=_positive, default=1.0, metavar="F", help="divide a trace's lengths by F")
    parser.add_argument("--turns", type=_count, default=1, metavar="N", help="turns of each chat")
    parser.add_argument("--think", type=float, default=0.0, metavar="SECONDS", help="between an answer and a next turn")
    parser.add_argument("--requests", type=_count, default=100, metavar="N", help="chats of a run")
    parser.add_argument("--warmup", type=int, default=4, metavar="N", help="chats before, not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=_positive, default=600.0, metavar="SECONDS", help="of a request")
    load = parser.add_argument_group("how it comes").add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_levels, metavar="N[,N…]", help="closed loop: so many chats at once")
    load.add_argument("--rate", type=_levels, metavar="R[,R…]", help="open loop: Poisson, R chats a second")
    load.add_argument("--recorded", type=_levels, metavar="S[,S…]", help="open loop: as recorded, S times as fast")
    parser.add_argument("--objective", metavar="ttft=500ms,…", help="limits of ttft, tpot, itl, e2e: counts goodput")
    parser.add_argument("--search", action="store_true", help="search for the highest load that keeps the objective")
    parser.add_argument("--share", type=float, default=0.9, help="of requests that must meet it (default: %(default)s)")
    parser.add_argument(
        "--compare", nargs="+", metavar="CONFIGURATION",
        help="services by turns: each [NAME:=]HOST:PORT or [NAME:=]SETTING=VALUE,… (with --model); A|B as VALUE: both",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=_count, metavar="N", help="of a comparison; default: the fewest that can show p ≤ 0.05"
    )
    parser.add_argument("--self-test", action="store_true", help="the load generator against a stub")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep requests, JSON and plots there")


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def _levels(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


Body = Callable[[asyncio.Event], Coroutine[Any, Any, dict[str, Any]]]


def run_serve(args: argparse.Namespace) -> int:
    if args.self_test:
        from diptych.bench.selftest import self_test

        with ahead() as scheduling:
            found = asyncio.run(self_test()) | {"scheduling": scheduling}
        print(tables.self_test(found))
        return _finish(args, "bench-self-test", found)
    if args.search and not args.objective:
        raise ConfigInvalid("--search needs the objective to keep: --objective ttft=500ms,tpot=50ms.")
    objective = Objective.parse(args.objective) if args.objective else None
    loads = _loads(args)
    if args.compare:
        return _run(args, "bench-compare", lambda stop: _compare(args, loads, objective, stop))
    return _run(args, "bench-serve", lambda stop: _serve(args, loads, objective, stop))


def _run(args: argparse.Namespace, name: str, body: Body) -> int:
    """Ctrl-C ends the run, not the report; a second one ends that too."""

    async def main() -> dict[str, Any]:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def interrupt() -> None:
            print("Interrupted: what was measured is kept.", file=sys.stderr)
            stop.set()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        return {**await body(stop), "interrupted": stop.is_set()}

    with ahead() as scheduling:
        found = asyncio.run(main()) | {"scheduling": scheduling}
    return _finish(args, name, found) or (130 if found["interrupted"] else 0)


def _finish(args: argparse.Namespace, name: str, found: dict[str, Any]) -> int:
    line = result_line(name, **found)
    if args.out:
        keep(args.out, name, line)
        if plots.can_draw():
            tables.draw(args.out, name, found)
    print(line)
    return 0


def _workloads(args: argparse.Namespace) -> list[Workload]:
    shared = {"count": args.requests, "turns": args.turns, "think": args.think, "seed": args.seed}
    if args.trace:
        return [Workload(trace=args.trace, shrink=args.shrink, **shared)]
    if args.prompts:
        return [Workload(prompts=args.prompts, **shared)]
    return [Workload(lengths=spec, **shared) for spec in args.lengths or ["128x64"]]


def _loads(args: argparse.Namespace) -> list[Load]:
    if args.rate:
        return [Load(rate=rate) for rate in args.rate]
    if args.recorded:
        if not args.trace:
            raise ConfigInvalid("--recorded replays the times of a trace: name one with --trace.")
        return [Load(scale=scale) for scale in args.recorded]
    return [Load(concurrency=round(level)) for level in args.concurrency or [1.0]]


def _target(args: argparse.Namespace) -> Target:
    if args.model and args.address:
        raise ConfigInvalid("Name either --address, a service that runs, or --model, to start one.")
    if args.model:
        return Target("service", "", arguments_of(args.model, args.set))
    return Target("service", args.address or DEFAULT_ADDRESS)


@asynccontextmanager
async def _log(args: argparse.Namespace) -> AsyncIterator[TextIO | None]:
    if not args.out:
        yield None
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "requests.jsonl").open("w") as file:
        yield file


async def _serve(
    args: argparse.Namespace, loads: list[Load], objective: Objective | None, stop: asyncio.Event
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"rows": rows}

    def told(row: dict[str, Any]) -> None:
        rows.append(row)
        print(tables.row(row), flush=True)

    async with _log(args) as log:
        for workload in _workloads(args):
            options = {"warmup": args.warmup, "timeout": args.timeout, "log": log}
            async with bench(_target(args), workload, stop, **options) as made:
                print(f"{workload}, {made.workload.count} chats a run\n{tables.HEAD}", flush=True)
                before = len(rows)
                with _kept_at_the_end(stop):
                    if args.search and objective:
                        found["search"] = await search(made, loads[0], objective, args.share, told)
                        print(tables.searched(found["search"]))
                    else:
                        await sweep(made, loads, objective, told)
                for row in rows[before:]:
                    row |= {"workload": str(workload), "left_out": made.left_out}
    return found | {"objective": objective.limits if objective else None}


@contextlib.contextmanager
def _kept_at_the_end(stop: asyncio.Event) -> Any:
    """An error after an interruption is the interruption's own."""
    try:
        yield
    except DiptychError:
        if not stop.is_set():
            raise


async def _compare(
    args: argparse.Namespace, loads: list[Load], objective: Objective | None, stop: asyncio.Event
) -> dict[str, Any]:
    """All services run all the time; only one is under load, and an idle one waits without working."""
    targets = [target for text in args.compare for target in Target.swept(text, args.model)]
    names = [target.name for target in targets]
    if len(names) < 2:
        raise ConfigInvalid(f"A comparison needs two configurations; there is only {names[0]!r}.")
    if same := [name for name in names if names.count(name) > 1]:
        raise ConfigInvalid(f"Several configurations are called {same[0]!r}; give them names, as a:={same[0]}.")
    count = args.rounds or comparing.enough_rounds(len(names))
    if warning := comparing.too_few(len(names), count):
        print(warning, file=sys.stderr)
    rounds: list[dict[str, Any]] = []
    cells: list[comparing.Cell] = []

    def told(row: dict[str, Any]) -> None:
        rounds.append(row)
        print(tables.row({**row, "load": f"{row['configuration']}, {row['load']}"}), flush=True)

    async with _log(args) as log, AsyncExitStack() as stack:
        options = {"warmup": args.warmup, "timeout": args.timeout, "log": log}
        workloads = _workloads(args)
        sides: list[Bench] = []
        for target in targets:
            sides.append(await stack.enter_async_context(bench(target, workloads[0], stop, **options)))
        for workload in workloads:
            print(f"{workload}\n{tables.HEAD}", flush=True)
            for side in sides:
                side.workload = workload
            cells += await comparing.compare(sides, names, loads, count, objective, told)
            if stop.is_set():
                break
    said = [warning] * bool(warning) + conclusion(cells, names)
    print(*(tables.verdicts(cell, names) for cell in cells), *said, sep="\n")
    return _compared(cells, names, rounds, said)


def _compared(
    cells: Sequence[comparing.Cell], names: Sequence[str], rounds: list[dict[str, Any]], said: list[str]
) -> dict[str, Any]:
    rows = [
        {"workload": cell.workload, "prompt_share": round(cell.share, 4), "load": str(cell.load),
         "level": cell.load.level, "verdicts": cell.verdicts(names)}
        for cell in cells
    ]  # fmt: skip
    lines = [
        {"of": what, "a": names[a], "b": names[b], "at": found} for what, (a, b), found in lines_crossing(cells, names)
    ]
    return {
        "configurations": list(names), "cells": rows, "rounds": rounds, "conclusion": said, "crossings": lines,
    }  # fmt: skip
