"""Merge of top-k candidates, one program a row and one launch: cut the row, put side by side what is left, order it by index.

A candidate goes before another by larger score, then by lower index, then +0 before -0. Those that no rule tells apart are the
same bits, so the order of candidates in memory never matters. The cut is found two bits at a time by counting, first in
scores, then in indices among those of the last score. What passes it is written into the outputs, read again, sorted and put back.
Keys of a first block stay in registers while bits are sought; those behind it are read again for each two bits. Every loop ends
by the number of candidates, whatever their values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elements import fp32_bits, narrowed, reached
from .launching import compile_once, launch, wait_for_inputs

WIDEST = 4096  # candidates of a block: all, of 8 ranks with k = 512
EACH = 8  # candidates of a thread, up to 16 warps

_LOWEST = tl.constexpr(-(2**31))
_LARGEST = tl.constexpr(2**31 - 1)
_LAST = tl.constexpr(0x7FFFFFFF_FF800000)
"""The sorting key that no candidate's is above: the largest index, -inf."""


@triton.jit
def _load(values_ptr, indices_ptr, begin, candidates, VALUE_STRIDE: tl.constexpr, INDEX_STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Scores and indices from ``begin`` on, and two int32 keys: order by score, lowest for no candidate, and order among equal scores."""
    column = begin + tl.arange(0, BLOCK)
    here = column < candidates
    scores = tl.load(values_ptr + column * VALUE_STRIDE, mask=here, other=0)
    indices = tl.load(indices_ptr + column * INDEX_STRIDE, mask=here, other=-1)
    bits = fp32_bits(scores)
    magnitude = bits & _LARGEST
    signed = tl.where(bits < 0, -magnitude, magnitude)  # equal zeros have equal keys
    first = tl.where((indices >= 0) & (magnitude <= 0x7F800000), signed, _LOWEST)
    second = (((_LARGEST - indices) << 1) | (bits != _LOWEST).to(tl.int32)) ^ _LOWEST
    return scores, indices, first, second


@triton.jit
def _keys(values_ptr, indices_ptr, begin, candidates, level, SECOND: tl.constexpr, VALUE_STRIDE: tl.constexpr, INDEX_STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """First keys, or with SECOND the second ones of candidates whose first is ``level``."""
    _scores, _indices, first, second = _load(values_ptr, indices_ptr, begin, candidates, VALUE_STRIDE, INDEX_STRIDE, BLOCK)
    return tl.where(first == level, second, _LOWEST) if SECOND else first


@triton.jit
def _cut(values_ptr, indices_ptr, candidates, level, wanted, SECOND: tl.constexpr, VALUE_STRIDE: tl.constexpr, INDEX_STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of ``_keys`` that at least ``wanted`` candidates reach, the lowest number if none, and how many pass it."""
    zero = tl.full((), 0, tl.int64)
    held = _keys(values_ptr, indices_ptr, zero, candidates, level, SECOND, VALUE_STRIDE, INDEX_STRIDE, BLOCK)
    bound = tl.full((), _LOWEST, tl.int32)
    above = tl.full((), 0, tl.int32)
    step = tl.where(candidates > wanted, 1 << 30, 0)
    while step > 0:
        reach_1, reach_2, reach_3 = reached(held, bound, step)
        begin = zero + BLOCK
        while begin < candidates:
            keys = _keys(values_ptr, indices_ptr, begin, candidates, level, SECOND, VALUE_STRIDE, INDEX_STRIDE, BLOCK)
            more_1, more_2, more_3 = reached(keys, bound, step)
            reach_1 += more_1
            reach_2 += more_2
            reach_3 += more_3
            begin += BLOCK
        bound, above = narrowed(bound, above, step, tl.sum(reach_1), tl.sum(reach_2), tl.sum(reach_3), wanted)
        step = step >> 2
    return bound, above


@triton.jit
def _sorting_key(scores, indices):
    """int64 that orders by index, then larger score first, and holds both."""
    bits = fp32_bits(scores)
    falling = bits ^ (~(bits >> 31) & _LARGEST)  # unsigned, smaller for a larger score
    return (indices.to(tl.int64) << 32) | falling.to(tl.uint32).to(tl.int64)


@triton.jit
def _score(key, DTYPE: tl.constexpr):
    """The score in a sorting key."""
    falling = key.to(tl.int32)
    bits = falling ^ (~(falling >> 31) & _LARGEST)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) if tl.bfloat16 == DTYPE else bits.to(tl.float32, bitcast=True)


