"""Decode attention alone: Llama-3-8B heads over scattered pages, bars of the roadmap's table.

    python -m benchmarks.decode_attention [--page 64]

A call is one launch of the fused operator (rotary and KV write included); caches rotate past L2; % is of the read-only
bandwidth of the same run, counting K and V of the context once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diptych.kernels.batch import Batch
from diptych.kernels.ceilings import read_bandwidth
from diptych.kernels.rope import Rope
from diptych.kernels.rope_attention import Unified
from diptych.kernels.timing import Replay, Timed
from diptych.kernels.triton.rope_attention import DecodeConfig, rope_attention

BARS = {(32, 4096): 90, (128, 1024): 88, (32, 1024): 78, (8, 4096): 76, (1, 32768): 76, (1, 131072): 88}
BARS_US = {(1, 1024): 5.0, (8, 1024): 13.0}
FLASH3_US = {(1, 1024): 16.0, (1, 32768): 54.4, (1, 131072): 148, (8, 4096): 53.8, (32, 1024): 53.5, (32, 4096): 144,
             (128, 1024): 153}  # fmt: skip
ROTATE_BYTES = 320 << 20


@dataclass(frozen=True)
class Heads:
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 16


class Case:
    """Caches and batches of one (batch, context), enough of them to rotate past L2."""

    def __init__(self, sequences: int, context: int, shape: Heads = Heads()) -> None:
        self.shape, self.bytes = shape, sequences * context * shape.kv_heads * shape.dim * 4
        pages = -(-context // shape.page)
        self.sets = max(2, -(-ROTATE_BYTES // self.bytes))
        blocks = self.sets * sequences * pages
        size = (2, blocks, shape.kv_heads, shape.page, shape.dim)
        self.k, self.v = torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(2, 3).unbind()
        tables = torch.randperm(blocks, device="cuda").int().view(self.sets, sequences, pages)
        self.batches = [self._batch(table, context) for table in tables.unbind()]
        angles = torch.outer(torch.arange(context, device="cuda"), 5e5 ** -torch.linspace(0, 1, 64, device="cuda"))
        self.rope = Rope(torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1))
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.qkv = torch.randn(sequences, width, device="cuda", dtype=torch.bfloat16)

    def _batch(self, table: torch.Tensor, context: int) -> Batch:
        n, last = table.shape[0], context - 1
        slots = table[:, last // self.shape.page].long() * self.shape.page + last % self.shape.page
        return Batch(
            token_ids=torch.zeros(n, dtype=torch.int64, device="cuda"),
            positions=torch.full((n,), last, dtype=torch.int64, device="cuda"), slots=slots,
            query_start=torch.arange(n + 1, dtype=torch.int32, device="cuda"),
            context_lens=torch.full((n,), context, dtype=torch.int32, device="cuda"), block_tables=table,
            query_lens=(), contexts=(), tables=(), max_query=1, max_context=context,
        )  # fmt: skip

    def call(self, batch: Batch, config: DecodeConfig | None, unified: Unified | None = None) -> Callable[[], object]:
        s = self.shape
        return lambda: rope_attention(
            self.qkv, batch, self.k, self.v, self.rope, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.dim,
            scale=s.dim**-0.5, config=config, unified=unified,
        )  # fmt: skip

    def replay(self, config: DecodeConfig | None, unified: Unified | None = None) -> Replay:
        """Plans are made before the capture: in a step one plan serves all layers."""
        for batch in self.batches:
            self.call(batch, config, unified)()
        rounds = max(1, 100 // self.sets) if self.bytes < 64 << 20 else 6
        return Replay([self.call(b, config, unified) for _ in range(rounds) for b in self.batches])

    def time(self, config: DecodeConfig | None, unified: Unified | None = None, replays: int = 15) -> Timed:
        return self.replay(config, unified).time(replays)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=int, default=16)
    args = parser.parse_args()
    read = read_bandwidth()
    print(f"read-only bandwidth {read / 1e12:.2f} TB/s")
    rows = []
    for sequences, context in (*BARS, *BARS_US):
        case = Case(sequences, context, Heads(page=args.page))
        timed = case.time(None)
        counts = torch.zeros(2, dtype=torch.int64, device="cuda")
        unified = case.time(None, Unified(0.0, 40.0, 40.0, counts))
        share = 100 * case.bytes / (timed.us * 1e-6) / read
        bar = (
            f"{BARS_US[sequences, context]} µs" if (sequences, context) in BARS_US else f"{BARS[sequences, context]} %"
        )
        print(f"{sequences:4} x {context:<7} {timed.us:8.1f} µs ±{timed.spread:.1%}  {share:5.1f} %  at least {bar:8}"
              f"  FlashAttention-3 {FLASH3_US.get((sequences, context), 0):6.1f} µs  unified {unified.us:7.1f} µs"
              f", recomputed rows {int(counts[0])}")  # fmt: skip
        rows.append({"batch": sequences, "context": context, "us": round(timed.us, 2), "percent": round(share, 1),
                     "unified_us": round(unified.us, 2)})  # fmt: skip
        del case
    print(json.dumps({"benchmark": "decode_attention", "read_tb_s": round(read / 1e12, 3), "rows": rows}))


if __name__ == "__main__":
    main()
