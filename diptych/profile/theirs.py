"""The transformers implementation as a subject of measurement, by the same method and in the same steps as ours."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from diptych.profile.recorder import Recorder, replaced
from diptych.profile.work import Operator, Work, attention, product, rows
from diptych.workers.model.config import ModelConfig


class Theirs:
    name = "transformers"

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, form: str) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.config, self.device, self.dtype = config, device, dtype
        auto: Any = transformers.AutoModelForCausalLM
        if form == "dummy":
            read = transformers.AutoConfig.from_pretrained(folder)
            with torch.device(device):
                self.model: Any = auto.from_config(read, dtype=dtype).eval()
        else:
            self.model = auto.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.new_cache: Callable[[], Any] = lambda: transformers.DynamicCache(config=self.model.config)
        self.weight_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self.held_bytes = self.weight_bytes
        self.cache: Any = None
        # Its name changed: `past_key_values` before transformers 5.24.
        taken = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"

    def begin(self, batch: int, context: int, new: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, self.config.vocab, (batch, context), generator=draw).to(self.device)
        self.cache, self.last, self.at = None, self.tokens[:, -1], context

    def prefill(self) -> None:
        self.cache = None
        self.cache, self.at = self.new_cache(), self.tokens.shape[1]
        self._step(self.tokens, self.cache)

    def decode(self) -> None:
        self.at += 1
        self._step(self.last.unsqueeze(1), self.cache)

    def repeated(self) -> Callable[[], None]:
        kept, cache, at, tokens = list(self.cache.layers), self.cache, self.at + 1, self.last.unsqueeze(1).clone()

        def again() -> None:
            cache.layers = [copy.copy(layer) for layer in kept]  # a step puts longer tensors into a layer
            self.at = at
            self._step(tokens, cache)

        return again

    def without_cache(self) -> None:
        self.tokens = torch.cat((self.tokens, self.last.unsqueeze(1)), 1)
        self._step(self.tokens, None)

    @torch.inference_mode()
    def generate(self, prompt: int, new: int) -> float:
        """Seconds of its own `generate`, one sequence, greedy."""
        self.begin(1, prompt, new)
        length = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        started = perf_counter()
        self.model.generate(self.tokens, attention_mask=torch.ones_like(self.tokens), **length)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - started

    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def expected_cache(self, batch: int, tokens: int) -> int:
        """The last token drawn has not been through the model."""
        config = self.config
        return batch * (tokens - 1) * 2 * config.layers * config.kv_heads * config.head_dim * self.dtype.itemsize

    @torch.inference_mode()
    def _step(self, tokens: Tensor, cache: Any) -> None:
        named = {self._cache_name: cache, "use_cache": cache is not None, "logits_to_keep": 1}
        out = self.model(tokens, **named)
        self.last = self._draw(out.logits[:, -1])

    def _draw(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    @contextmanager
    def labelled(self, recorder: Recorder) -> Iterator[None]:
        """Hooks on the modules; attention is all of `self_attn` that is none of its products."""
        hooks = []
        for path, module in self.model.named_modules():
            if (describe := self._describe(path, module)) is not None:
                hooks.append(module.register_forward_pre_hook(_entering(recorder, describe), with_kwargs=True))
                hooks.append(module.register_forward_hook(lambda *_: recorder.leave()))
        places: list[tuple[Any, str, Any]] = [(self, "_draw", recorder.wrap(self._draw, self._drawn))]
        if self.config.moe is not None:
            places += self._expert_places(recorder)
        try:
            with replaced(places):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _describe(self, path: str, module: Any) -> Callable[..., tuple[Operator, Work]] | None:
        name, item = path.rpartition(".")[2], self.dtype.itemsize
        if isinstance(module, torch.nn.Linear):
            n, k = module.weight.shape
            called = "head" if name == "lm_head" else name
            return lambda x, **_: _product(called, "linear", x, n, k, item)
        if name == "self_attn":
            window = self.config.windows[int(path.split(".")[-2])]
            return lambda *x, **named: self._attention(x[0] if x else named["hidden_states"], window)
        if name == "gate" and hasattr(module, "weight"):
            n, k = module.weight.shape
            return lambda x, **_: _product("MoE routing", "MoE routing", x, n, k, item)
        if name == "experts":
            return self._index
        if name == "embed_tokens":
            return lambda ids, **_: (Operator("embedding", "other"), rows(ids.numel(), self.config.hidden, item, 0))
        if "norm" in name:
            kind: Any = "attention" if name in ("q_norm", "k_norm") else "other"
            return lambda x, **_: (
                Operator(name if kind == "attention" else "norm", kind, (x.numel() // x.shape[-1], x.shape[-1])),
                rows(x.numel() // x.shape[-1], x.shape[-1], item),
            )
        if name == "mlp" and not hasattr(module, "experts"):
            return self._activation
        if name == "rotary_emb":
            return lambda *_, **__: (Operator("rotary tables", "attention"), Work())
        return None

    def _attention(self, x: Tensor, window: int | None) -> tuple[Operator, Work]:
        config, (count, queries) = self.config, x.shape[:2]
        # Without a cache the whole text is the query.
        context = max(self.at, queries)
        work = attention(
            queries, context, count, config.heads, config.kv_heads, config.head_dim, self.dtype.itemsize, window
        )
        return Operator("rope + cache + attention", "attention", (count * queries, config.head_dim, context)), work

    def _activation(self, x: Tensor, **_: Any) -> tuple[Operator, Work]:
        """Of a feed-forward layer what is none of its products."""
        count = x.numel() // x.shape[-1]
        return Operator("SiLU * up", "other", (count, self.config.width)), Work(
            5.0 * count * self.config.width, 3.0 * count * self.config.width * self.dtype.itemsize
        )

    def _index(self, x: Tensor, *_: Any, **__: Any) -> tuple[Operator, Work]:
        assert self.config.moe is not None
        count = x.numel() // x.shape[-1]
        work = rows(count * self.config.moe.top_k, x.shape[-1], self.dtype.itemsize, 2)
        return Operator("MoE index", "MoE index", (count, x.shape[-1])), work

    def _drawn(self, logits: Tensor) -> tuple[Operator, Work]:
        shape = (logits.shape[0], logits.shape[1])
        return Operator("greedy draw", "other", shape), Work(logits.numel(), 1.0 * logits.nbytes)

    def _expert_places(self, recorder: Recorder) -> list[tuple[Any, str, Any]]:
        """The experts' products, whichever of transformers' forms runs: a loop of `linear`, grouped or batched."""
        from transformers.integrations import moe

        places: list[tuple[Any, str, Any]] = []
        forms = [(moe, "_grouped_linear"), (moe, "_batched_linear"), (torch.nn.functional, "linear")]
        for owner, name in forms:
            if hasattr(owner, name):
                places.append((owner, name, _only_in_experts(recorder, getattr(owner, name), self._expert)))
        return places

    def _expert(self, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> tuple[Operator, Work]:
        """weight: [N, K], or with all experts [E, N, K], of which uniform routing touches so many."""
        assert self.config.moe is not None
        n, k, item = weight.shape[-2], weight.shape[-1], self.dtype.itemsize
        pairs = x.numel() // x.shape[-1]
        touched = 1.0
        if weight.dim() == 3:
            tokens = max(1, pairs // self.config.moe.top_k)
            experts = self.config.moe.experts
            touched = experts * (1 - (1 - self.config.moe.top_k / experts) ** tokens)
        moved = item * (touched * n * k + pairs * (n + k))
        return Operator("experts' products", "MoE experts"), Work(2.0 * pairs * n * k, moved)


def _product(name: str, kind: Any, x: Tensor, n: int, k: int, item: int) -> tuple[Operator, Work]:
    m = x.numel() // x.shape[-1]
    return Operator(name, kind, (m, k, n)), product(m, k, n, item)


def _entering(recorder: Recorder, describe: Callable[..., tuple[Operator, Work]]) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        recorder.enter_as(describe, *args, **named)

    return hook


def _only_in_experts(
    recorder: Recorder, function: Callable[..., Any], describe: Callable[..., tuple[Operator, Work]]
) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        if recorder.innermost != "MoE index":
            return function(*args, **named)
        with recorder.inside(*describe(*args, **named)):
            return function(*args, **named)

    return called