@compile_once(aligned=("merged_values_ptr", "merged_indices_ptr"))
def topk_merge_kernel(
    merged_values_ptr, merged_indices_ptr, values_ptr, indices_ptr, values_stride, indices_stride, candidates, k,
    VALUE_STRIDE: tl.constexpr, INDEX_STRIDE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * values_stride
    indices_ptr += row * indices_stride
    merged_values_ptr += row * k
    merged_indices_ptr += row * k

    level, above = _cut(values_ptr, indices_ptr, candidates, 0, k, False, VALUE_STRIDE, INDEX_STRIDE, BLOCK)
    bound, above_bound = _cut(values_ptr, indices_ptr, candidates, level, k - above, True, VALUE_STRIDE, INDEX_STRIDE, BLOCK)
    ties = k - above - above_bound  # of candidates that stand on the cut in both keys, which are all the same
    written = tl.full((), 0, tl.int32)
    begin = tl.full((), 0, tl.int64)
    while begin < candidates:
        scores, indices, first, second = _load(values_ptr, indices_ptr, begin, candidates, VALUE_STRIDE, INDEX_STRIDE, BLOCK)
        on_level = (first == level) & (first > _LOWEST)
        better = ((first > level) | (on_level & (second > bound))).to(tl.int32)
        tied = (on_level & (second == bound)).to(tl.int32)
        sums = tl.cumsum(better + (tied << 16))  # both counts, which are below 2**16 in a block
        better_before, tied_before = (sums & 0xFFFF) - better, (sums >> 16) - tied
        place = written + better_before + tl.minimum(tied_before, ties)
        take = ((better > 0) | ((tied > 0) & (tied_before < ties))) & (place < k)  # k are taken at most, unless somebody changes them meanwhile
        tl.store(merged_values_ptr + place, scores, mask=take)
        tl.store(merged_indices_ptr + place, indices, mask=take)
        taken = tl.minimum(tl.sum(tied), ties)
        written += tl.sum(better) + taken
        ties -= taken
        begin += BLOCK

    written = tl.minimum(written, k)
    tl.debug_barrier()  # all have written what is read here
    lane = tl.arange(0, LANES)
    scores = tl.load(merged_values_ptr + lane, mask=lane < written, other=0)
    indices = tl.load(merged_indices_ptr + lane, mask=lane < written, other=0)
    tl.debug_barrier()  # all have read what is overwritten below
    keys = tl.sort(tl.where(lane < written, _sorting_key(scores, indices), _LAST))
    tl.store(merged_values_ptr + lane, _score(keys, merged_values_ptr.dtype.element_ty), mask=lane < k)
    tl.store(merged_indices_ptr + lane, tl.where(lane < written, (keys >> 32).to(tl.int32), -1), mask=lane < k)


def topk_merge(values: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, candidates = values.shape
    merged_values, merged_indices = values.new_empty((rows, k)), indices.new_empty((rows, k))
    block, lanes = min(triton.next_power_of_2(max(candidates, 16)), WIDEST), triton.next_power_of_2(max(k, 16))
    launch(
        topk_merge_kernel, rows, values.device, merged_values, merged_indices, values, indices, values.stride(0), indices.stride(0), candidates, k,
        VALUE_STRIDE=values.stride(1), INDEX_STRIDE=indices.stride(1), BLOCK=block, LANES=lanes,
        num_warps=min(16, max(1, max(block, lanes) // (32 * EACH))),
    )  # fmt: skip
    return merged_values, merged_indices
