"""From the indexer's request-local record numbers to slots of the compressed cache.

======================  =======  ============  ========================================================================
argument                dtype    shape         meaning (B: compressed records a page)
======================  =======  ============  ========================================================================
topk_indices            int32    [T, k]        record numbers within the request, any strides; negative: no entry
token_to_req_indices    int32    [T]           row of ``block_table`` of each token
is_valid_token          bool     [T]           false: padding, neither its request id nor its top-k row is used for a load
block_table             int32    [R, blocks]   physical page of each logical page of the compressed group, any strides;
                                               0 (null) and negative: not mapped
block_size              int                    B: *records* a page (64 for a 256-token page at ratio 4), at least 1
returns slots           int32    [T, k]        ``block_table[request, i // B] * B + i % B``, column for column
returns lens            int32    [T]           one past the last column that holds a record number
======================  =======  ============  ========================================================================

A record past the table, on a page that is not mapped, or whose slot int32 cannot hold, leaves -1 in its column and is
counted by the length, as is an entry of -1 between others. Padding tokens and requests outside the table: -1, length 0.

Graph-safe: yes (sizes alone decide what runs, nothing is read back). Replaces the local-to-global index translation
of serving engines' sparse MLA layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from ._slots import INT32_MAX, check_tokens, listed_lens, safe_requests, slot_of, slots_at, table_for_samples
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = ["global_topk_indices"]

GLOBAL_TOPK_INDICES = _registry.define(
    "global_topk_indices(Tensor topk_indices, Tensor token_to_req_indices, Tensor is_valid_token, Tensor block_table, *, int block_size) -> (Tensor, Tensor)",
    out=("slots", "lens"),
)


def global_topk_indices(
    topk_indices: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor, *, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and lengths of request-local compressed positions: ``(slots int32 [T, k], lens int32 [T])``.

    Raises ArgumentError (``block_size``), ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops global_topk_indices``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = GLOBAL_TOPK_INDICES(topk_indices, token_to_req_indices, is_valid_token, block_table, block_size=block_size)
    return result


def _global_check(topk_indices: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor, *, block_size: int) -> None:
    where = "global_topk_indices"
    _checks.tensor(where, "topk_indices", topk_indices, _checks.INT32, 2)
    check_tokens(where, token_to_req_indices, is_valid_token, topk_indices.shape[0], "topk_indices")
    _checks.tensor(where, "block_table", block_table, _checks.INT32, 2)
    _checks.same_device(where, topk_indices=topk_indices, token_to_req_indices=token_to_req_indices, is_valid_token=is_valid_token, block_table=block_table)
    _checks.integer(where, "block_size", block_size, 1, INT32_MAX)


def _global_reference(
    topk_indices: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor, *, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    table = block_table.tolist()
    slots, lens = torch.full(topk_indices.shape, _checks.PAD_SLOT_ID, dtype=torch.int32), torch.zeros(topk_indices.shape[0], dtype=torch.int32)
    for t, (local, request, valid) in enumerate(zip(topk_indices.tolist(), token_to_req_indices.tolist(), is_valid_token.tolist(), strict=True)):
        if not valid or not 0 <= request < len(table):
            continue
        for column, record in enumerate(local):
            if record >= 0:
                slots[t, column] = slot_of(table[request], record, block_size)
                lens[t] = column + 1
    return slots.to(topk_indices.device), lens.to(topk_indices.device)


def _global_torch(
    topk_indices: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor, *, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, has_request = safe_requests(token_to_req_indices, is_valid_token, block_table.shape[0])
    listed = (topk_indices >= 0) & has_request[:, None]
    return slots_at(block_table, requests, topk_indices.to(torch.int64), listed, block_size), listed_lens(listed)


def _global_triton(
    topk_indices: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor, *, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from ._triton import global_indices as kernels

    return kernels.global_topk_indices(topk_indices, token_to_req_indices, is_valid_token, block_table, block_size=block_size)


def _global_fake(
    topk_indices: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, block_table: torch.Tensor, *, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return topk_indices.new_empty(topk_indices.shape), topk_indices.new_empty((topk_indices.shape[0],))


def _global_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def drawn(label: str, tokens: int, k: int, requests: int, blocks: int, block_size: int, high: int = 500) -> Sample:
        local = torch.randint(-2, max(1, blocks * block_size + 3), (tokens, k), generator=g, dtype=torch.int32)
        ids = torch.randint(0, max(1, requests), (tokens,), generator=g, dtype=torch.int32)
        args = (local, ids, torch.rand(tokens, generator=g) < 0.8, table_for_samples(g, requests, blocks, high, holes=True))
        return Sample(label, tuple(a.to(device) for a in args), {"block_size": block_size})

    yield drawn("holes and padding tokens", 9, 8, 3, 4, 4)
    yield drawn("page of two records", 5, 6, 2, 8, 2)
    yield drawn("no tokens", 0, 4, 2, 2, 4)
    yield drawn("no columns", 3, 0, 2, 2, 4)
    yield drawn("no requests", 3, 4, 0, 2, 4)
    yield drawn("no blocks", 3, 4, 2, 0, 4)
    yield drawn("one token, one column", 1, 1, 1, 1, 1)
    yield drawn("ids near the int32 limit of slots", 8, 8, 2, 4, 48, high=2**31 - 1)
    garbage = torch.tensor([[2143289344, -(2**31), 2**31 - 1, 0], [0, -1, 3, -1], [-1, -1, -1, -1], [1, 2, 3, 4]], dtype=torch.int32)
    ids = torch.tensor([2**31 - 1, 0, 1, -(2**31)], dtype=torch.int32)
    for label, valid in (("garbage rows of valid tokens", True), ("all padding", False)):
        args = (garbage, ids if not valid else ids.clamp(0, 1), torch.full((4,), valid), table_for_samples(g, 2, 2))
        yield Sample(label, tuple(a.to(device) for a in args), {"block_size": 2})
    yield Sample("request ids outside the table", tuple(a.to(device) for a in (garbage, ids, torch.ones(4, dtype=torch.bool), table_for_samples(g, 2, 2))), {"block_size": 2})
    wide = drawn("narrowed table and strided rows", 8, 12, 3, 9, 4)
    yield Sample(wide.label, (wide.args[0][::2, 1:9:2], wide.args[1][::2], wide.args[2][::2], wide.args[3][:, 2:6]), wide.kwargs)
    wide = drawn("transposed rows and table", 6, 6, 3, 3, 4)
    yield Sample(wide.label, (wide.args[0].t(), *wide.args[1:3], wide.args[3].t()), wide.kwargs)


def _global_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    local = torch.randint(0, 64 * 64, (n, 512), generator=g, dtype=torch.int32)
    args = (local, torch.arange(n, dtype=torch.int32), torch.ones(n, dtype=torch.bool), table_for_samples(g, n, 64))
    return Sample(f"{n} tokens, k 512", tuple(a.to(device) for a in args), {"block_size": 64})


def _global_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    local, ids = torch.zeros(3, 4, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    valid, table = torch.ones(3, dtype=torch.bool, device=device), torch.ones(2, 4, dtype=torch.int32, device=device)
    yield BadInput("int64 indices", (local.long(), ids, valid, table), ArgumentDtypeError, "topk_indices must be int32, got int64", {"block_size": 4})
    yield BadInput("1-D indices", (local[0], ids, valid, table), ArgumentShapeError, "topk_indices must be 2-dimensional", {"block_size": 4})
    yield BadInput("validity of another length", (local, ids, valid[:2], table), ArgumentShapeError, "is_valid_token must be one entry a token (3", {"block_size": 4})
    yield BadInput("float table", (local, ids, valid, table.float()), ArgumentDtypeError, "block_table must be int32", {"block_size": 4})
    yield BadInput("block size 0", (local, ids, valid, table), ArgumentError, "block_size must be between 1", {"block_size": 0})


GLOBAL_TOPK_INDICES.implement(
    check=_global_check,
    reference=_global_reference,
    torch_impl=_global_torch,
    triton=_global_triton,
    fake=_global_fake,
    samples=_global_samples,
    sized=_global_sized,
    bad_inputs=_global_bad_inputs,
)
