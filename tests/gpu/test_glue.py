"""The small operators on a real GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.glue_cases import (
    check_advance,
    check_feed,
    check_greedy,
    check_moe,
    check_pack,
    check_rms_norm,
    check_sample,
    check_silu_mul,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (1500, 72), (0, 8)])
def test_norm_and_silu(rows: int, width: int, dtype: torch.dtype) -> None:
    check_rms_norm(rows, width, dtype, "cuda")
    if rows:
        check_silu_mul(rows, width, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(0, 3), (1, 1)])
def test_pack(heads: tuple[int, int], dtype: torch.dtype) -> None:
    check_pack(5, 20, *heads, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (40, 5, 3), (700, 8, 2)])
def test_experts(tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    check_moe(tokens, experts, top_k, dtype, "cuda")


def test_draw() -> None:
    check_greedy("cuda")
    check_advance("cuda")
    check_feed("cuda")
    check_sample("cuda", vocab=128_256, rows=24, block=4096)


def test_a_row_of_nans_draws_a_token_of_the_vocabulary() -> None:
    """Its embedding is read in the next step, with other requests' beside it."""
    from diptych.kernels.triton.sampling import greedy

    for vocab in (9001, 8192):
        assert 0 <= int(greedy(torch.full((1, vocab), float("nan"), device="cuda"))) < vocab


def test_pages_beyond_two_to_the_31() -> None:
    """Attention over a cache of more than 2**31 elements: the last blocks of it."""
    from dataclasses import replace

    from diptych.kernels.triton.rope_attention import rope_attention
    from tests.kernels.triton_cases import AttentionCase, attention_inputs

    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    case = AttentionCase((1, 1), (90, 33), heads=8, kv_heads=2, head_dim=128, rotary=128)
    small = attention_inputs(case).to(torch.bfloat16, "cuda")
    blocks, page, kv_heads, dim = small.k.shape
    far = 2**31 // (page * kv_heads * dim) + 1000
    big = [
        torch.zeros(far + blocks, kv_heads, page, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for _ in "kv"
    ]
    for have, want in zip(big, (small.k, small.v), strict=True):
        have[far:] = want
    table = small.batch.block_tables
    moved = replace(
        small.batch,
        block_tables=torch.where(table < blocks, table + far, table),
        slots=small.batch.slots + far * page,
    )
    want = rope_attention(small.qkv, small.batch, small.k, small.v, small.rope, **small.options)
    assert torch.equal(rope_attention(small.qkv, moved, *big, small.rope, **small.options), want)
