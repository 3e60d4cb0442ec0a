"""What a result must say of itself: commit, date, versions, machine. Owns the form of results: one JSON line."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "grpcio", "triton")


def about(device: str = "cpu") -> dict[str, Any]:
    """load_average: of the last minute, now: whether others used the machine too."""
    return {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "machine": _machine(device),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """Of the checkout that this code runs from, "+" after it when files were changed since; else Diptych's version."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + ("+" if commit and git("status", "--porcelain", "-uno") else "")
    except OSError:  # no git here
        return ""


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"{_processor() or platform.machine()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt` too while the block runs, so that either keeps what was measured."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def result_line(benchmark: str, device: str = "cpu", **results: Any) -> str:
    """The one line of JSON that every measurement ends with."""
    return json.dumps({"benchmark": benchmark, **about(device), **results})


def keep(folder: Path, name: str, line: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(line + "\n")
