"""Runs a function in the processes of a group: each joins it (gloo on a CPU, NCCL on a GPU), works, and sends back what
it found."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.parallel.group import Group, join
from diptych.workers.parallel.layout import ExpertTable, Grid, Shard
from diptych.workers.transfer.pair import connect_store, host_store, transport_for

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.ranks"])


def device_of(kind: str, rank: int) -> str:
    """A rank's device of that kind: a GPU of its own, or the one that all share."""
    if kind == "cpu":
        return kind
    return f"cuda:{rank if rank < torch.cuda.device_count() else 0}"


def run_ranks(size: int, work: Callable[..., Any], *given: Any, limit: float = 90.0, device: str = "cpu") -> list[Any]:
    """`work(group, *given)` at every rank; their results in order. Raises what a rank raised, as text. device: cpu or
    cuda."""
    store, address = host_store("127.0.0.1", limit)
    name = uuid.uuid4().hex
    ends = [_context.Pipe(duplex=False) for _ in range(size)]
    members = [
        _context.Process(
            target=_member, args=(theirs, address, name, rank, size, limit, device, work, given), daemon=True
        )
        for rank, (_, theirs) in enumerate(ends)
    ]
    for member, (_, theirs) in zip(members, ends, strict=True):
        member.start()
        theirs.close()
    try:
        found = []
        for rank, (ours, _) in enumerate(ends):
            assert ours.poll(limit), f"rank {rank} said nothing within {limit} s"
            good, result = pickle.loads(ours.recv_bytes())  # by value: the rank may be gone when it is read
            assert good, f"rank {rank}: {result}"
            found.append(result)
        return found
    finally:
        for member in members:
            member.kill()
            member.join()
        del store


def _member(
    answer: Connection,
    address: tuple[str, int],
    name: str,
    rank: int,
    size: int,
    limit: float,
    kind: str,
    work: Callable[..., Any],
    given: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    _meeting.append((address, name, limit))
    try:
        device = device_of(kind, rank)
        if kind == "cuda":
            torch.cuda.set_device(device)
        store = connect_store(address, limit)
        group = join(transport_for(device, "auto"), store, name, rank, size, "127.0.0.1", device, limit)
        answer.send_bytes(pickle.dumps((True, work(group, *given))))
    except Exception:  # noqa: BLE001 - it is told to the test
        answer.send_bytes(pickle.dumps((False, traceback.format_exc())))


_meeting: list[tuple[tuple[str, int], str, float]] = []
_shared: list[Group] = []


def store_of() -> tuple[TCPStore, str]:
    """The store at which this process's group met, and the group's name there."""
    address, name, limit = _meeting[0]
    return connect_store(address, limit), name


def sharing_of(group: Group, grid: Grid) -> Group | None:
    """The ranks of a data rank, out of all of them; every rank must ask. Made once in a process."""
    if grid.tensor == 1:
        return None
    if _shared:
        return _shared[0]
    (store, name), (data_rank, place) = store_of(), grid.place(group.rank)
    _shared.append(join("gloo", store, f"{name}/{data_rank}", place, grid.tensor, "127.0.0.1", "cpu", _meeting[0][2]))
    return _shared[0]


def grid_decoder_of(group: Group, grid: Grid, folder: Path, spread: bool) -> Decoder:
    """This rank's decoder of a model's folder, in a group of several data ranks."""
    config = ModelConfig.from_folder(folder)
    table = ExpertTable.even(config.moe.experts, grid.ranks) if spread and config.moe else None
    data_rank, place = grid.place(group.rank)
    shard = Shard(place, grid.tensor, table, data_rank)
    weights = load(folder, config, torch.float32, shard=shard)
    return Decoder(config, weights, sharing_of(group, grid), shard, everyone=group)


def shard_of(group: Group, config: ModelConfig, spread: bool) -> Shard:
    table = ExpertTable.even(config.moe.experts, group.size) if spread and config.moe else None
    return Shard(group.rank, group.size, table)


def decoder_of(group: Group, folder: Path, spread: bool = False) -> Decoder:
    """This rank's decoder of a model's folder."""
    config = ModelConfig.from_folder(folder)
    shard = shard_of(group, config, spread)
    return Decoder(config, load(folder, config, torch.float32, group.device, shard=shard), group, shard)
