"""Memory that processes on a CPU lend each other: files that all of them map. Triton's interpreter does the sums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store

from diptych.workers.parallel.group import Group
from diptych.workers.parallel.symmetric import Memory, lend
from tests.support.ranks import store_of


class MappedMemory:
    """A rank's, under a folder that all ranks of one group have for themselves."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.regions: list[Tensor] = []

    def place(self) -> str:
        return "here"

    def allocate(self, places: Sequence[str], size: int) -> None:
        (self.folder / str(self.rank)).write_bytes(bytes(size))

    def meet(self, rank: int, store: Store, name: str) -> list[int]:
        files = sorted(self.folder.iterdir(), key=lambda file: int(file.name))
        self.regions = [
            torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8) for file in files
        ]
        return [region.data_ptr() for region in self.regions]


def lend_some(group: Group, folder: Path) -> None:
    """The device's own memory, or mapped files on a CPU; it must succeed."""
    if group.device.type == "cpu":
        lend_mapped(group, folder)
    else:
        store, name = store_of()
        lend(group, store, name, 60.0)
    assert group.peers is not None


def lend_mapped(group: Group, folder: Path, limit: float = 60.0, memory: Memory | None = None) -> None:
    store, name = store_of()
    lend(group, store, f"{name}/{folder.name}", limit, memory or MappedMemory(folder, group.rank))
