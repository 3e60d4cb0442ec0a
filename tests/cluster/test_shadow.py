"""A folder that holds a clone named like the package must not shadow the installed one in any process of a service."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.support.ray_lock import ray_lock


@pytest.mark.ray
@pytest.mark.parametrize("ray", ["local", "none"])
async def test_serving_from_the_parent_of_a_clone(demo_model: Path, tmp_path: Path, ray: str) -> None:
    (tmp_path / "diptych" / "router").mkdir(parents=True)
    model = os.path.relpath(demo_model, tmp_path)  # as a user would write it
    command = [str(Path(sys.executable).with_name("diptych")), "serve", "--model", model, "--ray", ray, "--port", "0"]
    small = [f"--set={role}.cache_blocks=64" for role in ("prefill", "decode")]
    with ray_lock():
        process = await asyncio.create_subprocess_exec(
            *command, *small, cwd=tmp_path, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        assert process.stderr is not None
        told = ""
        try:
            async with asyncio.timeout(100):
                while "Ready:" not in told and (line := await process.stderr.readline()):
                    told += line.decode()
            assert "Ready:" in told, told
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.communicate(), 30)
