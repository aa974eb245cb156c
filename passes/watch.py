"""Programs that say so while they run: an op that no one registered asks for the lane of a marked region, and gets the ambient one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from .. import lane_context
from ..lane_context import AMBIENT, Unregistered
from . import fx_utils
from .workspace_ops import workspace_op

__all__ = ["watched"]

_NO_SCRATCH = frozenset({"aten", "prims", "prim", "inductor", "dsv4_ops"})


def watched(gm: torch.fx.GraphModule, compiled: Any) -> Callable[..., Any]:
    """``compiled``, made from ``gm`` (bound or marked); itself where every op of a marked region is known."""
    lanes: dict[Any, frozenset[int]] = {}
    ambient = False
    for _, module in fx_utils.modules(gm):
        for node in module.graph.nodes:
            call, lane = fx_utils.as_op_call(node), fx_utils.lane_mark(node)
            if call is None or call.op.namespace in _NO_SCRATCH - {"dsv4_ops"}:
                continue
            entry = workspace_op(call.op)
            if entry is not None:
                ambient |= lane is None and (entry.bound is not call.op or call.argument("lane") == AMBIENT)
            elif lane is not None and call.op.namespace not in _NO_SCRATCH:
                lanes[call.op] = lanes.get(call.op, frozenset()) | {lane}
    return _watching(Unregistered(lanes, not ambient), compiled) if lanes else compiled


def _watching(unregistered: Unregistered, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        token = lane_context._unregistered.set(unregistered)
        try:
            return compiled(*args)
        finally:
            lane_context._unregistered.reset(token)

    return run
