"""The KV cache's memory: one tensor an engine, seen as pages a layer. Who owns which block is `blocks.py`'s matter."""

from __future__ import annotations

import msgspec
import torch


class KVLayout(msgspec.Struct, frozen=True):
    """What one block holds, and so what two workers must agree on before one may send KV to the other.

    A list of kinds of state per layer would stand here; today every layer is paged KV of one shape.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


class KVCache:
    """`k[layer]`, `v[layer]`: [num_blocks, block_size, kv_heads, head_dim] views of one allocation.

    The logical view is the same everywhere; the physical order is not. On a CPU a block is token-major, so that
    consecutive blocks of a layer are one strided [tokens, heads, dim] tensor that attention reads without a copy. On a
    GPU it is head-major ([heads, tokens, dim]): a head's page is contiguous, which re-slicing by head wants and which
    costs attention nothing.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        if device.type == "cpu":
            self.data = torch.zeros(layers, 2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype)
            pages = self.data
        else:
            self.data = torch.zeros(layers, 2, num_blocks, kv_heads, block_size, head_dim, dtype=dtype, device=device)
            pages = self.data.transpose(3, 4)
        self.pages = pages  # [layers, 2, blocks, tokens, heads, dim], logical
        self.k = [pages[layer, 0] for layer in range(layers)]
        self.v = [pages[layer, 1] for layer in range(layers)]
        self.layout = KVLayout(layers, kv_heads, head_dim, block_size, str(dtype).removeprefix("torch."))
        self.num_blocks = num_blocks

    @classmethod
    def of(cls, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> KVCache:
        return cls(
            layout.layers, num_blocks, layout.block_size, layout.kv_heads, layout.head_dim, layout.torch_dtype, device
        )
