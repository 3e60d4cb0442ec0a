"""What tests/gpu runs over NCCL, over gloo: only the device differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.families import Tiny
from tests.support.two_ranks import CASES, DENSE, MIXTURE, check_engine, check_hand_over, check_logits, check_sums, make


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    return {name: make(name, tmp_path_factory.mktemp("tiny")) for name in (DENSE, MIXTURE)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for the GPU's compiler")
def test_sums_in_one_launch(tmp_path: Path) -> None:
    check_sums("cpu", tmp_path, [torch.float32])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for the GPU's compiler")
def test_logits_and_greedy_tokens_over_lent_memory(tinies: dict[str, Tiny], tmp_path: Path) -> None:
    check_logits(tinies, "cpu", tmp_path, cases=[(DENSE, False)], count=2)


def test_logits_and_greedy_tokens(tinies: dict[str, Tiny]) -> None:
    check_logits(tinies, "cpu", None)


@pytest.mark.parametrize(("family", "spread"), CASES)
def test_the_engine(tinies: dict[str, Tiny], family: str, spread: bool) -> None:
    check_engine(tinies[family].folder, "cpu", spread, lent=True)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_kv_is_handed_over_between_sizes(tinies: dict[str, Tiny], sizes: tuple[int, int]) -> None:
    check_hand_over(tinies[DENSE], ("cpu", "cpu"), sizes)
