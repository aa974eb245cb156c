"""Verifying: a pass that never edits and refuses a program whose lanes are not what the user wrote.

Proves, for every op that takes scratch, bodies of higher-order ops included:

* its lane argument equals the mark of its region;
* no op of a marked region is left ambient (``ambient="unmarked"``, the default), or no op at all (``ambient="refuse"``: programs
  replayed as CUDA graphs would keep the lane of the first run); ``ambient="allow"`` is for engines that set lanes from outside;
* no body is shared by calls of two lanes;
* explicit scratch tensors of two lanes never share storage (on Dynamo's graph only: functionalization hides the bases).

A refused program::

    a = torch.ops.dsv4_ops.topk.default(x, n, 8, lane = 0)                     # marked by use_workspace_lane(1)

    PassError: ... topk.default (a at step.py:12, in step): lane=0, its region is lane 1 ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.fx

from .. import lane_context
from ..errors import PassError
from ..lane_context import AMBIENT
from . import fx_utils, lanes, workspace_ops
from .base import LanePass
from .lanes import Regions
from .workspace_ops import workspace_op

__all__ = ["VerifyLanes"]

_SHOWN = 10


class VerifyLanes(LanePass):
    """Verifier for Inductor's ``post_grad_custom_post_pass`` slot, and for Dynamo's graph by :meth:`check`."""

    files = (Path(lanes.__file__), Path(workspace_ops.__file__), Path(lane_context.__file__))

    def __init__(self, ambient: str = "unmarked") -> None:
        if ambient not in ("allow", "unmarked", "refuse"):
            raise PassError(f"VerifyLanes: ambient must be 'allow', 'unmarked' or 'refuse', got {ambient!r}.")
        self.ambient = ambient
        self.handles_lanes = ambient != "allow"  # which lets a marked op through unbound

    def config(self) -> dict[str, Any]:
        return {"ambient": self.ambient}

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.check(fx_utils.owner_of(graph))

    def check(self, gm: torch.fx.GraphModule) -> int:
        """Raise PassError with every problem found, else return how many workspace ops were looked at."""
        state = _Check(Regions(gm), self.ambient)
        state.visit(gm, None, {})
        state.compare_storages()
        if state.problems:
            more = [] if len(state.problems) <= _SHOWN else [f"... and {len(state.problems) - _SHOWN} more"]
            raise PassError("workspace lanes of this program are wrong:\n" + "\n".join(f"  - {p}" for p in [*state.problems[:_SHOWN], *more]))
        return state.count


class _Check:
    def __init__(self, regions: Regions, ambient: str) -> None:
        self.regions, self.ambient = regions, ambient
        self.problems: list[str] = []
        self.count = 0
        self._expected: dict[torch.fx.Node, int | None] = {}
        self._scratch: dict[int, dict[int, str]] = {}

    def visit(self, gm: torch.fx.GraphModule, caller: int | None, outer: dict[int, int]) -> None:
        for node in gm.graph.nodes:
            call = fx_utils.as_op_call(node)
            if call is not None:
                self._call(call, self.regions.lane(node, gm, caller), outer)
        for body in fx_utils.bodies(gm.graph):
            self.visit(body.module, self.regions.lane(body.call, gm, caller), _storages_from_outside(body, outer))

    def _call(self, call: fx_utils.OpCall, mark: int | None, outer: dict[int, int]) -> None:
        entry = workspace_op(call.op)
        if entry is None:
            return
        self.count += 1
        where = f"{call.op} ({call.node.name} at {fx_utils.source_of(call.node)})"
        if call.node in self._expected and self._expected[call.node] != mark:
            self._add(f"{where}: its body is shared by calls of {_named(self._expected[call.node])} and {_named(mark)}. Clone the body, or call it in one lane.")
            return
        self._expected[call.node] = mark
        given = call.argument("lane") if entry.bound is call.op else AMBIENT
        if isinstance(given, bool) or not isinstance(given, int):
            self._add(f"{where}: lane={given} is computed by the program, expected a constant.")
            return
        if given == AMBIENT and (self.ambient == "refuse" or (mark is not None and self.ambient == "unmarked")):
            fix = "Enter use_workspace_lane there, or compile with passes.backend(unmarked=0)." if mark is None else "Compile with dsv4_ops.passes.backend(...), which binds it."
            self._add(f"{where}: left ambient (lane=-1), its region is {_named(mark)}. {fix}")
        elif given != AMBIENT and mark is not None and given != mark:
            self._add(f"{where}: lane={given}, its region is {_named(mark)}.")
        if given != AMBIENT:
            for name in entry.scratch:
                storage = fx_utils.storage_of(call.argument(name)) if call.form == "direct" else None
                if storage is not None:
                    self._scratch.setdefault(outer.get(storage, storage), {}).setdefault(given, f"{where}, argument {name}")

    def compare_storages(self) -> None:
        for users in self._scratch.values():
            if len(users) > 1:
                shown = "; ".join(f"lane {lane}: {where}" for lane, where in sorted(users.items()))
                self._add(f"one scratch storage is used in {len(users)} lanes ({shown}). Give each lane a buffer of its own.")

    def _add(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _named(lane: int | None) -> str:
    return "unmarked" if lane is None else f"lane {lane}"


def _storages_from_outside(body: fx_utils.Body, outer: dict[int, int]) -> dict[int, int]:
    """Storage of a body's placeholder -> storage of what the caller passes: operands are the call's last arguments, in order."""
    operands: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                collect(item)
        elif not (isinstance(value, torch.fx.Node) and value.op == "get_attr" and isinstance(getattr(value.graph.owning_module, str(value.target), None), torch.fx.GraphModule)):
            operands.append(value)

    collect(body.call.args)
    placeholders = [node for node in body.module.graph.nodes if node.op == "placeholder"]
    result = dict(outer)
    for placeholder, operand in zip(placeholders, operands[len(operands) - len(placeholders) :], strict=False):
        inner, passed = fx_utils.storage_of(placeholder), fx_utils.storage_of(operand)
        if inner is not None and passed is not None:
            result[inner] = outer.get(passed, passed)
    return result
