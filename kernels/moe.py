"""A mixture of experts: routing, then the chosen experts' feed-forward layers, summed with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.linear import linear_reference

Experts = Tensor | Sequence[Tensor]
"""[E, N, K], or on a CPU also E packed weights [N, K] (`linear.pack_weight`)."""


def route(x: Tensor, router_weight: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """p = softmax over all experts of x · router_weightᵀ, in float32; the top_k of them, largest first; divided by
    their sum when `normalise`.

    x: [T, H]. router_weight: [E, H]. Returns weights [T, top_k] float32 and experts [T, top_k] int64.
    """
    return route_scores(linear_reference(x, router_weight), top_k, normalise)


def route_scores(scores: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The routing of raw router scores [T, E]: the weights are probabilities, never the scores themselves."""
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32 if scores.dtype != torch.float64 else None)
    weights, experts = probabilities.topk(top_k, dim=-1)
    if normalise:
        total = reduce(torch.add, weights.unbind(-1))  # in one order, however many tokens there are
        weights = weights / total.unsqueeze(-1)
    return weights, experts


def moe(x: Tensor, router_weight: Tensor, gate_up: Experts, down: Experts, top_k: int, normalise: bool) -> Tensor:
    """y[t] = Σ over the top_k experts e of token t: w[t, e] * (silu(x · gate_eᵀ) * (x · up_eᵀ)) · down_eᵀ

    x: [T, H], normalised already. router_weight: [E, H]. gate_up: [E, 2F, H], gate's F rows first. down: [E, H, F].
    Returns [T, H] of x's dtype. No token is dropped and nothing is padded on the CPU.
    """
    if x.is_cuda:
        from diptych.kernels.triton.moe import moe as launch

        return launch(x, router_weight, gate_up, down, top_k, normalise)
    return moe_reference(x, router_weight, gate_up, down, top_k, normalise)


def routed_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Experts, down: Experts) -> Tensor:
    """y[t] = Σ over k of weights[t, k] * expert_{experts[t, k]}(x[t]), for tokens that were routed before.

    x: [T, H]. weights: [T, top_k] float32. experts: [T, top_k] int64, rows of gate_up and down; -1 adds nothing.
    gate_up: [E, 2F, H]. down: [E, H, F]. Returns [T, H] of x's dtype, weighed in float32; T and E's use may be zero.
    """
    y = torch.zeros(x.shape, dtype=torch.float32 if x.dtype.itemsize < 4 else x.dtype, device=x.device)
    flat = experts.flatten()
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    tokens = order // experts.shape[1]
    counts = torch.bincount(flat[order], minlength=len(gate_up)).tolist()
    start = 0
    for e, count in enumerate(counts):
        if count:
            here = tokens[start : start + count]
            part = _expert(x.index_select(0, here), gate_up[e], down[e])
            y.index_add_(0, here, part.to(y.dtype) * weights.flatten()[order[start : start + count], None].to(y.dtype))
            start += count
    return y.to(x.dtype)


def moe_reference(
    x: Tensor, router_weight: Tensor, gate_up: Experts, down: Experts, top_k: int, normalise: bool
) -> Tensor:
    weights, experts = route(x, router_weight, top_k, normalise)
    if x.shape[0] == 1:
        parts = torch.stack([_expert(x, gate_up[e], down[e])[0] for e in experts[0].tolist()]).unsqueeze_(0)
    else:
        parts = _grouped(x, experts, gate_up, down)
    return _weigh(parts, weights.to(x.dtype))


def _grouped(x: Tensor, experts: Tensor, gate_up: Experts, down: Experts) -> Tensor:
    """[T, top_k, H]: tokens sorted by expert, one product for each expert that was chosen at all."""
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=len(gate_up)).tolist()
    sorted_x = x.index_select(0, order // top_k)
    parts = torch.empty_like(sorted_x)
    start = 0
    for e, count in enumerate(counts):
        if count:
            parts[order[start : start + count]] = _expert(sorted_x[start : start + count], gate_up[e], down[e])
            start += count
    return parts.view(x.shape[0], top_k, -1)


def _weigh(parts: Tensor, weights: Tensor) -> Tensor:
    """Largest weight first, one after another: a library's sum could depend on how many tokens there are."""
    y = parts[:, 0] * weights[:, :1]
    for k in range(1, parts.shape[1]):
        y.addcmul_(parts[:, k], weights[:, k : k + 1])
    return y


def _expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = linear_reference(x, gate_up).chunk(2, dim=-1)
    return linear_reference(functional.silu(gate).mul_(up), down)
