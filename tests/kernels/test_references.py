"""The PyTorch references against formulas written out token by token in float64: what every other implementation is
compared with must not be compared with itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.batch import Batch
from diptych.kernels.linear import implementation, linear, pack_weight
from diptych.kernels.moe import moe, route, route_scores
from diptych.kernels.norm_gate_up import norm_gate_up
from diptych.kernels.norm_linear import norm_linear
from diptych.kernels.rms_norm import rms_norm
from diptych.kernels.rope import Rope
from diptych.kernels.rope_attention import rope_attention
from tests.support.paged import Row, make_batch

_EPS = 1e-5


def _close(ours: Tensor, exact: Tensor, plain: Tensor, terms: int = 1) -> None:
    """At most 4 times the error of the plain operators in the same dtype, and the roundings of the largest value's sum
    of `terms`, a random walk: packed products add in one running sum where BLAS adds in as many as the CPU is wide."""
    steps = terms**0.5 * torch.finfo(ours.dtype).eps
    bound = 4 * (plain.double() - exact).abs().max() + steps * exact.abs().max()
    assert ours.shape == exact.shape
    assert (ours.double() - exact).abs().max() <= bound


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return weight.double() * wide / (wide.square().mean(-1, keepdim=True) + _EPS).sqrt()


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (1536, 576), (40, 24), (33, 7)])
def test_products(rows: int, packed: bool, inner: int, outer: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inner), torch.randn(outer, inner)
    bias, residual, scale = torch.randn(outer), torch.randn(rows, outer), 1 + 0.1 * torch.randn(inner)
    held = pack_weight(weight) if packed else weight
    assert implementation(x, held) == ("onednn" if packed else "blas")
    wide, exact = x.double(), weight.double().t()
    plain = functional.linear(x, weight)
    _close(linear(x, held), wide @ exact, plain, inner)
    _close(linear(x, held, bias), wide @ exact + bias, plain + bias, inner)
    kept = residual.clone()
    _close(linear(x, held, bias, residual), wide @ exact + bias + residual, plain + bias + residual, inner)
    assert torch.equal(kept, residual)
    normed = functional.rms_norm(x, (inner,), scale, _EPS)
    _close(rms_norm(x, scale, _EPS), _norm(x, scale), normed)
    _close(norm_linear(x, scale, _EPS, held, bias), _norm(x, scale) @ exact + bias, normed @ weight.t() + bias, inner)
    if outer % 2 == 0:
        gate, up = (_norm(x, scale) @ exact).chunk(2, -1)
        plain_gate, plain_up = (normed @ weight.t()).chunk(2, -1)
        fused = norm_gate_up(x, scale, _EPS, held)
        _close(fused, functional.silu(gate) * up, functional.silu(plain_gate) * plain_up, inner)


@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (576, 576), (576, 3072), (1536, 576), (48, 80)])
def test_packed_rows_are_bitwise_alone(inner: int, outer: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(130, inner), pack_weight(torch.randn(outer, inner))
    whole = linear(x, weight)
    for rows in (1, 2, 3, 8, 17, 64):
        assert torch.equal(linear(x[-rows:], weight), whole[-rows:])


def test_bfloat16_rounds_before_the_weight() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).bfloat16()
    assert (rms_norm(x, weight, _EPS).float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max()


def test_routing_weights_are_probabilities() -> None:
    """Case M1: router scores 2, 1, 0, -1 and top-2."""
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for normalise, expected in ((False, [0.643914, 0.236883]), (True, [0.731059, 0.268941])):
        weights, experts = route_scores(scores, 2, normalise)
        assert weights[0].tolist() == pytest.approx(expected, abs=1e-6)
        assert experts[0].tolist() == [0, 1]


@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_experts(tokens: int, packed: bool) -> None:
    torch.manual_seed(tokens)
    x, router = torch.randn(tokens, 32), torch.randn(6, 32)
    gate_up, down = torch.randn(6, 40, 32), torch.randn(6, 32, 20)
    exact, plain = torch.zeros(tokens, 32, dtype=torch.float64), torch.zeros(tokens, 32)
    weights, experts = route(x, router, 3, normalise=False)
    for t in range(tokens):
        for weight, e in zip(weights[t], experts[t].tolist(), strict=True):
            for out, kind in ((exact, torch.float64), (plain, torch.float32)):
                gate, up = (x[t].to(kind) @ gate_up[e].to(kind).t()).chunk(2)
                out[t] += weight.to(kind) * ((functional.silu(gate) * up) @ down[e].to(kind).t())
    held = (tuple(map(pack_weight, gate_up)), tuple(map(pack_weight, down))) if packed else (gate_up, down)
    _close(moe(x, router, *held, 3, False), exact, plain)


@dataclass(frozen=True)
class Case:
    """queries, contexts: of each sequence; the rest as in `rope_attention`. consecutive: blocks follow each other."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    rotary: int = 16
    window: int | None = None
    softcap: float | None = None
    qk_norm: bool = False
    consecutive: bool = True
    head_major: bool = False


