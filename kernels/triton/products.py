"""Launches the product that the dataflow chose; every linear operator of the GPU ends here."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional

from diptych.contract.errors import ModelUnsupported
from diptych.kernels.dataflow import Choice, Fusion, Problem, choose
from diptych.kernels.invariance import fixed_choice, is_batch_invariant
from diptych.kernels.triton.common import COUNTERS, counters, dependent_launch, launch_options, partials
from diptych.kernels.triton.flat import flat_kernel
from diptych.kernels.triton.gemv import gemv_kernel
from diptych.kernels.triton.rms_norm import rms_norm
from diptych.kernels.triton.silu_mul import silu_mul
from diptych.kernels.triton.streamed import aligned, streamed

Norm = tuple[Tensor, float] | None
FEW = 1024
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def product(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Norm = None,
    gate: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    choice: Choice | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = f(x) · weightᵀ + bias + residual, or silu(f(x) · gateᵀ) * (f(x) · upᵀ); f is RMSNorm or nothing.

    x: [M, K]. weight: [N, K] contiguous. choice: overrules the table (tests and the sweep). out_dtype: x's by
    default; what our kernels return is then rounded once, from float32.
    """
    check(x, weight)
    if choice is None:
        fusion: Fusion = "norm_gate" if gate else "norm" if norm is not None else "plain"
        problem = Problem(weight.shape[1], weight.shape[0], x.shape[0], DTYPES[x.dtype], fusion)
        choice = fixed_choice(problem) if is_batch_invariant() else choose(device_name(x.device), problem)
    if x.shape[0] == 0 or choice.kind == "library" or (choice.kind == "streamed" and not aligned(x, weight)):
        y = _library(x, weight, norm, gate, bias, residual)
        return y if out_dtype is None else y.to(out_dtype)
    if choice.apart and norm is not None:
        x, norm = rms_norm(x, *norm), None
    n = weight.shape[0] // (2 if gate else 1)
    out = torch.empty(x.shape[0], n, dtype=out_dtype or x.dtype, device=x.device)
    pdl = dependent_launch(x.device, choice.early)
    if choice.kind == "streamed":
        streamed(x, weight, norm, gate, bias, residual, out, choice, pdl)
    else:
        run = _gemv if choice.kind == "gemv" else _flat
        run(x, weight, norm, gate, bias, residual, out, choice, pdl)
    return out


def check(x: Tensor, weight: Tensor) -> None:
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ModelUnsupported(f"a product of {x.dtype} activations and {weight.dtype} weights has no GPU kernel")
    if not weight.is_contiguous() or x.stride(-1) != 1:
        raise ModelUnsupported("a product needs contiguous weights and activations contiguous in their last dimension")


def _library(
    x: Tensor,
    weight: Tensor,
    norm: Norm,
    gate: bool,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    if norm is not None:
        x = rms_norm(x, *norm)
    if residual is not None:
        residual = residual if bias is None else residual + bias
        return torch.addmm(residual, x, weight.t())
    y = functional.linear(x, weight, bias)
    return silu_mul(y) if gate else y


def _ahead(choice: Choice, k: int) -> int:
    """A bulk prefetch goes by aligned pieces of 128 elements."""
    return 0 if k % 128 else min(choice.ahead, 1 << (k.bit_length() - 1))


def _gemv(
    x: Tensor, weight: Tensor, norm: Norm, gate: bool, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    c: Choice, pdl: int,
) -> None:  # fmt: skip
    (m, k), n = x.shape, out.shape[1]
    g, eps = norm or (x, 0.0)
    r, r_stride = (x, 0) if residual is None else (residual, residual.stride(0))
    gemv_kernel[(triton.cdiv(n, c.bn),)](
        x, weight, g, x if bias is None else bias, r, out, n, x.stride(0), r_stride, out.stride(0), eps,
        K=k, M=m, BN=c.bn, BK=c.bk, STAGES=c.stages, AHEAD=_ahead(c, k), NORM=norm is not None, GATE=gate,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=pdl, num_warps=c.warps, **launch_options(pdl),
    )  # fmt: skip


def _flat(
    x: Tensor, weight: Tensor, norm: Norm, gate: bool, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    c: Choice, pdl: int,
) -> None:  # fmt: skip
    (m, k), n = x.shape, out.shape[1]
    if c.rows and m > FEW:  # what splits leave for one another is held for so many rows
        for at in range(0, m, FEW):
            part = slice(at, at + FEW)
            rest = None if residual is None else residual[part]
            _flat(x[part], weight, norm, gate, bias, rest, out[part], c, pdl)
        return
    g, eps = norm or (x, 0.0)
    r, r_stride = (x, 0) if residual is None else (residual, residual.stride(0))
    bm, tiles = c.rows or max(16, triton.next_power_of_2(m)), triton.cdiv(n, c.bn)
    places = triton.cdiv(m, bm) * tiles
    assert c.split == 1 or places <= COUNTERS
    size = places * c.split * (c.bn * bm * (2 if gate else 1) + bm) if c.split > 1 else 1
    flat_kernel[(triton.cdiv(m, bm), tiles, c.split)](
        x, weight, g, x if bias is None else bias, r, out, partials(x.device, size), counters(x.device),
        m, n, x.stride(0), r_stride, out.stride(0), eps,
        K=k, BM=bm, BN=c.bn, BK=c.bk, SPLIT=c.split, STAGES=c.stages, AHEAD=_ahead(c, k),
        NORM=norm is not None, GATE=gate, BIAS=bias is not None, RESIDUAL=residual is not None, PDL=pdl,
        num_warps=c.warps, **launch_options(pdl),
    )  # fmt: skip
