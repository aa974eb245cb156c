"""Draft inputs in one launch: query rows, context rows and window rows, in disjoint ranges of programs.

A program of the first range writes ROWS consecutive query rows and all that goes with them (per-request lengths, sampling
entries, copies of the request states), padding by the same path with its loads masked off; one of the second range writes
ROWS context rows; one of the third the window rows of one request's queries. Nothing loops over padding: a program's chain of
loads is as long as one row's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launching import compile_once, launch, wait_for_inputs

GROUPS = 8
"""KV groups of one launch: each has parameters of its own."""

ROWS = 128
CHUNK = 1024
SPAN = 32
WARPS = 4


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _starts(starts_ptr, starts_stride, begin, end, CHUNK: tl.constexpr):
    """Entries ``[begin, begin + CHUNK)`` of ``query_start_loc``, 0 from ``end`` on."""
    k = begin + tl.arange(0, CHUNK)
    return tl.load(starts_ptr + k.to(tl.int64) * starts_stride, mask=k < end, other=0)


@triton.jit
def _running_maximum(entries, starts_ptr, starts_stride, end, CHUNK: tl.constexpr):
    """Largest of 0 and the entries ``[0, end)`` of ``query_start_loc``, of which the first CHUNK are loaded."""
    largest = tl.maximum(tl.max(entries, 0), 0)
    begin = tl.full((), CHUNK, tl.int64)
    while begin < end:
        largest = tl.maximum(largest, tl.max(_starts(starts_ptr, starts_stride, begin, end, CHUNK), 0))
        begin += CHUNK
    return largest


@triton.jit
def _slots(table_ptr, row_stride, blocks, request, position, ok, rank, SIZE: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Slots of positions (int64, not negative where ``ok``) in one KV group; -1 where not ``ok``, not mapped, or of another rank."""
    SPREAD: tl.constexpr = SIZE * RANKS
    entry = position // SPREAD
    block = tl.load(table_ptr + request.to(tl.int64) * row_stride + entry, mask=ok & (entry < blocks), other=0).to(tl.int64)
    offset = position % SPREAD
    mapped = block > 0
    if RANKS > 1:
        mapped &= position // INTERLEAVE % RANKS == rank
        offset = offset // (INTERLEAVE * RANKS) * INTERLEAVE + position % INTERLEAVE
    return tl.where(mapped, block * SIZE + offset, -1)


