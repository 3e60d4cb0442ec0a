"""What the Gluon kernels share: names that moved between Triton's versions, and boxes for the copy engine."""

from __future__ import annotations

from torch import Tensor, bfloat16
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Of the threads that run the function: `thread_barrier` in Triton 3.6, `barrier` later."""
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(box, coordinates, barrier, shared memory): `async_copy_global_to_shared` in Triton 3.6, `async_load` later."""


def boxes(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix of two-byte elements, rows beginning at multiples of 16 bytes, as the copy engine brings it."""
    kind = gl.bfloat16 if matrix.dtype is bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)
