"""Binding: every op that takes scratch gets the lane of the region it was traced in, as a constant argument.

The pass runs on Dynamo's graph, before AOTAutograd, so every cache key contains the lanes and nothing that Inductor does later
(reordering, fusion, removal of dead code) can move an op into another lane::

    before   a = torch.ops.dsv4_ops.topk.default(x, n, 8)                      # unmarked: ambient, decided when it runs
             b = torch.ops.dsv4_ops.topk.default(y, n, 8)                      # marked by use_workspace_lane(1)
    after    a = torch.ops.dsv4_ops.topk.default(x, n, 8)
             b = torch.ops.dsv4_ops.topk.default(y, n, 8, lane = 1)

Bodies of higher-order ops belong to the lane of their caller, except where they enter a lane themselves. A body that callers of two
lanes share (``nested_compile_region``: traced once, with the marks of its first caller) is cloned::

    before   s = torch.ops.higher_order.invoke_subgraph(self.subgraph_0, 'subgraph_0', x)         # lane 1
             t = torch.ops.higher_order.invoke_subgraph(self.subgraph_0, 'subgraph_0', y)         # unmarked
    after    s = torch.ops.higher_order.invoke_subgraph(self.subgraph_0, 'subgraph_0', x)
             t = torch.ops.higher_order.invoke_subgraph(self.subgraph_0_ambient, 'subgraph_0_ambient', y)

Nothing is removed or reordered, and a second run changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx

from .. import lane_context
from ..errors import PassError
from ..lane_context import AMBIENT
from . import fx_utils, workspace_ops
from .base import LanePass, logger
from .watch import watched
from .workspace_ops import workspace_op

__all__ = ["BindLanes", "BindReport", "bind_lanes", "marks_digest", "with_marks"]

BOUND_HERE = "dsv4_lane_bound"
"""In ``node.meta``: the lane was bound, not given by the program, so that another caller may bind it again. Inductor runs its post-grad
passes on bodies first, without their callers, and each body has the mark of the caller that was traced first."""


@dataclass
class BindReport:
    """What :func:`bind_lanes` did."""

    bound: dict[str, int] = field(default_factory=dict)
    """Calls bound now, by ``"op@lane"``."""
    ambient: int = 0
    """Calls left to the lane of the moment they run."""
    cloned: list[str] = field(default_factory=list)
    """Names of bodies that were cloned."""


class Regions:
    """Which lane each node of a program is in, bodies included.

    A body's node carries the mark under which the body was traced. It is the body's own when its region is not the region of any call
    of that body; otherwise the mark came from the first caller and the lane is that of the caller at hand.
    """

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self._called_from: dict[int, set[int | None]] = {}
        for _, module in fx_utils.modules(gm):
            for body in fx_utils.bodies(module.graph):
                self._called_from.setdefault(id(body.module), set()).add(fx_utils.region_mark(body.call))

    def lane(self, node: torch.fx.Node, module: torch.fx.GraphModule, caller: int | None) -> int | None:
        mark, region = fx_utils.lane_mark(node), fx_utils.region_mark(node)
        inherited = mark is None or (region is not None and region in self._called_from.get(id(module), ()))
        return caller if inherited else mark


def bind_lanes(gm: torch.fx.GraphModule, *, unmarked: int | None = None, clone: bool = True) -> BindReport:
    """Bind the lanes of every workspace op of ``gm`` and of the bodies it calls, in place.

    ``unmarked``: lane of ops outside every ``use_workspace_lane`` (None: they stay ambient). ``clone=False`` refuses a body that two
    lanes share instead of cloning it. Raises PassError (lane argument that contradicts the mark or is not a constant, shared body).
    """
    report = _Binder(Regions(gm), unmarked, clone).run(gm)
    logger.debug("lanes bound: %s", report)
    return report


class _Binder:
    def __init__(self, regions: Regions, unmarked: int | None, clone: bool, bind: bool = True) -> None:
        self.regions, self.unmarked, self.clone, self.bind = regions, unmarked, clone, bind
        self.report = BindReport()
        self._lane_of: dict[int, int | None] = {}
        self._pristine: dict[int, torch.fx.GraphModule] = {}
        self._clones: dict[tuple[int, int | None], torch.fx.GraphModule] = {}
        self._touched: list[torch.fx.GraphModule] = []

    def run(self, gm: torch.fx.GraphModule) -> BindReport:
        self.visit(gm, None, top=True)
        for touched in self._touched:
            touched.graph.lint()
            touched.recompile()
        return self.report

    def visit(self, gm: torch.fx.GraphModule, caller: int | None, top: bool = False, origin: torch.fx.GraphModule | None = None) -> None:
        self._touched.append(gm)
        for node in list(gm.graph.nodes):
            lane = self.regions.lane(node, origin or gm, caller)
            if not top:
                fx_utils.set_lane_mark(node, lane)  # what the first caller left may be another lane
            call = fx_utils.as_op_call(node)
            if call is not None and self.bind:
                self._bind(call, lane)
        for body in list(fx_utils.bodies(gm.graph)):
            self._enter(body, self.regions.lane(body.call, gm, caller) if top else fx_utils.lane_mark(body.call))

    def _enter(self, body: fx_utils.Body, lane: int | None) -> None:
        key = id(body.module)
        if key not in self._lane_of:
            self._lane_of[key] = lane
            self._pristine[key] = fx_utils.copy_module(body.module)
            self.visit(body.module, lane)
        elif self._lane_of[key] != lane and self._depends_on_caller(body.module):
            if not self.clone:
                raise PassError(_shared(body, self._lane_of[key], lane))
            copy = self._clones.get((key, lane))
            suffix = "ambient" if lane is None else f"lane{lane}"
            if copy is None:
                copy = self._clones[(key, lane)] = fx_utils.copy_module(self._pristine[key])
                self.report.cloned.append(f"{body.attribute.target}_{suffix}")
                self._lane_of[id(copy)] = lane
                self.visit(copy, lane, origin=body.module)
            fx_utils.clone_body(body, copy, suffix)

    def _depends_on_caller(self, module: torch.fx.GraphModule) -> bool:
        """Whether an op in this body, as it was traced, takes the caller's lane."""
        pristine = self._pristine[id(module)]
        for node in pristine.graph.nodes:
            if self.regions.lane(node, module, AMBIENT) != AMBIENT:
                continue
            call = fx_utils.as_op_call(node)
            if call is not None and (entry := workspace_op(call.op)) is not None and (entry.bound is not call.op or BOUND_HERE in node.meta or call.argument("lane") == AMBIENT):
                return True
        return any(
            self.regions.lane(body.call, module, AMBIENT) == AMBIENT and (id(body.module) not in self._pristine or self._depends_on_caller(body.module))
            for body in fx_utils.bodies(pristine.graph)
        )

    def _bind(self, call: fx_utils.OpCall, mark: int | None) -> None:
        entry = workspace_op(call.op)
        if entry is None:
            return
        lane = self.unmarked if mark is None else mark
        if entry.bound is not call.op:
            if lane is None:
                self.report.ambient += 1
                return
            call.set_op(entry.bound)
            call = fx_utils.OpCall(call.node, entry.bound, call.form)
            self._set(call, lane)
            return
        given = call.argument("lane")
        if isinstance(given, bool) or not isinstance(given, int):
            raise PassError(f"{call.op} ({call.node.name} at {fx_utils.source_of(call.node)}): its lane is computed by the program, expected a constant. Use use_workspace_lane, or pass a Python int that does not change.")
        if given == AMBIENT or BOUND_HERE in call.node.meta:
            if lane is None:
                self.report.ambient += 1
            if given != (AMBIENT if lane is None else lane):
                self._set(call, AMBIENT if lane is None else lane)
        elif mark is not None and given != mark:
            raise PassError(f"{call.op} ({call.node.name} at {fx_utils.source_of(call.node)}): called with lane={given} inside use_workspace_lane({mark}). Leave lane at -1 there, or enter the lane you mean.")

    def _set(self, call: fx_utils.OpCall, lane: int) -> None:
        call.set_argument("lane", lane)
        call.node.meta[BOUND_HERE] = True
        self._count(call.op, lane)

    def _count(self, op: Any, lane: int) -> None:
        key = f"{op}@{lane}"
        self.report.bound[key] = self.report.bound.get(key, 0) + 1


