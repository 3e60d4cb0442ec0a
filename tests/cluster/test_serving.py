"""What putting a service together says when a part does not come up."""

from __future__ import annotations

import asyncio

import pytest

from diptych.cluster.config import validate
from diptych.contract.errors import Internal
from diptych.serving import _within_start


async def test_a_start_that_takes_too_long_is_a_sentence() -> None:
    config = validate({"model": "m", "limits": {"group_start": 0.2, "handshake": 0.1}})
    with pytest.raises(Internal, match=r"found no workers within limits\.group_start \(0\.2 s\)"):
        async with _within_start(config, "The router found no workers"):
            await asyncio.Event().wait()
