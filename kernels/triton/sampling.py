"""The draw on a GPU, without a wait for the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.contract.errors import ModelUnsupported
from diptych.kernels.sampling import SampleParams
from diptych.kernels.triton.common import counters, dependent_launch, enter, launch_options, leave, partials

BLOCK = 4096


@triton.jit
def greedy_kernel(
    x_ptr, out_ptr, part_ptr, count_ptr, vocab, x_stride,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, number of blocks of the vocabulary). The last block of a row combines."""
    row, part = tl.program_id(0), tl.program_id(1)
    splits = tl.num_programs(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    enter(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=0)
    where = tl.min(tl.where(x == best, at, 2147483647), axis=0)  # the first of equals
    base = part_ptr + (row * splits) * 2
    tl.store(base + part * 2, best)
    tl.store(base + part * 2 + 1, where.to(tl.float32, bitcast=True))
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") == splits - 1:
        tl.store(count_ptr + row, 0)
        i = tl.arange(0, SPLITS)
        values = tl.load(base + i * 2, mask=i < splits, other=float("-inf"), cache_modifier=".cg")
        places = tl.load(base + i * 2 + 1, mask=i < splits, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
        best = tl.max(values, axis=0)
        first = tl.min(tl.where((values == best) & (i < splits), places, 2147483647), axis=0)
        # of a row of NaNs none is the largest: a token all the same, since the next step reads its embedding
        tl.store(out_ptr + row, tl.minimum(first, vocab - 1).to(tl.int64))
    leave(PDL)


def greedy(logits: Tensor) -> Tensor:
    """The largest logit of each row, the first of equals; some token of a row of NaNs. logits: [B, V], rows contiguous.
    Returns [B] int64."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    splits = triton.cdiv(vocab, BLOCK)
    pdl = dependent_launch(logits.device)
    greedy_kernel[(rows, splits)](
        logits, out, partials(logits.device, rows * splits * 2), counters(logits.device), vocab, logits.stride(0),
        BLOCK=BLOCK, SPLITS=triton.next_power_of_2(splits), PDL=pdl, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def advance_kernel(
    ids_ptr, token_ptr, position_ptr, slot_ptr, context_ptr, table_ptr, rows, table_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK)
    ok = row < rows
    enter(PDL)
    context = tl.load(context_ptr + row, mask=ok, other=0)
    ok = ok & (context > 0)
    block = tl.load(table_ptr + row * table_stride + context // PAGE, mask=ok, other=0).to(tl.int64)
    tl.store(token_ptr + row, tl.load(ids_ptr + row, mask=ok), mask=ok)
    tl.store(position_ptr + row, context.to(tl.int64), mask=ok)
    tl.store(slot_ptr + row, block * PAGE + context % PAGE, mask=ok)
    tl.store(context_ptr + row, context + 1, mask=ok)
    leave(PDL)


def advance(ids: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, context_lens: Tensor, tables: Tensor,
            page: int) -> None:  # fmt: skip
    """Makes a decode batch of the next step in place: the drawn ids become its tokens, each context grows by one. Rows
    with an empty context stay as they are. The block table must hold the next token's block already."""
    rows = ids.shape[0]
    pdl = dependent_launch(ids.device)
    advance_kernel[(1,)](
        ids, token_ids, positions, slots, context_lens, tables, rows, tables.stride(0),
        PAGE=page, BLOCK=triton.next_power_of_2(rows), PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def sample_kernel(
    x_ptr, out_ptr, temperature_ptr, uniform_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab, x_stride,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """A block draws one row. A token's distance is (largest logit - its logit) / temperature, not negative, so that its
    bits order as an integer key; each filter is a bound on the key, found by a search over keys instead of a sort."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    temperature = tl.load(temperature_ptr + row)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(x_row + at, mask=at < vocab, other=float("-inf")))
    top = tl.max(best, axis=0)
    bound = tl.full((), 0x7F7FFFFF, tl.int64)  # the largest finite distance: -inf is never drawn
    if TOP_K:
        wanted = tl.load(top_k_ptr + row)
        if (wanted > 0) & (wanted < vocab):
            bound = _border(x_row, vocab, top, temperature, wanted.to(tl.float64), bound, BLOCK, False)
    if TOP_P:
        share = tl.load(top_p_ptr + row)
        if share < 1.0:
            wanted_mass = _mass(x_row, vocab, top, temperature, bound, BLOCK) * share.to(tl.float64)
            bound = _border(x_row, vocab, top, temperature, wanted_mass, bound, BLOCK, True)
    if MIN_P:
        least = tl.load(min_p_ptr + row)
        if least > 0.0:
            far = tl.maximum(-tl.log(least), 0.0)
            bound = tl.minimum(bound, far.to(tl.int32, bitcast=True).to(tl.int64))
    target = _mass(x_row, vocab, top, temperature, bound, BLOCK) * tl.load(uniform_ptr + row)
    running = tl.full((), 0.0, tl.float64)
    found = tl.full((), -1, tl.int32)
    last = tl.full((), 0, tl.int32)  # the last kept token, should rounding leave the target past the end
    for start in tl.range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight, _ = _weights(x_row, at, vocab, top, temperature, bound)
        total = tl.sum(weight, axis=0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), axis=0))
        if (found < 0) & (running + total > target):
            inside = tl.cumsum(weight, axis=0)
            passed = (inside > (target - running).to(tl.float32)) & (weight > 0.0)
            here = tl.min(tl.where(passed, at, 2147483647), axis=0)
            found = tl.where(here < 2147483647, here, -1)
        running += total
    tl.store(out_ptr + row, tl.where(found < 0, last, found).to(tl.int64))


@triton.jit
def _weights(x_row, at, vocab, top, temperature, bound):
    x = tl.load(x_row + at, mask=at < vocab, other=float("-inf"))
    distance = (top - x) / temperature
    key = distance.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(key <= bound, tl.exp(-distance), 0.0), key


@triton.jit
def _mass(x_row, vocab, top, temperature, bound, BLOCK: tl.constexpr):
    total = tl.full((), 0.0, tl.float64)
    for start in tl.range(0, vocab, BLOCK):
        weight, _ = _weights(x_row, start + tl.arange(0, BLOCK), vocab, top, temperature, bound)
        total += tl.sum(weight, axis=0).to(tl.float64)
    return total


@triton.jit
def _border(x_row, vocab, top, temperature, wanted, bound, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """The smallest key such that tokens up to it are `wanted` in number or, with MASS, in weight: two bits a pass."""
    low = tl.full((), 0, tl.int64)
    unit = tl.full((), 1 << 30, tl.int64)
    for _ in tl.range(0, 16):
        one, two, three = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        for start in tl.range(0, vocab, BLOCK):
            weight, key = _weights(x_row, start + tl.arange(0, BLOCK), vocab, top, temperature, bound)
            if not MASS:
                weight = tl.where(key <= bound, 1.0, 0.0)
            one += tl.sum(tl.where(key < low + unit, weight, 0.0), axis=0).to(tl.float64)
            two += tl.sum(tl.where(key < low + 2 * unit, weight, 0.0), axis=0).to(tl.float64)
            three += tl.sum(tl.where(key < low + 3 * unit, weight, 0.0), axis=0).to(tl.float64)
        above = (one < wanted).to(tl.int64) + (two < wanted).to(tl.int64) + (three < wanted).to(tl.int64)
        low += above * unit
        unit = unit >> 2
    return tl.minimum(low, bound)


def sample(logits: Tensor, params: SampleParams, block: int = BLOCK) -> Tensor:
    """`kernels.sampling.sample` in one launch; a row's token is the same alone and in any batch."""
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ModelUnsupported(f"a draw from {logits.dtype} logits has no GPU kernel: float32, contiguous rows")
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        top_k, top_p, min_p = params.top_k, params.top_p, params.min_p
        sample_kernel[(rows,)](
            logits, out, params.temperature, params.uniform, out if top_k is None else top_k,
            params.temperature if top_p is None else top_p, params.temperature if min_p is None else min_p,
            vocab, logits.stride(0), BLOCK=block, TOP_K=top_k is not None, TOP_P=top_p is not None,
            MIN_P=min_p is not None, num_warps=16,
        )  # fmt: skip
    return out
