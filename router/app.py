"""The router as a Ray Serve deployment: each replica runs a `RouterServer` with a gRPC server of its own.

Serve keeps the replicas alive and counts them; no request passes through it (its own gRPC proxy carries a tenth of the
tokens, and loses trailing metadata). It does not see our streams either: so a replica that is told to go drains them
itself, and Serve's patience is longer than that.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ray import serve

from diptych import __version__
from diptych.cluster.config import TelemetryConfig
from diptych.cluster.telemetry import Telemetry, start_telemetry
from diptych.contract.errors import Internal
from diptych.contract.registry import Registry
from diptych.router.server import RouterServer
from diptych.router.settings import RouterSettings


class RouterReplica:
    """One replica. Its constructor raises what `RouterServer` raises, before Serve counts it as running."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: str, registry: Registry, secret: bytes, settings: RouterSettings, telemetry: TelemetryConfig
    ) -> None:
        self._telemetry: Telemetry = start_telemetry(telemetry, "diptych-router", __version__)
        self._server = await asyncio.to_thread(RouterServer, Path(model), registry, secret, settings)
        await self._server.start()

    def port(self) -> int:
        """Where this replica listens (with port 0: what the kernel chose)."""
        return self._server.port

    def ready(self) -> bool:
        """Whether a request sent now would find workers."""
        return self._server.desk.ready()

    def check_health(self) -> None:
        if not self._server.port:
            raise Internal("The router's gRPC server is not running.")

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            await server.stop()
        await asyncio.to_thread(self._telemetry.stop)


def router_app(
    model: str,
    registry: Registry,
    secret: bytes,
    settings: RouterSettings,
    telemetry: TelemetryConfig,
    replicas: int = 1,
    cpus: float = 1.0,
) -> serve.Application:
    """The application to give to `serve.run`. registry: must survive pickling. With several replicas the settings must
    say `share_port`."""
    deployment: Any = serve.deployment(
        RouterReplica,
        name="router",
        num_replicas=replicas,
        graceful_shutdown_timeout_s=settings.limits.drain + 10.0,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": cpus},
    )
    application: serve.Application = deployment.bind(model, registry, secret, settings, telemetry)
    return application
