"""Attention kernels through Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_cases import ATTENTION, AttentionCase, attention_inputs, check_attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these cases on the GPU")


@pytest.mark.parametrize("name", ATTENTION)
def test_against_float64(name: str) -> None:
    check_attention(ATTENTION[name], torch.float32, "cpu")


@pytest.mark.parametrize("name", ["decode", "decode, q/k norm and partial rotary", "chunks beside decode"])
def test_half_precision(name: str) -> None:
    check_attention(ATTENTION[name], torch.float16, "cpu")


@pytest.mark.parametrize("blocks", [1, 64])
def test_any_number_of_splits(blocks: int) -> None:
    from diptych.kernels.triton.rope_attention import DecodeConfig

    config = DecodeConfig(tile=16, stages=2, blocks=blocks)
    check_attention(AttentionCase((1, 1, 1), (200, 3, 90)), torch.float32, "cpu", config=config)
    check_attention(AttentionCase((1, 1, 1), (200, 3, 90), window=70), torch.float32, "cpu", config=config)


@pytest.mark.parametrize(("phi", "strays"), [(0.0, False), (60.0, True)])
def test_unified_maximum_is_exact(phi: float, strays: bool) -> None:
    """With a phi that suits no row, every row runs again with the running maximum and is counted."""
    from diptych.kernels.rope_attention import Unified
    from diptych.kernels.triton.rope_attention import DecodeConfig

    counts = torch.zeros(2, dtype=torch.int64)
    config = DecodeConfig(tile=16, stages=2, blocks=8)
    case = AttentionCase((1, 1), (90, 33))
    check_attention(case, torch.float32, "cpu", config=config, unified=Unified(phi, 20.0, 20.0, counts))
    again, rows = counts.tolist()
    assert rows > 0
    assert rows % case.heads == 0
    assert again == (rows if strays else 0)


def test_outliers_are_computed_again_and_only_they(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of the second sequence is so loud that exp(score - phi) overflows: its part alone runs again."""
    from diptych.kernels.rope_attention import Unified
    from diptych.kernels.triton.rope_attention import DecodeConfig
    from tests.kernels import triton_cases

    case = AttentionCase((1, 1, 1), (90, 60, 33))
    quiet = attention_inputs(case)
    table = quiet.batch.tables[1]
    loud = quiet.k.clone()
    loud[table[1], 3, 0] *= 200.0
    monkeypatch.setattr(triton_cases, "attention_inputs", lambda _: replace(quiet, k=loud))
    counts = torch.zeros(2, dtype=torch.int64)
    config = DecodeConfig(tile=16, stages=2, blocks=8)
    check_attention(case, torch.float32, "cpu", config=config, unified=Unified(0.0, 40.0, 40.0, counts))
    again, rows = counts.tolist()
    assert 0 < again <= case.heads // case.kv_heads < rows
