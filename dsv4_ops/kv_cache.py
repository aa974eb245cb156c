"""Paged KV rows of the sparse MLA cache: insert new tokens, gather them back.

``kv_cache_insert`` is the only op of this package that mutates under ``torch.compile``: it writes ``cache`` and returns
nothing. ``kv_cache_gather`` undoes it.

============  ==========  ===================  ==================================================================
argument      dtype       shape                meaning
============  ==========  ===================  ==================================================================
kv            float32 or  [T, 512]             one row a token: 448 values without rotary, then 64 with; last
              bfloat16                         stride 1
cache         uint8       [blocks, B, 584] or  FP8 pages, laid out as below; ``stride(0)`` is the page stride in
                          [blocks, B, 1, 584]  bytes and may exceed ``B * 584`` (padded pages)
cache         float32 or  [blocks, B, 512] or  plain rows; ``stride(0)`` is the page stride, in elements
              bfloat16    [blocks, B, 1, 512]
slot_mapping  int64/32    [T]                  ``block * B + offset`` of each token
slots         int64/32    any                  the same, of the rows to read
returns       bfloat16    [*slots.shape, 512]  (gather) contiguous; the dtype of a float cache, bfloat16 of FP8 pages
============  ==========  ===================  ==================================================================

**Page layout (FP8).** A page is planar: the data rows of all its tokens first, 576 bytes each (448 e4m3 codes, then 64
bfloat16 values), then the scales of all its tokens, 8 bytes each (one UE8M0 exponent for each 64 codes, then a pad byte
that insert writes as 0). So the last dimension of the tensor is a size, not a place: token t of a page stands at byte
``576 * t`` and ``576 * B + 8 * t`` of the page, and only the page stride is read from the tensor.

**Which rows are skipped.** Insert writes nothing for a negative slot (``PAD_SLOT_ID`` or any other), a slot in block 0
(the null block) and a slot past the cache. When a slot occurs twice in one call, the last row wins. Gather gives zeros
for a negative slot or one past the cache; it reads block 0 like any other.

**Rounding.** The scale of 64 values is ``2 ** ceil(log2(max(amax, 1e-4) / 448))``; values are divided by *that* scale,
clamped to +-448 and rounded to nearest even, so what gather returns is exact in bfloat16. Values that are not finite
do not enter ``amax``, so that they harm no neighbour: +-inf is stored as the largest code of its group (+-448 times the
scale), NaN as the NaN code, and comes back as NaN. The rotary part and float caches keep NaN and inf as they are.

Scales are UE8M0 alone: there is no way to pass another scale, and every byte means ``2 ** (byte - 127)`` (255: NaN).
All offsets are 64-bit. Graph-safe: yes (no host reads). Only caches of nonzero stride can be written.

Replaces the fused quantize-and-insert of serving engines, and the dequantizing gather of their prefill paths.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from .errors import ArgumentDtypeError, ArgumentShapeError

__all__ = ["kv_cache_gather", "kv_cache_insert", "kv_page_bytes", "kv_page_offsets", "new_kv_cache"]

HEAD_DIM = 512
ROPE_DIM = 64
NOPE_DIM = HEAD_DIM - ROPE_DIM
GROUP = 64
GROUPS = NOPE_DIM // GROUP
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = GROUPS + 1
TOKEN_BYTES = ROW_BYTES + SCALE_BYTES
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4

_ANY_RANK = tuple(range(9))

KV_CACHE_INSERT = _registry.define("kv_cache_insert(Tensor kv, Tensor(a!) cache, Tensor slot_mapping) -> ()")
KV_CACHE_GATHER = _registry.define("kv_cache_gather(Tensor cache, Tensor slots) -> Tensor", out=("out",))


def kv_cache_insert(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write row t of ``kv`` at ``slot_mapping[t]`` of ``cache``, quantized when the cache is uint8. Returns nothing.

    Skips negative slots, block 0 and slots past the cache; of equal slots the last row wins. Raises ArgumentShapeError,
    ArgumentDtypeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops kv_cache_insert``.
    """
    KV_CACHE_INSERT(kv, cache, slot_mapping)


