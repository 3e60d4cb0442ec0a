"""Every limit on a wait is seen to fire: a peer that is stopped rather than dead, a stranger that says nothing, a
registry that is gone, an engine that makes no progress. Limits are shrunk, never slept through for luck."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from diptych.cluster.local import LocalCluster
from diptych.contract.limits import Limits
from diptych.contract.registry import Table
from diptych.contract.wire import Generate, Prefill, Reserve, Start, WorkerInfo
from diptych.workers.settings import WorkerSettings
from diptych.workers.worker import Worker
from tests.support.probe import LIMIT, Probe
from tests.system.test_walking_path import SECRET, TOKEN_BYTES, group, infos, linked, long_prompt, request

QUICK = Limits(heartbeat=0.2, lease=2.0, register=0.5, registry_drop=2.0, handshake=2.0, progress=1.5, orphan=3.0)


class Nowhere:
    """A registry that answers until it is gone, then never again."""

    def __init__(self) -> None:
        self.gone = False

    async def renew(self, info: WorkerInfo) -> None:
        if self.gone:
            await asyncio.Event().wait()

    async def remove(self, worker_id: str) -> None:
        await self.renew(None)  # type: ignore[arg-type]

    async def table(self) -> Table:
        return Table(0, ())


def alone(model: Path, limits: Limits, **more: object) -> WorkerSettings:
    given = {"model": str(model), "cache_blocks": 64, "threads": 1, "limits": limits} | more
    return WorkerSettings(role="decode", **given)  # type: ignore[arg-type]


async def ends(worker: Worker, within: float) -> tuple[str, float]:
    start = time.monotonic()
    return await asyncio.wait_for(worker.wait(), within), time.monotonic() - start


@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_progress(shallow_model: Path, victim: str) -> None:
    """A stopped peer closes no socket: the transfer's own limit ends it, and the living side's blocks return."""
    slow = {"send_delay_s": 0.3, "message_bytes": 25 * TOKEN_BYTES, "limits": QUICK}
    groups = [group(shallow_model, "prefill", **slow), group(shallow_model, "decode", limits=QUICK)]
    cluster = LocalCluster(groups, SECRET, QUICK)
    await cluster.start()
    try:
        async with linked(cluster) as (prefill, decode):
            asked = request("stuck", long_prompt(200, 3))
            await decode.send(Reserve(asked, prefill.info.id))
            await prefill.send(Prefill(asked, decode.info.id))
            granted = await asyncio.wait_for(decode.parts[asked.key].granted, LIMIT)
            await prefill.send(Start(asked.key, granted.held))
            await asyncio.wait_for(prefill.parts[asked.key].first.wait(), LIMIT)
            stopped, living = (decode, prefill) if victim == "decode" else (prefill, decode)
            os.kill(stopped.info.engine_pids[0], signal.SIGSTOP)
            ended = await asyncio.wait_for(living.parts[asked.key].ended, QUICK.lease + QUICK.progress + 5.0)
            assert (ended.reason, ended.code) == ("error", "TransferTimeout"), ended
            await living.until_free(5.0)
            os.kill(stopped.info.engine_pids[0], signal.SIGKILL)
    finally:
        await cluster.stop(drain=False)


async def test_handshake(shallow_model: Path) -> None:
    """Strangers at the link's listener and at the front are shown the door, whether silent or talkative."""
    cluster = LocalCluster([group(shallow_model, "decode", limits=QUICK)], SECRET, QUICK)
    await cluster.start()
    try:
        decode = (await infos(cluster))["decode"]
        host, port = decode.links[0].rsplit(":", 1)
        for said in (b"", b"\xff\xff\xff\xff", b"\x04\x00\x00\x00junk"):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(said)
                stranger.settimeout(QUICK.handshake + 3.0)
                assert await asyncio.to_thread(closed, stranger)
        async with Probe(decode, b"another secret") as probe:
            await asyncio.wait_for(probe.broken.wait(), LIMIT)
            assert probe.load.total_blocks == 0, "a router without the secret was told of the load"
        async with Probe(decode, SECRET) as probe:
            await probe.until_free()
    finally:
        await cluster.stop(drain=False)


