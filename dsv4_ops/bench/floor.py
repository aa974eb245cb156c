"""Triton kernels that do nothing, or store one block: what a launch costs at least. Importing this needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def empty_kernel(out_ptr):
    pass


@triton.jit
def one_store_kernel(out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, i)


def calls(device: str) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, programs, call) for each kernel and size."""
    out = torch.zeros(1024 * 128, dtype=torch.int32, device=device)
    for programs in (1, 132, 1024):
        yield "empty", programs, lambda n=programs: empty_kernel[(n,)](out, num_warps=4)  # type: ignore[misc]
        yield "one_store", programs, lambda n=programs: one_store_kernel[(n,)](out, BLOCK=128, num_warps=4)  # type: ignore[misc]
