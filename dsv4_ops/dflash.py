"""Draft inputs: everything that a DFlash or DSpark draft forward reads, from what the target step left.

One launch fills the query rows (an anchor token and masks), the context rows (the target's tokens, whose KV the draft writes),
lengths, slots and the sampling maps, up to the capture size: no value of an earlier step survives.

T target tokens, R requests, S rows of request state, G KV groups, N speculative tokens, Q query rows a request: N with
``sample_from_anchor`` (DSpark: each row predicts the next position), else 1 + N (DFlash: anchor, then N masks, each
sampled at its own position). Query row j of request i stands at ``i * Q + j``.

======================  ========  =================  =================================================================
argument                dtype     shape              meaning
======================  ========  =================  =================================================================
target_positions        int64     [T]                positions of the target step's tokens
query_start_loc         int32     [R + 1]            where each request's tokens start; R is taken from here alone. Read
                                                     as its running maximum, clamped to [0, T]
idx_mapping             int32     [R]                batch row to request state; outside [0, S): inert
num_sampled             int32     [R]                tokens the target sampled; 0 or less: unfinished prefill chunk
num_rejected            int32     [R]                rejected draft tokens, clamped to [0, tokens of the request]
last_sampled,           int64     [S]                anchor candidates by request state; clamped to [0, 2**31)
next_prefill_tokens
temperature, seeds      fp32,     [S]                copied whole
                        int64
block_tables            int32     G x [>= R, blocks] one a KV group; any row stride; more rows than R are ignored
block_sizes             int[]     G                  tokens a block (a rank's tokens where the group is sharded)
mask_token_id           int                          id of the mask rows
num_speculative_tokens  int                          N
max_reqs, max_tokens    int                          rows to write: the capture size. R <= max_reqs, R * Q <= max_tokens
max_model_len           int                          the draft's own limit of positions
sample_from_anchor      bool                         see above
cp_rank, cp_size,       int                          context parallelism, see below
cp_interleave
cp_sharded              bool[]    G                  which groups are split over the ranks (None: all); others are replicas
======================  ========  =================  =================================================================

Returns :class:`DFlashInputs`, all fresh and contiguous:

======================  ========  =================  =================================================================
output                  dtype     shape              meaning
======================  ========  =================  =================================================================
input_ids               int32     [max_tokens]       anchor, then masks
positions               int64     [max_tokens]       at most ``max_model_len - 1``
is_padding              bool      [max_tokens]       rows of inert requests and past the batch
query_start_loc         int32     [max_reqs + 1]     ``i * Q``, then flat
seq_lens                int32     [max_reqs]         first query position + Q, at most ``max_model_len``; inert: 0
query_slots             int64     [G, max_tokens]
context_positions       int64     [T]
context_slots           int64     [G, T]
sample_indices          int64     [max_reqs * N]     query row that is sampled
sample_pos              int64     [max_reqs * N]     position of the token being predicted, never clamped
sample_idx_mapping      int32     [max_reqs * N]     request state, or -1: do nothing
temperature, seeds      fp32,     [S]                copies
                        int64
======================  ========  =================  =================================================================

* *Kept* tokens are those before the rejected suffix. Queries start one after the last kept position; with none kept, at
  the request's own first position.
* *Inert* requests: no tokens, a state outside the table, or a first query at or past ``max_model_len``. Query ids 0, positions 0,
  slots -1, length 0, sample index and position 0, mapping -1, ``is_padding`` true. They keep their place ``i * Q``. Nothing is
  loaded by a state outside the table, and the context rows of such a request are those of no request; a request that is only too
  long still has the context KV of its kept tokens written, since other requests may share that prefix.
* A query past ``max_model_len`` has position ``max_model_len - 1``, slot -1 and mapping -1. An unfinished prefill chunk has its
  queries laid out as usual and mapping -1.
* Context rows of rejected tokens, of no request, and of positions outside ``[0, max_model_len)``: position 0, slot -1.
* A slot is -1 where the block is past the table, null (0) or negative, and on ranks that do not own the position.
  In a sharded group, position p has table entry ``p // (B * size)``, owner ``(p // I) % size`` and offset
  ``p % (B * size) // (I * size) * I + p % I``.
* Past the batch: ids 0, positions 0, slots -1, lengths 0, sample index and position 0, mapping -1, padding.

Graph-safe: yes (no host reads). Replaces the draft-input kernels of serving engines' speculators.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = ["DFlashInputs", "capture_query_lens", "draft_buffer_tokens", "prepare_dflash_inputs", "round_to_capture_size", "scratch_rows"]

INT32_MAX = 2**31 - 1


class DFlashInputs(NamedTuple):
    """What a draft forward reads; see the table of this module."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    is_padding: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    query_slots: torch.Tensor
    context_positions: torch.Tensor
    context_slots: torch.Tensor
    sample_indices: torch.Tensor
    sample_pos: torch.Tensor
    sample_idx_mapping: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


