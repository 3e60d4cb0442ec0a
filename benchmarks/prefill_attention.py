"""Prefill attention alone: causal, Llama-3-8B heads, over pages, against PyTorch's cuDNN backend on contiguous tensors.

python -m benchmarks.prefill_attention
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diptych.kernels.batch import Batch
from diptych.kernels.timing import Replay
from diptych.kernels.triton.rope_attention import PrefillConfig, Shape, _prefill

CASES = ((8, 512), (4, 2048), (1, 8192))
HEADS, KV_HEADS, D = 32, 8, 128


def prompts(sequences: int, length: int, page: int) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    pages = -(-length // page)
    k, v = torch.randn(2, sequences * pages, KV_HEADS, page, D, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    table = torch.randperm(sequences * pages, device="cuda").int().view(sequences, pages)
    lens = (length,) * sequences
    empty = torch.zeros(sequences * length, dtype=torch.int64, device="cuda")
    batch = Batch(
        empty, empty, empty, torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cuda"),
        torch.tensor(lens, dtype=torch.int32, device="cuda"), table, lens, lens, (), length, length,
    )  # fmt: skip
    return batch, k, v


def ours(sequences: int, length: int, page: int, config: PrefillConfig | None = None) -> float:
    batch, k, v = prompts(sequences, length, page)
    q = torch.randn(sequences * length, HEADS * D, device="cuda", dtype=torch.bfloat16)
    out, shape = torch.empty_like(q), Shape(HEADS, KV_HEADS, D, D**-0.5, None, None)

    def call() -> None:
        _prefill(q, out, batch, k, v, shape, 1, config)

    call()  # the work list, once a step
    return Replay([call] * 4).time(7).us


def cudnn(sequences: int, length: int) -> float:
    q, k, v = (torch.randn(sequences, HEADS, length, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return Replay([lambda: scaled_dot_product_attention(q, k, v, is_causal=True)] * 4).time(7).us


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=int, default=64)
    args = parser.parse_args()
    rows = []
    for sequences, length in CASES:
        flops = 4 * sequences * HEADS * D * length * length / 2
        us, peer = ours(sequences, length, args.page), cudnn(sequences, length)
        print(f"{sequences} x {length:<6} {us:8.1f} µs {flops / us / 1e6:6.0f} TFLOP/s   cuDNN {peer:8.1f} µs "
              f"{flops / peer / 1e6:6.0f} TFLOP/s   {us / peer:.2f} x its time")  # fmt: skip
        rows.append({"batch": sequences, "length": length, "us": us, "cudnn_us": peer, "tflops": flops / us / 1e6})
    print(json.dumps({"benchmark": "prefill_attention", "page": args.page, "rows": rows}))


if __name__ == "__main__":
    main()
