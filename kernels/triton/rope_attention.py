"""`rope_attention` on a GPU: decode in one launch, chunks in a rotary launch and an attention launch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
from torch import Tensor

from diptych.contract.errors import Internal, ModelUnsupported
from diptych.kernels.batch import Batch
from diptych.kernels.invariance import is_batch_invariant
from diptych.kernels.rope import Rope
from diptych.kernels.rope_attention import Unified
from diptych.kernels.triton.common import (
    COUNTERS,
    counters,
    dependent_launch,
    launch_options,
    multiprocessors,
    partials,
)
from diptych.kernels.triton.decode_attention import decode_attention_kernel
from diptych.kernels.triton.plan import decode_plan, prefill_plan
from diptych.kernels.triton.prefill_attention import prefill_attention_kernel
from diptych.kernels.triton.rope_write import rope_write
from diptych.kernels.triton.streamed_attention import QUERY_ROWS, streamed_attention, streams

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = 64
"""Query heads of a KV head × query tokens that decode packs into a tile at most; longer chunks are prefill's."""


@dataclass(frozen=True)
class DecodeConfig:
    """Launch of decode attention. blocks: blocks a multiprocessor that the splits aim at. ahead: so many tokens are
    brought to L2 before the predecessor ends. early: see `Choice`."""

    tile: int = 64
    warps: int = 4
    stages: int = 3
    blocks: int = 4
    ahead: int = 0
    early: bool = False


@dataclass(frozen=True)
class PrefillConfig:
    """rows: query tokens a block. columns: cached tokens a tile."""

    rows: int = 128
    columns: int = 64
    warps: int = 8
    stages: int = 3


def prefill_config(itemsize: int, head_dim: int) -> PrefillConfig:
    if itemsize == 4 or head_dim > 128:
        return PrefillConfig(rows=64, columns=32, warps=4, stages=2)
    return PrefillConfig()


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


def decode_config(sequences: int, kv_heads: int, itemsize: int) -> DecodeConfig:
    """By what a captured graph fixes, which is the batch size, not the lengths. From sweeps on an H200, alone and, for
    `early`, in the whole step: at one sequence the next product's blocks, started early, cost 70 µs a step."""
    if itemsize == 4:
        return DecodeConfig(tile=32, stages=2, blocks=2)
    heads = sequences * kv_heads
    if heads >= 512:  # several waves without any split: small blocks, many at once
        return DecodeConfig(tile=64, warps=4, stages=4, blocks=4, ahead=64, early=True)
    if heads >= 128:
        return DecodeConfig(tile=128, warps=4, stages=4, blocks=2, ahead=128, early=True)
    return DecodeConfig(tile=128, warps=4, stages=5, blocks=1, ahead=128, early=heads > 32)


def rope_attention(
    qkv: Tensor,
    batch: Batch,
    k_cache: Tensor,
    v_cache: Tensor,
    rope: Rope,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    config: DecodeConfig | None = None,
    unified: Unified | None = None,
) -> Tensor:
    """config overrules `decode_config` (tests and the sweep)."""
    shape = Shape(heads, kv_heads, head_dim, scale, window, softcap)
    check(qkv, k_cache, v_cache, rope, shape)
    sequences = batch.context_lens.shape[0]
    out = torch.empty(qkv.shape[0], heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0] == 0:
        return out
    if config is None:
        config = decode_config(sequences, kv_heads, qkv.element_size())
    norms = (q_norm, k_norm, norm_eps)
    if batch.max_query == 1 and not is_batch_invariant():
        _decode(qkv, out, batch, k_cache, v_cache, rope, shape, norms, config, 1, unified)
        return out
    q = rope_write(
        qkv, batch, k_cache, v_cache, rope,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps,
    )  # fmt: skip
    if is_batch_invariant():  # prefill's kernel walks a sequence in tiles that only the sequence places
        _prefill(q, out, batch, k_cache, v_cache, shape, max_query=0)
        return out
    small = ROWS * kv_heads // heads if batch.max_query * heads <= ROWS * kv_heads else 1
    lens = batch.query_lens or (batch.max_query,)
    if any(n <= small for n in lens):
        few = max(n for n in lens if n <= small)
        packed = triton.next_power_of_2(few)
        _decode(q, out, batch, k_cache, v_cache, None, shape, norms, config, packed, None)
    if any(n > small for n in lens):
        _prefill(q, out, batch, k_cache, v_cache, shape, small)
    return out


