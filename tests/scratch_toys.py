"""Toy ops that really work in a lane's scratch, on any device. For the tests of captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4_ops import workspace
from dsv4_ops.passes import register_workspace_op
from dsv4_ops.testing import PYTHON_KERNELS

NAMESPACE = "dsv4_scratch_toys"
_library = torch.library.Library(NAMESPACE, "DEF")

lanes: list[int] = []
"""Lane of every run of ``mix``, in order."""


def _op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    PYTHON_KERNELS[op] = kernel
    register_workspace_op(op)
    return op


def _scratch(op: str, lane: int, *shapes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    return workspace.workspace_manager(device).get(*((shape, torch.float32) for shape in shapes), lane=lane, op=op)


def _mix(x: torch.Tensor, rounds: int, lane: int = -1) -> torch.Tensor:
    lanes.append(workspace.resolve_lane(lane))
    a, b = _scratch("mix", lane, tuple(x.shape), tuple(x.shape), device=x.device)
    a.copy_(x)
    for _ in range(rounds):
        torch.add(a[:, :-1], a[:, 1:], out=b[:, :-1])
        b[:, -1:].copy_(a[:, :1])
        torch.tanh(b, out=a)
    return a + b


def _stash(x: torch.Tensor, lane: int = -1) -> torch.Tensor:
    (scratch,) = _scratch("stash", lane, tuple(x.shape), device=x.device)
    torch.mul(x, 3.0, out=scratch)
    return x.sum(-1)


def _fetch(like: torch.Tensor, lane: int = -1) -> torch.Tensor:
    (scratch,) = _scratch("fetch", lane, tuple(like.shape), device=like.device)
    return scratch + 1


mix = _op("mix(Tensor x, int rounds, *, int lane=-1) -> Tensor", _mix, lambda x, rounds, lane=-1: torch.empty_like(x))
"""Computes in scratch; leaves nothing there that anyone needs."""
stash = _op("stash(Tensor x, *, int lane=-1) -> Tensor", _stash, lambda x, lane=-1: x.new_empty(x.shape[:-1]))
fetch = _op("fetch(Tensor like, *, int lane=-1) -> Tensor", _fetch, lambda like, lane=-1: torch.empty_like(like))
"""A step in two pieces: ``stash`` leaves ``3 * x`` in scratch, ``fetch`` returns what is there, plus 1."""
