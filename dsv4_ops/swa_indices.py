"""Sliding-window index rows: which KV slots a token of a window layer (or of a draft block) attends to.

``causal_swa_indices`` serves prefill, decode and MTP verification; ``draft_swa_indices`` serves the tokens of a
non-causal draft block, which all see the same keys. Slot of position p: ``block_table[request, p // B] * B + p % B``.

======================  ===========  ============  ====================================================================
argument                dtype        shape         meaning (B: tokens a page, W: window, Q: block queries)
======================  ===========  ============  ====================================================================
positions               int64        [T]           position of each token in its request
token_to_req_indices    int32        [T]           row of ``block_table`` of each token
is_valid_token          bool         [T]           false: padding, nothing else of that token is used
block_table             int32        [R, blocks]   physical page of each logical page, any strides (a narrowed view
                                                   is fine); 0 (null) and negative: not mapped
committed_lens          int32        [R]           S, tokens whose KV is final; the block stands at S..S+Q-1
is_valid_req            bool         [R]           false: padding request
block_size              int                        B, at least 1
window                  int                        W, logical: how many positions a token sees
block_queries           int                        Q, at least 1
width                   int                        columns of a row: storage, at least W (causal) or W + Q (draft)
draft_start             int32        [R]           optional: first position that the drafter has KV for
max_model_len           int                        optional: positions at or past it have no KV
returns indices         int32        [T or R*Q,    slots; causal: positions ``max(0, p-W+1)..p``; draft:
                                     width]        ``max(0, S-W, draft_start)..S+Q-1`` for every token of the block
returns lens            int32        [T or R*Q]    ``min(p+1, W)``; draft: the count of those positions, never below 0
======================  ===========  ============  ====================================================================

Column c belongs to position ``first + c``, always. A position without KV (logical page past the table, page not mapped,
position at or past ``max_model_len``) leaves -1 in its column, and so does a slot that int32 cannot hold (page ids near
``2**31 / B``): it never wraps. Lengths count these holes. Padding tokens and requests, requests outside the table,
negative positions and ``S <= 0`` give rows of -1 with length 0, without a load. Graph-safe: yes (sizes alone decide
what runs, nothing is read back).

Replaces the window metadata of serving engines' sparse MLA builders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from ._slots import INT32_MAX, check_tokens, safe_requests, slot_of, slots_at, table_for_samples
from .errors import ArgumentDeviceError, ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = [
    "causal_swa_indices",
    "decode_swa_width",
    "draft_swa_indices",
    "swa_index_width",
]

WIDTH_MULTIPLE = 64


def swa_index_width(window: int, block_queries: int) -> int:
    """Columns that the rows of a non-causal draft block need: ``window + block_queries``, rounded up to 64.

    Raises ArgumentError (out of range), ArgumentDtypeError (not an integer).
    """
    _checks.integer("swa_index_width", "window", window, 1)
    _checks.integer("swa_index_width", "block_queries", block_queries, 1)
    return -(-(window + block_queries) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def decode_swa_width(window: int, block_queries: int = 1, non_causal: bool = False) -> int:
    """Columns of a decode batch's window rows: the window itself, or ``swa_index_width`` for a non-causal draft block.

    Raises ArgumentError (out of range), ArgumentDtypeError (not an integer).
    """
    _checks.integer("decode_swa_width", "window", window, 1)
    _checks.integer("decode_swa_width", "block_queries", block_queries, 1)
    return swa_index_width(window, block_queries) if non_causal else window


# ---------------------------------------------------------------------------------------------- causal_swa_indices

CAUSAL_SWA_INDICES = _registry.define(
    "causal_swa_indices(Tensor positions, Tensor token_to_req_indices, Tensor is_valid_token, Tensor block_table, *, "
    "int block_size, int window, int width) -> (Tensor, Tensor)",
    out=("indices", "lens"),
)


def causal_swa_indices(
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    window: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Window rows of causal tokens: ``(indices int32 [T, width], lens int32 [T])``, see the module's table.

    Raises ArgumentError (sizes; ``width`` below ``window``), ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops causal_swa_indices``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = CAUSAL_SWA_INDICES(
        positions, token_to_req_indices, is_valid_token, block_table, block_size=block_size, window=window, width=width
    )
    return result


class _Causal(NamedTuple):
    positions: torch.Tensor
    token_to_req_indices: torch.Tensor
    is_valid_token: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    window: int
    width: int


_causal = _registry.unpacked(_Causal)


@_causal
def _causal_check(a: _Causal) -> None:
    where = "causal_swa_indices"
    _checks.tensor(where, "positions", a.positions, _checks.INT64, 1)
    check_tokens(where, a.token_to_req_indices, a.is_valid_token, a.positions.shape[0], "positions")
    _checks.tensor(where, "block_table", a.block_table, _checks.INT32, 2)
    _checks.same_device(where, positions=a.positions, token_to_req_indices=a.token_to_req_indices, is_valid_token=a.is_valid_token, block_table=a.block_table)
    _checks.integer(where, "block_size", a.block_size, 1, INT32_MAX)
    _checks.integer(where, "window", a.window, 1, INT32_MAX)
    _checks.integer(where, "width", a.width, 1, INT32_MAX)
    if a.width < a.window:
        raise ArgumentError(where, "width", f"at least window ({a.window}): it is the storage of a row", a.width, "Use decode_swa_width(window).")


@_causal
def _causal_reference(a: _Causal) -> tuple[torch.Tensor, torch.Tensor]:
    table, rows, lens = a.block_table.tolist(), [], []
    for position, request, valid in zip(a.positions.tolist(), a.token_to_req_indices.tolist(), a.is_valid_token.tolist(), strict=True):
        visible: range = range(0)
        if valid and 0 <= request < len(table) and position >= 0:
            visible = range(max(0, position - a.window + 1), position + 1)
        slots = [slot_of(table[request], p, a.block_size) for p in visible]
        rows.append(slots + [_checks.PAD_SLOT_ID] * (a.width - len(slots)))
        lens.append(len(slots))
    indices = torch.tensor(rows, dtype=torch.int32, device=a.positions.device).reshape(len(rows), a.width)
    return indices, torch.tensor(lens, dtype=torch.int32, device=a.positions.device)


@_causal
def _causal_torch(a: _Causal) -> tuple[torch.Tensor, torch.Tensor]:
    requests, has_request = safe_requests(a.token_to_req_indices, a.is_valid_token, a.block_table.shape[0])
    first = (a.positions - (a.window - 1)).clamp(min=0)
    lens = (a.positions - first + 1).masked_fill(~(has_request & (a.positions >= 0)), 0)
    columns = torch.arange(a.width, device=a.positions.device)
    indices = slots_at(a.block_table, requests, first[:, None] + columns, columns < lens[:, None], a.block_size)
    return indices, lens.to(torch.int32)


@_causal
def _causal_triton(a: _Causal) -> tuple[torch.Tensor, torch.Tensor]:
    from ._triton import swa_indices as kernels

    return kernels.causal_swa_indices(a)


@_causal
def _causal_fake(a: _Causal) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = a.positions.shape[0]
    return a.positions.new_empty((tokens, a.width), dtype=torch.int32), a.positions.new_empty((tokens,), dtype=torch.int32)


def _causal_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def call(label: str, positions: torch.Tensor, requests: torch.Tensor, valid: torch.Tensor, table: torch.Tensor, block_size: int, window: int, width: int) -> Sample:
        args = (positions.to(torch.int64), requests.to(torch.int32), valid, table)
        return Sample(label, tuple(a.to(device) for a in args), {"block_size": block_size, "window": window, "width": width})

    def drawn(label: str, tokens: int, requests: int, blocks: int, block_size: int, window: int, width: int, high: int = 500) -> Sample:
        positions = torch.randint(0, max(1, blocks * block_size + 3), (tokens,), generator=g)
        ids = torch.randint(0, max(1, requests), (tokens,), generator=g)
        return call(label, positions, ids, torch.rand(tokens, generator=g) < 0.8, table_for_samples(g, requests, blocks, high, holes=True), block_size, window, width)

    yield drawn("holes and padding tokens", 9, 3, 4, 4, 8, 8)
    yield drawn("width wider than the window", 6, 2, 5, 4, 7, 13)
    yield drawn("one token, page of one", 1, 1, 9, 1, 3, 4)
    yield drawn("no tokens", 0, 2, 2, 4, 4, 4)
    yield drawn("no requests", 3, 0, 2, 4, 4, 4)
    yield drawn("no blocks", 3, 2, 0, 4, 4, 4)
    yield drawn("ids near the int32 limit of slots", 8, 2, 4, 48, 8, 8, high=2**31 - 1)
    extremes = torch.tensor([-1, -(2**63), 2**63 - 1, 2**62, 0, 5])
    yield call("position extremes", extremes, torch.zeros(6), torch.ones(6, dtype=torch.bool), table_for_samples(g, 1, 3), 4, 5, 6)
    ids = torch.tensor([2**31 - 1, -1, -(2**31), 2, 1, 0])
    yield call("request ids outside the table", torch.arange(6), ids, torch.ones(6, dtype=torch.bool), table_for_samples(g, 2, 3), 4, 5, 6)
    yield call("all padding", extremes, ids, torch.zeros(6, dtype=torch.bool), table_for_samples(g, 2, 3), 4, 5, 6)
    narrowed = call("narrowed table", torch.tensor([15, 9, 16]), torch.arange(3), torch.ones(3, dtype=torch.bool), table_for_samples(g, 3, 16), 4, 6, 8)
    yield Sample(narrowed.label, (*narrowed.args[:3], narrowed.args[3][:, :4]), narrowed.kwargs)
    two = drawn("strided tokens and transposed table", 8, 3, 3, 4, 6, 6)
    yield Sample(two.label, (two.args[0][::2], two.args[1][::2], two.args[2][::2], two.args[3].t()), two.kwargs)


def _causal_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 64 * 64, (n,), generator=g)
    args = (positions, torch.arange(n, dtype=torch.int32), torch.ones(n, dtype=torch.bool), table_for_samples(g, n, 64))
    return Sample(f"{n} tokens", tuple(a.to(device) for a in args), {"block_size": 64, "window": 128, "width": 128})


def _causal_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    positions, ids = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    valid, table = torch.ones(3, dtype=torch.bool, device=device), torch.ones(2, 4, dtype=torch.int32, device=device)
    sizes = {"block_size": 4, "window": 8, "width": 8}
    yield BadInput("int32 positions", (ids, ids, valid, table), ArgumentDtypeError, "positions must be int64, got int32", sizes)
    yield BadInput("request ids of another length", (positions, ids[:2], valid, table), ArgumentShapeError, "one entry a token (3", sizes)
    yield BadInput("validity as int32", (positions, ids, ids, table), ArgumentDtypeError, "is_valid_token must be bool", sizes)
    yield BadInput("1-D table", (positions, ids, valid, table[0]), ArgumentShapeError, "block_table must be 2-dimensional", sizes)
    yield BadInput("int64 table", (positions, ids, valid, table.long()), ArgumentDtypeError, "block_table must be int32", sizes)
    yield BadInput("width below the window", (positions, ids, valid, table), ArgumentError, "width must be at least window (8)", sizes | {"width": 7})
    yield BadInput("block size 0", (positions, ids, valid, table), ArgumentError, "block_size must be between 1", sizes | {"block_size": 0})
    yield BadInput("window 0", (positions, ids, valid, table), ArgumentError, "window must be between 1", sizes | {"window": 0})
    if torch.device(device).type != "meta":
        yield BadInput("table on another device", (positions, ids, valid, table.to("meta")), ArgumentDeviceError, "block_table must be on", sizes)


CAUSAL_SWA_INDICES.implement(
    check=_causal_check,
    reference=_causal_reference,
    torch_impl=_causal_torch,
    triton=_causal_triton,
    fake=_causal_fake,
    samples=_causal_samples,
    sized=_causal_sized,
    bad_inputs=_causal_bad_inputs,
)

# ----------------------------------------------------------------------------------------------- draft_swa_indices

DRAFT_SWA_INDICES = _registry.define(
    "draft_swa_indices(Tensor committed_lens, Tensor block_table, Tensor is_valid_req, *, int block_size, int window, int block_queries, "
    "int width, Tensor? draft_start=None, SymInt? max_model_len=None) -> (Tensor, Tensor)",
    out=("indices", "lens"),
)


def draft_swa_indices(
    committed_lens: torch.Tensor,
    block_table: torch.Tensor,
    is_valid_req: torch.Tensor,
    *,
    block_size: int,
    window: int,
    block_queries: int,
    width: int,
    draft_start: torch.Tensor | None = None,
    max_model_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the tokens of draft blocks: ``(indices int32 [R*Q, width], lens int32 [R*Q])``; row ``i*Q + j`` is token j of request i.

    All Q rows of a request are equal: a draft block is not causal. Raises ArgumentError (sizes; ``width`` below
    ``window + block_queries``), ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops draft_swa_indices``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = DRAFT_SWA_INDICES(
        committed_lens,
        block_table,
        is_valid_req,
        block_size=block_size,
        window=window,
        block_queries=block_queries,
        width=width,
        draft_start=draft_start,
        max_model_len=max_model_len,
    )
    return result


class _Draft(NamedTuple):
    committed_lens: torch.Tensor
    block_table: torch.Tensor
    is_valid_req: torch.Tensor
    block_size: int
    window: int
    block_queries: int
    width: int
    draft_start: torch.Tensor | None = None
    max_model_len: int | None = None


_draft = _registry.unpacked(_Draft)


@_draft
def _draft_check(a: _Draft) -> None:
    where = "draft_swa_indices"
    _checks.tensor(where, "committed_lens", a.committed_lens, _checks.INT32, 1)
    _checks.tensor(where, "block_table", a.block_table, _checks.INT32, 2)
    _checks.tensor(where, "is_valid_req", a.is_valid_req, _checks.BOOL, 1)
    per_request = [("block_table", a.block_table), ("is_valid_req", a.is_valid_req)]
    if a.draft_start is not None:
        _checks.tensor(where, "draft_start", a.draft_start, _checks.INT32, 1)
        per_request.append(("draft_start", a.draft_start))
    for name, value in per_request:
        if value.shape[0] != a.committed_lens.shape[0]:
            raise ArgumentShapeError(where, name, f"one row a request ({a.committed_lens.shape[0]}, like committed_lens)", f"shape {list(value.shape)}")
    _checks.same_device(where, committed_lens=a.committed_lens, block_table=a.block_table, is_valid_req=a.is_valid_req, draft_start=a.draft_start)
    _checks.integer(where, "block_size", a.block_size, 1, INT32_MAX)
    _checks.integer(where, "window", a.window, 1, INT32_MAX)
    _checks.integer(where, "block_queries", a.block_queries, 1, INT32_MAX)
    _checks.integer(where, "width", a.width, 1, INT32_MAX)
    if a.width < a.window + a.block_queries:
        raise ArgumentError(where, "width", f"at least window + block_queries ({a.window + a.block_queries})", a.width, "Use swa_index_width(window, block_queries).")
    if a.max_model_len is not None:
        _checks.integer(where, "max_model_len", a.max_model_len, 1)


@_draft
def _draft_reference(a: _Draft) -> tuple[torch.Tensor, torch.Tensor]:
    table, rows, lens = a.block_table.tolist(), [], []
    starts = [0] * len(table) if a.draft_start is None else a.draft_start.tolist()
    for request, (committed, valid) in enumerate(zip(a.committed_lens.tolist(), a.is_valid_req.tolist(), strict=True)):
        visible: range = range(0)
        if valid and committed > 0:
            visible = range(max(0, committed - a.window, starts[request]), committed + a.block_queries)
        slots = [_checks.PAD_SLOT_ID if a.max_model_len is not None and p >= a.max_model_len else slot_of(table[request], p, a.block_size) for p in visible]
        rows += [slots + [_checks.PAD_SLOT_ID] * (a.width - len(slots))] * a.block_queries
        lens += [len(slots)] * a.block_queries
    indices = torch.tensor(rows, dtype=torch.int32, device=a.committed_lens.device).reshape(len(rows), a.width)
    return indices, torch.tensor(lens, dtype=torch.int32, device=a.committed_lens.device)


@_draft
def _draft_torch(a: _Draft) -> tuple[torch.Tensor, torch.Tensor]:
    committed = a.committed_lens.to(torch.int64)
    first = (committed - a.window).clamp(min=0)
    if a.draft_start is not None:
        first = torch.maximum(first, a.draft_start.to(torch.int64))
    lens = (committed + a.block_queries - first).clamp(min=0).masked_fill(~(a.is_valid_req & (committed > 0)), 0)
    columns = torch.arange(a.width, device=committed.device)
    positions = first[:, None] + columns
    listed = columns < lens[:, None]
    if a.max_model_len is not None:
        listed = listed & (positions < a.max_model_len)
    requests = torch.arange(committed.shape[0], device=committed.device)
    indices = slots_at(a.block_table, requests, positions, listed, a.block_size)
    return indices.repeat_interleave(a.block_queries, 0), lens.to(torch.int32).repeat_interleave(a.block_queries, 0)


@_draft
def _draft_triton(a: _Draft) -> tuple[torch.Tensor, torch.Tensor]:
    from ._triton import swa_indices as kernels

    return kernels.draft_swa_indices(a)


@_draft
def _draft_fake(a: _Draft) -> tuple[torch.Tensor, torch.Tensor]:
    rows = a.committed_lens.shape[0] * a.block_queries
    return a.committed_lens.new_empty((rows, a.width)), a.committed_lens.new_empty((rows,))


def _draft_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def drawn(label: str, requests: int, blocks: int, high: int = 500, sizes: tuple[int, int, int, int] = (4, 7, 3, 12), **more: int | None) -> Sample:
        block_size, window, block_queries, width = sizes
        committed = torch.randint(0, max(1, blocks * block_size + 3), (requests,), generator=g, dtype=torch.int32)
        args = (committed, table_for_samples(g, requests, blocks, high, holes=True), torch.rand(requests, generator=g) < 0.8)
        kwargs = {"block_size": block_size, "window": window, "block_queries": block_queries, "width": width, **more}
        return Sample(label, tuple(a.to(device) for a in args), kwargs)

    def starting(sample: Sample, low: int, high: int) -> Sample:
        start = torch.randint(low, high, (sample.args[0].shape[0],), generator=g, dtype=torch.int32).to(device)
        return Sample(sample.label, sample.args, sample.kwargs | {"draft_start": start})

    yield drawn("holes and padding requests", 7, 4)
    yield drawn("one request, one query", 1, 3, sizes=(4, 3, 1, 4))
    yield drawn("no requests", 0, 4)
    yield drawn("no blocks", 3, 0)
    yield drawn("limit inside the blocks", 7, 4, max_model_len=9)
    yield starting(drawn("drafter starts late", 9, 4), -3, 20)
    yield starting(drawn("drafter starts behind the block", 3, 4), 100, 200)
    yield drawn("ids near the int32 limit of slots", 6, 4, high=2**31 - 1, sizes=(48, 8, 3, 11))
    extremes = torch.tensor([2**31 - 1, -(2**31), -1, 0, 1, 2], dtype=torch.int32, device=device)
    sizes = {"block_size": 4, "window": 5, "block_queries": 3, "width": 9}
    for label, valid in (("committed extremes", True), ("all padding", False)):
        yield Sample(label, (extremes, table_for_samples(g, 6, 3).to(device), torch.full((6,), valid, device=device)), sizes)
    start = torch.tensor([2**31 - 1, -(2**31), 0, 0, -1, 2], dtype=torch.int32, device=device)
    yield Sample("start extremes", (extremes, table_for_samples(g, 6, 3).to(device), torch.ones(6, dtype=torch.bool, device=device)), sizes | {"draft_start": start})
    wide = starting(drawn("narrowed table and strided requests", 8, 12), 0, 9)
    yield Sample(wide.label, (wide.args[0][::2], wide.args[1][::2, 1:9:2], wide.args[2][::2]), wide.kwargs | {"draft_start": wide.kwargs["draft_start"][::2]})


def _draft_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    committed = torch.randint(1, 64 * 63, (n,), generator=g, dtype=torch.int32)
    args = (committed, table_for_samples(g, n, 64), torch.ones(n, dtype=torch.bool))
    return Sample(f"{n} requests of 5", tuple(a.to(device) for a in args), {"block_size": 64, "window": 128, "block_queries": 5, "width": 192})


def _draft_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    lens, valid = torch.ones(3, dtype=torch.int32, device=device), torch.ones(3, dtype=torch.bool, device=device)
    table = torch.ones(3, 4, dtype=torch.int32, device=device)
    sizes = {"block_size": 4, "window": 8, "block_queries": 2, "width": 10}
    yield BadInput("int64 lengths", (lens.long(), table, valid), ArgumentDtypeError, "committed_lens must be int32, got int64", sizes)
    yield BadInput("table of fewer requests", (lens, table[:2], valid), ArgumentShapeError, "block_table must be one row a request (3", sizes)
    yield BadInput("validity of fewer requests", (lens, table, valid[:2]), ArgumentShapeError, "is_valid_req must be one row a request (3", sizes)
    yield BadInput("starts of fewer requests", (lens, table, valid), ArgumentShapeError, "draft_start must be one row a request (3", sizes | {"draft_start": lens[:2]})
    yield BadInput("int64 starts", (lens, table, valid), ArgumentDtypeError, "draft_start must be int32", sizes | {"draft_start": lens.long()})
    yield BadInput("width of the window alone", (lens, table, valid), ArgumentError, "width must be at least window + block_queries (10)", sizes | {"width": 8})
    yield BadInput("no queries", (lens, table, valid), ArgumentError, "block_queries must be between 1", sizes | {"block_queries": 0})
    yield BadInput("limit 0", (lens, table, valid), ArgumentError, "max_model_len must be at least 1, got 0", sizes | {"max_model_len": 0})
    yield BadInput("table on another device", (lens, table.to("meta"), valid), ArgumentDeviceError, "block_table must be on", sizes)


DRAFT_SWA_INDICES.implement(
    check=_draft_check,
    reference=_draft_reference,
    torch_impl=_draft_torch,
    triton=_draft_triton,
    fake=_draft_fake,
    samples=_draft_samples,
    sized=_draft_sized,
    bad_inputs=_draft_bad_inputs,
)
