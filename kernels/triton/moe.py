"""A mixture of experts on a GPU: rows sorted by expert, two grouped products, no padding of the data and no wait for
the host. Right at every size; its speed is a later matter."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from diptych.contract.errors import ModelUnsupported
from diptych.kernels.invariance import is_batch_invariant
from diptych.kernels.moe import Experts, route_scores
from diptych.kernels.triton.products import product


@triton.jit
def grouped_kernel(
    x_ptr, w_ptr, o_ptr, order_ptr, count_ptr, scale_ptr, n, x_stride,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """order: [rows] int64, the (token, choice) pairs sorted by expert; count: [EXPERTS] int64, rows of each.

    FIRST: x is [tokens, K], w [EXPERTS, 2n, K], o [rows, n] in sorted order: silu(x · gate) * (x · up).
    Else: x is [rows, K] sorted, w [EXPERTS, n, K], o [rows, n] float32 by pair: scale * (x · w).
    Grid: (tiles of BM rows of one expert, ceil(n / BN)); surplus tiles leave at once.
    """
    item = tl.program_id(0)
    e = tl.arange(0, BE)
    count = tl.load(count_ptr + e, mask=e < EXPERTS, other=0).to(tl.int32)
    tiles = (count + BM - 1) // BM
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= item).to(tl.int32), axis=0)
    if expert >= EXPERTS:
        return
    first_row = tl.sum(tl.where(e < expert, count, 0), axis=0)
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
    mine = tl.sum(tl.where(e == expert, count, 0), axis=0)
    row = (item - first_tile) * BM + tl.arange(0, BM)
    live = row < mine
    pair = tl.load(order_ptr + first_row + row, mask=live, other=0)
    source = (first_row + row).to(tl.int64)
    if FIRST:
        source = pair // TOP_K
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    w_row = w_ptr + (expert.to(tl.int64) * (2 * n if FIRST else n) + tl.minimum(cols, n - 1))[:, None] * K
    x_row = x_ptr + source[:, None] * x_stride
    at = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    up = acc
    for k in tl.range(0, K, BK):
        inside = (k + at < K)[None, :]
        x = tl.load(x_row + (k + at)[None, :], mask=live[:, None] & inside, other=0.0)
        w = tl.load(w_row + (k + at)[None, :], mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if FIRST:
            u = tl.load(w_row + n.to(tl.int64) * K + (k + at)[None, :], mask=inside, other=0.0)
            up = tl.dot(x, tl.trans(u), up, input_precision="ieee")
    ok = live[:, None] & (cols < n)[None, :]
    if FIRST:
        acc = acc / (1.0 + tl.exp(-acc)) * up
        sorted_row = (first_row + row).to(tl.int64) * n
        tl.store(o_ptr + sorted_row[:, None] + cols[None, :], acc.to(o_ptr.dtype.element_ty), mask=ok)
    else:
        scale = tl.load(scale_ptr + pair, mask=live, other=0.0)
        tl.store(o_ptr + (pair * n)[:, None] + cols[None, :], acc * scale[:, None], mask=ok)


def route(x: Tensor, router_weight: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """As `kernels.moe.route`; the library's product where the batch may choose it."""
    scores = product(x, router_weight) if is_batch_invariant() else linear(x, router_weight)
    return route_scores(scores, top_k, normalise)


def moe(x: Tensor, router_weight: Tensor, gate_up: Experts, down: Experts, top_k: int, normalise: bool) -> Tensor:
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        raise ModelUnsupported("experts on a GPU are one tensor of all experts")
    if not (gate_up.is_contiguous() and down.is_contiguous() and x.stride(-1) == 1):
        raise ModelUnsupported("experts need contiguous weights and activations contiguous in their last dimension")
    (tokens, hidden), (experts, width2, _) = x.shape, gate_up.shape
    if tokens == 0:
        return torch.empty_like(x)
    weights, chosen = route(x, router_weight, top_k, normalise)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    count = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    rows, f = tokens * top_k, width2 // 2
    inner = torch.empty(rows, f, dtype=x.dtype, device=x.device)
    parts = torch.empty(rows, hidden, dtype=torch.float32, device=x.device)
    _grouped(x, gate_up, inner, order, count, weights, f, top_k, first=True)
    _grouped(inner, down, parts, order, count, weights, hidden, top_k, first=False)
    return _added(parts.view(tokens, top_k, hidden)).to(x.dtype)


def _added(parts: Tensor) -> Tensor:
    """[T, H] of [T, top_k, H]. The library's sum may take another order at another number of rows."""
    return functools.reduce(torch.add, parts.unbind(1)) if is_batch_invariant() else parts.sum(1)


def _grouped(
    x: Tensor, w: Tensor, out: Tensor, order: Tensor, count: Tensor, weights: Tensor, n: int, top_k: int, first: bool
) -> None:
    rows, experts, k = order.shape[0], w.shape[0], w.shape[2]
    bm = 64 if rows >= 64 * experts and not is_batch_invariant() else 16
    wide = x.element_size() == 4
    tiles = min(rows, triton.cdiv(rows, bm) + experts)
    grouped_kernel[(tiles, triton.cdiv(n, 64))](
        x, w, out, order, count, weights, n, x.stride(0),
        TOP_K=top_k, EXPERTS=experts, BE=triton.next_power_of_2(experts), K=k, BM=bm, BN=64, BK=32 if wide else 64,
        FIRST=first, num_warps=4, num_stages=2 if wide else 3,
    )  # fmt: skip
