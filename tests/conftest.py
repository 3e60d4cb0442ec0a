"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Read once, when torch loads its threads, here and in every process that a test starts. At a barrier a thread spins a
# little and then sleeps: with the default, two engines on two cores spend their time waiting for each other's spinning
# (a decode step of 400 ms instead of 60).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch

# Read when a kernel is decorated: before the first module that defines one is collected. With a GPU nothing is
# interpreted, and tests/gpu runs the same cases.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from safetensors import safe_open
from safetensors.torch import save_file

from diptych.cluster.demo_model import ensure_demo_model

SHALLOW = 4  # layers


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in fp32, converted once into the user's cache."""
    return ensure_demo_model()


@pytest.fixture(scope="session")
def shallow_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's first layers: all that it is but what it says, at a third of the time. For tests of what becomes
    of a request, whatever its text."""
    folder = tmp_path_factory.mktemp("shallow")
    for file in demo_model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file)
    config = json.loads((demo_model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": SHALLOW}))
    deeper = tuple(f"model.layers.{number}." for number in range(SHALLOW, config["num_hidden_layers"]))
    with safe_open(demo_model / "model.safetensors", framework="pt") as whole:
        kept = {name: whole.get_tensor(name) for name in whole.keys() if not name.startswith(deeper)}  # noqa: SIM118
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