PREPARE_DFLASH_INPUTS = _registry.define(
    "prepare_dflash_inputs(Tensor target_positions, Tensor query_start_loc, Tensor idx_mapping, Tensor num_sampled, Tensor num_rejected, "
    "Tensor last_sampled, Tensor next_prefill_tokens, Tensor temperature, Tensor seeds, Tensor[] block_tables, int[] block_sizes, *, "
    "int mask_token_id, int num_speculative_tokens, SymInt max_reqs, SymInt max_tokens, int max_model_len, bool sample_from_anchor=False, "
    "int cp_rank=0, int cp_size=1, int cp_interleave=1, bool[]? cp_sharded=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # The prefix keeps the outputs apart from the inputs of the same name.
    out=tuple(f"out_{name}" for name in DFlashInputs._fields),
)


def prepare_dflash_inputs(
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    *,
    mask_token_id: int,
    num_speculative_tokens: int,
    max_reqs: int,
    max_tokens: int,
    max_model_len: int,
    sample_from_anchor: bool = False,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_interleave: int = 1,
    cp_sharded: Sequence[bool] | None = None,
) -> DFlashInputs:
    """Inputs of a draft forward, written up to ``max_tokens`` query rows and ``max_reqs`` requests.

    Query rows are ``[max_tokens]``, requests ``[max_reqs]``, sampled rows ``[max_reqs * N]``, context rows ``[T]``, slots one such row a KV group
    (``[G, max_tokens]``, ``[G, T]``); ids, lengths and mappings int32, positions and slots int64.

    Raises ArgumentError (more requests or query rows than the capture size holds, context-parallel arguments that do not
    fit), ArgumentShapeError, ArgumentDtypeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops prepare_dflash_inputs``.
    """
    return DFlashInputs(
        *PREPARE_DFLASH_INPUTS(
            target_positions, query_start_loc, idx_mapping, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
            list(block_tables), list(block_sizes), mask_token_id=mask_token_id, num_speculative_tokens=num_speculative_tokens, max_reqs=max_reqs,
            max_tokens=max_tokens, max_model_len=max_model_len, sample_from_anchor=sample_from_anchor, cp_rank=cp_rank, cp_size=cp_size,
            cp_interleave=cp_interleave, cp_sharded=None if cp_sharded is None else list(cp_sharded),
        )
    )  # fmt: skip


# Capture sizes: plain Python.


def round_to_capture_size(num_tokens: int, capture_sizes: Sequence[int]) -> int:
    """The smallest capture size that holds ``num_tokens``; ``num_tokens`` itself past the largest (run eagerly, exact size).

    Raises ArgumentError (out of range; a capture size below 1), ArgumentDtypeError (not an integer).
    """
    _checks.integer("round_to_capture_size", "num_tokens", num_tokens, 0)
    _check_sizes("round_to_capture_size", capture_sizes)
    return min((size for size in capture_sizes if size >= num_tokens), default=num_tokens)


def draft_buffer_tokens(max_num_seqs: int, block_queries: int, capture_sizes: Sequence[int]) -> int:
    """Rows that persistent query buffers need: the full batch, and every capture size, which may lie past it.

    Raises ArgumentError (out of range; a capture size below 1), ArgumentDtypeError (not an integer).
    """
    _checks.integer("draft_buffer_tokens", "max_num_seqs", max_num_seqs, 1)
    _checks.integer("draft_buffer_tokens", "block_queries", block_queries, 1)
    _check_sizes("draft_buffer_tokens", capture_sizes)
    return max(max_num_seqs * block_queries, *capture_sizes, 0)


