"""Attention of one decoder layer: q/k norm, rotary embedding, writing keys and values into pages, paged attention.

The CPU path works on views of the cache: a sequence whose blocks follow each other is never copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.batch import Batch
from diptych.kernels.rms_norm import rms_norm_reference
from diptych.kernels.rope import Rope

_SHORT = 512


@dataclass(frozen=True, eq=False)
class Unified:
    """The asynchronous softmax of FlashDecoding++ (Hong et al., arXiv 2311.01282, §3): a scale known before takes the
    place of decode's running maximum. Rows whose largest score leaves [phi - low, phi + high] (natural units of the
    scores) are computed again. counts: int64 [2], adds up the rows computed again and all rows, a part of a split
    sequence as a row of its own."""

    phi: float
    low: float
    high: float
    counts: Tensor


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
    unified: Unified | None = None,
) -> Tensor:
    """For each token t of sequence b, at position p:

        q, k, v = split(qkv[t]);  q, k = rms_norm(q, q_norm), rms_norm(k, k_norm)  (when given);  q, k = rotate(q, k, p)
        k_cache[slot(t)], v_cache[slot(t)] = k, v
        s_j = scale * q · k_j  for cached j <= p (and j > p - window)
        s_j = softcap * tanh(s_j / softcap)  (when given)
        out[t] = Σ softmax(s)_j * v_j

    qkv: [T, (heads + 2 * kv_heads) * head_dim], last dimension contiguous, heads of q first, then k, then v; its
    contents may be overwritten. k_cache, v_cache: [blocks, block_size, kv_heads, head_dim], any strides but a
    contiguous last dimension; written at `batch.slots` only. q_norm, k_norm: [head_dim]. Query head h reads KV head
    h // (heads / kv_heads). unified: how decode may take its softmax on a GPU; the result is the same. Returns
    [T, heads * head_dim] of qkv's dtype, contiguous. Sequences do not affect each other.
    """
    run = rope_attention_reference
    if qkv.is_cuda:
        from diptych.kernels.triton.rope_attention import rope_attention as launch

        run = launch
    return run(
        qkv, batch, k_cache, v_cache, rope, heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=scale,
        window=window, softcap=softcap, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps, unified=unified,
    )  # fmt: skip


def rope_attention_reference(
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
    unified: Unified | None = None,
) -> Tensor:
    rows = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    turned, value = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        weight = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
        turned = rms_norm_reference(turned, weight, norm_eps)
    turned = _rotate(turned, *_rotary_rows(batch, rope, qkv.dtype))
    _write(k_cache, batch.slots, turned[:, heads:])
    _write(v_cache, batch.slots, value)
    query = turned[:, :heads].transpose(0, 1).unsqueeze(0)
    keys, values = _lift(k_cache), _lift(v_cache)
    outputs, threads = [], torch.get_num_threads()
    try:
        for part in _parts(batch, k_cache, window):
            torch.set_num_threads(1 if part.short else threads)
            q = query.narrow(2, part.first, part.queries)
            k, v = _read(k_cache, keys, part), _read(v_cache, values, part)
            outputs.append(_attend(q, k, v, part, scale, softcap).transpose(1, 2))
    finally:
        torch.set_num_threads(threads)
    mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return mixed.reshape(qkv.shape[0], heads * head_dim)


@dataclass(frozen=True, eq=False)
class _Part:
    """One sequence of the batch. first, queries: its tokens. length: the cached tokens that it reads, S. start: the
    first of them among the cache's rows, or, when its blocks do not follow each other, among the rows of `blocks`,
    which are gathered. mask: [Q, S] bool, True is seen, or None where `causal` or a single query says it all."""

    first: int
    queries: int
    start: int
    length: int
    blocks: Tensor | None
    causal: bool
    mask: Tensor | None

    @property
    def short(self) -> bool:
        """To be done by one thread. Decode at a short context is 10 to 30 µs of work: split, it gains a fifth on an
        idle machine and loses a third where two engines share the cores, as each split ends in a barrier. The library
        splits one query's keys by thread, so this must follow from the sequence alone, or its bits would depend on its
        neighbours."""
        return self.queries == 1 and self.length <= _SHORT


def _parts(batch: Batch, cache: Tensor, window: int | None) -> list[_Part]:
    """The same for all layers that share a window, so it is made in the first of them."""
    key = ("parts", window)
    if key not in batch.memo:
        first, parts = 0, []
        for queries, context, table in zip(batch.query_lens, batch.contexts, batch.tables, strict=True):
            parts.append(_part(first, queries, context, table, cache, window))
            first += queries
        batch.memo[key] = parts
    return batch.memo[key]  # type: ignore[no-any-return]


def _part(first: int, queries: int, context: int, table: tuple[int, ...], cache: Tensor, window: int | None) -> _Part:
    """Of a windowed sequence only the rows that its first query still sees are read."""
    size = cache.shape[1]
    unseen = 0 if window is None else max(0, context - queries + 1 - window)
    used = table[unseen // size : -(-context // size)]
    start, length, blocks = unseen % size, context - unseen, None
    if _flat(cache) and all(b - a == 1 for a, b in pairwise(used)):
        start += used[0] * size
    else:
        blocks = torch.tensor(used, device=cache.device)
    cut = window is not None and length > window
    causal = queries > 1 and queries == length and not cut
    mask = None if queries == 1 or causal else _mask(queries, length, window, cache.device)
    return _Part(first, queries, start, length, blocks, causal, mask)


def _mask(queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """The last `queries` of `length` positions each see themselves and what is before them, as far as the window."""
    seen = torch.ones(queries, length, dtype=torch.bool, device=device).tril_(length - queries)
    return seen if window is None else seen.triu_(length - queries - window + 1)


def _flat(cache: Tensor) -> bool:
    """Whether consecutive blocks are consecutive rows, as on a CPU."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def _lift(cache: Tensor) -> Tensor | None:
    """The whole cache as [1, kv_heads, rows, head_dim], a view, if its layout allows."""
    return cache.view(-1, *cache.shape[2:]).transpose(0, 1).unsqueeze(0) if _flat(cache) else None


