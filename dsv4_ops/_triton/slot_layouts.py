"""Ragged rows and slots of packed pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elements import offset_of
from .launching import compile_once, launch, layout, tile, wait_for_inputs
from .slots import flat, largest_slot, spread

ELEMENTS = 512
CSR_ELEMENTS, LENS = 1024, 1024


@compile_once(aligned=())
def packed_page_slots_kernel(
    out_ptr,
    slots_ptr,
    count,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    DENSE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SPAN: tl.constexpr,
    LIMIT: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    wait_for_inputs()
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    slot = tl.load(slots_ptr + offset_of(element, size1, size2, stride0, stride1, stride2, DENSE), mask=element < count, other=-1)
    LARGEST: tl.constexpr = largest_slot(BLOCK_SIZE, BLOCK_SPAN, LIMIT)
    fits = (slot >= 0) & (slot <= LARGEST)
    slot = tl.where(fits, slot, 0)
    page = (slot.to(tl.uint32) // BLOCK_SIZE).to(tl.int64) if LIMIT == 2147483647 else slot // BLOCK_SIZE
    moved = slot.to(tl.int64) + page * (BLOCK_SPAN - BLOCK_SIZE)
    tl.store(out_ptr + element, tl.where(fits, moved, -1).to(out_ptr.dtype.element_ty), mask=element < count)


@compile_once(aligned=())
def swa_indices_to_csr_kernel(
    indptr_ptr,
    flat_ptr,
    indices_ptr,
    lens_ptr,
    rows,
    row_stride,
    LENS_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    DROP_HOLES: tl.constexpr,
    LENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Entries that belong to no row go behind all that do, in order, so that every place is written exactly once.

    With ``DROP_HOLES`` indptr is already there. Without, every program adds up the lengths before its rows and all of them.
    """
    wait_for_inputs()
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    live = row < rows
    length = tl.minimum(tl.maximum(tl.load(lens_ptr + row * LENS_STRIDE, mask=live, other=0), 0), WIDTH)
    slot = _slots(indices_ptr, first_row, 0, rows, row_stride, COLUMN_STRIDE, WIDTH, ROWS, COLUMNS)
    if DROP_HOLES:
        start, every = tl.load(indptr_ptr + row, mask=live, other=0), tl.load(indptr_ptr + rows)
    else:
        before, every = _count_lens(lens_ptr, first_row, rows, LENS_STRIDE, WIDTH, LENS)
        end = before + tl.cumsum(length, 0)
        start = end - length
        tl.store(indptr_ptr + row + 1, end, mask=live)
        tl.store(indptr_ptr + row, 0, mask=row == 0)
    # The entries of all rows before this one that were left out come first behind the kept ones.
    rest = (every + row * WIDTH - start).to(tl.int32)
    start, rest = _place(flat_ptr, slot, first_row, 0, rows, start, rest, length, WIDTH, DROP_HOLES, ROWS, COLUMNS)
    for begin in range(COLUMNS, WIDTH, COLUMNS):
        slot = _slots(indices_ptr, first_row, begin, rows, row_stride, COLUMN_STRIDE, WIDTH, ROWS, COLUMNS)
        start, rest = _place(flat_ptr, slot, first_row, begin, rows, start, rest, length, WIDTH, DROP_HOLES, ROWS, COLUMNS)


