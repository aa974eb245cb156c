"""Row-wise top-k for the sparse indexer, and the merge of several shards' candidates.

``topk`` gives columns, ``topk_values`` their scores too; ``topk_merge`` turns the candidates of several shards (context
parallelism: each rank ranks its own columns) into the global top-k.

==================  ============  ==============  ====================================================================
argument            dtype         shape           meaning
==================  ============  ==============  ====================================================================
logits              float32/bf16  [rows, width]   scores; last stride 1, any row stride, any alignment. ``width`` is
                                                  the logical column count: nothing past it is read
lengths             int32/64      [n] or [B, m]   columns that a row sees, any strides; 2-D is read row by row, and
                                                  nothing is subtracted. Fewer entries than rows: the remaining rows
                                                  see none. Negative counts as 0, a huge one as ``width``
k                   int                           1 to 4096, also above ``width``
max_seq_len         int or None                   further limit on every length, at least 0
lane                int                           workspace lane, -1: the current one. the kernels need none
returns indices     int32         [rows, k]       selected columns, ascending, then -1
returns values      as logits     [rows, k]       their scores, in the same order, then -inf (``topk_values``)
------------------  ------------  --------------  --------------------------------------------------------------------
values              float32/bf16  [rows, n]       candidates' scores, any strides (``topk_merge``)
indices             int32         [rows, n]       candidates' global columns, in any order; negative: no candidate.
                                                  A repeated one counts as often as it stands, best score first
                                                  (of equal zeros, +0). Returns as ``topk_values``
==================  ============  ==============  ====================================================================

With ``L = clamp(length, 0, min(width, max_seq_len))`` and C the columns in ``[0, L)`` that are not NaN (of either sign),
a row holds the ``min(|C|, k)`` columns of C with the largest scores: **NaN is never selected**, ``-inf`` is an ordinary
lowest score (mask by length, not by ``-inf``), and ``-0.0 == +0.0``. Ties at the boundary go to the lowest column. So a
row has one right answer, whatever the batch, the device or the kernel.

Merging is exact: each shard's top-k with values, its columns made global, holds all that the global top-k needs. The
order of candidates never matters: those that share score and index are the same bits. Over ``torch.distributed``, ``dsv4_ops.parallel.context_parallel_topk`` does it: local top-k, one message, merge.

Graph-safe: yes (no host reads; sizes alone decide the launches).

Replaces the persistent and cooperative indexer top-k kernels of serving engines, whose row order is arbitrary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = ["topk", "topk_merge", "topk_values"]

MAX_K = 4096
_NO_CANDIDATE = -(2**63)
_CHUNK = 1 << 24  # elements that the PyTorch path ranks at once: bounds its int64 temporaries to some 0.5 GB

TOPK = _registry.define("topk(Tensor logits, Tensor lengths, int k, SymInt? max_seq_len=None, *, int lane=-1) -> Tensor", out=("out",))


def topk(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, *, lane: int = -1) -> torch.Tensor:
    """Columns of the ``k`` largest scores of every row, ascending, padded with -1: int32 ``[rows, k]``.

    Raises ArgumentError (``k``, ``max_seq_len`` or ``lane`` out of range), ArgumentShapeError (more lengths than rows,
    logits not dense in their last dimension), ArgumentDtypeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops topk``.
    """
    result: torch.Tensor = TOPK(logits, lengths, k, max_seq_len, lane=lane)
    return result


def _topk_check(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> None:
    _check_rows("topk", logits, lengths, k, max_seq_len, lane)


def _check_rows(where: str, logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None, lane: int) -> None:
    _checks.tensor(where, "logits", logits, _checks.FLOATS, 2)
    _checks.last_stride_one(where, "logits", logits)
    if logits.shape[1] > 2**31 - 1:
        raise ArgumentShapeError(where, "logits", "less than 2**31 columns wide (indices are int32)", f"shape {list(logits.shape)}")
    _checks.tensor(where, "lengths", lengths, _checks.INDEX, (1, 2))
    _checks.same_device(where, logits=logits, lengths=lengths)
    if lengths.numel() > logits.shape[0]:
        raise ArgumentShapeError(where, "lengths", f"of at most {logits.shape[0]} entries, one for each row of logits", f"shape {list(lengths.shape)}")
    _checks.integer(where, "k", k, 1, MAX_K)
    if max_seq_len is not None:
        _checks.integer(where, "max_seq_len", max_seq_len, 0)
    _checks.lane(where, lane)


def _select(row: list[float], k: int) -> list[int]:
    """Columns of the ``k`` largest scores, ascending: the definition."""
    numbers = [column for column, score in enumerate(row) if score == score]
    best_first = sorted(numbers, key=lambda column: (-row[column], column))
    return sorted(best_first[:k])


def _topk_reference(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> torch.Tensor:
    width = logits.shape[1] if max_seq_len is None else min(logits.shape[1], max_seq_len)
    indices = torch.full((logits.shape[0], k), -1, dtype=torch.int32)
    for i, length in enumerate(lengths.flatten().tolist()):
        columns = _select(logits[i, : min(max(length, 0), width)].tolist(), k)
        indices[i, : len(columns)] = torch.tensor(columns, dtype=torch.int32)
    return indices.to(logits.device)


def _order(scores: torch.Tensor) -> torch.Tensor:
    """int64 keys in ``[1, 2**32)`` that order scores as numbers do, equal zeros included; 0 for NaN."""
    bits = scores.to(torch.float32).view(torch.int32).to(torch.int64)  # bfloat16 widens exactly, infinities and zeros too
    magnitude = bits & 0x7FFFFFFF
    key = torch.where(bits < 0, -magnitude, magnitude) + 2**31
    return torch.where(magnitude > 0x7F800000, 0, key)


def _topk_chunk(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """``topk`` of some rows, ``lengths`` int64 ``[rows, 1]`` and clamped."""
    width = logits.shape[1]
    columns = torch.arange(width, device=logits.device)
    order = torch.where(columns < lengths, _order(logits), 0)
    # Equal scores rank by column: the key's low half counts columns down. All keys of a row differ but the excluded ones (0).
    ranked = torch.where(order > 0, order * 2**31 + (2**31 - 1 - columns), 0)
    best = ranked.topk(min(k, width), dim=1, sorted=False).values
    found = torch.where(best > 0, 2**31 - 1 - (best & (2**31 - 1)), 2**31 - 1).sort(dim=1).values
    found = torch.where(found < width, found, -1).to(torch.int32)
    return torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-1)


def _topk_torch(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> torch.Tensor:
    rows, width = logits.shape
    width = width if max_seq_len is None else min(width, max_seq_len)
    clamped = lengths.flatten().to(torch.int64).clamp(0, width)
    clamped = torch.nn.functional.pad(clamped, (0, rows - clamped.numel()))[:, None]
    if width == 0 or rows == 0:
        return logits.new_full((rows, k), -1, dtype=torch.int32)
    step = max(1, _CHUNK // width)
    chunks = [_topk_chunk(logits[i : i + step, :width], clamped[i : i + step], k) for i in range(0, rows, step)]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def _topk_triton(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> torch.Tensor:
    from ._triton import topk as kernels

    indices = _topk_fake(logits, lengths, k)
    kernels.launch(logits, lengths, k, max_seq_len, None, indices)
    return indices


def _topk_fake(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> torch.Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


def _topk_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def scores(rows: int, width: int, dtype: torch.dtype = torch.float32, special: bool = False) -> torch.Tensor:
        values = torch.randn(rows, width, generator=generator)
        if special:
            some = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45, 3.4e38])
            pick = torch.randint(0, 2 * len(some), (rows, width), generator=generator)
            values = torch.where(pick < len(some), some[pick % len(some)], values)
        return values.to(dtype).to(device)

    def lens(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    yield Sample("plain", (scores(4, 96), lens(96, 40, 8, 3), 8))
    yield Sample("no rows", (scores(0, 16), lens(), 4))
    yield Sample("no columns", (scores(2, 0), lens(3, 0), 4))
    yield Sample("one row, one column, k 1", (scores(1, 1), lens(1), 1))
    yield Sample("k above the width, int64 lengths", (scores(3, 10), lens(10, 4, 0, dtype=torch.int64), 33))
    yield Sample("negative, huge and int32 extremes", (scores(6, 20), lens(-1, -(2**31), 2**31 - 1, 21, 20, 0), 5))
    yield Sample("int64 extremes, max_seq_len", (scores(4, 20), lens(2**63 - 1, -(2**63), 2**32 + 1, 19, dtype=torch.int64), 5, 13))
    yield Sample("NaN, infinities, zeros, denormals", (scores(6, 64, special=True), lens(64, 64, 50, 33, 7, 64), 24))
    yield Sample("special values in bfloat16", (scores(6, 64, torch.bfloat16, special=True), lens(64, 64, 50, 33, 7, 64), 24))
    yield Sample("few distinct scores", (scores(3, 200).round(), lens(200, 150, 199), 64))
    yield Sample("padded rows and 2-D lengths", (scores(6, 40)[:, 3:36], lens(33, 30, -1, 12, 5, 40).reshape(3, 2), 12))
    yield Sample("strided 2-D lengths", (scores(6, 33), lens(33, 30, 1, 12, 5, 40).reshape(2, 3).t(), 12))
    yield Sample("fewer lengths than rows", (scores(5, 33, torch.bfloat16), lens(33, 8), 6), {"lane": 0})
    yield Sample("every score NaN", (scores(2, 30) * float("nan"), lens(30, 12), 5))


def _topk_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 1025, (n,), generator=generator, dtype=torch.int32).to(device)
    return Sample(f"{n} rows", (torch.randn(n, 1024, generator=generator).to(device), lengths, 128))


def _topk_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    logits, lengths = torch.zeros(3, 8, device=device), torch.ones(3, dtype=torch.int32, device=device)
    yield BadInput("float16 logits", (logits.half(), lengths, 2), ArgumentDtypeError, "logits must be float32 or bfloat16, got float16")
    yield BadInput("1-D logits", (logits[0], lengths, 2), ArgumentShapeError, "logits must be 2-dimensional")
    yield BadInput("transposed logits", (logits.t(), lengths, 2), ArgumentShapeError, "logits must be dense in its last dimension")
    yield BadInput("float lengths", (logits, lengths.float(), 2), ArgumentDtypeError, "lengths must be int32 or int64, got float32")
    yield BadInput("0-D lengths", (logits, lengths[0], 2), ArgumentShapeError, "lengths must be 1-dimensional or 2-dimensional")
    yield BadInput("more lengths than rows", (logits, lengths.repeat(2), 2), ArgumentShapeError, "lengths must be of at most 3 entries, one for each row of logits")
    yield BadInput("k 0", (logits, lengths, 0), ArgumentError, "k must be between 1 and 4096, got 0")
    yield BadInput("k 4097", (logits, lengths, 4097), ArgumentError, "k must be between 1 and 4096, got 4097")
    yield BadInput("negative max_seq_len", (logits, lengths, 2, -1), ArgumentError, "max_seq_len must be at least 0, got -1")
    yield BadInput("lane -2", (logits, lengths, 2), ArgumentError, "lane must be between -1 and 15, got -2", {"lane": -2})
    yield BadInput("lane 99", (logits, lengths, 2), ArgumentError, "lane must be between -1 and 15, got 99", {"lane": 99})
    yield BadInput("lengths elsewhere", (logits, lengths.to("meta"), 2), ArgumentError, "lengths must be on")


TOPK_VALUES = _registry.define("topk_values(Tensor logits, Tensor lengths, int k, SymInt? max_seq_len=None, *, int lane=-1) -> (Tensor, Tensor)", out=("values", "indices"))


def topk_values(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, *, lane: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, columns) of the ``k`` largest scores of every row, by ascending column; padded with ``-inf`` and -1.

    Both ``[rows, k]``. Scores keep the dtype (and the bits) of ``logits``, columns are int32. Raises what ``topk`` raises.
    Arguments: ``python -m dsv4_ops ops topk_values``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = TOPK_VALUES(logits, lengths, k, max_seq_len, lane=lane)
    return result


def _topk_values_check(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> None:
    _check_rows("topk_values", logits, lengths, k, max_seq_len, lane)


def _with_values(logits: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.shape[1] == 0:
        return logits.new_full(indices.shape, -torch.inf), indices
    return logits.gather(1, indices.clamp(min=0).to(torch.int64)).masked_fill_(indices < 0, -torch.inf), indices


def _topk_values_reference(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_values(logits, _topk_reference(logits, lengths, k, max_seq_len))


def _topk_values_torch(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_values(logits, _topk_torch(logits, lengths, k, max_seq_len))


def _topk_values_triton(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    from ._triton import topk as kernels

    values, indices = _topk_values_fake(logits, lengths, k)
    kernels.launch(logits, lengths, k, max_seq_len, values, indices)
    return values, indices


def _topk_values_fake(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, lane: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


def _topk_values_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    for bad in _topk_bad_inputs(device):
        yield BadInput(bad.label, bad.args, bad.error, "topk_values: " + bad.match, bad.kwargs)


TOPK_MERGE = _registry.define("topk_merge(Tensor values, Tensor indices, int k) -> (Tensor, Tensor)", out=("out_values", "out_indices"))


def topk_merge(values: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) ``[rows, k]`` of the ``k`` best candidates of every row, by ascending index, padded as ``topk_values``.

    Values keep their dtype, indices are int32. Ties go to the lowest global index. Raises ArgumentError (``k``), ArgumentShapeError, ArgumentDtypeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops topk_merge``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = TOPK_MERGE(values, indices, k)
    return result


def _topk_merge_check(values: torch.Tensor, indices: torch.Tensor, k: int) -> None:
    _checks.tensor("topk_merge", "values", values, _checks.FLOATS, 2)
    _checks.tensor("topk_merge", "indices", indices, _checks.INT32, 2)
    if values.shape != indices.shape:
        raise ArgumentShapeError("topk_merge", "indices", f"of shape {list(values.shape)} like values", f"shape {list(indices.shape)}")
    _checks.same_device("topk_merge", values=values, indices=indices)
    _checks.integer("topk_merge", "k", k, 1, MAX_K)


def _topk_merge_reference(values: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    out_values = torch.full((values.shape[0], k), -torch.inf, dtype=values.dtype)
    out_indices = torch.full((values.shape[0], k), -1, dtype=torch.int32)
    for i in range(values.shape[0]):
        candidates = [(v, c) for v, c in zip(values[i].tolist(), indices[i].tolist(), strict=True) if c >= 0 and v == v]
        best_first = sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1], math.copysign(1, -candidate[0])))
        for j, (value, index) in enumerate(sorted(best_first[:k], key=lambda candidate: candidate[1])):
            out_values[i, j], out_indices[i, j] = value, index
    return out_values.to(values.device), out_indices.to(values.device)


def _topk_merge_torch(values: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    candidates = values.shape[1]
    kept = min(k, candidates)
    order = torch.where(indices >= 0, _order(values), 0)
    # From the top: the score, equal zeros included, then the index counting down, then +0 before -0. All 64 bits, the highest turned over.
    minus_zero = (values == 0) & values.signbit()
    ranked = torch.where(order > 0, (order - 2**31) * 2**32 + 2 * (2**31 - 1 - indices.to(torch.int64)) + ~minus_zero, _NO_CANDIDATE)
    best, places = ranked.topk(kept, dim=1)  # sorted, so that copies of one index keep the order best first
    found = torch.where(best > _NO_CANDIDATE, indices.gather(1, places).to(torch.int64), 2**31)
    found, by_index = found.sort(dim=1, stable=True)
    merged_values = values.gather(1, places.gather(1, by_index)).masked_fill_(found == 2**31, -torch.inf)
    merged_indices = torch.where(found < 2**31, found, -1).to(torch.int32)
    pad = (0, k - kept)
    return torch.nn.functional.pad(merged_values, pad, value=-torch.inf), torch.nn.functional.pad(merged_indices, pad, value=-1)


def _topk_merge_triton(values: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    from ._triton import topk_merge as kernels

    return kernels.topk_merge(values, indices, k)


def _topk_merge_fake(values: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (values.shape[0], k)
    return values.new_empty(shape), indices.new_empty(shape)


def _topk_merge_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def candidates(rows: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(rows, count, generator=generator).to(dtype)
        order = torch.rand(rows, 4 * count, generator=generator).argsort(1)[:, :count].to(torch.int32)
        return values.to(device), order.to(device)

    values, indices = candidates(4, 24)
    yield Sample("two shards", (values, indices, 12))
    yield Sample("ties in bfloat16, some missing", (candidates(5, 40, torch.bfloat16)[0].round(), torch.where(candidates(5, 40)[0] < -1, -1, candidates(5, 40)[1]), 16))
    yield Sample("NaN, infinities and int32 extremes", (
        torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0]], device=device),
        torch.tensor([[1, 2**31 - 1, 7 + seed, 5, 4, -(2**31)]], dtype=torch.int32, device=device), 5))  # fmt: skip
    yield Sample("one index again and again", (
        torch.tensor([[-0.0, 0.0, 2.0, -0.0, 2.0, -torch.inf], [0.0, -0.0, -0.0, 0.0, 0.0, -0.0]], device=device),
        torch.tensor([[3, 3, 3, 2**31 - 1, 3, 3], [2**31 - 1] * 3 + [seed] * 3], dtype=torch.int32, device=device), 4))  # fmt: skip
    yield Sample("every score equal", (torch.full((3, 50), 1.5, device=device), candidates(3, 50)[1], 20))
    yield Sample("k above the candidates", (*candidates(3, 5), 9))
    yield Sample("no candidates", (*candidates(2, 0), 3))
    yield Sample("no rows", (*candidates(0, 8), 3))
    yield Sample("none valid", (values, torch.full_like(indices, -1), 3))
    yield Sample("strided views", (candidates(6, 20)[0][:, ::2], candidates(10, 6)[1].t(), 4))


def _topk_merge_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.rand(n, 4096, generator=generator).argsort(1)[:, :512].to(torch.int32)
    return Sample(f"{n} rows", (torch.randn(n, 512, generator=generator).to(device), indices.to(device), 128))


def _topk_merge_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    values, indices = torch.zeros(3, 8, device=device), torch.zeros(3, 8, dtype=torch.int32, device=device)
    yield BadInput("float16 values", (values.half(), indices, 2), ArgumentDtypeError, "values must be float32 or bfloat16, got float16")
    yield BadInput("int64 indices", (values, indices.long(), 2), ArgumentDtypeError, "indices must be int32, got int64")
    yield BadInput("other shapes", (values, indices[:, :7], 2), ArgumentShapeError, "indices must be of shape [3, 8] like values")
    yield BadInput("1-D values", (values[0], indices[0], 2), ArgumentShapeError, "values must be 2-dimensional")
    yield BadInput("k 0", (values, indices, 0), ArgumentError, "k must be between 1 and 4096, got 0")
    yield BadInput("indices elsewhere", (values, indices.to("meta"), 2), ArgumentError, "indices must be on")


TOPK.implement(
    check=_topk_check, reference=_topk_reference, torch_impl=_topk_torch, triton=_topk_triton, fake=_topk_fake, cpp=("cpu", "cuda"),
    samples=_topk_samples, sized=_topk_sized, bad_inputs=_topk_bad_inputs,
)  # fmt: skip
TOPK_VALUES.implement(
    check=_topk_values_check, reference=_topk_values_reference, torch_impl=_topk_values_torch, triton=_topk_values_triton, fake=_topk_values_fake, cpp=("cpu", "cuda"),
    samples=_topk_samples, sized=_topk_sized, bad_inputs=_topk_values_bad_inputs,
)  # fmt: skip
TOPK_MERGE.implement(
    check=_topk_merge_check, reference=_topk_merge_reference, torch_impl=_topk_merge_torch, triton=_topk_merge_triton, fake=_topk_merge_fake,
    samples=_topk_merge_samples, sized=_topk_merge_sized, bad_inputs=_topk_merge_bad_inputs,
)  # fmt: skip