CASES = {
    "decode": Case((1, 1, 1), (40, 1, 17)),
    "decode, scattered": Case((1, 1, 1), (40, 1, 17), consecutive=False),
    "decode, long": Case((1, 1), (700, 30)),
    "decode, window inside a block": Case((1, 1, 1), (41, 3, 9), window=9),
    "decode, window, scattered": Case((1, 1, 1), (41, 3, 9), window=9, consecutive=False),
    "a whole prompt": Case((37,), (37,)),
    "a chunk behind a prefix": Case((13,), (37,)),
    "a chunk behind a prefix, window": Case((13,), (37,), window=6),
    "a whole prompt past its window": Case((37,), (37,), window=6, consecutive=False),
    "chunks beside decode": Case((1, 12, 1, 7), (20, 12, 1, 33), consecutive=False),
    "soft-cap": Case((1, 9, 5), (20, 9, 33), softcap=3.0),
    "soft-cap and window": Case((1, 9, 5), (20, 9, 33), softcap=3.0, window=4),
    "q/k norm, partial rotary": Case((1, 9), (20, 30), qk_norm=True, rotary=8),
    "one head each": Case((1, 9), (20, 30), kv_heads=6),
    "pages of a GPU": Case((1, 9), (20, 30), head_major=True, window=12),
}
_DIM, _PAGE = 16, 4


def _inputs(case: Case) -> tuple[Tensor, Batch, Tensor, Tensor, Rope, dict[str, Tensor]]:
    torch.manual_seed(0)
    needed = [-(-context // _PAGE) for context in case.contexts]
    order = list(range(sum(needed) + 3)) if case.consecutive else torch.randperm(sum(needed) + 3).tolist()
    rows: list[Row] = []
    for queries, context, count in zip(case.queries, case.contexts, needed, strict=True):
        own, order = order[:count], order[count:]
        rows.append(([0] * queries, context - queries, own))
    pages = torch.randn(2, sum(needed) + 3, _PAGE, case.kv_heads, _DIM)
    if case.head_major:
        pages = pages.transpose(2, 3).contiguous().transpose(2, 3)
    angles = torch.outer(torch.arange(800.0), 50.0 ** -torch.linspace(0, 1, case.rotary // 2))
    rope = Rope(torch.cat((angles.cos(), angles.cos()), 1), torch.cat((-angles.sin(), angles.sin()), 1))
    qkv = 2 * torch.randn(sum(case.queries), (case.heads + 2 * case.kv_heads) * _DIM)
    norms = {name: 1 + 0.2 * torch.randn(_DIM) for name in ("q_norm", "k_norm")} if case.qk_norm else {}
    return qkv, make_batch(rows, _PAGE), pages[0], pages[1], rope, norms


def _turn(x: Tensor, angle_cos: Tensor, angle_sin: Tensor) -> Tensor:
    """Pair by pair, as complex numbers."""
    half = len(angle_cos)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(angle_cos, angle_sin)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def _written_out(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Output and pages, one token and one head at a time."""
    qkv, batch, k_pages, v_pages, rope, norms = _inputs(case)
    k_pages, v_pages, half = k_pages.to(dtype).clone(), v_pages.to(dtype).clone(), case.rotary // 2
    out = torch.zeros(len(qkv), case.heads, _DIM, dtype=dtype)
    parts = qkv.to(dtype).view(len(qkv), -1, _DIM).split([case.heads, case.kv_heads, case.kv_heads], 1)
    q, k, v = (part.clone() for part in parts)
    for name, x in (("q_norm", q), ("k_norm", k)):
        if name in norms:
            x.mul_((x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).mul_(norms[name].to(dtype))
    t = 0
    for queries, context, table in zip(batch.query_lens, batch.contexts, batch.tables, strict=True):
        for p in range(context - queries, context):
            cos, sin = rope.cos[p, :half].to(dtype), rope.sin[p, half:].to(dtype)
            k_pages[table[p // _PAGE], p % _PAGE] = _turn(k[t], cos, sin)
            v_pages[table[p // _PAGE], p % _PAGE] = v[t]
            first = 0 if case.window is None else max(0, p - case.window + 1)
            for h in range(case.heads):
                at = [(table[j // _PAGE], j % _PAGE, h * case.kv_heads // case.heads) for j in range(first, p + 1)]
                keys, values = (torch.stack([pages[place] for place in at]) for pages in (k_pages, v_pages))
                scores = keys @ _turn(q[t, h], cos, sin) / math.sqrt(_DIM)
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                out[t, h] = scores.softmax(0) @ values
            t += 1
    return out.flatten(1), k_pages, v_pages


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    case = CASES[name]
    exact, exact_k, exact_v = _written_out(case, torch.float64)
    plain, plain_k, _ = _written_out(case, torch.float32)
    qkv, batch, k_pages, v_pages, rope, norms = _inputs(case)
    out = rope_attention(
        qkv, batch, k_pages, v_pages, rope, heads=case.heads, kv_heads=case.kv_heads, head_dim=_DIM,
        scale=_DIM**-0.5, window=case.window, softcap=case.softcap, norm_eps=1e-6, **norms,
    )  # fmt: skip
    assert out.is_contiguous()
    _close(out, exact, plain)
    _close(k_pages, exact_k, plain_k)
    assert torch.equal(v_pages.double(), exact_v)
