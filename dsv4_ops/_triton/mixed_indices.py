"""Window and compressed entries in one row. A program writes a row, of a decode or of a prefill token.

Compressed entries are read at their own columns and stored where the window ends, so that no load waits for the window's
length. The window's part covers every other column: what stands behind the window moves past the compressed entries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launching import compile_once, launch, row_columns, wait_for_inputs
from .slots import packed, slot_at, token_request


# No pointer is declared aligned: then each warp loads, looks up and stores 32 neighbours at a time, wherever a row starts.
@compile_once(aligned=())
def build_mixed_kernel(
    indices_ptr,
    lens_ptr,
    swa_ptr,
    swa_lens_ptr,
    topk_ptr,
    topk_lens_ptr,
    prefill_ptr,
    positions_ptr,
    requests_ptr,
    valid_ptr,
    table_ptr,
    compressed_table_ptr,
    decodes,
    num_reqs,
    blocks,
    compressed_blocks,
    swa_stride,
    topk_stride,
    prefill_stride,
    table_stride,
    compressed_table_stride,
    SWA_LENS_STRIDE: tl.constexpr,
    TOPK_LENS_STRIDE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    REQUEST_STRIDE: tl.constexpr,
    VALID_STRIDE: tl.constexpr,
    COLUMN_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SPAN: tl.constexpr,
    COMPRESSED_BLOCK_SIZE: tl.constexpr,
    COMPRESSED_BLOCK_SPAN: tl.constexpr,
    DECODES_ARE_GLOBAL: tl.constexpr,
    COMPRESS_RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    SWA_WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW_COLUMNS: tl.constexpr,
    TOPK_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    request, listed = token_request(requests_ptr, REQUEST_STRIDE, valid_ptr, VALID_STRIDE, token, True, num_reqs)
    compressed_row, row_ptr = request * compressed_table_stride, indices_ptr + token * WIDTH
    count = 0
    if token < decodes:
        visible = tl.minimum(tl.maximum(tl.load(swa_lens_ptr + token * SWA_LENS_STRIDE), 0), SWA_WIDTH)
        topk_len = TOPK
        if topk_lens_ptr is not None:
            topk_len = tl.minimum(tl.maximum(tl.load(topk_lens_ptr + token * TOPK_LENS_STRIDE), 0), TOPK)
        for part in range(PARTS):  # one, unless a row is wider than a block
            window_column, column = part * WINDOW_COLUMNS + tl.arange(0, WINDOW_COLUMNS), part * TOPK_COLUMNS + tl.arange(0, TOPK_COLUMNS)
            window_slot = tl.load(swa_ptr + token * swa_stride + window_column.to(tl.int64) * COLUMN_STRIDES[0], mask=window_column < SWA_WIDTH, other=-1)
            # The row of a padding token is loaded too, but leads to no load: waiting for its mask would be a step more.
            record = tl.load(topk_ptr + token * topk_stride + column.to(tl.int64) * COLUMN_STRIDES[1], mask=column < TOPK, other=-1)
            shown = listed & (record >= 0) & (column < topk_len)
            slot = record
            if not DECODES_ARE_GLOBAL:
                ahead = tl.maximum(record, 0).to(tl.uint32)
                slot = slot_at(compressed_table_ptr, compressed_row, COLUMN_STRIDES[4], compressed_blocks, 0, ahead, shown, COMPRESSED_BLOCK_SIZE)
            last = _store(
                row_ptr, window_column, window_slot, listed, visible, column, slot, shown, BLOCK_SIZE, BLOCK_SPAN, COMPRESSED_BLOCK_SIZE, COMPRESSED_BLOCK_SPAN,
                WINDOW, TOPK, WIDTH, topk_lens_ptr is None,
            )  # fmt: skip
            count = tl.maximum(count, last)
        if topk_lens_ptr is not None:
            count = topk_len
    else:
        position = tl.load(positions_ptr + token * POSITION_STRIDE)
        listed = listed & (position >= 0)
        position = tl.minimum(tl.maximum(position, -1), 9223372036854775806)
        visible = tl.minimum(position + 1, WINDOW).to(tl.int32)
        seen = tl.minimum((position + 1) // COMPRESS_RATIO, TOPK).to(tl.int32)
        first = tl.maximum(position - (WINDOW - 1), 0)
        block = first // BLOCK_SIZE
        offset = (first - block * BLOCK_SIZE).to(tl.uint32)
        block = tl.minimum(block, blocks).to(tl.uint32)
        for part in range(PARTS):
            window_column, column = part * WINDOW_COLUMNS + tl.arange(0, WINDOW_COLUMNS), part * TOPK_COLUMNS + tl.arange(0, TOPK_COLUMNS)
            if prefill_ptr is None:
                record = tl.where(column < seen, column, -1)
            else:
                record = tl.load(prefill_ptr + (token - decodes) * prefill_stride + column.to(tl.int64) * COLUMN_STRIDES[2], mask=column < TOPK, other=-1)
            shown = listed & (record >= 0)
            window_shown = listed & (window_column < visible)
            ahead = offset + window_column.to(tl.uint32)
            window_slot = slot_at(table_ptr, request * table_stride, COLUMN_STRIDES[3], blocks, block, ahead, window_shown, BLOCK_SIZE)
            ahead = tl.maximum(record, 0).to(tl.uint32)
            slot = slot_at(compressed_table_ptr, compressed_row, COLUMN_STRIDES[4], compressed_blocks, 0, ahead, shown, COMPRESSED_BLOCK_SIZE)
            last = _store(
                row_ptr, window_column, window_slot, listed, visible, column, slot, shown, BLOCK_SIZE, BLOCK_SPAN, COMPRESSED_BLOCK_SIZE, COMPRESSED_BLOCK_SPAN,
                WINDOW, TOPK, WIDTH, True,
            )  # fmt: skip
            count = tl.maximum(count, last)
    tl.store(lens_ptr + token, tl.where(listed, tl.maximum(visible, WINDOW) + count, 0))


@triton.jit
def _store(
    row_ptr, window_column, window_slot, listed, visible, column, slot, shown, BLOCK_SIZE: tl.constexpr, BLOCK_SPAN: tl.constexpr,
    COMPRESSED_BLOCK_SIZE: tl.constexpr, COMPRESSED_BLOCK_SPAN: tl.constexpr, WINDOW: tl.constexpr, TOPK: tl.constexpr, WIDTH: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Write a part of a row, and tell one past the last of its compressed columns that holds an entry."""
    last = 0
    if COUNTED:
        last = tl.max(tl.where(shown, column + 1, 0), 0)
    start = tl.maximum(visible, WINDOW)
    window_slot = tl.where(listed & (window_column < visible), packed(window_slot, BLOCK_SIZE, BLOCK_SPAN), -1)
    target = window_column + tl.where(window_column < start, 0, TOPK)
    tl.store(row_ptr + target, window_slot, mask=window_column < WIDTH - TOPK)
    slot = tl.where(shown, packed(slot, COMPRESSED_BLOCK_SIZE, COMPRESSED_BLOCK_SPAN), -1)
    tl.store(row_ptr + start + column, slot, mask=column < TOPK)
    return last


