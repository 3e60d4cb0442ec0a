"""Inputs of the operators in named families, and their float64 answers; for the interpreter's and the GPU's tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from diptych.kernels.batch import Batch
from diptych.kernels.rope import Rope
from diptych.kernels.rope_attention import rope_attention_reference


def close(out: Tensor, exact: Tensor, eager: Tensor, terms: int = 1) -> None:
    """The error against float64 is at most twice the plain PyTorch operator's in the same dtype, plus roundings: one of
    the result, and those of a sum of `terms` in float32, taken one after the other (a random walk)."""
    exact = exact.to(out.device)
    assert out.shape == exact.shape
    assert torch.isfinite(out).all()
    if out.numel() == 0:
        return
    ours = (out.double() - exact).abs().max()
    theirs = (eager.double().to(out.device) - exact).abs().max()
    steps = torch.finfo(out.dtype).eps + terms**0.5 * torch.finfo(torch.float32).eps
    rounding = steps * exact.abs().max().clamp(min=1.0)
    assert ours <= 2 * theirs + 2 * rounding, (float(ours), float(theirs), float(rounding))


@dataclass(frozen=True)
class AttentionCase:
    """queries, contexts: of each sequence. unused: fills pages and page entries that nobody may read."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rotary: int = 32
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    qk_norm: bool = False
    unused: float = float("nan")
    loud: float = 1.0


ATTENTION = {
    "decode": AttentionCase((1, 1, 1), (40, 1, 17)),
    "decode, one head each": AttentionCase((1, 1), (33, 64), kv_heads=4, unused=float("inf")),
    "decode, group of three": AttentionCase((1,), (70,), heads=6, kv_heads=2),
    "decode, q/k norm and partial rotary": AttentionCase((1, 1), (50, 129), qk_norm=True, rotary=16),
    "decode, window": AttentionCase((1, 1, 1), (90, 20, 1), window=24),
    "decode, soft-cap": AttentionCase((1, 1), (90, 20), softcap=5.0, loud=3.0),
    "decode, a graph's empty rows": AttentionCase((1, 1, 1), (40, 0, 0)),
    "several tokens": AttentionCase((3, 2, 1), (40, 2, 65)),
    "chunks": AttentionCase((40, 70, 17), (40, 100, 80)),
    "chunks beside decode": AttentionCase((1, 45, 1), (70, 60, 33), qk_norm=True),
    "chunks, window and soft-cap": AttentionCase((70, 40), (150, 40), window=30, softcap=4.0, loud=2.0),
}