def _read(cache: Tensor, lifted: Tensor | None, part: _Part) -> Tensor:
    """[1, kv_heads, S, head_dim] of the part: a view when its blocks follow each other, else a copy."""
    if part.blocks is None:
        assert lifted is not None
        return lifted.narrow(2, part.start, part.length)
    rows = cache.index_select(0, part.blocks).flatten(0, 1)
    return rows.narrow(0, part.start, part.length).transpose(0, 1).unsqueeze(0)


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    if _flat(cache):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
    else:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def _rotary_rows(batch: Batch, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of this batch's positions, [T, 1, R], rounded to the activations' dtype."""
    key = ("rope", id(rope))
    if key not in batch.memo:
        tables = (rope.cos, rope.sin)
        batch.memo[key] = tuple(table.index_select(0, batch.positions).to(dtype).unsqueeze(1) for table in tables)
    return batch.memo[key]  # type: ignore[no-any-return]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((_rotate(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    return x.roll(dim // 2, -1).mul_(sin).add_(x * cos)


def _attend(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float, softcap: float | None) -> Tensor:
    """q: [1, heads, Q, D]; k, v: [1, kv_heads, S, D], any strides. Returns [1, heads, Q, D].

    The library's grouped-query path reads views in place, and for one query token it beat folding the heads of a group
    into the query's length (13 against 18 µs at S = 192) as well as plain products (16 µs).
    """
    if softcap is not None:
        return _capped(q, k, v, part, scale, softcap)
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=part.mask, is_causal=part.causal, scale=scale, enable_gqa=grouped
    )


def _capped(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float, softcap: float) -> Tensor:
    """[1, heads, Q, D] by plain products: the library's attention has no soft cap."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    mask = _mask(q.shape[2], k.shape[2], None, q.device) if part.causal else part.mask
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1), v)
