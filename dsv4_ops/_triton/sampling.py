"""Gumbel-max over a vocabulary that is split over many programs: each races the tokens of one tile, a small kernel takes the best.

A token *arrives* at ``noise / weight`` and the first one is drawn, which is the arg-max of ``weight / noise``. Weights are relative to
the largest logit of the tile (its *level*), so a tile is read once; arrivals of other tiles are put on one scale at the end. The
split depends on the vocabulary alone, and a minimum does not depend on its order: a row's token depends on nothing but the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..workspace import workspace_manager
from .launching import INTERPRETED, compile_once, launch, wait_for_inputs

RACED = (2048, 4)  # columns of the widest tile and warps for it: 64 programs for a row of 129,280
QUAD = tl.constexpr(4)  # columns that share a Philox block
LARGEST = tl.constexpr(3.4028234663852886e38)
SMALLEST_TEMPERATURE = tl.constexpr(1.1754943508222875e-38)
LOG2_E = tl.constexpr(1.4426950408889634)
NOBODY = tl.constexpr(2147483647)
INFINITY = tl.constexpr(float("inf"))
ROUNDED_ONCE = {"enable_fp_fusion": False}
"""Launch option: a product and a sum stay two roundings wherever the code is inlined, so kernels that race one row get the same bits."""


@triton.jit
def clean(x):
    """fp32 logits without NaN and +inf."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.minimum(x, LARGEST), -INFINITY)


