"""This project's decoder as a subject of measurement: prompts in, steps one by one, its operators by name.

Runs what the engine runs in a step, without scheduler and messages: batch, decoder, head, greedy draw. On a GPU prompts
are staged before the step and decode replays a captured graph, as in the engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych.kernels.batch import Batch
from diptych.kernels.sampling import greedy
from diptych.profile.decode_graph import DecodeGraph
from diptych.profile.recorder import Recorder, replaced
from diptych.profile.work import Category, Operator, Work, attention, product, rows
from diptych.workers.cache import KVCache
from diptych.workers.model import decoder as decoder_module
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.parallel import layers as layers_module
from diptych.workers.settings import block_size_on

MOE_PARTS = {
    "cpu": ("diptych.kernels.moe", {"route": "routing", "_expert": "expert"}),
    "cuda": ("diptych.kernels.triton.moe", {"route": "routing", "_grouped": "grouped"}),
}
"""By device: the module whose functions a mixture is made of, and what describes each."""


class Ours:
    name = "diptych"

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, form: str) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.block = block_size_on(device.type)
        weights = load(folder, config, dtype, device, form)
        self.weight_bytes = sum(tensor.nbytes for tensor in weights.values())
        self.decoder = Decoder(config, weights)
        # A tied head is read in a form of its own on a CPU, so it is there twice.
        self.held_bytes = self.weight_bytes + (self._head_copy() if config.tied else 0)
        self.cache: KVCache | None = None
        self.graph: DecodeGraph | None = None

    def _head_copy(self) -> int:
        head, table = self.decoder.head.weight, self.decoder.embedding.weight
        return 0 if head is table else int(table.nbytes)

    def begin(self, batch: int, context: int, new: int) -> None:
        """Room for `batch` sequences of `context` prompt tokens and `new` more; the same random prompts each time."""
        each = -(-(context + new) // self.block)
        config = self.config
        self.cache = self.graph = None  # before the new ones are there: two at once are not what is measured
        self.cache = KVCache(
            config.layers, batch * each, self.block, config.kv_heads, config.head_dim, self.dtype, self.device
        )
        self.tables = np.arange(batch * each, dtype=np.int32).reshape(batch, each)
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, config.vocab, (batch, context), generator=draw)
        self.last = self.tokens[:, -1]
        self.at = context
        self.staged: Batch | None = None
        if self.device.type == "cuda":
            self.staged = self._batch(self.tokens, 0)
            self.graph = DecodeGraph(self.decoder, self.cache, self.tables, context)

    def prefill(self) -> None:
        """A copy of the staged batch: it remembers nothing that a step before derived from it."""
        self._run(self._batch(self.tokens, 0) if self.staged is None else replace(self.staged))
        self.at = self.tokens.shape[1]

    def decode(self) -> None:
        if self.graph is None:
            self._run(self._batch(self.last.unsqueeze(1), self.at))
        else:
            self.last = self.graph.step(self.last, self.at)
        self.at += 1

    def repeated(self) -> Callable[[], None]:
        batch = self._batch(self.last.unsqueeze(1), self.at)
        return lambda: self._run(replace(batch))

    def without_cache(self) -> None:
        """The next token the hard way: all tokens so far are computed again."""
        self.tokens = torch.cat((self.tokens, self.last.cpu().unsqueeze(1)), 1)
        self._run(self._batch(self.tokens, 0))

    def cache_bytes(self) -> int:
        assert self.cache is not None
        return self.cache.data.nbytes

    def expected_cache(self, batch: int, tokens: int) -> int:
        """Blocks are whole."""
        config = self.config
        each = 2 * config.layers * config.kv_heads * config.head_dim * self.dtype.itemsize
        return batch * -(-tokens // self.block) * self.block * each

    def _run(self, batch: Batch) -> None:
        assert self.cache is not None
        count, width = len(batch.contexts), batch.max_query
        hidden = self.decoder(batch, self.cache)
        if width > 1:
            hidden = hidden[torch.arange(1, count + 1, device=self.device) * width - 1]
        self.last = self._draw(self.decoder.logits(hidden))

    def _draw(self, logits: Tensor) -> Tensor:
        return greedy(logits)

    def _batch(self, tokens: Tensor, start: int) -> Batch:
        count, width = tokens.shape
        positions = np.arange(start, start + width)
        slots = self.tables[:, positions // self.block].astype(np.int64) * self.block + positions % self.block
        context, blocks = start + width, -(-(start + width) // self.block)
        tables = self.tables[:, :blocks]
        device = self.device
        return Batch(
            token_ids=tokens.reshape(-1).to(device),
            positions=torch.from_numpy(np.tile(positions, count)).to(device),
            slots=torch.from_numpy(slots.reshape(-1)).to(device),
            query_start=torch.arange(0, count * width + 1, width, dtype=torch.int32, device=device),
            context_lens=torch.full((count,), context, dtype=torch.int32, device=device),
            block_tables=torch.from_numpy(np.ascontiguousarray(tables)).to(device),
            query_lens=(width,) * count,
            contexts=(context,) * count,
            tables=tuple(tuple(row) for row in tables.tolist()),
            max_query=width,
            max_context=context,
        )

    @contextmanager
    def labelled(self, recorder: Recorder) -> Iterator[None]:
        """The decoder's operators are recorded while the block runs."""
        names = _Names(self)
        describe: dict[str, Any] = {
            "embedding": names.embedding,
            "norm_linear": names.norm_linear,
            "rope_attention": names.attention,
            "linear": names.linear,
            "norm_gate_up": names.gate_up,
            "rms_norm": names.norm,
            "moe": names.moe,
        }
        places: list[tuple[Any, str, Any]] = [
            (module, name, recorder.wrap(getattr(module, name), how))
            for module in (decoder_module, layers_module)
            for name, how in describe.items()
            if hasattr(module, name)
        ]
        places.append((self, "_draw", recorder.wrap(self._draw, names.draw)))
        places.append((self, "_batch", recorder.wrap(self._batch, names.batch)))
        places += self._moe_places(recorder, names)
        with replaced(places):
            yield

    def _moe_places(self, recorder: Recorder, names: _Names) -> list[tuple[Any, str, Any]]:
        """The parts of a mixture of experts; what of `moe` is neither is index work."""
        if self.config.moe is None:
            return []
        where, parts = MOE_PARTS[self.device.type]
        module = importlib.import_module(where)
        return [
            (module, name, recorder.wrap(getattr(module, name), getattr(names, how))) for name, how in parts.items()
        ]


