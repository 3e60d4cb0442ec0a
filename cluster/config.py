"""The service's configuration: one frozen schema for the YAML file and for flags.

Owns which settings exist, their defaults and their order of precedence (defaults, file, convenience flags, `--set`).
Does not know how workers or routers use them: it only composes each worker group's `WorkerSettings`. What prefill and
decode must share (model, dtype, block size, context) stands once, in `engine`, so that they cannot be set apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from diptych.contract.errors import ConfigInvalid
from diptych.contract.limits import Limits
from diptych.contract.wire import Role
from diptych.workers.parallel.layout import may_share_a_gpu
from diptych.workers.settings import WorkerSettings, block_size_on

Count = Annotated[int, Field(ge=0, le=1024)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class ServiceConfig(_Section):
    """name: of the service, in all that it creates. host, port: of the public gRPC server; port 0 picks a free one.

    replicas: routers, which share the port. model_name: what clients call the model; the folder's name if empty.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "diptych"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 50051
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    model_name: str = ""


class EngineConfig(_Section):
    """What every worker of the service shares; see `WorkerSettings` for each field.

    block_size: 0 takes 64 tokens where a group is on a GPU, whose kernels read such blocks best, and 16 elsewhere.
    host: left alone, it is each node's own address in a Ray cluster that the service joins, and the loopback address
    otherwise."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    transport: Literal["auto", "gloo", "nccl"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    block_size: Annotated[int, Field(ge=0, le=256)] = 0
    max_context: NotNegative = 0
    prefix_cache: bool = True
    overlap: Annotated[int, Field(ge=-1, le=1)] = -1
    batch_invariant: bool = False
    softmax: Literal["running", "unified"] = "running"
    message_bytes: Annotated[int, Field(ge=4096)] = 4 << 20
    check_integrity: bool = False
    host: str = "127.0.0.1"


class GroupConfig(_Section):
    """The groups of one role: how many, where, and how large. cpus, gpus: logical resources that Ray books for a group;
    torch's threads are a setting of their own. Fields shared with `WorkerSettings` mean the same there."""

    count: Count = 1
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    threads: Positive = 2
    tensor: Positive = 1
    data: Positive = 1
    spread_experts: bool = False
    cache_blocks: NotNegative = 0
    cache_bytes: NotNegative = 0
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    graphs: bool = True
    max_batch: Positive = 64
    token_budget: Positive = 512
    max_waiting: Positive = 1024
    local_prefill: NotNegative = 16
    send_delay_s: Annotated[float, Field(ge=0)] = 0.0

    def resources(self) -> dict[str, float]:
        """What Ray's placement group asks for, one bundle a group."""
        gpus = self.gpus or (float(self.data * self.tensor) if self.device.startswith("cuda") else 0.0)
        return {"CPU": self.cpus} | ({"GPU": gpus} if gpus else {})


class TelemetryConfig(_Section):
    """file: OTLP JSON lines are appended there. endpoint: an OTLP/gRPC collector. sample: share of new traces kept."""

    file: Path | None = None
    endpoint: str = ""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0


class RouterConfig(_Section):
    """Of each router. max_active: requests that it holds in all. max_queue: choices that may wait for a worker.
    max_message_bytes: the largest message that a client may send. max_choices: the largest `n`. threads: that template
    and tokenise. max_preparing: requests that may wait for those. cpus: logical ones that Ray books."""

    max_active: Positive = 4096
    max_queue: Positive = 1024
    max_message_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    max_choices: Annotated[int, Field(ge=1, le=1024)] = 16
    threads: Positive = 2
    max_preparing: Positive = 256
    cpus: Annotated[float, Field(ge=0)] = 1.0