@triton.jit
def load_logits(row_ptr, row_offset, column, WIDTH: tl.constexpr, COLUMN_STRIDE: tl.constexpr, DENSE: tl.constexpr):
    """Clean logits of one row, -inf past its end. ``DENSE``: quads are aligned, which the row offset has to tell the compiler."""
    if DENSE:
        row = tl.multiple_of(row_ptr + row_offset // QUAD * QUAD, 4 * row_ptr.dtype.element_ty.primitive_bitwidth // 8)
        x = tl.load(row + column, mask=column < WIDTH, other=-INFINITY)
    else:
        x = tl.load(row_ptr + row_offset + column.to(tl.int64) * COLUMN_STRIDE, mask=column < WIDTH, other=-INFINITY)
    return clean(x)


@triton.jit
def log2_scale(temperature):
    """Whether a request is random, and what a difference of logits is multiplied by to be a power of two (greedy: inf)."""
    random = temperature >= SMALLEST_TEMPERATURE
    divisor = tl.where(random, tl.minimum(temperature, LARGEST), 1.0)
    return random, tl.where(random, tl.div_rn(tl.full((), LOG2_E, tl.float32), divisor), INFINITY)


@triton.jit
def uniform(word):
    return tl.minimum(tl.fma(word.to(tl.float32), 2.0**-32, 2.0**-32), 1.0 - 2.0**-24)


@triton.jit
def exp2(x):
    """2**x by the function unit alone: without the steps that keep subnormal results, which here are as good as 0."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def minus_log2(x):
    if INTERPRETED:
        y = -tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1; neg.f32 $0, $0;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def philox(seed, position, stream, block):
    """Four words as in ``_philox.py``, of int64 seed and position, int32 stream and block. A product of 64 bits is one instruction."""
    c0, c1 = block.to(tl.uint32), stream.to(tl.uint32)
    c2, c3 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def exponential_noise(u):
    """-log1p(-u) in units of ln 2, within 1e-6 relatively, for u in (0, 1).

    A polynomial where 1 - u would lose bits, and the logarithm of the function unit elsewhere.
    """
    series = tl.fma(u, 0.37928685545921326, 0.3501329720020294)
    series = tl.fma(u, series, 0.4813833236694336)
    series = tl.fma(u, series, 0.7213398218154907)
    series = tl.fma(u, series, 1.4426950216293335)
    return tl.where(u < 0.125, u * series, minus_log2(1.0 - u))


@triton.jit
def tile_noise(seed, position, stream, tile, TILE: tl.constexpr):
    w0, w1, w2, w3 = philox(seed, position, stream, tile * (TILE // QUAD) + tl.arange(0, TILE // QUAD))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(TILE)
    return exponential_noise(uniform(words))


@triton.jit
def first_arrival(arrival, ids):
    first = tl.min(arrival, 0)
    return first, tl.min(tl.where(arrival == first, ids, NOBODY), 0)


@triton.jit
def race(x, column, noise, scale):
    """(level, arrival, token) of one tile; a masked token arrives at infinity."""
    level = tl.max(x, 0)
    arrival = noise * exp2((tl.maximum(level, -LARGEST) - x) * scale)
    first, token = first_arrival(arrival, column)
    return level, first, token


@triton.jit
def first_of_tiles(level, arrival, ids, scale):
    """The token of a row from those of its tiles. A greedy row has arrivals of 1 and an infinite scale."""
    top = tl.max(level, 0)
    _, token = first_arrival(tl.where(level == top, arrival, arrival * exp2((top - level) * scale)), ids)
    return token


@compile_once(aligned=("level_ptr", "arrival_ptr", "token_ptr"))
def race_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    idx_mapping_ptr,
    level_ptr,
    arrival_ptr,
    token_ptr,
    row_stride,
    max_reqs,
    temperature_stride,
    seeds_stride,
    positions_stride,
    idx_mapping_stride,
    stream,
    WIDTH: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    DENSE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    wait_for_inputs()
    tile = tl.program_id(0) % TILES
    row = (tl.program_id(0) // TILES).to(tl.int64)
    request = tl.load(idx_mapping_ptr + row * idx_mapping_stride).to(tl.int64)
    if (request >= 0) & (request < max_reqs):
        column = tile * TILE + tl.arange(0, TILE)
        x = load_logits(logits_ptr, row * row_stride, column, WIDTH, COLUMN_STRIDE, DENSE)
        random, scale = log2_scale(tl.load(temperature_ptr + request * temperature_stride))
        seed = tl.load(seeds_ptr + request * seeds_stride)
        position = tl.load(positions_ptr + row * positions_stride)
        if random:
            level, arrival, token = race(x, column, tile_noise(seed, position, stream, tile, TILE), scale)
        else:
            level = tl.max(x, 0)
            arrival = tl.full((), 1.0, tl.float32)
            token = tl.min(tl.where(x == level, column, NOBODY), 0)
        place = row * TILES + tile
        tl.store(level_ptr + place, level)
        tl.store(arrival_ptr + place, arrival)
        tl.store(token_ptr + place, token)


@compile_once(aligned=("out_ptr", "level_ptr", "arrival_ptr", "token_ptr"))
def first_kernel(
    out_ptr,
    temperature_ptr,
    idx_mapping_ptr,
    level_ptr,
    arrival_ptr,
    token_ptr,
    max_reqs,
    temperature_stride,
    idx_mapping_stride,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(idx_mapping_ptr + row * idx_mapping_stride).to(tl.int64)
    live = (request >= 0) & (request < max_reqs)
    lane = tl.arange(0, LANES)
    inside = live & (lane < TILES)
    level = tl.load(level_ptr + row * TILES + lane, mask=inside, other=-INFINITY)
    arrival = tl.load(arrival_ptr + row * TILES + lane, mask=inside, other=INFINITY)
    ids = tl.load(token_ptr + row * TILES + lane, mask=inside, other=NOBODY)
    _, scale = log2_scale(tl.load(temperature_ptr + request * temperature_stride, mask=live, other=0.0))
    token = first_of_tiles(level, arrival, ids, scale)
    tl.store(out_ptr + row, tl.where(live, token, 0).to(tl.int64))


def dense(*logits: torch.Tensor) -> bool:
    """Whether every row's quads of columns can be loaded together."""
    return all(
        x.stride(-1) == 1 and x.shape[-1] % 4 == 0 and all(s % 4 == 0 for s in x.stride()[:-1]) and x.data_ptr() % (4 * x.element_size()) == 0
        for x in logits
    )


def tiles_of(width: int, widest: tuple[int, int]) -> tuple[int, int, int]:
    """Columns of a tile, tiles of a row and warps of a program: from the vocabulary alone."""
    columns, warps = widest
    tile = max(QUAD.value, min(triton.next_power_of_2(width), columns))
    return tile, triton.cdiv(width, tile), max(1, warps * tile // columns)


def gumbel_sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor, stream: int, lane: int
) -> torch.Tensor:
    rows, width = logits.shape
    tile, tiles, warps = tiles_of(width, RACED)
    out = logits.new_empty((rows,), dtype=torch.int64)
    if rows == 0:
        return out
    of_tiles = workspace_manager(logits.device).get(
        ((rows, tiles), torch.float32), ((rows, tiles), torch.float32), ((rows, tiles), torch.int32), lane=lane, op="gumbel_sample"
    )
    launch(
        race_kernel, rows * tiles, logits.device, logits, temperature, seeds, positions, idx_mapping, *of_tiles, logits.stride(0),
        temperature.shape[0], temperature.stride(0), seeds.stride(0), positions.stride(0), idx_mapping.stride(0), stream,
        WIDTH=width, COLUMN_STRIDE=logits.stride(1), DENSE=dense(logits), TILE=tile, TILES=tiles, num_warps=warps, **ROUNDED_ONCE,
    )  # fmt: skip
    launch(
        first_kernel, rows, logits.device, out, temperature, idx_mapping, *of_tiles, temperature.shape[0], temperature.stride(0),
        idx_mapping.stride(0), TILES=tiles, LANES=triton.next_power_of_2(tiles), num_warps=1, **ROUNDED_ONCE,
    )  # fmt: skip
    return out
