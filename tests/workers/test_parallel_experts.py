"""Experts spread over ranks: any routing gives the sum of one rank, nothing is dropped, nothing travels needlessly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.moe import moe_reference, route
from diptych.workers.parallel.experts import SpreadExperts
from diptych.workers.parallel.group import Group
from diptych.workers.parallel.layout import ExpertTable, Grid
from tests.support.ranks import run_ranks, sharing_of

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 3, 32, 24


def _weights(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The router's weight and the experts'. kind: how tokens are spread."""
    draw = torch.Generator().manual_seed(3)
    router = torch.randn(EXPERTS, HIDDEN, generator=draw)
    if kind == "one rank gets all":
        router[:TOP_K] += 40 * torch.ones(HIDDEN)  # inputs have a positive mean
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=draw) * 0.2
    return router, gate_up, torch.randn(EXPERTS, HIDDEN, WIDTH, generator=draw) * 0.2


def _tokens(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)) + 1.0


def _mix(group: Group, kind: str, counts: list[int], table: ExpertTable) -> list[Any]:
    """For each count of tokens: the sum, the pairs computed here, every expert's load, and the bytes sent."""
    router, gate_up, down = _weights(kind)
    held = list(table.held(group.rank))
    found = []
    for count in counts:
        experts = SpreadExperts(router, gate_up[held], down[held], TOP_K, True, table, group, group)
        group.traffic.bytes = 0
        y = experts(_tokens(count))
        found.append((y, experts.computed, experts.load.tolist(), group.traffic.bytes))
    return found


def _bytes(chosen: Tensor, table: ExpertTable, rank: int) -> int:
    """What the rank must send: to each other rank its own tokens that have an expert there, once each with their
    choices; back, a row for each token that came; its counts and its slice of the result to all."""
    ranks, share = table.ranks, -(-len(chosen) // table.ranks)
    owners = torch.tensor(table.owners)[chosen]

    def needed(source: int, target: int) -> int:
        own = owners[source * share : (source + 1) * share]
        return int((own == target).any(1).sum())

    others = [other for other in range(ranks) if other != rank]
    out = sum(needed(rank, other) for other in others)
    back = sum(needed(other, rank) for other in others)
    everyone = (ranks - 1) * ((EXPERTS + ranks) * 8 + share * HIDDEN * 4)
    return out * (HIDDEN * 4 + 2 * TOP_K * 4) + back * HIDDEN * 4 + everyone


@pytest.mark.parametrize("kind", ["random", "one rank gets all"])
@pytest.mark.parametrize(
    ("size", "owners"), [(2, None), (4, None), (2, (1, 0, 0, 1, 1, 1, 0, 1)), (4, (0, 1, 2, 3, 3, 3, 3, 3))]
)
def test_any_routing(kind: str, size: int, owners: tuple[int, ...] | None) -> None:
    """1 token on 4 ranks leaves ranks without any; with one rank getting all, the others have nothing to compute."""
    table = ExpertTable(owners, size) if owners else ExpertTable.even(EXPERTS, size)
    counts = [1, 2, 7, 64]
    router, gate_up, down = _weights(kind)
    ranks = run_ranks(size, _mix, kind, counts, table)
    for index, count in enumerate(counts):
        x = _tokens(count)
        _, chosen = route(x, router, TOP_K, True)
        load = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        right = moe_reference(x.double(), router.double(), gate_up.double(), down.double(), TOP_K, True)
        plain = moe_reference(x, router, gate_up, down, TOP_K, True)
        allowed = 4 * (plain.double() - right).abs().max() + torch.finfo(torch.float32).eps * right.abs().max()
        for rank, found in enumerate(ranks):
            y, computed, counted, sent = found[index]
            assert torch.equal(y, ranks[0][index][0])
            assert (y.double() - right).abs().max() <= allowed
            assert counted == load
            # Exactly its experts' tokens: its fair share times the routing's own imbalance, and not one more.
            assert computed == sum(load[expert] for expert in table.held(rank))
            assert sent == _bytes(chosen, table, rank)


def _mix_data(group: Group, grid: Grid, kind: str, work: list[tuple[int, ...]], table: ExpertTable) -> list[Any]:
    """For each step, given as every data rank's count of tokens: as `_mix`, with the bytes of both groups."""
    router, gate_up, down = _weights(kind)
    held, sharing = list(table.held(group.rank)), sharing_of(group, grid)
    own, found = grid.place(group.rank)[0], []
    for counts in work:
        experts = SpreadExperts(router, gate_up[held], down[held], TOP_K, True, table, group, sharing)
        groups = [each for each in (group, sharing) if each is not None]
        for each in groups:
            each.traffic.bytes = 0
        y = experts(_tokens(counts[own]))
        found.append((y, experts.computed, experts.load.tolist(), sum(each.traffic.bytes for each in groups)))
    return found


def _data_bytes(chosen: list[Tensor], grid: Grid, table: ExpertTable, rank: int) -> int:
    """What the rank must send: its own share of its data rank's tokens to the ranks of all data ranks that they need,
    back a row for each that came; its counts to all, its slice of the result to those that share its data rank."""
    owners = torch.tensor(table.owners)

    def needed(source: int, target: int) -> int:
        data_rank, place = grid.place(source)
        share = -(-len(chosen[data_rank]) // grid.tensor)
        return int((owners[chosen[data_rank][place * share : (place + 1) * share]] == target).any(1).sum())

    others = [other for other in range(grid.ranks) if other != rank]
    out = sum(needed(rank, other) for other in others)
    back = sum(needed(other, rank) for other in others)
    share = -(-len(chosen[grid.place(rank)[0]]) // grid.tensor)
    everyone = (grid.ranks - 1) * (EXPERTS + grid.ranks) * 8 + (grid.tensor - 1) * share * HIDDEN * 4
    return out * (HIDDEN * 4 + 2 * TOP_K * 4) + back * HIDDEN * 4 + everyone


@pytest.mark.parametrize("kind", ["random", "one rank gets all"])
@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2), pytest.param(Grid(4, 1), marks=pytest.mark.slow)])
def test_any_routing_between_data_ranks(kind: str, grid: Grid) -> None:
    """Each data rank has tokens of its own, or none; what they send each other is exactly what they need."""
    table = ExpertTable.even(EXPERTS, grid.ranks)
    work = [(1, 0, 3, 0), (0, 1, 0, 0), (7, 64, 2, 5), (0, 0, 0, 0)]
    work = [counts[: grid.data] for counts in work]
    router, gate_up, down = _weights(kind)
    ranks = run_ranks(grid.ranks, _mix_data, grid, kind, work, table)
    for index, counts in enumerate(work):
        chosen = [route(_tokens(count), router, TOP_K, True)[1] for count in counts]
        load = torch.bincount(torch.cat(chosen).flatten(), minlength=EXPERTS).tolist()
        for rank, found in enumerate(ranks):
            y, computed, counted, sent = found[index]
            x = _tokens(counts[grid.place(rank)[0]])
            assert y.shape == x.shape
            if len(x):
                right = moe_reference(x.double(), router.double(), gate_up.double(), down.double(), TOP_K, True)
                plain = moe_reference(x, router, gate_up, down, TOP_K, True)
                allowed = 4 * (plain.double() - right).abs().max() + torch.finfo(torch.float32).eps * right.abs().max()
                assert (y.double() - right).abs().max() <= allowed
            assert counted == load
            assert computed == sum(load[expert] for expert in table.held(rank))
            assert sent == _data_bytes(chosen, grid, table, rank)
