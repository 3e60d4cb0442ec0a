"""Puts a whole service together: worker groups, registry and router, on Ray or as plain processes.

Owns the order of starting and stopping. Knows the rooms only by their front doors; prints nothing: a `Watch` is told
how far each group is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from diptych import __version__
from diptych.cluster.config import Config
from diptych.cluster.local import LocalCluster
from diptych.cluster.ports import PortLease
from diptych.cluster.preflight import check_context, check_layout, check_model, check_unified_maximum, model_folder
from diptych.cluster.supervisor import GroupState
from diptych.cluster.telemetry import Telemetry, start_telemetry
from diptych.contract.errors import ConfigInvalid, Internal, from_wire
from diptych.router.server import RouterServer
from diptych.router.settings import RouterSettings

log = logging.getLogger(__name__)
Watch = Callable[[Sequence[GroupState]], None]
_LOOK = 0.1  # seconds between two looks at how far the start is


class Service(Protocol):
    """A running service. `address` is where clients call it, `model` what they may name."""

    address: str
    model: str

    async def failed(self) -> str:
        """Returns only when the service cannot go on by itself, with the reason."""

    async def stop(self, drain: bool = True) -> None:
        """Takes no new requests, lets running ones finish within `limits.drain`, ends everything it started."""


async def start_service(config: Config, watch: Watch) -> Service:
    """Checks what can be checked, then starts everything; returns when a request would find workers.

    Raises a `DiptychError` with one sentence, and leaves nothing running then. Must be called in the main thread.
    """
    folder = model_folder(config.model)
    check_model(folder, weights=config.engine.load_format != "dummy")
    config = config.model_copy(
        update={
            "model": str(folder.absolute()),  # workers run in other folders
            "service": config.service.model_copy(update={"model_name": config.model_name}),
            "telemetry": config.telemetry.model_copy(update={"file": _absolute(config.telemetry.file)}),
        }
    )
    groups = [group.settings for group in config.groups()]
    check_layout(folder, groups)
    check_context(folder, groups)
    check_unified_maximum(folder, groups)
    lease = PortLease.take(config.service.host, config.service.port)
    try:
        if config.ray == "none":
            return await PlainService.start(config, lease, watch)
        return await RayService.start(config, lease, watch)
    except BaseException:
        lease.release()
        raise


def router_settings(config: Config, port: int) -> RouterSettings:
    """The router's part of the configuration; the launcher holds the port, so that routers may share it."""
    return RouterSettings(
        host=config.service.host,
        port=port,
        share_port=True,
        model_name=config.model_name,
        limits=config.limits,
        **config.router.model_dump(exclude={"cpus"}),
    )


class PlainService:
    """Worker groups as child processes, the router in this one."""

    def __init__(
        self,
        workers: LocalCluster,
        router: RouterServer,
        telemetry: Telemetry,
        lease: PortLease,
        host: str,
        watch: Watch,
    ) -> None:
        self._workers = workers
        self._router = router
        self._telemetry = telemetry
        self._lease = lease
        self.address = _address(host, lease.port)
        self.model = router.facts.name
        self._watching = asyncio.create_task(self._watch(watch))

    @classmethod
    async def start(cls, config: Config, lease: PortLease, watch: Watch) -> PlainService:
        secret = secrets.token_bytes(32)
        telemetry = start_telemetry(config.telemetry, "diptych-router", __version__)
        workers = LocalCluster(config.groups(), secret, config.limits)
        await workers.open()
        try:
            settings = router_settings(config, lease.port)
            registry = workers.registry_client()
            router = await asyncio.to_thread(RouterServer, Path(config.model), registry, secret, settings)
            await _until_ready(workers, watch)
            await router.start()
        except BaseException:
            await workers.stop(drain=False)
            raise
        service = cls(workers, router, telemetry, lease, config.service.host, watch)
        try:
            async with _within_start(config, "The router found no workers"):
                while not router.desk.ready():
                    await asyncio.sleep(_LOOK)
        except BaseException:
            await service.stop(drain=False)
            raise
        return service

    async def failed(self) -> str:
        """Groups are replaced for ever and the router lives as long as this process."""
        await asyncio.Event().wait()
        return ""

    async def stop(self, drain: bool = True) -> None:
        self._watching.cancel()
        await self._router.stop(None if drain else 0.0)
        await self._workers.stop(drain=False)
        await asyncio.to_thread(self._telemetry.stop)
        self._lease.release()

    async def _watch(self, watch: Watch) -> None:
        while True:
            watch(self._workers.supervisor.states())
            await asyncio.sleep(_LOOK)


