"""Decisions about a batch that are taken on the host, before a step: which form its lengths take, and what it holds.

Plain Python over the scheduler's own numbers (lists or CPU tensors); nothing here touches a device, except
``unpadded_token_rows``, which is a few PyTorch calls without a host read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from . import _checks
from ._slots import check_tokens, safe_requests
from .errors import ArgumentDeviceError, ArgumentShapeError

__all__ = ["BatchKind", "classify_batch", "is_uniform_decode", "unpadded_token_rows"]

Ints = Sequence[int] | torch.Tensor


class BatchKind(NamedTuple):
    """What a batch holds. Requests without query tokens and rows behind ``num_reqs`` count as nothing."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    is_decode_first: bool
    """No decode request stands behind a prefill: what the mixed index builder relies on."""

    @property
    def is_pure_decode(self) -> bool:
        """No prefill tokens (a step without any live request counts too: it replays the decode graph)."""
        return self.num_prefills == 0


def classify_batch(query_lens: Ints, num_computed_tokens: Ints, num_prompt_tokens: Ints, num_reqs: int | None = None) -> BatchKind:
    """Count decode and prefill requests of one step. A request prefills until its whole prompt is computed.

    ``num_reqs``: live requests; entries behind them may hold anything. Left out: all of them. Raises ArgumentError.
    """
    named = {"query_lens": query_lens, "num_computed_tokens": num_computed_tokens, "num_prompt_tokens": num_prompt_tokens}
    values = [_host_ints("classify_batch", name, value) for name, value in named.items()]
    live = len(values[0]) if num_reqs is None else num_reqs
    _checks.integer("classify_batch", "num_reqs", live, 0)
    for name, value in zip(named, values, strict=True):
        if len(value) < live:
            raise ArgumentShapeError("classify_batch", name, f"at least one entry for each of the {live} requests", f"{len(value)} entries")
    decodes = decode_tokens = prefills = prefill_tokens = 0
    decode_first = True
    for query_len, computed, prompt in zip(*(value[:live] for value in values), strict=True):
        if query_len <= 0:
            continue
        if computed < prompt:
            prefills, prefill_tokens = prefills + 1, prefill_tokens + query_len
        else:
            decodes, decode_tokens = decodes + 1, decode_tokens + query_len
            decode_first &= prefills == 0
    return BatchKind(decodes, decode_tokens, prefills, prefill_tokens, decode_first)


def is_uniform_decode(query_start_loc: Ints, next_n: int) -> bool:
    """Whether ``mtp_context_lens`` describes this batch: every request has exactly ``next_n`` query tokens.

    Looks at each request, never at the total. Padding requests (no query tokens) may follow the live ones, where the
    uniform layout has their rows anyway; an empty request in front of a live one makes the batch ragged.
    Raises ArgumentError, ArgumentShapeError (no entries).
    """
    _checks.integer("is_uniform_decode", "next_n", next_n, 1)
    starts = _host_ints("is_uniform_decode", "query_start_loc", query_start_loc)
    if not starts:
        raise ArgumentShapeError("is_uniform_decode", "query_start_loc", "one entry longer than the requests", "no entries")
    lens = [end - start for start, end in pairwise(starts)]
    while lens and lens[-1] == 0:
        lens.pop()
    return starts[0] == 0 and all(length == next_n for length in lens)


def unpadded_token_rows(query_start_loc: torch.Tensor, token_to_req_indices: torch.Tensor, is_valid_token: torch.Tensor, padded_query_len: int) -> torch.Tensor:
    """Where each token stands when every request is padded to ``padded_query_len`` rows: int64 ``[T]``, to index that rectangle's rows.

    ``rectangle.index_select(0, rows)`` unpads. Padding tokens get row 0, which nobody may use. ``padded_query_len`` must cover the
    longest query (on the host, the caller knows it); a token past it gets its own request's last row, never a neighbour's.
    Raises ArgumentError, ArgumentDtypeError, ArgumentShapeError.
    """
    _checks.integer("unpadded_token_rows", "padded_query_len", padded_query_len, 1)
    _checks.tensor("unpadded_token_rows", "query_start_loc", query_start_loc, _checks.INDEX, 1)
    num_reqs = query_start_loc.shape[0] - 1
    if num_reqs < 0:
        raise ArgumentShapeError("unpadded_token_rows", "query_start_loc", "one entry longer than the requests", "no entries")
    check_tokens("unpadded_token_rows", token_to_req_indices, is_valid_token, token_to_req_indices.shape[0], "token_to_req_indices")
    requests, has_request = safe_requests(token_to_req_indices, is_valid_token, num_reqs)
    offset = torch.arange(requests.shape[0], device=requests.device) - query_start_loc[requests]
    return (requests * padded_query_len + offset.clamp(0, padded_query_len - 1)).masked_fill(~has_request, 0)


def _host_ints(where: str, name: str, value: Ints) -> list[int]:
    if not isinstance(value, torch.Tensor):
        return [int(v) for v in value]
    if value.device.type != "cpu":
        raise ArgumentDeviceError(where, name, "on the CPU (this is a decision of the host)", f"device {value.device}", "Pass the scheduler's own copy.")
    if value.dim() != 1:
        raise ArgumentShapeError(where, name, "1-dimensional", f"shape {list(value.shape)}")
    return [int(v) for v in value.tolist()]
