"""Sparse MLA decode: programs of (token, block of heads, split of keys), then one launch that combines the splits of a token.

Keys are the second operand of both products (``Q [heads, 512] @ K^T`` and ``P [heads, keys] @ K``), so that one tile of decoded keys in shared
memory serves both. A row of 512 is four parts whose widths are powers of two: 256 + 128 + 64 columns of codes and 64 of bf16.

How keys are split follows from widths and dtypes alone: finely, for few tokens, whose time is that of one program and of the combination,
which costs many tokens dearly. Many tokens are run in slices that share one scratch buffer: a program does the same whatever the
slice, so a row keeps its bits. Products are bf16 with fp32 sums; as soon as q or a cache is fp32, all are fp32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..kv_cache import GROUP, HEAD_DIM, NOPE_DIM, ROW_BYTES, SCALE_BYTES
from ..workspace import workspace_manager
from .launching import compile_once, launch, wait_for_inputs

HOPPER = (64, 64, 8, True)
HOPPER_SHORT = (64, 32, 8, True)
OTHERS = (16, 32, 8, False)
EXACT = (16, 16, 4, False)
"""Heads of a block, keys of a tile, warps of a program, and whether an instruction decodes e4m3. Blocks are smaller where an operand of a
product stands in registers: but for Hopper (Triton 3.6 makes of the large one a kernel that traps on sm_100, and more than sm_120 has
shared memory), and for fp32 products."""
SHORT = 256
"""Columns of both segments up to which rows are split finer on Hopper. On an H200 a program takes about 8 us for 32 keys and 10 us for 64, most of it
the same for any number of keys; more programs pay while those of a few tokens run at once, and what they store for the combination is small."""
COMBINE_WARPS = 4
MAX_SPLITS = 16
SCRATCH_BYTES = 64 << 20

_HEAD_DIM = tl.constexpr(HEAD_DIM)
_NOPE_DIM = tl.constexpr(NOPE_DIM)
_GROUP = tl.constexpr(GROUP)
_ROW_BYTES = tl.constexpr(ROW_BYTES)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_LOG2_E = tl.constexpr(1 / math.log(2))
_LN_2 = tl.constexpr(math.log(2))
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _rows(base, offset, ALIGNMENT: tl.constexpr):
    """Pointers to rows, whose addresses are known to be multiples of ``ALIGNMENT`` bytes."""
    pointers = base + offset
    if ALIGNMENT > 1:
        pointers = tl.multiple_of(pointers, ALIGNMENT)
    return pointers


_INTERPRETED = tl.constexpr(not isinstance(_rows, triton.JITFunction))
"""The interpreter multiplies the bits of bf16 values."""


@triton.jit
def _product(a, b, sums):
    """``a @ b + sums`` in fp32."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _decode(code, exponent, KEYS: tl.constexpr, WIDTH: tl.constexpr, CONVERTS: tl.constexpr):
    """fp32 values of e4m3 codes ``[KEYS, WIDTH]`` with UE8M0 exponents ``[KEYS, WIDTH // 64]`` (int32)."""
    scale = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23)).to(tl.float32, bitcast=True)
    if CONVERTS:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
        return tl.reshape(tl.reshape(value, [KEYS, WIDTH // _GROUP, _GROUP]) * scale[:, :, None], [KEYS, WIDTH])
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    # Exponent and mantissa moved to their places in fp32 mean 2**-120 of the value, also below 2**-6, where both formats are subnormal.
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 2.0**120
    value = tl.reshape(tl.reshape(value, [KEYS, WIDTH // _GROUP, _GROUP]) * scale[:, :, None], [KEYS, WIDTH])
    bits = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return tl.where(magnitude == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load_part(cache_ptr, page, offset, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Columns ``[FIRST, FIRST + WIDTH)`` as they are stored, and their exponents where they are codes. Zeros where not ``valid``: nothing is read there."""
    column = tl.arange(0, WIDTH)
    if cache_ptr.dtype.element_ty == tl.uint8:
        data = _rows(cache_ptr, page + offset * _ROW_BYTES + FIRST, ALIGNMENT)
        if FIRST < _NOPE_DIM:
            group = FIRST // _GROUP + tl.arange(0, WIDTH // _GROUP)
            scales = cache_ptr + page + BLOCK_SIZE * _ROW_BYTES + offset * _SCALE_BYTES
            part = tl.load(data[:, None] + column[None, :], mask=valid[:, None], other=0)
            exponent = tl.load(scales[:, None] + group[None, :], mask=valid[:, None], other=0)
        elif ALIGNMENT > 1:
            source = tl.multiple_of(data.to(tl.pointer_type(tl.int16), bitcast=True), ALIGNMENT)
            part = tl.load(source[:, None] + column[None, :], mask=valid[:, None], other=0).to(tl.bfloat16, bitcast=True)
            exponent = part
        else:
            low = tl.load(data[:, None] + 2 * column[None, :], mask=valid[:, None], other=0).to(tl.int16)
            high = tl.load(data[:, None] + (2 * column + 1)[None, :], mask=valid[:, None], other=0).to(tl.int16)
            part = (low | (high << 8)).to(tl.bfloat16, bitcast=True)
            exponent = part
    else:
        data = _rows(cache_ptr, page + offset * _HEAD_DIM + FIRST, ALIGNMENT)
        part = tl.load(data[:, None] + column[None, :], mask=valid[:, None], other=0.0)
        exponent = part
    return part, exponent


@triton.jit
def _keys(part, exponent, PRODUCTS: tl.constexpr, CONVERTS: tl.constexpr):
    if part.dtype == tl.uint8:
        part = _decode(part, exponent.to(tl.int32), part.shape[0], part.shape[1], CONVERTS)
    return part.to(PRODUCTS)


@triton.jit
def _load_query(row, live, FIRST: tl.constexpr, WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr, PRODUCTS: tl.constexpr):
    source = _rows(row, FIRST, ALIGNMENT) if FIRST > 0 else row  # a sum with 0 is folded away, and what is known of it with it
    return tl.load(source[:, None] + tl.arange(0, WIDTH)[None, :], mask=live[:, None], other=0.0).to(PRODUCTS)


@triton.jit
def _tile(top, total, o0, o1, o2, o3, q_row, live, cache_ptr, page_stride, slots_end, slot, here, scale,
          BLOCK_SIZE: tl.constexpr, ALIGNMENT: tl.constexpr, Q_ALIGNMENT: tl.constexpr, PRODUCTS: tl.constexpr, CONVERTS: tl.constexpr):  # fmt: skip
    """What ``_attend`` keeps, after the keys in ``slot``. All loads are under way before any result is needed, those of the cache first."""
    slot = slot.to(tl.int64)
    valid = here & (slot >= 0) & (slot < slots_end)
    slot = tl.where(valid, slot, 0)
    page, offset = slot // BLOCK_SIZE * page_stride, slot % BLOCK_SIZE
    k0, e0 = _load_part(cache_ptr, page, offset, valid, 0, 256, BLOCK_SIZE, ALIGNMENT)
    k1, e1 = _load_part(cache_ptr, page, offset, valid, 256, 128, BLOCK_SIZE, ALIGNMENT)
    k2, e2 = _load_part(cache_ptr, page, offset, valid, 384, 64, BLOCK_SIZE, ALIGNMENT)
    k3, e3 = _load_part(cache_ptr, page, offset, valid, 448, 64, BLOCK_SIZE, ALIGNMENT)
    q0 = _load_query(q_row, live, 0, 256, Q_ALIGNMENT, PRODUCTS)
    q1 = _load_query(q_row, live, 256, 128, Q_ALIGNMENT, PRODUCTS)
    q2 = _load_query(q_row, live, 384, 64, Q_ALIGNMENT, PRODUCTS)
    q3 = _load_query(q_row, live, 448, 64, Q_ALIGNMENT, PRODUCTS)
    k0, k1, k2, k3 = _keys(k0, e0, PRODUCTS, CONVERTS), _keys(k1, e1, PRODUCTS, CONVERTS), _keys(k2, e2, PRODUCTS, CONVERTS), _keys(k3, e3, PRODUCTS, CONVERTS)
    logits = _product(q0, tl.trans(k0), tl.zeros([live.shape[0], slot.shape[0]], tl.float32))
    logits = _product(q1, tl.trans(k1), logits)
    logits = _product(q2, tl.trans(k2), logits)
    logits = _product(q3, tl.trans(k3), logits)
    logits = tl.where(valid[None, :], logits * scale, -_INFINITY)
    new = tl.maximum(top, tl.max(logits, 1))
    finite = tl.where(new == -_INFINITY, 0.0, new)
    rescale = tl.exp2(top - finite)
    weights = tl.exp2(logits - finite[:, None])
    total = total * rescale + tl.sum(weights, 1)
    weights = weights.to(PRODUCTS)
    o0 = _product(weights, k0, o0 * rescale[:, None])
    o1 = _product(weights, k1, o1 * rescale[:, None])
    o2 = _product(weights, k2, o2 * rescale[:, None])
    o3 = _product(weights, k3, o3 * rescale[:, None])
    return new, total, o0, o1, o2, o3


@triton.jit
def _attend(q_row, live, cache_ptr, page_stride, slots_end, indices_ptr, lens_ptr, token, indices_stride, lens_stride, split, scale,
            WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALIGNMENT: tl.constexpr, Q_ALIGNMENT: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
            PRODUCTS: tl.constexpr, CONVERTS: tl.constexpr):  # fmt: skip
    """Of one split of one segment: largest logit and sum of weights (log2 domain), and the four parts of the weighted sum ``[heads, columns]``."""
    HEADS: tl.constexpr = live.shape[0]
    top = tl.full([HEADS], -_INFINITY, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    o0, o1 = tl.zeros([HEADS, 256], tl.float32), tl.zeros([HEADS, 128], tl.float32)
    o2, o3 = tl.zeros([HEADS, 64], tl.float32), tl.zeros([HEADS, 64], tl.float32)
    row = indices_ptr + token * indices_stride
    begin = split * (TILES * KEYS)
    length = tl.load(lens_ptr + token * lens_stride)
    column = begin + tl.arange(0, KEYS)
    slot = tl.load(row + column, mask=column < WIDTH, other=-1)  # columns past the length too: it need not be waited for
    length = tl.minimum(tl.maximum(length, 0), WIDTH).to(tl.int32)
    end = tl.minimum(length, begin + TILES * KEYS)
    if TILES == 1:  # no loop: sums that a loop carries would occupy registers while keys are decoded
        if begin < end:
            top, total, o0, o1, o2, o3 = _tile(
                top, total, o0, o1, o2, o3, q_row, live, cache_ptr, page_stride, slots_end, slot, column < length, scale, BLOCK_SIZE, ALIGNMENT, Q_ALIGNMENT,
                PRODUCTS, CONVERTS,
            )  # fmt: skip
    else:
        while begin < end:
            top, total, o0, o1, o2, o3 = _tile(
                top, total, o0, o1, o2, o3, q_row, live, cache_ptr, page_stride, slots_end, slot, column < length, scale, BLOCK_SIZE, ALIGNMENT, Q_ALIGNMENT,
                PRODUCTS, CONVERTS,
            )  # fmt: skip
            begin += KEYS
            column += KEYS
            slot = tl.load(row + column, mask=column < end, other=-1)
    return top, total, o0, o1, o2, o3


@triton.jit
def _share(level, sink_ptr, offset, live, SINK: tl.constexpr):
    """The part of the denominator that belongs to keys: 1 without a sink, 0 without a key. ``level`` is the lse in log2."""
    share = tl.where(level == -_INFINITY, 0.0, 1.0)
    if SINK:
        sink = tl.load(sink_ptr + offset, mask=live, other=0.0).to(tl.float32) * _LOG2_E
        share = tl.where(level == -_INFINITY, 0.0, 1.0 / (1.0 + tl.exp2(sink - level)))
    return share


@triton.jit
def _store_part(row, part, factor, keep, live, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """``part * factor`` where ``keep``, else 0."""
    values = tl.where(keep[:, None], part * factor[:, None], 0.0)
    column = FIRST + tl.arange(0, WIDTH)
    tl.store(row[:, None] + column[None, :], values.to(row.dtype.element_ty), mask=live[:, None])


@triton.jit
def _store(top, total, o0, o1, o2, o3, out_ptr, lse_ptr, sink_ptr, sink_stride, partial_ptr, top_ptr, total_ptr, token, partial, head, HEADS: tl.constexpr,
           SPLITS: tl.constexpr, SINK: tl.constexpr):  # fmt: skip
    """The result of the only split, or the sums of one of several: zeros and -inf without a key."""
    live = head < HEADS
    keep = total != 0.0
    if SPLITS == 1:
        divisor = tl.where(keep, total, 1.0)
        level = tl.where(keep, top + tl.log2(divisor), -_INFINITY)
        tl.store(lse_ptr + token * HEADS + head, level * _LN_2, mask=live)
        factor = _share(level, sink_ptr, head * sink_stride, live, SINK) / divisor
        row = out_ptr + (token * HEADS + head) * _HEAD_DIM
    else:
        tl.store(top_ptr + partial * HEADS + head, tl.where(keep, top, -_INFINITY), mask=live)
        tl.store(total_ptr + partial * HEADS + head, total, mask=live)
        factor = tl.where(keep, 1.0, 0.0)
        row = partial_ptr + (partial * HEADS + head) * _HEAD_DIM
    _store_part(row, o0, factor, keep, live, 0, 256)
    _store_part(row, o1, factor, keep, live, 256, 128)
    _store_part(row, o2, factor, keep, live, 384, 64)
    _store_part(row, o3, factor, keep, live, 448, 64)


@compile_once(aligned=("out_ptr", "lse_ptr", "partial_ptr", "top_ptr", "total_ptr"))
def attend_kernel(
    out_ptr,
    lse_ptr,
    partial_ptr,
    top_ptr,
    total_ptr,
    q_ptr,
    swa_ptr,
    swa_indices_ptr,
    swa_lens_ptr,
    extra_ptr,
    extra_indices_ptr,
    extra_lens_ptr,
    sink_ptr,
    scale,
    start,
    q_stride,
    q_head_stride,
    swa_page_stride,
    swa_slots_end,
    swa_indices_stride,
    swa_lens_stride,
    extra_page_stride,
    extra_slots_end,
    extra_indices_stride,
    extra_lens_stride,
    sink_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    SWA_SPLITS: tl.constexpr,
    SWA_WIDTH: tl.constexpr,
    SWA_BLOCK_SIZE: tl.constexpr,
    SWA_ALIGNMENT: tl.constexpr,
    EXTRA_WIDTH: tl.constexpr,
    EXTRA_BLOCK_SIZE: tl.constexpr,
    EXTRA_ALIGNMENT: tl.constexpr,
    Q_ALIGNMENT: tl.constexpr,
    EXACT: tl.constexpr,
    CONVERTS: tl.constexpr,
    SINK: tl.constexpr,
):
    wait_for_inputs()
    BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    PRODUCTS: tl.constexpr = tl.float32 if EXACT else tl.bfloat16
    # Blocks of heads that read the same keys run side by side.
    block = tl.program_id(0) % BLOCKS
    split = tl.program_id(0) // BLOCKS % SPLITS
    slice_token = (tl.program_id(0) // (BLOCKS * SPLITS)).to(tl.int64)
    token = start + slice_token
    partial = slice_token * SPLITS + split
    head = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = head < HEADS
    q_row = _rows(q_ptr, token * q_stride + head * q_head_stride, Q_ALIGNMENT)
    log2_scale = scale * _LOG2_E
    if split < SWA_SPLITS:
        top, total, o0, o1, o2, o3 = _attend(
            q_row, live, swa_ptr, swa_page_stride, swa_slots_end, swa_indices_ptr, swa_lens_ptr, token, swa_indices_stride, swa_lens_stride, split, log2_scale,
            SWA_WIDTH, SWA_BLOCK_SIZE, SWA_ALIGNMENT, Q_ALIGNMENT, KEYS, TILES, PRODUCTS, CONVERTS,
        )  # fmt: skip
        _store(top, total, o0, o1, o2, o3, out_ptr, lse_ptr, sink_ptr, sink_stride, partial_ptr, top_ptr, total_ptr, token, partial, head, HEADS, SPLITS, SINK)
    else:
        top, total, o0, o1, o2, o3 = _attend(
            q_row, live, extra_ptr, extra_page_stride, extra_slots_end, extra_indices_ptr, extra_lens_ptr, token, extra_indices_stride, extra_lens_stride,
            split - SWA_SPLITS, log2_scale, EXTRA_WIDTH, EXTRA_BLOCK_SIZE, EXTRA_ALIGNMENT, Q_ALIGNMENT, KEYS, TILES, PRODUCTS, CONVERTS,
        )  # fmt: skip
        _store(top, total, o0, o1, o2, o3, out_ptr, lse_ptr, sink_ptr, sink_stride, partial_ptr, top_ptr, total_ptr, token, partial, head, HEADS, SPLITS, SINK)


@compile_once(aligned=("out_ptr", "lse_ptr", "partial_ptr", "top_ptr", "total_ptr"))
def combine_kernel(
    out_ptr, lse_ptr, partial_ptr, top_ptr, total_ptr, sink_ptr, start, sink_stride,
    HEADS: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    slice_token = (tl.program_id(0) // HEADS).to(tl.int64)
    split, column = tl.arange(0, LANES), tl.arange(0, _HEAD_DIM)
    partial = (slice_token * SPLITS + split) * HEADS + head
    here = split < SPLITS
    # Sums of splits without a key were stored as zeros, so that these loads need not wait for one another.
    tops = tl.load(top_ptr + partial, mask=here, other=-_INFINITY)
    totals = tl.load(total_ptr + partial, mask=here, other=0.0)
    sums = tl.load(partial_ptr + partial[:, None] * _HEAD_DIM + column[None, :], mask=here[:, None], other=0.0)
    top = tl.max(tops, 0)
    top = tl.where(top == -_INFINITY, 0.0, top)
    weights = tl.exp2(tops - top)
    total = tl.sum(weights * totals, 0)
    level = tl.where(total == 0.0, -_INFINITY, top + tl.log2(tl.where(total == 0.0, 1.0, total)))
    # The divisor is added up a second time, in the order of the dividend: keys that are all the same come out as they are.
    divisor = tl.sum(tl.broadcast_to((weights * totals)[:, None], [LANES, _HEAD_DIM]), 0)
    result = tl.div_rn(tl.sum(weights[:, None] * sums, 0), tl.where(divisor == 0.0, 1.0, divisor))
    result *= _share(level, sink_ptr, head * sink_stride, True, SINK)
    row = (start + slice_token) * HEADS + head
    tl.store(out_ptr + row * _HEAD_DIM + column, result.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row, level * _LN_2)


def _alignment(tensor: torch.Tensor, *strides: int) -> int:
    """The widest access, in bytes, at which rows ``strides`` apart start; 1 below 8 bytes."""
    common = math.gcd(tensor.data_ptr(), 16, *(stride * tensor.element_size() for stride in strides))
    return common if common >= 8 else 1


def shape_of_programs(device: torch.device, width: int) -> tuple[int, int, int, bool]:
    """How programs whose products are bf16 are made there, for rows of ``width`` columns."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        return OTHERS
    return HOPPER_SHORT if width <= SHORT else HOPPER


def split_keys(swa_width: int, extra_width: int, keys: int) -> tuple[int, int, int]:
    """Tiles of ``keys`` columns of one split, splits of the window, and splits of the extra segment."""
    swa, extra = triton.cdiv(swa_width, keys), triton.cdiv(extra_width, keys)
    tiles = 1
    while triton.cdiv(swa, tiles) + triton.cdiv(extra, tiles) > MAX_SPLITS:
        tiles += 1
    return tiles, triton.cdiv(swa, tiles), triton.cdiv(extra, tiles)


def sparse_mla_decode(
    q: torch.Tensor,
    swa: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    extra: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    attn_sink: torch.Tensor | None,
    scale: float,
    lane: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A segment is (cache, indices, lens)."""
    tokens, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    if tokens == 0 or heads == 0:
        return out, lse
    second = swa if extra is None else extra
    exact = torch.float32 in (q.dtype, swa[0].dtype, second[0].dtype)
    widths = swa[1].shape[1], 0 if extra is None else extra[1].shape[1]
    block, keys, warps, converts = EXACT if exact else shape_of_programs(q.device, sum(widths))
    blocks = triton.cdiv(heads, block)
    tiles, swa_splits, extra_splits = split_keys(*widths, keys)
    if extra_splits == 0:
        swa_splits = max(swa_splits, 1)  # without a column, one program writes that there is no key
    splits = swa_splits + extra_splits
    at_once, partial, top, total = tokens, out, lse, lse
    if splits > 1:
        at_once = min(tokens, max(1, SCRATCH_BYTES // (splits * heads * HEAD_DIM * 4)))
        shape = (at_once, splits, heads)
        partial, top, total = workspace_manager(q.device).get(
            ((*shape, HEAD_DIM), torch.float32), (shape, torch.float32), (shape, torch.float32), lane=lane, op="sparse_mla_decode"
        )
    sink = lse if attn_sink is None else attn_sink
    strides: list[int] = []
    for cache, indices, lens in (swa, second):
        strides += [cache.stride(0), cache.shape[0] * cache.shape[1], indices.stride(0), lens.stride(0)]
    q_strides = (q.stride(0) if tokens > 1 else 0, q.stride(1) if heads > 1 else 0)  # a single row may have any stride, and must not be another kernel
    shared = {"HEADS": heads, "SPLITS": splits, "SINK": attn_sink is not None}
    for start in range(0, tokens, at_once):
        rows = min(at_once, tokens - start)
        launch(
            attend_kernel, rows * blocks * splits, q.device, out, lse, partial, top, total, q, *swa, *second, sink, scale, start, *q_strides, *strides, sink.stride(0),
            BLOCK=block, KEYS=keys, TILES=tiles, SWA_SPLITS=swa_splits, SWA_WIDTH=widths[0], SWA_BLOCK_SIZE=swa[0].shape[1],
            SWA_ALIGNMENT=_alignment(swa[0], swa[0].stride(0)), EXTRA_WIDTH=second[1].shape[1], EXTRA_BLOCK_SIZE=second[0].shape[1],
            EXTRA_ALIGNMENT=_alignment(second[0], second[0].stride(0)), Q_ALIGNMENT=_alignment(q, *q_strides), EXACT=exact, CONVERTS=converts, num_warps=warps, num_stages=1, **shared,
        )  # fmt: skip
        if splits > 1:
            launch(
                combine_kernel, rows * heads, q.device, out, lse, partial, top, total, sink, start, sink.stride(0),
                LANES=triton.next_power_of_2(splits), num_warps=COMBINE_WARPS, **shared,
            )  # fmt: skip
    return out, lse
