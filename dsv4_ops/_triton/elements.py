"""Where the elements of tensors with any strides lie, for kernels that treat each by itself."""

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
