"""One worker group as a detached Ray actor in a placement group of its own.

Owns the names (service, group and epoch), placing, adopting what a predecessor left, and removing. Ray tells where the
process is and that it died; no request ever passes through it. An actor is never restarted by Ray: a new life is a new
epoch, and so a new actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, cast

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from diptych.cluster.config import Group
from diptych.cluster.devices import lent_device
from diptych.cluster.ray_registry import NAMESPACE, RayRegistry
from diptych.contract.errors import CapacityExceeded, DiptychError, Internal, from_wire
from diptych.contract.limits import Limits
from diptych.contract.registry import Registry
from diptych.contract.wire import WorkerInfo
from diptych.workers.channel import Loading
from diptych.workers.settings import WorkerSettings

_LOOK = 0.5  # seconds between two looks at how far a group's start is
_POLL = 0.05  # seconds between two looks at a placement group, which Ray offers no event for


class Started(msgspec.Struct, frozen=True, tag=True):
    """A group is ready."""

    info: WorkerInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A group could not start: (code, message) of the error tree."""

    code: str
    message: str


_outcome: msgspec.msgpack.Decoder[Started | Failed] = msgspec.msgpack.Decoder(Started | Failed)


class WorkerActor:
    """The front of one group inside an actor's process. Made a Ray actor by `launch`."""

    def __init__(self, settings: bytes, secret: bytes, registry: Registry, epoch: str) -> None:
        from diptych.workers.worker import Worker  # here: the controller, which also loads this module, needs none

        own = _at_home(msgspec.msgpack.decode(settings, type=WorkerSettings))
        self._loaded = Loading()
        self._worker = Worker(own, secret, registry, epoch, self._note)
        self._starting: asyncio.Task[WorkerInfo] | None = None

    async def start(self) -> bytes:
        """A packed `Started` or `Failed`: an error of ours crosses as plain data, not as Ray's traceback."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._worker.start())
        try:
            outcome: Started | Failed = Started(await asyncio.shield(self._starting))
        except DiptychError as error:
            outcome = Failed(error.code, str(error))
        return msgspec.msgpack.encode(outcome)

    async def loaded(self) -> bytes:
        """How far the start is: a packed `Loading`."""
        return msgspec.msgpack.encode(self._loaded)

    async def wait(self) -> str:
        return await self._worker.wait()

    async def stop(self, drain: bool) -> None:
        await self._worker.stop(drain)

    def _note(self, loaded: Loading) -> None:
        self._loaded = loaded


def _at_home(settings: WorkerSettings) -> WorkerSettings:
    """What only the node that Ray chose can tell: which of its GPUs, and at which of its addresses."""
    device = lent_device(settings.device, ray.get_gpu_ids())
    host = settings.host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    return msgspec.structs.replace(settings, device=device, host=host)


def actor_name(service: str, group: str, epoch: str) -> str:
    return f"{service}/{group}/{epoch}"


class RayGroup:
    """The `Incarnation` of a group that lives in Ray."""

    def __init__(self, name: str, actor: ActorHandle[Any], place: PlacementGroup | None, limits: Limits) -> None:
        self.name = name
        self.loaded = Loading()
        self._actor: Any = actor
        self._place = place
        self._limits = limits

    async def start(self) -> WorkerInfo:
        try:
            starting = asyncio.ensure_future(self._actor.start.remote())
            while not (await asyncio.wait((starting,), timeout=_LOOK))[0]:
                self.loaded = msgspec.msgpack.decode(await self._actor.loaded.remote(), type=Loading)
            outcome: Started | Failed = _outcome.decode(starting.result())
        except RayError as error:
            raise Internal(f"The process of {self.name} ended while it started ({_cause(error)}).") from None
        if isinstance(outcome, Failed):
            raise from_wire(outcome.code, outcome.message)
        return outcome.info

    async def wait(self) -> str:
        try:
            return str(await self._actor.wait.remote())
        except RayActorError as error:
            return f"The process of {self.name} died ({_cause(error)})."
        except RayError as error:
            return f"{self.name} failed ({_cause(error)})."

    async def stop(self, drain: bool) -> None:
        """Asks the worker to end itself, then kills the actor and gives its place back."""
        limit = self._limits.kill + (self._limits.drain if drain else 0.0)
        with contextlib.suppress(RayError, TimeoutError):  # dead already, or stuck: what follows ends both
            await asyncio.wait_for(self._actor.stop.remote(drain), limit + 1.0)
        ray.kill(self._actor)
        if self._place is not None:
            remove_placement_group(self._place)


class RayLauncher:
    """Places groups and makes their actors: the controller's `Launch`."""

    def __init__(self, service: str, secret: bytes, limits: Limits, actor: type[WorkerActor] = WorkerActor) -> None:
        self._service = service
        self._secret = secret
        self._limits = limits
        self._class = actor

    async def launch(self, group: Group, epoch: str) -> RayGroup:
        name = actor_name(self._service, group.name, epoch)
        place = placement_group([group.resources], strategy="PACK", name=name, lifetime="detached")
        try:
            await self._placed(group, place)
            actor = self._make(group, epoch, name, place)
        except BaseException:
            remove_placement_group(place)
            raise
        return RayGroup(name, actor, place, self._limits)

    def adopt(self, groups: list[Group]) -> dict[str, RayGroup]:
        """What a predecessor left of these groups, by name, at most one each; anything else of this service is
        removed, actors before places."""
        wanted = {group.name for group in groups}
        adopted: dict[str, RayGroup] = {}
        for name in self._actor_names():
            group = name.split("/")[1]
            actor = _actor_named(name)
            if actor is None:
                continue  # it died since it was listed; its place goes below
            if group in wanted and group not in adopted:
                adopted[group] = RayGroup(name, actor, _place_named(name), self._limits)
            else:
                ray.kill(actor)
        self._remove_places(except_for={group.name for group in adopted.values()})
        return adopted

    def _actor_names(self) -> list[str]:
        """Sorted, so that it never matters in which order Ray tells them."""
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [entry["name"] for entry in named if entry["namespace"] == NAMESPACE]
        return sorted(name for name in names if name.startswith(f"{self._service}/"))

    def _remove_places(self, except_for: set[str]) -> None:
        for entry in placement_group_table().values():
            name = entry["name"]
            ours = name.startswith(f"{self._service}/") and entry["state"] != "REMOVED"
            if ours and name not in except_for and (place := _place_named(name)) is not None:
                remove_placement_group(place)

    def _make(self, group: Group, epoch: str, name: str, place: PlacementGroup) -> ActorHandle[Any]:
        gpus = group.resources.get("GPU", 0.0)
        # Masked, every rank would be device 0 and symmetric memory refuses: devices are chosen by index instead.
        unmask = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}} if gpus else None
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "max_concurrency": 100,
            "num_cpus": group.resources.get("CPU", 0.0),
            "num_gpus": gpus,
            "runtime_env": unmask,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=0),
        }
        settings = msgspec.msgpack.encode(group.settings)
        maker = ray.remote(self._class).options(**options)
        made = maker.remote(settings, self._secret, RayRegistry(self._service), epoch)
        return cast("ActorHandle[Any]", made)

    async def _placed(self, group: Group, place: PlacementGroup) -> None:
        limit = time.monotonic() + self._limits.placement
        while placement_group_table(place).get("state") != "CREATED":
            if time.monotonic() > limit:
                raise CapacityExceeded(self._missing(group))
            await asyncio.sleep(_POLL)

    def _missing(self, group: Group) -> str:
        """One sentence: which resource no node could give within the limit."""
        nodes, free = _resources()
        lacks = [
            f"{kind} {asked:g} (the largest node has {max((node.get(kind, 0.0) for node in nodes), default=0.0):g}, "
            f"the cluster has {free.get(kind, 0.0):g} free)"
            for kind, asked in group.resources.items()
            if asked > free.get(kind, 0.0) or all(asked > node.get(kind, 0.0) for node in nodes)
        ]
        whole = [f"{kind} {asked:g} on one node" for kind, asked in group.resources.items()]
        wanted = " and ".join(lacks or whole)
        return f"No node could give {group.name} its {wanted} within limits.placement ({self._limits.placement:g} s)."


def _resources() -> tuple[list[dict[str, float]], dict[str, float]]:
    """What each live node has, and what the cluster has free."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]], free


def _actor_named(name: str) -> ActorHandle[Any] | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _place_named(name: str) -> PlacementGroup | None:
    try:
        return cast(PlacementGroup, ray.util.get_placement_group(name))
    except ValueError:
        return None


def _cause(error: RayError) -> str:
    """The first line that says something, of Ray's many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
