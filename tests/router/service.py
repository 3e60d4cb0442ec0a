"""A router over protocol peers, with the demo model's real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path

from opentelemetry.trace import TracerProvider

from diptych.contract.limits import Limits
from diptych.router.client import Client
from diptych.router.server import RouterServer
from diptych.router.settings import RouterSettings
from diptych.router.tokenizer import Tokenizer
from tests.router.peer import SECRET, Peer, Registry

LIMITS = Limits(heartbeat=0.2, lease=1.0, handshake=1.0, drain=1.0)


@cache
def loaded(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


class Service:
    """What a test holds: the router, a client, and the peers by name."""

    def __init__(self, router: RouterServer, client: Client, registry: Registry, peers: dict[str, Peer]) -> None:
        self.router, self.client, self.registry, self.peers = router, client, registry, peers

    @property
    def prefill(self) -> Peer:
        return self.peers["prefill"]

    @property
    def decode(self) -> Peer:
        return self.peers["decode"]

    async def idle(self, limit: float = 2.0) -> None:
        """Waits until no peer works and the router has closed its books."""
        await until(lambda: not any(peer.working for peer in self.peers.values()), limit)
        await until(lambda: self.router.desk.active == 0, limit)


async def until(true: Callable[[], bool], limit: float = 2.0) -> None:
    async with asyncio.timeout(limit):
        while not true():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def service(
    model: Path,
    roles: tuple[str, ...] = ("prefill", "decode"),
    settings: RouterSettings | None = None,
    tracing: TracerProvider | None = None,
) -> AsyncIterator[Service]:
    registry = Registry()
    async with AsyncExitStack() as stack:
        peers = {role: await Peer(registry, role.rstrip("0123456789")).start() for role in roles}  # type: ignore[arg-type]
        for peer in peers.values():
            stack.push_async_callback(peer.kill)
        for decode in [peer for peer in peers.values() if peer.role == "decode"]:
            decode.link(*[peer for peer in peers.values() if peer.role == "prefill"])
        router = RouterServer(
            model, registry, SECRET, settings or RouterSettings(limits=LIMITS), tracing, loaded(model)
        )
        port = await router.start()
        stack.push_async_callback(router.stop, 0.2)
        client = await stack.enter_async_context(Client(f"127.0.0.1:{port}"))
        await until(lambda: len(router.desk.sessions.open()) == len(peers))
        yield Service(router, client, registry, peers)
