"""The controller in a real Ray cluster of its own: replacement, adoption after its own death, and leaving nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import ray
from ray import serve

from diptych.cluster.config import validate
from diptych.cluster.controller import Status, make_controller
from diptych.cluster.processes import alive, descendants
from diptych.cluster.ray_cluster import RayCluster, connect
from diptych.cluster.ray_group import RayLauncher, _at_home
from diptych.cluster.ray_registry import RayRegistry
from diptych.contract.errors import DiptychError, Internal
from diptych.contract.limits import Limits
from diptych.contract.wire import WorkerInfo
from diptych.serving import RayService
from diptych.workers.settings import WorkerSettings
from tests.cluster.echo_actor import EchoActor
from tests.support.ray_lock import ray_lock

T = TypeVar("T")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@contextmanager
def bystander() -> Iterator[int]:
    """A child of this process that was there before the cluster, and is none of its business."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Its actors are classes of these tests, which Ray's workers must find from whatever folder they run in."""
    with ray_lock(), bystander() as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
        before = set(descendants(os.getpid()))  # services that other tests of this process share, too
        cluster = connect("local", cpus=4, gpus=2)
        members = [pid for pid in descendants(os.getpid()) if pid not in before]
        assert len(members) > 3
        try:
            yield cluster
        finally:
            members = sorted({*members, *descendants(os.getpid())} - before)
            cluster.stop()
        assert alive(other)
        assert [pid for pid in members if alive(pid)] == []
        assert cluster.folder is not None
        assert not cluster.folder.exists()


