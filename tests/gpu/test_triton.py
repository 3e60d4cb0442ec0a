"""Every Triton operator on a real GPU, in all three dtypes, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_cases import ATTENTION, PRODUCTS, AttentionCase, ProductCase, check_attention, check_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "rotary": 128}
REAL_ATTENTION = {
    "llama decode": AttentionCase((1,) * 5, (1024, 1, 777, 64, 2000), **LLAMA),
    "llama prefill": AttentionCase((300, 128, 1, 600), (300, 1000, 513, 601), **LLAMA),
    "llama-2 decode": AttentionCase((1,) * 3, (1024, 65, 130), heads=32, kv_heads=32, head_dim=128, rotary=128),
    "qwen3 decode": AttentionCase((1,) * 2, (500, 64), heads=32, kv_heads=4, head_dim=128, rotary=128, qk_norm=True),
}
CHOICES = {
    "gemv": ("gemv", 8, 256, 1, 4, 3, 256),
    "flat": ("flat", 64, 128, 1, 4, 4, 128),
    "split": ("flat", 64, 64, 4, 4, 3, 0),
    "apart": ("flat", 64, 64, 1, 4, 3, 0, True, True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ATTENTION, *REAL_ATTENTION])
def test_attention(name: str, dtype: torch.dtype) -> None:
    check_attention((ATTENTION | REAL_ATTENTION)[name], dtype, "cuda")


STREAMED = {
    "odd lengths": {"queries": (300, 1, 129, 1000), "contexts": (300, 5, 129, 1000)},
    "chunks over prefixes": {"queries": (257, 64, 500), "contexts": (1111, 640, 501)},
    "window": {"queries": (400, 70), "contexts": (777, 70), "window": 100},
    "soft-cap": {"queries": (130, 400), "contexts": (500, 400), "softcap": 5.0, "loud": 3.0},
    "infinite unused memory": {"queries": (200, 31), "contexts": (200, 65), "unused": float("inf")},
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", STREAMED)
def test_streamed_prefill(name: str, head_dim: int, page: int, dtype: torch.dtype) -> None:
    """What a Hopper GPU runs in place of the tile kernel."""
    case = AttentionCase(heads=8, kv_heads=2, head_dim=head_dim, rotary=head_dim, page=page, **STREAMED[name])
    check_attention(case, dtype, "cuda")


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("knobs", [{"tile": 32, "warps": 2}, {"ahead": 64}, {"tile": 128, "stages": 3}])
def test_decode_configurations(knobs: dict[str, int], page: int) -> None:
    from diptych.kernels.triton.rope_attention import DecodeConfig

    case = AttentionCase((1,) * 4, (1024, 3, 700, 129), page=page, **LLAMA)
    check_attention(case, torch.bfloat16, "cuda", config=DecodeConfig(**knobs))


@pytest.mark.parametrize(("phi", "strays"), [(0.0, False), (60.0, True)])
def test_unified_maximum(phi: float, strays: bool) -> None:
    from diptych.kernels.rope_attention import Unified

    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    case = AttentionCase((1, 1), (900, 33), **LLAMA)
    check_attention(case, torch.bfloat16, "cuda", unified=Unified(phi, 20.0, 20.0, counts))
    again, rows = counts.tolist()
    assert rows > 0
    assert again == (rows if strays else 0)


REAL_PRODUCTS = {
    "o": ProductCase(1, 4096, 4096, residual=True),
    "qkv": ProductCase(4, 4096, 6144, norm=True),
    "gate_up": ProductCase(2, 4096, 28672, norm=True, gate=True),
    "down": ProductCase(4, 14336, 4096, residual=True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*CHOICES, "library"])
@pytest.mark.parametrize("name", [*PRODUCTS, *REAL_PRODUCTS])
def test_product(name: str, kind: str, dtype: torch.dtype) -> None:
    from diptych.kernels.dataflow import LIBRARY, Choice

    choice = Choice(*CHOICES[kind]) if kind in CHOICES else LIBRARY
    if dtype is torch.float32 and kind == "flat":
        choice = Choice("flat", 64, 32, 1, 4, 3)
    check_product((PRODUCTS | REAL_PRODUCTS)[name], dtype, "cuda", choice)


STREAMED_PRODUCTS = {
    "odd": ProductCase(33, 328, 200, bias=True, residual=True),
    "strided": ProductCase(5, 256, 136, norm=True, strided=True),
    "gate": ProductCase(100, 512, 384, norm=True, gate=True),
    "several tiles a block": ProductCase(20, 128, 40000),
    "o": ProductCase(128, 4096, 4096, residual=True),
    "down": ProductCase(17, 14336, 4096, residual=True),
}


STREAMED_CHOICES = {
    "small": (64, 64, 1, 4, 4),
    "wide": (128, 128, 1, 8, 2),
    "split": (128, 64, 3, 8, 4),
    "tall": (256, 64, 2, 8, 3),
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("knobs", STREAMED_CHOICES)
@pytest.mark.parametrize("name", STREAMED_PRODUCTS)
def test_streamed_product(name: str, knobs: str, dtype: torch.dtype) -> None:
    """What Hopper's copy engine feeds; the counters are zero afterwards."""
    from dataclasses import replace

    from diptych.kernels.dataflow import Choice
    from diptych.kernels.triton.common import counters
    from diptych.kernels.triton.streamed import can_stream

    device, case = torch.device("cuda", torch.cuda.current_device()), STREAMED_PRODUCTS[name]
    choice = Choice("streamed", *STREAMED_CHOICES[knobs])
    if not can_stream(device):
        pytest.skip("streamed products are Hopper's")
    if choice.split > 1 and (case.gate or case.norm):
        pytest.skip("a product with a norm or a gate is not split")
    if case.gate and choice.bn == 256:
        pytest.skip("two tiles a stage")
    check_product(case, dtype, "cuda", choice)
    if case.norm:
        check_product(case, dtype, "cuda", replace(choice, apart=True))
    if case.m <= 64 and choice.warps == 4:
        check_product(case, dtype, "cuda", replace(choice, blocks=2, stages=2))
    assert not counters(device).any()
