"""Clamped SwiGLU in one pass over tiles of rows and columns; parameters are the call's, or those of each row's expert."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .kv_cache import rounded_to_bf16
from .launching import compile_once, launch, tile, wait_for_inputs

ELEMENTS = 1024  # of a program's tile: 8 a thread
WARPS = 4
ALIGNMENT = 8
"""Bytes that addresses of rows are multiples of, where loads are as wide."""

_ALIGNMENT = tl.constexpr(ALIGNMENT)
_LOG2_E = tl.constexpr(1.4426950216293335)  # in fp32, and what it leaves
_LOG2_E_REST = tl.constexpr(1.925963033500011e-08)
_LARGEST = tl.constexpr(88.72)  # e**88.73 is past fp32
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp(x):
    """e**x of fp32 to about 2**-22: the rounding of ``x * log2(e)``, which alone would cost 2**-18 at 88, is made up for."""
    bounded = tl.where(x < -105.0, -105.0, x)
    power = bounded * _LOG2_E
    rest = tl.fma(bounded, _LOG2_E_REST, tl.fma(bounded, _LOG2_E, -power))
    near = tl.exp2(power)
    return tl.where(x > _LARGEST, float("inf"), tl.fma(near, rest * _LN_2, near))


@compile_once(aligned=("out_ptr",))
def swiglu_kernel(
    gate_up_ptr, size1, size2, stride0, stride1, stride2, column_stride, out_ptr, rows, alpha, beta, limit,
    ids_ptr, ids_stride, alpha_ptr, alpha_stride, beta_ptr, beta_stride, limit_ptr, limit_stride, experts,
    WIDTH: tl.constexpr, DIMENSIONS: tl.constexpr, INTERLEAVED: tl.constexpr, DENSE: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_LIMIT: tl.constexpr, PER_EXPERT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = program % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    here = row < rows
    live = here
    if PER_EXPERT:
        expert = tl.load(ids_ptr + row * ids_stride, mask=here, other=-1).to(tl.int64)
        live = here & (expert >= 0) & (expert < experts)
        alpha = tl.load(alpha_ptr + expert * alpha_stride, mask=live, other=0.0)[:, None]
        beta = tl.load(beta_ptr + expert * beta_stride, mask=live, other=0.0)[:, None]
        limit = tl.load(limit_ptr + expert * limit_stride, mask=live, other=1.0)[:, None]
        beta = tl.where(beta == 0, -0.0, beta)  # adding -0.0 changes no value, not even -0.0
    # The last of up to three outer dimensions runs fastest.
    if DIMENSIONS == 1:
        start = row * stride2
    elif DIMENSIONS == 2:
        start = row // size2 * stride1 + row % size2 * stride2
    else:
        start = row // size2 // size1 * stride0 + row // size2 % size1 * stride1 + row % size2 * stride2
    inside = live[:, None] & (column < WIDTH)[None, :]
    if INTERLEAVED:
        gates = gate_up_ptr + start
        if ALIGNED:
            gates = tl.multiple_of(gates, _ALIGNMENT)
        if DENSE:
            pairs = gates[:, None, None] + (2 * column.to(tl.int64))[None, :, None] + tl.arange(0, 2)[None, None, :]
            gate, up = tl.split(tl.load(pairs, mask=inside[:, :, None], other=0.0))
        else:
            gate = tl.load(gates[:, None] + 2 * column.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
            up = tl.load((gates + column_stride)[:, None] + 2 * column.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
    else:
        gates = gate_up_ptr + start
        ups = gate_up_ptr + (start + WIDTH * column_stride.to(tl.int64))
        if ALIGNED:
            gates = tl.multiple_of(gates, _ALIGNMENT)
            ups = tl.multiple_of(ups, _ALIGNMENT)
        if DENSE:
            gate = tl.load(gates[:, None] + column[None, :], mask=inside, other=0.0)
            up = tl.load(ups[:, None] + column[None, :], mask=inside, other=0.0)
        else:
            gate = tl.load(gates[:, None] + column.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
            up = tl.load(ups[:, None] + column.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if HAS_LIMIT:  # comparisons let NaN pass
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
    if HAS_BETA:
        up = up + beta
    result = tl.div_rn(gate, 1.0 + _exp(gate * -alpha)) * up
    if PER_EXPERT:
        result = tl.where(live[:, None], tl.where(limit > 0, result, float("nan")), 0.0)
    place = out_ptr + row[:, None] * WIDTH + column[None, :]
    stored = here[:, None] & (column < WIDTH)[None, :]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(place, rounded_to_bf16(result.to(tl.int32, bitcast=True)).to(tl.bfloat16, bitcast=True), mask=stored)
    else:
        tl.store(place, result, mask=stored)


def swiglu(
    gate_up: torch.Tensor,
    alpha: float | torch.Tensor,
    beta: float | torch.Tensor,
    limit: float | torch.Tensor | None,
    interleaved: bool,
    expert_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Numbers for all rows, or with ``expert_ids`` tensors ``[num_experts]``."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel() == 0:
        return out
    outer = gate_up.dim() - 1
    sizes, strides = (1,) * (3 - outer) + tuple(gate_up.shape[:-1]), (0,) * (3 - outer) + tuple(gate_up.stride()[:-1])
    rows, columns, parts = tile(width, ELEMENTS)
    unit = gate_up.element_size()
    dense = gate_up.stride(-1) == 1
    row_strides = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]
    aligned = dense and all(offset * unit % ALIGNMENT == 0 for offset in (*row_strides, 0 if interleaved else width)) and gate_up.data_ptr() % ALIGNMENT == 0
    numbers: tuple[Any, ...] = (0.0, 0.0, 1.0)
    tensors: tuple[Any, ...] = (None, 0) * 4
    experts, has_beta = 0, True
    if expert_ids is None:
        numbers, has_beta = (alpha, beta, 1.0 if limit is None else limit), bool(beta != 0)
    else:
        tensors = tuple(item for tensor in (expert_ids, alpha, beta, limit) for item in (tensor, tensor.stride(0)))  # type: ignore[union-attr]
        experts = alpha.shape[0]  # type: ignore[union-attr]
    count = out.numel() // width
    launch(
        swiglu_kernel, triton.cdiv(count, rows) * parts, gate_up.device, gate_up, sizes[1], sizes[2], *strides, gate_up.stride(-1), out, count, *map(float, numbers),
        *tensors, experts,
        WIDTH=width, DIMENSIONS=max(outer, 1), INTERLEAVED=interleaved, DENSE=dense, ALIGNED=aligned, HAS_BETA=has_beta, HAS_LIMIT=limit is not None,
        PER_EXPERT=expert_ids is not None, ROWS=rows, COLUMNS=columns, PARTS=parts, num_warps=WARPS,
    )  # fmt: skip
    return out
