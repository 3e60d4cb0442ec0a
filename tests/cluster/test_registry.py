"""The worker table's rules on a hand-moved clock, and the local registry over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import msgspec
import pytest

from diptych.cluster import registry as registry_module
from diptych.cluster.registry import SERVICE, RegistryClient, RegistryServer
from diptych.cluster.table import WorkerTable
from diptych.contract.errors import Internal
from diptych.contract.limits import Limits
from diptych.contract.wire import WorkerInfo

SECRET = b"s" * 32


def info(worker_id: str, total_blocks: int = 8) -> WorkerInfo:
    return WorkerInfo(
        id=worker_id,
        role="prefill",
        address="127.0.0.1:1",
        links=("127.0.0.1:2",),
        epoch="0" * 16,
        digest="d",
        pid=1,
        engine_pids=(2,),
        block_size=16,
        total_blocks=total_blocks,
        max_context=64,
    )


def test_version_rises_with_changes_only() -> None:
    table = WorkerTable(drop_after=10.0)
    table.renew(info("a"), now=0.0)
    first = table.table(0.0)
    table.renew(info("a"), now=5.0)
    assert table.table(5.0) == first
    table.renew(info("a", total_blocks=9), now=6.0)
    table.renew(info("b"), now=6.0)
    assert table.table(6.0).version == first.version + 2
    table.remove("nobody", now=6.0)
    assert table.table(6.0).version == first.version + 2


def test_an_entry_that_is_not_renewed_is_dropped() -> None:
    table = WorkerTable(drop_after=10.0)
    table.renew(info("a"), now=0.0)
    table.renew(info("b"), now=8.0)
    assert [worker.id for worker in table.table(10.0).workers] == ["a", "b"]
    late = table.table(10.1)
    assert [worker.id for worker in late.workers] == ["b"]
    assert late.version == 3


def test_a_restarted_owner_goes_on_above_its_predecessor() -> None:
    table = WorkerTable(drop_after=10.0, version=1000)
    table.renew(info("a"), now=0.0)
    assert table.table(0.0).version == 1001


@asynccontextmanager
async def running(limits: Limits | None = None) -> AsyncIterator[RegistryServer]:
    server = RegistryServer(SECRET, limits or Limits())
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_renew_table_remove() -> None:
    async with running() as server:
        client = RegistryClient(server.address, SECRET)
        await client.renew(info("a"))
        await client.renew(info("b"))
        assert await client.table() == server.table()
        await client.remove("a")
        await client.remove("a")
        assert [worker.id for worker in (await client.table()).workers] == ["b"]
        await client.close()


async def test_a_wrong_secret_is_refused_on_both_ends() -> None:
    async with running() as server:
        liar = RegistryClient(server.address, b"x" * 32)
        with pytest.raises(Internal, match="does not know the caller"):
            await liar.renew(info("a"))
        assert server.table().workers == ()
        await liar.close()


async def test_a_replay_and_noise_are_refused() -> None:
    async with running() as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Renew", request_serializer=None, response_deserializer=None)
        body = msgspec.msgpack.encode(info("a"))
        sealed = registry_module._seal(SECRET, "request", "Renew", b"n" * 16, body)
        await call(sealed, timeout=5)
        for bad in (sealed, b"", b"\xff" * 40, registry_module._seal(SECRET, "request", "Table", b"m" * 16, body)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(bad, timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_registry_that_is_gone_is_an_error_within_the_limit() -> None:
    async with running() as server:
        client = RegistryClient(server.address, SECRET, limit=0.5)
        await client.table()
    with pytest.raises(Internal, match="does not answer"):
        await client.table()
    await client.close()
