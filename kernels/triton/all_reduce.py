"""A one-shot sum over ranks on a GPU: a block a chunk, which waits for the same block of each peer, for no other.

All blocks fit the device at once (`BLOCKS` of 256 threads), so that no rank's waiting blocks can keep its own others,
which a peer waits for, from running.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.all_reduce import CHUNK, Peers, flag_bytes
from diptych.kernels.triton.common import dependent_launch, enter, launch_options, leave


@triton.jit
def all_reduce_kernel(
    x_ptr, bias_ptr, residual_ptr, address_ptr, call_ptr, elements, n, polls,
    RANK: tl.constexpr, RANKS: tl.constexpr, FLAGS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """address: of RANKS regions (FLAGS bytes of flags [blocks, RANKS], then two slots of CHUNK bytes a block), and of
    where to note that a wait was given up. call: [blocks], how often each block has run."""
    block = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    index = block * BLOCK + at
    live = index < elements
    enter(PDL)
    call = tl.load(call_ptr + block) + 1
    slot = FLAGS + (block * 2 + (call & 1)) * CHUNK
    kind = tl.pointer_type(x_ptr.dtype.element_ty)
    own = tl.load(x_ptr + index, mask=live, other=0.0)
    home = tl.load(address_ptr + RANK)
    tl.store(tl.multiple_of((home + slot).to(kind) + at, 16), own, mask=live)
    tl.debug_barrier()  # the whole block's part is there before its one flag says so
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = tl.load(address_ptr + peer).to(tl.pointer_type(tl.int32)) + block * RANKS + RANK
            tl.atomic_xchg(flag, call, sem="release", scope="sys")
    missing = call * 0
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = home.to(tl.pointer_type(tl.int32)) + block * RANKS + peer
            late = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - call
            left = polls
            while (late < 0) & (left > 0):
                late = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - call
                left -= 1
            missing += (late < 0).to(tl.int32)
    y = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            y += own.to(tl.float32)
        else:
            theirs = tl.multiple_of((tl.load(address_ptr + peer) + slot).to(kind) + at, 16)
            y += tl.load(theirs, mask=live, other=0.0, volatile=True).to(tl.float32)
    if missing > 0:
        y = y * float("nan")
        tl.store(tl.load(address_ptr + RANKS).to(tl.pointer_type(tl.int32)), 1)
    y = y.to(x_ptr.dtype.element_ty)
    if BIAS:
        y = (y.to(tl.float32) + tl.load(bias_ptr + index % n, mask=live, other=0.0).to(tl.float32)).to(y.dtype)
    if RESIDUAL:
        y = (y.to(tl.float32) + tl.load(residual_ptr + index, mask=live, other=0.0).to(tl.float32)).to(y.dtype)
    tl.store(x_ptr + index, y, mask=live)
    tl.store(call_ptr + block, call)
    leave(PDL)


def all_reduce(x: Tensor, peers: Peers, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """As `diptych.kernels.all_reduce.all_reduce`."""
    block = CHUNK // x.element_size()
    pdl = dependent_launch(x.device)
    all_reduce_kernel[(triton.cdiv(x.numel(), block),)](
        x, x if bias is None else bias, x if residual is None else residual, peers.table, peers.calls,
        x.numel(), x.shape[-1], peers.polls,
        RANK=peers.rank, RANKS=peers.ranks, FLAGS=flag_bytes(peers.ranks), CHUNK=CHUNK, BLOCK=block,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=pdl, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    return x