def check(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, rope: Rope, shape: Shape) -> None:
    """Refuses before any launch what the kernels do not do."""
    d = shape.head_dim
    if qkv.dtype not in DTYPES or k_cache.dtype != qkv.dtype or v_cache.dtype != qkv.dtype:
        raise ModelUnsupported(f"attention of {qkv.dtype} over a cache of {k_cache.dtype} has no GPU kernel")
    if d & (d - 1) or not 16 <= d <= 256:
        raise ModelUnsupported(f"attention with a head size of {d} has no GPU kernel (16, 32, 64, 128 and 256 have)")
    if shape.heads % shape.kv_heads or shape.heads // shape.kv_heads > ROWS:
        raise ModelUnsupported(f"{shape.heads} query heads over {shape.kv_heads} KV heads have no GPU kernel")
    if rope.dim > d or rope.dim % 2:
        raise ModelUnsupported(f"a rotary embedding of {rope.dim} of {d} elements has no GPU kernel")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1 or qkv.stride(-1) != 1:
        raise ModelUnsupported("attention needs a cache and activations that are contiguous in their last dimension")


def _decode(
    q: Tensor, out: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, rope: Rope | None, shape: Shape,
    norms: tuple[Tensor | None, Tensor | None, float], config: DecodeConfig, max_query: int, unified: Unified | None,
) -> None:  # fmt: skip
    device, kv_heads, d = q.device, shape.kv_heads, shape.head_dim
    group = shape.heads // kv_heads
    slots = max(1, multiprocessors(device) * config.blocks // kv_heads)
    plan = decode_plan(
        batch, slots=slots, tile=config.tile, window=shape.window, fused=rope is not None, max_query=max_query,
    )  # fmt: skip
    items = plan.items.shape[0]
    rows = triton.next_power_of_2(group * max_query)
    if items * kv_heads > COUNTERS:
        raise Internal(f"{items} items of {kv_heads} heads exceed the {COUNTERS} counters of decode attention")
    # The plan itself must be complete before anything is read.
    pdl = 0 if plan.fresh else dependent_launch(device, config.early)
    q_norm, k_norm, eps = norms
    log2e = 1.4426950408889634
    decode_attention_kernel[(items, kv_heads)](
        q, out, k_cache, v_cache, batch.block_tables, plan.items, batch.slots,
        q if rope is None else rope.cos, q if rope is None else rope.sin,
        q if q_norm is None else q_norm, q if k_norm is None else k_norm,
        partials(device, items * kv_heads * rows * (d + 2)), counters(device),
        counters(device) if unified is None else unified.counts,
        q.stride(0), batch.block_tables.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        shape.scale, shape.softcap or 1.0, eps,
        *((0.0, 0.0, 0.0) if unified is None else (unified.phi * log2e, unified.low * log2e, unified.high * log2e)),
        HEADS=shape.heads, KV_HEADS=kv_heads, D=d, R=d if rope is None else rope.dim, PAGE=k_cache.shape[1],
        MAXQ=max_query, ROWS=rows, PAD=max(16, rows), TILE=config.tile, STAGES=config.stages,
        CHUNK=max(1, min(16, 16 * config.warps // rows)), WINDOW=shape.window or 0, SOFTCAP=shape.softcap is not None,
        FUSED=rope is not None, QK_NORM=rope is not None and q_norm is not None, UNIFIED=unified is not None,
        AHEAD=config.ahead if pdl else 0, PDL=pdl, num_warps=config.warps,
        **launch_options(pdl),
    )  # fmt: skip


def _prefill(
    q: Tensor, out: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, shape: Shape, max_query: int,
    config: PrefillConfig | None = None,
) -> None:  # fmt: skip
    if config is None:
        if streams(q, k_cache, v_cache, shape.head_dim):
            plan = prefill_plan(batch, tokens=q.shape[0], rows=QUERY_ROWS, max_query=max_query)
            streamed_attention(q, out, k_cache, v_cache, batch.block_tables, plan.items, **asdict(shape))
            return
        config = prefill_config(q.element_size(), shape.head_dim)
    plan = prefill_plan(batch, tokens=q.shape[0], rows=config.rows, max_query=max_query)
    pdl = 0 if plan.fresh else dependent_launch(q.device)
    prefill_attention_kernel[(shape.heads, plan.items.shape[0])](
        q, out, k_cache, v_cache, batch.block_tables, plan.items,
        batch.block_tables.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3], shape.scale, shape.softcap or 1.0,
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, D=shape.head_dim, PAGE=k_cache.shape[1], BM=config.rows,
        BN=config.columns, STAGES=config.stages, WINDOW=shape.window or 0, SOFTCAP=shape.softcap is not None, PDL=pdl,
        num_warps=config.warps, **launch_options(pdl),
    )  # fmt: skip
