"""Experts divided over a group's ranks: each token travels to the ranks that hold its experts, and their sum back.

Attention leaves every token of a data rank at each of its ranks, so they divide the tokens among themselves first. A
rank then routes its own, sends each once to every rank of the whole group that holds any of its experts (never twice,
never where it is not needed), computes what came, sends the weighed sums back, adds up what returns, and the ranks of a
data rank gather its whole. No token is dropped, whatever the routing; a rank may have no token and an expert none or
all.

    counts ─gather─▶ tokens, choices ─exchange─▶ experts ─exchange─▶ sum ─gather─▶
    all ranks        all ranks                   all ranks                one data rank's
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.kernels.moe import Experts, route, routed_experts
from diptych.workers.parallel.group import Group
from diptych.workers.parallel.layout import ExpertTable, padded_share


@dataclass(frozen=True)
class _Dispatch:
    """Where this rank's tokens go. tokens: their indices, rank after rank. send: how many go to each rank. choices:
    [len(tokens), 2 top_k] int32: places of the experts at that rank (-1: another's), then the weights' bits."""

    tokens: Tensor
    send: list[int]
    choices: Tensor


class SpreadExperts:
    """One rank's part of a layer's experts. `load` counts the tokens of each expert, over all ranks, since the start;
    `computed` the (token, expert) pairs of this rank."""

    def __init__(
        self,
        router: Tensor,
        gate_up: Experts,
        down: Experts,
        top_k: int,
        normalise: bool,
        table: ExpertTable,
        group: Group,
        sharing: Group | None,
    ) -> None:
        """gate_up, down: of the experts that `table` gives this rank, in the table's order. group: of all ranks.
        sharing: of those that hold the same tokens; None for this rank alone."""
        self.router, self.gate_up, self.down = router, gate_up, down
        self.top_k, self.normalise, self.table, self.group, self.sharing = top_k, normalise, table, group, sharing
        device = gate_up[0].device
        self._owner = torch.tensor(table.owners, device=device)
        self._place = torch.empty(len(table.owners), dtype=torch.int64, device=device)
        for rank in range(table.ranks):
            held = table.held(rank)
            self._place[list(held)] = torch.arange(len(held), device=device)
        self.load = torch.zeros(len(table.owners), dtype=torch.int64)
        self.computed = 0

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H], the same at all ranks that share them; T may differ between data ranks, and be zero."""
        if self.sharing is None:
            return self._mix(x)
        share = padded_share(len(x), self.sharing.rank, self.sharing.size)
        own = x[share.start : share.stop]
        summed = own.new_zeros((len(share), x.shape[1]))
        summed[: len(own)] = self._mix(own)
        return self.sharing.gather(summed).flatten(0, 1)[: len(x)]

    def _mix(self, own: Tensor) -> Tensor:
        weights, experts = route(own, self.router, self.top_k, self.normalise)
        dispatch = self._dispatch(weights, experts)
        receive = self._agree(experts, dispatch.send)
        came = self.group.exchange(own[dispatch.tokens], dispatch.send, receive)
        choices = self.group.exchange(dispatch.choices, dispatch.send, receive)
        places, bits = choices[:, : self.top_k], choices[:, self.top_k :]
        self.computed += int((places >= 0).sum())
        done = routed_experts(came, bits.contiguous().view(torch.float32), places.long(), self.gate_up, self.down)
        back = self.group.exchange(done, receive, dispatch.send)
        return torch.zeros_like(own).index_add_(0, dispatch.tokens, back)

    def _dispatch(self, weights: Tensor, experts: Tensor) -> _Dispatch:
        owners, places = self._owner[experts], self._place[experts].int()
        bits = weights.float().contiguous().view(torch.int32)
        tokens, choices = [], []
        for rank in range(self.group.size):
            there = owners == rank
            needed = there.any(1).nonzero().flatten()
            tokens.append(needed)
            chosen = places.masked_fill(~there, -1)
            choices.append(torch.cat((chosen, bits), 1)[needed])
        return _Dispatch(torch.cat(tokens), [len(part) for part in tokens], torch.cat(choices))

    def _agree(self, experts: Tensor, send: list[int]) -> list[int]:
        """Tells every rank what goes where; returns what comes here, and counts the experts' load."""
        chosen = torch.bincount(experts.flatten(), minlength=len(self.table.owners))
        told = self.group.gather(torch.cat((chosen, torch.tensor(send, device=chosen.device)))).cpu()
        self.load += told[:, : len(self.table.owners)].sum(0)
        received: list[int] = told[:, len(self.table.owners) + self.group.rank].tolist()
        return received