class Service:
    """A controller under test, as its launcher sees it."""

    def __init__(self, name: str, tree: dict[str, Any], limits: Limits | None = None) -> None:
        config = validate({"model": "m", "service": {"name": name}} | tree)
        self.name = name
        self.controller = make_controller(name, config.groups(), b"s" * 32, limits or Limits(), EchoActor)
        self.registry = RayRegistry(name)

    async def status(self) -> Status:
        return msgspec.msgpack.decode(await self.controller.ping.remote(), type=Status)

    async def ready(self) -> Status:
        return await until(self.status, lambda status: status.ready)

    async def workers(self) -> dict[str, WorkerInfo]:
        return {worker.id.rpartition("-")[0]: worker for worker in (await self.registry.table()).workers}

    def actors(self) -> list[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return [entry["name"] for entry in named if entry["name"].startswith(f"{self.name}/")]

    def places(self) -> list[str]:
        entries = ray.util.placement_group_table().values()
        return [entry["name"] for entry in entries if entry["state"] != "REMOVED"]


@asynccontextmanager
async def service(name: str, tree: dict[str, Any], limits: Limits | None = None) -> AsyncIterator[Service]:
    running = Service(name, tree, limits)
    try:
        yield running
    finally:
        await running.controller.stop.remote(False)
        ray.kill(running.controller)
    assert running.actors() == []
    assert [place for place in running.places() if place.startswith(f"{name}/")] == []


async def until(look: Callable[[], Awaitable[T]], good: Callable[[T], bool], limit: float = 30.0) -> T:
    """The first answer that is good; a controller that is being restarted has none."""
    async with asyncio.timeout(limit):
        while True:
            try:
                if good(seen := await look()):
                    return seen
            except (ray.exceptions.RayError, DiptychError):
                pass
            await asyncio.sleep(0.05)


async def test_groups_are_placed_and_registered(cluster: RayCluster) -> None:
    async with service("a", {}) as running:
        await running.ready()
        workers = await running.workers()
        assert sorted(workers) == ["decode-0", "prefill-0"]
        assert workers["prefill-0"].pid != workers["decode-0"].pid
        assert sorted(running.actors()) == sorted(running.places())
        with pytest.raises(ValueError, match="already"):
            make_controller("a", [], b"", Limits())


async def test_a_killed_worker_is_replaced_under_a_new_epoch(cluster: RayCluster) -> None:
    async with service("b", {}) as running:
        await running.ready()
        before = await running.workers()
        os.kill(before["decode-0"].pid, signal.SIGKILL)
        after = await until(running.workers, lambda now: now.keys() == before.keys() and now != before)
        assert after["decode-0"].epoch != before["decode-0"].epoch
        assert after["prefill-0"] == before["prefill-0"]
        await running.ready()
        assert len(running.actors()) == 2
        assert len(running.places()) == 2


async def test_a_restarted_controller_adopts_and_makes_nothing_twice(cluster: RayCluster) -> None:
    async with service("c", {}) as running:
        status = await running.ready()
        table = await running.registry.table()
        os.kill(status.pid, signal.SIGKILL)
        again = await until(running.status, lambda now: now.ready and now.pid != status.pid)
        assert [group.starts for group in again.groups] == [0, 0]
        later = await running.registry.table()
        assert later.workers == table.workers
        assert later.version > table.version
        assert len(running.actors()) == 2
        os.kill(later.workers[0].pid, signal.SIGKILL)
        await until(running.workers, lambda now: len(now) == 2 and later.workers[0] not in now.values())


async def test_a_group_finds_its_gpu_and_its_address_on_its_node(cluster: RayCluster) -> None:
    """Two groups that say the same are lent two GPUs. Nothing is masked, so each must take its own."""

    class Home:
        def settings(self, given: WorkerSettings) -> tuple[str, str]:
            found = _at_home(given)
            return found.device, found.host

    unmasked = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    made = ray.remote(Home).options(num_cpus=0, num_gpus=1, runtime_env=unmasked)
    homes = [made.remote() for _ in range(2)]
    given = WorkerSettings(model="m", role="decode", device="cuda", host="")
    found = ray.get([home.settings.remote(given) for home in homes], timeout=60)
    assert sorted(device for device, _ in found) == ["cuda:0", "cuda:1"]
    assert {host for _, host in found} == {ray.util.get_node_ip_address()}
    for home in homes:
        ray.kill(home)


async def test_a_placement_that_cannot_be_made_names_what_is_missing(cluster: RayCluster) -> None:
    limits = Limits(placement=0.5)
    async with service("d", {"prefill": {"cpus": 100}, "decode": {"cpus": 1}}, limits) as running:
        status = await until(running.status, lambda now: bool(now.code))
        assert status.code == "CapacityExceeded"
        assert "prefill-0" in status.message
        assert "CPU 100" in status.message


async def test_a_group_that_cannot_start_is_reported_as_it_said(cluster: RayCluster) -> None:
    async with service("e", {"model": "broken"}) as running:
        status = await until(running.status, lambda now: bool(now.code))
        assert status.code == "ModelUnsupported"
        assert "Architecture X is not supported." in status.message


async def test_a_service_without_a_launcher_ends_itself(cluster: RayCluster) -> None:
    limits = Limits(orphan=1.0, registry_drop=0.9, register=0.2, heartbeat=0.1, lease=0.5)
    running = Service("f", {}, limits)
    await running.ready()

    async def gone() -> list[str]:
        names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
        return [name for name in names if name.startswith("f")]

    assert await until(gone, lambda names: names == []) == []
    assert [place for place in running.places() if place.startswith("f/")] == []


async def test_an_actor_that_dies_while_it_is_adopted_is_skipped(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service("g", {}) as running:
        await running.ready()
        groups = validate({"model": "m"}).groups()
        launcher = RayLauncher("g", b"", Limits(), EchoActor)
        listed = launcher._actor_names()
        monkeypatch.setattr(launcher, "_actor_names", lambda: ["g/decode-0/0000", *listed])
        assert sorted(launcher.adopt(groups)) == ["decode-0", "prefill-0"]
        assert sorted(running.places()) == sorted(listed)


async def test_an_orphan_ends_its_routers_too(cluster: RayCluster) -> None:
    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Router:
        pass

    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    serve.run(Router.bind(), name="h", route_prefix=None)
    running = Service("h", {}, Limits(orphan=1.0, registry_drop=0.9, register=0.2, heartbeat=0.1, lease=0.5))
    await running.ready()

    async def left() -> list[str]:
        return [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]

    assert await until(left, lambda names: names == [], limit=60) == []


async def test_a_controller_that_says_nothing_ends_the_start_in_a_sentence(cluster: RayCluster) -> None:
    class Silent:
        async def ping(self) -> bytes:
            await asyncio.Event().wait()
            return b""

    limits = {"orphan": 1.0, "registry_drop": 0.9, "register": 0.2, "heartbeat": 0.1, "lease": 0.3}
    starting = RayService.__new__(RayService)  # as `_bring_up` has it when it waits for groups
    starting._config = validate({"model": "m", "limits": limits})
    starting._watch = lambda _: None
    starting._controller = ray.remote(Silent).options(num_cpus=0).remote()
    starting._pinging = asyncio.create_task(starting._ping())
    async with asyncio.timeout(20):
        with pytest.raises(Internal, match="has not answered for 1 s"):
            await starting._until_groups_ready(asyncio.create_task(asyncio.sleep(60)))
    ray.kill(starting._controller)


JOIN = """
import sys
from diptych.cluster.ray_cluster import connect
from diptych.contract.errors import DiptychError
for mode in sys.argv[1:]:
    try:
        cluster = connect(mode, cpus=1)
        print("joined", cluster.own)
        cluster.stop()
    except DiptychError as error:
        print(type(error).__name__, error)
"""


def joined(tmp_path: Path, *modes: str, **environment: str) -> list[str]:
    """What a process says that joins with this environment and an empty home."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", JOIN, *modes],
        env=own | {"HOME": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_joining_needs_the_token_and_says_so(cluster: RayCluster, tmp_path: Path) -> None:
    """Ray alone would try for twenty seconds with a wrong token, and for ever where nobody listens."""
    (tmp_path / "wrong").write_text("0" * 64)
    without = joined(tmp_path, cluster.address, "auto", "127.0.0.1:1", RAY_ADDRESS=cluster.address)
    assert [line.split()[0] for line in without] == ["Unauthenticated", "Unauthenticated", "ConfigInvalid"]
    assert "RAY_AUTH_TOKEN_PATH" in without[0]
    (wrong,) = joined(tmp_path, cluster.address, RAY_AUTH_TOKEN_PATH=str(tmp_path / "wrong"))
    assert wrong.startswith("Unauthenticated")
    token = {"RAY_AUTH_TOKEN_PATH": str(cluster.folder / "token")} if cluster.folder else {}
    assert joined(tmp_path, cluster.address, **token) == ["joined False"]
    assert joined(tmp_path, "auto", RAY_ADDRESS=cluster.address, **token) == ["joined False"]
    assert list(tmp_path.iterdir()) == [tmp_path / "wrong"]
