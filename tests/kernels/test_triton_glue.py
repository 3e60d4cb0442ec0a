"""RMSNorm, SiLU·mul, packing, the draw and the experts through Triton's interpreter."""

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

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these cases on the GPU")


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 72), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    check_rms_norm(rows, width, dtype, "cpu")


def test_silu_mul() -> None:
    check_silu_mul(3, 50, torch.float32, "cpu")


@pytest.mark.parametrize("heads", [(0, 3), (1, 1)])
@pytest.mark.parametrize(("first", "count"), [(0, 40), (5, 20), (16, 0), (31, 2)])
def test_pack_is_bitwise_and_touches_nothing_else(first: int, count: int, heads: tuple[int, int]) -> None:
    check_pack(first, count, *heads, torch.float16, "cpu")


def test_greedy_takes_the_first_of_equals() -> None:
    check_greedy("cpu")


def test_feed() -> None:
    check_feed("cpu")


def test_sample() -> None:
    check_sample("cpu", rows=12)


def test_advance() -> None:
    check_advance("cpu")


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 2), (9, 5, 3), (0, 4, 1)])
def test_experts(tokens: int, experts: int, top_k: int) -> None:
    check_moe(tokens, experts, top_k, torch.float32, "cpu")
