"""Index rows as back ends of others take them: what is no key becomes -1 or is left out, both segments in one launch.

``sparse_mla_decode`` masks holes, lengths out of range and slots past a cache by itself. Back ends that do not (a slot past the
cache is read, a length past the width runs into the next row) are given rows of this op. They cost one launch, and make any
input as safe as it is for our own kernels.

======================  ========  ==============  =====================================================================
argument                dtype     shape           meaning
======================  ========  ==============  =====================================================================
swa_indices             int32/64  [T, width]      flat slots ``block * B + offset`` of the window; last stride 1, any row stride
swa_lens                int32/64  [T]             columns that belong to the row, holes included; clamped to [0, width]
extra_indices,          int32/64  [T, k], [T]     second segment, both or none
extra_lens
swa_slots, extra_slots  int                       slots of each cache (blocks * B): entries at or past them are no keys
swa_columns             int                       columns of the result for the window
extra_columns           int                       columns behind those
drop_holes              bool                      false: every key keeps its column. true: the keys of a segment follow one
                                                  another, in order
swa_block_size,         int                       optional, both or none: slots are rewritten for packed pages
swa_block_span          int                       (``packed_page_slots``), here and once
extra_block_size,       int                       the same for the second segment
extra_block_span        int
returns rows            int32     [T, columns]    columns = swa_columns + extra_columns; -1 where no key stands
returns swa_counts      int32     [T]             keys of the window (drop_holes), else one past the column of its last key
returns extra_counts    int32     [T]             the same of the second segment; zeros without one
======================  ========  ==============  =====================================================================

The window stands from column 0, the second segment from column ``swa_columns``. With ``drop_holes`` a window of more than ``swa_columns``
keys runs on into the columns behind, and the second segment follows directly: the one table of back ends that take the first
``swa_columns`` entries as window (``min(count, swa_columns)`` of them) and all from there to the end as keys.

Graph-safe: yes (sizes alone decide what runs, nothing is read back). Replaces the copies and the masking that attention adapters of
serving engines make of their index rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from ._slots import INT32_MAX, listed_lens, packed
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = ["KeyRows", "sparse_key_rows"]

SPARSE_KEY_ROWS = _registry.define(
    "sparse_key_rows(Tensor swa_indices, Tensor swa_lens, Tensor? extra_indices=None, Tensor? extra_lens=None, *, SymInt swa_slots, SymInt extra_slots=0, "
    "int swa_columns, int extra_columns=0, bool drop_holes=False, int? swa_block_size=None, int? swa_block_span=None, int? extra_block_size=None, "
    "int? extra_block_span=None) -> (Tensor, Tensor, Tensor)",
    out=("rows", "swa_counts", "extra_counts"),
)


class KeyRows(NamedTuple):
    """``rows`` int32 [T, columns], ``swa_counts`` and ``extra_counts`` int32 [T]."""

    rows: torch.Tensor
    swa_counts: torch.Tensor
    extra_counts: torch.Tensor


def sparse_key_rows(
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    extra_indices: torch.Tensor | None = None,
    extra_lens: torch.Tensor | None = None,
    *,
    swa_slots: int,
    extra_slots: int = 0,
    swa_columns: int,
    extra_columns: int = 0,
    drop_holes: bool = False,
    swa_block_size: int | None = None,
    swa_block_span: int | None = None,
    extra_block_size: int | None = None,
    extra_block_span: int | None = None,
) -> KeyRows:
    """Rows of keys alone: int32 ``[T, swa_columns + extra_columns]``, -1 where no key stands, and the counts of both segments.

    Raises ArgumentError (too few columns, a span below its block size, slots that int32 cannot hold), ArgumentDtypeError,
    ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops sparse_key_rows``.
    """
    return KeyRows(
        *SPARSE_KEY_ROWS(
            swa_indices, swa_lens, extra_indices, extra_lens, swa_slots=swa_slots, extra_slots=extra_slots, swa_columns=swa_columns, extra_columns=extra_columns,
            drop_holes=drop_holes, swa_block_size=swa_block_size, swa_block_span=swa_block_span, extra_block_size=extra_block_size, extra_block_span=extra_block_span,
        )
    )  # fmt: skip


class _Arguments(NamedTuple):
    swa_indices: torch.Tensor
    swa_lens: torch.Tensor
    extra_indices: torch.Tensor | None
    extra_lens: torch.Tensor | None
    swa_slots: int
    extra_slots: int
    swa_columns: int
    extra_columns: int
    drop_holes: bool
    swa_block_size: int | None
    swa_block_span: int | None
    extra_block_size: int | None
    extra_block_span: int | None


def _arguments(
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    extra_indices: torch.Tensor | None = None,
    extra_lens: torch.Tensor | None = None,
    *,
    swa_slots: int,
    extra_slots: int = 0,
    swa_columns: int,
    extra_columns: int = 0,
    drop_holes: bool = False,
    swa_block_size: int | None = None,
    swa_block_span: int | None = None,
    extra_block_size: int | None = None,
    extra_block_span: int | None = None,
) -> _Arguments:
    return _Arguments(
        swa_indices, swa_lens, extra_indices, extra_lens, swa_slots, extra_slots, swa_columns, extra_columns, drop_holes, swa_block_size, swa_block_span,
        extra_block_size, extra_block_span,
    )  # fmt: skip


class Segment(NamedTuple):
    """Rows of one segment, and how its slots are rewritten: by a span of its block size where nothing is asked for."""

    indices: torch.Tensor
    lens: torch.Tensor
    slots: int
    block_size: int
    block_span: int


def segments(a: _Arguments) -> list[Segment]:
    """The one or two segments of a call."""
    found = [Segment(a.swa_indices, a.swa_lens, a.swa_slots, a.swa_block_size or 1, a.swa_block_span or 1)]
    if a.extra_indices is not None and a.extra_lens is not None:
        found.append(Segment(a.extra_indices, a.extra_lens, a.extra_slots, a.extra_block_size or 1, a.extra_block_span or 1))
    return found


@_registry.unpacked(_arguments)
def _check(a: _Arguments) -> None:
    where = "sparse_key_rows"
    _checks.tensor(where, "swa_indices", a.swa_indices, _checks.INDEX, 2)
    if (a.extra_indices is None) != (a.extra_lens is None):
        raise ArgumentError(where, "extra_indices, extra_lens", "both given or both None", f"None for {'extra_indices' if a.extra_indices is None else 'extra_lens'}")
    tokens, widths = a.swa_indices.shape[0], []
    parts = [("swa", a.swa_indices, a.swa_lens)]
    if a.extra_indices is not None and a.extra_lens is not None:
        parts.append(("extra", a.extra_indices, a.extra_lens))
    for name, indices, lens in parts:
        _checks.index_rows(where, name, indices, lens, tokens, "swa_indices")
        widths.append(indices.shape[1])
    for name in ("swa", "extra"):
        slots, size, span = (getattr(a, f"{name}_{part}") for part in ("slots", "block_size", "block_span"))
        _checks.integer(where, f"{name}_slots", slots, 0, INT32_MAX)
        if (size is None) != (span is None):
            raise ArgumentError(where, f"{name}_block_size, {name}_block_span", "both given or both None", f"{size} and {span}")
        if size is None:
            continue
        _checks.integer(where, f"{name}_block_size", size, 1, INT32_MAX)
        _checks.integer(where, f"{name}_block_span", span, size, INT32_MAX, "Use page_block_span(page_stride, token_stride).")
        if slots > INT32_MAX // span * size:
            raise ArgumentError(where, f"{name}_slots", f"at most {INT32_MAX // span * size}: rewritten slots are int32", slots)
    _checks.same_device(where, swa_indices=a.swa_indices, swa_lens=a.swa_lens, extra_indices=a.extra_indices, extra_lens=a.extra_lens)
    _checks.integer(where, "swa_columns", a.swa_columns, 0)
    _checks.integer(where, "extra_columns", a.extra_columns, 0)
    extra = widths[1] if len(widths) > 1 else 0
    if not a.drop_holes and a.swa_columns < widths[0]:
        raise ArgumentError(where, "swa_columns", f"at least the width {widths[0]} of swa_indices", a.swa_columns, "Or pass drop_holes=True: the window then runs on behind them.")
    needed = extra + max(0, widths[0] - a.swa_columns)
    if a.extra_columns < needed:
        raise ArgumentError(where, "extra_columns", f"at least {needed}, what swa_columns leaves over and the width of extra_indices", a.extra_columns)


@_registry.unpacked(_arguments)
def _reference(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, columns = a.swa_indices.shape[0], a.swa_columns + a.extra_columns
    rows = [[_checks.PAD_SLOT_ID] * columns for _ in range(tokens)]
    counts: list[list[int]] = [[] for _ in segments(a)]
    for t in range(tokens):
        first = 0
        for number, s in enumerate(segments(a)):
            listed = s.indices[t].tolist()[: max(0, int(s.lens[t]))]
            keys = [(column, slot // s.block_size * s.block_span + slot % s.block_size) for column, slot in enumerate(listed) if 0 <= slot < s.slots]
            if a.drop_holes:
                keys = [(i, slot) for i, (_, slot) in enumerate(keys)]
            for column, slot in keys:
                rows[t][first + column] = slot
            counts[number].append(keys[-1][0] + 1 if keys else 0)
            first = max(a.swa_columns, counts[0][t])
    if len(counts) == 1:
        counts.append([0] * tokens)
    table, swa, extra = (torch.tensor(values, dtype=torch.int32, device=a.swa_indices.device) for values in (rows, *counts))
    return table.view(tokens, columns), swa, extra


@_registry.unpacked(_arguments)
def _torch(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, columns = a.swa_indices.shape[0], a.swa_columns + a.extra_columns
    # One spare column takes what stands nowhere.
    rows = a.swa_indices.new_full((tokens, columns + 1), _checks.PAD_SLOT_ID, dtype=torch.int32)
    counts: list[torch.Tensor] = []
    for s in segments(a):
        column = torch.arange(s.indices.shape[1], device=s.indices.device)
        slots = s.indices.to(torch.int64)
        keys = (column < s.lens[:, None]) & (slots >= 0) & (slots < s.slots)
        place = keys.cumsum(1) - 1 if a.drop_holes else column.expand(keys.shape)
        count = keys.sum(1, dtype=torch.int32) if a.drop_holes else listed_lens(keys)
        first = counts[0].clamp(min=a.swa_columns)[:, None] if counts else 0
        rows.scatter_(1, torch.where(keys, place + first, columns), packed(torch.where(keys, slots, -1), s.block_size, s.block_span).to(torch.int32))
        counts.append(count)
    if len(counts) == 1:
        counts.append(torch.zeros_like(counts[0]))
    return rows[:, :columns].clone(memory_format=torch.contiguous_format), counts[0], counts[1]


@_registry.unpacked(_arguments)
def _triton(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from ._triton import key_rows as kernels

    return kernels.sparse_key_rows(segments(a), a.swa_columns, a.extra_columns, a.drop_holes)


@_registry.unpacked(_arguments)
def _fake(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = a.swa_indices.shape[0]
    made = [a.swa_indices.new_empty(shape, dtype=torch.int32) for shape in ((tokens, a.swa_columns + a.extra_columns), (tokens,), (tokens,))]
    return made[0], made[1], made[2]


def _drawn(device: torch.device | str, g: torch.Generator, tokens: int, widths: tuple[int, ...], slots: int = 40, dtype: torch.dtype = torch.int32) -> list[torch.Tensor]:
    """Rows with holes, slots past the cache and lengths out of range."""
    made = []
    for width in widths:
        made += [torch.randint(-3, slots + 3, (tokens, width), generator=g).to(dtype).to(device), torch.randint(-2, width + 3, (tokens,), generator=g).to(dtype).to(device)]
    return made


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)
    both = {"swa_slots": 40, "extra_slots": 40}
    yield Sample("both segments, columns kept", tuple(_drawn(device, g, 5, (9, 6))), {**both, "swa_columns": 16, "extra_columns": 8})
    yield Sample("both segments, holes dropped", tuple(_drawn(device, g, 7, (9, 6))), {**both, "swa_columns": 9, "extra_columns": 6, "drop_holes": True})
    yield Sample("window runs on", tuple(_drawn(device, g, 8, (11, 6))), {**both, "swa_columns": 4, "extra_columns": 16, "drop_holes": True})
    yield Sample("window alone, int64", tuple(_drawn(device, g, 3, (5,), dtype=torch.int64)), {"swa_slots": 20, "swa_columns": 6})
    spans = {"swa_block_size": 4, "swa_block_span": 7, "extra_block_size": 2, "extra_block_span": 64}
    yield Sample("packed pages", tuple(_drawn(device, g, 4, (9, 6))), {**both, **spans, "swa_columns": 12, "extra_columns": 8, "drop_holes": True})
    yield Sample("packed pages, columns kept", tuple(_drawn(device, g, 4, (9, 6))), {**both, **spans, "swa_columns": 12, "extra_columns": 8})
    yield Sample("no tokens", tuple(_drawn(device, g, 0, (9, 6))), {**both, "swa_columns": 12, "extra_columns": 8})
    yield Sample("no columns", tuple(_drawn(device, g, 3, (0, 4))), {**both, "swa_columns": 0, "extra_columns": 4, "drop_holes": True})
    yield Sample("empty caches", tuple(_drawn(device, g, 3, (5, 4))), {"swa_slots": 0, "extra_slots": 0, "swa_columns": 8, "extra_columns": 4})
    extreme = _drawn(device, g, 4, (4, 3))
    low, high = -(2**31), 2**31 - 1
    extreme[0][:2] = torch.tensor([[low, high, 39, 40], [0, 39, -1, high]], dtype=torch.int32, device=device)
    extreme[1][:] = torch.tensor([high, low, 4, 4], dtype=torch.int32, device=device)
    yield Sample("extremes", tuple(extreme), {**both, "swa_columns": 4, "extra_columns": 3, "drop_holes": True})
    wide, more = _drawn(device, g, 6, (12, 12)), _drawn(device, g, 6, (1500,), dtype=torch.int64)
    yield Sample("strided rows", (wide[0][::2, 1:9], wide[1][::2], wide[2][::2, 2:7], wide[3][1::2]), {**both, "swa_columns": 8, "extra_columns": 5, "drop_holes": True})
    yield Sample("wide rows", (wide[0], wide[1], *more), {**both, "swa_columns": 12, "extra_columns": 1600, "drop_holes": True})


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    return Sample(f"{n} tokens", tuple(_drawn(device, g, n, (192, 512), 100000)), {"swa_slots": 100000, "extra_slots": 100000, "swa_columns": 192, "extra_columns": 512})


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    rows, lens, more, counts = _drawn(device, torch.Generator().manual_seed(0), 3, (8, 4))
    good = {"swa_slots": 40, "extra_slots": 40, "swa_columns": 8, "extra_columns": 4}
    yield BadInput("float rows", (rows.float(), lens), ArgumentDtypeError, "swa_indices must be int32 or int64", good)
    yield BadInput("lengths of other tokens", (rows, lens[:2]), ArgumentShapeError, "swa_lens must be of shape [tokens] with 3 tokens", good)
    yield BadInput("records of other tokens", (rows, lens, more[:2], counts), ArgumentShapeError, "extra_indices must be of shape [tokens, width]", good)
    yield BadInput("records without lengths", (rows, lens, more, None), ArgumentError, "both given or both None, got None for extra_lens", good)
    yield BadInput("interleaved columns", (rows[:, ::2], lens), ArgumentShapeError, "swa_indices must be dense in its last dimension", good)
    yield BadInput("too few window columns", (rows, lens), ArgumentError, "swa_columns must be at least the width 8", {**good, "swa_columns": 7})
    yield BadInput("too few record columns", (rows, lens, more, counts), ArgumentError, "extra_columns must be at least 4", {**good, "extra_columns": 3})
    yield BadInput("no room to run on", (rows, lens, more, counts), ArgumentError, "extra_columns must be at least 6", {**good, "swa_columns": 6, "drop_holes": True})
    yield BadInput("span without size", (rows, lens), ArgumentError, "swa_block_size, swa_block_span must be both given or both None", {**good, "swa_block_span": 4})
    yield BadInput("span below size", (rows, lens), ArgumentError, "swa_block_span must be between 4 and", {**good, "swa_block_size": 4, "swa_block_span": 3})
    yield BadInput("slots past int32", (rows, lens), ArgumentError, "swa_slots must be at most", {**good, "swa_slots": 2**30, "swa_block_size": 4, "swa_block_span": 16})


SPARSE_KEY_ROWS.implement(
    check=_check, reference=_reference, torch_impl=_torch, triton=_triton, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs
)  # fmt: skip
