"""FlashMLA's sparse decode over FP8 pages as a back end of ``sparse_mla_decode``: sm_90 and sm_10x.

It is the open package ``flash_mla``, or the copy inside vLLM. What it takes for granted, and how it gets it here:

- Every index that is not -1 is read, and rows are read in whole blocks of 64 columns: ``sparse_key_rows`` makes such rows in one launch.
- Heads are 64 or 128: others are padded with zeros, a copy of the query.
- A plan says which multiprocessor takes which keys. It depends on lengths, where lengths are given; then a plan is good for one step only
  and its kernel (6 to 24 us) runs in every captured graph. So lengths are not given: rows end in -1, the plan follows from shapes alone
  and is made once for each of them, outside of any capture, before the first call of that shape returns (that call waits for the
  device). A shape that is first seen inside a capture has its planner captured with it. Plans are kept: a graph may hold them.
- Logarithms are natural and leave out the sink, as ours; a row without keys has +inf there, made -inf.

**Not batch invariant**: the plan divides the keys of all rows evenly, so how a row is split follows from the number of rows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ._module_slice import PackageSlice, SliceError, find_package
from .capability import pad_heads
from .errors import ArgumentError, UnsupportedError
from .key_rows import sparse_key_rows
from .kv_cache import HEAD_DIM, TOKEN_BYTES
from .workspace import _allocate_outside_pools as allocate_outside_pools

__all__ = ["HEADS", "Found", "installed", "sparse_mla_decode"]

HEADS = (64, 128)
BLOCK = 64
SLICE = 1024
"""Tokens of one call: scratch is 128 KB a token at 64 heads, and the planner takes about 11,000 of them."""
_NEEDED = frozenset(["attn_sink", "extra_indices_in_kvcache", "extra_k_cache", "indices", "is_fp8_kvcache", "tile_scheduler_metadata"])
_PLACES = (("flash_mla", "flash_mla_interface", "cuda*.so", "flash_mla"), ("vllm", "third_party.flashmla.flash_mla_interface", "_flashmla_C*.so", "vllm"))
"""Package, module of the interface, its library, and the distribution that has the version."""


class Found(NamedTuple):
    """``module`` is None where there is no FlashMLA of use; ``text`` says what was found."""

    module: str | None
    text: str


def installed() -> Found:
    """The FlashMLA that a call would take, found by its files."""
    return _look(tuple((place, find_package(place[0])) for place in _PLACES))


@functools.lru_cache(maxsize=16)
def _look(places: tuple[tuple[tuple[str, str, str, str], Path | None], ...]) -> Found:
    reasons = []
    for (package, module, library, distribution), root in places:
        if root is None:
            continue
        try:
            names, anything = PackageSlice(package, root).parameters(module, "flash_mla_with_kvcache")
        except SliceError as error:
            reasons.append(str(error))
            continue
        missing = sorted(_NEEDED - names)
        if missing and not anything:
            reasons.append(f"{package} is too old: its flash_mla_with_kvcache lacks {', '.join(missing)}")
        elif not any(root.glob(library)):
            reasons.append(f"{package} has no {library.replace('*', '')}")
        else:
            return Found(f"{package}.{module}", f"{package} {_version(distribution)}")
    return Found(None, "; ".join(reasons) or "neither flash_mla nor vllm installed")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


@functools.cache
def _interface(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # of any kind: it belongs to the other package
        raise UnsupportedError("sparse_mla_decode with backend='flashmla'", [f"library: {module} does not load: {type(error).__name__}: {error}"]) from error


_plans: dict[tuple[Any, ...], Any] = {}
"""Shape -> plan. 4 KB and 4 bytes a token each; never dropped, because captured graphs hold their addresses."""


def sparse_mla_decode(
    q: torch.Tensor, segments: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], attn_sink: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the op of that name. ``segments`` are one or two of (cache, indices, lens); the call has passed the gate."""
    tokens, heads, _ = q.shape
    # A masked entry still reads the first page: a cache without pages must not be there.
    segments = [s for s in segments if s[0].shape[0] and s[1].shape[1]]
    if not segments or 0 in (tokens, heads):
        return torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_full((tokens, heads), float("-inf"), dtype=torch.float32)
    padded = pad_heads(heads, HEADS) or heads
    if padded != heads:
        query = q.new_zeros((tokens, padded, HEAD_DIM))
        query[:, :heads] = q
    else:
        query = q if q.is_contiguous() and q.data_ptr() % 16 == 0 else q.clone(memory_format=torch.contiguous_format)
    sink = None if attn_sink is None else attn_sink.to(torch.float32).contiguous()
    if sink is not None and padded != heads:
        sink = torch.nn.functional.pad(sink, (0, padded - heads))
    caches = [_paged(cache) for cache, _, _ in segments]
    columns = [-(-indices.shape[1] // BLOCK) * BLOCK for _, indices, _ in segments]
    flat = [tensor for _, indices, lens in segments for tensor in (indices, lens)]
    slots = [cache.shape[0] * cache.shape[1] for cache in caches]
    rows = sparse_key_rows(*flat, swa_slots=slots[0], extra_slots=slots[-1], swa_columns=columns[0], extra_columns=sum(columns[1:])).rows[:, None]
    window, records = rows[..., : columns[0]], rows[..., columns[0] :] if len(caches) > 1 else None
    flashmla, extra_cache = _interface(str(installed().module)), caches[1] if len(caches) > 1 else None
    parts = []
    for first in range(0, tokens, SLICE):
        part = slice(first, first + SLICE)
        parts.append(_call(flashmla, query[part, None], caches[0], window[part], sink, extra_cache, None if records is None else records[part], scale))
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(values) for values in zip(*parts, strict=True))
    lse = lse[..., 0]
    torch.nan_to_num_(lse, nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"))
    return out[:, 0, :heads].contiguous(), lse[:, :heads].contiguous()


def _paged(cache: torch.Tensor) -> torch.Tensor:
    """``[blocks, B, 1, 584]`` with the strides that FlashMLA asks for, also where a dimension of one has another."""
    blocks, block_size = cache.shape[:2]
    if cache.data_ptr() % 16:
        raise ArgumentError("sparse_mla_decode", "a cache", "at an address that is a multiple of 16 with backend='flashmla'", f"one that is not (offset {cache.storage_offset()})")
    stride = cache.stride(0) if blocks > 1 else block_size * TOKEN_BYTES
    return cache.as_strided((blocks, block_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1))


def _call(
    flashmla: Any, q: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor | None, extra_cache: torch.Tensor | None, extra_rows: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    extra = () if extra_cache is None or extra_rows is None else (extra_cache.shape[1], extra_rows.shape[2])
    key = (q.device.index, q.shape[0], q.shape[2], cache.shape[1], rows.shape[2], *extra)
    plan = known = _plans.get(key)
    if known is None:
        plan, _ = flashmla.get_mla_metadata()
    with torch.cuda.device(q.device):
        result: tuple[torch.Tensor, torch.Tensor] = flashmla.flash_mla_with_kvcache(
            q=q, k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=HEAD_DIM, tile_scheduler_metadata=plan, softmax_scale=scale, is_fp8_kvcache=True,
            indices=rows, attn_sink=sink, extra_k_cache=extra_cache, extra_indices_in_kvcache=extra_rows,
        )  # fmt: skip
        if known is None and not torch.cuda.is_current_stream_capturing():
            _keep(key, plan)
    return result


def _keep(key: tuple[Any, ...], plan: Any) -> None:
    """From memory that no pool of graphs owns, and only when it is written: another stream may be the next to read it."""
    for name in ("tile_scheduler_metadata", "num_splits"):
        made = getattr(plan, name)
        kept = allocate_outside_pools(made.numel() * made.element_size(), made.device).view(made.dtype).view(made.shape)
        setattr(plan, name, kept.copy_(made))
    torch.cuda.current_stream().synchronize()
    _plans[key] = plan
