"""Compiles every kernel for sm_90, no GPU needed: `python -m tests.kernels.compile_gate`. A process of its own, since
the interpreter's tests set TRITON_INTERPRET for theirs. Prints a line a kernel: name, shared memory."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

import diptych.kernels.triton
from diptych.kernels.triton.all_reduce import all_reduce_kernel
from diptych.kernels.triton.decode_attention import decode_attention_kernel
from diptych.kernels.triton.feed import feed_kernel
from diptych.kernels.triton.flat import flat_kernel
from diptych.kernels.triton.gemv import gemv_kernel
from diptych.kernels.triton.moe import grouped_kernel
from diptych.kernels.triton.pack import pack_kernel
from diptych.kernels.triton.plan import decode_plan_kernel, prefill_plan_kernel
from diptych.kernels.triton.prefill_attention import prefill_attention_kernel
from diptych.kernels.triton.read import read_kernel
from diptych.kernels.triton.rms_norm import rms_norm_kernel
from diptych.kernels.triton.rope_write import rope_write_kernel
from diptych.kernels.triton.sampling import advance_kernel, greedy_kernel, sample_kernel
from diptych.kernels.triton.silu_mul import silu_mul_kernel
from diptych.kernels.triton.streamed import streamed_kernel
from diptych.kernels.triton.streamed_attention import streamed_attention_kernel

SHARED_MEMORY = 227 << 10
FLOATS = {"eps", "scale", "softcap", "phi", "low", "high"}
INT64 = {
    "top_k_ptr",
    "ids_ptr",
    "token_ptr",
    "position_ptr",
    "slot_ptr",
    "order_ptr",
    "out_ptr",
    "stat_ptr",
    "address_ptr",
}
INT32 = {"table_ptr", "plan_ptr", "context_ptr", "start_ptr", "count_ptr", "block_ptr", "call_ptr"}
FLOAT32 = {"part_ptr", "cos_ptr", "sin_ptr", "scale_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr"}

PRODUCT = {"K": 4096, "BIAS": False, "PDL": 1}
HEADS = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "PAGE": 16}
DECODE = HEADS | {
    "R": 128, "MAXQ": 1, "ROWS": 4, "PAD": 16, "TILE": 128, "STAGES": 4, "CHUNK": 16, "WINDOW": 0, "SOFTCAP": False,
    "FUSED": True, "QK_NORM": False, "UNIFIED": False, "AHEAD": 128, "PDL": 1,
}  # fmt: skip
FLAT = PRODUCT | {
    "BM": 32, "BN": 64, "BK": 128, "SPLIT": 2, "STAGES": 4, "AHEAD": 256, "NORM": True,
    "GATE": False, "RESIDUAL": False,
}  # fmt: skip
STREAMED = PRODUCT | {
    "BM": 16, "BN": 64, "BK": 64, "SPLIT": 1, "STAGES": 4, "NORM": True, "GATE": True, "RESIDUAL": False,
}  # fmt: skip
GEMV = PRODUCT | {
    "M": 1, "BN": 16, "BK": 256, "STAGES": 4, "AHEAD": 512, "NORM": True, "GATE": True, "RESIDUAL": False,
}  # fmt: skip

VARIANTS: list[tuple[Any, dict[str, Any], int]] = [
    (gemv_kernel, GEMV, 4),
    (gemv_kernel, GEMV | {"M": 4, "BN": 8, "NORM": False, "GATE": False, "RESIDUAL": True, "AHEAD": 0, "PDL": 2}, 4),
    (flat_kernel, FLAT, 4),
    (flat_kernel, FLAT | {"NORM": False, "RESIDUAL": True, "SPLIT": 1, "PDL": 2}, 4),
    (flat_kernel, FLAT | {"GATE": True, "BM": 64, "SPLIT": 1, "BK": 64}, 4),
    (streamed_kernel, STREAMED, 4),
    (streamed_kernel,
     STREAMED | {"BM": 128, "BN": 128, "SPLIT": 2, "NORM": False, "GATE": False, "RESIDUAL": True, "PDL": 2}, 8),
    (decode_attention_kernel, DECODE, 4),
    (decode_attention_kernel, DECODE | {"QK_NORM": True, "WINDOW": 512, "SOFTCAP": True, "PDL": 0, "AHEAD": 0}, 4),
    (decode_attention_kernel, DECODE | {"UNIFIED": True, "TILE": 64}, 4),
    (decode_attention_kernel, DECODE | {"TILE": 64, "PDL": 2}, 4),
    (decode_attention_kernel, DECODE | {"FUSED": False, "MAXQ": 4, "ROWS": 16, "CHUNK": 4, "AHEAD": 0}, 4),
    (decode_plan_kernel, {"TILE": 64, "WINDOW": 0, "FUSED": True, "MAXQ": 1, "BB": 128, "BI": 32}, 4),
    (prefill_plan_kernel, {"ROWS": 128, "MAXQ": 1, "BB": 128, "BI": 32}, 4),
    (prefill_attention_kernel,
     HEADS | {"BM": 128, "BN": 64, "STAGES": 3, "WINDOW": 0, "SOFTCAP": False, "PDL": 2}, 8),
    (streamed_attention_kernel,
     HEADS | {"BN": 128, "STAGES": 2, "WINDOW": 0, "SOFTCAP": False}, 4),
    (streamed_attention_kernel,
     HEADS | {"D": 64, "PAGE": 64, "BN": 128, "STAGES": 4, "WINDOW": 100, "SOFTCAP": True}, 4),
    (rope_write_kernel, HEADS | {"R": 128, "BQ": 32, "BKV": 8, "BR": 64, "BD": 1, "QK_NORM": True, "PDL": 2}, 4),
    (rms_norm_kernel, {"H": 4096, "BH": 4096, "ROWS": 1, "PDL": 2}, 4),
    (read_kernel, {"TILE": 4096}, 4),
    (silu_mul_kernel, {"BLOCK": 2048, "PDL": 2}, 8),
    (pack_kernel, {"D": 128, "BD": 128, "PAGE": 16, "BT": 16, "BH": 8, "INTO_PAGES": True}, 8),
    (greedy_kernel, {"BLOCK": 4096, "SPLITS": 32, "PDL": 2}, 8),
    (sample_kernel, {"BLOCK": 4096, "TOP_K": True, "TOP_P": True, "MIN_P": True}, 16),
    (feed_kernel, {"BLOCK": 128}, 4),
    (advance_kernel, {"PAGE": 16, "BLOCK": 128, "PDL": 2}, 4),
    (all_reduce_kernel,
     {"RANK": 1, "RANKS": 4, "FLAGS": 4096, "CHUNK": 4096, "BLOCK": 2048, "BIAS": True, "RESIDUAL": True, "PDL": 2}, 8),
    (grouped_kernel,
     {"TOP_K": 8, "EXPERTS": 128, "BE": 128, "K": 2048, "BM": 16, "BN": 64, "BK": 64, "FIRST": True}, 4),
]  # fmt: skip


def argument_type(kernel: Any, name: str) -> str:
    if name in INT64:
        return "*i64"
    if name in INT32:
        return "*i32"
    if name in FLOAT32:
        return "*fp32"
    if kernel is read_kernel and name.endswith("_ptr"):
        return "*i32"
    if kernel is feed_kernel:
        return "*i32" if name == "staged_ptr" else "i32" if name == "batch" else "*i64"
    if name == "uniform_ptr":
        return "*fp64"
    return "*bf16" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"


def box(name: str, constants: dict[str, Any]) -> str:
    """The type of a matrix that the copy engine brings."""
    rows, columns = {
        "w_desc": ("BN", "BK"), "x_desc": ("BM", "BK"), "q_desc": (64, "D"), "k_desc": ("PAGE", "D"),
        "v_desc": ("PAGE", "D"),
    }[name]  # fmt: skip
    shape = [constants.get(size, size) for size in (rows, columns)]
    return f"tensordesc<bf16{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"


def compile_variant(kernel: Any, constants: dict[str, Any], warps: int) -> Any:
    names = kernel.arg_names
    boxed = {n: box(n, constants) for n in names if n.endswith("_desc")}
    signature = {n: "constexpr" if n in constants else boxed.get(n) or argument_type(kernel, n) for n in names}
    aligned = [
        i
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n.endswith(("_stride", "_block", "_token", "elements"))
    ]
    hints: Any = {(i,): [["tt.divisibility", 16]] for i in aligned}
    make = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, hints)
    options = {"num_warps": warps, "launch_pdl": bool(constants.get("PDL"))}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def every_kernel() -> set[str]:
    """Names of what kernels/triton launches."""
    found = set()
    for module in pkgutil.iter_modules(diptych.kernels.triton.__path__):
        loaded = importlib.import_module(f"diptych.kernels.triton.{module.name}")
        found |= {name for name, value in vars(loaded).items() if isinstance(value, JITFunction)}
    return {name for name in found if name.endswith("_kernel")}


def main() -> None:
    missing = every_kernel() - {kernel.__name__ for kernel, _, _ in VARIANTS}
    assert not missing, missing
    for kernel, constants, warps in VARIANTS:
        built = compile_variant(kernel, constants, warps)
        ptx = built.asm["ptx"]
        assert built.metadata.shared <= SHARED_MEMORY, (kernel.__name__, built.metadata.shared)
        assert ("griddepcontrol.wait" in ptx) == bool(constants.get("PDL")), kernel.__name__
        if kernel in (flat_kernel, streamed_kernel, streamed_attention_kernel):
            assert "wgmma" in ptx
        if kernel is all_reduce_kernel:
            assert ptx.count("ld.volatile.global.v4.b32") == 3, "peers are not read 16 bytes at a time"
        print(kernel.__name__, built.metadata.shared)


if __name__ == "__main__":
    main()
