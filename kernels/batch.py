"""The batch of one step, as operators see it.

Owns nothing: the model runner builds one a step and every layer reads it. Knows neither requests nor who owns a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of one step: B sequences, each with one new token (decode) or several (a chunk of its prompt that
    continues what is cached), mixed freely; T tokens in all, a sequence's tokens side by side.

    token_ids, positions: [T] int64.
    slots: [T] int64, where token t's keys and values go: block * block_size + offset.
    query_start: [B+1] int32, first token of each sequence. context_lens: [B] int32, cached tokens after this step.
    block_tables: [B, max_blocks] int32; entries past a sequence's end are never read.
    query_lens, contexts, tables: the same on the host, for the CPU path and for grids. They may be empty where a
    captured graph replays a step of decode.
    max_query, max_context: the largest of query_lens and contexts, or a bound on them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    max_query: int
    max_context: int

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What an operator derives from the batch in the first layer and re-uses in the others (masks, rotary rows)."""
        return {}
