"""Decode over several ranks: the KV context split between them (context parallelism), or the heads (tensor parallelism).

Collectives are those of ``torch.distributed``, in their functional form: ``torch.compile(fullgraph=True)`` traces them, and CUDA graphs hold
them. A group must have run one before the first capture (``GraphPool.capture`` warms up), captures need ``capture_error_mode="thread_local"``
(NCCL's own threads call CUDA meanwhile), and graphs are dropped before their group is: ``destroy_process_group`` waits for them. Tested over
gloo with 2 and 4 ranks; two H200s over NCCL gave what one rank gives, captured steps and the engine included (``benchmarks/parallel.py``).

**Context parallelism.** A page of a split cache holds ``B`` entries (tokens or records) on each rank, so ``B * size`` of a request together.
Block tables are the same on all ranks. Entry p of a request lies in the page ``table[p // (B * size)]`` of rank ``(p // I) % size`` (I: the
interleave), at offset ``p % (B * size) // (I * size) * I + p % I``. A step is the same on every rank, with three differences:

==========================================  ===========================================================================================
what one rank does                          what each of several does
==========================================  ===========================================================================================
writes KV to a slot                         to ``local_slots`` of the slot that one rank would take, which is -1 on all but one
``topk`` or ``topk_slots`` of all scores    :func:`context_parallel_topk` or :func:`context_parallel_topk_slots` of its own records' scores
``sparse_mla_decode`` over all keys         :func:`context_parallel_decode` over its own: their slots, or :func:`local_rows` of a cache
                                            that every rank holds whole (a window)
==========================================  ===========================================================================================

**Tensor parallelism.** Attention needs nothing but its rank's heads (:func:`own_heads`: rows of the query projection, sinks, groups of the
output projection); the partial results of the last projection are added by :func:`ordered_sum`.

**Equal on every rank.** What comes back has the same bits on all ranks, however many there are, and a row never depends on its batch: partial
results are gathered and put together in the order of ranks, never in the order of a reduction. Chosen columns are exactly those of one rank, ties
included; attention differs from one rank by rounding: the partial outputs travel in the dtype of the query.

Every rank must make the same calls with the same shapes. Bad arguments raise on all alike; a rank that fails alone leaves the others waiting
for as long as the ``timeout`` that the group was made with. ``group``: a ``ProcessGroup``, None for the default one; functions that have it
raise ``ValueError`` (from ``torch.distributed``) where no process group is initialized.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from . import _checks
from ._slots import INT32_MAX
from .context_lens import local_context_lens
from .errors import ArgumentError, ArgumentShapeError
from .global_indices import global_topk_indices
from .sparse_decode import SparseMLADecodeOutput, sparse_mla_decode
from .topk import topk_merge, topk_values

__all__ = [
    "compact_slots",
    "context_parallel_decode",
    "context_parallel_topk",
    "context_parallel_topk_slots",
    "local_rows",
    "local_slots",
    "merge_states",
    "ordered_sum",
    "own_heads",
]

# torch 2.13 renamed it, and warns of the old name.
_all_gather: Any = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def _gathered(message: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """``[size, *message.shape]``: the message of every rank, by rank."""
    everyone: Any = dist.group.WORLD if group is None else group
    size = dist.get_world_size(group)
    gathered: torch.Tensor = collectives.wait_tensor(_all_gather(message.contiguous()[None], 0, everyone))
    return gathered.view(size, *message.shape)


def _check_split(where: str, cp_rank: int, cp_size: int, cp_interleave: int = 1) -> None:
    _checks.integer(where, "cp_size", cp_size, 1, INT32_MAX)
    _checks.integer(where, "cp_rank", cp_rank, 0, cp_size - 1)
    _checks.integer(where, "cp_interleave", cp_interleave, 1, INT32_MAX)


# Where things are


def local_slots(slots: torch.Tensor, block_size: int, cp_rank: int, cp_size: int, cp_interleave: int = 1) -> torch.Tensor:
    """Slots in the pages of ``cp_rank`` for slots of one undivided cache; -1 where another rank holds the entry. Same shape and dtype.

    ``slots`` int32 or int64, any shape: as every op gives them for pages of ``block_size * cp_size`` entries; negative: none. ``block_size``: B,
    entries a page *on one rank*, a multiple of ``cp_interleave`` (else a rank's share does not fill its page). Entries keep their place in
    a row. Raises ArgumentError, ArgumentDtypeError.
    """
    where = "local_slots"
    _checks.tensor(where, "slots", slots, _checks.INDEX, range(9))
    _check_split(where, cp_rank, cp_size, cp_interleave)
    _checks.integer(where, "block_size", block_size, 1, INT32_MAX)
    if block_size % cp_interleave:
        raise ArgumentError(where, "block_size", f"a multiple of cp_interleave ({cp_interleave})", block_size, "Otherwise a rank's share of a page does not fill it.")
    slot = slots.to(torch.int64)
    page = slot.div(block_size * cp_size, rounding_mode="floor")
    entry = slot - page * (block_size * cp_size)
    turn = entry.div(cp_interleave, rounding_mode="floor")
    own = (slot >= 0) & (turn % cp_size == cp_rank)
    local = page * block_size + turn.div(cp_size, rounding_mode="floor") * cp_interleave + entry % cp_interleave
    return torch.where(own, local, _checks.PAD_SLOT_ID).to(slots.dtype)


def compact_slots(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows without their holes, in the order they had, and how many entries each has: ``(slots [T, width], lens int32 [T])``.

    ``slots`` int32 or int64 ``[T, width]``; negative: a hole. The dtype stays, rows end in -1. A rank's share of a row is mostly holes: attention
    reads as many columns as the length says. Raises ArgumentDtypeError, ArgumentShapeError.
    """
    _checks.tensor("compact_slots", "slots", slots, _checks.INDEX, 2)
    rows, width = slots.shape
    kept = slots >= 0
    lens = kept.sum(1, dtype=torch.int32)
    # Holes all go to one spare column behind the row.
    place = torch.where(kept, kept.cumsum(1) - 1, width)
    return slots.new_full((rows, width + 1), _checks.PAD_SLOT_ID).scatter(1, place, slots)[:, :width], lens


def local_rows(indices: torch.Tensor, lens: torch.Tensor, cp_rank: int, cp_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of index rows into pages that every rank holds whole: every ``cp_size``-th column, from ``cp_rank`` on.

    ``indices`` int32 or int64 ``[T, width]`` and ``lens`` int32 or int64 ``[T]``, as ``sparse_mla_decode`` takes them; returns ``([T, columns], lens int32 [T])``. The shares
    of all ranks together are the row, each entry once. Raises ArgumentError, ArgumentDtypeError, ArgumentShapeError.
    """
    where = "local_rows"
    _checks.tensor(where, "indices", indices, _checks.INDEX, 2)
    _checks.tensor(where, "lens", lens, _checks.INDEX, 1)
    _checks.shape(where, "lens", lens, (indices.shape[0],), "[T], one entry for each row of indices")  # a size in the text would become a constant of the program
    _check_split(where, cp_rank, cp_size)
    return indices[:, cp_rank::cp_size].contiguous(), local_context_lens(lens, cp_rank, cp_size)


def own_heads(num_heads: int, tp_rank: int, tp_size: int) -> slice:
    """The heads of ``tp_rank``: ``num_heads / tp_size`` of them, in order. Also for whatever else is counted in equal parts (output groups).

    Raises ArgumentError when the parts would not be equal.
    """
    where = "own_heads"
    _checks.integer(where, "tp_size", tp_size, 1, INT32_MAX)
    _checks.integer(where, "tp_rank", tp_rank, 0, tp_size - 1)
    _checks.integer(where, "num_heads", num_heads, 1)
    if num_heads % tp_size:
        raise ArgumentError(where, "num_heads", f"a multiple of tp_size ({tp_size})", num_heads)
    each = num_heads // tp_size
    return slice(tp_rank * each, (tp_rank + 1) * each)


# What ranks do together


def context_parallel_topk(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, *, cp_interleave: int = 1, group: dist.ProcessGroup | None = None, lane: int = -1
) -> torch.Tensor:
    """``topk`` of rows whose columns are split over ranks: the same int32 ``[rows, k]`` on every rank, in global columns, ascending, then -1.

    ``logits`` float32 or bfloat16 ``[rows, width]``: scores of the rank's own columns, the same width on every rank; local column c of rank r is global column
    ``c // I * (I * size) + r * I + c % I``. ``lengths``: as ``topk`` takes them, in *local* columns: lengths per token first, then ``local_context_lens``.
    Exactly the columns that ``topk`` finds in the undivided row, ties included. One message of ``8 * rows * k`` bytes a rank.

    Raises as ``topk`` does, and ArgumentShapeError when global columns would pass int32.
    """
    where = "context_parallel_topk"
    _checks.integer(where, "cp_interleave", cp_interleave, 1, INT32_MAX)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    values, columns = topk_values(logits, lengths, k, lane=lane)
    if (logits.shape[1] + cp_interleave) * size > INT32_MAX:
        raise ArgumentShapeError(where, "logits", f"of less than 2**31 columns over all {size} ranks (indices are int32)", f"shape {list(logits.shape)}")
    turn = columns.div(cp_interleave, rounding_mode="floor")
    columns = torch.where(columns < 0, -1, columns + (turn * (size - 1) + rank) * cp_interleave)
    messages = _gathered(torch.stack([columns, values.float().view(torch.int32)]), group)  # bfloat16 widens exactly
    columns, bits = messages.permute(1, 2, 0, 3).flatten(2).unbind()
    return topk_merge(bits.view(torch.float32), columns, k)[1]


def context_parallel_topk_slots(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    k: int,
    block_size: int,
    *,
    cp_interleave: int = 1,
    group: dist.ProcessGroup | None = None,
    lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``topk_slots`` of rows whose columns are split over ranks: of the ``k`` best columns, those that this rank holds.

    Arguments as ``topk_slots`` takes them, but ``logits`` and ``lengths`` as in :func:`context_parallel_topk`, and ``block_size`` counts records a page *on one
    rank*. Returns ``(slots int32 [rows, k], lens int32 [rows])``: slots in this rank's pages, by ascending column and without holes, then -1. A chosen
    column whose page is not mapped is left out. Raises as ``topk_slots`` does, and as :func:`context_parallel_topk` and :func:`local_slots` do.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    columns = context_parallel_topk(logits, lengths, k, cp_interleave=cp_interleave, group=group, lane=lane)
    slots, _ = global_topk_indices(columns, token_to_req_indices, is_valid_token, block_table, block_size=block_size * size)
    return compact_slots(local_slots(slots, block_size, rank, size, cp_interleave))


def merge_states(outs: torch.Tensor, lses: torch.Tensor, attn_sink: torch.Tensor | None = None) -> SparseMLADecodeOutput:
    """Attention over all keys, from attention over disjoint parts of them: what ``sparse_mla_decode`` gives for all.

    ``outs`` float32 or bfloat16 ``[parts, T, H, D]`` and ``lses`` float32 ``[parts, T, H]``, each as ``sparse_mla_decode`` returns them *without* a sink; ``attn_sink`` float32 or
    bfloat16 ``[H]`` joins the denominator, once. Returns out ``[T, H, D]`` in the dtype of ``outs`` and lse float32 ``[T, H]``. A part without keys (lse ``-inf``) adds nothing, and no
    key in any part gives zeros and ``-inf``. Parts are added in their order, in float32. Raises ArgumentShapeError, ArgumentDtypeError, ArgumentDeviceError.
    """
    where = "merge_states"
    _checks.tensor(where, "outs", outs, _checks.FLOATS, 4)
    _checks.tensor(where, "lses", lses, (torch.float32,), 3)
    _checks.shape(where, "lses", lses, outs.shape[:3], "[parts, T, H], as outs without its last dimension")
    if outs.shape[0] == 0:
        raise ArgumentShapeError(where, "outs", "of at least one part", f"shape {list(outs.shape)}")
    if attn_sink is not None:
        _checks.tensor(where, "attn_sink", attn_sink, _checks.FLOATS, 1)
        _checks.shape(where, "attn_sink", attn_sink, (outs.shape[2],), "[H], with the heads of outs")
    _checks.same_device(where, outs=outs, lses=lses, attn_sink=attn_sink)
    largest = lses.amax(0)
    # Without any key the maximum is -inf, and -inf - -inf would be NaN.
    weights = (lses - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total, weighted = weights[0], weights[0].unsqueeze(-1) * outs[0].float()
    for part in range(1, outs.shape[0]):
        total = total + weights[part]
        weighted = weighted + weights[part].unsqueeze(-1) * outs[part].float()
    lse = largest + total.log()
    out = weighted / total.unsqueeze(-1)
    if attn_sink is not None:
        out = out * torch.sigmoid(lse - attn_sink.float()).unsqueeze(-1)
    return SparseMLADecodeOutput(out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0).to(outs.dtype), lse)


def context_parallel_decode(
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
    group: dist.ProcessGroup | None = None,
) -> SparseMLADecodeOutput:
    """``sparse_mla_decode`` whose keys are split over ranks: the result over all of them, on every rank.

    Arguments as ``sparse_mla_decode`` takes them, the same ``q`` and ``attn_sink`` on every rank; caches and index rows are the rank's own, together each key once. One
    message of ``T * H * (512 * itemsize + 4)`` bytes a rank. ``backend`` must be one that gives ``lse``. Raises as ``sparse_mla_decode`` does.
    """
    if dist.get_world_size(group) == 1:
        return sparse_mla_decode(q, swa_cache, swa_indices, swa_lens, extra_cache, extra_indices, extra_lens, attn_sink, scale=scale, lane=lane, backend=backend)
    out, lse = sparse_mla_decode(q, swa_cache, swa_indices, swa_lens, extra_cache, extra_indices, extra_lens, scale=scale, lane=lane, backend=backend)
    dim = out.shape[-1]
    messages = _gathered(torch.cat([out, lse.unsqueeze(-1).view(out.dtype)], -1), group)
    return merge_states(messages[..., :dim], messages[..., dim:].contiguous().view(torch.float32).squeeze(-1), attn_sink)


def ordered_sum(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of every rank's ``x``, float32 or bfloat16 of any shape, the same on all: an all-reduce whose order is that of ranks.

    Added in float32, rounded once. An all-reduce of more than two ranks adds in an order that depends on the element's place in the message, so that a row's bits
    depend on its batch. This gathers instead: as many bytes for two ranks, for more ``size / 2`` times as many, which for the few rows of a decode step is
    the same latency. Raises ArgumentDtypeError.
    """
    _checks.tensor("ordered_sum", "x", x, _checks.FLOATS, range(9))
    parts = _gathered(x, group)
    total = parts[0].float()
    for part in range(1, parts.shape[0]):
        total = total + parts[part].float()
    return total.to(x.dtype)
