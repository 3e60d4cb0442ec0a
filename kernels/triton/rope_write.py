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
    BQ: tl.constexpr, BKV: tl.constexpr, QK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a block."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, D)
    turned = tl.where(dim < R // 2, dim + R // 2, tl.where(dim < R, dim - R // 2, dim))
    position = tl.load(position_ptr + token)
    slot = tl.load(slot_ptr + token)
    cos = tl.load(cos_ptr + position * R + dim, mask=dim < R, other=1.0)[None, :]
    sin = tl.load(sin_ptr + position * R + dim, mask=dim < R, other=0.0)[None, :]
    enter(PDL)
    base = qkv_ptr + token * qkv_stride
    head = tl.arange(0, BQ)[:, None]
    q = _turned(base, head, dim, turned, cos, sin, qn_ptr, eps, HEADS, D, QK_NORM)
    tl.store(q_ptr + token * (HEADS * D) + head * D + dim[None, :], q.to(q_ptr.dtype.element_ty), mask=head < HEADS)
    head = tl.arange(0, BKV)[:, None]
    base += HEADS * D
    k = _turned(base, head, dim, turned, cos, sin, kn_ptr, eps, KV_HEADS, D, QK_NORM)
    page, offset = slot // PAGE, slot % PAGE
    k_at = k_ptr + page * k_block + offset * k_token + head * k_head + dim[None, :]
    tl.store(k_at, k.to(k_ptr.dtype.element_ty), mask=head < KV_HEADS)
    v = tl.load(base + KV_HEADS * D + head * D + dim[None, :], mask=head < KV_HEADS, other=0.0)
    tl.store(v_ptr + page * v_block + offset * v_token + head * v_head + dim[None, :], v, mask=head < KV_HEADS)
    leave(PDL)


@triton.jit
def _turned(
    base, head, dim, turned, cos, sin, norm_ptr, eps, COUNT: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr
):
    x = tl.load(base + head * D + dim[None, :], mask=head < COUNT, other=0.0)
    other = tl.load(base + head * D + turned[None, :], mask=head < COUNT, other=0.0)
    wide, wide_other = x.to(tl.float32), other.to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
        wide = (wide * scale).to(x.dtype).to(tl.float32) * tl.load(norm_ptr + dim)[None, :].to(tl.float32)
        wide_other = (wide_other * scale).to(x.dtype).to(tl.float32)
        wide_other = wide_other * tl.load(norm_ptr + turned)[None, :].to(tl.float32)
    return wide * cos + wide_other * sin


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
            BQ=triton.next_power_of_2(heads), BKV=triton.next_power_of_2(kv_heads), QK_NORM=q_norm is not None, PDL=pdl,
            num_warps=4, **launch_options(pdl),
        )  # fmt: skip
    return q
