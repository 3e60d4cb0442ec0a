"""Every operator at one small shape under compute-sanitizer: no access outside what is allocated, no misaligned one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diptych.kernels.triton.streamed import can_stream
from tests.gpu.small_shapes import CASES, HOPPER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]


def sanitizer() -> str | None:
    """On PATH, or from NVIDIA's package (the `sanitizer` extra)."""
    found = shutil.which("compute-sanitizer")
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package and not found else ():
        for path in Path(folder).glob("cu*/bin/compute-sanitizer"):
            found = str(path) if os.access(path, os.X_OK) else found
    return found


def test_operators_stay_within_their_memory() -> None:
    tool = sanitizer()
    if tool is None:
        pytest.skip("compute-sanitizer is not here (pip install 'diptych[sanitizer]')")
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.small_shapes"],
        cwd=ROOT,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # each tensor an allocation of its own
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    expected = CASES | (HOPPER if can_stream(torch.device("cuda", 0)) else {})
    assert set(expected) <= set(done.stdout.splitlines())
    assert "ERROR SUMMARY: 0 errors" in done.stdout
