"""The linear products of Llama-3-8B at few rows, as the dataflow chooses them, against the library, in turns.

    python -m benchmarks.linears

The library's time holds what our fused kernel does too (RMSNorm before, SiLU·mul after, residual); `product alone` is
the bare library product. Weights rotate past L2; a ratio's interval is the middle half of the paired ratios.
"""

from __future__ import annotations

import json

import torch

from diptych.kernels.dataflow import LIBRARY, Problem, choose
from diptych.kernels.timing import Replay, paired
from diptych.kernels.tune import Bench

SHAPES = (("qkv", 4096, 6144, "norm"), ("o", 4096, 4096, "plain"), ("gate_up", 4096, 28672, "norm_gate"),
          ("down", 14336, 4096, "plain"), ("head", 4096, 128256, "norm"))  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def bare(bench: Bench, m: int) -> Replay:
    x = torch.randn(m, bench.k, dtype=bench.dtype, device="cuda")
    rounds = max(1, 24 // len(bench.weights))
    return Replay([lambda w=w: torch.nn.functional.linear(x, w) for _ in range(rounds) for w in bench.weights])


def main() -> None:
    rows, device = [], torch.cuda.get_device_name()
    for name, k, n, fusion in SHAPES:
        bench = None
        for m in ROWS:
            problem = Problem(k, n, m, "bfloat16", fusion)
            bench = bench or Bench(problem, torch.bfloat16)
            choice = choose(device, problem)
            alone = bare(bench, m).time(7).us
            if choice == LIBRARY:
                print(f"{name:8} M={m:<4} library, product alone {alone:7.1f} µs")
                continue
            ours, theirs, ratio, (low, high) = paired(bench.replay(m, choice), bench.replay(m, LIBRARY), 11)
            print(f"{name:8} M={m:<4} {choice.kind:5} {ours.us:7.1f} µs  library {theirs.us:7.1f} µs  "
                  f"gain {1 / ratio:.3f} [{1 / high:.3f}, {1 / low:.3f}]  product alone {alone:7.1f} µs")  # fmt: skip
            row = {"shape": name, "m": m, "kind": choice.kind, "gain": round(1 / ratio, 3)}
            rows.append(row | {"us": round(ours.us, 2), "library_us": round(theirs.us, 2), "bare_us": round(alone, 2)})
        del bench
        torch.cuda.empty_cache()
    print(json.dumps({"benchmark": "linears", "rows": rows}))


if __name__ == "__main__":
    main()
