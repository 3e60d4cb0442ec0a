"""Digests of prompt blocks, computed alike by routers (to choose a worker) and pools (to find cached blocks)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b


def block_digests(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Chained 16-byte digests of the full blocks of `tokens`; digest i depends on all tokens up to block i's end.

    The salt starts the chain, so tenants that are salted apart never share a block. Full token ids are hashed, with a
    cryptographic hash: nobody can make two prompts share a block, as a short or unkeyed hash would allow.
    """
    digests: list[bytes] = []
    extend_digests(digests, tokens, block_size, salt)
    return digests


def extend_digests(digests: list[bytes], tokens: Sequence[int], block_size: int, salt: str = "") -> None:
    """Appends the digests of full blocks that `digests`, a chain over the beginning of `tokens`, lacks."""
    parent = digests[-1] if digests else blake2b(salt.encode(), digest_size=16).digest()
    for index in range(len(digests), len(tokens) // block_size):
        block = tokens[index * block_size : (index + 1) * block_size]
        parent = blake2b(b"".join(token.to_bytes(4, "little") for token in block), key=parent, digest_size=16).digest()
        digests.append(parent)
