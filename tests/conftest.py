"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import os
from pathlib import Path

# Read once, when torch loads its threads, here and in every process that a test starts. At a barrier a thread spins a
# little and then sleeps: with the default, two engines on two cores spend their time waiting for each other's spinning
# (a decode step of 400 ms instead of 60).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Where another process runs tests beside this one, a core is each one's share.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# Read when a kernel is decorated: before the first module that defines one is collected. With a GPU nothing is
# interpreted, and tests/gpu runs the same cases.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from diptych.cluster.demo_model import ensure_demo_model
from tests.support.shallow import make_shallow


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in fp32, converted once into the user's cache."""
    return ensure_demo_model()


@pytest.fixture(scope="session")
def shallow_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo model's first layers."""
    return make_shallow(demo_model, tmp_path_factory.mktemp("shallow"))
