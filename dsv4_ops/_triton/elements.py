"""Where the elements of tensors with any strides lie, for kernels that treat each by itself, and what their bits are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offset_of(element, size1, size2, stride0, stride1, stride2, DENSE: tl.constexpr):
    """Offset of an element (int64, counted in row-major order) of a tensor of up to three dimensions: see ``launching.layout``."""
    if DENSE:
        offset = element
    else:
        rest = element // size2
        offset = (rest // size1) * stride0 + (rest % size1) * stride1 + (element % size2) * stride2
    return offset


@triton.jit
def fp32_bits(values):
    """int32 bits of the fp32 value of bf16 or fp32 ``values``."""
    return values.to(tl.int16, bitcast=True).to(tl.int32) << 16 if values.dtype == tl.bfloat16 else values.to(tl.int32, bitcast=True)
