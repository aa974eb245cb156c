"""Sparse MLA decode: each query token attends to the cache rows that its index rows name.

MLA rows are keys and values at once (512 wide, one KV head shared by all query heads). A token may have two segments: the
sliding window (``swa_*``) and the compressed records (``extra_*``), each with its own cache, page size and lengths.

=============  =============  ================  ==================================================================
argument       dtype          shape             meaning
=============  =============  ================  ==================================================================
q              bf16 or fp32   [T, H, 512]       last stride 1
swa_cache      see kv_cache   [blocks, B, 584]  uint8 FP8 pages or bf16/fp32 ``[blocks, B, 512]``; any page stride
swa_indices    int32/64       [T, width]        flat slots ``block * B + offset``; any row stride
swa_lens       int32/64       [T]               columns that belong to the row, holes included; clamped to [0, width]
extra_cache,   as above                         second segment: all three or none; dtype, page size and width are its
extra_indices,                                  own
extra_lens
attn_sink      fp32 or bf16   [H]               logit that joins the denominator only; None: no sink
scale          float                            factor of ``q . key``
lane           int                              workspace lane of scratch (``triton``, ``flashinfer``), -1: the ambient one
backend        str                              who computes it: ``attention_backends``. "auto": this package, batch-invariant
returns out    dtype of q     [T, H, 512]       contiguous
returns lse    fp32           [T, H]            natural log of the sum of ``exp(scale * q . key)``, without the sink
=============  =============  ================  ==================================================================

A key is an entry among the first ``len`` columns that is ``>= 0`` and inside its cache; a slot that occurs twice counts twice.
A token without any key gets zeros and ``lse = -inf``, sink or not. What masked entries point at is never used: a NaN there
does not reach the result. NaN in a real key reaches its own row only. Slots of block 0 are read like any other: builders
never emit them.

**Batch invariance.** With ``backend="auto"`` a row's bits depend on its own inputs, on heads, widths, dtypes, the device, the page sizes of its caches
and whether their pages lie at multiples of 16 bytes; never on T, on its place in the batch or on other rows, nor on where q and index rows lie. The
PyTorch implementation keeps this by multiplying groups of a fixed number of rows (the last one padded), in column blocks of a fixed width: every
matrix product has the same shape, whatever the batch.

Graph-safe: yes (on a device nothing is read on the host; on a CPU column blocks past every row of a group are skipped, which
changes no bit). The Triton kernels (``_triton/sparse_decode.py``) take scratch from the workspace. Replaces the sparse decode kernels of
attention back ends where none is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import _checks, _decode_backends, _flashinfer, _flashmla, _registry
from ._registry import BadInput, Sample
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError
from .kv_cache import HEAD_DIM, check_cache, new_kv_cache, read_rows

__all__ = ["SparseMLADecodeOutput", "sparse_mla_decode"]

SPARSE_MLA_DECODE = _registry.define(
    "sparse_mla_decode(Tensor q, Tensor swa_cache, Tensor swa_indices, Tensor swa_lens, Tensor? extra_cache=None, "
    "Tensor? extra_indices=None, Tensor? extra_lens=None, Tensor? attn_sink=None, *, float scale, int lane=-1, str backend='auto') -> (Tensor, Tensor)",
    out=("out", "lse"),
)

# Rows of one group, columns of one block. On a CPU a single decode row pays for a whole group, so groups are small; measured on one
# core with 8 heads and 128 + 512 columns of fp32: 1 row 2.2 ms, 256 rows 124 ms (groups of 8: 3.7 and 108 ms), and blocks of 64 beat
# 128 where rows are short. Accelerators want larger products; 64 x 128 rows are 16 MB of keys.
_CPU_TILE = (4, 64)
_DEVICE_TILE = (64, 128)
_ALIGN = 16  # columns are padded to whole 64-byte lines, so that every row of a product is aligned alike


class SparseMLADecodeOutput(NamedTuple):
    """``out`` [T, H, 512] in the dtype of q and ``lse`` fp32 [T, H]."""

    out: torch.Tensor
    lse: torch.Tensor


def sparse_mla_decode(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lens: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    *,
    scale: float,
    lane: int = -1,
    backend: str = "auto",
) -> SparseMLADecodeOutput:
    """Attention output ``[T, H, 512]`` (dtype of q) and natural-log ``lse`` fp32 ``[T, H]``, which excludes the sink.

    Raises ArgumentShapeError, ArgumentDtypeError, ArgumentDeviceError, ArgumentError when some but not all of
    ``extra_cache``, ``extra_indices``, ``extra_lens`` are given, and UnsupportedError, with all that is unmet, when a named ``backend``
    cannot serve the call. ``SparseMLADecode`` asks that once, when an engine is built.

    Arguments: ``python -m dsv4_ops ops sparse_mla_decode``.
    """
    return SparseMLADecodeOutput(
        *SPARSE_MLA_DECODE(q, swa_cache, swa_indices, swa_lens, extra_cache, extra_indices, extra_lens, attn_sink, scale=scale, lane=lane, backend=backend)
    )


class _Arguments(NamedTuple):
    q: torch.Tensor
    swa_cache: torch.Tensor
    swa_indices: torch.Tensor
    swa_lens: torch.Tensor
    extra_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_lens: torch.Tensor | None
    attn_sink: torch.Tensor | None
    scale: float
    lane: int
    backend: str

    @property
    def segments(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Cache, indices and lengths of the window, and of the records where the call has them."""
        found = [(self.swa_cache, self.swa_indices, self.swa_lens)]
        if self.extra_cache is not None and self.extra_indices is not None and self.extra_lens is not None:
            found.append((self.extra_cache, self.extra_indices, self.extra_lens))
        return found


def _arguments(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lens: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    *,
    scale: float,
    lane: int = -1,
    backend: str = "auto",
) -> _Arguments:
    return _Arguments(q, swa_cache, swa_indices, swa_lens, extra_cache, extra_indices, extra_lens, attn_sink, scale, lane, backend)


_one_value = _registry.unpacked(_arguments)


@_one_value
def _check(a: _Arguments) -> None:
    where, q = "sparse_mla_decode", a.q
    _checks.tensor(where, "q", q, _checks.FLOATS, 3)
    _checks.shape(where, "q", q, (None, None, HEAD_DIM), f"[tokens, heads, {HEAD_DIM}]")
    _checks.last_stride_one(where, "q", q)
    given = {"extra_cache": a.extra_cache, "extra_indices": a.extra_indices, "extra_lens": a.extra_lens}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ArgumentError(where, ", ".join(given), "all given or all None", f"None for {', '.join(missing)}")
    for name, (cache, indices, lens) in zip(("swa", "extra"), a.segments, strict=False):
        check_cache(where, f"{name}_cache", cache)
        _checks.index_rows(where, name, indices, lens, q.shape[0], "q")
    if a.attn_sink is not None:
        _checks.tensor(where, "attn_sink", a.attn_sink, _checks.FLOATS, 1)
        _checks.shape(where, "attn_sink", a.attn_sink, (q.shape[1],), f"[heads] with {q.shape[1]} heads as in q")
    _checks.same_device(
        where, q=q, swa_cache=a.swa_cache, swa_indices=a.swa_indices, swa_lens=a.swa_lens, extra_cache=a.extra_cache,
        extra_indices=a.extra_indices, extra_lens=a.extra_lens, attn_sink=a.attn_sink,
    )  # fmt: skip
    _checks.lane(where, a.lane)
    _decode_backends.check(where, a.backend, a.scale, q, a.swa_cache, a.swa_indices, a.extra_cache, a.extra_indices)


@_one_value
def _reference(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    q, attn_sink = a.q, a.attn_sink
    tokens, heads, _ = q.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q.device)
    for t in range(tokens):
        keys = []
        for cache, indices, lens in a.segments:
            row = indices[t].tolist()[: max(0, int(lens[t]))]
            slots = [slot for slot in row if 0 <= slot < cache.shape[0] * cache.shape[1]]
            if slots:
                keys.append(read_rows(cache, torch.tensor(slots, device=q.device), torch.float64))
        if not keys:
            continue
        key = torch.cat(keys)
        logits = a.scale * (q[t].double() @ key.t())  # [H, keys]
        total = torch.logsumexp(logits, 1)
        lse[t] = total
        denominator = total if attn_sink is None else torch.logaddexp(total, attn_sink.double())
        weights = (logits - denominator[:, None]).exp()
        out[t] = torch.where(total[:, None] == float("-inf"), 0.0, weights @ key)
    return out, lse


