"""How the kernels of this package are compiled and launched."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def compile_once(*, aligned: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` of a kernel that is compiled for its constants and dtypes alone.

    By default Triton compiles again when an integer becomes 1 or divisible by 16, or an address is no longer a multiple
    of 16 bytes: in serving, that is a stall in the middle of a batch. ``aligned`` names pointers whose addresses are
    multiples of 16 always, because the launcher allocates them.
    """

    def jit(kernel: Callable[..., Any]) -> Any:
        parameters = inspect.signature(kernel).parameters.values()
        general = [p.name for p in parameters if "constexpr" not in str(p.annotation) and p.name not in aligned]
        return triton.jit(kernel, do_not_specialize=general, do_not_specialize_on_alignment=general)

    return jit


@triton.jit
def wait_for_inputs():
    """The first statement of every kernel, in all its programs: nothing in device memory is touched before it.

    Where the GPU has programmatic dependent launch, ``launch`` lets programs begin once those of the kernel before have ended; they
    stand here until that kernel is complete and all that it wrote is visible. So the start of one kernel overlaps the end of the other.
    Stores wait as loads do: the kernel before may still read what is overwritten, memory that a graph's pool hands out again included.
    Programs with nothing to do wait too: a kernel waits for the one before it alone, and what stands further back has ended because
    each in between has waited. None lets the next begin earlier: kernels of others may rely on its results before they wait, and where
    there are many programs it is slower.
    """
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@functools.cache
def _launch_options(device: int) -> dict[str, bool]:
    """Programmatic dependent launch, just where ``wait_for_inputs`` waits. ``device`` is the current one."""
    return {"launch_pdl": True} if tl.target_info.cuda_capability_geq(9, 0) else {}


def launch(kernel: Any, programs: int | tuple[int, int], device: torch.device, *args: Any, **constants: Any) -> None:
    """Start ``programs`` programs on ``device``, which need not be the current one; none for an empty output."""
    grid = (programs,) if isinstance(programs, int) else programs
    if 0 in grid:
        return
    if device.type != "cuda":
        kernel[grid](*args, **constants)
    elif device.index == torch.cuda.current_device():
        kernel[grid](*args, **constants, **_launch_options(device.index))
    else:
        with torch.cuda.device(device):
            launch(kernel, programs, device, *args, **constants)


def tile(width: int, elements: int, widest: int = 1024) -> tuple[int, int, int]:
    """Rows and columns of one program's part of a ``[n, width]`` output, and how many parts a row has.

    From the static width alone, never from n: another number of rows must not be another kernel.
    """
    columns = min(triton.next_power_of_2(max(width, 1)), widest)
    return max(1, elements // columns), columns, max(1, triton.cdiv(width, columns))


def row_columns(width: int, widest: int = 1024) -> tuple[int, int, int]:
    """Columns of the block in which one program goes through a row, how many blocks that takes, and warps for it."""
    columns = min(triton.next_power_of_2(max(width, 1)), widest)
    return columns, max(1, triton.cdiv(width, columns)), min(4, max(1, columns // 128))


def layout(tensor: torch.Tensor) -> tuple[bool, tuple[int, ...]]:
    """Whether the elements of up to three dimensions lie one after the other, and the sizes and strides of the last two and the first.

    By strides alone: ``is_contiguous`` also holds for a single row of a wider buffer, and one row must not be another kernel.
    """
    sizes, strides = (1,) * (3 - tensor.dim()) + tuple(tensor.shape), (0,) * (3 - tensor.dim()) + tensor.stride()
    dense, expected = True, 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        dense, expected = dense and stride == expected, expected * size
    return dense, (*sizes[1:], *strides)
