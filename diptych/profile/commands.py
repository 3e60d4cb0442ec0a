"""`diptych profile`: arguments to a plan, results to tables, plots and a line of JSON, and what becomes of an
interruption."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from diptych.bench.shapes import SHAPES, varied, write_shape
from diptych.contract.errors import ConfigInvalid

if TYPE_CHECKING:
    import torch

    from diptych.workers.model.config import ModelConfig

FIGURES = {
    "operators": "figures 2 and 15: a step's operators, and their shares against context",
    "latency": "figure 3: latencies and memory on one time axis",
    "cache": "the same generation with and without a KV cache",
    "mha": "a multi-head model beside the grouped-query one (random weights)",
    "softmax": "the range of attention scores before softmax (real weights)",
    "table6": "tokens/s at batch 1, 1,024 in, 128 out",
}
DEFAULT = ("operators", "latency", "cache")
ENGINES = ("diptych", "transformers")
NOT_YET = ("baichuan", "chatglm")


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    shown = "; ".join(f"{name}: {what}" for name, what in FIGURES.items())
    parser = commands.add_parser(
        "profile", help="what a model costs on this machine, operator by operator", epilog=f"Sets to show: {shown}."
    )
    parser.add_argument("model", metavar="MODEL", help=f"a folder, or a shape with random weights: {', '.join(SHAPES)}")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: both")
    parser.add_argument("--context", default="128,512", metavar="N[,N…]", help="prompt tokens (default: %(default)s)")
    parser.add_argument("--batch", default="1", metavar="N[,N…]", help="sequences at once (default: %(default)s)")
    parser.add_argument("--new", type=int, default=32, metavar="N", help="generated tokens of a latency run")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="steps of each kind")
    parser.add_argument("--show", default=",".join(DEFAULT), metavar="SET[,SET…]", help="what to measure, or all")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="default: float32 on a CPU, the model's on a GPU")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument("--layers", type=int, metavar="N", help="fewer layers than the shape has")
    parser.add_argument("--threads", type=int, default=2, help="torch threads on a CPU")
    parser.add_argument("--out", type=Path, metavar="PLACE", help="keep JSON and plots there, or in X.json JSON alone")
    parser.set_defaults(run=run_profile)


@dataclass(frozen=True)
class Plan:
    """What to measure, checked."""

    folder: Path
    config: ModelConfig
    form: str
    engines: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    new: int
    rounds: int
    shown: frozenset[str]
    device: torch.device
    dtype: torch.dtype

    @property
    def steps(self) -> int:
        """Of the progress bar."""
        runs = len(self.contexts) * len(self.batches)
        each = runs * (2 * ("operators" in self.shown) + ("latency" in self.shown)) + ("cache" in self.shown)
        return (
            1
            + each * len(self.engines)
            + sum(name in self.shown for name in ("softmax",))
            + (2 * len(self.contexts) if "mha" in self.shown else 0)
            + len(self.engines) * ("table6" in self.shown)
        )


def run_profile(args: argparse.Namespace) -> int:
    # As in an engine: read once, when torch loads its threads. At a barrier a thread spins a little, then sleeps.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    import torch

    from diptych.bench.about import interruptible, keep, result_line
    from diptych.profile import report
    from diptych.profile.measure import measure

    torch.set_num_threads(args.threads)
    failure: Exception | None = None
    found: dict[str, Any] = {"model": Path(args.model).name, "dtype": "", "threads": args.threads, "interrupted": False}
    with _folder(args) as (folder, form):
        plan = _plan(args, folder, form)
        try:
            with interruptible():
                bar = _Bar(plan.steps, found.setdefault("stages", []))
                with bar.progress:
                    measure(plan, found, bar.next)
        except KeyboardInterrupt:
            found["interrupted"] = True
        except Exception as error:  # noqa: BLE001 - raised again below: what was measured before it is kept
            found["failed"], failure = f"{type(error).__name__}: {error}", error
    print(report.tables(found))
    line = result_line("profile", args.device, **found)
    if args.out:
        path = args.out if args.out.suffix == ".json" else args.out / "profile.json"
        keep(path.parent, path.stem, line)
        if path is not args.out:
            report.draw(args.out, found)
        line = result_line("profile", args.device, **report.summary(found), result=str(path))
    print(line)
    if failure is not None:
        raise failure
    return 130 if found["interrupted"] else 0


@contextmanager
def _folder(args: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """The model's folder and how its weights come."""
    from diptych.cluster.preflight import model_folder

    if any(name in args.model.lower() for name in NOT_YET) and not Path(args.model).exists():
        raise ConfigInvalid(
            f"{args.model} is not supported yet: Baichuan2 and ChatGLM, two of the survey's models, are missing."
        )
    with tempfile.TemporaryDirectory(prefix="diptych-profile-") as made:
        if args.model in SHAPES:
            yield write_shape(args.model, Path(made), args.layers), "dummy"
            return
        folder = model_folder(args.model)
        if args.layers:
            if args.load_format != "dummy":
                raise ConfigInvalid("--layers needs random weights: --load-format dummy.")
            folder = varied(folder, Path(made), num_hidden_layers=args.layers)
        yield folder, args.load_format