@dataclass(frozen=True)
class AttentionInputs:
    qkv: Tensor
    batch: Batch
    k: Tensor
    v: Tensor
    rope: Rope
    options: dict[str, Any]

    def to(self, dtype: torch.dtype, device: str = "cpu", head_major: bool = True) -> AttentionInputs:
        """The same in another dtype; pages head-major as on a GPU, or token-major."""

        def move(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(device, dtype if x.is_floating_point() else x.dtype)

        def pages(x: Tensor) -> Tensor:
            x = move(x)
            return x.transpose(1, 2).contiguous().transpose(1, 2) if head_major else x.clone()

        tensors = ("token_ids", "positions", "slots", "query_start", "context_lens", "block_tables")
        batch = replace(self.batch, **{name: move(getattr(self.batch, name)) for name in tensors})
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        rope = Rope(self.rope.cos.to(device, wide), self.rope.sin.to(device, wide))
        options = {name: move(value) for name, value in self.options.items()}
        return AttentionInputs(move(self.qkv).clone(), batch, pages(self.k), pages(self.v), rope, options)

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output (rows of empty sequences left out) and the pages afterwards; runs on copies."""
        live = [n for n, c in zip(self.batch.query_lens, self.batch.contexts, strict=True) if c]
        keep = len(live)
        cut = replace(
            self.batch,
            positions=self.batch.positions[: sum(live)], slots=self.batch.slots[: sum(live)],
            query_lens=self.batch.query_lens[:keep], contexts=self.batch.contexts[:keep],
            tables=self.batch.tables[:keep],
        )  # fmt: skip
        k, v = self.k.clone(), self.v.clone()
        out = rope_attention_reference(self.qkv[: sum(live)].clone(), cut, k, v, self.rope, **self.options)
        return out, k, v


def attention_inputs(case: AttentionCase, seed: int = 0) -> AttentionInputs:
    """In float64, on the CPU, with values that float16 holds exactly."""
    draw = torch.Generator().manual_seed(seed)
    tokens, page = sum(case.queries), case.page
    needed = [-(-c // page) for c in case.contexts]
    blocks = torch.randperm(sum(needed) + 3, generator=draw).tolist()
    tables, taken = [], 0
    for n in needed:
        tables.append(tuple(blocks[taken : taken + n]))
        taken += n
    width = max(max(needed), 1) + 1
    table = torch.full((len(tables), width), 2**31 - 1, dtype=torch.int32)
    for i, t in enumerate(tables):
        table[i, : len(t)] = torch.tensor(t, dtype=torch.int32)
    shape = (len(blocks), page, case.kv_heads, case.head_dim)
    k, v = (torch.randn(shape, generator=draw).half().double() for _ in range(2))
    positions, slots = [], []
    for n, c, t in zip(case.queries, case.contexts, tables, strict=True):
        positions += range(max(c - n, 0), max(c - n, 0) + n)
        slots += [t[p // page] * page + p % page if c else -1 for p in range(c - n, c)]
    used = torch.zeros(shape[:2], dtype=torch.bool)
    for n, c, t in zip(case.queries, case.contexts, tables, strict=True):
        for p in range(c - n):
            used[t[p // page], p % page] = True
    k[~used], v[~used] = case.unused, case.unused
    angles = torch.outer(torch.arange(4096.0), 100.0 ** -torch.linspace(0, 1, case.rotary // 2)).double()
    rope = Rope(torch.cat((angles.cos(), angles.cos()), 1), torch.cat((-angles.sin(), angles.sin()), 1))
    batch = Batch(
        token_ids=torch.zeros(tokens, dtype=torch.int64), positions=torch.tensor(positions), slots=torch.tensor(slots),
        query_start=torch.tensor([0, *accumulate(case.queries)], dtype=torch.int32),
        context_lens=torch.tensor(case.contexts, dtype=torch.int32), block_tables=table,
        query_lens=case.queries, contexts=case.contexts, tables=tuple(tables),
        max_query=max(case.queries), max_context=max(case.contexts),
    )  # fmt: skip
    qkv = torch.randn(tokens, (case.heads + 2 * case.kv_heads) * case.head_dim, generator=draw) * case.loud
    norms = {}
    if case.qk_norm:
        norms = {
            n: (1 + 0.2 * torch.randn(case.head_dim, generator=draw)).half().double() for n in ("q_norm", "k_norm")
        }
    options = {
        "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim, "scale": case.head_dim**-0.5,
        "window": case.window, "softcap": case.softcap, **norms,
    }  # fmt: skip
    return AttentionInputs(qkv.half().double(), batch, k, v, rope, options)


def check_attention(case: AttentionCase, dtype: torch.dtype, device: str, **launch: Any) -> None:
    """Output and written pages against float64; what was not written keeps its bits."""
    from diptych.kernels.triton.rope_attention import rope_attention

    inputs = attention_inputs(case)
    exact, exact_k, exact_v = inputs.reference()
    eager, eager_k, eager_v = inputs.to(dtype, head_major=False).reference()
    run = inputs.to(dtype, device)
    out = rope_attention(run.qkv, run.batch, run.k, run.v, run.rope, **run.options, **launch)
    close(out[: exact.shape[0]], exact, eager)
    written = torch.zeros(run.k.shape[:2], dtype=torch.bool)
    slots = inputs.batch.slots[inputs.batch.slots >= 0]
    written[slots // case.page, slots % case.page] = True
    for ours, old, want, eagers in ((run.k, inputs.k, exact_k, eager_k), (run.v, inputs.v, exact_v, eager_v)):
        close(ours.cpu()[written], want[written], eagers[written])
        torch.testing.assert_close(ours.cpu()[~written], old[~written].to(dtype), rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class ProductCase:
    m: int
    k: int
    n: int
    norm: bool = False
    gate: bool = False
    bias: bool = False
    residual: bool = False
    strided: bool = False


PRODUCTS = {
    "plain": ProductCase(1, 64, 48),
    "odd": ProductCase(3, 72, 37, bias=True),
    "norm": ProductCase(2, 128, 64, norm=True, bias=True),
    "residual": ProductCase(4, 96, 40, residual=True, strided=True),
    "gate": ProductCase(1, 64, 80, norm=True, gate=True),
    "gate, four rows": ProductCase(4, 80, 72, norm=True, gate=True, strided=True),
}


def check_product(case: ProductCase, dtype: torch.dtype, device: str, choice: Any) -> None:
    from diptych.kernels.linear import linear_reference
    from diptych.kernels.norm_gate_up import norm_gate_up_reference
    from diptych.kernels.norm_linear import norm_linear_reference
    from diptych.kernels.triton.products import product

    draw = torch.Generator().manual_seed(case.k)
    x = torch.full((case.m, case.k + 16), float("nan"), dtype=torch.float64)
    x[:, : case.k] = torch.randn(case.m, case.k, generator=draw).half()
    x = x[:, : case.k] if case.strided else x[:, : case.k].contiguous()
    w = (torch.randn(case.n, case.k, generator=draw) * case.k**-0.5).half().double()
    g = (1 + 0.1 * torch.randn(case.k, generator=draw)).half().double() if case.norm else None
    bias = torch.randn(case.n, generator=draw).half().double() if case.bias else None
    residual = torch.randn(case.m, case.n, generator=draw).half().double() if case.residual else None

    def reference(kind: torch.dtype) -> Tensor:
        a, b, c, d, e = (t if t is None else t.to(kind) for t in (x, w, g, bias, residual))
        if case.gate:
            return norm_gate_up_reference(a, c, 1e-5, b)
        return norm_linear_reference(a, c, 1e-5, b, d) if case.norm else linear_reference(a, b, d, e)

    def move(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        moved = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device)
        return moved.copy_(t)

    norm = None if g is None else (move(g), 1e-5)
    out = product(move(x), move(w), norm=norm, gate=case.gate, bias=move(bias), residual=move(residual), choice=choice)
    close(out, reference(torch.float64), reference(dtype), terms=case.k)
