"""A sum over ranks that read each other's memory: one launch, where latency rather than bandwidth rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.contract.errors import Internal

CHUNK = 4096
"""Bytes of a message that one block sums."""
LIMIT = 512 << 10
"""Bytes of the longest message: above, reading every rank's whole message costs more than a ring does."""
BLOCKS = LIMIT // CHUNK
RANKS = 8
POLLS_A_SECOND = 1 << 20
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def region_bytes(ranks: int) -> int:
    """What each rank lends to the others: a flag for each block and rank, then each block's two slots."""
    return flag_bytes(ranks) + 2 * LIMIT


def flag_bytes(ranks: int) -> int:
    return -(-BLOCKS * ranks * 4 // CHUNK) * CHUNK


@dataclass(frozen=True, eq=False)
class Peers:
    """One rank's view of a group's memory, made before any call and kept as long as captured graphs may replay one.

    rank, ranks: of the group, at most `RANKS`. table: [ranks + 1] int64 on the device: the address of each rank's
    region (`region_bytes`, zero at first) as this rank reaches it, then that of `given_up`. calls: [BLOCKS] int32 zeros
    on the device, this rank's alone. given_up: [1] int32 zero on the host, reachable from the device: set when a peer
    did not come within `polls` looks of about a microsecond each. kept: what owns all this memory.
    """

    rank: int
    ranks: int
    table: Tensor
    calls: Tensor
    given_up: Tensor
    polls: int
    kept: object = None

    def takes(self, x: Tensor) -> bool:
        """Whether `all_reduce` can do it: a question of sizes and types, so the same answer at every rank."""
        return 0 < x.nbytes <= LIMIT and x.dtype in DTYPES and x.is_contiguous()

    def check(self) -> None:
        """Raises `Internal` once a peer failed to come; costs a look at host memory."""
        if self.given_up[0]:
            raise Internal(f"A rank of {self.ranks} waited in vain for another's part of a sum.")


def all_reduce(x: Tensor, peers: Peers, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x ← Σ over ranks of x (+ bias) (+ residual), in place; returns x.

    x: [..., N], as `Peers.takes`. bias: [N]. residual: of x's shape, contiguous. Added up in float32 in the order of
    ranks and rounded once, then again after each of bias and residual, as separate operators would: every rank gets the
    same bits, and two ranks get those of any other sum. All ranks must call with equal shapes in the same order, on one
    stream; a CUDA graph may capture it and replay it any number of times. When a peer does not come the result is NaN
    and `Peers.check` raises from then on.

    One-shot: each rank lays its part into its own region, tells each peer so by a flag there, and reads all regions.
    Flags count calls and never go back, and a block's slots alternate, so nothing is reset and no second meeting is
    needed: whoever writes a slot again has seen every peer in the call between, and so past its reading.
    """
    if not peers.takes(x):
        raise Internal(f"A sum of {tuple(x.shape)} {x.dtype} is not one for a single launch (at most {LIMIT} bytes).")
    from diptych.kernels.triton.all_reduce import all_reduce as launch

    return launch(x, peers, bias, residual)


def all_reduce_reference(parts: Sequence[Tensor], bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """parts: every rank's x, in order."""
    wide = torch.float32 if parts[0].dtype.itemsize < 4 else parts[0].dtype
    y = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        y += part
    y = y.to(parts[0].dtype)
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual
