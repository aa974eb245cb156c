"""Launchers that double a vector, the first rightly, the others each with one fault that test_triton.py must notice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])
def _double_kernel(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + i + shift_in, mask=i < n, other=0)
    tl.store(y_ptr + i + shift_out, value * 2, mask=i < n)


@triton.jit
def _wild_kernel(x_ptr):
    tl.store(x_ptr + (1 << 44), 1)


def _launch(x: torch.Tensor, n: int, shift_in: int = 0, shift_out: int = 0, block: int = 16) -> torch.Tensor:
    y = torch.empty_like(x)
    _double_kernel[(triton.cdiv(max(n, 1), block),)](x, y, n, shift_in, shift_out, BLOCK=block)
    return y


def right(x: torch.Tensor) -> torch.Tensor:
    return _launch(x, len(x))


def reads_past_the_end(x: torch.Tensor) -> torch.Tensor:
    return _launch(x, len(x), shift_in=1)


def leaves_one_unwritten(x: torch.Tensor) -> torch.Tensor:
    return _launch(x, len(x) - 1)


def writes_past_the_end(x: torch.Tensor) -> torch.Tensor:
    _launch(x, len(x) + 1)
    return _launch(x, len(x))


def writes_its_input(x: torch.Tensor) -> torch.Tensor:
    y = _launch(x, len(x))
    _double_kernel[(1,)](x, x, 1, 0, 0, BLOCK=16)
    return y


def writes_before_its_input(x: torch.Tensor) -> torch.Tensor:
    y = _launch(x, len(x))
    _double_kernel[(1,)](y, x, 1, 0, -1, BLOCK=16)
    return y


def dies(x: torch.Tensor) -> torch.Tensor:
    _wild_kernel[(1,)](x)
    return x


def block_by_count(x: torch.Tensor) -> torch.Tensor:
    return _launch(x, len(x), block=16 if len(x) < 20 else 32)
