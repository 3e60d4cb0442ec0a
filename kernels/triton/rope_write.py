"""q/k norm, rotary embedding and the write of K and V into pages, in one launch: what prefill runs before attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.batch import Batch
from diptych.kernels.rope import Rope
from diptych.kernels.triton.common import dependent_launch, enter, launch_options, leave


@triton.jit
def rope_write_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, position_ptr, slot_ptr, cos_ptr, sin_ptr, qn_ptr, kn_ptr,
    qkv_stride, k_block, k_token, k_head, v_block, v_token, v_head, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    BQ: tl.constexpr, BKV: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, QK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a block."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token)
    slot = tl.load(slot_ptr + token)
    page, offset = slot // PAGE, slot % PAGE
    cos_at, sin_at = cos_ptr + position * R, sin_ptr + position * R
    enter(PDL)
    row = qkv_ptr + token * qkv_stride
    head = tl.arange(0, BQ)[:, None]
    _turn(row + head * D, q_ptr + token * (HEADS * D) + head * D, head < HEADS, cos_at, sin_at, qn_ptr, eps,
          D, R, BR, BD, QK_NORM)  # fmt: skip
    row += HEADS * D
    head = tl.arange(0, BKV)[:, None]
    _turn(row + head * D, k_ptr + page * k_block + offset * k_token + head * k_head, head < KV_HEADS, cos_at, sin_at,
          kn_ptr, eps, D, R, BR, BD, QK_NORM)  # fmt: skip
    row += KV_HEADS * D
    dim = tl.arange(0, D)[None, :]
    v = tl.load(row + head * D + dim, mask=head < KV_HEADS, other=0.0)
    tl.store(v_ptr + page * v_block + offset * v_token + head * v_head + dim, v, mask=head < KV_HEADS)
    leave(PDL)


@triton.jit
def _turn(
    x_ptr, y_ptr, ok, cos_ptr, sin_ptr, norm_ptr, eps,
    D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Heads' vectors at x_ptr [heads, 1], turned, at y_ptr. An element is read once and beside its neighbours, the two
    halves that turn into each other apart: reading the partner by its index took twice the loads, two bytes each."""
    HALF: tl.constexpr = R // 2
    low = tl.arange(0, BR)[None, :]
    high = low + HALF
    turns = ok & (low < HALF)
    a = tl.load(x_ptr + low, mask=turns, other=0.0)
    b = tl.load(x_ptr + high, mask=turns, other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    if R < D:
        rest = R + tl.arange(0, BD)[None, :]
        stays = ok & (rest < D)
        c = tl.load(x_ptr + rest, mask=stays, other=0.0)
    if QK_NORM:
        squares = tl.sum(wide_a * wide_a + wide_b * wide_b, axis=1)
        if R < D:
            wide_c = c.to(tl.float32)
            squares += tl.sum(wide_c * wide_c, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        wide_a = _weighed(wide_a, scale, norm_ptr + low, low < HALF, a.dtype)
        wide_b = _weighed(wide_b, scale, norm_ptr + high, low < HALF, a.dtype)
        if R < D:
            c = _weighed(wide_c, scale, norm_ptr + rest, rest < D, a.dtype).to(c.dtype)
    inside = low < HALF
    cos_a, sin_a = tl.load(cos_ptr + low, mask=inside, other=0.0), tl.load(sin_ptr + low, mask=inside, other=0.0)
    cos_b, sin_b = tl.load(cos_ptr + high, mask=inside, other=0.0), tl.load(sin_ptr + high, mask=inside, other=0.0)
    to = y_ptr.dtype.element_ty
    tl.store(y_ptr + low, (wide_a * cos_a + wide_b * sin_a).to(to), mask=turns)
    tl.store(y_ptr + high, (wide_b * cos_b + wide_a * sin_b).to(to), mask=turns)
    if R < D:
        tl.store(y_ptr + rest, c.to(to), mask=stays)


@triton.jit
def _weighed(x, scale, weight_ptr, inside, dtype: tl.constexpr):
    return (x * scale).to(dtype).to(tl.float32) * tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32)


def rope_write(
    qkv: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, rope: Rope,
    *, heads: int, kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None, norm_eps: float,
) -> Tensor:  # fmt: skip
    """Writes K and V at `batch.slots`; returns the rotated queries [T, heads * head_dim]."""
    tokens = qkv.shape[0]
    q = torch.empty(tokens, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        pdl = dependent_launch(qkv.device)
        rope_write_kernel[(tokens,)](
            qkv, q, k_cache, v_cache, batch.positions, batch.slots, rope.cos, rope.sin,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            qkv.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3], norm_eps,
            HEADS=heads, KV_HEADS=kv_heads, D=head_dim, R=rope.dim, PAGE=k_cache.shape[1],
            BQ=triton.next_power_of_2(heads), BKV=triton.next_power_of_2(kv_heads),
            BR=triton.next_power_of_2(rope.dim // 2), BD=triton.next_power_of_2(max(1, head_dim - rope.dim)),
            QK_NORM=q_norm is not None, PDL=pdl, num_warps=4, **launch_options(pdl),
        )  # fmt: skip
    return q