class Config(_Section):
    """All that an operator may set. `roles` picks which groups exist: prefill and decode, or colocated."""

    model: str = ""
    roles: Literal["disaggregated", "colocated"] = "disaggregated"
    ray: str = "auto"
    service: ServiceConfig = ServiceConfig()
    engine: EngineConfig = EngineConfig()
    prefill: GroupConfig = GroupConfig()
    decode: GroupConfig = GroupConfig()
    colocated: GroupConfig = GroupConfig()
    router: RouterConfig = RouterConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    limits: Limits = Limits()

    @field_validator("limits", mode="before")
    @classmethod
    def _limits(cls, value: object) -> Limits:
        """`Limits` is the contract's own struct: unknown keys are named like everywhere else."""
        if isinstance(value, Limits):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("must be a mapping of names to seconds")
        unknown = set(value) - set(Limits.__struct_fields__)
        if unknown:
            raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
        try:
            return msgspec.convert(dict(value), Limits).check()
        except (msgspec.ValidationError, ConfigInvalid) as error:
            raise ValueError(str(error)) from None

    def groups(self) -> list[Group]:
        """Every worker group of the service, checked: at least one of each role that is needed."""
        for role in self._roles:
            self._check(role)
        self._check_joined()
        return [self._member(role, index) for role in self._roles for index in range(self._group(role).count)]

    def cpus(self) -> float:
        """Logical CPUs that a cluster of our own needs: every group and every router."""
        return (
            sum(group.resources.get("CPU", 0.0) for group in self.groups()) + self.service.replicas * self.router.cpus
        )

    @property
    def model_name(self) -> str:
        return self.service.model_name or Path(self.model).name

    @property
    def block_size(self) -> int:
        """Tokens of a block of the KV cache, the same for all groups."""
        return self.engine.block_size or block_size_on(*(self._group(role).device for role in self._roles))

    @property
    def _roles(self) -> tuple[Role, ...]:
        return ("prefill", "decode") if self.roles == "disaggregated" else ("colocated",)

    def _group(self, role: Role) -> GroupConfig:
        return {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}[role]

    def _check(self, role: Role) -> None:
        """What only a group that exists can have wrong."""
        own = self._group(role)
        if own.count == 0:
            raise ConfigInvalid(f"{role}.count is 0, but roles = {self.roles} needs at least one {role} worker.")
        if role != "prefill" and own.token_budget <= own.max_batch:  # a prefill worker's batch does not decode
            raise ConfigInvalid(
                f"{role}.token_budget ({own.token_budget}) must exceed {role}.max_batch ({own.max_batch}): a full "
                "batch would leave nothing of a step for prompts."
            )
        ranks = own.data * own.tensor
        if own.device.startswith("cuda") and ranks > 1 and 0 < own.gpus < ranks and not may_share_a_gpu():
            raise ConfigInvalid(
                f"{role}.gpus is {own.gpus:g}, but {role} is to run {ranks} ranks, each on its own GPU."
            )
        if self.engine.transport == "nccl" and own.device == "cpu":
            raise ConfigInvalid(f"engine.transport is nccl, which moves between GPUs only, but {role}.device is cpu.")

    def _check_joined(self) -> None:
        """Prefill and decode must hold the same kind of KV and move it the same way."""
        kinds = {role: self._group(role).device.partition(":")[0] for role in self._roles}
        if len(set(kinds.values())) == 1:
            return
        where = " and ".join(f"{role}.device is {kind}" for role, kind in kinds.items())
        if self.engine.dtype == "auto":
            raise ConfigInvalid(f"{where}, where engine.dtype = auto would not be the same: set it.")
        if self.engine.transport == "auto":
            raise ConfigInvalid(f"{where}, where engine.transport = auto would not be the same: set it to gloo.")

    def _member(self, role: Role, index: int) -> Group:
        own = self._group(role)
        shared = set(WorkerSettings.__struct_fields__)
        engine = self.engine.model_dump() | {"block_size": self.block_size}
        settings = WorkerSettings(
            model=self.model,
            role=role,
            name=f"{role}-{index}",
            service=self.service.name,
            limits=self.limits,
            **{name: value for name, value in own.model_dump().items() if name in shared},
            **{name: value for name, value in engine.items() if name in shared},
        )
        settings.refuse_bad_modes()
        return Group(settings=settings, resources=own.resources())


class Group(msgspec.Struct, frozen=True):
    """One worker group to run: its settings, and the resources that Ray books for it."""

    settings: WorkerSettings
    resources: dict[str, float]

    @property
    def name(self) -> str:
        return self.settings.name


def load_config(file: Path | None = None, flags: Mapping[str, Any] | None = None, sets: Iterable[str] = ()) -> Config:
    """The configuration from a YAML file, then dotted `flags` that are not None, then `a.b=c` lines of `--set`.

    Raises `ConfigInvalid` with one sentence naming the key."""
    tree = _read(file) if file else {}
    for dotted, value in (flags or {}).items():
        if value is not None:
            _put(tree, dotted, value)
    for line in sets:
        dotted, found, text = line.partition("=")
        if not found or not dotted:
            raise ConfigInvalid(f"--set takes KEY=VALUE, such as decode.count=2, not {line!r}.")
        try:
            value = yaml.safe_load(text) if text else ""
        except yaml.YAMLError as error:
            raise ConfigInvalid(f"--set {dotted}: {text!r} is not a YAML value.") from error
        _put(tree, dotted.strip(), value)
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> Config:
    """A checked `Config`, or `ConfigInvalid` naming the first key that is wrong."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigInvalid(_sentence(error)) from None
    config.limits.check()
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"The configuration file {file} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"The configuration file {file} is not YAML: {' '.join(str(error).split())}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigInvalid(f"The configuration file {file} must hold a mapping of settings.")
    return tree


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    node = tree
    for name in path:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigInvalid(f"{dotted} cannot be set: {name} is not a section.")
        node = child
    node[last] = value


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "configuration"
    if first["type"] == "extra_forbidden":
        return f"Unknown setting {key!r}."
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    shown = "" if isinstance(first["input"], dict) else f" (got {first['input']!r})"
    return f"Setting {key!r} is wrong: {reason[0].lower()}{reason[1:]}{shown}."


__all__ = ["Config", "Group", "GroupConfig", "load_config", "validate"]
