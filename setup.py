"""Adds one step to the build: the protocol's code is generated into `diptych/v1`. All else is in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithProtocol(build_py):
    """Generates into the source tree (an editable install imports it from there), then collects modules as usual."""

    def run(self) -> None:
        runpy.run_path(str(HERE / "proto" / "generate.py"))["generate"](HERE)
        super().run()


setup(cmdclass={"build_py": BuildWithProtocol})
