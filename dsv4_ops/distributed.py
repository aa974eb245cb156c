"""Decisions that all ranks of a tensor-parallel group must share.

Ranks compute the same logits up to rounding. Near a tie each would draw its own token and accept its own number of drafts, and from
then on their KV caches differ. So one rank decides and the others take its decision, in one collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from . import _checks
from .errors import ArgumentShapeError

__all__ = ["broadcast_samples"]


def broadcast_samples(sampled: torch.Tensor, num_sampled: torch.Tensor, *, src: int = 0, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of ``rejection_sample`` as rank ``src`` (of the default group) decided it, on every rank of ``group``.

    ``sampled`` int64 ``[R, 1+K]`` and ``num_sampled`` int32 ``[R]``, the same shapes on all ranks; returns fresh tensors of these
    shapes and dtypes. A functional collective: it may be traced by ``torch.compile``. Needs an initialized process group. Raises
    ArgumentDtypeError and ArgumentShapeError.
    """
    where = "broadcast_samples"
    _checks.tensor(where, "sampled", sampled, _checks.INT64, 2)
    _checks.tensor(where, "num_sampled", num_sampled, _checks.INT32, 1)
    if num_sampled.shape[0] != sampled.shape[0]:
        raise ArgumentShapeError(where, "num_sampled", f"of shape [{sampled.shape[0]}], one entry for each row of sampled", f"shape {list(num_sampled.shape)}")
    # One message: the counts travel as one more column.
    message = torch.cat([sampled, num_sampled[:, None].to(torch.int64)], 1)
    everyone: Any = dist.group.WORLD
    decided = collectives.wait_tensor(collectives.broadcast(message, src, group if group is not None else everyone))
    return decided[:, :-1].contiguous(), decided[:, -1].to(torch.int32)
