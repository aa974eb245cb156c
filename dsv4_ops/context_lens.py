"""Context lengths of multi-token prediction: how far each query token sees.

``mtp_context_lens`` is the uniform form (every request has ``next_n`` query tokens).

==================  =======  ==========  ==========================================================================
argument            dtype    shape       meaning
==================  =======  ==========  ==========================================================================
seq_lens            int32/64 [R]         tokens of each request after this step, its query tokens included; any
                                         stride. A padded request has length 0; a negative length counts as 0
next_n              int                  query tokens a request, at least 1
compress_ratio      int                  tokens a compressed record, at least 1 (1: lengths in tokens)
returns             int32    [R, next_n] contiguous; token j of n sees ``max(0, s - n + j + 1) // compress_ratio``
==================  =======  ==========  ==========================================================================

The clamp comes before the division and the division after the per-token expansion: ``s // r - n + j + 1`` is another,
wrong, number. Graph-safe: yes (one launch, no host reads).

Replaces the per-token length expansion of sparse-indexer metadata builders in serving engines.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = ["mtp_context_lens"]

MTP_CONTEXT_LENS = _registry.define("mtp_context_lens(Tensor seq_lens, int next_n, int compress_ratio=1) -> Tensor", out=("out",))


def mtp_context_lens(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1) -> torch.Tensor:
    """Visible length of each of the ``next_n`` query tokens of every request: int32 ``[R, next_n]``.

    Raises ArgumentError (bad ``next_n`` or ``compress_ratio``), ArgumentDtypeError, ArgumentShapeError.
    """
    return MTP_CONTEXT_LENS(seq_lens, next_n, compress_ratio)


def _check(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1) -> None:
    _checks.tensor("mtp_context_lens", "seq_lens", seq_lens, _checks.INDEX, 1)
    _checks.integer("mtp_context_lens", "next_n", next_n, 1)
    _checks.integer("mtp_context_lens", "compress_ratio", compress_ratio, 1)


def _reference(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1) -> torch.Tensor:
    back = torch.arange(next_n - 1, -1, -1, device=seq_lens.device, dtype=torch.int64)
    return ((seq_lens.to(torch.int64)[:, None] - back).clamp(min=0) // compress_ratio).to(torch.int32)


def _fake(seq_lens: torch.Tensor, next_n: int, compress_ratio: int = 1) -> torch.Tensor:
    return seq_lens.new_empty((seq_lens.shape[0], next_n), dtype=torch.int32)


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def lens(n: int, high: int = 4096) -> torch.Tensor:
        return torch.randint(0, high, (n,), generator=generator, dtype=torch.int32).to(device)

    yield Sample("plain decode", (lens(5), 1))
    yield Sample("next_n 4, ratio 4", (lens(7), 4, 4))
    yield Sample("no requests", (lens(0), 2))
    yield Sample("padded, short and negative", (torch.tensor([0, 1, 2, 3, -1, -(2**31)], dtype=torch.int32, device=device), 3, 128))
    yield Sample("int32 extremes, int64 lengths", (torch.tensor([2**31 - 1, 2**31, 0], device=device), 2, 4))
    yield Sample("strided view", (lens(12)[::2], 2))


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(f"{n} requests", (torch.randint(0, 131072, (n,), generator=generator, dtype=torch.int32).to(device), 4, 4))


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    lens = torch.ones(3, dtype=torch.int32, device=device)
    yield BadInput("float lengths", (lens.float(), 2), ArgumentDtypeError, "seq_lens must be int32 or int64, got float32")
    yield BadInput("2-D lengths", (lens[None], 2), ArgumentShapeError, "seq_lens must be 1-dimensional")
    yield BadInput("next_n 0", (lens, 0), ArgumentError, "next_n must be at least 1, got 0")
    yield BadInput("ratio 0", (lens, 2, 0), ArgumentError, "compress_ratio must be at least 1, got 0")


MTP_CONTEXT_LENS.implement(check=_check, reference=_reference, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs)
