"""Fixtures of the router's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.router.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)
