"""One small shape of every operator on the GPU, against float64: `python -m tests.gpu.small_shapes`, a process of its
own, so that a memory checker can watch it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diptych.kernels.dataflow import Choice
from diptych.kernels.rope_attention import Unified
from diptych.kernels.triton.streamed import can_stream
from tests.kernels import glue_cases as glue
from tests.kernels.triton_cases import AttentionCase, ProductCase, check_attention, check_product

HALF, GPU = torch.bfloat16, "cuda"
PAGES = {"heads": 4, "kv_heads": 2, "head_dim": 64, "rotary": 64}


def attention(*lengths: tuple[int, ...], **launch: object) -> Callable[[], None]:
    return lambda: check_attention(AttentionCase(*lengths, **PAGES), HALF, GPU, **launch)  # type: ignore[arg-type]


def product(case: ProductCase, choice: Choice | None) -> Callable[[], None]:
    return lambda: check_product(case, HALF, GPU, choice)


def unified() -> Unified:
    return Unified(0.0, 1.0, 1.0, torch.zeros(2, dtype=torch.int64, device=GPU))


ODD = ProductCase(3, 200, 72, bias=True)
GATE = ProductCase(5, 256, 160, norm=True, gate=True)
SUMS = ProductCase(17, 512, 136, residual=True)
CASES: dict[str, Callable[[], None]] = {
    "decode attention": attention((1, 1, 1), (200, 1, 65)),
    "decode attention, unified maximum": lambda: attention((1, 1), (200, 65), unified=unified())(),
    "prefill attention": attention((70, 1, 33), (70, 40, 90)),
    "prefill attention by tiles": lambda: check_attention(AttentionCase((70, 33), (70, 90)), HALF, GPU),
    "gemv": product(ProductCase(2, 256, 72, norm=True, gate=True), Choice("gemv", 8, 256, 1, 4, 3, 256)),
    "flat": product(GATE, Choice("flat", 64, 64, 1, 4, 3)),
    "flat, split": product(SUMS, Choice("flat", 64, 64, 4, 4, 3)),
    "flat, odd": product(ODD, Choice("flat", 64, 64, 1, 4, 3)),
    "library": product(GATE, Choice("library")),
    "norm": lambda: glue.check_rms_norm(5, 72, HALF, GPU),
    "silu": lambda: glue.check_silu_mul(5, 72, HALF, GPU),
    "pack": lambda: glue.check_pack(5, 20, 1, 1, HALF, GPU),
    "greedy": lambda: glue.check_greedy(GPU),
    "feed": lambda: glue.check_feed(GPU),
    "advance": lambda: glue.check_advance(GPU),
    "sample": lambda: glue.check_sample(GPU),
    "experts": lambda: glue.check_moe(9, 5, 3, HALF, GPU),
}
HOPPER = {
    "streamed product": product(ProductCase(5, 256, 160, norm=True, gate=True), Choice("streamed", 64, 64, 1, 4, 3)),
    "streamed product, split": product(SUMS, Choice("streamed", 64, 64, 2, 4, 3)),
}


def main() -> None:
    for name, check in (CASES | (HOPPER if can_stream(torch.device(GPU)) else {})).items():
        check()
        torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main()
