"""Which tensors a decoder has, and from which tensors of a checkpoint each of them is put together.

Knows shapes and names only. Products that read the same input are merged: qkv, gate_up, and all experts of a layer.
`cut` says what one rank of a group holds of each, and which slices of the checkpoint's tensors that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diptych.workers.model.config import ModelConfig
from diptych.workers.parallel.layout import Shard, even, kv_share, padded_share

Region = tuple[int | slice, ...]
Share = Callable[[Shard], range]


@dataclass(frozen=True)
class Part:
    """A checkpoint's tensor and the region of the parameter that it fills. shape: of that tensor."""

    source: str
    shape: tuple[int, ...]
    region: Region = ()


@dataclass(frozen=True)
class Parameter:
    """One tensor of the decoder. kind: linear (read by a product), norm, bias or table.

    parts: what fills it; they cover it exactly. instead: another spelling of the same, as one set of parts.
    shard: the dimension along which a group of ranks divides it, or None when each rank holds all of it. shares: along
    that dimension, the ranges that a rank holds, put together in this order; a range may reach past the end.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    parts: tuple[Part, ...]
    shard: int | None = None
    instead: tuple[Part, ...] = ()
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True)
class Piece:
    """What of a checkpoint's tensor goes where: tensor[take] fills parameter[region]."""

    take: tuple[slice, ...]
    region: Region


@dataclass(frozen=True)
class Cut:
    """One rank's part of a parameter. padded: a slice reaches past the end, and what nothing fills there is
    zero. pieces: for each source, its shape and what is read of it (nothing, perhaps). whole: what is taken of a tensor
    of the whole parameter's shape."""

    parameter: Parameter
    shape: tuple[int, ...]
    padded: bool
    pieces: dict[str, tuple[tuple[int, ...], tuple[Piece, ...]]]
    whole: tuple[Piece, ...]


def cut(parameter: Parameter, shard: Shard) -> Cut:
    """The part that `shard` holds; all of it where the parameter is not divided."""
    sources = {part.source: part for part in (*parameter.parts, *parameter.instead)}
    along = parameter.shard if shard.ranks > 1 else None
    ranges = [share(shard) for share in parameter.shares] if along is not None else []
    if shard.held is not None and parameter.kind == "experts":
        along, ranges = 0, [range(expert, expert + 1) for expert in shard.held]
    shape = list(parameter.shape)
    if along is None:
        along, ranges = 0, [range(parameter.shape[0])]
    shape[along] = sum(map(len, ranges))
    padded = any(held.stop > parameter.shape[along] for held in ranges)
    pieces = {name: (part.shape, tuple(_pieces(part, along, ranges))) for name, part in sources.items()}
    whole = tuple(_pieces(Part(parameter.name, parameter.shape), along, ranges))
    return Cut(parameter, tuple(shape), padded, pieces, whole)


def _pieces(part: Part, along: int, ranges: list[range]) -> Iterator[Piece]:
    """Where a part and the rank's ranges overlap. Whole numbers in a region are no dimension of the part's own."""
    region = (*part.region, *[slice(None)] * (along + 1 - len(part.region)))
    place = region[along]
    axis = sum(isinstance(index, slice) for index in region[:along])
    if isinstance(place, slice):
        first, end = place.start or 0, place.stop if place.stop is not None else part.shape[axis]
    else:
        first, end = place, place + 1
    at = 0
    for held in ranges:
        low, high = max(first, held.start), min(end, held.stop)
        if low < high:
            start = at + low - held.start
            if isinstance(place, slice):
                take = (*[slice(None)] * axis, slice(low - first, high - first))
                yield Piece(take, (*region[:along], slice(start, start + high - low), *region[along + 1 :]))
            else:
                yield Piece((), (*region[:along], start, *region[along + 1 :]))
        at += len(held)


def _spans(*sizes: int) -> tuple[Share, ...]:
    """Each of several products on top of each other, divided evenly."""
    shares: list[Share] = []
    start = 0
    for size in sizes:
        shares.append(_shifted(_evenly(size), start))
        start += size
    return tuple(shares)


def _evenly(size: int) -> Share:
    return lambda shard: even(size, shard.rank, shard.ranks)


def _shifted(share: Share, start: int) -> Share:
    def shifted(shard: Shard) -> range:
        found = share(shard)
        return range(start + found.start, start + found.stop)

    return shifted


def _vocabulary(vocab: int) -> tuple[Share, ...]:
    return (lambda shard: padded_share(vocab, shard.rank, shard.ranks),)