class _Names:
    """What each operator is called and has to do, from its arguments."""

    def __init__(self, engine: Ours) -> None:
        self.config, self.item = engine.config, engine.dtype.itemsize

    def _product(self, name: str, x: Tensor, weight: Tensor, kind: Category = "linear") -> tuple[Operator, Work]:
        n, k = weight.shape
        m = x.shape[0]
        return Operator(name, kind, (m, k, n)), product(m, k, n, self.item)

    def embedding(self, ids: Tensor, weight: Tensor) -> tuple[Operator, Work]:
        return Operator("embedding", "other", (len(ids), weight.shape[1])), rows(
            len(ids), weight.shape[1], self.item, 0
        )

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, *rest: Any, **named: Any) -> Any:
        head = named.get("out_dtype") is not None
        return self._product("norm + head" if head else "norm + qkv", x, weight)

    def linear(self, x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> tuple[Operator, Work]:
        """`out` and `down` are told by their K, which is the heads' or the feed-forward's width."""
        attention_out = weight.shape[1] == self.config.heads * self.config.head_dim
        return self._product("out + residual" if attention_out else "down + residual", x, weight)

    def gate_up(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> tuple[Operator, Work]:
        return self._product("norm + gate/up + SiLU", x, weight)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Operator, Work]:
        return Operator("norm", "other", tuple(x.shape)), rows(x.shape[0], x.shape[1], self.item)

    def attention(self, qkv: Tensor, batch: Batch, *rest: Any, **named: Any) -> tuple[Operator, Work]:
        config = self.config
        queries, context, count = batch.query_lens[0], batch.contexts[0], len(batch.contexts)
        work = attention(
            queries, context, count, config.heads, config.kv_heads, config.head_dim, self.item, named["window"]
        )
        return Operator("rope + write + attention", "attention", (count * queries, config.head_dim, context)), work

    def draw(self, logits: Tensor) -> tuple[Operator, Work]:
        shape = (logits.shape[0], logits.shape[1])
        return Operator("greedy draw", "other", shape), Work(logits.numel(), 4.0 * logits.numel())

    def batch(self, tokens: Tensor, start: int) -> tuple[Operator, Work]:
        return Operator("batch", "other", tuple(tokens.shape)), Work()

    def moe(self, x: Tensor, *rest: Any) -> tuple[Operator, Work]:
        assert self.config.moe is not None
        pairs = x.shape[0] * self.config.moe.top_k
        return Operator("MoE index", "MoE index", (x.shape[0], x.shape[1])), rows(pairs, x.shape[1], self.item, 2)

    def routing(self, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Operator, Work]:
        return self._product("MoE routing", x, weight, "MoE routing")

    def expert(self, x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Operator, Work]:
        """All experts of a layer are one row: how many tokens each gets is chance."""
        work = product(x.shape[0], gate_up.shape[1], gate_up.shape[0], self.item)
        work += product(x.shape[0], down.shape[1], down.shape[0], self.item)
        return Operator("experts' products", "MoE experts"), work

    def grouped(self, x: Tensor, weight: Tensor, out: Tensor, *rest: Any, **named: Any) -> tuple[Operator, Work]:
        """One launch for all experts; how many were touched is what uniform routing would touch (asking the device
        would make the host wait)."""
        assert self.config.moe is not None
        experts, n, k = weight.shape
        pairs = out.shape[0]
        tokens = pairs // self.config.moe.top_k
        touched = experts * (1 - (1 - self.config.moe.top_k / experts) ** tokens)
        moved = self.item * (touched * n * k + pairs * (n + k))
        return Operator("experts' products", "MoE experts"), Work(2.0 * pairs * n * k, moved)