def _check_sizes(where: str, capture_sizes: Sequence[int]) -> None:
    """One pass over what is right: steps ask for their size on the host, each time."""
    if not isinstance(capture_sizes, Sequence) or isinstance(capture_sizes, str):
        raise ArgumentDtypeError(where, "capture_sizes", "a sequence of integers", type(capture_sizes).__name__)
    for i, size in enumerate(capture_sizes):
        if type(size) is not int or size < 1:
            _checks.integer(where, f"capture_sizes[{i}]", size, 1)


def capture_query_lens(num_tokens: int, block_queries: int, max_num_seqs: int) -> list[int]:
    """Query lengths of the requests that a capture of ``num_tokens`` stands for: full requests, the last one may be shorter.

    A draft batch has ``block_queries`` rows a request, so the number of requests follows from the tokens, never from
    ``max_num_seqs``, which only limits it.
    Raises ArgumentError (out of range), ArgumentDtypeError (not an integer).
    """
    where = "capture_query_lens"
    _checks.integer(where, "block_queries", block_queries, 1)
    _checks.integer(where, "num_tokens", num_tokens, 0, max_num_seqs * block_queries, f"{max_num_seqs} requests have at most that many rows.")
    full, rest = divmod(num_tokens, block_queries)
    return [block_queries] * full + ([rest] if rest else [])


def scratch_rows(idx_mapping: torch.Tensor, max_reqs: int) -> torch.Tensor:
    """Rows for a scatter into state of ``max_reqs + 1`` rows: mapping -1 goes to the extra last row, never to a live one.

    (As a Python index, -1 is the last live row, and clamped to 0 it is the first.)
    """
    return torch.where((idx_mapping < 0) | (idx_mapping >= max_reqs), max_reqs, idx_mapping.to(torch.int64))


class _Arguments(NamedTuple):
    """The arguments of the op: every block below takes them as one value."""

    target_positions: torch.Tensor
    query_start_loc: torch.Tensor
    idx_mapping: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    block_sizes: Sequence[int]
    mask_token_id: int
    num_speculative_tokens: int
    max_reqs: int
    max_tokens: int
    max_model_len: int
    sample_from_anchor: bool = False
    cp_rank: int = 0
    cp_size: int = 1
    cp_interleave: int = 1
    cp_sharded: Sequence[bool] | None = None

    @property
    def requests(self) -> int:
        return self.query_start_loc.shape[0] - 1

    @property
    def queries(self) -> int:
        """Query rows a request: Q."""
        return self.num_speculative_tokens + (0 if self.sample_from_anchor else 1)

    def ranks(self, group: int) -> int:
        """Ranks that a KV group is split over."""
        return self.cp_size if self.cp_sharded is None or self.cp_sharded[group] else 1


_unpacked = _registry.unpacked(_Arguments)


