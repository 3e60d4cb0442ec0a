"""Product kernels through Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from diptych.kernels.dataflow import LIBRARY, Choice
from tests.kernels.triton_cases import PRODUCTS, ProductCase, check_product

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these cases on the GPU")

GEMV = Choice("gemv", bn=8, bk=32, stages=2)
FLAT = Choice("flat", bn=16, bk=32, stages=2)
SPLIT = Choice("flat", bn=16, bk=16, split=3, stages=2)


APART = Choice("flat", bn=16, bk=32, stages=2, apart=True)


@pytest.mark.parametrize(
    "choice", [GEMV, FLAT, SPLIT, APART, LIBRARY], ids=["gemv", "flat", "split", "apart", "library"]
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_against_float64(name: str, choice: Choice) -> None:
    check_product(PRODUCTS[name], torch.float32, "cpu", choice)


@pytest.mark.parametrize("choice", [GEMV, SPLIT], ids=["gemv", "split"])
def test_half_precision(choice: Choice) -> None:
    check_product(PRODUCTS["gate, four rows"], torch.float16, "cpu", choice)


@pytest.mark.parametrize("m", [0, 17, 40])
def test_flat_takes_any_number_of_rows(m: int) -> None:
    check_product(ProductCase(m, 64, 40, residual=True), torch.float32, "cpu", SPLIT)


def test_the_result_may_be_wider_than_the_operands() -> None:
    """Logits of a half-precision head are rounded once, from float32."""
    from diptych.kernels.triton.products import product

    x, w = torch.randn(2, 64).half(), torch.randn(24, 64).half()
    for choice in (GEMV, SPLIT, LIBRARY):
        out = product(x, w, choice=choice, out_dtype=torch.float32)
        assert out.dtype is torch.float32
        torch.testing.assert_close(out, x.float() @ w.float().t(), rtol=2e-3, atol=2e-3)
