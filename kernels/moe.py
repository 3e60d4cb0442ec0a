"""A mixture of experts: routing, then the chosen experts' feed-forward layers, summed with their weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def route(x: Tensor, router_weight: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """p = softmax over all experts of x · router_weightᵀ, in float32; the top_k of them, largest first; divided by
    their sum when `normalise`.

    x: [T, H]. router_weight: [E, H]. Returns weights [T, top_k] float32 and experts [T, top_k] int64.
    """
    return route_scores(functional.linear(x, router_weight), top_k, normalise)


def route_scores(scores: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The routing of raw router scores [T, E]: the weights are probabilities, never the scores themselves."""
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32 if scores.dtype != torch.float64 else None)
    weights, experts = probabilities.topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def moe(x: Tensor, router_weight: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalise: bool) -> Tensor:
    """y[t] = Σ over the top_k experts e of token t: w[t, e] * (silu(x · gate_eᵀ) * (x · up_eᵀ)) · down_eᵀ

    x: [T, H], normalised already. router_weight: [E, H]. gate_up: [E, 2F, H], gate's F rows first. down: [E, H, F].
    Returns [T, H] of x's dtype. No token is dropped and nothing is padded on the CPU.
    """
    if x.is_cuda:
        from diptych.kernels.triton.moe import moe as launch

        return launch(x, router_weight, gate_up, down, top_k, normalise)
    return moe_reference(x, router_weight, gate_up, down, top_k, normalise)


def moe_reference(
    x: Tensor, router_weight: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalise: bool
) -> Tensor:
    weights, experts = route(x, router_weight, top_k, normalise)
    if x.shape[0] == 1:
        return _one_token(x, weights.to(x.dtype), experts[0].tolist(), gate_up, down)
    return _grouped(x, weights.to(x.dtype), experts, gate_up, down)


def _one_token(x: Tensor, weights: Tensor, experts: list[int], gate_up: Tensor, down: Tensor) -> Tensor:
    parts = torch.stack([_expert(x, gate_up[e], down[e])[0] for e in experts])
    return weights @ parts


def _grouped(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Tokens sorted by expert, one product for each expert that was chosen at all."""
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0]).tolist()
    sorted_x = x.index_select(0, order // top_k)
    parts = torch.empty_like(sorted_x)
    start = 0
    for e, count in enumerate(counts):
        if count:
            parts[order[start : start + count]] = _expert(sorted_x[start : start + count], gate_up[e], down[e])
            start += count
    return torch.bmm(weights.unsqueeze(1), parts.view(x.shape[0], top_k, -1)).squeeze(1)


def _expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate).mul_(up), down)
