"""Two ranks on GPUs: sums over NCCL and over lent memory, model, engine with captured collectives, hand-over between
groups of unlike size.

Needs two GPUs, or one that ranks may share: NCCL_MULTI_RANK_GPU_ENABLE=1 and an NCCL that knows it (2.30 or later, in
LD_PRELOAD where PyTorch's own is older).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from diptych.workers.parallel.layout import may_share_a_gpu
from tests.support.families import Tiny
from tests.support.openings import goes_on_gpu
from tests.support.ranks import run_ranks
from tests.support.two_ranks import CASES, DENSE, MIXTURE, check_engine, check_hand_over, check_logits, check_sums, make

GPUS = torch.cuda.device_count()
SHARED = may_share_a_gpu()
if GPUS < 2 and SHARED:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no CUDA device"),
    pytest.mark.skipif(GPUS == 1 and not SHARED, reason="one GPU, which NCCL_MULTI_RANK_GPU_ENABLE does not share"),
]


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    return {name: make(name, tmp_path_factory.mktemp("tiny")) for name in (DENSE, MIXTURE)}


def test_sums_in_one_launch(tmp_path: Path) -> None:
    check_sums("cuda", tmp_path, [torch.bfloat16, torch.float16, torch.float32])


@pytest.mark.parametrize("lent", [False, True])
def test_logits_and_greedy_tokens(tinies: dict[str, Tiny], tmp_path: Path, lent: bool) -> None:
    check_logits(tinies, "cuda", tmp_path if lent else None)


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize(("family", "spread"), CASES)
def test_the_engine(tinies: dict[str, Tiny], family: str, spread: bool, lent: bool) -> None:
    check_engine(tinies[family].folder, "cuda", spread, lent)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_peer_that_goes_while_a_link_is_made(side: str, silent: bool) -> None:
    """NCCL waits for it without a limit of its own; the link does not."""
    ((took, code),) = run_ranks(1, goes_on_gpu, side, silent)
    assert took < 10.0
    if side == "receiver":
        assert code == ("TransferTimeout" if silent else "DecodeLost")


@pytest.mark.skipif(GPUS == 2 and not SHARED, reason="three ranks on two GPUs that they may not share")
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_kv_is_handed_over_between_sizes(tinies: dict[str, Tiny], sizes: tuple[int, int]) -> None:
    """Prefill takes the GPUs behind decode's where there are enough."""
    first = sizes[1] if sum(sizes) <= GPUS else 0
    check_hand_over(tinies[DENSE], (f"cuda:{first}", "cuda:0"), sizes)