def check_arguments(where: str, a: _Arguments) -> None:
    _checks.tensor(where, "target_positions", a.target_positions, _checks.INT64, 1)
    _checks.tensor(where, "query_start_loc", a.query_start_loc, _checks.INT32, 1)
    if a.query_start_loc.shape[0] < 1:
        raise ArgumentShapeError(where, "query_start_loc", "of shape [requests + 1]", "no element")
    requests, queries = a.requests, a.queries
    for name, value in (("idx_mapping", a.idx_mapping), ("num_sampled", a.num_sampled), ("num_rejected", a.num_rejected)):
        _checks.tensor(where, name, value, _checks.INT32, 1)
        _checks.shape(where, name, value, (requests,), f"[requests] with {requests} requests as in query_start_loc")
    _checks.tensor(where, "last_sampled", a.last_sampled, _checks.INT64, 1)
    states = a.last_sampled.shape[0]
    for name, value, dtypes in (
        ("next_prefill_tokens", a.next_prefill_tokens, _checks.INT64),
        ("temperature", a.temperature, (torch.float32,)),
        ("seeds", a.seeds, _checks.INT64),
    ):
        _checks.tensor(where, name, value, dtypes, 1)
        _checks.shape(where, name, value, (states,), f"[states] with {states} rows as in last_sampled")
    _checks.integer(where, "mask_token_id", a.mask_token_id, 0, INT32_MAX)
    _checks.integer(where, "num_speculative_tokens", a.num_speculative_tokens, 1)
    _checks.integer(where, "max_model_len", a.max_model_len, 1, INT32_MAX)
    _checks.integer(where, "max_reqs", a.max_reqs, 0)
    if requests > a.max_reqs:
        raise ArgumentError(where, "max_reqs", f"at least the {requests} requests of query_start_loc", a.max_reqs, "Set it to the capture size.")
    if requests * queries > a.max_tokens:
        raise ArgumentError(where, "max_tokens", f"at least {requests} requests * {queries} query rows = {requests * queries}", a.max_tokens, "Set it to the capture size.")
    _checks.integer(where, "cp_size", a.cp_size, 1, INT32_MAX)
    _checks.integer(where, "cp_rank", a.cp_rank, 0, a.cp_size - 1)
    _checks.integer(where, "cp_interleave", a.cp_interleave, 1, INT32_MAX)
    groups = len(a.block_tables)
    if len(a.block_sizes) != groups:
        raise ArgumentError(where, "block_sizes", f"one for each of the {groups} block tables", f"{len(a.block_sizes)}")
    if a.cp_sharded is not None and len(a.cp_sharded) != groups:
        raise ArgumentError(where, "cp_sharded", f"one for each of the {groups} block tables", f"{len(a.cp_sharded)}")
    for g, (table, size) in enumerate(zip(a.block_tables, a.block_sizes, strict=True)):
        _checks.tensor(where, f"block_tables[{g}]", table, _checks.INT32, 2)
        _checks.last_stride_one(where, f"block_tables[{g}]", table)
        if table.shape[0] < requests:
            raise ArgumentShapeError(where, f"block_tables[{g}]", f"of at least {requests} rows, one a request", f"shape {list(table.shape)}")
        _checks.integer(where, f"block_sizes[{g}]", size, 1, INT32_MAX)
        if a.ranks(g) > 1 and size % a.cp_interleave:
            raise ArgumentError(where, f"block_sizes[{g}]", f"a multiple of cp_interleave ({a.cp_interleave})", size, "Otherwise a rank's share of a block does not fill it.")
    _checks.same_device(
        where, target_positions=a.target_positions, query_start_loc=a.query_start_loc, idx_mapping=a.idx_mapping, num_sampled=a.num_sampled, num_rejected=a.num_rejected,
        last_sampled=a.last_sampled, next_prefill_tokens=a.next_prefill_tokens, temperature=a.temperature, seeds=a.seeds, **{f"block_tables[{g}]": t for g, t in enumerate(a.block_tables)},
    )  # fmt: skip


_check = _unpacked(functools.partial(check_arguments, "prepare_dflash_inputs"))


