"""The services that the tests of this folder share: one with prefill and decode apart, one whose worker does both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from diptych.router.client import Client
from tests.support.serving import Running, running, small


@pytest.fixture(scope="session")
def apart(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One prefill and one decode worker."""
    with running(demo_model, tmp_path_factory.mktemp("apart"), *small()) as service:
        yield service


@pytest.fixture(scope="session")
def colocated(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The baseline. Its chunks are small and no multiple of a block: equal answers say something about those too."""
    arguments = small(colocated__token_budget=24, colocated__max_batch=16)
    with running(demo_model, tmp_path_factory.mktemp("colocated"), "--roles", "colocated", *arguments) as service:
        yield service


@pytest.fixture
async def client(apart: Running) -> AsyncIterator[Client]:
    """A client of the service with the roles apart."""
    async with Client(apart.address) as client:
        yield client


@pytest.fixture(params=["apart", "colocated"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client of each service in turn."""
    service: Running = request.getfixturevalue(request.param)
    async with Client(service.address) as client:
        yield client
