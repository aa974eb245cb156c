"""Context lengths and expanded block tables."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elements import offset_of
from .launching import compile_once, launch, layout, tile, wait_for_inputs
from .slots import flat, token_request

ELEMENTS = 512
TOKENS, FEW_REQUESTS, MANY_REQUESTS = 4, 128, 1024
TABLE_ROWS, TABLE_COLUMNS = 4, 256
NO_LIMIT = 2**63 - 1


@triton.jit
def visible(seq_len, back, max_seq_len, COMPRESS_RATIO: tl.constexpr):
    """Length of the token that stands ``back`` tokens before the last one of its request."""
    # The first clamp keeps the most negative int64 from wrapping when `back` is subtracted.
    tokens = tl.minimum(tl.maximum(tl.maximum(seq_len.to(tl.int64), 0) - back, 0), max_seq_len)
    return tl.minimum(tokens // COMPRESS_RATIO, 2147483647).to(tl.int32)


@compile_once(aligned=("lens_ptr",))
def mtp_context_lens_kernel(
    lens_ptr,
    seq_lens_ptr,
    num_reqs,
    max_seq_len,
    SEQ_STRIDE: tl.constexpr,
    NEXT_N: tl.constexpr,
    COMPRESS_RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    wait_for_inputs()
    place = tl.arange(0, ROWS * COLUMNS)
    request = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS + place // COLUMNS
    query = (tl.program_id(0) % PARTS) * COLUMNS + place % COLUMNS
    mask = (request < num_reqs) & (query < NEXT_N)
    seq_len = tl.load(seq_lens_ptr + request * SEQ_STRIDE, mask=mask, other=0)
    tl.store(lens_ptr + request * NEXT_N + query, visible(seq_len, NEXT_N - 1 - query, max_seq_len, COMPRESS_RATIO), mask=mask)


@compile_once(aligned=("lens_ptr", "requests_ptr", "valid_ptr"))
def ragged_context_lens_kernel(
    lens_ptr,
    requests_ptr,
    valid_ptr,
    seq_lens_ptr,
    starts_ptr,
    num_tokens,
    num_reqs,
    max_seq_len,
    SEQ_STRIDE: tl.constexpr,
    START_STRIDE: tl.constexpr,
    COMPRESS_RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
    FEW_REQUESTS: tl.constexpr,
    MANY_REQUESTS: tl.constexpr,
):
    """The request of a token ends at the first start above the token, wherever starts before it stand.

    So the running maximum is never computed: up to the first start above a token all are at or below it, and that one is
    the maximum of itself and those before. Every program compares its tokens with all starts.
    """
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    if num_reqs < FEW_REQUESTS:
        end_index = first_above(starts_ptr, START_STRIDE, num_reqs, token, 0, FEW_REQUESTS)
    else:
        end_index = first_above(starts_ptr, START_STRIDE, num_reqs, token, 0, MANY_REQUESTS)
        begin = tl.full((), MANY_REQUESTS, tl.int32)
        while num_reqs - begin >= 0:  # false too for a begin that has wrapped
            end_index = tl.minimum(end_index, first_above(starts_ptr, START_STRIDE, num_reqs, token, begin, MANY_REQUESTS))
            begin += MANY_REQUESTS
    live = token < num_tokens
    valid = live & (end_index > 0) & (end_index <= num_reqs)
    request = tl.where(valid, end_index - 1, 0)
    end = tl.load(starts_ptr + end_index.to(tl.int64) * START_STRIDE, mask=valid, other=0)
    seq_len = tl.load(seq_lens_ptr + request.to(tl.int64) * SEQ_STRIDE, mask=valid, other=0)
    length = visible(seq_len, tl.where(valid, end - 1 - token, 0), max_seq_len, COMPRESS_RATIO)
    tl.store(lens_ptr + token, length, mask=live)
    tl.store(requests_ptr + token, request, mask=live)
    tl.store(valid_ptr + token, valid, mask=live)


@triton.jit
def first_above(starts_ptr, start_stride, num_reqs, token, begin, COUNT: tl.constexpr):
    """Index of the first of ``COUNT`` starts from ``begin`` on that is above each token; the largest int32 if none is."""
    index = begin + tl.arange(0, COUNT)
    start = tl.load(starts_ptr + index.to(tl.int64) * start_stride, mask=index <= num_reqs, other=-2147483648)
    # Starts are int32: a token past them all may as well be the last number.
    near = tl.minimum(token, 2147483647).to(tl.int32)
    return tl.min(tl.where(start[None, :] > near[:, None], index[None, :], 2147483647), 1)


@compile_once(aligned=())
def expand_block_table_kernel(
    expanded_ptr,
    table_ptr,
    requests_ptr,
    valid_ptr,
    tokens,
    num_reqs,
    blocks,
    table_stride,
    REQUEST_STRIDE: tl.constexpr,
    VALID_STRIDE: tl.constexpr,
    TABLE_COLUMN_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    wait_for_inputs()
    first_token = tl.program_id(0).to(tl.int64) * ROWS
    token = first_token + tl.arange(0, ROWS)
    request, has_request = token_request(requests_ptr, REQUEST_STRIDE, valid_ptr, VALID_STRIDE, token, token < tokens, num_reqs)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    source = flat((request * table_stride)[:, None] + column[None, :] * TABLE_COLUMN_STRIDE)
    block = tl.load(table_ptr + source, mask=flat(has_request[:, None] & (column < blocks)[None, :]), other=0)
    place = tl.arange(0, ROWS * COLUMNS)
    token, column = first_token + place // COLUMNS, tl.program_id(1).to(tl.int64) * COLUMNS + place % COLUMNS
    tl.store(expanded_ptr + (token * blocks + column), block, mask=(token < tokens) & (column < blocks))


@compile_once(aligned=())
def local_context_lens_kernel(
    shares_ptr,
    lens_ptr,
    count,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    DENSE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    wait_for_inputs()
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    length = tl.load(lens_ptr + offset_of(element, size1, size2, stride0, stride1, stride2, DENSE), mask=element < count, other=0)
    length = tl.maximum(length.to(tl.int64), 0)
    whole = length // (SIZE * INTERLEAVE)
    own = tl.minimum(tl.maximum(length - whole * (SIZE * INTERLEAVE) - RANK * INTERLEAVE, 0), INTERLEAVE)
    tl.store(shares_ptr + element, tl.minimum(whole * INTERLEAVE + own, 2147483647).to(tl.int32), mask=element < count)


def mtp_context_lens(seq_lens: torch.Tensor, next_n: int, compress_ratio: int, max_seq_len: int | None) -> torch.Tensor:
    lens = seq_lens.new_empty((seq_lens.shape[0], next_n), dtype=torch.int32)
    rows, columns, parts = tile(next_n, ELEMENTS)
    launch(
        mtp_context_lens_kernel,
        triton.cdiv(seq_lens.shape[0], rows) * parts,
        seq_lens.device,
        lens,
        seq_lens,
        seq_lens.shape[0],
        NO_LIMIT if max_seq_len is None else max_seq_len,
        SEQ_STRIDE=seq_lens.stride(0),
        NEXT_N=next_n,
        COMPRESS_RATIO=compress_ratio,
        ROWS=rows,
        COLUMNS=columns,
        PARTS=parts,
        num_warps=4,
    )
    return lens


def ragged_context_lens(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int, compress_ratio: int, max_seq_len: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lens, requests = (seq_lens.new_empty((num_tokens,), dtype=torch.int32) for _ in range(2))
    valid = seq_lens.new_empty((num_tokens,), dtype=torch.bool)
    launch(
        ragged_context_lens_kernel,
        triton.cdiv(num_tokens, TOKENS),
        seq_lens.device,
        lens,
        requests,
        valid,
        seq_lens,
        query_start_loc,
        num_tokens,
        seq_lens.shape[0],
        NO_LIMIT if max_seq_len is None else max_seq_len,
        SEQ_STRIDE=seq_lens.stride(0),
        START_STRIDE=query_start_loc.stride(0),
        COMPRESS_RATIO=compress_ratio,
        TOKENS=TOKENS,
        FEW_REQUESTS=FEW_REQUESTS,
        MANY_REQUESTS=MANY_REQUESTS,
        num_warps=1,  # its tokens meet all starts inside one warp: no barrier
    )
    return lens, requests, valid


def expand_block_table(block_table: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor) -> torch.Tensor:
    tokens, blocks = token_to_req_indices.shape[0], block_table.shape[1]
    expanded = block_table.new_empty((tokens, blocks))
    columns = TABLE_COLUMNS if blocks <= 65535 * TABLE_COLUMNS else 32768  # a grid has at most 65535 programs in its second direction
    launch(
        expand_block_table_kernel,
        (triton.cdiv(tokens, TABLE_ROWS), triton.cdiv(blocks, columns)),
        block_table.device,
        expanded,
        block_table,
        token_to_req_indices,
        is_valid_token,
        tokens,
        block_table.shape[0],
        blocks,
        block_table.stride(0),
        REQUEST_STRIDE=token_to_req_indices.stride(0),
        VALID_STRIDE=is_valid_token.stride(0),
        TABLE_COLUMN_STRIDE=block_table.stride(1),
        ROWS=TABLE_ROWS,
        COLUMNS=columns,
        num_warps=4,
    )
    return expanded


def local_context_lens(lens: torch.Tensor, cp_rank: int, cp_size: int, cp_interleave: int) -> torch.Tensor:
    shares = lens.new_empty(lens.shape, dtype=torch.int32)
    dense, sizes = layout(lens)
    launch(
        local_context_lens_kernel,
        triton.cdiv(lens.numel(), ELEMENTS),
        lens.device,
        shares,
        lens,
        lens.numel(),
        *sizes,
        DENSE=dense,
        RANK=cp_rank,
        SIZE=cp_size,
        INTERLEAVE=cp_interleave,
        ELEMENTS=ELEMENTS,
        num_warps=4,
    )
    return shares