@_unpacked
def _reference(a: _Arguments) -> tuple[torch.Tensor, ...]:
    tokens, requests, states = a.target_positions.shape[0], a.requests, a.last_sampled.shape[0]
    samples, queries = a.num_speculative_tokens, a.queries
    tables = [table.tolist() for table in a.block_tables]

    def slot(group: int, request: int, position: int) -> int:
        table, size = tables[group][request], a.block_sizes[group]
        ranks = a.ranks(group)
        entry, rest = divmod(position, size * ranks)
        if entry >= len(table) or table[entry] <= _checks.NULL_BLOCK:
            return _checks.PAD_SLOT_ID
        if ranks == 1:
            return int(table[entry]) * size + rest
        if position // a.cp_interleave % ranks != a.cp_rank:
            return _checks.PAD_SLOT_ID
        return int(table[entry]) * size + rest // (a.cp_interleave * ranks) * a.cp_interleave + position % a.cp_interleave

    input_ids, positions, is_padding = [0] * a.max_tokens, [0] * a.max_tokens, [True] * a.max_tokens
    query_slots = [[_checks.PAD_SLOT_ID] * a.max_tokens for _ in tables]
    context_positions, context_slots = [0] * tokens, [[_checks.PAD_SLOT_ID] * tokens for _ in tables]
    seq_lens = [0] * a.max_reqs
    sample_indices, sample_pos, sample_idx_mapping = [0] * (a.max_reqs * samples), [0] * (a.max_reqs * samples), [-1] * (a.max_reqs * samples)
    starts = [min(max(0, s), tokens) for s in a.query_start_loc.tolist()]
    starts = [max(starts[: i + 1]) for i in range(requests + 1)]
    target = a.target_positions.tolist()
    for i, (state, sampled, rejected) in enumerate(zip(a.idx_mapping.tolist(), a.num_sampled.tolist(), a.num_rejected.tolist(), strict=True)):
        start, length = starts[i], starts[i + 1] - starts[i]
        if length == 0 or not 0 <= state < states:
            continue
        kept = length - min(max(0, rejected), length)
        for t in range(start, start + kept):
            if 0 <= target[t] < a.max_model_len:
                context_positions[t] = target[t]
                for g in range(len(tables)):
                    context_slots[g][t] = slot(g, i, target[t])
        first = max(0, target[start + kept - 1] + 1 if kept else target[start])
        if first >= a.max_model_len:
            continue
        seq_lens[i] = min(first + queries, a.max_model_len)
        anchor = int((a.last_sampled if sampled > 0 else a.next_prefill_tokens)[state])
        for j in range(queries):
            row, position = i * queries + j, first + j
            input_ids[row] = min(max(0, anchor), INT32_MAX) if j == 0 else a.mask_token_id
            positions[row] = min(position, a.max_model_len - 1)
            is_padding[row] = False
            if position < a.max_model_len:
                for g in range(len(tables)):
                    query_slots[g][row] = slot(g, i, position)
            sample = j if a.sample_from_anchor else j - 1
            if sample < 0:
                continue
            sample_indices[i * samples + sample] = row
            sample_pos[i * samples + sample] = position + 1 if a.sample_from_anchor else position
            if position < a.max_model_len and sampled > 0:
                sample_idx_mapping[i * samples + sample] = state

    def tensor(values: object, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=a.target_positions.device).view(shape)

    i32, i64 = torch.int32, torch.int64
    return (
        tensor(input_ids, i32, a.max_tokens), tensor(positions, i64, a.max_tokens), tensor(is_padding, torch.bool, a.max_tokens),
        tensor([min(i, requests) * queries for i in range(a.max_reqs + 1)], i32, a.max_reqs + 1), tensor(seq_lens, i32, a.max_reqs),
        tensor(query_slots, i64, len(tables), a.max_tokens), tensor(context_positions, i64, tokens), tensor(context_slots, i64, len(tables), tokens),
        tensor(sample_indices, i64, a.max_reqs * samples), tensor(sample_pos, i64, a.max_reqs * samples), tensor(sample_idx_mapping, i32, a.max_reqs * samples),
        a.temperature.clone(memory_format=torch.contiguous_format), a.seeds.clone(memory_format=torch.contiguous_format),
    )  # fmt: skip


def _load(values: torch.Tensor, index: tuple[torch.Tensor, ...], ok: torch.Tensor) -> torch.Tensor:
    """int64 ``values[index]`` where ``ok``, else 0; nothing is read by an index that is not ok."""
    if values.numel() == 0:
        return torch.zeros(ok.shape, dtype=torch.int64, device=ok.device)
    return torch.where(ok, values[tuple(torch.where(ok, i, 0) for i in index)].to(torch.int64), 0)


def _slots(table: torch.Tensor, request: torch.Tensor, position: torch.Tensor, ok: torch.Tensor, size: int, rank: int, ranks: int, interleave: int) -> torch.Tensor:
    """Slots of positions in one KV group; -1 where not ``ok``, not mapped, or of another rank."""
    entry = position // (size * ranks)
    block = _load(table, (request, entry), ok & (entry < table.shape[1]))
    offset = position % (size * ranks)
    mapped = block > _checks.NULL_BLOCK
    if ranks > 1:
        mapped &= position // interleave % ranks == rank
        offset = offset // (interleave * ranks) * interleave + position % interleave
    return torch.where(mapped, block * size + offset, _checks.PAD_SLOT_ID)


