"""Context lengths: how far each query token sees, in tokens or in compressed records.

``mtp_context_lens`` is the uniform form (every request has ``next_n`` query tokens), ``ragged_context_lens`` the
flattened form for any mix of query lengths, ``expand_block_table`` the block table that goes with it, and
``local_context_lens`` the share of one context-parallel rank.

====================  ========  ===============  ======================================================================
argument              dtype     shape            meaning
====================  ========  ===============  ======================================================================
seq_lens              int32/64  [R]              tokens of each request after this step, its query tokens included; any
                                                 stride. A padded request has length 0; a negative length counts as 0
next_n                int                        query tokens a request, at least 1
query_start_loc       int32     [R+1]            request i owns the tokens ``[query_start_loc[i], query_start_loc[i+1])``;
                                                 read as its running maximum, so that a tail of zeros is no request
num_tokens            int                        rows to fill: the batch's tokens, padded (to a capture size)
compress_ratio        int                        tokens a compressed record, at least 1 (1: lengths in tokens)
max_seq_len           int                        optional: a length counts at most so many *tokens* (those that the block
                                                 table can address), clamped before the division
block_table           int32     [R, blocks]      physical page of each logical page, any strides
token_to_req_indices  int32     [T]              row of ``block_table`` of each token
is_valid_token        bool      [T]              false: padding, its request id is not used for a load
lens                  int32/64  [n] or [n, m]    already expanded lengths (tokens or records), any strides
cp_rank, cp_size      int                        this rank, and how many share each sequence
cp_interleave         int                        entries in a row that stay on one rank, at least 1
--------------------  --------  ---------------  ----------------------------------------------------------------------
mtp_context_lens      int32     [R, next_n]      token j of n sees ``max(0, s - n + j + 1) // compress_ratio``
ragged_context_lens   int32     [num_tokens]     (lens) token j of q the same, with q its request's query length; 0 for padding
.                     int32     [num_tokens]     (token_to_req_indices) 0 for padding: a legal row that nobody may use
.                     bool      [num_tokens]     (is_valid_token) what tells padding from request 0
expand_block_table    int32     [T, blocks]      the table row of each token's request; all 0 (null) for padding tokens and
                                                 for request ids outside the table
local_context_lens    int32     shape of lens    of ``lens`` entries dealt out in runs of ``cp_interleave``, those of ``cp_rank``
====================  ========  ===============  ======================================================================

The clamp comes before the division and the division after the per-token expansion: ``s // r - n + j + 1`` is another,
wrong, number. For the same reason a rank's share is taken last, of lengths that are already per token and already in
records. Lengths past int32 are ``2**31 - 1``. Graph-safe: yes (sizes alone decide what runs, nothing is read back).

Which of the two forms a batch takes is decided on the host, by ``is_uniform_decode`` and ``classify_batch``: never from
a token total, which two different batches can share, and never from rows behind the live requests.

Replaces the per-token length expansion of sparse-indexer metadata builders in serving engines.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from ._slots import INT32_MAX, check_tokens, safe_requests, table_for_samples
from .batch import BatchKind, classify_batch, is_uniform_decode, unpadded_token_rows
from .errors import ArgumentDeviceError, ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = [
    "BatchKind",
    "classify_batch",
    "expand_block_table",
    "is_uniform_decode",
    "local_context_lens",
    "mtp_context_lens",
    "ragged_context_lens",
    "unpadded_token_rows",
]

# ------------------------------------------------------------------------------------------------ mtp_context_lens

MTP_CONTEXT_LENS = _registry.define(
    "mtp_context_lens(Tensor seq_lens, int next_n, int compress_ratio=1, *, SymInt? max_seq_len=None) -> Tensor",
    out=("out",),
)


def mtp_context_lens(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1, *, max_seq_len: int | None = None) -> torch.Tensor:
    """Visible length of each of the ``next_n`` query tokens of every request: int32 ``[R, next_n]``.

    Raises ArgumentError (bad ``next_n``, ``compress_ratio`` or ``max_seq_len``), ArgumentDtypeError, ArgumentShapeError.
    Arguments: ``python -m dsv4_ops ops mtp_context_lens``.
    """
    result: torch.Tensor = MTP_CONTEXT_LENS(seq_lens, next_n, compress_ratio, max_seq_len=max_seq_len)
    return result


def _mtp_check(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1, *, max_seq_len: int | None = None) -> None:
    _checks.tensor("mtp_context_lens", "seq_lens", seq_lens, _checks.INDEX, 1)
    _checks.integer("mtp_context_lens", "next_n", next_n, 1, INT32_MAX)
    _check_division("mtp_context_lens", compress_ratio, max_seq_len)


def _check_division(where: str, compress_ratio: int, max_seq_len: int | None) -> None:
    _checks.integer(where, "compress_ratio", compress_ratio, 1)
    if max_seq_len is not None:
        _checks.integer(where, "max_seq_len", max_seq_len, 0)


def _visible(seq_len: int, back: int, compress_ratio: int, max_seq_len: int | None) -> int:
    """Length of the token that stands ``back`` tokens before the last one of its request."""
    tokens = max(0, seq_len - back)
    if max_seq_len is not None:
        tokens = min(tokens, max_seq_len)
    return min(tokens // compress_ratio, INT32_MAX)


def _visible_torch(seq_lens: torch.Tensor, back: torch.Tensor, compress_ratio: int, max_seq_len: int | None) -> torch.Tensor:
    # The first clamp keeps the most negative int64 from wrapping when `back` is subtracted.
    tokens = (seq_lens.to(torch.int64).clamp(min=0) - back).clamp(min=0, max=max_seq_len)
    if compress_ratio != 1:
        tokens = tokens // compress_ratio
    return tokens.clamp(max=INT32_MAX).to(torch.int32)


def _mtp_reference(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1, *, max_seq_len: int | None = None) -> torch.Tensor:
    rows = [[_visible(s, next_n - 1 - j, compress_ratio, max_seq_len) for j in range(next_n)] for s in seq_lens.tolist()]
    return torch.tensor(rows, dtype=torch.int32, device=seq_lens.device).reshape(len(rows), next_n)


def _mtp_torch(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1, *, max_seq_len: int | None = None) -> torch.Tensor:
    back = torch.arange(next_n - 1, -1, -1, device=seq_lens.device)
    return _visible_torch(seq_lens[:, None], back, compress_ratio, max_seq_len)


def _mtp_triton(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1, *, max_seq_len: int | None = None) -> torch.Tensor:
    from ._triton import context_lens as kernels

    return kernels.mtp_context_lens(seq_lens, next_n, compress_ratio, max_seq_len)


def _mtp_fake(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1, *, max_seq_len: int | None = None) -> torch.Tensor:
    return seq_lens.new_empty((seq_lens.shape[0], next_n), dtype=torch.int32)


def _mtp_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def lens(n: int, high: int = 4096) -> torch.Tensor:
        return torch.randint(0, high, (n,), generator=generator, dtype=torch.int32).to(device)

    yield Sample("plain decode", (lens(5), 1))
    yield Sample("next_n 4, ratio 4", (lens(7), 4, 4))
    yield Sample("no requests", (lens(0), 2))
    yield Sample("padded, short and negative", (torch.tensor([0, 1, 2, 3, -1, -(2**31)], dtype=torch.int32, device=device), 3, 128))
    yield Sample("int32 extremes, int64 lengths", (torch.tensor([2**31 - 1, 2**31, 0], device=device), 2, 4))
    yield Sample("int64 extremes", (torch.tensor([2**63 - 1, 2**40, 2**31, -(2**63)], device=device), 2))
    yield Sample("clamped to what the table holds", (lens(9), 3, 4), {"max_seq_len": 1001})
    yield Sample("strided view", (lens(12)[::2], 2))


def _mtp_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(f"{n} requests", (torch.randint(0, 131072, (n,), generator=generator, dtype=torch.int32).to(device), 4, 4))


def _mtp_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    lens = torch.ones(3, dtype=torch.int32, device=device)
    yield BadInput("float lengths", (lens.float(), 2), ArgumentDtypeError, "seq_lens must be int32 or int64, got float32")
    yield BadInput("2-D lengths", (lens[None], 2), ArgumentShapeError, "seq_lens must be 1-dimensional")
    yield BadInput("next_n 0", (lens, 0), ArgumentError, "next_n must be between 1 and 2147483647, got 0")
    yield BadInput("next_n past int32", (lens, 2**62), ArgumentError, "next_n must be between 1 and 2147483647")
    yield BadInput("ratio 0", (lens, 2, 0), ArgumentError, "compress_ratio must be at least 1, got 0")
    yield BadInput("negative limit", (lens, 2), ArgumentError, "max_seq_len must be at least 0, got -1", {"max_seq_len": -1})


MTP_CONTEXT_LENS.implement(
    check=_mtp_check,
    reference=_mtp_reference,
    torch_impl=_mtp_torch,
    triton=_mtp_triton,
    fake=_mtp_fake,
    samples=_mtp_samples,
    sized=_mtp_sized,
    bad_inputs=_mtp_bad_inputs,
)

# --------------------------------------------------------------------------------------------- ragged_context_lens

RAGGED_CONTEXT_LENS = _registry.define(
    "ragged_context_lens(Tensor seq_lens, Tensor query_start_loc, SymInt num_tokens, int compress_ratio=1, *, SymInt? max_seq_len=None) -> (Tensor, Tensor, Tensor)",
    out=("lens", "token_to_req_indices", "is_valid_token"),
)


def ragged_context_lens(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int, compress_ratio: int = 1, *, max_seq_len: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-token lengths of a batch with any query lengths: ``(lens, token_to_req_indices, is_valid_token)``, each ``[num_tokens]``.

    Requests come from ``query_start_loc``; an empty one gets no row; rows from its last entry on are padding.
    The first two are int32, the last bool. Raises ArgumentError, ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops ragged_context_lens``.
    """
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = RAGGED_CONTEXT_LENS(seq_lens, query_start_loc, num_tokens, compress_ratio, max_seq_len=max_seq_len)
    return result


