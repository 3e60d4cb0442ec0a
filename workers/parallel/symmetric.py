"""Memory that a group's ranks lend each other, for sums in one launch (`kernels/all_reduce.py`).

On GPUs of one host that reach each other: PyTorch's symmetric memory, mapped peer to peer and never by multicast. A
group gets it whole or not at all: at each stage every rank tells the others, through the store at which the group met,
what stands in its way, and all go by the first that says something. Sums then stay with NCCL, and the first rank's log
says why, in one line.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from diptych.kernels.all_reduce import BLOCKS, POLLS_A_SECOND, RANKS, Peers, all_reduce, region_bytes
from diptych.workers.parallel.group import Group

log = logging.getLogger("diptych.symmetric")

TRIAL = 10.0  # seconds that a rank waits for its peers in the first sum
FAILURES = (RuntimeError, AttributeError, OSError)  # what a refusing driver, or another PyTorch's interface, raises


class Memory(Protocol):
    """How one rank lends memory. Each call but `place` may fail as `FAILURES` say."""

    def place(self) -> str:
        """Where it is, for the others' `allocate`."""
        ...

    def allocate(self, places: Sequence[str], size: int) -> None:
        """Makes this rank's region, of `size` zero bytes. places: all ranks', in order."""
        ...

    def meet(self, rank: int, store: Store, name: str) -> list[int]:
        """Maps all ranks' regions; their addresses here, in order, valid while this object lives."""
        ...


class DeviceMemory:
    """A GPU's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self) -> str:
        return f"{socket.gethostname()}/{self.device.index}"

    def allocate(self, places: Sequence[str], size: int) -> None:
        self.ranks = len(places)
        for host, index in (place.rsplit("/", 1) for place in places):
            if host != socket.gethostname():
                raise OSError(f"a rank is at {host}")
            if int(index) != self.device.index and not torch.cuda.can_device_access_peer(self.device, int(index)):
                raise OSError(f"{self.device} cannot reach the memory of cuda:{index}")
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.region: Tensor = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device)
        self.region.zero_()
        torch.cuda.synchronize(self.device)

    def meet(self, rank: int, store: Store, name: str) -> list[int]:
        # PyTorch looks a group up by its name: some releases in a table of stores, later ones among process groups.
        _SymmetricMemory.set_group_info(name, rank, self.ranks, store)
        self.group = ProcessGroup(store, rank, self.ranks)
        _register_process_group(name, self.group)  # type: ignore[arg-type]
        self.handle = _SymmetricMemory.rendezvous(self.region, name)
        found: list[int] = list(self.handle.buffer_ptrs)
        if found[rank] != self.region.data_ptr():
            raise OSError("PyTorch put the region inside of another one")
        return found


def lend(group: Group, store: Store, name: str, limit: float, memory: Memory | None = None) -> None:
    """Gives the group its `peers`, where that is possible. Every rank calls it once, before anything is captured.

    store: at which the group met. name: used for nothing else there. limit: seconds after which a sum is given up in
    which a peer does not come. memory: a GPU's own by default. Raises RuntimeError, after the store's limit, when a
    rank says nothing at all.
    """
    meeting = PrefixStore(f"symmetric/{name}", store)
    own = memory or DeviceMemory(group.device)
    places = _told(group, meeting, "place", own.place())
    made: list[Peers] = []

    def allocate() -> None:
        if group.size > RANKS:
            raise OSError(f"one launch sums over at most {RANKS} ranks")
        own.allocate(places, region_bytes(group.size))

    def meet() -> None:
        made.append(_peers(group, own.meet(group.rank, PrefixStore("memory", meeting), f"diptych/{name}"), own))

    def trial() -> None:
        x = torch.full((BLOCKS,), group.rank + 1.0, device=group.device)
        y = all_reduce(x, replace(made[0], polls=_polls(TRIAL))).tolist()
        if set(y) != {group.size * (group.size + 1) / 2}:
            raise OSError(f"a first sum gave {y[0]}")

    for stage in (allocate, meet, trial):
        said = _told(group, meeting, stage.__name__, _try(stage))
        if any(said):
            if group.rank == 0:
                rank, why = next((rank, why) for rank, why in enumerate(said) if why)
                log.warning("small sums of %d ranks go through NCCL, since at rank %d %s", group.size, rank, why)
            return
    group.peers = replace(made[0], polls=_polls(limit))


def _try(stage: Callable[[], None]) -> str:
    """What went wrong, in a line; nothing when all is well."""
    try:
        stage()
    except FAILURES as error:
        return str(error).strip().partition("\n")[0] or repr(error)
    return ""


def _told(group: Group, store: Store, stage: str, text: str) -> list[str]:
    """What each rank says at this stage, once all have."""
    store.set(f"{stage}/{group.rank}", text)
    return [store.get(f"{stage}/{rank}").decode() for rank in range(group.size)]


def _peers(group: Group, addresses: Sequence[int], memory: Memory) -> Peers:
    given_up = torch.zeros(1, dtype=torch.int32, pin_memory=group.device.type == "cuda")
    table = torch.tensor([*addresses, given_up.data_ptr()], dtype=torch.int64, device=group.device)
    calls = torch.zeros(BLOCKS, dtype=torch.int32, device=group.device)
    return Peers(group.rank, group.size, table, calls, given_up, 1, memory)


def _polls(seconds: float) -> int:
    return min(int(seconds * POLLS_A_SECOND), (1 << 31) - 1)