def _heads(config: ModelConfig) -> tuple[Share, ...]:
    """Query heads divided evenly, then the key and the value heads that they read."""
    dim, q, kv = config.head_dim, config.heads * config.head_dim, config.kv_heads * config.head_dim

    def keys(shard: Shard) -> range:
        held = kv_share(config.kv_heads, shard.rank, shard.ranks)
        return range(held.start * dim, held.stop * dim)

    return (*_spans(q), _shifted(keys, q), _shifted(keys, q + kv))


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """All of them, in the order of a forward pass."""
    hidden, vocab = config.hidden, config.vocab
    rows = _vocabulary(vocab)
    yield _whole("embedding", "model.embed_tokens.weight", (vocab, hidden), "table", 0, rows)
    for layer in range(config.layers):
        yield from _attention(config, layer)
        yield from _experts(config, layer) if config.is_sparse(layer) else _dense(config, layer)
    yield _whole("norm", "model.norm.weight", (hidden,), "norm")
    if not config.tied:
        yield _whole("head", "lm_head.weight", (vocab, hidden), "linear", 0, rows)


def _whole(
    name: str,
    source: str,
    shape: tuple[int, ...],
    kind: str,
    shard: int | None = None,
    shares: tuple[Share, ...] = (),
) -> Parameter:
    return Parameter(name, shape, kind, (Part(source, shape),), shard, shares=shares)


def _merged(
    name: str, pieces: list[tuple[str, int]], rest: tuple[int, ...], kind: str, shares: tuple[Share, ...]
) -> Parameter:
    """Pieces (source, rows) on top of each other."""
    parts, start = [], 0
    for source, rows in pieces:
        parts.append(Part(source, (rows, *rest), (slice(start, start + rows),)))
        start += rows
    shape = (start, *rest)
    return Parameter(name, shape, kind, tuple(parts), 0, shares=shares)


def _attention(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, source = f"layers.{layer}.", f"model.layers.{layer}."
    attention = source + "self_attn."
    q, kv, hidden = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.hidden
    yield _whole(here + "attention_norm", source + "input_layernorm.weight", (hidden,), "norm")
    pieces = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    if config.fused:
        pieces = [("qkv_proj", q + 2 * kv)]
    weights = [(f"{attention}{name}.weight", rows) for name, rows in pieces]
    shares = _heads(config)
    yield _merged(here + "qkv", weights, (hidden,), "linear", shares)
    if config.bias:
        biases = [(f"{attention}{name}.bias", rows) for name, rows in pieces]
        yield _merged(here + "qkv_bias", biases, (), "bias", shares)
    if config.qk_norm:
        yield _whole(here + "q_norm", attention + "q_norm.weight", (config.head_dim,), "norm")
        yield _whole(here + "k_norm", attention + "k_norm.weight", (config.head_dim,), "norm")
    yield _whole(here + "out", attention + "o_proj.weight", (hidden, q), "linear", 1, _spans(q))
    if config.out_bias:
        yield _whole(here + "out_bias", attention + "o_proj.bias", (hidden,), "bias")
    yield _whole(here + "mlp_norm", source + "post_attention_layernorm.weight", (hidden,), "norm")


def _dense(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, source = f"layers.{layer}.", f"model.layers.{layer}.mlp."
    pieces = [(source + "gate_proj.weight", config.width), (source + "up_proj.weight", config.width)]
    if config.fused:
        pieces = [(source + "gate_up_proj.weight", 2 * config.width)]
    width = config.width
    yield _merged(here + "gate_up", pieces, (config.hidden,), "linear", _spans(width, width))
    yield _whole(here + "down", source + "down_proj.weight", (config.hidden, width), "linear", 1, _spans(width))


def _experts(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Checkpoints hold an expert a tensor, under Mixtral's names or Qwen's, or all of them merged."""
    assert config.moe is not None
    here, experts, width, hidden = f"layers.{layer}.", config.moe.experts, config.moe.width, config.hidden
    merged = f"model.layers.{layer}.mlp."
    mixtral = config.architecture == "MixtralForCausalLM"
    source = f"model.layers.{layer}.block_sparse_moe." if mixtral else merged
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    router = Part(source + "gate.weight", (experts, hidden))
    yield Parameter(
        here + "router", router.shape, "table", (router,), None, (Part(merged + "gate.weight", router.shape),)
    )
    both, downs = [], []
    for expert in range(experts):
        name = f"{source}experts.{expert}."
        both.append(Part(f"{name}{gate}.weight", (width, hidden), (expert, slice(0, width))))
        both.append(Part(f"{name}{up}.weight", (width, hidden), (expert, slice(width, 2 * width))))
        downs.append(Part(f"{name}{down}.weight", (hidden, width), (expert,)))
    shape = (experts, 2 * width, hidden)
    whole = Part(merged + "experts.gate_up_proj", shape)
    yield Parameter(here + "experts_gate_up", shape, "experts", tuple(both), 1, (whole,), _spans(width, width))
    shape = (experts, hidden, width)
    whole = Part(merged + "experts.down_proj", shape)
    yield Parameter(here + "experts_down", shape, "experts", tuple(downs), 2, (whole,), _spans(width))