def kv_cache_gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of ``cache`` at ``slots``: ``[*slots.shape, 512]``, bfloat16 of FP8 pages, else in the cache's dtype.

    Zeros for a negative slot or one past the cache. Raises ArgumentShapeError, ArgumentDtypeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops kv_cache_gather``.
    """
    result: torch.Tensor = KV_CACHE_GATHER(cache, slots)
    return result


# Page geometry: plain Python.


def kv_page_bytes(block_size: int, align: int = 1) -> int:
    """Bytes of an FP8 page of ``block_size`` tokens, rounded up to a multiple of ``align`` (64 tokens: 37376; 576-aligned: 37440).

    Raises ArgumentError (out of range), ArgumentDtypeError (not an integer).
    """
    _checks.integer("kv_page_bytes", "block_size", block_size, 1)
    _checks.integer("kv_page_bytes", "align", align, 1)
    return -(-block_size * TOKEN_BYTES // align) * align


def kv_page_offsets(offset: int, block_size: int, row_bytes: int = ROW_BYTES, scale_bytes: int = SCALE_BYTES) -> tuple[int, int]:
    """Where token ``offset`` of a planar page stands, in bytes from the start of the page: its data and its scales.

    The defaults are the KV rows of this module; an indexer page (128 codes and one fp32 scale a token) is ``128, 4``.
    Raises ArgumentError (``offset`` outside the page), ArgumentDtypeError (not an integer).
    """
    _checks.integer("kv_page_offsets", "block_size", block_size, 1)
    _checks.integer("kv_page_offsets", "offset", offset, 0, block_size - 1)
    return offset * row_bytes, block_size * row_bytes + offset * scale_bytes


def new_kv_cache(
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype = torch.uint8,
    page_stride: int | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A zeroed cache ``[num_blocks, block_size, 584]`` (uint8) or ``[num_blocks, block_size, 512]`` (floats).

    ``page_stride`` (bytes of a uint8 page, elements of a float page) pads every page; the default is a dense page.
    Raises ArgumentError (another dtype, sizes below 1, ``page_stride`` below a dense page), ArgumentDtypeError.
    """
    where = "new_kv_cache"
    _checks.one_of(where, "dtype", dtype, (torch.uint8, torch.bfloat16, torch.float32))
    _checks.integer(where, "num_blocks", num_blocks, 1)
    _checks.integer(where, "block_size", block_size, 1)
    width = TOKEN_BYTES if dtype == torch.uint8 else HEAD_DIM
    stride = block_size * width if page_stride is None else page_stride
    _checks.integer(where, "page_stride", stride, block_size * width)
    return torch.zeros(num_blocks, stride, dtype=dtype, device=device).as_strided((num_blocks, block_size, width), (stride, width, 1))


# Helpers of both ops, and of the attention that reads these caches.


def check_cache(where: str, name: str, cache: torch.Tensor) -> None:
    """``cache`` is one of the forms of the table above."""
    _checks.tensor(where, name, cache, (torch.uint8, torch.bfloat16, torch.float32), (3, 4))
    width = TOKEN_BYTES if cache.dtype == torch.uint8 else HEAD_DIM
    kind = "FP8 pages (uint8)" if cache.dtype == torch.uint8 else str(cache.dtype).removeprefix("torch.")
    if cache.shape[-1] != width or (cache.dim() == 4 and cache.shape[2] != 1):
        fix = "A token takes 448 + 128 + 8 = 584 bytes, not 512." if cache.dtype == torch.uint8 else "FP8 pages are uint8."
        raise ArgumentShapeError(where, name, f"[blocks, B, {width}] or [blocks, B, 1, {width}] for {kind}", f"shape {list(cache.shape)}", fix)
    block_size = cache.shape[1]
    if block_size < 1:
        raise ArgumentShapeError(where, name, "of at least one token a block", f"shape {list(cache.shape)}")
    if cache.stride(-1) != 1 or (block_size > 1 and cache.stride(1) != width):
        raise ArgumentShapeError(where, name, f"dense inside a page (strides [any, {width}, 1])", f"strides {list(cache.stride())}", "Only the page stride is free.")
    if cache.shape[0] > 1 and cache.stride(0) < block_size * width:
        raise ArgumentShapeError(where, name, f"of pages that do not overlap (stride(0) at least {block_size * width})", f"strides {list(cache.stride())}")