def _shared(body: fx_utils.Body, first: int | None, second: int | None) -> str:
    shown = ["the ambient lane" if lane is None else f"lane {lane}" for lane in (first, second)]
    return (
        f"{body.attribute.target} (called by {body.call.name} at {fx_utils.source_of(body.call)}) is shared by {shown[0]} and {shown[1]}, so its ops cannot be bound. "
        "Compile with dsv4_ops.passes.backend(...), or wrap the backend by with_marks: both clone it. Or do not share the region."
    )


def marks_digest(gm: torch.fx.GraphModule) -> str:
    """Identity of the lane marks of a program, equal in every process."""
    digest = hashlib.sha256()
    for path, module in fx_utils.modules(gm):
        for node in module.graph.nodes:
            digest.update(f"{path}{node.name}:{fx_utils.lane_mark(node)};".encode())
    return digest.hexdigest()


_digest: ContextVar[str | None] = ContextVar("dsv4_ops_marks_digest", default=None)


class BindLanes(LanePass):
    """The same binding as a post-grad pass, for engines that take Inductor passes but no backend.

    Reads both auto_functionalized forms. ``uuid()`` contains the marks of the compile at hand, which the engine's backend must have been
    wrapped for (:func:`with_marks`, which also clones bodies that two lanes share). Without, it is None, Inductor caches nothing
    rather than loading code that was bound to other lanes, and such bodies are refused.
    """

    files = (Path(workspace_ops.__file__), Path(lane_context.__file__))

    def __init__(self, unmarked: int | None = None) -> None:
        self.unmarked = unmarked
        self.last: BindReport | None = None
        """What the latest graph had bound."""

    def config(self) -> dict[str, Any]:
        return {"unmarked": self.unmarked, "marks": _digest.get()}

    def uuid(self) -> Any:
        return None if _digest.get() is None else super().uuid()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.last = bind_lanes(fx_utils.owner_of(graph), unmarked=self.unmarked, clone=False)


