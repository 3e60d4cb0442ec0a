"""`diptych generate` and `diptych chat`, as a person runs them."""

from __future__ import annotations

import argparse
import asyncio
import io
import signal
import sys
from pathlib import Path

import pytest

from diptych.router.commands import add_commands
from diptych.router.tokenizer import Tokenizer
from tests.router.peer import rule
from tests.router.service import service, until


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    return parser.parse_args(words)


async def test_generate_prints_the_answer(
    demo_model: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with service(demo_model) as s:
        args = parse("generate", "The capital", "--address", s.client.address, "--max-tokens", "5")
        assert await asyncio.to_thread(args.run, args) == 0
        prompt = tokenizer.encode("The capital")
        said = b"".join(tokenizer.pieces[rule(prompt, position)] for position in range(5)).decode("utf-8", "replace")
        assert capsys.readouterr().out == said + "\n"


async def test_an_error_is_one_line_and_code_1(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with service(demo_model) as s:
        args = parse("generate", "x", "--address", s.client.address, "--temperature", "-1")
        assert await asyncio.to_thread(args.run, args) == 1
    assert capsys.readouterr().err.count("\n") == 1
    args = parse("generate", "x", "--address", "127.0.0.1:1", "--timeout", "5")
    assert await asyncio.to_thread(args.run, args) == 1
    error = capsys.readouterr().err
    assert "No router answers at 127.0.0.1:1" in error
    assert error.count("\n") == 1


async def test_chat_remembers(
    demo_model: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAgain\n"))
    async with service(demo_model) as s:
        args = parse("chat", "--address", s.client.address, "--max-tokens", "4", "--system", "Be brief.")
        assert await asyncio.to_thread(args.run, args) == 0
        prompts = [tokenizer.text(m.request.prompt) for m in s.decode.received if hasattr(m, "request")]
        assert "Be brief." in prompts[0]
        assert "Hello" in prompts[1]
        assert prompts[1].count("<|im_start|>assistant") == 2
        assert prompts[1].endswith("Again<|im_end|>\n<|im_start|>assistant\n")


async def test_ctrl_c_aborts(demo_model: Path) -> None:
    async with service(demo_model) as s:
        s.decode.pace = 0.02
        code = (
            "import argparse, sys\nfrom diptych.router.commands import add_commands\n"
            "parser = argparse.ArgumentParser(); add_commands(parser.add_subparsers())\n"
            "args = parser.parse_args(sys.argv[1:]); sys.exit(args.run(args))"
        )
        words = ["generate", "x", "--address", s.client.address, "--max-tokens", "5000"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await until(lambda: bool(s.decode.working), 20)
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), 10)
        assert (process.returncode, errors) == (130, b"")
        await s.idle()
