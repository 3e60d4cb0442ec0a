"""Norm, rotary + KV write and packing at large sizes, in % of the copy bandwidth of the same run.

python -m benchmarks.glue
"""

from __future__ import annotations

import json

import torch

from benchmarks.prefill_attention import HEADS, KV_HEADS, D, prompts
from diptych.kernels.ceilings import copy_bandwidth
from diptych.kernels.rope import Rope
from diptych.kernels.timing import Replay
from diptych.kernels.triton.pack import copy_tokens
from diptych.kernels.triton.rms_norm import rms_norm
from diptych.kernels.triton.rope_write import rope_write

TOKENS = 16384


def main() -> None:
    copy, rows = copy_bandwidth(), []

    def report(name: str, moved: float, us: float) -> None:
        rows.append({"op": name, "us": round(us, 1), "percent_of_copy": round(100 * moved / (us * 1e-6) / copy, 1)})
        print(f"{name:18} {us:8.1f} µs  {moved / us / 1e6:5.2f} TB/s  {rows[-1]['percent_of_copy']} % of the copy rate")

    x = torch.randn(TOKENS, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    report("rms_norm", 2 * x.nbytes, Replay([lambda: rms_norm(x, weight, 1e-5)] * 4).time(7).us)

    batch, k, v = prompts(1, TOKENS, 16)
    at = torch.arange(TOKENS, device="cuda")
    object.__setattr__(batch, "positions", at)
    object.__setattr__(batch, "slots", batch.block_tables[0].long().repeat_interleave(16) * 16 + at % 16)
    rope = Rope(*torch.randn(2, TOKENS, D, device="cuda"))
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * D, device="cuda", dtype=torch.bfloat16)

    def turn() -> object:
        return rope_write(qkv, batch, k, v, rope, heads=HEADS, kv_heads=KV_HEADS, head_dim=D, q_norm=None, k_norm=None,
                          norm_eps=0.0)  # fmt: skip

    report("rotary + KV write", 2 * qkv.nbytes, Replay([turn] * 4).time(7).us)

    pages = torch.randn(32, 2, 1024, KV_HEADS, 16, D, device="cuda", dtype=torch.bfloat16).transpose(3, 4)
    blocks = torch.randperm(1024, device="cuda").int()
    slab = torch.empty(32, 2, 8192, KV_HEADS, D, device="cuda", dtype=torch.bfloat16)
    for name, into in (("pack", False), ("unpack", True)):
        call = Replay([lambda into=into: copy_tokens(pages, blocks, 0, 8192, slab, into)] * 2)
        report(name, 2 * slab.nbytes, call.time(7).us)
    print(json.dumps({"benchmark": "glue", "copy_tb_s": round(copy / 1e12, 3), "rows": rows}))


if __name__ == "__main__":
    main()
