"""What one worker group needs to know to start; composed by `cluster` from its configuration, frozen from then on."""

from __future__ import annotations

from typing import Literal

import msgspec

from diptych.contract.errors import ConfigInvalid
from diptych.contract.limits import Limits
from diptych.contract.wire import Role
from diptych.workers.parallel.layout import Grid

UNIFIED_MAXIMUM = "unified_maximum.json"
"""What `diptych calibrate` leaves in a model's folder."""


def block_size_on(*devices: str) -> int:
    """Tokens of a block of the KV cache where nobody chose: what a GPU's kernels read best if one of the devices is
    a GPU."""
    return 64 if any(device.startswith("cuda") for device in devices) else 16


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one worker group (one front, `tensor` × `data` engines).

    model: a folder in Hugging Face's layout (config.json, safetensors, generation_config.json).
    dtype: of weights and KV cache; auto takes the model's on a GPU and float32 on a CPU.
    transport: of the hand-over and of a group's sums; auto is NCCL on a GPU and gloo on a CPU. With gloo a GPU's
    payload passes through pinned host memory, which also serves two workers on one GPU.
    cache_blocks: blocks of the KV cache; 0 takes what `cache_bytes` holds (0 there: measured on a GPU, 1 GiB on a CPU).
    memory_share: of a GPU's memory, all that this worker may hold. graphs: capture decode steps.
    max_batch: sequences in one step. token_budget: query tokens in one step (chunked prefill's budget).
    max_context: 0 takes the model's. local_prefill: decode prefills itself what it lacks up to this many tokens.
    tensor: ranks that share the model, each an engine's process. data: how many times there are that many, each with a
    part of the batch and a KV cache of its own; what is said of sequences, tokens and blocks is of one of them.
    spread_experts: each of all those ranks holds whole experts rather than a slice of every one. threads: torch threads
    of each engine. host: the address that listeners bind to and publish.
    overlap: steps scheduled ahead of the one that runs: 0 on a CPU, 1 on a GPU; -1 picks.
    batch_invariant: one kernel a product and one for attention, cut alike in every batch: a request's tokens then do
    not depend on what runs beside it. softmax: how decode attention takes it; unified needs `diptych calibrate` before.
    send_delay_s: a test hook that slows a sender between two messages. check_integrity: whenever the engine falls idle,
    check the pool's books against every holder, and end the group if they disagree (for tests: it scans the pool).
    """

    model: str
    role: Role
    name: str = ""
    service: str = "diptych"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    transport: Literal["auto", "gloo", "nccl"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    block_size: int = 16
    cache_blocks: int = 0
    cache_bytes: int = 0
    memory_share: float = 0.9
    graphs: bool = True
    prefix_cache: bool = True
    max_batch: int = 64
    token_budget: int = 512
    max_context: int = 0
    max_waiting: int = 1024
    local_prefill: int = 16
    threads: int = 2
    tensor: int = 1
    data: int = 1
    spread_experts: bool = False
    host: str = "127.0.0.1"
    overlap: int = -1
    batch_invariant: bool = False
    softmax: Literal["running", "unified"] = "running"
    message_bytes: int = 4 << 20
    send_delay_s: float = 0.0
    check_integrity: bool = False
    limits: Limits = Limits()

    @property
    def grid(self) -> Grid:
        return Grid(self.data, self.tensor)

    def context(self, positions: int) -> int:
        """The longest context of a model that accepts so many positions. Raises `ConfigInvalid` when more are asked."""
        if self.max_context > positions:
            raise ConfigInvalid(
                f"engine.max_context is {self.max_context}, and the model in {self.model} accepts {positions}"
                " positions."
            )
        return self.max_context or positions

    def refuse_bad_modes(self) -> None:
        """Raises `ConfigInvalid` where a way of computing does not go with the device, the layout or another one."""
        asked = "engine.batch_invariant" if self.batch_invariant else "engine.softmax = unified"
        group, on_gpu = self.name or self.role, self.device.startswith("cuda")
        if on_gpu and self.transport == "gloo" and self.grid.ranks > 1:
            raise ConfigInvalid(
                f"engine.transport = gloo cannot add up what {self.grid.text} of {group} compute on GPUs:"
                " captured steps need NCCL, which auto takes."
            )
        if not self.batch_invariant and self.softmax == "running":
            return
        if self.batch_invariant and self.softmax == "unified":
            raise ConfigInvalid(
                "engine.batch_invariant has one attention kernel, which takes no unified maximum: unset one of the two."
            )
        if not on_gpu:
            raise ConfigInvalid(f"{asked} is a choice of GPU kernels, and {group} is on device {self.device}.")
        if self.batch_invariant and self.grid.ranks > 1:
            raise ConfigInvalid(
                "engine.batch_invariant needs one rank a group, as sums over ranks depend on their size;"
                f" {group} has {self.grid.text}."
            )
