"""Where the elements of tensors with any strides lie, for kernels that treat each by itself, what their bits are, and a search among keys by counting."""

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


@triton.jit
def reached(keys, bound, step):
    """Whether ``keys`` reach ``bound`` plus one, two and three steps: int32 each."""
    return (keys >= bound + step).to(tl.int32), (keys >= bound + step + step).to(tl.int32), (keys >= bound + step + step + step).to(tl.int32)


@triton.jit
def narrowed(bound, above, step, count_1, count_2, count_3, wanted):
    """The next two bits of the largest key that ``wanted`` keys reach: ``bound`` raised, and how many pass it, from the counts of those that reach one to three steps above it."""
    above = tl.where(count_3 >= wanted, above, tl.where(count_2 >= wanted, count_3, tl.where(count_1 >= wanted, count_2, count_1)))
    steps = (count_1 >= wanted).to(tl.int32) + (count_2 >= wanted).to(tl.int32) + (count_3 >= wanted).to(tl.int32)
    return bound + steps * step, above
