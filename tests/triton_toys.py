"""Launchers that double a vector, the first rightly, the others each with one fault that test_triton.py must notice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_ops._triton.launching import wait_for_inputs

_toy = triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])


@triton.jit
def _double(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + i + shift_in, mask=i < n, other=0)
    tl.store(y_ptr + i + shift_out, value * 2, mask=i < n)


@_toy
def _double_kernel(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK: tl.constexpr):
    wait_for_inputs()
    _double(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK)


@_toy
def _hasty_kernel(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK: tl.constexpr):
    first = tl.load(x_ptr)
    wait_for_inputs()
    _double(x_ptr, y_ptr, n + (first < 0), shift_in, shift_out, BLOCK)


@_toy
def _restless_kernel(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK: tl.constexpr):
    tl.store(y_ptr, 0.0)
    wait_for_inputs()
    _double(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK)


@_toy
def _sometimes_kernel(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK: tl.constexpr):
    if tl.program_id(0) < 3:
        wait_for_inputs()
    _double(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK)


@_toy
def _leaving_kernel(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK: tl.constexpr):
    if tl.program_id(0) * BLOCK >= n:
        return
    wait_for_inputs()
    _double(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK)


@_toy
def _eager_kernel(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    wait_for_inputs()
    _double(x_ptr, y_ptr, n, shift_in, shift_out, BLOCK)


@triton.jit
def late_copy_kernel(source_ptr, target_ptr, n, nanoseconds, BLOCK: tl.constexpr):
    """Lets the next launch begin, and copies long after."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    end = tl.extra.cuda.globaltimer() + nanoseconds
    while tl.extra.cuda.globaltimer() < end:
        pass
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < n), mask=i < n)


def late_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Of two tensors of one layout: all that their storages hold."""
    source, target = (torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in (source, target))
    assert len(source) == len(target)
    late_copy_kernel[(triton.cdiv(len(source), 4096),)](source, target, len(source), 20_000, BLOCK=4096, launch_pdl=True)


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