def _ragged_check(seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int, compress_ratio: int = 1, *, max_seq_len: int | None = None) -> None:
    where = "ragged_context_lens"
    _checks.tensor(where, "seq_lens", seq_lens, _checks.INDEX, 1)
    _checks.tensor(where, "query_start_loc", query_start_loc, _checks.INT32, 1)
    if query_start_loc.shape[0] != seq_lens.shape[0] + 1:
        fix = "Cut seq_lens to the requests that query_start_loc describes."
        raise ArgumentShapeError(where, "query_start_loc", f"one entry longer than seq_lens ({seq_lens.shape[0]})", f"shape {list(query_start_loc.shape)}", fix)
    _checks.same_device(where, seq_lens=seq_lens, query_start_loc=query_start_loc)
    _checks.integer(where, "num_tokens", num_tokens, 0)
    _check_division(where, compress_ratio, max_seq_len)


def _ragged_reference(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int, compress_ratio: int = 1, *, max_seq_len: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lens, requests, valid = [0] * num_tokens, [0] * num_tokens, [False] * num_tokens
    starts = query_start_loc.tolist()
    start = starts[0]
    for request, seq_len in enumerate(seq_lens.tolist()):
        end = max(start, starts[request + 1])
        for t in range(max(0, start), min(end, num_tokens)):
            lens[t], requests[t], valid[t] = _visible(seq_len, end - 1 - t, compress_ratio, max_seq_len), request, True
        start = end
    device = seq_lens.device
    return torch.tensor(lens, dtype=torch.int32, device=device), torch.tensor(requests, dtype=torch.int32, device=device), torch.tensor(valid, dtype=torch.bool, device=device)


def _ragged_torch(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int, compress_ratio: int = 1, *, max_seq_len: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if seq_lens.shape[0] == 0:
        zeros = seq_lens.new_zeros((2, num_tokens), dtype=torch.int32)
        return zeros[0].clone(), zeros[1].clone(), zeros.new_zeros((num_tokens,), dtype=torch.bool)
    bounds = query_start_loc.to(torch.int64).cummax(0).values
    tokens = torch.arange(num_tokens, device=seq_lens.device)
    request = torch.searchsorted(bounds[1:], tokens, right=True)
    valid = (request < seq_lens.shape[0]) & (tokens >= bounds[0])
    request = request.masked_fill(~valid, 0)
    lens = _visible_torch(seq_lens[request], bounds[1:][request] - 1 - tokens, compress_ratio, max_seq_len)
    return lens.masked_fill(~valid, 0), request.to(torch.int32), valid


def _ragged_triton(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int, compress_ratio: int = 1, *, max_seq_len: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from ._triton import context_lens as kernels

    return kernels.ragged_context_lens(seq_lens, query_start_loc, num_tokens, compress_ratio, max_seq_len)


def _ragged_fake(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int, compress_ratio: int = 1, *, max_seq_len: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lens, requests = (seq_lens.new_empty((num_tokens,), dtype=torch.int32) for _ in range(2))
    return lens, requests, seq_lens.new_empty((num_tokens,), dtype=torch.bool)


def _ragged_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def drawn(requests: int, high: int = 5, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
        start = torch.zeros(requests + 1, dtype=torch.int32)
        start[1:] = torch.randint(0, high, (requests,), generator=g).cumsum(0)
        return torch.randint(0, 4096, (requests,), generator=g).to(dtype).to(device), start.to(device)

    yield Sample("mixed lengths with empty requests", (*drawn(6), 20))
    yield Sample("ratio 4, fewer rows than tokens", (*drawn(8), 7, 4))
    yield Sample("all requests empty", (*drawn(3, high=1), 5))
    yield Sample("no requests", (*drawn(0), 5))
    yield Sample("no rows", (*drawn(3), 0))
    yield Sample("int64 lengths, clamped", (*drawn(5, dtype=torch.int64), 16, 128), {"max_seq_len": 700})
    lens = torch.tensor([2**63 - 1, 2**31, -(2**63), 1, 0, 5], device=device)
    yield Sample("length extremes, queries longer than sequences", (lens, torch.tensor([0, 2, 4, 6, 9, 11, 13], dtype=torch.int32, device=device), 16))
    broken = torch.tensor([2, 5, 3, 7, 0, 0, -1], dtype=torch.int32, device=device)
    yield Sample("start above 0, not ascending, tail of zeros", (lens, broken, 9))
    yield Sample("start negative", (lens[:2], torch.tensor([-3, 2, 2**31 - 1], dtype=torch.int32, device=device), 6))
    seq, start = drawn(10)
    yield Sample("strided views", (seq[::2], start[::2], 24))


def _ragged_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    start = torch.zeros(n + 1, dtype=torch.int32)
    start[1:] = torch.randint(0, 8, (n,), generator=g).cumsum(0)
    return Sample(f"{n} requests", (torch.randint(0, 131072, (n,), generator=g, dtype=torch.int32).to(device), start.to(device), 4 * n, 4))


def _ragged_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    lens, start = torch.ones(3, dtype=torch.int32, device=device), torch.arange(4, dtype=torch.int32, device=device)
    yield BadInput("one start a request", (lens, start[:3], 4), ArgumentShapeError, "query_start_loc must be one entry longer than seq_lens (3)")
    yield BadInput("int64 starts", (lens, start.long(), 4), ArgumentDtypeError, "query_start_loc must be int32")
    yield BadInput("negative rows", (lens, start, -1), ArgumentError, "num_tokens must be at least 0, got -1")
    yield BadInput("ratio 0", (lens, start, 4, 0), ArgumentError, "compress_ratio must be at least 1, got 0")
    yield BadInput("starts on another device", (lens, start.to("meta"), 4), ArgumentDeviceError, "query_start_loc must be on")


RAGGED_CONTEXT_LENS.implement(
    check=_ragged_check,
    reference=_ragged_reference,
    torch_impl=_ragged_torch,
    triton=_ragged_triton,
    fake=_ragged_fake,
    samples=_ragged_samples,
    sized=_ragged_sized,
    bad_inputs=_ragged_bad_inputs,
)

# ---------------------------------------------------------------------------------------------- expand_block_table

EXPAND_BLOCK_TABLE = _registry.define("expand_block_table(Tensor block_table, Tensor token_to_req_indices, Tensor is_valid_token) -> Tensor", out=("out",))


def expand_block_table(block_table: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor) -> torch.Tensor:
    """The block table with one row a token, int32 ``[T, blocks]``: what back ends that take one query a row read.

    Raises ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops expand_block_table``.
    """
    result: torch.Tensor = EXPAND_BLOCK_TABLE(block_table, token_to_req_indices, is_valid_token)
    return result


def _expand_check(block_table: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor) -> None:
    where = "expand_block_table"
    _checks.tensor(where, "block_table", block_table, _checks.INT32, 2)
    _checks.tensor(where, "token_to_req_indices", token_to_req_indices, _checks.INT32, 1)
    check_tokens(where, token_to_req_indices, is_valid_token, token_to_req_indices.shape[0], "token_to_req_indices")
    _checks.same_device(where, block_table=block_table, token_to_req_indices=token_to_req_indices, is_valid_token=is_valid_token)


def _expand_reference(block_table: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor) -> torch.Tensor:
    expanded = torch.zeros(token_to_req_indices.shape[0], block_table.shape[1], dtype=torch.int32, device=block_table.device)
    for t, (request, valid) in enumerate(zip(token_to_req_indices.tolist(), is_valid_token.tolist(), strict=True)):
        if valid and 0 <= request < block_table.shape[0]:
            expanded[t] = block_table[request]
    return expanded


def _expand_torch(block_table: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor) -> torch.Tensor:
    requests, has_request = safe_requests(token_to_req_indices, is_valid_token, block_table.shape[0])
    if block_table.shape[0] == 0:
        return block_table.new_zeros((requests.shape[0], block_table.shape[1]))
    return block_table.index_select(0, requests).masked_fill_(~has_request[:, None], _checks.NULL_BLOCK)


def _expand_triton(block_table: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor) -> torch.Tensor:
    from ._triton import context_lens as kernels

    return kernels.expand_block_table(block_table, token_to_req_indices, is_valid_token)


def _expand_fake(block_table: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor) -> torch.Tensor:
    return block_table.new_empty((token_to_req_indices.shape[0], block_table.shape[1]))


def _expand_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def drawn(label: str, tokens: int, requests: int, blocks: int) -> Sample:
        ids = torch.randint(0, max(1, requests), (tokens,), generator=g, dtype=torch.int32)
        args = (table_for_samples(g, requests, blocks, holes=True), ids, torch.rand(tokens, generator=g) < 0.7)
        return Sample(label, tuple(a.to(device) for a in args))

    yield drawn("padding tokens", 9, 4, 5)
    yield drawn("one token", 1, 1, 1)
    yield drawn("no tokens", 0, 2, 3)
    yield drawn("no requests", 3, 0, 3)
    yield drawn("no blocks", 3, 2, 0)
    ids = torch.tensor([2**31 - 1, -1, -(2**31), 2, 1, 0], dtype=torch.int32, device=device)
    for label, valid in (("request ids outside the table", True), ("all padding", False)):
        yield Sample(label, (table_for_samples(g, 2, 3).to(device), ids, torch.full((6,), valid, device=device)))
    wide = drawn("narrowed table and strided tokens", 8, 3, 9)
    yield Sample(wide.label, (wide.args[0][:, 1:8:2], wide.args[1][::2], wide.args[2][::2]))


def _expand_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    args = (table_for_samples(g, n, 256), torch.arange(n, dtype=torch.int32), torch.rand(n, generator=g) < 0.9)
    return Sample(f"{n} tokens", tuple(a.to(device) for a in args))


def _expand_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    table, ids, valid = torch.ones(2, 4, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device), torch.ones(3, dtype=torch.bool, device=device)
    yield BadInput("1-D table", (table[0], ids, valid), ArgumentShapeError, "block_table must be 2-dimensional")
    yield BadInput("int64 table", (table.long(), ids, valid), ArgumentDtypeError, "block_table must be int32")
    yield BadInput("int64 ids", (table, ids.long(), valid), ArgumentDtypeError, "token_to_req_indices must be int32")
    yield BadInput("validity of another length", (table, ids, valid[:2]), ArgumentShapeError, "is_valid_token must be one entry a token (3")
    yield BadInput("table on another device", (table.to("meta"), ids, valid), ArgumentDeviceError, "must be on meta")


EXPAND_BLOCK_TABLE.implement(
    check=_expand_check,
    reference=_expand_reference,
    torch_impl=_expand_torch,
    triton=_expand_triton,
    fake=_expand_fake,
    samples=_expand_samples,
    sized=_expand_sized,
    bad_inputs=_expand_bad_inputs,
)

# ---------------------------------------------------------------------------------------------- local_context_lens

LOCAL_CONTEXT_LENS = _registry.define("local_context_lens(Tensor lens, int cp_rank, int cp_size, int cp_interleave=1) -> Tensor", out=("out",))


def local_context_lens(lens: torch.Tensor, cp_rank: int, cp_size: int, cp_interleave: int = 1) -> torch.Tensor:
    """How many of the first ``lens`` entries belong to ``cp_rank`` of ``cp_size``: int32, shape of ``lens``.

    Entry p belongs to rank ``(p // cp_interleave) % cp_size``. ``lens`` must be per token already (``mtp_context_lens`` or
    ``ragged_context_lens``), in the unit that is sharded. Raises ArgumentError, ArgumentDtypeError, ArgumentShapeError.
    Arguments: ``python -m dsv4_ops ops local_context_lens``.
    """
    result: torch.Tensor = LOCAL_CONTEXT_LENS(lens, cp_rank, cp_size, cp_interleave)
    return result


def _local_check(lens: torch.Tensor, cp_rank: int, cp_size: int, cp_interleave: int = 1) -> None:
    where = "local_context_lens"
    _checks.tensor(where, "lens", lens, _checks.INDEX, (1, 2))
    _checks.integer(where, "cp_size", cp_size, 1, INT32_MAX)
    _checks.integer(where, "cp_rank", cp_rank, 0, cp_size - 1)
    _checks.integer(where, "cp_interleave", cp_interleave, 1, INT32_MAX)


def _local_reference(lens: torch.Tensor, cp_rank: int, cp_size: int, cp_interleave: int = 1) -> torch.Tensor:
    def share(length: int) -> int:
        whole, rest = divmod(max(0, length), cp_size * cp_interleave)
        return min(whole * cp_interleave + min(max(rest - cp_rank * cp_interleave, 0), cp_interleave), INT32_MAX)

    shares = [share(length) for length in lens.flatten().tolist()]
    return torch.tensor(shares, dtype=torch.int32, device=lens.device).reshape(lens.shape)


def _local_torch(lens: torch.Tensor, cp_rank: int, cp_size: int, cp_interleave: int = 1) -> torch.Tensor:
    total = lens.to(torch.int64).contiguous().clamp(min=0)
    whole = total // (cp_size * cp_interleave)
    rest = total - whole * (cp_size * cp_interleave)
    own = (rest - cp_rank * cp_interleave).clamp(min=0, max=cp_interleave)
    return (whole * cp_interleave + own).clamp(max=INT32_MAX).to(torch.int32)


def _local_triton(lens: torch.Tensor, cp_rank: int, cp_size: int, cp_interleave: int = 1) -> torch.Tensor:
    from ._triton import context_lens as kernels

    return kernels.local_context_lens(lens, cp_rank, cp_size, cp_interleave)


def _local_fake(lens: torch.Tensor, cp_rank: int, cp_size: int, cp_interleave: int = 1) -> torch.Tensor:
    return lens.new_empty(lens.shape, dtype=torch.int32)


def _local_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def lens(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 4096, shape, generator=g, dtype=torch.int32).to(device)

    yield Sample("rank 1 of 2", (lens(9), 1, 2))
    yield Sample("2-D, interleave 16", (lens(5, 3), 2, 4, 16))
    yield Sample("one rank", (lens(5), 0, 1))
    yield Sample("nothing", (lens(0), 0, 2))
    yield Sample("no columns", (lens(3, 0), 0, 2))
    yield Sample("int64 extremes", (torch.tensor([2**63 - 1, 2**40, -(2**63), 0], device=device), 0, 2, 3))
    yield Sample("transposed and strided", (lens(6, 8)[::2, ::2].t(), 1, 3, 4))
    yield Sample("transposed int64", (lens(6, 8).long().t(), 1, 3, 4))


def _local_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    return Sample(f"{n} requests of 6", (torch.randint(0, 131072, (n, 6), generator=g, dtype=torch.int32).to(device), 1, 4, 16))


def _local_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    lens = torch.ones(3, dtype=torch.int32, device=device)
    yield BadInput("float lengths", (lens.float(), 0, 2), ArgumentDtypeError, "lens must be int32 or int64, got float32")
    yield BadInput("3-D lengths", (lens[None, None], 0, 2), ArgumentShapeError, "lens must be 1-dimensional or 2-dimensional")
    yield BadInput("rank outside", (lens, 2, 2), ArgumentError, "cp_rank must be between 0 and 1, got 2")
    yield BadInput("no ranks", (lens, 0, 0), ArgumentError, "cp_size must be between 1 and 2147483647, got 0")
    yield BadInput("ranks past int32", (lens, 0, 2**63 - 1, 16), ArgumentError, "cp_size must be between 1 and 2147483647")
    yield BadInput("interleave 0", (lens, 0, 2, 0), ArgumentError, "cp_interleave must be between 1 and 2147483647, got 0")


LOCAL_CONTEXT_LENS.implement(
    check=_local_check,
    reference=_local_reference,
    torch_impl=_local_torch,
    triton=_local_triton,
    fake=_local_fake,
    samples=_local_samples,
    sized=_local_sized,
    bad_inputs=_local_bad_inputs,
)