@_one_value
def _torch(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return _run(_chosen(a, "reference"), a)


def _plain(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch implementation, on any device."""
    q = a.q
    tokens, heads, _ = q.shape
    group, columns = _CPU_TILE if q.device.type == "cpu" else _DEVICE_TILE
    padding = -tokens % group
    segments = [_segment(*segment, padding, group, columns) for segment in a.segments]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    sink = None if a.attn_sink is None else a.attn_sink.to(torch.float32)
    for g, start in enumerate(range(0, tokens, group)):
        rows = min(group, tokens - start)
        query = q.new_zeros((group, heads, HEAD_DIM), dtype=torch.float32)
        query[:rows] = q[start : start + rows].to(torch.float32) * a.scale
        result, total = _attend(query, [(s.cache, s.slots[start : start + group], s.blocks[g]) for s in segments], columns)
        if sink is not None:
            # exp(lse) / (exp(lse) + exp(sink)), in the one form that neither overflows nor meets inf - inf for finite lse
            result.mul_(torch.sigmoid(total - sink).unsqueeze(-1))
        result.masked_fill_((total == float("-inf")).unsqueeze(-1), 0.0)
        out[start : start + rows] = result[:rows]
        lse[start : start + rows] = total[:rows]
    return out, lse


class _Segment(NamedTuple):
    cache: torch.Tensor
    slots: torch.Tensor
    """int64 [padded tokens, padded width]: slots of keys, -1 for everything that is masked."""
    blocks: list[int]
    """Column blocks that each group of rows needs: all of them, or on a CPU as far as its longest row reaches."""


def _segment(cache: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, padding: int, group: int, columns: int) -> _Segment:
    width = indices.shape[1]
    if cache.shape[0] == 0:
        width = 0  # a cache without blocks has no row to read, not even for masked entries
    slots = indices[:, :width].to(torch.int64)
    column = torch.arange(width, device=indices.device)
    key = (column < lens.unsqueeze(1)) & (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    slots = torch.nn.functional.pad(torch.where(key, slots, -1), (0, -width % _ALIGN, 0, padding), value=-1)
    groups = slots.shape[0] // group
    if cache.device.type != "cpu" or width == 0:
        return _Segment(cache, slots, [-(-slots.shape[1] // columns)] * groups)
    # 1 + the last column of a group that holds a key
    reach = ((slots >= 0) * torch.arange(1, slots.shape[1] + 1)).view(groups, -1).amax(1) if groups else slots.new_zeros(0)
    return _Segment(cache, slots, [-(-r // columns) for r in reach.tolist()])


def _attend(query: torch.Tensor, segments: list[tuple[torch.Tensor, torch.Tensor, int]], columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output fp32 [rows, H, 512] and lse [rows, H] of scaled queries, one column block after the other."""
    rows, heads, _ = query.shape
    largest = query.new_full((rows, heads, 1), float("-inf"))
    total = query.new_zeros((rows, heads, 1))
    weighted = torch.zeros_like(query)
    for cache, slots, blocks in segments:
        for first in range(0, blocks * columns, columns):
            block = slots[:, first : first + columns]
            masked = block < 0
            keys = read_rows(cache, block.clamp(min=0).view(-1), torch.float32).view(rows, -1, HEAD_DIM)
            # Not a product with a mask: masked rows may hold NaN.
            keys = keys.masked_fill_(masked.unsqueeze(-1), 0.0)
            logits = torch.bmm(query, keys.transpose(1, 2)).masked_fill_(masked.unsqueeze(1), float("-inf"))
            new = torch.maximum(largest, logits.amax(-1, keepdim=True))
            # Without any key so far the maximum is -inf, and -inf - -inf would be NaN.
            finite = new.masked_fill(new == float("-inf"), 0.0)
            rescale = (largest - finite).exp()
            weights = (logits - finite).exp()
            total = total * rescale + weights.sum(-1, keepdim=True)
            weighted = torch.baddbmm(weighted * rescale, weights, keys)
            largest = new
    # + 0.0 makes one zero of both: a block that was computed in vain turns -0.0 into 0.0, and one that was skipped does not.
    out = (weighted + 0.0) / total
    return out, (largest + total.log()).squeeze(-1)


@_one_value
def _triton(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return _run(_chosen(a, "triton"), a)


@_one_value
def _cuda_choice(a: _Arguments) -> str:
    return _chosen(a, "triton" if SPARSE_MLA_DECODE.backends["cuda"] == "triton" else "reference")


def _chosen(a: _Arguments, own: str) -> str:
    return _decode_backends.chosen(a.backend, own, a.q, a.swa_cache, a.swa_indices, a.extra_cache, a.extra_indices)


def _run(backend: str, a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The call by the back end of that name."""
    if backend == "reference":
        return _plain(a)
    if backend == "triton":
        from ._triton import sparse_decode as kernels

        window, *extra = a.segments
        return kernels.sparse_mla_decode(a.q, window, extra[0] if extra else None, a.attn_sink, a.scale, a.lane)
    if backend == "cuda":
        return _cluster(a)
    if backend == "flashmla":
        return _flashmla.sparse_mla_decode(a.q, a.segments, a.attn_sink, a.scale)
    return _flashinfer.sparse_mla_decode(a.q, a.segments, a.attn_sink, a.scale, a.lane)


def _cluster(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels of csrc/cuda/sparse_decode.cu, in one launch and without scratch: rows of q must lie on 16 bytes, and others are copied."""
    q = a.q
    if _decode_backends.misplaced(a.swa_cache, a.extra_cache):
        raise ArgumentError("sparse_mla_decode", "a cache", "at an address that is a multiple of 16 with backend='cuda'", "one that is not")
    places = [q.data_ptr()] + [stride * q.element_size() for size, stride in zip(q.shape[:2], q.stride()[:2], strict=True) if size > 1]
    if any(place % 16 for place in places):
        q = q.clone(memory_format=torch.contiguous_format)
    return _cluster_kernel()(q, a.swa_cache, a.swa_indices, a.swa_lens, a.extra_cache, a.extra_indices, a.extra_lens, a.attn_sink, a.scale)  # type: ignore[no-any-return]


def _cluster_kernel() -> Any:
    namespace, name = _decode_backends.CLUSTER_KERNEL.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


@_one_value
def _fake(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return a.q.new_empty(a.q.shape), a.q.new_empty(a.q.shape[:2], dtype=torch.float32)


def _make(
    device: torch.device | str,
    generator: torch.Generator,
    tokens: int,
    heads: int = 2,
    widths: tuple[int, ...] = (12,),
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    block_sizes: tuple[int, ...] = (4,),
    query: torch.dtype = torch.float32,
    sink: bool = False,
) -> tuple[tuple[torch.Tensor | None, ...], dict[str, float]]:
    """Random arguments: caches of 6 blocks, every entry valid, lengths between 1 and the width."""
    from .kv_cache import kv_cache_insert

    arguments: list[torch.Tensor | None] = [torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(query).to(device)]
    for width, dtype, block_size in zip(widths, dtypes, block_sizes, strict=True):
        cache = new_kv_cache(6, block_size, dtype=dtype, device=device)
        slots = torch.arange(block_size, 6 * block_size)
        kv_cache_insert(torch.randn(len(slots), HEAD_DIM, generator=generator).to(device), cache, slots.to(device))
        indices = torch.randint(block_size, 6 * block_size, (tokens, width), generator=generator, dtype=torch.int32)
        arguments += [cache, indices.to(device), torch.randint(1, width + 1, (tokens,), generator=generator, dtype=torch.int32).to(device)]
    arguments += [None] * (7 - len(arguments))
    arguments.append(torch.randn(heads, generator=generator).to(device) if sink else None)
    return tuple(arguments), {"scale": HEAD_DIM**-0.5}


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)
    fp8, bf16, fp32 = torch.uint8, torch.bfloat16, torch.float32
    yield Sample("window only", *_make(device, generator, 3))
    yield Sample("one token", *_make(device, generator, 1, sink=True))
    yield Sample("no tokens", *_make(device, generator, 0, widths=(12, 4), dtypes=(fp8, fp8), block_sizes=(4, 2), sink=True))
    args, kwargs = _make(device, generator, 2, sink=True)
    yield Sample("no columns", (*args[:2], args[2][:, :0], *args[3:]), kwargs)  # type: ignore[index]
    yield Sample("no blocks", (args[0], args[1][:0], *args[2:]), kwargs)  # type: ignore[index]
    yield Sample("fp8 window and records, bf16 query", *_make(device, generator, 9, 3, (133, 20), (fp8, fp8), (4, 2), bf16, True))
    yield Sample("caches of two kinds, wide rows", *_make(device, generator, 2, 4, (40, 300), (bf16, fp8), (64, 3), fp32, True))
    args, kwargs = _make(device, generator, 8, 2, (8, 8), (fp32, fp32), (4, 2), sink=True)
    low, high = -(2**31), 2**31 - 1
    args[2][:] = torch.tensor([[-1, 4, -1, low, high, 24, 23, 23]], dtype=torch.int32, device=device)  # type: ignore[index]
    args[3][:] = torch.tensor([0, -1, 8, high, low, 1, 2, 9], dtype=torch.int32, device=device)  # type: ignore[index]
    args[6][:] = torch.tensor([0, 0, 8, low, 3, 0, 0, high], dtype=torch.int32, device=device)  # type: ignore[index]
    yield Sample("holes, repeated slots, lengths out of range, rows without a key", args, kwargs)
    args, kwargs = _make(device, generator, 4, 2, (8,), (fp8,))
    wide = torch.zeros(4, 11, dtype=torch.int64, device=device)
    wide[:, :8] = args[2]  # type: ignore[assignment]
    q = torch.randn(8, 5, HEAD_DIM, generator=generator).to(device)[::2, 1:3]
    yield Sample("strided query and indices, int64", (q, args[1].unsqueeze(2), wide[:, :8], args[3].long().repeat_interleave(2)[::2]), kwargs)  # type: ignore[union-attr]


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(f"{n} tokens", *_make(device, generator, n, 8, (128, 512), (torch.uint8, torch.uint8), (64, 16), torch.bfloat16, True))


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    args, kwargs = _make(device, torch.Generator().manual_seed(0), 3, 2, (8, 4), (torch.float32, torch.uint8), (4, 2), sink=True)

    def bad(label: str, place: int, value: torch.Tensor | None, error: type[Exception], match: str) -> BadInput:
        return BadInput(label, (*args[:place], value, *args[place + 1 :]), error, match, dict(kwargs))

    q, _, indices, lens, _, extra_indices, _, sink = (a if a is not None else torch.empty(0) for a in args)
    yield bad("half query", 0, q.half(), ArgumentDtypeError, "q must be float32 or bfloat16, got float16")
    yield bad("2-D query", 0, q[0], ArgumentShapeError, "q must be 3-dimensional")
    yield bad("query of 576", 0, torch.zeros(3, 2, 576, device=device), ArgumentShapeError, "q must be of shape [tokens, heads, 512]")
    yield bad("interleaved query", 0, torch.zeros(3, 2, 1024, device=device)[..., ::2], ArgumentShapeError, "q must be dense in its last dimension")
    yield bad("no cache", 1, None, ArgumentDtypeError, "swa_cache must be a tensor, got NoneType")
    yield bad("no lengths", 3, None, ArgumentDtypeError, "swa_lens must be a tensor, got NoneType")
    yield bad("cache of 584 floats", 1, torch.zeros(2, 4, 584, device=device), ArgumentShapeError, "FP8 pages are uint8")
    yield bad("index rows of other tokens", 2, indices[:2], ArgumentShapeError, "swa_indices must be of shape [tokens, width] with 3 tokens")
    yield bad("flat indices", 2, indices.view(-1), ArgumentShapeError, "swa_indices must be 2-dimensional")
    yield bad("float indices", 2, indices.float(), ArgumentDtypeError, "swa_indices must be int32 or int64")
    yield bad("lengths of other tokens", 3, lens[:2], ArgumentShapeError, "swa_lens must be of shape [tokens] with 3 tokens")
    yield bad("records without cache", 4, None, ArgumentError, "all given or all None, got None for extra_cache")
    yield bad("records without lengths", 6, None, ArgumentError, "all given or all None, got None for extra_lens")
    yield bad("record rows of other tokens", 5, extra_indices[:1], ArgumentShapeError, "extra_indices must be of shape [tokens, width]")
    yield bad("sink of other heads", 7, sink[:1], ArgumentShapeError, "attn_sink must be of shape [heads] with 2 heads")
    yield BadInput("lane -2", args, ArgumentError, "lane must be between -1 and 15, got -2", {**kwargs, "lane": -2})
    yield BadInput("lane 99", args, ArgumentError, "lane must be between -1 and 15, got 99", {**kwargs, "lane": 99})


SPARSE_MLA_DECODE.implement(
    check=_check, reference=_reference, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs, torch_impl=_torch, triton=_triton, cpp=("cpu",),
    kernels={"cuda": _decode_backends.CLUSTER_KERNEL}, chosen=_cuda_choice,
)  # fmt: skip
