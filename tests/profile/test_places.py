"""What the profile takes apart is there under the name that it replaces, on a GPU too."""

from __future__ import annotations

import importlib

import pytest

from diptych.profile.ours import MOE_PARTS


@pytest.mark.parametrize("device", sorted(MOE_PARTS))
def test_the_parts_of_a_mixture(device: str) -> None:
    where, parts = MOE_PARTS[device]
    module = importlib.import_module(where)
    assert [name for name in parts if not callable(getattr(module, name, None))] == []
