"""Fixtures that several rooms' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.cluster.demo_model import ensure_demo_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in fp32, converted once into the user's cache."""
    return ensure_demo_model()
