"""Rejection sampling in two launches over a split vocabulary.

``judge_kernel`` takes from each tile of the rows that are judged what a softmax needs, or for greedy requests the arg-max. In
``draw_kernel`` every program of a random request first judges all its proposals (the same few numbers, the same decision), then races the
tokens of one tile of the one row that a token is drawn from; the last program of a request to finish finds the first arrival and
writes the request's output. None waits for another: who comes last is told by a counter that the first launch sets to zero.

A row after a placeholder is never reached, and the row of the bonus token is only drawn from: the first launch reads neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..workspace import workspace_manager
from .launching import compile_once, launch, wait_for_inputs
from .sampling import (
    INFINITY,
    LARGEST,
    NOBODY,
    RACED,
    ROUNDED_ONCE,
    clean,
    dense,
    exp2,
    first_arrival,
    first_of_tiles,
    load_logits,
    log2_scale,
    philox,
    race,
    tile_noise,
    tiles_of,
    uniform,
)

JUDGED = (4096, 4)  # columns of the widest tile and warps for it: fewer tiles than are raced, because every program of the second launch reads all
STREAM_PLAIN, STREAM_ACCEPTANCE, STREAM_RECOVERY = tl.constexpr(0), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def proposals(draft_ids_ptr, row_stride, column_stride, request, step, DRAFTS: tl.constexpr, WIDTH: tl.constexpr):
    """Proposed ids by step, -1 where there are none, and the first step without: K if every one has a proposal."""
    ids = tl.load(draft_ids_ptr + request * row_stride + step.to(tl.int64) * column_stride, mask=step < DRAFTS, other=-1).to(tl.int64)
    proposed = (ids >= 0) & (ids < WIDTH)
    end = tl.min(tl.where(proposed, NOBODY, step), 0)
    return tl.where(proposed, ids, -1).to(tl.int32), end


@compile_once(aligned=("level_ptr", "mass_ptr", "best_ptr", "finished_ptr"))
def judge_kernel(
    target_ptr,
    draft_logits_ptr,
    draft_ids_ptr,
    temperature_ptr,
    idx_mapping_ptr,
    level_ptr,
    mass_ptr,
    best_ptr,
    finished_ptr,
    max_reqs,
    target_stride,
    target_step_stride,
    draft_logits_stride,
    draft_logits_step_stride,
    draft_ids_stride,
    draft_ids_step_stride,
    temperature_stride,
    idx_mapping_stride,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    STEPS: tl.constexpr,
    SAMPLED: tl.constexpr,
    TARGET_COLUMN_STRIDE: tl.constexpr,
    DRAFT_COLUMN_STRIDE: tl.constexpr,
    DENSE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    wait_for_inputs()
    ROWS: tl.constexpr = 1 + DRAFTS + (DRAFTS if SAMPLED else 0)
    tile = tl.program_id(0) % TILES
    row = tl.program_id(0) // TILES % ROWS
    request = (tl.program_id(0) // (TILES * ROWS)).to(tl.int64)
    if (tile == 0) & (row == 0):
        tl.store(finished_ptr + request, 0)
    state = tl.load(idx_mapping_ptr + request * idx_mapping_stride).to(tl.int64)
    if (state >= 0) & (state < max_reqs):
        temperature = tl.load(temperature_ptr + state * temperature_stride)
        _, end = proposals(draft_ids_ptr, draft_ids_stride, draft_ids_step_stride, request, tl.arange(0, STEPS), DRAFTS, WIDTH)
        random, scale = log2_scale(temperature)
        of_target = row <= DRAFTS
        step = tl.where(of_target, row, row - DRAFTS - 1).to(tl.int64)
        if tl.where(random, step < end, of_target & (step <= end)):
            column = tile * TILE + tl.arange(0, TILE)
            if of_target:
                x = load_logits(target_ptr, request * target_stride + step * target_step_stride, column, WIDTH, TARGET_COLUMN_STRIDE, DENSE)
            else:
                place = request * draft_logits_stride + step * draft_logits_step_stride
                x = load_logits(draft_logits_ptr, place, column, WIDTH, DRAFT_COLUMN_STRIDE, DENSE)
            level = tl.max(x, 0)
            out = (request * ROWS + row) * TILES + tile
            tl.store(level_ptr + out, level)
            if random:
                tl.store(mass_ptr + out, tl.sum(exp2((x - tl.maximum(level, -LARGEST)) * scale), 0))
            else:
                tl.store(best_ptr + out, tl.min(tl.where(x == level, column, NOBODY), 0))


@triton.jit
def softmax_terms(level_ptr, mass_ptr, first, valid, scale, TILES: tl.constexpr, LANES: tl.constexpr):
    """Of some rows: the largest logit and one over the sum of their weights. ``first`` is where their tiles are; others give (-inf, 1)."""
    lane = tl.arange(0, LANES)[None, :]
    inside = valid[:, None] & (lane < TILES)
    level = tl.load(level_ptr + first[:, None] + lane, mask=inside, other=-INFINITY)
    mass = tl.load(mass_ptr + first[:, None] + lane, mask=inside, other=0.0)
    top = tl.max(level, 1)
    total = tl.sum(mass * exp2((level - tl.maximum(top, -LARGEST)[:, None]) * scale), 1)
    return top, 1.0 / tl.where(top == -INFINITY, 1.0, total)


@triton.jit
def probability(x, column, top, share, scale):
    """Of clean logits; a row with nothing above -inf is token 0 for certain."""
    return tl.where(top == -INFINITY, (column == 0).to(tl.float32), exp2((x - tl.maximum(top, -LARGEST)) * scale) * share)


@triton.jit
def at(values, step, count):
    """The value at step ``count``."""
    return tl.sum(tl.where(step == count, values, 0), 0)


@triton.jit
def emit(sampled_ptr, num_sampled_ptr, request, step, ids, count, token, live, DRAFTS: tl.constexpr):
    """The first ``count`` proposals, then ``token``, then -1."""
    row = tl.where(step < count, ids, tl.where(step == count, token, -1))
    tl.store(sampled_ptr + request * (1 + DRAFTS) + step, tl.where(live, row, -1).to(tl.int64), mask=step <= DRAFTS)
    tl.store(num_sampled_ptr + request, tl.where(live, count + 1, 0))


@compile_once(aligned=("sampled_ptr", "num_sampled_ptr", "level_ptr", "mass_ptr", "best_ptr", "finished_ptr", "raced_level_ptr", "arrival_ptr", "token_ptr"))
def draw_kernel(
    sampled_ptr,
    num_sampled_ptr,
    target_ptr,
    draft_logits_ptr,
    draft_ids_ptr,
    temperature_ptr,
    seeds_ptr,
    idx_mapping_ptr,
    positions_ptr,
    level_ptr,
    mass_ptr,
    best_ptr,
    finished_ptr,
    raced_level_ptr,
    arrival_ptr,
    token_ptr,
    max_reqs,
    target_stride,
    target_step_stride,
    draft_logits_stride,
    draft_logits_step_stride,
    draft_ids_stride,
    draft_ids_step_stride,
    temperature_stride,
    seeds_stride,
    idx_mapping_stride,
    positions_stride,
    positions_step_stride,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    STEPS: tl.constexpr,
    SAMPLED: tl.constexpr,
    FIRST_POSITION_ONLY: tl.constexpr,
    TARGET_COLUMN_STRIDE: tl.constexpr,
    DRAFT_COLUMN_STRIDE: tl.constexpr,
    DENSE: tl.constexpr,
    JUDGED_TILES: tl.constexpr,
    JUDGED_LANES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    wait_for_inputs()
    ROWS: tl.constexpr = 1 + DRAFTS + (DRAFTS if SAMPLED else 0)
    tile = tl.program_id(0) % TILES
    request = (tl.program_id(0) // TILES).to(tl.int64)
    step = tl.arange(0, STEPS)
    state = tl.load(idx_mapping_ptr + request * idx_mapping_stride).to(tl.int64)
    live = (state >= 0) & (state < max_reqs)
    random, scale = log2_scale(tl.load(temperature_ptr + state * temperature_stride, mask=live, other=0.0))
    if not random:
        if tile == 0:
            ids, end = proposals(draft_ids_ptr, draft_ids_stride, draft_ids_step_stride, request, step, DRAFTS, WIDTH)
            lane = tl.arange(0, JUDGED_LANES)[None, :]
            first = ((request * ROWS + step) * JUDGED_TILES)[:, None] + lane
            inside = (live & (step <= end))[:, None] & (lane < JUDGED_TILES)
            level = tl.load(level_ptr + first, mask=inside, other=-INFINITY)
            token = tl.load(best_ptr + first, mask=inside, other=NOBODY)
            token = tl.min(tl.where(level == tl.max(level, 1)[:, None], token, NOBODY), 1)
            count = tl.min(tl.where((step < end) & (ids == token), NOBODY, step), 0)
            emit(sampled_ptr, num_sampled_ptr, request, step, ids, count, at(token, step, count), live, DRAFTS)
    else:
        # What the decision is made of: loads that do not wait for one another.
        seed = tl.load(seeds_ptr + state * seeds_stride)
        if FIRST_POSITION_ONLY:
            position = tl.load(positions_ptr + request * positions_stride) + step
        else:
            position = tl.load(positions_ptr + request * positions_stride + step.to(tl.int64) * positions_step_stride, mask=step <= DRAFTS, other=0)
        ids, end = proposals(draft_ids_ptr, draft_ids_stride, draft_ids_step_stride, request, step, DRAFTS, WIDTH)
        proposed = step < end
        target_row = request * target_stride + step.to(tl.int64) * target_step_stride
        draft_row = request * draft_logits_stride + step.to(tl.int64) * draft_logits_step_stride
        first = (request * ROWS + step) * JUDGED_TILES
        top, share = softmax_terms(level_ptr, mass_ptr, first, proposed, scale, JUDGED_TILES, JUDGED_LANES)
        chosen = clean(tl.load(target_ptr + target_row + ids.to(tl.int64) * TARGET_COLUMN_STRIDE, mask=proposed, other=0.0))
        p = probability(chosen, ids, top, share, scale)
        word, _, _, _ = philox(seed, position, tl.full((), STREAM_ACCEPTANCE, tl.int32), tl.zeros_like(step))
        chance = uniform(word)
        if SAMPLED:
            draft_top, draft_share = softmax_terms(level_ptr, mass_ptr, first + (1 + DRAFTS) * JUDGED_TILES, proposed, scale, JUDGED_TILES, JUDGED_LANES)
            chosen = clean(tl.load(draft_logits_ptr + draft_row + ids.to(tl.int64) * DRAFT_COLUMN_STRIDE, mask=proposed, other=0.0))
            chance *= probability(chosen, ids, draft_top, draft_share, scale)
        count = tl.min(tl.where(proposed & (chance < p), NOBODY, step), 0)

        column = tile * TILE + tl.arange(0, TILE)
        x = load_logits(target_ptr, at(target_row, step, count), column, WIDTH, TARGET_COLUMN_STRIDE, DENSE)
        rejected = count < end
        noise = tile_noise(seed, at(position, step, count), tl.where(rejected, STREAM_RECOVERY, STREAM_PLAIN), tile, TILE)
        if rejected:  # what the target has more of than the draft
            law = probability(x, column, at(top, step, count), at(share, step, count), scale)
            if SAMPLED:
                y = load_logits(draft_logits_ptr, at(draft_row, step, count), column, WIDTH, DRAFT_COLUMN_STRIDE, DENSE)
                residual = law - probability(y, column, at(draft_top, step, count), at(draft_share, step, count), scale)
            else:
                residual = tl.where(column == at(ids, step, count), 0.0, law)
            # Where rounding leaves nothing in any tile, the target's own law; one tile that has something overrules those.
            left = tl.max(residual, 0) > 0
            law = tl.where(left, tl.maximum(residual, 0.0), law)
            arrival, token = first_arrival(tl.where((law > 0) & (column < WIDTH), noise / law, INFINITY), column)
            level = tl.where(left, 0.0, -INFINITY)
        else:
            level, arrival, token = race(x, column, noise, scale)
        raced = request * TILES
        tl.store(raced_level_ptr + raced + tile, level)
        tl.store(arrival_ptr + raced + tile, arrival)
        tl.store(token_ptr + raced + tile, token)
        tl.debug_barrier()
        if tl.atomic_add(finished_ptr + request, 1, sem="acq_rel") == TILES - 1:
            lane = tl.arange(0, LANES)
            levels = tl.load(raced_level_ptr + raced + lane, mask=lane < TILES, other=-INFINITY, cache_modifier=".cg")
            arrivals = tl.load(arrival_ptr + raced + lane, mask=lane < TILES, other=INFINITY, cache_modifier=".cg")
            tokens = tl.load(token_ptr + raced + lane, mask=lane < TILES, other=NOBODY, cache_modifier=".cg")
            emit(sampled_ptr, num_sampled_ptr, request, step, ids, count, first_of_tiles(levels, arrivals, tokens, scale), True, DRAFTS)


def rejection_sample(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    lane: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``draft_logits`` are None for greedy proposals."""
    requests, drafts = draft_token_ids.shape
    device, width = target_logits.device, target_logits.shape[-1]
    sampled = target_logits.new_empty((requests, 1 + drafts), dtype=torch.int64)
    num_sampled = target_logits.new_empty((requests,), dtype=torch.int32)
    if requests == 0:
        return sampled, num_sampled
    target = target_logits.reshape(requests, 1 + drafts, width)
    is_sampled = draft_logits is not None and drafts > 0
    proposal = draft_logits if draft_logits is not None and drafts > 0 else target
    rows = 1 + drafts + (drafts if is_sampled else 0)
    judged_tile, judged_tiles, judged_warps = tiles_of(width, JUDGED)
    tile, tiles, warps = tiles_of(width, RACED)
    judged, raced = (requests, rows, judged_tiles), (requests, tiles)
    level, mass, best, finished, raced_level, arrival, token = workspace_manager(device).get(
        (judged, torch.float32), (judged, torch.float32), (judged, torch.int32), ((requests,), torch.int32),
        (raced, torch.float32), (raced, torch.float32), (raced, torch.int32), lane=lane, op="rejection_sample",
    )  # fmt: skip
    strides = (*target.stride()[:2], *proposal.stride()[:2], *draft_token_ids.stride(), temperature.stride(0))
    constants = {
        "WIDTH": width, "DRAFTS": drafts, "STEPS": triton.next_power_of_2(1 + drafts), "SAMPLED": is_sampled,
        "TARGET_COLUMN_STRIDE": target.stride(2), "DRAFT_COLUMN_STRIDE": proposal.stride(2), "DENSE": dense(target, proposal),
    } | ROUNDED_ONCE  # fmt: skip
    launch(
        judge_kernel, requests * rows * judged_tiles, device, target, proposal, draft_token_ids, temperature, idx_mapping, level, mass, best, finished,
        temperature.shape[0], *strides, idx_mapping.stride(0), TILE=judged_tile, TILES=judged_tiles, num_warps=judged_warps, **constants,
    )  # fmt: skip
    launch(
        draw_kernel, requests * tiles, device, sampled, num_sampled, target, proposal, draft_token_ids, temperature, seeds, idx_mapping, positions,
        level, mass, best, finished, raced_level, arrival, token, temperature.shape[0], *strides, seeds.stride(0), idx_mapping.stride(0),
        positions.stride(0), positions.stride(-1), FIRST_POSITION_ONLY=positions.dim() == 1, JUDGED_TILES=judged_tiles,
        JUDGED_LANES=triton.next_power_of_2(judged_tiles), TILE=tile, TILES=tiles, LANES=triton.next_power_of_2(tiles), num_warps=warps, **constants,
    )  # fmt: skip
    return sampled, num_sampled
