"""Row-wise top-k, one program a row: for CUDA machines without the compiled part.

Scores become int32 keys of their order. The k-th largest key of a row is found two bits at a time, by counting how many
keys reach each of three bounds; then the columns above it and the first of those equal to it are written in order. A
row is read once for each two bits and once for writing, in blocks, whatever its scores; every loop ends by its length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elements import narrowed, reached
from .launching import compile_once, wait_for_inputs
from .launching import launch as start

BLOCK, WARPS = 2048, 8


@triton.jit
def _load(row_ptr, begin, length, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Columns from ``begin`` on, their scores, and int32 keys that order them; NaN and columns past ``length`` have the lowest key of all."""
    columns = begin + tl.arange(0, BLOCK)
    within = columns < length
    scores = tl.load(row_ptr + columns, mask=within, other=0)
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    if BITS == 32:
        bits = scores.to(tl.int32, bitcast=True)
        infinity: tl.constexpr = 0x7F800000
    else:
        bits = scores.to(tl.int16, bitcast=True).to(tl.int32)
        infinity: tl.constexpr = 0x7F80  # type: ignore[no-redef]
    magnitude = bits & (-1 - LOWEST)
    keys = tl.where(bits < 0, -magnitude, magnitude)  # equal zeros have equal keys
    return columns, scores, tl.where(within & (magnitude <= infinity), keys, LOWEST)


@compile_once(aligned=("values_ptr", "indices_ptr"))
def topk_kernel(
    logits_ptr, row_stride, lengths_ptr, entries, inner, outer_stride, inner_stride, limit, k, values_ptr, indices_ptr,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Length of row i: element ``[i // inner, i % inner]`` of ``lengths``, 0 from row ``entries`` on, at most ``limit``."""
    wait_for_inputs()
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row // inner * outer_stride + row % inner * inner_stride, mask=row < entries, other=0).to(tl.int64)
    length = tl.minimum(length, limit)  # a negative one ends every loop at once
    row_ptr = logits_ptr + row * row_stride

    # ``bound``: the largest key that at least k columns reach, LOWEST if none; ``above``: how many pass it.
    bound = tl.full((), LOWEST, tl.int32)
    above = tl.full((), 0, tl.int32)
    step = tl.where(length > k, 1 << (BITS - 2), 0)
    while step > 0:
        reach_1 = tl.zeros((BLOCK,), tl.int32)
        reach_2 = tl.zeros((BLOCK,), tl.int32)
        reach_3 = tl.zeros((BLOCK,), tl.int32)
        begin = tl.full((), 0, tl.int64)
        while begin < length:
            _columns, _scores, keys = _load(row_ptr, begin, length, BLOCK, BITS)
            more_1, more_2, more_3 = reached(keys, bound, step)
            reach_1 += more_1
            reach_2 += more_2
            reach_3 += more_3
            begin += BLOCK
        bound, above = narrowed(bound, above, step, tl.sum(reach_1), tl.sum(reach_2), tl.sum(reach_3), k)
        step = step >> 2

    # Columns above the bound and the first ``k - above`` equal to it, in order. One running sum counts both: a block has
    # less than 2**16 of either.
    indices_ptr += row * k
    if values_ptr is not None:
        values_ptr += row * k
    written = tl.full((), 0, tl.int32)
    ties = k - above
    begin = tl.full((), 0, tl.int64)
    while begin < length:
        columns, scores, keys = _load(row_ptr, begin, length, BLOCK, BITS)
        better = (keys > bound).to(tl.int32)
        tied = ((keys == bound) & (keys > LOWEST)).to(tl.int32)
        sums = tl.cumsum(better + (tied << 16))
        better_before, tied_before = (sums & 0xFFFF) - better, (sums >> 16) - tied
        take = (better > 0) | ((tied > 0) & (tied_before < ties))
        place = written + better_before + tl.minimum(tied_before, ties)
        tl.store(indices_ptr + place, columns.to(tl.int32), mask=take)
        if values_ptr is not None:
            tl.store(values_ptr + place, scores, mask=take)
        block_tied = tl.minimum(tl.sum(tied), ties)
        written += tl.sum(better) + block_tied
        ties -= block_tied
        begin += BLOCK
    begin_rest = tl.full((), 0, tl.int32)
    while begin_rest < k:
        place = begin_rest + tl.arange(0, BLOCK)
        rest = (place >= written) & (place < k)
        tl.store(indices_ptr + place, -1, mask=rest)
        if values_ptr is not None:
            tl.store(values_ptr + place, float("-inf"), mask=rest)
        begin_rest += BLOCK


def arguments(logits, lengths, k, max_seq_len, values, indices):
    """What the kernel takes, but its constants."""
    width = logits.shape[1] if max_seq_len is None else min(logits.shape[1], max_seq_len)
    outer_stride = lengths.stride(0) if lengths.dim() == 2 else 0
    return (
        logits, logits.stride(0), lengths, lengths.numel(), max(lengths.shape[-1], 1), outer_stride, lengths.stride(-1), width, k, values, indices,
    )  # fmt: skip


def launch(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None, values: torch.Tensor | None, indices: torch.Tensor) -> None:
    """Fill ``indices`` and, where given, ``values``, both contiguous ``[rows, k]``."""
    start(
        topk_kernel, logits.shape[0], logits.device, *arguments(logits, lengths, k, max_seq_len, values, indices),
        BITS=8 * logits.element_size(), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