def build_mixed_sparse_indices(a: Any, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the op's arguments ``a``, in rows of ``width`` columns."""
    swa, topk_indices, prefill, topk_lens = a.decode_swa_indices, a.decode_topk_indices, a.prefill_topk_indices, a.decode_topk_lens
    (decodes, swa_width), topk, tokens = swa.shape, topk_indices.shape[1], a.positions.shape[0]
    indices, lens = swa.new_empty((tokens, width)), swa.new_empty((tokens,))
    window_columns, window_parts, _ = row_columns(width - topk)
    topk_columns, topk_parts, warps = row_columns(topk)
    launch(
        build_mixed_kernel, tokens, a.positions.device,
        indices, lens, swa, a.decode_swa_lens, topk_indices, topk_lens, prefill, a.positions, a.token_to_req_indices, a.is_valid_token, a.block_table, a.compressed_block_table,
        decodes, a.block_table.shape[0], min(a.block_table.shape[1], 2**31 - 1), min(a.compressed_block_table.shape[1], 2**31 - 1),
        swa.stride(0), topk_indices.stride(0), 0 if prefill is None else prefill.stride(0), a.block_table.stride(0), a.compressed_block_table.stride(0),
        SWA_LENS_STRIDE=a.decode_swa_lens.stride(0), TOPK_LENS_STRIDE=0 if topk_lens is None else topk_lens.stride(0),
        POSITION_STRIDE=a.positions.stride(0), REQUEST_STRIDE=a.token_to_req_indices.stride(0), VALID_STRIDE=a.is_valid_token.stride(0),
        COLUMN_STRIDES=(
            swa.stride(1), topk_indices.stride(1), 1 if prefill is None else prefill.stride(1), a.block_table.stride(1), a.compressed_block_table.stride(1),
        ),
        BLOCK_SIZE=a.block_size, BLOCK_SPAN=a.block_span, COMPRESSED_BLOCK_SIZE=a.compressed_block_size, COMPRESSED_BLOCK_SPAN=a.compressed_block_span,
        DECODES_ARE_GLOBAL=a.decode_indices_are_global, COMPRESS_RATIO=a.compress_ratio, WINDOW=a.window, SWA_WIDTH=swa_width, TOPK=topk, WIDTH=width,
        WINDOW_COLUMNS=window_columns, TOPK_COLUMNS=topk_columns, PARTS=max(window_parts, topk_parts), num_warps=warps,
    )  # fmt: skip
    return indices, lens
