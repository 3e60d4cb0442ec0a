"""Digests of prompt blocks, computed alike by routers (to choose a worker) and pools (to find cached blocks)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b


def block_digests(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Chained 16-byte digests of the full blocks of `tokens`; digest i depends on all tokens up to block i's end.

    The salt starts the chain, so tenants that are salted apart never share a block. Full token ids are hashed, with a
    cryptographic hash: an attacker cannot make two prompts share a block (as a short or unkeyed hash would allow).
    """
    parent = blake2b(salt.encode(), digest_size=16).digest()
    digests = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_size])
        parent = blake2b(block, key=parent, digest_size=16).digest()
        digests.append(parent)
    return digests
