"""Decode attention with the running and with the unified maximum (FlashDecoding++, arXiv 2311.01282, §3), in turns.

    python -m benchmarks.unified_max [--page 64]

Three views of the same pair of kernels: paired times at the shapes of the bars, with what it costs when every row
leaves the window; one block alone, whose tiles can only wait for each other: nanoseconds a tile; and the timeline of a
tile in the machine code of that loop, in which the synchronisation that is gone can be read off: shuffles between lanes
and barriers between warps for the row maximum, and the rescaling of what was summed before. Says at the end where the
unified maximum wins.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import groupby

import torch

from benchmarks.decode_attention import BARS, BARS_US, Case, Heads
from diptych.kernels.rope_attention import Unified
from diptych.kernels.timing import paired
from diptych.kernels.triton.decode_attention import decode_attention_kernel
from diptych.kernels.triton.rope_attention import DecodeConfig, decode_config

LONE = 4096
STAGES = {
    "HGMMA": "multiply", "HMMA": "multiply", "LDGSTS": "bring", "LDG": "bring", "SHFL": "shuffle", "BAR": "barrier",
    "MUFU": "exponential", "FMNMX": "maximum", "FMUL": "scale", "LDGDEPBAR": "await", "DEPBAR": "await",
    "WARPGROUP": "await",
}  # fmt: skip


def unified(phi: float = 0.0) -> Unified:
    return Unified(phi, 40.0, 40.0, torch.zeros(2, dtype=torch.int64, device="cuda"))


def shapes(page: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for sequences, context in (*BARS, *BARS_US):
        case, counted = Case(sequences, context, Heads(page=page)), unified()
        running, never = case.replay(None), unified(1000.0)
        ours, theirs, ratio, (low, high) = paired(case.replay(None, counted), running, 15)
        again = case.time(None, never)
        print(f"{sequences:4} x {context:<7} running {theirs.us:8.1f} µs  unified {ours.us:8.1f} µs"
              f"  gain {1 / ratio:.3f} [{1 / high:.3f}, {1 / low:.3f}]  every row again {again.us:8.1f} µs"
              f"  recomputed {int(counted.counts[0])} of {int(counted.counts[1])} rows", flush=True)  # fmt: skip
        rows.append({"batch": sequences, "context": context, "running_us": round(theirs.us, 2),
                     "unified_us": round(ours.us, 2), "gain": round(1 / ratio, 4), "gain_low": round(1 / high, 4),
                     "gain_high": round(1 / low, 4), "again_us": round(again.us, 2)})  # fmt: skip
        del case
        torch.cuda.empty_cache()
    return rows


def lone_block(page: int, stages: int) -> dict[str, float]:
    """Nanoseconds a tile of a sequence that one block a KV head walks, from two lengths; what starts and ends a block
    cancels out."""
    tile = 64
    config = DecodeConfig(tile=tile, stages=stages, blocks=0)  # no room to split into
    found = {}
    for name, kind in (("running", None), ("unified", unified())):
        short, long = (Case(1, n, Heads(page=page)).time(config, kind).us for n in (LONE, 2 * LONE))
        found[name] = (long - short) * 1e3 / (LONE / tile)
    print(f"one block alone, {stages} tiles in flight: running {found['running']:.0f} ns a tile, "
          f"unified {found['unified']:.0f} ns")  # fmt: skip
    return {name: round(ns, 1) for name, ns in found.items()}


def machine_code(call: Callable[[], object]) -> str:
    """SASS of the kernel that `call` compiles first."""
    cache = decode_attention_kernel.device_caches[torch.cuda.current_device()][0]
    cache.clear()
    call()
    (kernel,) = cache.values()
    return str(kernel.asm["sass"])


def loop_of(sass: str) -> list[str]:
    """Opcodes of the loop over tiles: of the loops that multiply, the longest."""
    labels: dict[str, int] = {}
    codes: list[str] = []
    loops: list[list[str]] = []
    for line in sass.splitlines():
        if label := re.fullmatch(r"(LBB\d+):", line.strip()):
            labels[label[1]] = len(codes)
        elif found := re.search(r"\t(?:@\S+ )?([A-Z][A-Z0-9]*)(.*);", line):
            codes.append(found[1])
            target = re.search(r"LBB\d+", found[2]) if found[1] == "BRA" else None
            if target and target[0] in labels:
                loops.append(codes[labels[target[0]] :])
    return max((loop for loop in loops if any("MMA" in code for code in loop)), key=len, default=[])


def timeline(codes: list[str]) -> str:
    """What a tile goes through in order, repetitions folded."""
    stages = [STAGES[code] for code in codes if code in STAGES]
    return " › ".join(f"{name} x{len(list(same))}" for name, same in groupby(stages))


def code(page: int) -> dict[str, dict[str, int]]:
    case, config = Case(32, 1024, Heads(page=page)), decode_config(32, 8, 2)
    found = {}
    for name, kind in (("running", None), ("unified", unified())):
        loop = loop_of(machine_code(lambda kind=kind: case.call(case.batches[0], config, kind)()))  # type: ignore[misc]
        counts = Counter(STAGES[op] for op in loop if op in STAGES)
        found[name] = {stage: counts.get(stage, 0) for stage in dict.fromkeys(STAGES.values())}
        print(f"a tile, {name}: {len(loop)} instructions; {dict(found[name])}\n  {timeline(loop)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=int, default=64)
    args = parser.parse_args()
    rows = shapes(args.page)
    alone = {str(stages): lone_block(args.page, stages) for stages in (1, 3)}
    try:
        loops = code(args.page)
    except Exception as error:  # noqa: BLE001 - a disassembler that is not there must not lose the measurements
        print(f"no machine code: {error!r}")
        loops = {}
    wins = [f"{r['batch']} x {r['context']} by {r['gain']}" for r in rows if float(str(r["gain_low"])) > 1.01]
    print(f"the unified maximum wins more than 1 %: {', '.join(wins) or 'nowhere'}")
    print(json.dumps({"benchmark": "unified_max", "rows": rows, "ns_a_tile_alone": alone, "loop": loops}))


if __name__ == "__main__":
    main()