def _planes(cache: torch.Tensor) -> list[torch.Tensor]:
    """The planes of a cache as ``[blocks, B, row]`` views: data and scales of FP8 pages, or the rows of a float cache."""
    blocks, block_size, page = cache.shape[0], cache.shape[1], cache.stride(0)
    start = cache.storage_offset()
    if cache.dtype != torch.uint8:
        return [cache.as_strided((blocks, block_size, HEAD_DIM), (page, HEAD_DIM, 1), start)]
    return [
        cache.as_strided((blocks, block_size, ROW_BYTES), (page, ROW_BYTES, 1), start),
        cache.as_strided((blocks, block_size, SCALE_BYTES), (page, SCALE_BYTES, 1), start + block_size * ROW_BYTES),
    ]


def _take(plane: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Rows of one plane: ``[n, row]``. ``block`` and ``offset`` are int64 and in range."""
    blocks, block_size, row = plane.shape
    page = plane.stride(0)
    if blocks > 1 and page % row:
        return plane[block, offset]
    # A page stride of whole rows (dense pages, and the usual padded ones) makes the plane one flat table: index_select copies
    # whole rows, which is several times faster on a CPU than indexing by two tensors.
    span = page // row if blocks > 1 else block_size
    return plane.as_strided(((blocks - 1) * span + block_size, row), (row, 1)).index_select(0, block * span + offset)


def read_rows(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[n, 512]`` of ``cache`` at int64 ``slots`` [n], all of them inside the cache, converted to ``dtype``."""
    block_size = cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    rows = [_take(plane, block, offset) for plane in _planes(cache)]
    return (rows[0] if cache.dtype != torch.uint8 else _decode(*rows)).to(dtype)


def _encode(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 data rows uint8 ``[n, 576]`` and scale rows uint8 ``[n, 8]`` of ``kv`` [n, 512]."""
    values = kv[:, :NOPE_DIM].to(torch.float32).reshape(-1, GROUPS, GROUP)
    magnitude = values.abs()
    amax = torch.where(magnitude.isfinite(), magnitude, 0.0).amax(-1)
    ratio = amax.clamp(min=AMAX_FLOOR) / E4M3_MAX
    # The exponent field of the next power of two: adding the whole mantissa carries unless the mantissa is zero.
    exponent = (ratio.view(torch.int32) + 0x7FFFFF) >> 23
    inverse = ((254 - exponent) << 23).view(torch.float32)
    codes = (values * inverse.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = kv[:, NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
    scales = torch.nn.functional.pad(exponent.to(torch.uint8), (0, SCALE_BYTES - GROUPS))
    return torch.cat([codes.flatten(1), rope], 1), scales


def _decode(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 ``[n, 512]`` of FP8 data and scale rows."""
    # A table of the 256 codes: on a CPU five times as fast as converting them (0.26 against 1.40 ms for 1024 rows on one core).
    table = torch.arange(256, device=data.device).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    codes = table.index_select(0, data[:, :NOPE_DIM].reshape(-1).to(torch.int32)).view(-1, GROUPS, GROUP)
    scale = scales[:, :GROUPS].view(torch.float8_e8m0fnu).to(torch.float32)
    rope = data[:, NOPE_DIM:].view(torch.bfloat16).to(torch.float32)
    return torch.cat([(codes * scale.unsqueeze(-1)).flatten(1), rope], 1)


# kv_cache_insert


def _insert_check(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    where = "kv_cache_insert"
    _checks.tensor(where, "kv", kv, _checks.FLOATS, 2)
    _checks.shape(where, "kv", kv, (None, HEAD_DIM), f"[tokens, {HEAD_DIM}]")
    _checks.last_stride_one(where, "kv", kv)
    check_cache(where, "cache", cache)
    _checks.tensor(where, "slot_mapping", slot_mapping, (torch.int64, torch.int32), 1)
    _checks.shape(where, "slot_mapping", slot_mapping, (kv.shape[0],), "[tokens], one slot for each row of kv")
    _checks.same_device(where, kv=kv, cache=cache, slot_mapping=slot_mapping)


def _insert_reference(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    blocks, block_size = cache.shape[:2]
    for row, slot in zip(kv, slot_mapping.tolist(), strict=True):
        block, offset = divmod(slot, block_size)
        if not 1 <= block < blocks:
            continue
        if cache.dtype != torch.uint8:
            cache[block, offset].copy_(row.expand_as(cache[block, offset]))
            continue
        data, scales = kv_page_offsets(offset, block_size)
        page = cache.as_strided((block_size * TOKEN_BYTES,), (1,), cache.storage_offset() + block * cache.stride(0))
        for g in range(GROUPS):
            values = row[g * GROUP : (g + 1) * GROUP].double()
            finite = values[values.isfinite()].abs()
            amax = max(AMAX_FLOOR, float(finite.max()) if finite.numel() else 0.0)
            exponent = -127
            while 2.0**exponent < amax / E4M3_MAX:
                exponent += 1
            codes = (values / 2.0**exponent).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
            page[data + g * GROUP : data + (g + 1) * GROUP] = codes.view(torch.uint8)
            page[scales + g] = exponent + 127
        page[data + NOPE_DIM : data + ROW_BYTES] = row[NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
        page[scales + GROUPS] = 0


def _insert_torch(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    blocks, block_size = cache.shape[:2]
    if kv.shape[0] == 0 or blocks == 0:
        return
    slots = slot_mapping.to(torch.int64)
    valid = (slots >= block_size) & (slots < blocks * block_size)
    # A skipped row rewrites slot 0 with the bytes that are there: no valid row writes block 0, and nothing is read on the host.
    target = torch.where(valid, slots, 0)
    # Rows of one slot all write the last of them, so the order of the scatter does not matter.
    ordered, order = torch.sort(target, stable=True)
    last = order[torch.searchsorted(ordered, target, right=True) - 1]
    winners = kv[last]
    rows = [winners.to(cache.dtype)] if cache.dtype != torch.uint8 else list(_encode(winners))
    block, offset = target // block_size, target % block_size
    for plane, new in zip(_planes(cache), rows, strict=True):
        plane[block, offset] = torch.where(valid.unsqueeze(-1), new, plane[0, 0])


def _insert_triton(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    from ._triton import kv_cache as kernels

    kernels.kv_cache_insert(kv, cache, slot_mapping)


def _insert_fake(kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    return None


def _values(n: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    spread = torch.exp2(torch.randint(-24, 12, (n, HEAD_DIM // GROUP, 1), generator=generator).float())
    return (torch.randn(n, HEAD_DIM // GROUP, GROUP, generator=generator) * spread).flatten(1).to(dtype)


def _cache(blocks: int, block_size: int, generator: torch.Generator, dtype: torch.dtype = torch.uint8, pad: int = 0) -> torch.Tensor:
    width = TOKEN_BYTES if dtype == torch.uint8 else HEAD_DIM
    cache = new_kv_cache(blocks, block_size, dtype=dtype, page_stride=block_size * width + pad)
    for plane in _planes(cache):
        slots = torch.arange(blocks * block_size)
        rows = _values(blocks * block_size, generator, torch.float32)
        plane[slots // block_size, slots % block_size] = rows.to(dtype) if dtype != torch.uint8 else _encode(rows)[0 if plane.shape[2] == ROW_BYTES else 1]
    return cache


def _insert_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def make(label: str, slots: list[int], dtype: torch.dtype = torch.uint8, kv: torch.dtype = torch.bfloat16, block_size: int = 4, pad: int = 0) -> Sample:
        rows = _values(len(slots), generator, kv).to(device)
        cache = _padded_to(_cache(4, block_size, generator, dtype, pad), device)
        return Sample(label, (rows, cache, torch.tensor(slots, dtype=torch.int64, device=device)))

    extremes = [2**63 - 1, -(2**63), 2**31, -1, -2, 16, 0, 3]
    yield make("fp8 pages", [4, 15, 9])
    yield make("fp8 padded pages, skipped and repeated slots", [5, -1, 5, 0, 3, 16, 5, 12], pad=24, block_size=4)
    yield make("fp8 page stride that is no multiple of a row", [4, 7, 8], pad=6)
    yield make("every row skipped", extremes)
    yield make("no tokens", [])
    yield make("one token, fp32 input", [6], kv=torch.float32)
    yield make("one token a page", [1, 2, 3, 0], block_size=1)
    yield make("bf16 rows", [5, 5, -1, 14], torch.bfloat16, torch.float32)
    yield make("fp32 rows, padded pages, skipped slots", [*extremes, 7, 7, 4], torch.float32, pad=128)
    rows, cache, slots = make("4-D cache", [4, 6, 6]).args
    yield Sample("4-D cache, int32 slots", (rows, cache.unsqueeze(2), slots.int()))
    wide = _values(3, generator, torch.float32)
    wide[0, :5] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 3.0e38])
    wide[1, 64:128] = 0
    wide[2, 128:192], wide[2, 510] = float("nan"), float("inf")
    yield Sample("values that are not finite, and a group of zeros", (wide.to(device), _cache(4, 4, generator).to(device), torch.tensor([4, 9, 10], device=device)))
    strided = _values(6, generator, torch.bfloat16).to(device)[::2]
    yield Sample("strided rows", (strided, _cache(4, 4, generator).to(device), torch.tensor([4, 9, 4], device=device)))


def _padded_to(cache: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    base = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1)).to(device)
    return base.as_strided(cache.shape, cache.stride())


def _insert_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    slots = 8 + torch.randperm(n, generator=generator)
    return Sample(f"{n} tokens", (_values(n, generator, torch.bfloat16).to(device), new_kv_cache(n // 8 + 2, 8, device=device), slots.to(device)))


def _insert_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    kv = torch.zeros(2, HEAD_DIM, device=device)
    cache = new_kv_cache(2, 4, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    yield BadInput("half input", (kv.half(), cache, slots), ArgumentDtypeError, "kv must be float32 or bfloat16, got float16")
    yield BadInput("short rows", (kv[:, :448], cache, slots), ArgumentShapeError, "kv must be of shape [tokens, 512]")
    yield BadInput("transposed rows", (torch.zeros(HEAD_DIM, 2, device=device).t(), cache, slots), ArgumentShapeError, "kv must be dense in its last dimension")
    yield BadInput("512 bytes a token", (kv, cache.new_zeros(2, 4, 512), slots), ArgumentShapeError, "448 + 128 + 8 = 584")
    yield BadInput("float cache of 584", (kv, kv.new_zeros(2, 4, 584), slots), ArgumentShapeError, "FP8 pages are uint8")
    yield BadInput("two heads", (kv, cache.new_zeros(2, 4, 2, 584), slots), ArgumentShapeError, "[blocks, B, 1, 584]")
    yield BadInput("fp8 tensor", (kv, cache.view(torch.float8_e4m3fn), slots), ArgumentDtypeError, "cache must be uint8 or bfloat16 or float32")
    yield BadInput("overlapping pages", (kv, cache.as_strided((2, 2, 584), (584, 584, 1)), slots), ArgumentShapeError, "pages that do not overlap")
    yield BadInput("expanded pages", (kv, cache[:1].expand(3, 4, 584), slots), ArgumentShapeError, "pages that do not overlap")
    yield BadInput("every second token", (kv, cache[:, ::2], slots), ArgumentShapeError, "dense inside a page")
    yield BadInput("no tokens a block", (kv, cache[:, :0], slots), ArgumentShapeError, "at least one token a block")
    yield BadInput("float slots", (kv, cache, slots.float()), ArgumentDtypeError, "slot_mapping must be int64 or int32")
    yield BadInput("a slot too few", (kv, cache, slots[:1]), ArgumentShapeError, "one slot for each row of kv")


# kv_cache_gather


def _gather_check(cache: torch.Tensor, slots: torch.Tensor) -> None:
    where = "kv_cache_gather"
    check_cache(where, "cache", cache)
    _checks.tensor(where, "slots", slots, _checks.INDEX, _ANY_RANK)
    _checks.same_device(where, cache=cache, slots=slots)


def _gather_reference(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    blocks, block_size = cache.shape[:2]
    out = torch.zeros(slots.numel(), HEAD_DIM, dtype=torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype, device=cache.device)
    for row, slot in zip(out, slots.flatten().tolist(), strict=True):
        block, offset = divmod(slot, block_size)
        if not 0 <= block < blocks:
            continue
        if cache.dtype != torch.uint8:
            row.copy_(cache[block, offset].flatten())
            continue
        data, scales = kv_page_offsets(offset, block_size)
        page = cache.as_strided((block_size * TOKEN_BYTES,), (1,), cache.storage_offset() + block * cache.stride(0)).clone()
        for g in range(GROUPS):
            exponent = int(page[scales + g])
            scale = float("nan") if exponent == 255 else 2.0 ** (exponent - 127)
            codes = page[data + g * GROUP : data + (g + 1) * GROUP].view(torch.float8_e4m3fn)
            row[g * GROUP : (g + 1) * GROUP] = codes.double() * scale
        row[NOPE_DIM:] = page[data + NOPE_DIM : data + ROW_BYTES].clone().view(torch.bfloat16)
    return out.view(*slots.shape, HEAD_DIM)


def _gather_torch(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    dtype = torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype
    count = cache.shape[0] * cache.shape[1]
    if count == 0:
        return cache.new_zeros((*slots.shape, HEAD_DIM), dtype=dtype)
    flat = slots.reshape(-1).to(torch.int64)
    valid = (flat >= 0) & (flat < count)
    rows = read_rows(cache, torch.where(valid, flat, 0), dtype)
    # where, not a product: a masked read may have met a NaN.
    return torch.where(valid.unsqueeze(-1), rows, 0.0).view(*slots.shape, HEAD_DIM)


def _gather_triton(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    from ._triton import kv_cache as kernels

    return kernels.kv_cache_gather(cache, slots)


def _gather_fake(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache.new_empty((*slots.shape, HEAD_DIM), dtype=torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype)


def _gather_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.tensor([[4, 15, -1, 0], [16, 3, -(2**31), 2**31 - 1]], dtype=torch.int32, device=device)
    yield Sample("fp8 pages", (_cache(4, 4, generator).to(device), mixed))
    yield Sample("fp8 padded pages", (_padded_to(_cache(4, 4, generator, pad=24), device), mixed))
    yield Sample("fp8 page stride that is no multiple of a row", (_padded_to(_cache(4, 4, generator, pad=6), device), mixed.long()))
    yield Sample("bf16 rows", (_cache(4, 4, generator, torch.bfloat16).to(device), mixed.long()))
    yield Sample("fp32 rows, padded pages", (_padded_to(_cache(4, 4, generator, torch.float32, 128), device), mixed))
    yield Sample("4-D cache", (_cache(4, 4, generator).to(device).unsqueeze(2), mixed))
    yield Sample("no slots", (_cache(2, 4, generator).to(device), mixed[:0]))
    yield Sample("one slot, no dimension", (_cache(2, 4, generator).to(device), mixed[0, 0]))
    yield Sample("one slot", (_cache(2, 4, generator).to(device), mixed[0, :1]))
    yield Sample("every slot masked", (_cache(2, 4, generator).to(device), torch.tensor([-1, 8, 2**62, -(2**63)], device=device)))
    yield Sample("strided slots", (_cache(4, 4, generator).to(device), mixed.t()[::2]))
    # Scales that insert never writes still mean 2 ** (byte - 127). (NaN bytes are left to the tests: opcheck has NaN != NaN.)
    far = _cache(3, 2, generator)
    far[1].view(-1)[2 * ROW_BYTES : 2 * ROW_BYTES + GROUPS] = torch.tensor([0, 1, 118, 127, 246, 64, 9], dtype=torch.uint8)
    yield Sample("scales far out", (far.to(device), torch.arange(6, device=device)))


def _gather_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(f"{n} rows", (_cache(8, 8, generator).to(device), torch.randint(-1, 64, (n,), generator=generator, dtype=torch.int32).to(device)))


def _gather_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    cache = new_kv_cache(2, 4, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    yield BadInput("512 bytes a token", (cache.new_zeros(2, 4, 512), slots), ArgumentShapeError, "448 + 128 + 8 = 584")
    yield BadInput("2-D cache", (cache[0], slots), ArgumentShapeError, "cache must be 3-dimensional or 4-dimensional")
    yield BadInput("half cache", (torch.zeros(2, 4, 512, dtype=torch.float16, device=device), slots), ArgumentDtypeError, "cache must be uint8 or bfloat16 or float32")
    yield BadInput("overlapping pages", (cache.as_strided((2, 2, 584), (584, 584, 1)), slots), ArgumentShapeError, "pages that do not overlap")
    yield BadInput("bool slots", (cache, slots.bool()), ArgumentDtypeError, "slots must be int32 or int64, got bool")


KV_CACHE_INSERT.implement(
    check=_insert_check, reference=_insert_reference, fake=_insert_fake, samples=_insert_samples, sized=_insert_sized, bad_inputs=_insert_bad_inputs,
    torch_impl=_insert_torch, triton=_insert_triton,
)  # fmt: skip
KV_CACHE_GATHER.implement(
    check=_gather_check, reference=_gather_reference, fake=_gather_fake, samples=_gather_samples, sized=_gather_sized, bad_inputs=_gather_bad_inputs,
    torch_impl=_gather_torch, triton=_gather_triton,
)  # fmt: skip
