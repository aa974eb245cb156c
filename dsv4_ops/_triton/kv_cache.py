"""Paged KV rows: insert and gather, several rows a program, each value converted by integer arithmetic.

Conversions work on bits, so that every architecture and the interpreter round alike: no approximate exponential or logarithm, no
conversion instruction that an older GPU lacks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..kv_cache import AMAX_FLOOR, GROUP, GROUPS, HEAD_DIM, NOPE_DIM, ROPE_DIM, ROW_BYTES, SCALE_BYTES
from .elements import fp32_bits
from .launching import compile_once, launch, wait_for_inputs

ROWS = 4
CHUNK = 1024
WARPS = 8
ALIGNMENT = 8
"""Bytes that addresses of rows and pages are multiples of, where accesses are as wide."""

_ALIGNMENT = tl.constexpr(ALIGNMENT)
_HEAD_DIM = tl.constexpr(HEAD_DIM)
_NOPE_DIM = tl.constexpr(NOPE_DIM)
_ROPE_DIM = tl.constexpr(ROPE_DIM)
_GROUP = tl.constexpr(GROUP)
_GROUPS = tl.constexpr(GROUPS)
_ROW_BYTES = tl.constexpr(ROW_BYTES)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_INFINITE = tl.constexpr(0x7F800000)
_AMAX_FLOOR = tl.constexpr(int(torch.tensor(AMAX_FLOOR).view(torch.int32)))
_DIMENSIONS = 8


@triton.jit
def rounded_to_bf16(bits):
    """int16 bits of the bf16 value nearest to fp32 ``bits``, ties to even."""
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    rounded = tl.where(magnitude > _INFINITE, 0x7FC0, rounded)
    return (rounded | ((bits >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def _bf16_bits(values):
    """int16 bits of ``values`` as bf16; those of bf16 values as they are."""
    return values.to(tl.int16, bitcast=True) if values.dtype == tl.bfloat16 else rounded_to_bf16(values.to(tl.int32, bitcast=True))


@triton.jit
def _encode(bits):
    """e4m3 codes of fp32 ``bits`` ``[rows, groups, 64]``, and the UE8M0 exponent of each group (int32)."""
    magnitude = bits & 0x7FFFFFFF
    amax = tl.maximum(tl.max(tl.where(magnitude < _INFINITE, magnitude, 0), 2), _AMAX_FLOOR)
    # The smallest power of two with amax <= 448 * 2**e, and 448 is 1.75 * 2**8: one more where the mantissa is past 0.75.
    exponent = ((amax + 0x1FFFFF) >> 23) - 8
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(magnitude.to(tl.float32, bitcast=True) * inverse[:, :, None], 448.0)
    rounded = scaled.to(tl.int32, bitcast=True)
    normal = ((rounded + 0x7FFFF + ((rounded >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 a code is a multiple of 2**-9, which is the last place of 2**14.
    small = (scaled + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(rounded < 121 << 23, small, normal)
    code = tl.where(magnitude > _INFINITE, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8), exponent


@triton.jit
def _decode(code, exponent):
    """int16 bits of the bf16 values of e4m3 codes ``[rows, groups, 64]`` with UE8M0 exponents ``[rows, groups]`` (both int32)."""
    magnitude = code & 0x7F
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 2.0**-9, ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True))
    scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    bits = (value * scale[:, :, None]).to(tl.int32, bitcast=True)
    bits = tl.where((magnitude == 0x7F) | (exponent == 255)[:, :, None], 0x7FC00000, bits)
    return rounded_to_bf16(bits | (code & 0x80) << 24)


@triton.jit
def _rows(base, offset, ALIGNED: tl.constexpr):
    """Pointers to rows, known to be multiples of the alignment where they are. (Known of the sum: later sums forget it.)"""
    pointers = base + offset
    if ALIGNED:
        pointers = tl.multiple_of(pointers, _ALIGNMENT)
    return pointers


@triton.jit
def _slots_from(slots_ptr, slots_stride, first, tokens, CHUNK: tl.constexpr):
    """The rows ``[first, first + CHUNK)`` and their slots, -1 past the last."""
    k = first + tl.arange(0, CHUNK)
    return k, tl.load(slots_ptr + k * slots_stride, mask=k < tokens, other=-1).to(tl.int64)


@triton.jit
def _in_later_row(slot, row, others, other_rows):
    """Which of the slots are also those of a later one of the other rows."""
    same = (others[None, :] == slot[:, None]) & (other_rows[None, :] > row[:, None])
    return tl.max(same.to(tl.int32), 1) > 0


@compile_once(aligned=())
def kv_cache_insert_kernel(
    kv_ptr, kv_stride, cache_ptr, page_stride, slots_ptr, slots_stride, tokens, slots_end,
    BLOCK_SIZE: tl.constexpr, KV_ALIGNED: tl.constexpr, CACHE_ALIGNED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    here = row < tokens
    source = _rows(kv_ptr, row * kv_stride, KV_ALIGNED)
    group, place = tl.arange(0, _GROUPS + 1), tl.arange(0, _GROUP)
    column = group[:, None] * _GROUP + place[None, :]
    listed = here[:, None, None] & ((group < _GROUPS)[None, :, None])
    slot = tl.load(slots_ptr + row * slots_stride, mask=here, other=-1).to(tl.int64)
    # Of equal slots the last row wins. All loads of a batch of up to CHUNK rows are under way before any result is needed.
    k, others = _slots_from(slots_ptr, slots_stride, first, tokens, CHUNK)
    bits = fp32_bits(tl.load(source[:, None, None] + column[None, :, :], mask=listed, other=0.0))
    rotary = tl.load(source[:, None] + (place + _NOPE_DIM)[None, :], mask=here[:, None], other=0.0)
    if cache_ptr.dtype.element_ty == tl.uint8:
        code, exponent = _encode(bits)
    later = _in_later_row(slot, row, others, k)
    begin = first + CHUNK
    while begin < tokens:
        k, others = _slots_from(slots_ptr, slots_stride, begin, tokens, CHUNK)
        later |= _in_later_row(slot, row, others, k)
        begin += CHUNK
    valid = (slot >= BLOCK_SIZE) & (slot < slots_end) & (later == 0)
    page = slot // BLOCK_SIZE * page_stride
    offset = slot % BLOCK_SIZE
    if cache_ptr.dtype.element_ty == tl.uint8:
        data = _rows(cache_ptr, page + offset * _ROW_BYTES, CACHE_ALIGNED)
        scales = _rows(cache_ptr, page + BLOCK_SIZE * _ROW_BYTES + offset * _SCALE_BYTES, CACHE_ALIGNED)
        tl.store(data[:, None, None] + column[None, :, :], code, mask=listed & valid[:, None, None])
        tl.store(scales[:, None] + group[None, :], tl.where((group < _GROUPS)[None, :], exponent, 0).to(tl.uint8), mask=valid[:, None])
        tail = _bf16_bits(rotary)
        if CACHE_ALIGNED:
            target = _rows(cache_ptr, page + offset * _ROW_BYTES + _NOPE_DIM, True).to(tl.pointer_type(tl.int16), bitcast=True)
            tl.store(target[:, None] + place[None, :], tail, mask=valid[:, None])
        else:
            target = (data + _NOPE_DIM)[:, None] + 2 * place[None, :]
            tl.store(target, tail.to(tl.uint8), mask=valid[:, None])
            tl.store(target + 1, (tail >> 8).to(tl.uint8), mask=valid[:, None])
    else:
        data = _rows(cache_ptr, page + offset * _HEAD_DIM, CACHE_ALIGNED)
        if cache_ptr.dtype.element_ty == tl.float32:
            body, tail = bits.to(tl.float32, bitcast=True), fp32_bits(rotary).to(tl.float32, bitcast=True)
        else:
            body, tail = rounded_to_bf16(bits).to(tl.bfloat16, bitcast=True), _bf16_bits(rotary).to(tl.bfloat16, bitcast=True)
        tl.store(data[:, None, None] + column[None, :, :], body, mask=listed & valid[:, None, None])
        tl.store(_rows(cache_ptr, page + offset * _HEAD_DIM + _NOPE_DIM, CACHE_ALIGNED)[:, None] + place[None, :], tail, mask=valid[:, None])


@compile_once(aligned=("out_ptr",))
def kv_cache_gather_kernel(
    cache_ptr, page_stride, slots_ptr, size0, size1, size2, size3, size4, size5, size6, size7, stride0, stride1, stride2, stride3, stride4, stride5, stride6, stride7,
    out_ptr, rows, slots_end, BLOCK_SIZE: tl.constexpr, DIMENSIONS: tl.constexpr, CACHE_ALIGNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    strides = (stride0, stride1, stride2, stride3, stride4, stride5, stride6, stride7)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    rest, at = row, row * 0
    for d in tl.static_range(DIMENSIONS - 1, -1, -1):
        if d > 0:
            at += rest % sizes[d] * strides[d]
            rest = rest // sizes[d]
        else:
            at += rest * strides[d]
    slot = tl.load(slots_ptr + at, mask=here, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < slots_end)
    page = slot // BLOCK_SIZE * page_stride
    offset = slot % BLOCK_SIZE
    group, place = tl.arange(0, _GROUPS + 1), tl.arange(0, _GROUP)
    column = group[:, None] * _GROUP + place[None, :]
    out = out_ptr + row * _HEAD_DIM
    if cache_ptr.dtype.element_ty == tl.uint8:
        data = _rows(cache_ptr, page + offset * _ROW_BYTES, CACHE_ALIGNED)
        scales = _rows(cache_ptr, page + BLOCK_SIZE * _ROW_BYTES + offset * _SCALE_BYTES, CACHE_ALIGNED)
        coded = valid[:, None, None] & (group < _GROUPS)[None, :, None]
        code = tl.load(data[:, None, None] + column[None, :, :], mask=coded, other=0).to(tl.int32)
        exponent = tl.load(scales[:, None] + group[None, :], mask=valid[:, None] & (group < _GROUPS)[None, :], other=0).to(tl.int32)
        if CACHE_ALIGNED:
            source = _rows(cache_ptr, page + offset * _ROW_BYTES + _NOPE_DIM, True).to(tl.pointer_type(tl.int16), bitcast=True)
            tail = tl.load(source[:, None] + place[None, :], mask=valid[:, None], other=0)
        else:
            source = (data + _NOPE_DIM)[:, None] + 2 * place[None, :]
            low = tl.load(source, mask=valid[:, None], other=0).to(tl.int16)
            tail = low | tl.load(source + 1, mask=valid[:, None], other=0).to(tl.int16) << 8
        body = _decode(code, exponent).to(tl.bfloat16, bitcast=True)
        tl.store(out[:, None, None] + column[None, :, :], body, mask=here[:, None, None] & (group < _GROUPS)[None, :, None])
        tl.store((out + _NOPE_DIM)[:, None] + place[None, :], tail.to(tl.bfloat16, bitcast=True), mask=here[:, None])
    else:
        data = _rows(cache_ptr, page + offset * _HEAD_DIM, CACHE_ALIGNED)
        values = tl.load(data[:, None, None] + column[None, :, :], mask=valid[:, None, None], other=0.0)
        tl.store(out[:, None, None] + column[None, :, :], values, mask=here[:, None, None])


def _aligned(tensor: torch.Tensor, stride: int) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0 and stride * tensor.element_size() % ALIGNMENT == 0


def kv_cache_insert(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    tokens, (blocks, block_size), page = kv.shape[0], cache.shape[:2], cache.stride(0)
    row = kv.stride(0) if tokens > 1 else HEAD_DIM  # a single row may have any stride, and must not be another kernel
    launch(
        kv_cache_insert_kernel, triton.cdiv(tokens, ROWS), kv.device, kv, row, cache, page, slot_mapping, slot_mapping.stride(0), tokens, blocks * block_size,
        BLOCK_SIZE=block_size, KV_ALIGNED=_aligned(kv, row), CACHE_ALIGNED=_aligned(cache, page), ROWS=ROWS, CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip


def kv_cache_gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    out = cache.new_empty((*slots.shape, HEAD_DIM), dtype=torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype)
    (blocks, block_size), page, dimensions = cache.shape[:2], cache.stride(0), slots.dim()
    absent = _DIMENSIONS - dimensions
    launch(
        kv_cache_gather_kernel, triton.cdiv(slots.numel(), ROWS), cache.device, cache, page, slots, *slots.shape, *[1] * absent, *slots.stride(), *[0] * absent,
        out, math.prod(slots.shape), blocks * block_size,
        BLOCK_SIZE=block_size, DIMENSIONS=dimensions, CACHE_ALIGNED=_aligned(cache, page), ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return out
