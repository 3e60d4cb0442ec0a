"""Inside `batch_invariant` a row's bits are the same alone and in any batch; through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.kernels.dataflow import Problem
from diptych.kernels.invariance import batch_invariant, fixed_choice, is_batch_invariant
from tests.kernels.triton_cases import PRODUCTS, AttentionCase, ProductCase, attention_inputs, check_product, close

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the whole engine so on the GPU")


def test_it_ends_with_its_block() -> None:
    with batch_invariant():
        with batch_invariant(False):
            assert not is_batch_invariant()
        assert is_batch_invariant()
    assert not is_batch_invariant()


def test_the_choice_does_not_see_the_number_of_rows() -> None:
    for n, k, fusion in ((6144, 4096, "norm"), (4096, 14336, "plain"), (28672, 4096, "norm_gate"), (40, 64, "plain")):
        assert len({fixed_choice(Problem(k, n, m, "bfloat16", fusion)) for m in (1, 2, 64, 65, 8192)}) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [*PRODUCTS.values(), ProductCase(70, 512, 40, residual=True)], ids=str)
def test_the_fixed_product_is_right(case: ProductCase) -> None:
    with batch_invariant():
        check_product(case, torch.float32, "cpu", None)


def test_more_rows_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.kernels.triton import products

    monkeypatch.setattr(products, "FEW", 64)
    with batch_invariant():
        check_product(ProductCase(70, 96, 40, residual=True), torch.float32, "cpu", None)


@pytest.mark.parametrize("gate", [False, True])
def test_a_row_of_a_product(gate: bool) -> None:
    from diptych.kernels.triton.products import product

    x, w, norm = torch.randn(70, 512), torch.randn(48, 512), (torch.randn(512), 1e-5)
    with batch_invariant():
        batch = product(x, w, norm=norm, gate=gate)
        for rows in (slice(0, 1), slice(3, 5), slice(60, 70)):
            assert torch.equal(product(x[rows], w, norm=norm, gate=gate), batch[rows])


@pytest.mark.parametrize("window", [None, 24])
def test_a_token_of_attention(window: int | None) -> None:
    """The last token of a context, as a step of its own, in chunks of several lengths, and beside another sequence."""
    from diptych.kernels.triton.rope_attention import rope_attention

    whole = AttentionCase((90,), (90,), window=window, unused=0.0)
    inputs = attention_inputs(whole)
    exact, *_ = inputs.reference()
    eager, *_ = inputs.to(torch.float32, head_major=False).reference()
    run, outputs = inputs.to(torch.float32), []
    for count in (90, 33, 2, 1):  # the first leaves what the others find cached
        cut = _last(run, count)
        with batch_invariant():
            outputs.append(rope_attention(cut.qkv, cut.batch, run.k, run.v, run.rope, **run.options))
        close(outputs[-1], exact[-count:], eager[-count:])
    beside = _last(attention_inputs(AttentionCase((90, 1), (90, 40), window=window, unused=0.0)), 91).to(torch.float32)
    with batch_invariant():
        out = rope_attention(beside.qkv, beside.batch, beside.k, beside.v, beside.rope, **beside.options)
        alone = _first(beside)
        one = rope_attention(alone.qkv, alone.batch, alone.k, alone.v, alone.rope, **alone.options)
    assert torch.equal(out[:90], one)
    for count, got in zip((33, 2, 1), outputs[1:], strict=True):
        assert torch.equal(got, outputs[0][-count:])


def _last(inputs, count: int):  # type: ignore[no-untyped-def]
    """The last `count` tokens of one sequence whose others are cached; all of several."""
    if len(inputs.batch.query_lens) > 1:
        return inputs
    batch = replace(
        inputs.batch, token_ids=inputs.batch.token_ids[-count:], positions=inputs.batch.positions[-count:],
        slots=inputs.batch.slots[-count:], query_start=torch.tensor([0, count], dtype=torch.int32),
        query_lens=(count,), max_query=count,
    )  # fmt: skip
    return replace(inputs, qkv=inputs.qkv[-count:], batch=batch)


def _first(inputs):  # type: ignore[no-untyped-def]
    """The first sequence without the others."""
    b = inputs.batch
    n = b.query_lens[0]
    batch = replace(
        b, token_ids=b.token_ids[:n], positions=b.positions[:n], slots=b.slots[:n], query_start=b.query_start[:2],
        context_lens=b.context_lens[:1], block_tables=b.block_tables[:1], query_lens=b.query_lens[:1],
        contexts=b.contexts[:1], tables=b.tables[:1],
    )  # fmt: skip
    return replace(inputs, qkv=inputs.qkv[:n], batch=batch)


def test_a_token_of_a_mixture_of_experts() -> None:
    from diptych.kernels.triton.moe import moe

    draw = torch.Generator().manual_seed(0)
    x, router = torch.randn(40, 64, generator=draw), torch.randn(4, 64, generator=draw)
    gate_up, down = torch.randn(4, 96, 64, generator=draw), torch.randn(4, 64, 48, generator=draw)
    with batch_invariant():
        batch = moe(x, router, gate_up, down, 2, True)
        assert torch.equal(moe(x[7:8], router, gate_up, down, 2, True), batch[7:8])
        assert torch.equal(moe(x[:20], router, gate_up, down, 2, True), batch[:20])