@triton.jit
def _slots_of_groups(tables, row_strides, blocks, request, position, ok, rank, SIZES: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """``_slots`` in each group: all loads are under way before the first result is stored."""
    found = ()
    for g in tl.static_range(len(SIZES)):
        found += (_slots(tables[g], row_strides[g], blocks[g], request, position, ok, rank, SIZES[g], RANKS[g], INTERLEAVE),)  # type: ignore[assignment]
    return found


@triton.jit
def _request(request, here, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride, num_rejected_ptr, num_rejected_stride, states):
    """What is loaded of a request by its number alone: the next request's start, rejected tokens, state, and whether there is one."""
    following = tl.load(starts_ptr + (request + 1) * starts_stride, mask=here, other=0)
    rejected = tl.load(num_rejected_ptr + request * num_rejected_stride, mask=here, other=0)
    state = tl.load(idx_mapping_ptr + request * idx_mapping_stride, mask=here, other=-1)
    return following, rejected, state, here & (state >= 0) & (state < states)


@triton.jit
def _first_query(running, following, rejected, known, positions_ptr, positions_stride, tokens, max_model_len):
    """First query position of requests, and whether they are live; ``running`` is the running maximum of ``query_start_loc`` up
    to and with their own entry."""
    start = tl.minimum(running, tokens)
    length = tl.minimum(tl.maximum(running, following), tokens) - start
    known = known & (length > 0)
    kept = length - tl.minimum(tl.maximum(rejected, 0), length)
    last = start + tl.maximum(kept - 1, 0)
    target = tl.load(positions_ptr + last.to(tl.int64) * positions_stride, mask=known, other=0)
    # Clamped first, so that one more cannot overflow: nothing past max_model_len is ever written.
    target = tl.minimum(tl.maximum(target, -1), max_model_len)
    first = tl.maximum(target + (kept > 0).to(tl.int64), 0)
    return first, known & (first < max_model_len)


@triton.jit
def _query_rows(
    program, input_ids_ptr, out_positions_ptr, is_padding_ptr, out_starts_ptr, seq_lens_ptr, query_slots_ptr,
    sample_indices_ptr, sample_pos_ptr, sample_idx_mapping_ptr, out_temperature_ptr, out_seeds_ptr,
    positions_ptr, positions_stride, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride, num_sampled_ptr, num_sampled_stride,
    num_rejected_ptr, num_rejected_stride, last_sampled_ptr, last_sampled_stride, next_prefill_ptr, next_prefill_stride,
    temperature_ptr, temperature_stride, seeds_ptr, seeds_stride, tables, table_strides, table_blocks,
    tokens, requests, states, max_reqs, max_tokens, max_model_len, mask_token_id, cp_rank,
    SAMPLES: tl.constexpr, QUERIES: tl.constexpr, SIZES: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr, FIRST_GROUP: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    begin = program.to(tl.int64) * ROWS
    row = begin + tl.arange(0, ROWS)
    request, offset = row // QUERIES, row % QUERIES
    here = request < requests
    # What depends on the row alone is on its way before the first result is needed.
    own = tl.load(starts_ptr + request * starts_stride, mask=here, other=0)
    following, rejected, state, known = _request(
        request, here, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride, num_rejected_ptr, num_rejected_stride, states
    )
    sampled = tl.load(num_sampled_ptr + request * num_sampled_stride, mask=here, other=0) > 0
    earlier = tl.where(begin // QUERIES < requests, begin // QUERIES, 0).to(tl.int32)
    entries = _starts(starts_ptr, starts_stride, 0, earlier, CHUNK)
    temperature = tl.load(temperature_ptr + row * temperature_stride, mask=row < states, other=0.0)
    seed = tl.load(seeds_ptr + row * seeds_stride, mask=row < states, other=0)
    anchored = known & (offset == 0)
    last = tl.load(last_sampled_ptr + state.to(tl.int64) * last_sampled_stride, mask=anchored & sampled, other=0)
    prompt = tl.load(next_prefill_ptr + state.to(tl.int64) * next_prefill_stride, mask=anchored & (sampled == 0), other=0)
    # Rows are in the order of their requests, so a scan over them runs over requests.
    running = tl.maximum(tl.associative_scan(own, 0, _larger), _running_maximum(entries, starts_ptr, starts_stride, earlier, CHUNK))
    first, live = _first_query(running, following, rejected, known, positions_ptr, positions_stride, tokens, max_model_len)
    anchor = tl.minimum(tl.maximum(tl.where(sampled, last, prompt), 0), 2147483647).to(tl.int32)
    position = first + offset
    inside = live & (position < max_model_len)

    slots = _slots_of_groups(tables, table_strides, table_blocks, request, position, inside, cp_rank, SIZES, RANKS, INTERLEAVE)

    stored = row < max_tokens
    tl.store(input_ids_ptr + row, tl.where(live, tl.where(offset == 0, anchor, mask_token_id), 0), mask=stored)
    tl.store(out_positions_ptr + row, tl.where(live, tl.minimum(position, max_model_len - 1), 0), mask=stored)
    tl.store(is_padding_ptr + row, live == 0, mask=stored)
    for g in tl.static_range(len(SIZES)):
        tl.store(query_slots_ptr + (FIRST_GROUP + g) * max_tokens.to(tl.int64) + row, slots[g], mask=stored)

    sample = offset - (QUERIES - SAMPLES)
    place = request * SAMPLES + sample
    stored = (request < max_reqs) & (sample >= 0)
    tl.store(sample_indices_ptr + place, tl.where(live, row, 0), mask=stored)
    tl.store(sample_pos_ptr + place, tl.where(live, position + (SAMPLES == QUERIES), 0), mask=stored)
    tl.store(sample_idx_mapping_ptr + place, tl.where(inside & sampled, state, -1), mask=stored)

    heads = offset == 0
    tl.store(out_starts_ptr + request, tl.minimum(request, requests) * QUERIES, mask=heads & (request <= max_reqs))
    tl.store(seq_lens_ptr + request, tl.where(live, tl.minimum(first + QUERIES, max_model_len), 0), mask=heads & (request < max_reqs))
    tl.store(out_temperature_ptr + row, temperature, mask=row < states)
    tl.store(out_seeds_ptr + row, seed, mask=row < states)


@triton.jit
def _context_rows(
    program, context_positions_ptr, context_slots_ptr, positions_ptr, positions_stride, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride,
    num_rejected_ptr, num_rejected_stride, tables, table_strides, table_blocks, tokens, requests, states, max_model_len, cp_rank,
    SIZES: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr, FIRST_GROUP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    begin = program.to(tl.int64) * ROWS
    token = begin + tl.arange(0, ROWS)
    stored = token < tokens
    position = tl.load(positions_ptr + token * positions_stride, mask=stored, other=0)
    # A token's request is the one before the first later start past the token: a rule that needs no running maximum. Those of
    # the first and the last token of the program bound what has to be searched for the others.
    none = tl.full((), 0, tl.int32) + requests
    low, high, k0 = none, none, tl.full((), 0, tl.int32)
    last = tl.minimum(begin + ROWS, tokens) - 1
    start = tl.load(starts_ptr)
    while requests - k0 > 0:  # false too for a k0 that has wrapped
        k = k0 + tl.arange(0, CHUNK)
        end = tl.load(starts_ptr + (k + 1).to(tl.int64) * starts_stride, mask=k < requests, other=-1)
        low = tl.minimum(low, tl.min(tl.where(end > begin, k, requests), 0))
        high = tl.minimum(high, tl.min(tl.where(end > last, k, requests), 0))
        k0 += CHUNK
    owner = tl.full((ROWS,), 0, tl.int32) + requests
    k0 = low
    while tl.minimum(high, requests - 1) - k0 >= 0:
        k = k0 + tl.arange(0, SPAN)
        end = tl.load(starts_ptr + (k + 1).to(tl.int64) * starts_stride, mask=k < requests, other=-1)
        owner = tl.minimum(owner, tl.min(tl.where(end[None, :] > token[:, None], k[None, :], requests), 1))
        k0 += SPAN
    owned = stored & (owner < requests) & (start <= token)
    end = tl.load(starts_ptr + (owner + 1).to(tl.int64) * starts_stride, mask=owned, other=0)
    state = tl.load(idx_mapping_ptr + owner.to(tl.int64) * idx_mapping_stride, mask=owned, other=-1)
    rejected = tl.load(num_rejected_ptr + owner.to(tl.int64) * num_rejected_stride, mask=owned, other=0).to(tl.int64)
    # Slots of tokens that are not kept are looked up too: waiting for what tells them apart would be a step more.
    inside = owned & (position >= 0) & (position < max_model_len)
    slots = _slots_of_groups(tables, table_strides, table_blocks, owner, position, inside, cp_rank, SIZES, RANKS, INTERLEAVE)
    keep = inside & (state >= 0) & (state < states) & (token < tl.minimum(end, tokens) - tl.maximum(rejected, 0))
    tl.store(context_positions_ptr + token, tl.where(keep, position, 0), mask=stored)
    for g in tl.static_range(len(SIZES)):
        tl.store(context_slots_ptr + (FIRST_GROUP + g) * tokens.to(tl.int64) + token, tl.where(keep, slots[g], -1), mask=stored)


@triton.jit
def _window_rows(
    request, swa_indices_ptr, swa_lens_ptr, positions_ptr, positions_stride, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride,
    num_rejected_ptr, num_rejected_stride, draft_start_ptr, draft_start_stride, tables, table_strides, table_blocks,
    tokens, requests, states, max_tokens, max_model_len,
    QUERIES: tl.constexpr, SIZES: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr, FIRST_GROUP: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    PLACES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request = request.to(tl.int64)
    here = request < requests
    following, rejected, _, known = _request(
        request, here, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride, num_rejected_ptr, num_rejected_stride, states
    )
    earlier = tl.where(here, request + 1, 0).to(tl.int32)
    running = _running_maximum(_starts(starts_ptr, starts_stride, 0, earlier, CHUNK), starts_ptr, starts_stride, earlier, CHUNK)
    committed, live = _first_query(running, following, rejected, known, positions_ptr, positions_stride, tokens, max_model_len)
    first = tl.maximum(committed - WINDOW, 0)
    if draft_start_ptr is not None:
        first = tl.maximum(first, tl.load(draft_start_ptr + request * draft_start_stride, mask=here, other=0).to(tl.int64))
    length = tl.where(live & (committed > 0), tl.maximum(committed + QUERIES - first, 0), 0)
    column = tl.arange(0, COLUMNS)
    position = first + column
    listed = (column < length) & (position < max_model_len)
    found = _slots_of_groups(tables, table_strides, table_blocks, request + tl.zeros_like(position), position, listed, 0, SIZES, RANKS, INTERLEAVE)
    for g in tl.static_range(len(SIZES)):
        slots = tl.where(found[g] <= 2147483647, found[g], -1).to(tl.int32)
        for j in tl.static_range(QUERIES):
            row = request * QUERIES + j
            place = swa_indices_ptr + ((FIRST_GROUP + g) * max_tokens.to(tl.int64) + row) * WIDTH + column
            tl.store(place, slots, mask=(column < WIDTH) & (row < max_tokens))
    place = tl.arange(0, PLACES)
    row = request * QUERIES + place
    tl.store(swa_lens_ptr + row, (length + tl.zeros_like(row)).to(tl.int32), mask=(place < QUERIES) & (row < max_tokens))


@compile_once(aligned=(
    "input_ids_ptr", "out_positions_ptr", "is_padding_ptr", "out_starts_ptr", "seq_lens_ptr", "query_slots_ptr", "context_positions_ptr",
    "context_slots_ptr", "sample_indices_ptr", "sample_pos_ptr", "sample_idx_mapping_ptr", "out_temperature_ptr", "out_seeds_ptr",
    "swa_indices_ptr", "swa_lens_ptr",
))  # fmt: skip
def draft_inputs_kernel(
    input_ids_ptr, out_positions_ptr, is_padding_ptr, out_starts_ptr, seq_lens_ptr, query_slots_ptr, context_positions_ptr, context_slots_ptr,
    sample_indices_ptr, sample_pos_ptr, sample_idx_mapping_ptr, out_temperature_ptr, out_seeds_ptr, swa_indices_ptr, swa_lens_ptr,
    positions_ptr, positions_stride, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride, num_sampled_ptr, num_sampled_stride,
    num_rejected_ptr, num_rejected_stride, last_sampled_ptr, last_sampled_stride, next_prefill_ptr, next_prefill_stride,
    temperature_ptr, temperature_stride, seeds_ptr, seeds_stride, draft_start_ptr, draft_start_stride,
    table0_ptr, table1_ptr, table2_ptr, table3_ptr, table4_ptr, table5_ptr, table6_ptr, table7_ptr,
    table0_stride, table1_stride, table2_stride, table3_stride, table4_stride, table5_stride, table6_stride, table7_stride,
    table0_blocks, table1_blocks, table2_blocks, table3_blocks, table4_blocks, table5_blocks, table6_blocks, table7_blocks,
    tokens, requests, states, max_reqs, max_tokens, max_model_len, mask_token_id, cp_rank, query_programs, row_programs,
    SAMPLES: tl.constexpr, QUERIES: tl.constexpr, SIZES: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr, FIRST_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    tables = (table0_ptr, table1_ptr, table2_ptr, table3_ptr, table4_ptr, table5_ptr, table6_ptr, table7_ptr)
    table_strides = (table0_stride, table1_stride, table2_stride, table3_stride, table4_stride, table5_stride, table6_stride, table7_stride)
    table_blocks = (table0_blocks, table1_blocks, table2_blocks, table3_blocks, table4_blocks, table5_blocks, table6_blocks, table7_blocks)
    program = tl.program_id(0)
    if program < query_programs:
        _query_rows(
            program, input_ids_ptr, out_positions_ptr, is_padding_ptr, out_starts_ptr, seq_lens_ptr, query_slots_ptr,
            sample_indices_ptr, sample_pos_ptr, sample_idx_mapping_ptr, out_temperature_ptr, out_seeds_ptr,
            positions_ptr, positions_stride, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride, num_sampled_ptr, num_sampled_stride,
            num_rejected_ptr, num_rejected_stride, last_sampled_ptr, last_sampled_stride, next_prefill_ptr, next_prefill_stride,
            temperature_ptr, temperature_stride, seeds_ptr, seeds_stride, tables, table_strides, table_blocks,
            tokens, requests, states, max_reqs, max_tokens, max_model_len, mask_token_id, cp_rank,
            SAMPLES, QUERIES, SIZES, RANKS, INTERLEAVE, FIRST_GROUP, ROWS, CHUNK,
        )  # fmt: skip
    elif program < row_programs:
        _context_rows(
            program - query_programs, context_positions_ptr, context_slots_ptr, positions_ptr, positions_stride, starts_ptr, starts_stride,
            idx_mapping_ptr, idx_mapping_stride, num_rejected_ptr, num_rejected_stride, tables, table_strides, table_blocks,
            tokens, requests, states, max_model_len, cp_rank, SIZES, RANKS, INTERLEAVE, FIRST_GROUP, ROWS, CHUNK, SPAN,
        )  # fmt: skip
    elif WIDTH > 0:
        _window_rows(
            program - row_programs, swa_indices_ptr, swa_lens_ptr, positions_ptr, positions_stride, starts_ptr, starts_stride, idx_mapping_ptr, idx_mapping_stride,
            num_rejected_ptr, num_rejected_stride, draft_start_ptr, draft_start_stride, tables, table_strides, table_blocks,
            tokens, requests, states, max_tokens, max_model_len, QUERIES, SIZES, RANKS, INTERLEAVE, FIRST_GROUP, WINDOW, WIDTH, COLUMNS, PLACES, CHUNK,
        )  # fmt: skip


def draft_inputs(a: Any, outputs: tuple[torch.Tensor, ...], window: int = 0, width: int = 0, draft_start: torch.Tensor | None = None) -> None:
    """Fill ``outputs``: of ``prepare_dflash_inputs`` from its arguments ``a``, and with ``width`` the window rows and lengths behind them.

    Past GROUPS groups, a launch for each GROUPS.
    """
    queries, states, tokens = a.queries, a.last_sampled.shape[0], a.target_positions.shape[0]
    query_programs = triton.cdiv(max(a.max_tokens, a.max_reqs * queries + 1, states), ROWS)
    row_programs = query_programs + triton.cdiv(tokens, ROWS)
    inputs = (
        a.target_positions, a.query_start_loc, a.idx_mapping, a.num_sampled, a.num_rejected, a.last_sampled, a.next_prefill_tokens, a.temperature, a.seeds,
    )  # fmt: skip
    for group in range(0, max(1, len(a.block_tables)), GROUPS):
        tables, sizes = a.block_tables[group : group + GROUPS], a.block_sizes[group : group + GROUPS]
        absent = GROUPS - len(tables)
        launch(
            draft_inputs_kernel, row_programs + (triton.cdiv(a.max_tokens, queries) if width else 0), a.target_positions.device,
            *outputs, *[None] * (15 - len(outputs)), *(item for tensor in inputs for item in (tensor, tensor.stride(0))),
            draft_start, 0 if draft_start is None else draft_start.stride(0),
            *tables, *[None] * absent, *(table.stride(0) for table in tables), *[0] * absent, *(table.shape[1] for table in tables), *[0] * absent,
            tokens, a.requests, states, a.max_reqs, a.max_tokens, a.max_model_len, a.mask_token_id, a.cp_rank, query_programs, row_programs,
            SAMPLES=a.num_speculative_tokens, QUERIES=queries, SIZES=tuple(sizes), RANKS=tuple(a.ranks(group + g) for g in range(len(sizes))),
            INTERLEAVE=a.cp_interleave, FIRST_GROUP=group, WINDOW=window, WIDTH=width, COLUMNS=triton.next_power_of_2(max(width, 1)),
            PLACES=triton.next_power_of_2(queries), ROWS=ROWS, CHUNK=CHUNK, SPAN=SPAN, num_warps=WARPS,
        )  # fmt: skip