async def _until_ready(workers: LocalCluster, watch: Watch) -> None:
    supervisor = workers.supervisor
    while not supervisor.ready():
        watch(supervisor.states())
        if failure := supervisor.failure():
            raise failure
        await asyncio.sleep(_LOOK)
    watch(supervisor.states())


def at_nodes(config: Config) -> Config:
    """In a cluster that may have several nodes the default, the loopback address, would be found by nobody: each group
    takes its node's address then. One that the operator named stays."""
    if "host" in config.engine.model_fields_set:
        return config
    return config.model_copy(update={"engine": config.engine.model_copy(update={"host": ""})})


class RayService:
    """Worker groups as actors under a controller, the router as a Serve application."""

    def __init__(self, config: Config, lease: PortLease, watch: Watch) -> None:
        from diptych.cluster.ray_cluster import connect

        self._config = config
        self._lease = lease
        self._watch = watch
        self.name = config.service.name
        self.address = _address(config.service.host, lease.port)
        self.model = config.model_name
        gpus = sum(group.resources.get("GPU", 0.0) for group in config.groups())
        self._cluster = connect(config.ray, config.cpus(), gpus)
        if not self._cluster.own:
            self._config = at_nodes(config)
        self._controller: Any = None
        self._pinging: asyncio.Task[str] | None = None
        self._serving = False

    @classmethod
    async def start(cls, config: Config, lease: PortLease, watch: Watch) -> RayService:
        service = cls(config, lease, watch)
        try:
            await service._bring_up()
        except BaseException:
            await service.stop(drain=False)
            raise
        return service

    async def failed(self) -> str:
        assert self._pinging is not None
        return await asyncio.shield(self._pinging)

    async def stop(self, drain: bool = True) -> None:
        """Routers first, so that workers are idle when they are told to stop."""
        import ray
        from ray.serve.exceptions import RayServeException

        limits = self._config.limits
        with contextlib.suppress(ray.exceptions.RayError, RayServeException, TimeoutError):  # the cluster's end follows
            await asyncio.wait_for(self._delete_application(drain), 2 * limits.drain + 10)
        if self._pinging is not None:
            self._pinging.cancel()
        if self._controller is not None:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # gone already: its groups' end follows
                await asyncio.wait_for(self._controller.stop.remote(False), limits.drain + 5 * limits.kill)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._controller)
        self._cluster.stop()
        self._lease.release()

    async def _bring_up(self) -> None:
        """Groups load while the router comes up. Nothing of Ray runs in a thread of ours: one that outlives
        `ray.shutdown` connects again by itself and takes the process down."""
        import ray
        from ray.serve.exceptions import RayServeException

        secret = secrets.token_bytes(32)
        self._controller = self._make_controller(secret)
        self._pinging = asyncio.create_task(self._ping())
        self._run_application(secret)
        routers = asyncio.create_task(self._until_router_ready())
        try:
            await self._until_groups_ready(routers)
            async with _within_start(self._config, "No router was ready"):  # it had no workers to find until now
                await routers
        except (ray.exceptions.RayError, RayServeException) as error:
            raise Internal(f"Ray failed while the service started ({_last_line(str(error))}).") from None
        finally:
            routers.cancel()

    def _make_controller(self, secret: bytes) -> Any:
        from diptych.cluster.controller import make_controller

        try:
            return make_controller(self.name, self._config.groups(), secret, self._config.limits)
        except ValueError:
            raise ConfigInvalid(
                f"A service named {self.name} runs in this Ray cluster already; choose another service.name."
            ) from None

    def _run_application(self, secret: bytes) -> None:
        from ray import serve

        from diptych.cluster.ray_registry import RayRegistry
        from diptych.router.app import router_app

        app = router_app(
            self._config.model,
            RayRegistry(self.name),
            secret,
            router_settings(self._config, self._lease.port),
            self._config.telemetry,
            self._config.service.replicas,
            self._config.router.cpus,
        )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        self._serving = True
        target = serve.RunTarget(app, name=self.name, route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    async def _until_router_ready(self) -> None:
        """Serve says RUNNING when every replica's constructor has returned; then workers must be connected. The caller
        bounds it."""
        from ray import serve

        while (router := self._application()) is None or router.status != "RUNNING":
            if router is not None:
                _raise_failure(router)
            await asyncio.sleep(_LOOK)
        handle = serve.get_app_handle(self.name)
        while not await handle.ready.remote():
            await asyncio.sleep(_LOOK)

    def _application(self) -> Any:
        from ray import serve

        return serve.status().applications.get(self.name)

    async def _delete_application(self, drain: bool) -> None:
        """A cluster of our own that need not drain is simply ended. In one that goes on, a Serve instance that holds
        nothing else any more goes too."""
        from ray import serve

        if not self._serving or (self._cluster.own and not drain):
            return
        serve.delete(self.name, _blocking=False)
        while self._application() is not None:
            await asyncio.sleep(_LOOK)
        if not self._cluster.own and not serve.status().applications:
            serve.shutdown()  # type: ignore[no-untyped-call]

    async def _status(self) -> Any:
        """What the controller says. Raises `Internal` when it does not, within `limits.lease`."""
        import ray

        from diptych.cluster.controller import Status

        try:
            packed = await asyncio.wait_for(self._controller.ping.remote(), self._config.limits.lease)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise Internal(f"The controller does not answer ({_last_line(str(error))}).") from None
        status = msgspec.msgpack.decode(packed, type=Status)
        self._watch(status.groups)
        return status

    async def _until_groups_ready(self, routers: asyncio.Task[None]) -> None:
        """Returns early when the routers have failed. The supervisor bounds every group's start, and `_ping` how long
        a controller may be silent, which Ray may be starting again."""
        assert self._pinging is not None
        while not routers.done():
            if self._pinging.done():
                raise Internal(self._pinging.result())
            try:
                status = await self._status()
            except Internal as error:
                log.info("%s", error)
                await asyncio.sleep(_LOOK)
                continue
            if status.code:
                raise from_wire(status.code, status.message)
            if status.ready:
                return
            await asyncio.sleep(_LOOK)

    async def _ping(self) -> str:
        """The launcher's lease on its service; ends when the controller was not to be reached for `limits.orphan`."""
        limits = self._config.limits
        heard = time.monotonic()
        while time.monotonic() - heard < limits.orphan:
            try:
                await self._status()
                heard = time.monotonic()
            except Internal as error:
                log.warning("%s", error)
            await asyncio.sleep(limits.heartbeat)
        return f"The controller has not answered for {limits.orphan:g} s."


@contextlib.asynccontextmanager
async def _within_start(config: Config, otherwise: str) -> AsyncIterator[None]:
    limit = config.limits.group_start
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError:
        raise Internal(f"{otherwise} within limits.group_start ({limit:g} s).") from None


def _absolute(path: Path | None) -> Path | None:
    return path.expanduser().absolute() if path is not None else None


def _address(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else host
    return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"


def _raise_failure(application: Any) -> None:
    """Our own error out of a replica's traceback, at once: Serve alone would try the constructor again and again."""
    said = [application.message, *(deployment.message for deployment in application.deployments.values())]
    for text in said:
        if found := re.search(r"diptych\.contract\.errors\.(\w+): (.+)", text):
            raise from_wire(found[1], f"The router did not start: {found[2].strip()}")
    if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        raise Internal(f"The router did not start: {_last_line(said[-1])}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