def closed(sock: socket.socket) -> bool:
    """Whether the peer closes, whatever it says before."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


async def test_lease(shallow_model: Path, tmp_path: Path) -> None:
    """A router that is stopped keeps its connection: the worker ends its session by the lease and frees all of it."""
    cluster = LocalCluster([group(shallow_model, "decode", limits=QUICK)], SECRET, QUICK)
    await cluster.start()
    try:
        decode = (await infos(cluster))["decode"]
        script = tmp_path / "router.py"
        script.write_text(ROUTER)
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), decode.address, cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), LIMIT) == b"running\n"
        async with Probe(decode, SECRET) as probe:
            await probe.until(lambda load: load.running == 1)
            process.send_signal(signal.SIGSTOP)
            await probe.until_free(3 * QUICK.lease + 5.0)
        process.kill()
        await process.wait()
    finally:
        await cluster.stop(drain=False)


ROUTER = """
import asyncio, sys
sys.path.insert(0, "")
from diptych.contract.wire import Generate, WorkerInfo
from tests.support.probe import Probe
from tests.system.test_walking_path import SECRET, long_prompt, request

async def main():
    info = WorkerInfo("x", "decode", sys.argv[1], (), "", "", 0, (), 16, 1, 1)
    async with Probe(info, SECRET) as probe:
        asked = request("endless", long_prompt(60, 1), 900)
        await probe.send(Generate(asked))
        await probe.parts[asked.key].first.wait()
        print("running", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_orphan(shallow_model: Path) -> None:
    registry = Nowhere()
    worker = Worker(alone(shallow_model, QUICK), SECRET, registry)
    info = await worker.start()
    registry.gone = True
    reason, took = await ends(worker, QUICK.orphan + 3 * QUICK.register + 5.0)
    assert "registry" in reason
    assert took > QUICK.orphan - 1.0
    assert not Path(f"/proc/{info.engine_pids[0]}").exists()


async def test_step(shallow_model: Path) -> None:
    """An engine that is busy and completes nothing is dead, whatever its process does."""
    limits = Limits(heartbeat=0.2, lease=2.0, step=1.5)
    worker = Worker(alone(shallow_model, limits, token_budget=64), SECRET, Nowhere())
    info = await worker.start()
    try:
        async with Probe(info, SECRET) as probe:
            await probe.send(Generate(request("long", long_prompt(300, 1), 500)))
            await asyncio.wait_for(probe.parts[request("long").key].first.wait(), LIMIT)
            os.kill(info.engine_pids[0], signal.SIGSTOP)
            reason, _ = await ends(worker, limits.step + 5.0)
            assert "no step" in reason
            await asyncio.wait_for(probe.broken.wait(), 5.0)
    finally:
        await worker.stop(drain=False)


async def test_group_start(shallow_model: Path) -> None:
    """A start that takes too long leaves nothing behind."""
    limits = Limits(group_start=0.3, handshake=0.2)
    worker = Worker(alone(shallow_model, limits), SECRET, Nowhere())
    with pytest.raises(Exception, match="was not up within"):
        await worker.start()
    assert len(worker.engines) == 1
    assert not worker.engines.running()


async def test_drain(shallow_model: Path) -> None:
    """A draining worker refuses what is new, finishes what fits, and ends the rest at the limit."""
    limits = Limits(drain=2.0, heartbeat=0.1)
    worker = Worker(alone(shallow_model, limits), SECRET, Nowhere())
    info = await worker.start()
    async with Probe(info, SECRET) as probe:
        await probe.send(Generate(request("endless", long_prompt(20, 1), 900)))
        await asyncio.wait_for(probe.parts[request("endless").key].first.wait(), LIMIT)
        stopping = asyncio.create_task(worker.stop())
        await probe.until(lambda load: load.draining)
        late = request("late", long_prompt(20, 2), 2)
        await probe.send(Generate(late))
        refused = await asyncio.wait_for(probe.parts[late.key].ended, LIMIT)
        assert (refused.code, "draining" in refused.message) == ("CapacityExceeded", True)
        await asyncio.wait_for(stopping, limits.drain + 5.0)
        await asyncio.wait_for(probe.broken.wait(), 5.0)
