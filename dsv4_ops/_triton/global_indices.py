"""From record numbers to slots. A program writes a row: its request and its records are loaded together, then the pages."""

from __future__ import annotations

import torch
import triton.language as tl

from .launching import compile_once, launch, row_columns, wait_for_inputs
from .slots import slot_at, token_request


# No pointer is declared aligned: then each warp loads, looks up and stores 32 neighbours at a time, whatever the stride of the rows.
@compile_once(aligned=())
def global_topk_kernel(
    slots_ptr,
    lens_ptr,
    topk_ptr,
    requests_ptr,
    valid_ptr,
    table_ptr,
    num_reqs,
    blocks,
    topk_stride,
    table_stride,
    REQUEST_STRIDE: tl.constexpr,
    VALID_STRIDE: tl.constexpr,
    TOPK_COLUMN_STRIDE: tl.constexpr,
    TABLE_COLUMN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    request, has_request = token_request(requests_ptr, REQUEST_STRIDE, valid_ptr, VALID_STRIDE, token, True, num_reqs)
    length = 0
    for start in range(0, TOPK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        # The row of a padding token is loaded too, but leads to no load: waiting for its mask would be a step more.
        record = tl.load(topk_ptr + token * topk_stride + column.to(tl.int64) * TOPK_COLUMN_STRIDE, mask=column < TOPK, other=-1)
        listed = has_request & (record >= 0)
        slot = slot_at(table_ptr, request * table_stride, TABLE_COLUMN_STRIDE, blocks, 0, tl.maximum(record, 0).to(tl.uint32), listed, BLOCK_SIZE)
        length = tl.maximum(length, tl.max(tl.where(listed, column + 1, 0), 0))
        tl.store(slots_ptr + token * TOPK + column, slot, mask=column < TOPK)
    tl.store(lens_ptr + token, length)


def global_topk_indices(
    topk_indices: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor, *, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, topk = topk_indices.shape
    slots, lens = topk_indices.new_empty((tokens, topk)), topk_indices.new_empty((tokens,))
    columns, _, warps = row_columns(topk)
    launch(
        global_topk_kernel,
        tokens,
        topk_indices.device,
        slots,
        lens,
        topk_indices,
        token_to_req_indices,
        is_valid_token,
        block_table,
        block_table.shape[0],
        min(block_table.shape[1], 2**31 - 1),
        topk_indices.stride(0),
        block_table.stride(0),
        REQUEST_STRIDE=token_to_req_indices.stride(0),
        VALID_STRIDE=is_valid_token.stride(0),
        TOPK_COLUMN_STRIDE=topk_indices.stride(1),
        TABLE_COLUMN_STRIDE=block_table.stride(1),
        BLOCK_SIZE=block_size,
        TOPK=topk,
        COLUMNS=columns,
        num_warps=warps,
    )
    return slots, lens
