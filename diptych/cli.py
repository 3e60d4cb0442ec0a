"""The command line: `diptych serve | demo | generate | chat | trace | bench | profile`.

Owns arguments, exit codes and what a terminal shows. An error of ours is one line on standard error: exit code 2 for a
configuration or model that cannot work, 1 for anything else, 130 after Ctrl-C before the service was up.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from diptych import __version__
from diptych.contract.errors import ConfigInvalid, DiptychError, ModelUnsupported, Unauthenticated
from diptych.contract.logs import log_to_stderr


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    log_to_stderr()
    args = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except DiptychError as error:
        print(f"diptych: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigInvalid | ModelUnsupported | Unauthenticated) else 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    from diptych import tuning
    from diptych.bench.commands import add_commands as add_bench
    from diptych.profile.commands import add_commands as add_profile
    from diptych.router.commands import add_commands

    parser = argparse.ArgumentParser(prog="diptych", description="Disaggregated inference for large language models.")
    parser.add_argument("--version", action="version", version=f"diptych {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    demo = commands.add_parser("demo", help="start everything with the demo model, answer some prompts, show the trace")
    demo.add_argument("--trace", type=Path, metavar="FILE", help="keep the trace in this file")
    demo.set_defaults(run=_demo)
    add_commands(commands)
    tuning.add_commands(commands)
    trace = commands.add_parser("trace", help="read a trace file")
    shown = trace.add_subparsers(required=True, metavar="ACTION").add_parser(
        "show", help="where each request's time went"
    )
    shown.add_argument("file", type=Path)
    shown.set_defaults(run=_trace_show)
    add_bench(commands)
    add_profile(commands)
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve", help="serve a model until Ctrl-C")
    serve.add_argument("--model", metavar="FOLDER_OR_HUB_ID", help="a folder, or an id that the local hub cache holds")
    serve.add_argument("--config", type=Path, metavar="FILE", help="a YAML file with any of the settings")
    serve.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, as decode.threads=4"
    )
    serve.add_argument("--roles", choices=("disaggregated", "colocated"), help="workers apart, or doing both")
    serve.add_argument("--prefill", type=int, metavar="N", help="prefill workers")
    serve.add_argument("--decode", type=int, metavar="N", help="decode workers")
    serve.add_argument("--colocated", type=int, metavar="N", help="workers that do both")
    serve.add_argument("--host", help="address of the gRPC server")
    serve.add_argument("--port", type=int, help="port of the gRPC server; 0 picks a free one")
    serve.add_argument("--name", help="the service's name in its Ray cluster")
    serve.add_argument("--ray", metavar="MODE", help="auto, local, none, or the HOST:PORT of a cluster")
    serve.add_argument("--trace", metavar="FILE", help="append each request's spans to this file, as OTLP JSON lines")
    serve.set_defaults(run=_serve)


_FLAGS = {
    "model": "model",
    "roles": "roles",
    "prefill": "prefill.count",
    "decode": "decode.count",
    "colocated": "colocated.count",
    "host": "service.host",
    "port": "service.port",
    "name": "service.name",
    "ray": "ray",
    "trace": "telemetry.file",
}
"""Convenience flags of `serve` and the settings that they are short for."""


def _serve(args: argparse.Namespace) -> int:
    from diptych.cluster.config import load_config

    flags = {setting: getattr(args, flag) for flag, setting in _FLAGS.items()}
    config = load_config(args.config, flags, args.set)
    return run_interruptible(lambda stop: _serve_until(stop, config))


async def _serve_until(stop: asyncio.Event, config: Any) -> int:
    from diptych.progress import Progress
    from diptych.serving import start_service

    with Progress() as progress:
        progress.say(f"Starting {config.model} ({config.roles}).")
        service = await start_service(config, progress.watch)
        catch_signals(stop.set)  # once more: Ray takes them when it connects
        call = f'diptych generate --address {service.address} "Hello"'
        progress.say(f"Ready: {service.model} on {service.address}. Try: {call}")
        failing = asyncio.create_task(service.failed())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
        progress.say("Stopping: running requests may finish." if stop.is_set() else failing.result())
        await service.stop(drain=stop.is_set())
        failing.cancel()
        stopping.cancel()
    return 0 if stop.is_set() else 1


def _demo(args: argparse.Namespace) -> int:
    from diptych.demo import run_demo

    return run_interruptible(lambda stop: run_demo(args.trace))


def _trace_show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from diptych.cluster.traces import show

    # Wide enough for the tables also where no terminal says how wide it is.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    return 0 if show(args.file, console) else 1


def run_interruptible(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Runs `main`; the first Ctrl-C or SIGTERM cancels it while it starts. When it has caught signals for its own event
    (`catch_signals(stop.set)`), they set that instead."""

    async def body() -> int:
        task = asyncio.current_task()
        assert task is not None
        catch_signals(task.cancel)
        return await main(asyncio.Event())

    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        return 130


def catch_signals(do: Callable[[], object]) -> None:
    """Calls `do` at Ctrl-C and SIGTERM from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, do)


if __name__ == "__main__":
    sys.exit(main())
