"""Fixtures of the router's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.router.tokenizer import Tokenizer
from tests.router.service import loaded


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Tokenizer:
    return loaded(demo_model)
