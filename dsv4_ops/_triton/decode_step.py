"""A step's index tensors in one launch: window rows with all that is per token, and rows of the expanded table, in disjoint programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .context_lens import FEW_REQUESTS, MANY_REQUESTS, NO_LIMIT, first_above, visible
from .launching import compile_once, launch, tile, wait_for_inputs
from .slots import flat
from .swa_indices import store_window

ELEMENTS = 512
TABLE_ROWS, TABLE_COLUMNS = 4, 256


@triton.jit
def _requests(starts_ptr, start_stride, num_reqs, token, live, FEW_REQUESTS: tl.constexpr, MANY_REQUESTS: tl.constexpr):
    """The request of each token (int64, 0 for padding), whether it has one, and the start of the next request."""
    if num_reqs < FEW_REQUESTS:
        end_index = first_above(starts_ptr, start_stride, num_reqs, token, 0, FEW_REQUESTS)
    else:
        end_index = first_above(starts_ptr, start_stride, num_reqs, token, 0, MANY_REQUESTS)
        begin = tl.full((), MANY_REQUESTS, tl.int32)
        while num_reqs - begin >= 0:  # false too for a begin that has wrapped
            end_index = tl.minimum(end_index, first_above(starts_ptr, start_stride, num_reqs, token, begin, MANY_REQUESTS))
            begin += MANY_REQUESTS
    valid = live & (end_index > 0) & (end_index <= num_reqs)
    end = tl.load(starts_ptr + end_index.to(tl.int64) * start_stride, mask=valid, other=0)
    return tl.where(valid, end_index - 1, 0).to(tl.int64), valid, end


@triton.jit
def _expand(
    program, expanded_ptr, starts_ptr, compressed_ptr, tokens, num_reqs, compressed_blocks, start_stride, compressed_stride, table_parts,
    COMPRESSED_COLUMN_STRIDE: tl.constexpr, TABLE_ROWS: tl.constexpr, TABLE_COLUMNS: tl.constexpr, FEW_REQUESTS: tl.constexpr, MANY_REQUESTS: tl.constexpr,
):  # fmt: skip
    first_token, first_column = (program // table_parts).to(tl.int64) * TABLE_ROWS, (program % table_parts).to(tl.int64) * TABLE_COLUMNS
    token, column = first_token + tl.arange(0, TABLE_ROWS), first_column + tl.arange(0, TABLE_COLUMNS)
    request, valid, _ = _requests(starts_ptr, start_stride, num_reqs, token, token < tokens, FEW_REQUESTS, MANY_REQUESTS)
    source = flat((request * compressed_stride)[:, None] + column[None, :] * COMPRESSED_COLUMN_STRIDE)
    block = tl.load(compressed_ptr + source, mask=flat(valid[:, None] & (column < compressed_blocks)[None, :]), other=0)
    place = tl.arange(0, TABLE_ROWS * TABLE_COLUMNS)
    row, column = first_token + place // TABLE_COLUMNS, first_column + place % TABLE_COLUMNS
    tl.store(expanded_ptr + (row * compressed_blocks + column), block, mask=(row < tokens) & (column < compressed_blocks))


@compile_once(aligned=("requests_ptr", "valid_ptr", "slots_ptr", "indices_ptr", "swa_lens_ptr", "context_lens_ptr", "expanded_ptr"))
def prepare_decode_step_kernel(
    requests_ptr, valid_ptr, slots_ptr, indices_ptr, swa_lens_ptr, context_lens_ptr, expanded_ptr, positions_ptr, seq_lens_ptr, starts_ptr, table_ptr, compressed_ptr,
    tokens, num_reqs, blocks, compressed_blocks, max_seq_len, position_stride, seq_stride, start_stride, table_stride, compressed_stride, window_programs, table_parts,
    TABLE_COLUMN_STRIDE: tl.constexpr, COMPRESSED_COLUMN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, RATIOS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TABLE_ROWS: tl.constexpr, TABLE_COLUMNS: tl.constexpr,
    FEW_REQUESTS: tl.constexpr, MANY_REQUESTS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    program = tl.program_id(0)
    if program < window_programs:
        part, first_token = program % PARTS, (program // PARTS).to(tl.int64) * ROWS
        token = first_token + tl.arange(0, ROWS)
        live = token < tokens
        position = tl.load(positions_ptr + token * position_stride, mask=live, other=-1)
        request, valid, end = _requests(starts_ptr, start_stride, num_reqs, token, live, FEW_REQUESTS, MANY_REQUESTS)
        visible_from = tl.maximum(position - (WINDOW - 1), 0)
        length = tl.where(valid & (position >= 0), position - visible_from + 1, 0).to(tl.int32)
        store_window(
            indices_ptr, table_ptr, first_token, part * COLUMNS, tokens, request * table_stride, blocks, visible_from, length,
            TABLE_COLUMN_STRIDE, BLOCK_SIZE, WIDTH, ROWS, COLUMNS,
        )  # fmt: skip
        first_part = live & (part == 0)
        page = position // BLOCK_SIZE
        mapped = first_part & (length > 0) & (page < blocks)
        physical = tl.load(table_ptr + request * table_stride + page * TABLE_COLUMN_STRIDE, mask=mapped, other=0).to(tl.int64)
        slot = physical * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slots_ptr + token, tl.where((physical > 0) & (slot <= 2147483647), slot, -1), mask=first_part)
        tl.store(requests_ptr + token, request.to(tl.int32), mask=first_part)
        tl.store(valid_ptr + token, valid, mask=first_part)
        tl.store(swa_lens_ptr + token, length, mask=first_part)
        if len(RATIOS) > 0:
            seq_len = tl.load(seq_lens_ptr + request * seq_stride, mask=first_part & valid, other=0)
            back = tl.where(valid, end - 1 - token, 0)
            for i in tl.static_range(len(RATIOS)):
                tl.store(context_lens_ptr + i * tokens.to(tl.int64) + token, tl.where(valid, visible(seq_len, back, max_seq_len, RATIOS[i]), 0), mask=first_part)
    else:
        _expand(
            program - window_programs, expanded_ptr, starts_ptr, compressed_ptr, tokens, num_reqs, compressed_blocks, start_stride, compressed_stride, table_parts,
            COMPRESSED_COLUMN_STRIDE, TABLE_ROWS, TABLE_COLUMNS, FEW_REQUESTS, MANY_REQUESTS,
        )  # fmt: skip


def prepare_decode_step(
    outputs: tuple[torch.Tensor, ...],
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    compressed_block_table: torch.Tensor | None,
    block_size: int,
    window: int,
    width: int,
    compress_ratios: Sequence[int],
    max_seq_len: int | None,
) -> None:
    """Fill ``outputs``, the op's in order. Without a compressed table, any table stands for it: it has no columns."""
    tokens, pages = positions.shape[0], outputs[-1].shape[1]
    compressed = block_table if compressed_block_table is None else compressed_block_table
    rows, columns, parts = tile(width, ELEMENTS)
    window_programs, table_parts = triton.cdiv(tokens, rows) * parts, triton.cdiv(pages, TABLE_COLUMNS)
    launch(
        prepare_decode_step_kernel, window_programs + triton.cdiv(tokens, TABLE_ROWS) * table_parts, positions.device,
        *outputs, positions, seq_lens, query_start_loc, block_table, compressed,
        tokens, seq_lens.shape[0], min(block_table.shape[1], 2**31 - 1), pages, NO_LIMIT if max_seq_len is None else max_seq_len,
        positions.stride(0), seq_lens.stride(0), query_start_loc.stride(0), block_table.stride(0), compressed.stride(0), window_programs, table_parts,
        TABLE_COLUMN_STRIDE=block_table.stride(1), COMPRESSED_COLUMN_STRIDE=compressed.stride(1), BLOCK_SIZE=block_size, WINDOW=window, WIDTH=width,
        RATIOS=tuple(compress_ratios), ROWS=rows, COLUMNS=columns, PARTS=parts, TABLE_ROWS=TABLE_ROWS, TABLE_COLUMNS=TABLE_COLUMNS,
        FEW_REQUESTS=FEW_REQUESTS, MANY_REQUESTS=MANY_REQUESTS, num_warps=4,
    )  # fmt: skip
