"""Top-k of the sparse indexer and translation of the chosen columns to physical slots, in one launch.

====================  ============  ==============  ==================================================================
argument              dtype         shape           meaning (B: compressed records a page)
====================  ============  ==============  ==================================================================
logits                float32/bf16  [rows, width]   scores, one row a token, as ``topk`` takes them
lengths               int32/64      [n] or [b, m]   columns that a row sees, as ``topk`` takes them
token_to_req_indices  int32         [rows]          row of ``block_table`` of each token, any stride
is_valid_token        bool          [rows]          false: padding, nothing of its row is used, any stride
block_table           int32         [R, blocks]     physical page of each logical page, any strides; 0 (null) and
                                                    negative: not mapped
k                     int                           1 to 4096, also above ``width``
block_size            int                           B: *records* a page, at least 1
max_seq_len           int or None                   further limit on every length, at least 0
lane                  int                           workspace lane, -1: the current one. The kernels need none
returns slots         int32         [rows, k]       ``block_table[request, c // B] * B + c % B`` of each chosen column
                                                    c, by ascending column (slots need not ascend), then -1
returns lens          int32         [rows]          number of chosen columns
====================  ============  ==============  ==================================================================

It *is* ``global_topk_indices(topk(logits, lengths, k, max_seq_len), ...)``, bit for bit. A chosen column past the table, on a
page that is not mapped, or whose slot int32 cannot hold, leaves -1 in its place and is counted by the length: holes count.
Padding tokens and requests outside the table: -1 and length 0, whatever their scores, length and request id are.

Where the device has no kernel of its own, the two ops run one after the other. Graph-safe: yes (sizes alone decide the
launches, nothing is read back). Replaces the pair of launches between an indexer's scores and sparse attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from ._slots import INT32_MAX, check_tokens, table_for_samples
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError
from .global_indices import _global_reference, global_topk_indices
from .topk import _check_rows, _topk_reference, topk

__all__ = ["topk_slots"]

TOPK_SLOTS = _registry.define(
    "topk_slots(Tensor logits, Tensor lengths, Tensor token_to_req_indices, Tensor is_valid_token, Tensor block_table, int k, int block_size, SymInt? max_seq_len=None, *, int lane=-1) -> (Tensor, Tensor)",
    out=("slots", "lens"),
)


def topk_slots(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    k: int,
    block_size: int,
    max_seq_len: int | None = None,
    *,
    lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and number of the ``k`` best-scored columns of every row: ``(slots int32 [rows, k], lens int32 [rows])``.

    Raises ArgumentError (``k``, ``block_size``, ``max_seq_len`` or ``lane`` out of range), ArgumentShapeError,
    ArgumentDtypeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops topk_slots``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = TOPK_SLOTS(logits, lengths, token_to_req_indices, is_valid_token, block_table, k, block_size, max_seq_len, lane=lane)
    return result


def _slots_check(
    logits: torch.Tensor, lengths: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor,
    k: int, block_size: int, max_seq_len: int | None = None, lane: int = -1,
) -> None:  # fmt: skip
    where = "topk_slots"
    _check_rows(where, logits, lengths, k, max_seq_len, lane)
    check_tokens(where, token_to_req_indices, is_valid_token, logits.shape[0], "logits")
    _checks.tensor(where, "block_table", block_table, _checks.INT32, 2)
    _checks.same_device(where, logits=logits, token_to_req_indices=token_to_req_indices, is_valid_token=is_valid_token, block_table=block_table)
    _checks.integer(where, "block_size", block_size, 1, INT32_MAX)


def _slots_reference(
    logits: torch.Tensor, lengths: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor,
    k: int, block_size: int, max_seq_len: int | None = None, lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _global_reference(_topk_reference(logits, lengths, k, max_seq_len), token_to_req_indices, is_valid_token, block_table, block_size=block_size)


def _slots_torch(
    logits: torch.Tensor, lengths: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor,
    k: int, block_size: int, max_seq_len: int | None = None, lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    columns = topk(logits, lengths, k, max_seq_len, lane=lane)  # by the ops, so that each takes the device's fastest kernel
    return global_topk_indices(columns, token_to_req_indices, is_valid_token, block_table, block_size=block_size)


def _slots_fake(
    logits: torch.Tensor, lengths: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor,
    k: int, block_size: int, max_seq_len: int | None = None, lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32), logits.new_empty((logits.shape[0],), dtype=torch.int32)


def _slots_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def drawn(label: str, rows: int, width: int, k: int, requests: int, blocks: int, block_size: int, high: int = 500, dtype: torch.dtype = torch.float32, **more: int) -> Sample:
        logits = torch.randn(rows, width, generator=g)
        logits = torch.where(torch.rand(rows, width, generator=g) < 0.1, torch.nan, logits).to(dtype)
        lengths = torch.randint(-2, width + 3, (rows,), generator=g, dtype=torch.int32)
        ids = torch.randint(0, max(1, requests), (rows,), generator=g, dtype=torch.int32)
        args = (logits, lengths, ids, torch.rand(rows, generator=g) < 0.8, table_for_samples(g, requests, blocks, high, holes=True))
        return Sample(label, (*(a.to(device) for a in args), k, block_size), dict(more))

    yield drawn("holes and padding tokens", 9, 70, 24, 3, 6, 12)
    yield drawn("few distinct scores in bfloat16", 6, 200, 64, 3, 4, 64, dtype=torch.bfloat16)
    yield drawn("columns past the table", 5, 64, 40, 2, 2, 16, lane=0)
    yield drawn("k above the width, page of one record", 4, 10, 33, 2, 10, 1)
    yield drawn("max_seq_len", 4, 40, 12, 2, 10, 4, max_seq_len=21)
    yield drawn("no rows", 0, 16, 4, 2, 4, 4)
    yield drawn("no columns", 3, 0, 4, 2, 4, 4)
    yield drawn("no requests", 3, 16, 4, 0, 4, 4)
    yield drawn("no blocks", 3, 16, 4, 2, 0, 4)
    yield drawn("ids near the int32 limit of slots", 8, 96, 48, 2, 2, 48, high=2**31 - 1)
    plain = drawn("page larger than any row", 4, 30, 8, 2, 1, 2**31 - 1, high=2)
    yield plain
    logits, lengths, _, valid, table = plain.args[:5]
    ids = torch.tensor([2**31 - 1, -(2**31), -1, 1], dtype=torch.int32, device=device)
    yield Sample("request ids outside the table", (logits, lengths, ids, torch.ones_like(valid), table, 8, 4))
    extremes = torch.tensor([2**63 - 1, -(2**63), 2**32 + 1, 7], dtype=torch.int64, device=device)
    yield Sample("all padding, int64 extremes", (logits, extremes, ids, torch.zeros_like(valid), table, 8, 4))
    wide = drawn("padded rows, strided tokens, transposed table", 8, 40, 16, 5, 5, 8)
    logits, lengths, ids, valid, table = wide.args[:5]
    yield Sample(wide.label, (logits[::2, 3:36], lengths[:4].reshape(2, 2).t(), ids[::2], valid[::2], table.t()[:, 1:4], 16, 8))
    yield Sample("fewer lengths than rows", (logits, lengths[:3], ids, torch.ones_like(valid), table, 6, 8))


def _slots_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 1025, (n,), generator=g, dtype=torch.int32)
    args = (torch.randn(n, 1024, generator=g), lengths, torch.arange(n, dtype=torch.int32), torch.ones(n, dtype=torch.bool), table_for_samples(g, n, 16))
    return Sample(f"{n} rows", (*(a.to(device) for a in args), 128, 64))


def _slots_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    logits, lengths = torch.zeros(3, 8, device=device), torch.ones(3, dtype=torch.int32, device=device)
    ids, valid = torch.zeros(3, dtype=torch.int32, device=device), torch.ones(3, dtype=torch.bool, device=device)
    table = torch.ones(2, 4, dtype=torch.int32, device=device)
    yield BadInput("float16 logits", (logits.half(), lengths, ids, valid, table, 2, 4), ArgumentDtypeError, "topk_slots: logits must be float32 or bfloat16, got float16")
    yield BadInput("transposed logits", (logits.t(), lengths, ids, valid, table, 2, 4), ArgumentShapeError, "logits must be dense in its last dimension")
    yield BadInput("more lengths than rows", (logits, lengths.repeat(2), ids, valid, table, 2, 4), ArgumentShapeError, "lengths must be of at most 3 entries")
    yield BadInput("int64 ids", (logits, lengths, ids.long(), valid, table, 2, 4), ArgumentDtypeError, "token_to_req_indices must be int32, got int64")
    yield BadInput("ids of another length", (logits, lengths, ids[:2], valid, table, 2, 4), ArgumentShapeError, "token_to_req_indices must be one entry a token (3, like logits)")
    yield BadInput("int validity", (logits, lengths, ids, valid.int(), table, 2, 4), ArgumentDtypeError, "is_valid_token must be bool")
    yield BadInput("1-D table", (logits, lengths, ids, valid, table[0], 2, 4), ArgumentShapeError, "block_table must be 2-dimensional")
    yield BadInput("table elsewhere", (logits, lengths, ids, valid, table.to("meta"), 2, 4), ArgumentError, "block_table must be on")
    yield BadInput("k 0", (logits, lengths, ids, valid, table, 0, 4), ArgumentError, "k must be between 1 and 4096, got 0")
    yield BadInput("block size 0", (logits, lengths, ids, valid, table, 2, 0), ArgumentError, "block_size must be between 1")
    yield BadInput("negative max_seq_len", (logits, lengths, ids, valid, table, 2, 4, -1), ArgumentError, "max_seq_len must be at least 0, got -1")
    yield BadInput("lane 99", (logits, lengths, ids, valid, table, 2, 4), ArgumentError, "lane must be between -1 and 15, got 99", {"lane": 99})


TOPK_SLOTS.implement(
    check=_slots_check, reference=_slots_reference, torch_impl=_slots_torch, fake=_slots_fake, cpp=("cpu", "cuda"),
    samples=_slots_samples, sized=_slots_sized, bad_inputs=_slots_bad_inputs,
)  # fmt: skip