def _plan(args: argparse.Namespace, folder: Path, form: str) -> Plan:
    import torch

    from diptych.profile import anatomy
    from diptych.workers.model.loader import dtype_of

    shown = frozenset(FIGURES if args.show == "all" else args.show.split(","))
    if unknown := sorted(shown - set(FIGURES)):
        raise ConfigInvalid(f"--show: there is no {unknown[0]!r}; there are {', '.join(FIGURES)}, and all.")
    if "softmax" in shown and form == "dummy":
        if args.show != "all":
            raise ConfigInvalid("Random weights cannot show the range of attention scores: softmax needs real ones.")
        shown -= {"softmax"}
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigInvalid("This machine has no CUDA device that PyTorch can use; leave --device at cpu.")
    config, device = _config(folder), torch.device(args.device)
    contexts, batches = (_numbers(name, getattr(args, name)) for name in ("context", "batch"))
    if min(args.new, args.rounds) < 2:
        raise ConfigInvalid("--new and --rounds must be 2 or more.")
    room = config.max_positions - max(args.new, anatomy.room(args.rounds))
    if max(contexts) > room:
        raise ConfigInvalid(f"--context {max(contexts)} is too long: the model leaves {room} tokens for prompts here.")
    engines = tuple(args.engine or ENGINES)
    return Plan(
        folder, config, form, engines, contexts, batches, args.new, args.rounds, shown, device,
        dtype_of(args.dtype, config, device),
    )  # fmt: skip


def _config(folder: Path) -> ModelConfig:
    from diptych.contract.errors import ModelUnsupported
    from diptych.workers.model.config import ModelConfig

    try:
        return ModelConfig.from_folder(folder)
    except ModelUnsupported as error:
        if any(name in str(error).lower() for name in NOT_YET):
            raise ModelUnsupported(f"{error} Baichuan2 and ChatGLM are not supported yet.") from None
        raise


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigInvalid(f"--{name} {text!r} is not a list of whole numbers above 0, as 128,2048.")
    return found


@dataclass
class _Bar:
    """How far the plan is, on a terminal; a line a step elsewhere. begun: [seconds, step], so that a result shows what
    takes how long."""

    total: int
    begun: list[tuple[float, str]]
    progress: Any = field(init=False)

    def __post_init__(self) -> None:
        self.started = perf_counter()
        self.progress = nullcontext()
        if sys.stderr.isatty():
            self._draw()

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.progress.add_task("Ceilings of this machine", total=self.total)

    def next(self, what: str) -> None:
        self.begun.append((round(perf_counter() - self.started, 1), what))
        if sys.stderr.isatty():
            self.progress.update(self.task, advance=1, description=what)
        else:
            print(f"{self.begun[-1][0]:7.1f} s  {what}", file=sys.stderr, flush=True)
