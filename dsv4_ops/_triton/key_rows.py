"""Index rows that hold keys alone: one program a token, the window first, then the second segment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .launching import compile_once, launch, row_columns, wait_for_inputs

if TYPE_CHECKING:
    from ..key_rows import Segment


@triton.jit
def _segment(
    row_ptr, indices_ptr, length, slots, first, WIDTH: tl.constexpr, DROP_HOLES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_SPAN: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write the keys of a row from column ``first`` on. Returns how many there are, or one past the last one's column."""
    count = tl.full((), 0, tl.int32)
    for begin in range(0, WIDTH, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        slot = tl.load(indices_ptr + column, mask=column < WIDTH, other=-1)
        key = (slot >= 0) & (slot < slots) & (column < length) & (column < WIDTH)
        slot = tl.where(key, slot, 0).to(tl.int32)
        if BLOCK_SPAN != BLOCK_SIZE:
            slot += slot // BLOCK_SIZE * (BLOCK_SPAN - BLOCK_SIZE)
        if DROP_HOLES:
            one = key.to(tl.int32)
            tl.store(row_ptr + first + count + tl.cumsum(one, 0) - 1, slot, mask=key)
            count += tl.sum(one, 0)
        else:
            tl.store(row_ptr + first + column, tl.where(key, slot, -1), mask=column < WIDTH)
            count = tl.maximum(count, tl.max(tl.where(key, column + 1, 0), 0))
    return count


@triton.jit
def _fill(row_ptr, begin, end, MOST: tl.constexpr, COLUMNS: tl.constexpr):
    """-1 in columns ``[begin, end)``, at most MOST of them."""
    for step in range(0, MOST, COLUMNS):
        column = begin + step + tl.arange(0, COLUMNS)
        tl.store(row_ptr + column, -1, mask=column < end)


@compile_once(aligned=("rows_ptr", "swa_counts_ptr", "extra_counts_ptr"))
def sparse_key_rows_kernel(
    rows_ptr,
    swa_counts_ptr,
    extra_counts_ptr,
    swa_ptr,
    swa_lens_ptr,
    extra_ptr,
    extra_lens_ptr,
    swa_stride,
    swa_lens_stride,
    extra_stride,
    extra_lens_stride,
    swa_slots,
    extra_slots,
    SWA_WIDTH: tl.constexpr,
    EXTRA_WIDTH: tl.constexpr,
    SWA_COLUMNS: tl.constexpr,
    EXTRA_COLUMNS: tl.constexpr,
    DROP_HOLES: tl.constexpr,
    SWA_BLOCK_SIZE: tl.constexpr,
    SWA_BLOCK_SPAN: tl.constexpr,
    EXTRA_BLOCK_SIZE: tl.constexpr,
    EXTRA_BLOCK_SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    row_ptr = rows_ptr + token * (SWA_COLUMNS + EXTRA_COLUMNS)
    length = tl.load(swa_lens_ptr + token * swa_lens_stride)
    swa = _segment(row_ptr, swa_ptr + token * swa_stride, length, swa_slots, 0, SWA_WIDTH, DROP_HOLES, SWA_BLOCK_SIZE, SWA_BLOCK_SPAN, COLUMNS)
    extra = tl.full((), 0, tl.int32)
    first = tl.maximum(swa, SWA_COLUMNS)
    if EXTRA_WIDTH > 0:
        length = tl.load(extra_lens_ptr + token * extra_lens_stride)
        extra = _segment(row_ptr, extra_ptr + token * extra_stride, length, extra_slots, first, EXTRA_WIDTH, DROP_HOLES, EXTRA_BLOCK_SIZE, EXTRA_BLOCK_SPAN, COLUMNS)
    if DROP_HOLES:
        _fill(row_ptr, swa, SWA_COLUMNS, SWA_COLUMNS, COLUMNS)
        _fill(row_ptr, first + extra, SWA_COLUMNS + EXTRA_COLUMNS, EXTRA_COLUMNS, COLUMNS)
    else:
        _fill(row_ptr, SWA_WIDTH, SWA_COLUMNS, SWA_COLUMNS - SWA_WIDTH, COLUMNS)
        _fill(row_ptr, SWA_COLUMNS + EXTRA_WIDTH, SWA_COLUMNS + EXTRA_COLUMNS, EXTRA_COLUMNS - EXTRA_WIDTH, COLUMNS)
    tl.store(swa_counts_ptr + token, swa)
    tl.store(extra_counts_ptr + token, extra)


def sparse_key_rows(segments: list[Segment], swa_columns: int, extra_columns: int, drop_holes: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    swa, extra = segments[0], segments[-1]
    tokens, extra_width = swa.indices.shape[0], extra.indices.shape[1] if len(segments) > 1 else 0
    rows = swa.indices.new_empty((tokens, swa_columns + extra_columns), dtype=torch.int32)
    swa_counts, extra_counts = (rows.new_empty((tokens,)) for _ in range(2))
    columns, _, warps = row_columns(max(swa.indices.shape[1], extra_width))
    launch(
        sparse_key_rows_kernel,
        tokens,
        rows.device,
        rows,
        swa_counts,
        extra_counts,
        swa.indices,
        swa.lens,
        extra.indices,
        extra.lens,
        swa.indices.stride(0),
        swa.lens.stride(0),
        extra.indices.stride(0),
        extra.lens.stride(0),
        swa.slots,
        extra.slots,
        SWA_WIDTH=swa.indices.shape[1],
        EXTRA_WIDTH=extra_width,
        SWA_COLUMNS=swa_columns,
        EXTRA_COLUMNS=extra_columns,
        DROP_HOLES=drop_holes,
        SWA_BLOCK_SIZE=swa.block_size,
        SWA_BLOCK_SPAN=swa.block_span,
        EXTRA_BLOCK_SIZE=extra.block_size,
        EXTRA_BLOCK_SPAN=extra.block_span,
        COLUMNS=columns,
        num_warps=warps,
    )
    return rows, swa_counts, extra_counts