@_unpacked
def _torch(a: _Arguments) -> tuple[torch.Tensor, ...]:
    device, i64 = a.target_positions.device, torch.int64
    tokens, requests, states = a.target_positions.shape[0], a.requests, a.last_sampled.shape[0]
    samples, queries = a.num_speculative_tokens, a.queries
    anchored = 1 if a.sample_from_anchor else 0
    starts = torch.cummax(a.query_start_loc.to(i64).clamp(0, tokens), 0).values
    # Clamped first, so that one more cannot overflow: nothing past max_model_len is ever written.
    target = a.target_positions.clamp(-1, a.max_model_len)

    # Requests: [R]
    start, length = starts[:-1], starts.diff()
    state = a.idx_mapping.to(i64)
    known = (length > 0) & (state >= 0) & (state < states)
    kept = length - torch.minimum(a.num_rejected.to(i64).clamp(min=0), length)
    some = (kept > 0).to(i64)
    first = (_load(target, (start + (kept - 1).clamp(min=0),), known) + some).clamp(min=0)
    live = known & (first < a.max_model_len)
    sampled = a.num_sampled > 0
    anchor = torch.where(sampled, _load(a.last_sampled, (state,), live & sampled), _load(a.next_prefill_tokens, (state,), live & ~sampled))

    # Query rows: [R, Q]
    offset = torch.arange(queries, device=device)
    position = first.unsqueeze(1) + offset
    row = torch.arange(requests * queries, device=device).view(requests, queries)
    alive = live.unsqueeze(1).expand(requests, queries)
    inside = alive & (position < a.max_model_len)
    ids = torch.where(offset == 0, anchor.clamp(0, INT32_MAX).unsqueeze(1), a.mask_token_id)

    # Context rows: [T]
    token = torch.arange(tokens, device=device)
    owner = torch.searchsorted(starts, token, right=True) - 1
    owned = (owner >= 0) & (owner < requests)
    keep = owned & (_load(known, (owner,), owned) > 0) & (token - _load(start, (owner,), owned) < _load(kept, (owner,), owned))
    keep &= (target >= 0) & (target < a.max_model_len)

    query_slots = torch.full((len(a.block_tables), a.max_tokens), _checks.PAD_SLOT_ID, dtype=i64, device=device)
    context_slots = torch.full((len(a.block_tables), tokens), _checks.PAD_SLOT_ID, dtype=i64, device=device)
    request = torch.arange(requests, device=device).unsqueeze(1).expand(requests, queries)
    for g, (table, size) in enumerate(zip(a.block_tables, a.block_sizes, strict=True)):
        split = (size, a.cp_rank, a.ranks(g), a.cp_interleave)
        query_slots[g, : requests * queries] = _slots(table, request, position, inside, *split).view(-1)
        context_slots[g] = _slots(table, owner, target, keep, *split)

    def padded(values: torch.Tensor, size: int, fill: int | bool, dtype: torch.dtype) -> torch.Tensor:
        out = torch.full((size,), fill, dtype=dtype, device=device)
        out[: values.numel()] = values.reshape(-1)
        return out

    sampling = slice(queries - samples, queries)
    mapping = torch.where(inside & sampled.unsqueeze(1), state.unsqueeze(1), -1)
    return (
        padded(torch.where(alive, ids, 0), a.max_tokens, 0, torch.int32),
        padded(torch.where(alive, position.clamp(max=a.max_model_len - 1), 0), a.max_tokens, 0, i64),
        padded(~alive, a.max_tokens, True, torch.bool),
        torch.arange(a.max_reqs + 1, device=device).clamp(max=requests).mul(queries).to(torch.int32),
        padded(torch.where(live, (first + queries).clamp(max=a.max_model_len), 0), a.max_reqs, 0, torch.int32),
        query_slots,
        torch.where(keep, target, 0),
        context_slots,
        padded(torch.where(alive, row, 0)[:, sampling], a.max_reqs * samples, 0, i64),
        padded(torch.where(alive, position + anchored, 0)[:, sampling], a.max_reqs * samples, 0, i64),
        padded(mapping[:, sampling], a.max_reqs * samples, -1, torch.int32),
        a.temperature.clone(memory_format=torch.contiguous_format),
        a.seeds.clone(memory_format=torch.contiguous_format),
    )


