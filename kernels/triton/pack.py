"""Packing on a GPU: any tokens and heads of all layers between scattered pages and one slab, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def pack_kernel(
    page_ptr, slab_ptr, block_ptr, first, count, heads, first_head,
    layer_stride, kv_stride, block_stride, token_stride, head_stride,
    D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, INTO_PAGES: tl.constexpr,
):  # fmt: skip
    """pages: [layers, 2, blocks, PAGE, heads, D], any strides; slab: [layers, 2, count, heads, D] contiguous. Grid:
    (ceil(count / BT), ceil(heads / BH), 2 * layers)."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    plane = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, BD)[None, None, :]
    at = first + token
    block = tl.load(block_ptr + at // PAGE, mask=token < count, other=0).to(tl.int64)
    page = plane // 2 * layer_stride + plane % 2 * kv_stride + block * block_stride + at % PAGE * token_stride
    page_at = page_ptr + page[:, None, None] + ((head + first_head).to(tl.int64) * head_stride)[None, :, None] + dim
    row = (plane * count + token)[:, None, None] * heads + head[None, :, None]
    slab_at = slab_ptr + row * D + dim
    ok = (token < count)[:, None, None] & (head < heads)[None, :, None] & (dim < D)
    if INTO_PAGES:
        tl.store(page_at, tl.load(slab_at, mask=ok), mask=ok)
    else:
        tl.store(slab_at, tl.load(page_at, mask=ok), mask=ok)


def copy_tokens(
    pages: Tensor,
    blocks: Sequence[int] | Tensor,
    first: int,
    count: int,
    slab: Tensor,
    into_pages: bool,
    first_head: int = 0,
) -> None:
    """pages: [layers, 2, blocks, page, heads of the cache, D], last dimension contiguous.

    slab: [layers, 2, count, heads, D] contiguous, for heads [first_head, first_head + heads). blocks: the block table,
    on the device or a list.
    """
    layers, _, _, page, _, d = pages.shape
    heads = slab.shape[3]
    if count == 0 or heads == 0:
        return
    if not isinstance(blocks, Tensor):
        blocks = torch.tensor(blocks, dtype=torch.int32).to(pages.device, non_blocking=True)
    tokens, wide = min(16, triton.next_power_of_2(page)), min(8, triton.next_power_of_2(heads))
    pack_kernel[(triton.cdiv(count, tokens), triton.cdiv(heads, wide), 2 * layers)](
        pages, slab, blocks, first, count, heads, first_head, *pages.stride()[:5],
        D=d, BD=triton.next_power_of_2(d), PAGE=page, BT=tokens, BH=wide, INTO_PAGES=into_pages, num_warps=8,
    )  # fmt: skip
