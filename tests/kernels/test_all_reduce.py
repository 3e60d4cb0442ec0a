"""The one-shot sum, through Triton's interpreter between real processes: values, slots and flags call after call, a
peer that does not come, and what falls back to the group's own sum."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from diptych.contract.errors import Internal
from diptych.kernels.all_reduce import BLOCKS, CHUNK, LIMIT, RANKS, Peers, all_reduce, all_reduce_reference, flag_bytes
from diptych.workers.parallel.group import Group
from tests.support.lent import MappedMemory, lend_mapped
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it between GPUs")

DTYPES = [torch.float32, torch.float16]  # the interpreter cuts bfloat16 off where a GPU rounds
SHAPES = [(1, 1), (3, 48), (1, 1024), (2, 1024), (1, 1025), (5, 700), (1, 7), (17, 300)]
"""Less than a chunk, exactly one, several: blocks differ in how often they have been called."""


def _part(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(shape, generator=draw) * 3).to(dtype)


def _sums(group: Group, folder: Path, rounds: int) -> list[Tensor]:
    lend_mapped(group, folder)
    assert group.peers is not None
    found, turn = [], 0
    for _ in range(rounds):
        for dtype in DTYPES:
            for shape in SHAPES:
                turn += 1
                bias = _part(90, turn, shape[-1:], dtype) if turn % 3 == 0 else None
                residual = _part(91, turn, shape, dtype) if turn % 2 == 0 else None
                found.append(group.sum(_part(group.rank, turn, shape, dtype), bias, residual))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_references_bits(tmp_path: Path, size: int) -> None:
    """Rounds of calls of all sizes: what a slot held two calls before must never be read again."""
    rounds, turn = 3, 0
    ranks = run_ranks(size, _sums, tmp_path, rounds)
    for _ in range(rounds):
        for dtype in DTYPES:
            for shape in SHAPES:
                turn += 1
                bias = _part(90, turn, shape[-1:], dtype) if turn % 3 == 0 else None
                residual = _part(91, turn, shape, dtype) if turn % 2 == 0 else None
                right = all_reduce_reference([_part(rank, turn, shape, dtype) for rank in range(size)], bias, residual)
                for found in ranks:
                    assert torch.equal(found[turn - 1], right), (turn, dtype, shape)


def _counted(group: Group, folder: Path) -> tuple[Tensor, int]:
    """One call short of where the count of calls turns over, and across it."""
    lend_mapped(group, folder)
    peers: Any = group.peers
    last = (1 << 31) - 2
    peers.calls.fill_(last)
    peers.kept.regions[group.rank][: flag_bytes(group.size)].view(torch.int32).fill_(last)
    group.gather(torch.zeros(1))  # nobody goes on before all have set theirs
    sums = [group.sum(torch.full((5,), float(turn + group.rank))) for turn in range(4)]
    return torch.stack(sums), int(peers.calls[0])


def test_the_count_of_calls_may_turn_over(tmp_path: Path) -> None:
    for sums, calls in run_ranks(2, _counted, tmp_path):
        assert sums[:, 0].tolist() == [1.0, 3.0, 5.0, 7.0]
        assert calls == (1 << 31) + 2 - (1 << 32)


def _alone(group: Group, folder: Path) -> tuple[Tensor, str]:
    """Rank 1 comes to the first sum only."""
    lend_mapped(group, folder)
    assert group.peers is not None
    group.sum(torch.ones(3))
    group.check()
    if group.rank:
        return torch.ones(3), ""
    y = all_reduce(torch.ones(3), replace(group.peers, polls=50))
    with pytest.raises(Internal) as told:
        group.check()
    return y, str(told.value)


def test_a_peer_that_does_not_come_is_not_waited_for_without_end(tmp_path: Path) -> None:
    (y, told), _ = run_ranks(2, _alone, tmp_path)
    assert y.isnan().all()
    assert "waited in vain" in told


def _peers() -> Peers:
    none = torch.zeros(1, dtype=torch.int32)
    return Peers(0, 2, none, none, none, 1)


def test_what_one_launch_takes() -> None:
    peers = _peers()
    assert peers.takes(torch.empty(LIMIT // 4))
    assert not peers.takes(torch.empty(LIMIT // 4 + 1))
    assert not peers.takes(torch.empty(0))
    assert not peers.takes(torch.empty(4, 4).T[:, :2])
    assert not peers.takes(torch.empty(4, dtype=torch.float64))
    assert BLOCKS * CHUNK == LIMIT
    with pytest.raises(Internal, match="float64"):
        all_reduce(torch.empty(4, dtype=torch.float64), peers)


def _either_way(group: Group, folder: Path) -> tuple[list[Tensor], int]:
    """A sum of the limit's size, and one a little larger, which goes by the group's backend."""
    lend_mapped(group, folder)
    assert group.peers is not None
    found = [group.sum(torch.full((count,), group.rank + 0.5)) for count in (LIMIT // 4, LIMIT // 4 + 1)]
    return found, int(group.peers.calls.sum())


def test_a_message_above_the_limit_goes_the_usual_way(tmp_path: Path) -> None:
    for (short, long), calls in run_ranks(2, _either_way, tmp_path):
        assert short.eq(2.0).all()
        assert long.eq(2.0).all()
        assert calls == BLOCKS + 1  # and the one of the trial


class _Refusing(MappedMemory):
    """Fails at a stage."""

    def __init__(self, folder: Path, rank: int, stage: str) -> None:
        super().__init__(folder, rank)
        self.stage = stage

    def allocate(self, places: Sequence[str], size: int) -> None:
        if self.stage == "allocate":
            raise RuntimeError("CUDA driver error: out of memory\nmore of it")
        super().allocate(places, size)

    def meet(self, rank: int, store: Store, name: str) -> list[int]:
        if self.stage == "meet":
            raise AttributeError("no attribute 'buffer_ptrs'")
        found = super().meet(rank, store, name)
        if self.stage == "trial":  # what it lends is not what it reads itself
            found[rank] = (unseen := torch.zeros_like(self.regions[rank])).data_ptr()
            self.regions.append(unseen)
        return found


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _without(group: Group, folder: Path, stage: str, trial: float) -> tuple[list[str], bool, Tensor]:
    from diptych.workers.parallel import symmetric

    symmetric.TRIAL = trial
    seen = _Lines()
    symmetric.log.addHandler(seen)
    lend_mapped(group, folder, memory=_Refusing(folder, group.rank, stage if group.rank == 1 else ""))
    return seen.lines, group.peers is None, group.sum(torch.ones(4), residual=torch.ones(4))


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ("allocate", "at rank 1 CUDA driver error: out of memory"),
        ("meet", "at rank 1 no attribute 'buffer_ptrs'"),
        ("trial", "at rank 0 a first sum gave"),
    ],
)
def test_without_shared_memory_one_line_says_why(tmp_path: Path, stage: str, why: str) -> None:
    """One rank's trouble is every rank's answer."""
    (first, *others) = run_ranks(2, _without, tmp_path, stage, 1e-4)
    (line,) = first[0]
    assert line.startswith(f"small sums of 2 ranks go through NCCL, since {why}")
    assert all(lines == [] for lines, _, _ in others)
    for _, none, y in (first, *others):
        assert none
        assert y.eq(3.0).all()


def test_too_many_ranks_for_one_launch(tmp_path: Path) -> None:
    (first, *_) = run_ranks(RANKS + 1, _without, tmp_path, "", 1.0)
    assert first[0] == [
        f"small sums of {RANKS + 1} ranks go through NCCL, since at rank 0 one launch sums over at most {RANKS} ranks"
    ]
