"""The service under test: one that runs somewhere, or one started here for as long as it is measured."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from diptych.bench.priority import as_others
from diptych.contract.errors import ConfigInvalid, Internal
from diptych.router.client import Client

_START, _STOP = 600.0, 60.0


@dataclass(frozen=True)
class Target:
    """address: of a running service; else `diptych serve` is started with `arguments`. Ray carries no request, so
    that service runs without it."""

    name: str
    address: str = ""
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, model: str | None) -> Target:
        """[NAME:=]HOST:PORT, or [NAME:=]SETTING=VALUE,… of `diptych serve`."""
        name, named, rest = text.partition(":=")
        name, rest = (name, rest) if named else (text, text)
        if "=" not in rest and re.search(r":\d+$", rest):
            return cls(name, rest)
        if model is None:
            raise ConfigInvalid(f"Configuration {text!r} is to be started here: name its model with --model.")
        settings = [part.strip() for part in rest.split(",") if part.strip()]
        if bad := [part for part in settings if "=" not in part]:
            raise ConfigInvalid(f"Configuration {text!r}: {bad[0]!r} is neither SETTING=VALUE nor HOST:PORT.")
        return cls(name, "", ("--model", model, *(f"--set={part}" for part in settings)))

    @classmethod
    def swept(cls, text: str, model: str | None) -> list[Target]:
        """As `parse`, but a setting may have several values, `SETTING=A|B|C`: a target each, named by them."""
        name, named, rest = text.partition(":=")
        options = [_options(part) for part in (rest if named else text).split(",")]
        found = []
        for settings in itertools.product(*options):
            several = [setting.partition("=")[2] for setting, some in zip(settings, options, strict=True) if some[1:]]
            label = " ".join([name, *several]) if named else ",".join(settings)
            found.append(cls.parse(f"{label}:={','.join(settings)}", model))
        return found


def _options(part: str) -> list[str]:
    """Of `SETTING=A|B` both settings."""
    first, *others = part.split("|")
    return [first, *(f"{first.partition('=')[0]}={other}" for other in others)]


@asynccontextmanager
async def reached(target: Target) -> AsyncIterator[str]:
    """The address of the target, which answers there while the block runs. Raises a `DiptychError` when it does not."""
    if target.address:
        yield target.address
        return
    command = ("-m", "diptych.cli", "serve", "--ray", "none", "--port", "0", *target.arguments)
    # A session of its own: Ctrl-C must not stop it before what it was measured with is kept.
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        env=os.environ | {"GOMP_SPINCOUNT": "1000"}, start_new_session=True, preexec_fn=as_others,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        address = await asyncio.wait_for(_ready(process.stderr, target), _START)
        drain = asyncio.create_task(process.stderr.read())
        yield address
        drain.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), _STOP)


async def _ready(said: asyncio.StreamReader, target: Target) -> str:
    last: list[str] = []
    while line := (await said.readline()).decode(errors="replace"):
        if found := re.search(r"^Ready: .* on (\S+)\. Try:", line):
            return found[1]
        last = [*last[-5:], line.strip()]
    reason = next((line.removeprefix("diptych: ") for line in reversed(last) if line.startswith("diptych: ")), "")
    if reason:
        raise ConfigInvalid(f"{target.name}: {reason}")
    raise Internal(f"{target.name}: the service ended while it started: {' '.join(last)[-300:]}")


@dataclass(frozen=True)
class Served:
    vocab: int
    max_context: int
    model: str


async def served(address: str) -> Served:
    """What the service says of its model. Raises `WorkerLost` when nobody answers there."""
    async with Client(address) as client:
        info = await client.model_info()
    return Served(info.vocabulary, info.max_context, info.model)


def arguments_of(model: str, settings: Sequence[str]) -> tuple[str, ...]:
    return ("--model", model, *(f"--set={setting}" for setting in settings))
