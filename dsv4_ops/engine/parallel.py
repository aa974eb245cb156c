"""The target over several ranks: each runs an engine of its own on the same requests, and holds a part of the attention.

Everything that is small or follows from the tokens is the same on every rank: scheduling, block tables, the window's KV and the compressors' raw
rows, experts, drafters. With ``tensor_parallel`` a rank has a share of the heads, from the query projection to the output projection, whose parts
are added. With ``context_parallel`` it has a share of the compressed records and of the indexer's keys, which is what grows with the context:
record n is on rank ``n % size``, a page of the group holds ``compressed_block_size`` tokens over all ranks, and attention over the window is
divided, too. Ranks are numbered with the tensor group innermost.

A rank's results are equal to the bit on all ranks of equal hardware (:mod:`dsv4_ops.parallel`); rank 0 decides all the same, so that no rounding
can part them. Weights and drafters are not divided: this shows the ops at work, it does not make a model fit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..context_lens import local_context_lens
from ..distributed import broadcast_samples
from ..errors import UnsupportedError
from ..parallel import context_parallel_decode, context_parallel_topk_slots, local_rows, local_slots, ordered_sum, own_heads
from ..sparse_decode import sparse_mla_decode
from ..topk_slots import topk_slots
from .config import EngineConfig

if TYPE_CHECKING:
    from .attention import AttentionMetadata, Geometry

__all__ = ["Ranks"]


class _SummedLinear(nn.Module):
    """The columns of a linear layer that belong to this rank; its result is the sum over the ranks."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ordered_sum(nn.functional.linear(x, self.weight), self.group)


class Ranks:
    """Which part of the target this process has. One rank has all of it, and needs no process group.

    Raises UnsupportedError when ``torch.distributed`` is not initialized with as many processes as ``config`` asks for.
    """

    attend: Callable[..., Any] = staticmethod(sparse_mla_decode)
    choose: Callable[..., Any] = staticmethod(topk_slots)

    def __init__(self, config: EngineConfig) -> None:
        self.tp_size, self.cp_size = config.tensor_parallel, config.context_parallel
        self.size = self.tp_size * self.cp_size
        if self.size == 1:
            return
        found = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
        if found != self.size:
            state = f"torch.distributed has {found}" if found else "torch.distributed is not initialized"
            raise UnsupportedError(
                f"The decode engine with tensor_parallel {self.tp_size} and context_parallel {self.cp_size}", [f"{self.size} processes are needed, {state}"]
            )
        self.cp_rank, self.tp_rank = divmod(dist.get_rank(), self.tp_size)
        grid = torch.arange(self.size).view(self.cp_size, self.tp_size)
        self.tp_group, cp_group = _group_of(grid), _group_of(grid.t())
        if self.cp_size > 1:
            self.attend = functools.partial(context_parallel_decode, group=cp_group)
            self.choose = functools.partial(context_parallel_topk_slots, group=cp_group)

    def part(self, attention: Any) -> Any:
        """The attention module with this rank's heads. Nothing of ``attention`` is changed."""
        if self.tp_size == 1:
            return attention
        part = copy.copy(attention)
        part._modules, part._parameters = dict(attention._modules), dict(attention._parameters)
        heads = own_heads(attention.num_heads, self.tp_rank, self.tp_size)
        part.num_heads = heads.stop - heads.start
        part.sinks = _own_rows(attention.sinks, self.tp_rank, self.tp_size)
        for name in ("q_b_proj", "o_a_proj"):
            linear = copy.copy(getattr(attention, name))
            linear._parameters = {"weight": _own_rows(linear.weight, self.tp_rank, self.tp_size), "bias": None}
            linear.out_features = linear.weight.shape[0]
            setattr(part, name, linear)
        groups = own_heads(attention.o_a_proj.n_groups, self.tp_rank, self.tp_size)
        part.o_a_proj.n_groups = groups.stop - groups.start
        columns = own_heads(attention.o_b_proj.in_features, self.tp_rank, self.tp_size)
        part.o_b_proj = _SummedLinear(attention.o_b_proj.weight.detach()[:, columns].contiguous(), self.tp_group)
        return part

    def local(self, geometry: Geometry) -> Geometry:
        """Sizes of this rank's pages."""
        return geometry._replace(compressed_block_size=geometry.compressed_block_size // self.cp_size)

    def share(self, whole: AttentionMetadata) -> AttentionMetadata:
        """What this rank reads and writes of what a step reads and writes."""
        if self.cp_size == 1:
            return whole
        own = self.cp_rank, self.cp_size
        plans = {}
        for kind, plan in whole.plans.items():
            block_size = plan.block_size // self.cp_size
            plans[kind] = plan._replace(slots=local_slots(plan.slots, block_size, *own), lens=local_context_lens(plan.lens, *own), block_size=block_size)
        indices, lens = local_rows(whole.swa_indices, whole.swa_lens, *own)
        return whole._replace(swa_indices=indices, swa_lens=lens, plans=plans)

    def agree(self, sampled: torch.Tensor, num_sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 ``[R, n]`` and counts int32 ``[R]`` as rank 0 has them."""
        return (sampled, num_sampled) if self.size == 1 else broadcast_samples(sampled, num_sampled)


def _own_rows(weight: torch.Tensor, rank: int, size: int) -> nn.Parameter:
    return nn.Parameter(weight.detach()[own_heads(weight.shape[0], rank, size)].clone(), requires_grad=False)


def _group_of(lines: torch.Tensor) -> dist.ProcessGroup | None:
    """The group of this rank's row; None, the default group, where one row holds all ranks. Every rank calls it with the same ``lines``."""
    if lines.shape[0] == 1:
        return None
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(lines.tolist())[0]
    return group
