"""What the launchers share: device facts, scratch memory that captured graphs may keep, dependent launch.

Scratch is handed out a device, not a call: kernels of one stream use it one after the other. Two streams must not run
operators of the same device at once. Counters are zero before and after every launch (the last block resets them).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from diptych.contract.errors import Internal

COUNTERS = 1 << 17
NEVER, EARLY, LATE = 0, 1, 2
DEPENDENT = True
"""Off: every kernel waits for its predecessor's end (benchmarks measure the difference)."""

_scratch: dict[tuple[torch.device, str], Tensor] = {}
_retired: list[Tensor] = []  # captured graphs may still point at a buffer that was outgrown


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter's stand-in: small grids
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _capable(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def dependent_launch(device: torch.device, early: bool = False) -> int:
    """How a kernel starts and lets its successor start (Hopper's programmatic dependent launch): NEVER before the
    predecessor's end; else before it, letting the successor start EARLY or LATE."""
    if not (DEPENDENT and _capable(device)):
        return NEVER
    return EARLY if early else LATE


def launch_options(pdl: int) -> dict[str, bool]:
    """Keyword arguments of a launch. A kernel launched dependent must call `enter` before it reads or writes."""
    return {"launch_pdl": True} if pdl else {}


def counters(device: torch.device) -> Tensor:
    """int32 zeros, COUNTERS of them."""
    return _held(device, "counters", COUNTERS, torch.int32, zero=True)


def partials(device: torch.device, elements: int) -> Tensor:
    """At least `elements` float32 of undefined content."""
    return _held(device, "partials", elements, torch.float32, zero=False)


def _held(device: torch.device, name: str, elements: int, dtype: torch.dtype, zero: bool) -> Tensor:
    buffer = _scratch.get((device, name))
    if buffer is None or buffer.numel() < elements:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Internal(
                f"scratch for {name} grew to {elements} elements during capture: run the step once before it"
            )
        if buffer is not None:
            _retired.append(buffer)
        size = max(elements, 1 << 16)
        make = torch.zeros if zero else torch.empty
        buffer = _scratch[device, name] = make(size, dtype=dtype, device=device)
    return buffer


@triton.jit
def enter(PDL: tl.constexpr):
    """Waits for the kernel before this one and, with PDL == EARLY, lets the next one start as soon as there is room:
    everything above it may touch only memory that no kernel of this step writes."""
    if PDL > 0:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def leave(PDL: tl.constexpr):
    """With PDL == LATE, lets the next kernel start when all blocks have come this far."""
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, BYTES: tl.constexpr):
    """Starts bringing BYTES (a multiple of 16) at each of `pointers` (so aligned) into L2; may precede `enter`. The
    plain prefetch instruction brings a sector or two of a line, so it is the bulk one."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