@triton.jit
def _slots(
    indices_ptr, first_row, begin, rows, row_stride, COLUMN_STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The entries of ``COLUMNS`` columns of the rows, flat."""
    cell = tl.arange(0, ROWS * COLUMNS)
    row, column = first_row + cell // COLUMNS, begin + cell % COLUMNS
    return tl.load(indices_ptr + (row * row_stride + column.to(tl.int64) * COLUMN_STRIDE), mask=(row < rows) & (column < WIDTH), other=-1)


@triton.jit
def _place(
    flat_ptr, slot, first_row, begin, rows, start, rest, length, WIDTH: tl.constexpr, DROP_HOLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write entries from column ``begin`` on: kept ones from ``start``, -1 for the others from ``rest``. Returns where both go on."""
    cell = tl.arange(0, ROWS * COLUMNS)
    column = begin + cell % COLUMNS
    mask = (first_row + cell // COLUMNS < rows) & (column < WIDTH)
    keep = mask & (column < spread(length, COLUMNS))
    if DROP_HOLES:
        keep = keep & (slot >= 0)
        ones = tl.reshape(keep.to(tl.int32), [ROWS, COLUMNS])
        seen = tl.cumsum(ones, 1)
        kept_before = flat(seen - ones)
        place = tl.where(keep, spread(start, COLUMNS) + kept_before, spread(rest, COLUMNS) + cell % COLUMNS - kept_before)
        advance = tl.max(seen, 1)
        start += advance
        rest += tl.minimum(COLUMNS, WIDTH - begin) - advance
    else:
        place = column + tl.where(keep, spread(start, COLUMNS), spread(rest - length, COLUMNS))
    tl.store(flat_ptr + place, tl.where(keep, slot, -1), mask=mask)
    return start, rest


@triton.jit
def _count_lens(lens_ptr, first_row, rows, LENS_STRIDE: tl.constexpr, WIDTH: tl.constexpr, LENS: tl.constexpr):
    """Sums of the lengths before ``first_row`` and of all: below 2**31 each, so that one reduction of int64 does both."""
    both = tl.zeros((LENS,), tl.int64)
    begin = tl.full((), 0, tl.int64)
    while begin < rows:
        row = begin + tl.arange(0, LENS)
        length = tl.load(lens_ptr + row * LENS_STRIDE, mask=row < rows, other=0)
        both += tl.minimum(tl.maximum(length, 0), WIDTH) * tl.where(row < first_row, 0x100000001, 0x100000000)
        begin += LENS
    both = tl.sum(both, 0)
    return (both & 0xFFFFFFFF).to(tl.int32), (both >> 32).to(tl.int32)


@compile_once(aligned=("indptr_ptr",))
def csr_counts_kernel(
    indptr_ptr, indices_ptr, lens_ptr, rows, row_stride, LENS_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """``indptr[row + 1]``: entries of the row that are no holes."""
    wait_for_inputs()
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    length = tl.load(lens_ptr + row * LENS_STRIDE, mask=row < rows, other=0)
    kept = tl.zeros((ROWS,), tl.int32)
    for begin in range(0, WIDTH, COLUMNS):
        slot = _slots(indices_ptr, first_row, begin, rows, row_stride, COLUMN_STRIDE, WIDTH, ROWS, COLUMNS)
        column = begin + tl.arange(0, ROWS * COLUMNS) % COLUMNS
        listed = (slot >= 0) & (column < spread(length, COLUMNS))
        kept += tl.sum(tl.reshape(listed.to(tl.int32), [ROWS, COLUMNS]), 1)
    tl.store(indptr_ptr + row + 1, kept, mask=row < rows)


@compile_once(aligned=("indptr_ptr",))
def csr_ends_kernel(indptr_ptr, rows, LENS: tl.constexpr):
    """One program turns the counts behind ``indptr[0]`` into their running sum."""
    wait_for_inputs()
    tl.store(indptr_ptr, 0)
    before = tl.full((), 0, tl.int32)
    begin = tl.full((), 0, tl.int64)
    while begin < rows:
        row = begin + tl.arange(0, LENS)
        count = tl.load(indptr_ptr + row + 1, mask=row < rows, other=0)
        tl.store(indptr_ptr + row + 1, before + tl.cumsum(count, 0), mask=row < rows)
        before += tl.sum(count, 0)
        begin += LENS


def packed_page_slots(slots: torch.Tensor, block_size: int, block_span: int) -> torch.Tensor:
    out = slots.new_empty(slots.shape)
    dense, sizes = layout(slots)
    launch(
        packed_page_slots_kernel,
        triton.cdiv(slots.numel(), ELEMENTS),
        slots.device,
        out,
        slots,
        slots.numel(),
        *sizes,
        DENSE=dense,
        BLOCK_SIZE=block_size,
        BLOCK_SPAN=block_span,
        LIMIT=torch.iinfo(slots.dtype).max,
        ELEMENTS=ELEMENTS,
        num_warps=4,
    )
    return out


def swa_indices_to_csr(indices: torch.Tensor, lens: torch.Tensor, drop_holes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch. Where holes are dropped, two more before it: a program would have to read all rows to know where its own begin."""
    num_rows, width = indices.shape
    indptr, entries = indices.new_empty((num_rows + 1,)), indices.new_empty((num_rows * width,))
    rows, columns, _ = tile(width, CSR_ELEMENTS)
    rows = min(rows, 32)  # more would not fit into the registers of a program
    programs = triton.cdiv(num_rows, rows)
    constants = {"LENS_STRIDE": lens.stride(0), "COLUMN_STRIDE": indices.stride(1), "WIDTH": width, "ROWS": rows, "COLUMNS": columns, "num_warps": 4}
    if drop_holes:
        launch(csr_counts_kernel, programs, indices.device, indptr, indices, lens, num_rows, indices.stride(0), **constants)
        launch(csr_ends_kernel, 1, indices.device, indptr, num_rows, LENS=LENS, num_warps=4)
    launch(
        swa_indices_to_csr_kernel, max(1, programs), indices.device,  # without rows there still is indptr[0]
        indptr, entries, indices, lens, num_rows, indices.stride(0), DROP_HOLES=drop_holes, LENS=LENS, **constants,
    )  # fmt: skip
    return indptr, entries
