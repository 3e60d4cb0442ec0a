"""`diptych generate` and `diptych chat`: the gRPC client in a terminal.

An error is one line on standard error and exit code 1; Ctrl-C aborts the request (exit code 130).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from diptych.contract.errors import DiptychError
from diptych.router.client import Client, ask
from diptych.v1 import inference_pb2 as pb

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds both commands; each sets `run`, a function of the parsed arguments that returns the exit code."""
    generate = commands.add_parser("generate", help="continue a text and print the answer as it comes")
    generate.add_argument("prompt", help="the text to continue; - reads it from standard input")
    generate.add_argument("--chat", action="store_true", help="send it as a user's message through the chat template")
    generate.set_defaults(run=run_generate)
    chat = commands.add_parser("chat", help="talk to the model; an empty line or Ctrl-D ends")
    chat.set_defaults(run=run_chat)
    chat.add_argument("--system", help="instructions that come before the conversation")
    for parser in (generate, chat):
        _options(parser)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="host:port of the service (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the best token")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, metavar="S", help="makes the answer reproducible")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="the request's deadline")


def run_generate(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    said = {"messages": [{"role": "user", "content": prompt}]} if args.chat else {"text": prompt}
    return _answer(args, ask(**said, **_given(args)))[0]


def run_chat(args: argparse.Namespace) -> int:
    messages: list[dict[str, Any]] = [{"role": "system", "content": args.system}] if args.system else []
    while line := _line():
        messages.append({"role": "user", "content": line})
        code, text = _answer(args, ask(messages=messages, **_given(args)))
        if code == 1:
            return code
        messages.append({"role": "assistant", "content": text})  # what was said until Ctrl-C counts as said
    return 0


def _line() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def _given(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _answer(args: argparse.Namespace, request: pb.GenerateRequest) -> tuple[int, str]:
    """(exit code, the text that was printed)."""
    said: list[str] = []
    try:
        asyncio.run(_print_stream(args, request, said))
        code = 0
    except DiptychError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    print(flush=True)
    return code, "".join(said)


async def _print_stream(args: argparse.Namespace, request: pb.GenerateRequest, said: list[str]) -> None:
    async with Client(args.address) as client:
        async for piece in client.stream(request, timeout=args.timeout):
            said.append(piece.text)
            print(piece.text, end="", flush=True)
