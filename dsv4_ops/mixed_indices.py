"""Window and compressed entries in one index row a token.

``build_mixed_sparse_indices`` makes one row a token for back ends that take a single index tensor: D decode tokens first,
whose window rows exist already, then P prefill tokens, whose rows are derived here (T = D + P).

===========================  =======  ================  ================================================================
argument                     dtype    shape             meaning (W: window)
===========================  =======  ================  ================================================================
decode_swa_indices           int32    [D, swa_width]    window or draft-block rows, plain slots; swa_width is at least W
decode_swa_lens              int32    [D]               their lengths, clamped to ``[0, swa_width]``
decode_topk_indices          int32    [D, k]            compressed entries of decode rows: record numbers, or slots (below);
                                                        k = 0 for a layer without compressed entries
prefill_topk_indices         int32    [P, k]            record numbers of prefill rows; None: every record that the token
                                                        sees, ``0 .. (p + 1) // compress_ratio - 1``, at most k of them
positions                    int64    [T]               used for prefill rows
token_to_req_indices         int32    [T]               row of both tables
is_valid_token               bool     [T]               false: row of -1, length 0
block_table                  int32    [R, blocks]       pages of the window group, any strides
compressed_block_table       int32    [R, blocks]       pages of the compressed group, any strides
block_size                   int                        tokens a page of the window group
compressed_block_size        int                        records a page of the compressed group
window                       int                        W, never taken from a width
compress_ratio               int                        tokens a record; used when prefill_topk_indices is None
decode_topk_lens             int32    [D]               optional: columns of decode_topk_indices that count, holes
                                                        included; else one past its last entry that is not negative
decode_indices_are_global    bool                       decode_topk_indices holds slots instead of record numbers
block_span                   int                        optional: rewrite the window's slots for packed pages, here and once
compressed_block_span        int                        optional: the same for the compressed entries
returns indices              int32    [T, width]        width = ``mixed_row_width(swa_width, k)``, a multiple of 4
returns lens                 int32    [T]               ``W + overflow + compressed``
===========================  =======  ================  ================================================================

Layout, for consumers that take the first ``min(W, position + 1)`` columns and ``[W, length)`` as keys: window entries from
column 0; those past W (a draft block's overflow) run on from column W; compressed entries follow at ``W + overflow``. So a
causal row's compressed entries start at W whatever its storage width or history, and no padding stands in either range. As
position of a draft block's row such a consumer is given ``S + Q - 1`` (where ``draft_start`` shortens rows: the row's window
length - 1, which is the same number of columns otherwise). Holes of unmapped pages keep their column, as everywhere. The row
stride depends on sizes alone, never on what a batch holds. Rows of requests outside the tables and prefill rows of negative
positions are padding too.

Graph-safe: yes (sizes alone decide what runs, nothing is read back). Replaces the mixed index kernels of serving engines'
sparse MLA layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from ._slots import INT32_MAX, check_tokens, listed_lens, packed, safe_requests, slot_of, slots_at, table_for_samples
from .errors import ArgumentDeviceError, ArgumentDtypeError, ArgumentError, ArgumentShapeError
from .global_indices import global_topk_indices

__all__ = ["build_mixed_sparse_indices", "global_topk_indices", "mixed_row_width"]

ROW_ALIGNMENT = 4
"""int32 columns that make 16 bytes: back ends load rows in vectors of that size."""


def mixed_row_width(swa_width: int, topk: int) -> int:
    """Columns of a mixed row: ``swa_width + topk``, rounded up as a whole so that every row starts on a 16-byte boundary.

    Raises ArgumentError (out of range), ArgumentDtypeError (not an integer).
    """
    _checks.integer("mixed_row_width", "swa_width", swa_width, 1)
    _checks.integer("mixed_row_width", "topk", topk, 0)
    return (swa_width + topk + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT


BUILD_MIXED_SPARSE_INDICES = _registry.define(
    "build_mixed_sparse_indices(Tensor decode_swa_indices, Tensor decode_swa_lens, Tensor decode_topk_indices, Tensor? prefill_topk_indices, "
    "Tensor positions, Tensor token_to_req_indices, Tensor is_valid_token, Tensor block_table, Tensor compressed_block_table, *, "
    "int block_size, int compressed_block_size, int window, int compress_ratio=1, Tensor? decode_topk_lens=None, "
    "bool decode_indices_are_global=False, int? block_span=None, int? compressed_block_span=None) -> (Tensor, Tensor)",
    out=("indices", "lens"),
)


def build_mixed_sparse_indices(
    decode_swa_indices: torch.Tensor,
    decode_swa_lens: torch.Tensor,
    decode_topk_indices: torch.Tensor,
    prefill_topk_indices: torch.Tensor | None,
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    compressed_block_table: torch.Tensor,
    *,
    block_size: int,
    compressed_block_size: int,
    window: int,
    compress_ratio: int = 1,
    decode_topk_lens: torch.Tensor | None = None,
    decode_indices_are_global: bool = False,
    block_span: int | None = None,
    compressed_block_span: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Window and compressed entries in one row a token: ``(indices int32 [T, mixed_row_width(swa_width, k)], lens int32 [T])``.

    Raises ArgumentError, ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError; see the module's table.
    Arguments: ``python -m dsv4_ops ops build_mixed_sparse_indices``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = BUILD_MIXED_SPARSE_INDICES(
        decode_swa_indices,
        decode_swa_lens,
        decode_topk_indices,
        prefill_topk_indices,
        positions,
        token_to_req_indices,
        is_valid_token,
        block_table,
        compressed_block_table,
        block_size=block_size,
        compressed_block_size=compressed_block_size,
        window=window,
        compress_ratio=compress_ratio,
        decode_topk_lens=decode_topk_lens,
        decode_indices_are_global=decode_indices_are_global,
        block_span=block_span,
        compressed_block_span=compressed_block_span,
    )
    return result


class _Arguments(NamedTuple):
    decode_swa_indices: torch.Tensor
    decode_swa_lens: torch.Tensor
    decode_topk_indices: torch.Tensor
    prefill_topk_indices: torch.Tensor | None
    positions: torch.Tensor
    token_to_req_indices: torch.Tensor
    is_valid_token: torch.Tensor
    block_table: torch.Tensor
    compressed_block_table: torch.Tensor
    block_size: int
    compressed_block_size: int
    window: int
    compress_ratio: int = 1
    decode_topk_lens: torch.Tensor | None = None
    decode_indices_are_global: bool = False
    block_span: int | None = None
    compressed_block_span: int | None = None


_unpacked = _registry.unpacked(_Arguments)


@_unpacked
def _mixed_check(a: _Arguments) -> None:
    where = "build_mixed_sparse_indices"
    _checks.tensor(where, "decode_swa_indices", a.decode_swa_indices, _checks.INT32, 2)
    _checks.tensor(where, "decode_topk_indices", a.decode_topk_indices, _checks.INT32, 2)
    _checks.tensor(where, "positions", a.positions, _checks.INT64, 1)
    (decodes, swa_width), topk, tokens = a.decode_swa_indices.shape, a.decode_topk_indices.shape[1], a.positions.shape[0]
    if decodes > tokens:
        raise ArgumentShapeError(where, "decode_swa_indices", f"of at most as many rows as positions ({tokens})", f"shape {list(a.decode_swa_indices.shape)}")
    _checks.shape(where, "decode_topk_indices", a.decode_topk_indices, (decodes, None), f"[{decodes} decode tokens, k]")
    for name, lens in (("decode_swa_lens", a.decode_swa_lens), ("decode_topk_lens", a.decode_topk_lens)):
        if lens is not None:
            _checks.tensor(where, name, lens, _checks.INT32, 1)
            _checks.shape(where, name, lens, (decodes,), f"[{decodes} decode tokens]")
    if a.prefill_topk_indices is not None:
        _checks.tensor(where, "prefill_topk_indices", a.prefill_topk_indices, _checks.INT32, 2)
        _checks.shape(where, "prefill_topk_indices", a.prefill_topk_indices, (tokens - decodes, topk), f"[{tokens - decodes} prefill tokens, k = {topk}]")
    check_tokens(where, a.token_to_req_indices, a.is_valid_token, tokens, "positions")
    _checks.tensor(where, "block_table", a.block_table, _checks.INT32, 2)
    _checks.tensor(where, "compressed_block_table", a.compressed_block_table, _checks.INT32, 2)
    _checks.shape(where, "compressed_block_table", a.compressed_block_table, (a.block_table.shape[0], None), f"[{a.block_table.shape[0]} requests, blocks] like block_table")
    _checks.same_device(
        where,
        positions=a.positions,
        decode_swa_indices=a.decode_swa_indices,
        decode_swa_lens=a.decode_swa_lens,
        decode_topk_indices=a.decode_topk_indices,
        decode_topk_lens=a.decode_topk_lens,
        prefill_topk_indices=a.prefill_topk_indices,
        token_to_req_indices=a.token_to_req_indices,
        is_valid_token=a.is_valid_token,
        block_table=a.block_table,
        compressed_block_table=a.compressed_block_table,
    )
    _checks.integer(where, "window", a.window, 1, INT32_MAX)
    if swa_width < a.window:
        raise ArgumentShapeError(where, "decode_swa_indices", f"of at least window ({a.window}) columns", f"shape {list(a.decode_swa_indices.shape)}", "Use decode_swa_width(window).")
    _checks.integer(where, "compress_ratio", a.compress_ratio, 1)
    for name, size, span in (("block", a.block_size, a.block_span), ("compressed_block", a.compressed_block_size, a.compressed_block_span)):
        _checks.integer(where, f"{name}_size", size, 1, INT32_MAX)
        if span is not None and span < size:
            raise ArgumentError(where, f"{name}_span", f"at least {name}_size ({size})", span, "Use page_block_span(page_stride, token_stride).")


@_unpacked
def _mixed_reference(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    (decodes, swa_width), topk = a.decode_swa_indices.shape, a.decode_topk_indices.shape[1]
    table, compressed_table = a.block_table.tolist(), a.compressed_block_table.tolist()
    indices = torch.full((a.positions.shape[0], mixed_row_width(swa_width, topk)), _checks.PAD_SLOT_ID, dtype=torch.int32)
    lens = torch.zeros(a.positions.shape[0], dtype=torch.int32)

    def moved(slot: int, size: int, span: int | None) -> int:
        if slot < 0 or span is None:
            return max(slot, _checks.PAD_SLOT_ID)
        result = slot // size * span + slot % size
        return result if result <= INT32_MAX else _checks.PAD_SLOT_ID

    for t, (position, request) in enumerate(zip(a.positions.tolist(), a.token_to_req_indices.tolist(), strict=True)):
        if not a.is_valid_token[t] or not 0 <= request < len(table) or (t >= decodes and position < 0):
            continue
        if t < decodes:
            visible = a.decode_swa_indices[t].tolist()[: max(0, int(a.decode_swa_lens[t]))]
            records, given = a.decode_topk_indices[t].tolist(), a.decode_topk_lens is not None
        else:
            visible = [slot_of(table[request], p, a.block_size) for p in range(max(0, position - a.window + 1), position + 1)]
            seen = min(topk, (position + 1) // a.compress_ratio)
            records, given = list(range(seen)) if a.prefill_topk_indices is None else a.prefill_topk_indices[t - decodes].tolist(), False
        listed = [column + 1 for column, record in enumerate(records) if record >= 0]
        count = max(0, int(a.decode_topk_lens[t])) if given and a.decode_topk_lens is not None else max(listed, default=0)
        entries = records[:count]
        if not (t < decodes and a.decode_indices_are_global):
            entries = [slot_of(compressed_table[request], record, a.compressed_block_size) if record >= 0 else _checks.PAD_SLOT_ID for record in entries]
        start = max(a.window, len(visible))
        for column, slot in enumerate(visible):
            indices[t, column] = moved(slot, a.block_size, a.block_span)
        for column, slot in enumerate(entries):
            indices[t, start + column] = moved(slot, a.compressed_block_size, a.compressed_block_span)
        lens[t] = start + len(entries)
    return indices.to(a.positions.device), lens.to(a.positions.device)


@_unpacked
def _mixed_torch(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    (decodes, swa_width), topk, device = a.decode_swa_indices.shape, a.decode_topk_indices.shape[1], a.positions.device
    requests, is_listed_row = safe_requests(a.token_to_req_indices, a.is_valid_token, a.block_table.shape[0])
    prefill_positions, prefill_rows = a.positions[decodes:], is_listed_row[decodes:] & (a.positions[decodes:] >= 0)
    is_listed_row = torch.cat([is_listed_row[:decodes], prefill_rows])
    columns, entry_columns = torch.arange(swa_width, device=device), torch.arange(topk, device=device)

    decode_window = a.decode_swa_indices.masked_fill((columns >= a.decode_swa_lens[:, None]) | (a.decode_swa_indices < 0), _checks.PAD_SLOT_ID)
    first = (prefill_positions - (a.window - 1)).clamp(min=0)
    window_positions = first[:, None] + columns[: a.window]
    in_window = (window_positions <= prefill_positions[:, None]) & prefill_rows[:, None]
    prefill_window = slots_at(a.block_table, requests[decodes:], window_positions, in_window, a.block_size)

    decode_counts = listed_lens(a.decode_topk_indices >= 0) if a.decode_topk_lens is None else a.decode_topk_lens.clamp(0, topk)
    decode_listed = (a.decode_topk_indices >= 0) & (entry_columns < decode_counts[:, None]) & is_listed_row[:decodes, None]
    if a.decode_indices_are_global:
        decode_entries = a.decode_topk_indices.masked_fill(~decode_listed, _checks.PAD_SLOT_ID)
    else:
        decode_entries = slots_at(a.compressed_block_table, requests[:decodes], a.decode_topk_indices.to(torch.int64), decode_listed, a.compressed_block_size)
    if a.prefill_topk_indices is None:
        seen = ((prefill_positions.clamp(max=2**63 - 2) + 1) // a.compress_ratio).clamp(0, topk)
        records, prefill_listed = entry_columns.expand(prefill_rows.shape[0], topk), entry_columns < seen[:, None]
    else:
        records, prefill_listed = a.prefill_topk_indices.to(torch.int64), a.prefill_topk_indices >= 0
    prefill_counts = listed_lens(prefill_listed)
    prefill_entries = slots_at(a.compressed_block_table, requests[decodes:], records, prefill_listed & prefill_rows[:, None], a.compressed_block_size)

    start = a.positions.new_full((a.positions.shape[0],), a.window, dtype=torch.int64)
    torch.maximum(start[:decodes], a.decode_swa_lens.clamp(0, swa_width).to(torch.int64), out=start[:decodes])
    entries = torch.cat([decode_entries, prefill_entries])
    if a.block_span is not None:
        decode_window, prefill_window = (packed(slots, a.block_size, a.block_span) for slots in (decode_window, prefill_window))
    if a.compressed_block_span is not None:
        entries = packed(entries, a.compressed_block_size, a.compressed_block_span)
    indices = torch.full((a.positions.shape[0], mixed_row_width(swa_width, topk)), _checks.PAD_SLOT_ID, dtype=torch.int32, device=device)
    indices[:decodes, :swa_width] = decode_window
    indices[decodes:, :a.window] = prefill_window
    # Behind a row's own window entries there is only -1, so the compressed entries may start inside the window's storage.
    indices.scatter_(1, start[:, None] + entry_columns, entries)
    lens = start + torch.cat([decode_counts, prefill_counts])
    return indices.masked_fill_(~is_listed_row[:, None], _checks.PAD_SLOT_ID), lens.masked_fill_(~is_listed_row, 0).to(torch.int32)


@_unpacked
def _mixed_triton(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from ._triton import mixed_indices as kernels

    return kernels.build_mixed_sparse_indices(a, mixed_row_width(a.decode_swa_indices.shape[1], a.decode_topk_indices.shape[1]))


@_unpacked
def _mixed_fake(a: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = a.positions.shape[0], mixed_row_width(a.decode_swa_indices.shape[1], a.decode_topk_indices.shape[1])
    return a.decode_swa_indices.new_empty((tokens, width)), a.decode_swa_indices.new_empty((tokens,))


def _mixed_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def drawn(
        label: str, decodes: int, prefills: int, k: int, sizes: tuple[int, int, int, int] = (4, 2, 7, 12), requests: int = 3, blocks: int = 4, high: int = 500, local_topk: bool = True, **more: object
    ) -> Sample:
        block_size, compressed_block_size, window, swa_width = sizes
        tokens = decodes + prefills

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, max(low + 1, high), shape, generator=g, dtype=torch.int32)

        records = blocks * compressed_block_size + 2
        prefill_topk = integers(-2, records, prefills, k).to(device) if local_topk else None
        before = (integers(-1, 300, decodes, swa_width), integers(-1, swa_width + 2, decodes), integers(-2, records, decodes, k))
        ids, valid = integers(0, requests, tokens), torch.rand(tokens, generator=g) < 0.8
        after = (integers(0, blocks * block_size + 2, tokens).to(torch.int64), ids, valid, table_for_samples(g, requests, blocks, high, True), table_for_samples(g, requests, blocks, high, True))
        kwargs: dict[str, object] = {"block_size": block_size, "compressed_block_size": compressed_block_size, "window": window, "compress_ratio": 2, **more}
        if more.get("decode_topk_lens") is True:
            kwargs["decode_topk_lens"] = integers(-1, k + 2, decodes).to(device)
        return Sample(label, (*(a.to(device) for a in before), prefill_topk, *(a.to(device) for a in after)), kwargs)

    yield drawn("decodes and prefills, local", 5, 4, 6)
    yield drawn("decodes are global, with lengths", 6, 3, 5, decode_indices_are_global=True, decode_topk_lens=True)
    yield drawn("all records of a prefill", 3, 6, 9, local_topk=False)
    yield drawn("local with lengths, packed pages", 4, 4, 6, block_span=5, compressed_block_span=3, decode_topk_lens=True)
    yield drawn("window layer without compressed entries", 4, 3, 0)
    yield drawn("decodes only", 5, 0, 4)
    yield drawn("prefills only", 0, 5, 4, local_topk=False)
    yield drawn("no tokens", 0, 0, 4)
    yield drawn("no requests", 2, 2, 3, requests=0)
    yield drawn("no blocks", 2, 2, 3, blocks=0)
    yield drawn("width equals window, page of one", 3, 3, 2, sizes=(1, 1, 3, 3))
    yield drawn("ids near the int32 limit of slots", 3, 4, 4, sizes=(48, 32, 5, 6), high=2**31 - 1, block_span=50, compressed_block_span=33)
    rows = drawn("request ids and positions outside", 2, 6, 3)
    positions = torch.tensor([-1, -(2**63), -1, 2**63 - 1, -(2**63), 3, 2**62, 0], device=device)
    ids = torch.tensor([2**31 - 1, 0, 0, 1, 2, -1, 2, 3], dtype=torch.int32, device=device)
    for label, valid in ((rows.label, True), ("all padding", False)):
        yield Sample(label, (*rows.args[:4], positions, ids, torch.full((8,), valid, device=device), *rows.args[7:]), rows.kwargs)
    yield Sample("positions outside, all records", (*rows.args[:3], None, positions, ids, torch.ones(8, dtype=torch.bool, device=device), *rows.args[7:]), rows.kwargs)
    wide = drawn("narrowed tables and strided rows", 6, 4, 8, blocks=8)
    a = wide.args
    yield Sample(wide.label, (a[0][::2], a[1][::2], a[2][::2, ::2], a[3][::2, ::2], *(t[::2] for t in a[4:7]), a[7][:, 1:6:2], a[8][:, 2:6]), wide.kwargs)
    wide = drawn("transposed rows and tables", 4, 4, 4, sizes=(4, 2, 3, 4), requests=4, decode_indices_are_global=True, compressed_block_span=3)
    a = wide.args
    yield Sample(wide.label, (a[0].t(), a[1], a[2].t(), a[3].t(), *a[4:7], a[7].t(), a[8].t()), wide.kwargs)


def _mixed_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    decodes, prefills, requests, k = n, n + 1, 7, 512
    swa, topk = (torch.randint(0, 4096, (decodes, width), generator=g, dtype=torch.int32) for width in (192, k))
    local = torch.randint(0, 60 * 64, (prefills, k), generator=g, dtype=torch.int32)
    swa_lens = torch.randint(1, 193, (decodes,), generator=g, dtype=torch.int32)
    ids = torch.randint(0, requests, (decodes + prefills,), generator=g, dtype=torch.int32)
    positions, valid = torch.randint(0, 60 * 64, (decodes + prefills,), generator=g), torch.rand(decodes + prefills, generator=g) < 0.9
    tensors = (swa, swa_lens, topk, local, positions, ids, valid, table_for_samples(g, requests, 60), table_for_samples(g, requests, 61))
    sizes = {"block_size": 64, "compressed_block_size": 64, "window": 128, "compress_ratio": 4}
    return Sample(f"{decodes} decode and {prefills} prefill tokens, k {k}", tuple(a.to(device) for a in tensors), sizes)


def _mixed_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    good = [zeros(2, 8), zeros(2), zeros(2, 4), zeros(3, 4), zeros(5, dtype=torch.int64), zeros(5), zeros(5, dtype=torch.bool), zeros(2, 3), zeros(2, 6)]
    sizes = {"block_size": 4, "compressed_block_size": 2, "window": 8}

    def bad(label: str, error: type[Exception], match: str, place: int | None = None, value: object = None, **more: object) -> BadInput:
        return BadInput(label, tuple(value if i == place else a for i, a in enumerate(good)), error, match, sizes | more)

    yield bad("more decode rows than tokens", ArgumentShapeError, "at most as many rows as positions (5)", 0, zeros(6, 8))
    yield bad("rows narrower than the window", ArgumentShapeError, "decode_swa_indices must be of at least window (8) columns", 0, zeros(2, 7))
    yield bad("lengths of other rows", ArgumentShapeError, "decode_swa_lens must be of shape [2 decode tokens]", 1, zeros(3))
    yield bad("top-k of other rows", ArgumentShapeError, "decode_topk_indices must be of shape [2 decode tokens, k]", 2, zeros(3, 4))
    yield bad("another k", ArgumentShapeError, "prefill_topk_indices must be of shape [3 prefill tokens, k = 4]", 3, zeros(3, 5))
    yield bad("int64 top-k", ArgumentDtypeError, "prefill_topk_indices must be int32", 3, zeros(3, 4, dtype=torch.int64))
    yield bad("validity as int32", ArgumentDtypeError, "is_valid_token must be bool", 6, zeros(5))
    yield bad("tables of other requests", ArgumentShapeError, "compressed_block_table must be of shape [2 requests, blocks]", 8, zeros(3, 6))
    yield bad("top-k lengths of other rows", ArgumentShapeError, "decode_topk_lens must be of shape [2 decode tokens]", decode_topk_lens=zeros(5))
    yield bad("ratio 0", ArgumentError, "compress_ratio must be at least 1, got 0", compress_ratio=0)
    yield bad("compressed block size 0", ArgumentError, "compressed_block_size must be between 1", compressed_block_size=0)
    yield bad("span below the page", ArgumentError, "block_span must be at least block_size (4), got 3", block_span=3)
    yield bad("compressed span below the page", ArgumentError, "compressed_block_span must be at least compressed_block_size (2), got 1", compressed_block_span=1)
    yield bad("table on another device", ArgumentDeviceError, "block_table must be on", 7, zeros(2, 3).to("meta"))


BUILD_MIXED_SPARSE_INDICES.implement(
    check=_mixed_check,
    reference=_mixed_reference,
    torch_impl=_mixed_torch,
    triton=_mixed_triton,
    fake=_mixed_fake,
    samples=_mixed_samples,
    sized=_mixed_sized,
    bad_inputs=_mixed_bad_inputs,
)
