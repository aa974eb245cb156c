"""The rule from positions to KV slots, as the kernels share it (``_slots.py`` is its definition)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_at(table_ptr, row, COLUMN_STRIDE: tl.constexpr, blocks, first_block, ahead, listed, BLOCK_SIZE: tl.constexpr):
    """int32 slots of the positions that stand ``ahead`` (uint32) of the start of page ``first_block``; -1 where none.

    ``row`` is the offset of a table row in elements. ``first_block`` may be anything up to ``blocks``, which is at most
    ``2**31 - 1``, so that the page number is exact in 32 bits: 64-bit arithmetic a column would double the work.
    The arguments are broadcast; the result is flat. (Triton loads a two-dimensional block of scattered addresses column by
    column and turns it through shared memory to store it; a flat one stays where it is.)
    """
    page = first_block + ahead // BLOCK_SIZE
    inside = flat(listed & (page < blocks))
    physical = tl.load(table_ptr + flat(row + page.to(tl.int64) * COLUMN_STRIDE), mask=inside, other=0)
    slot = physical.to(tl.int64) * BLOCK_SIZE + flat(ahead % BLOCK_SIZE).to(tl.int64)
    return tl.where((physical > 0) & (slot <= 2147483647), slot, -1).to(tl.int32)


@triton.jit
def flat(block):
    return tl.reshape(block, [block.numel])


@triton.constexpr_function
def largest_slot(block_size, block_span, limit):
    """The largest slot whose place among packed pages is at most ``limit``."""
    page, offset = divmod(limit, block_span)
    return page * block_size + min(offset, block_size - 1)


@triton.jit
def packed(slot, BLOCK_SIZE: tl.constexpr, BLOCK_SPAN: tl.constexpr):
    """int32 slots of packed pages; -1 where negative or where int32 cannot hold the result. No span: as they are, or -1."""
    if BLOCK_SPAN is None:
        moved = tl.maximum(slot, -1)
    else:
        LARGEST: tl.constexpr = largest_slot(BLOCK_SIZE, BLOCK_SPAN, 2147483647)
        start = tl.maximum(slot, 0).to(tl.uint32)
        place = (start // BLOCK_SIZE).to(tl.int64) * BLOCK_SPAN + (start % BLOCK_SIZE).to(tl.int64)
        moved = tl.where((slot >= 0) & (slot <= LARGEST), place, -1).to(tl.int32)
    return moved


@triton.jit
def token_request(requests_ptr, REQUEST_STRIDE: tl.constexpr, valid_ptr, VALID_STRIDE: tl.constexpr, token, live, num_reqs):
    """Request ids of tokens (int64, 0 where there is none to use), and whether a token has one."""
    request = tl.load(requests_ptr + token * REQUEST_STRIDE, mask=live, other=-1)
    valid = tl.load(valid_ptr + token * VALID_STRIDE, mask=live, other=0)
    has_request = (valid != 0) & (request >= 0) & (request < num_reqs)
    return tl.where(has_request, request, 0).to(tl.int64), has_request


@triton.jit
def spread(row_value, COLUMNS: tl.constexpr):
    """A value of each row, at each column of a flat block of ``COLUMNS`` columns."""
    return flat(tl.broadcast_to(row_value[:, None], [row_value.shape[0], COLUMNS]))
