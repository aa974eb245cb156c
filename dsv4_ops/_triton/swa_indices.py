"""Sliding-window index rows. A program writes a few rows; what it needs of them is loaded together, then the pages."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launching import compile_once, launch, tile, wait_for_inputs
from .slots import slot_at, token_request

ELEMENTS = 512  # a program's part: rows of 128 columns fill 132 processors from 528 tokens on, and 1024 rows are 256 programs


@compile_once(aligned=("indices_ptr", "lens_ptr"))
def causal_swa_kernel(
    indices_ptr,
    lens_ptr,
    positions_ptr,
    requests_ptr,
    valid_ptr,
    table_ptr,
    tokens,
    num_reqs,
    blocks,
    table_stride,
    POSITION_STRIDE: tl.constexpr,
    REQUEST_STRIDE: tl.constexpr,
    VALID_STRIDE: tl.constexpr,
    TABLE_COLUMN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    wait_for_inputs()
    part, first_token = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64) * ROWS
    token = first_token + tl.arange(0, ROWS)
    live = token < tokens
    position = tl.load(positions_ptr + token * POSITION_STRIDE, mask=live, other=-1)
    request, has_request = token_request(requests_ptr, REQUEST_STRIDE, valid_ptr, VALID_STRIDE, token, live, num_reqs)
    first = tl.maximum(position - (WINDOW - 1), 0)
    length = tl.where(has_request & (position >= 0), position - first + 1, 0).to(tl.int32)
    store_window(
        indices_ptr,
        table_ptr,
        first_token,
        part * COLUMNS,
        tokens,
        request * table_stride,
        blocks,
        first,
        length,
        TABLE_COLUMN_STRIDE,
        BLOCK_SIZE,
        WIDTH,
        ROWS,
        COLUMNS,
    )
    tl.store(lens_ptr + token, length, mask=live & (part == 0))


@compile_once(aligned=("indices_ptr", "lens_ptr"))
def draft_swa_kernel(
    indices_ptr,
    lens_ptr,
    committed_ptr,
    valid_ptr,
    start_ptr,
    table_ptr,
    num_rows,
    blocks,
    max_model_len,
    table_stride,
    COMMITTED_STRIDE: tl.constexpr,
    VALID_STRIDE: tl.constexpr,
    START_STRIDE: tl.constexpr,
    TABLE_COLUMN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    wait_for_inputs()
    part, first_row = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    request = row // QUERIES
    live = row < num_rows
    committed = tl.load(committed_ptr + request * COMMITTED_STRIDE, mask=live, other=0).to(tl.int64)
    valid = tl.load(valid_ptr + request * VALID_STRIDE, mask=live, other=0)
    first = tl.maximum(committed - WINDOW, 0)
    if start_ptr is not None:
        first = tl.maximum(first, tl.load(start_ptr + request * START_STRIDE, mask=live, other=0).to(tl.int64))
    length = tl.where((valid != 0) & (committed > 0), tl.maximum(committed + QUERIES - first, 0), 0).to(tl.int32)
    # A position at or past the limit is a hole: the row keeps its length.
    with_kv = tl.minimum(length, tl.maximum(max_model_len - first, 0)).to(tl.int32)
    store_window(
        indices_ptr,
        table_ptr,
        first_row,
        part * COLUMNS,
        num_rows,
        request * table_stride,
        blocks,
        first,
        with_kv,
        TABLE_COLUMN_STRIDE,
        BLOCK_SIZE,
        WIDTH,
        ROWS,
        COLUMNS,
    )
    tl.store(lens_ptr + row, length, mask=live & (part == 0))


@triton.jit
def store_window(
    indices_ptr,
    table_ptr,
    first_row,
    first_column,
    num_rows,
    table_row,
    blocks,
    first,
    length,
    TABLE_COLUMN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the slots of positions ``first + column`` where ``column < length``, else -1."""
    column = first_column + tl.arange(0, COLUMNS)
    block = first // BLOCK_SIZE
    ahead = (first - block * BLOCK_SIZE).to(tl.uint32)[:, None] + column.to(tl.uint32)[None, :]
    block = tl.minimum(block, blocks).to(tl.uint32)[:, None]
    listed = column[None, :] < length[:, None]
    slot = slot_at(table_ptr, table_row[:, None], TABLE_COLUMN_STRIDE, blocks, block, ahead, listed, BLOCK_SIZE)
    place = tl.arange(0, ROWS * COLUMNS)
    row, column = first_row + place // COLUMNS, first_column + place % COLUMNS
    tl.store(indices_ptr + (row * WIDTH + column), slot, mask=(row < num_rows) & (column < WIDTH))


def causal_swa_indices(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the op's arguments."""
    tokens = a.positions.shape[0]
    indices, lens = a.positions.new_empty((tokens, a.width), dtype=torch.int32), a.positions.new_empty((tokens,), dtype=torch.int32)
    rows, columns, parts = tile(a.width, ELEMENTS)
    launch(
        causal_swa_kernel, triton.cdiv(tokens, rows) * parts, a.positions.device,
        indices, lens, a.positions, a.token_to_req_indices, a.is_valid_token, a.block_table,
        tokens, a.block_table.shape[0], min(a.block_table.shape[1], 2**31 - 1), a.block_table.stride(0),
        POSITION_STRIDE=a.positions.stride(0), REQUEST_STRIDE=a.token_to_req_indices.stride(0), VALID_STRIDE=a.is_valid_token.stride(0),
        TABLE_COLUMN_STRIDE=a.block_table.stride(1), BLOCK_SIZE=a.block_size, WINDOW=a.window, WIDTH=a.width,
        ROWS=rows, COLUMNS=columns, PARTS=parts, num_warps=4,
    )  # fmt: skip
    return indices, lens


def draft_swa_indices(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the op's arguments."""
    num_rows = a.committed_lens.shape[0] * a.block_queries
    indices, lens = a.committed_lens.new_empty((num_rows, a.width)), a.committed_lens.new_empty((num_rows,))
    rows, columns, parts = tile(a.width, ELEMENTS)
    launch(
        draft_swa_kernel, triton.cdiv(num_rows, rows) * parts, a.committed_lens.device,
        indices, lens, a.committed_lens, a.is_valid_req, a.draft_start, a.block_table,
        num_rows, min(a.block_table.shape[1], 2**31 - 1), 2**63 - 1 if a.max_model_len is None else a.max_model_len, a.block_table.stride(0),
        COMMITTED_STRIDE=a.committed_lens.stride(0), VALID_STRIDE=a.is_valid_req.stride(0), START_STRIDE=0 if a.draft_start is None else a.draft_start.stride(0),
        TABLE_COLUMN_STRIDE=a.block_table.stride(1), BLOCK_SIZE=a.block_size, WINDOW=a.window, QUERIES=a.block_queries, WIDTH=a.width,
        ROWS=rows, COLUMNS=columns, PARTS=parts, num_warps=4,
    )  # fmt: skip
    return indices, lens