@contextlib.contextmanager
def _marks_of(gm: torch.fx.GraphModule) -> Iterator[None]:
    token = _digest.set(marks_digest(gm))
    try:
        yield
    finally:
        _digest.reset(token)


def with_marks(inner: str | Callable[..., Any]) -> Callable[..., Any]:
    """A backend that tells :class:`BindLanes` the marks of each program that ``inner`` compiles, and clones the bodies that two lanes share.

    ``inner``: a backend, or the name of one that ``torch.compile`` knows. Raises PassError for a name that it does not know and for what
    cannot be called. What it compiles warns, as under ``backend()``, where an op that no one registered asks for the lane of a marked region.
    """
    if isinstance(inner, str):
        try:
            inner = torch._dynamo.lookup_backend(inner)
        except torch._dynamo.exc.InvalidBackend as error:
            raise PassError(f"with_marks: there is no backend {inner!r}; torch.compile knows {', '.join(torch._dynamo.list_backends())}.") from error
    if not callable(inner):
        raise PassError(f"with_marks: inner must be a backend or the name of one, got {inner!r}.")

    def compile_with_marks(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        _Binder(Regions(gm), None, clone=True, bind=False).run(gm)
        with _marks_of(gm):
            return watched(gm, inner(gm, example_inputs, **kwargs))

    return compile_with_marks