def new_outputs(a: _Arguments) -> tuple[torch.Tensor, ...]:
    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return a.target_positions.new_empty(shape, dtype=dtype)

    tokens, groups, sampled, states = a.target_positions.shape[0], len(a.block_tables), a.max_reqs * a.num_speculative_tokens, a.last_sampled.shape[0]
    i32, i64 = torch.int32, torch.int64
    return (
        new(i32, a.max_tokens), new(i64, a.max_tokens), new(torch.bool, a.max_tokens), new(i32, a.max_reqs + 1), new(i32, a.max_reqs), new(i64, groups, a.max_tokens),
        new(i64, tokens), new(i64, groups, tokens), new(i64, sampled), new(i64, sampled), new(i32, sampled), new(torch.float32, states), new(i64, states),
    )  # fmt: skip


_fake = _unpacked(new_outputs)


@_unpacked
def _triton(a: _Arguments) -> tuple[torch.Tensor, ...]:
    from ._triton import dflash as kernels

    outputs = new_outputs(a)
    kernels.draft_inputs(a, outputs)
    return outputs


def _make(
    device: torch.device | str,
    generator: torch.Generator,
    lens: Sequence[int],
    *,
    groups: Sequence[int] = (4,),
    blocks: int = 12,
    n: int = 3,
    anchor: bool = False,
    spare: int = 1,
    cp: tuple[int, int, int] = (0, 1, 1),
    sharded: list[bool] | None = None,
    max_model_len: int = 40,
    table_rows: int = 0,
    pad: int = 0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with random positions, rejections, tables with null blocks, and some unfinished chunks."""
    requests, states = len(lens), len(lens) + 3

    def rand(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    base = rand(0, max_model_len - 4, requests)
    positions = torch.cat([base[i] + torch.arange(length) for i, length in enumerate(lens)] + [rand(0, 9, pad)])
    starts = torch.tensor([sum(lens[:i]) for i in range(requests + 1)], dtype=torch.int32)
    mapping = torch.randperm(states, generator=generator)[:requests].to(torch.int32)
    rejected = torch.tensor([int(rand(0, length + 1, 1)) for length in lens], dtype=torch.int32)
    tables = [rand(0, 50, requests + table_rows, blocks + 2, dtype=torch.int32).to(device)[:, :blocks] for _ in groups]
    args = (positions, starts, mapping, rand(0, 3, requests, dtype=torch.int32), rejected, rand(1, 900, states), rand(1, 900, states), torch.rand(states, generator=generator), rand(0, 2**40, states))
    queries = n if anchor else n + 1
    kwargs = {
        "mask_token_id": 999, "num_speculative_tokens": n, "max_reqs": requests + spare, "max_tokens": (requests + spare) * queries + spare, "max_model_len": max_model_len,
        "sample_from_anchor": anchor, "cp_rank": cp[0], "cp_size": cp[1], "cp_interleave": cp[2], "cp_sharded": sharded,
    }  # fmt: skip
    return (*(a.to(device) for a in args), tables, list(groups)), kwargs


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)
    yield Sample("dflash", *_make(device, generator, [4, 4, 4]))
    yield Sample("dspark, two groups", *_make(device, generator, [4, 1, 7], groups=(4, 16), anchor=True))
    yield Sample("one request, exact size", *_make(device, generator, [5], spare=0))
    yield Sample("no requests, padded", *_make(device, generator, [], pad=4))
    yield Sample("nothing at all", *_make(device, generator, [], spare=0))
    yield Sample("no groups", *_make(device, generator, [3, 2], groups=()))
    yield Sample("requests without tokens, padding tokens, more table rows", *_make(device, generator, [0, 3, 0, 0, 2, 0], table_rows=2, pad=3))
    yield Sample("context parallel, a replica beside a sharded group", *_make(device, generator, [4, 6], groups=(4, 8), cp=(1, 2, 2), sharded=[True, False]))
    yield Sample("short tables", *_make(device, generator, [3, 3, 3], blocks=3))
    yield Sample("empty tables, near the limit", *_make(device, generator, [2] * 6, groups=(4, 4), blocks=0, n=5, max_model_len=9))
    yield Sample("nine groups", *_make(device, generator, [2, 5], groups=(4, 1, 2, 16, 4, 8, 3, 64, 4)))
    yield Sample("many requests, some without tokens", *_make(device, generator, [4, 0, 9, 1, 6] * 14, spare=5, pad=20))
    args, kwargs = _make(device, generator, [3] * 8, anchor=True)
    low, high = -(2**31), 2**31 - 1
    args[0][::4] = torch.tensor([-(2**63), -1, 2**63 - 1, 39, 40, 0], device=device)
    args[1][:] = torch.tensor([0, 5, 3, low, 9, 9, high, 12, 30], dtype=torch.int32, device=device)
    args[2][:] = torch.tensor([0, -1, low, 11, 10, high, 2, 2], dtype=torch.int32, device=device)
    args[3][::3] = torch.tensor([low, -1, high], dtype=torch.int32, device=device)
    args[4][:6] = torch.tensor([low, high, -1, 3, 2, 1], dtype=torch.int32, device=device)
    args[5][:3] = torch.tensor([-1, 2**40, high], device=device)
    args[9][0][::2] = -7
    yield Sample("every input out of range", args, kwargs)


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = _make(device, generator, [4] * n, groups=(64,), blocks=40, anchor=True, max_model_len=2048)
    return Sample(f"{n} requests", args, kwargs)


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    args, kwargs = _make(device, torch.Generator().manual_seed(0), [2, 2])

    def bad(label: str, place: int, value: object, error: type[Exception], match: str) -> BadInput:
        return BadInput(label, (*args[:place], value, *args[place + 1 :]), error, match, dict(kwargs))

    def wrong(label: str, match: str, error: type[Exception] = ArgumentError, **changed: object) -> BadInput:
        return BadInput(label, args, error, match, {**kwargs, **changed})

    yield bad("int32 positions", 0, args[0].int(), ArgumentDtypeError, "target_positions must be int64, got int32")
    yield bad("empty query_start_loc", 1, args[1][:0], ArgumentShapeError, "query_start_loc must be of shape [requests + 1]")
    yield bad("mapping of other requests", 2, args[2][:1], ArgumentShapeError, "idx_mapping must be of shape [requests] with 2 requests")
    yield bad("states of two sizes", 6, args[6][:2], ArgumentShapeError, "next_prefill_tokens must be of shape [states] with 5 rows")
    yield bad("double temperature", 7, args[7].double(), ArgumentDtypeError, "temperature must be float32")
    yield bad("1-D table", 9, [args[9][0][0]], ArgumentShapeError, "block_tables[0] must be 2-dimensional")
    yield bad("table of one request", 9, [args[9][0][:1]], ArgumentShapeError, "block_tables[0] must be of at least 2 rows")
    yield bad("sizes without tables", 10, [4, 4], ArgumentError, "block_sizes must be one for each of the 1 block tables")
    yield bad("block size 0", 10, [0], ArgumentError, "block_sizes[0] must be between 1 and 2147483647, got 0")
    yield bad("block size past int32", 10, [2**62], ArgumentError, "block_sizes[0] must be between 1 and 2147483647")
    yield wrong("too many query rows", "max_tokens must be at least 2 requests * 4 query rows = 8, got 7", max_tokens=7)
    yield wrong("too many requests", "max_reqs must be at least the 2 requests", max_reqs=1)
    yield wrong("no speculative tokens", "num_speculative_tokens must be at least 1", num_speculative_tokens=0)
    yield wrong("rank past the size", "cp_rank must be between 0 and 1, got 2", cp_rank=2, cp_size=2)
    yield wrong("interleave that does not divide the block", "a multiple of cp_interleave (3)", cp_size=2, cp_interleave=3)
    yield wrong("flags of other groups", "cp_sharded must be one for each of the 1 block tables", cp_sharded=[True, False])
    yield wrong("max_model_len 0", "max_model_len must be between 1", max_model_len=0)


PREPARE_DFLASH_INPUTS.implement(check=_check, reference=_reference, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs, torch_impl=_torch, triton=_triton)
