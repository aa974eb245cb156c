"""Toy ops that take scratch, and the record of the lane that each call really used. For the tests of the passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4_ops import workspace
from dsv4_ops.passes import register_workspace_op

NAMESPACE = "dsv4_lane_toys"
_library = torch.library.Library(NAMESPACE, "DEF")

MANAGER = workspace.WorkspaceManager("cpu", num_lanes=4, debug=True)
"""Where the toys get scratch. Its debug record holds tag and lane of every call, and refuses scratch of another lane."""


def _op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


@torch._dynamo.disable  # in a frame that fell back to eager, Dynamo would trace the kernels too
def _times(x: torch.Tensor, factor: int, tag: int, lane: int = workspace.AMBIENT) -> torch.Tensor:
    (scratch,) = MANAGER.get((x.shape, x.dtype), lane=lane, op=str(tag))
    torch.mul(x, factor, out=scratch)
    return scratch + tag


def _scan(x: torch.Tensor, tag: int, lane: int = -1) -> torch.Tensor:
    return _times(x, 2, tag, lane)


def _vendor(x: torch.Tensor, tag: int) -> torch.Tensor:
    return _times(x, 3, tag)


def _fill(x: torch.Tensor, out: torch.Tensor, tag: int, lane: int = -1) -> None:
    out.copy_(_times(x, 2, tag, lane))


def _vendor_fill(x: torch.Tensor, out: torch.Tensor, tag: int) -> None:
    out.copy_(_times(x, 3, tag))


def _with_scratch(x: torch.Tensor, workspace: torch.Tensor, lane: int = -1) -> torch.Tensor:
    workspace.fill_(lane)
    return x + 1


scan = _op("scan(Tensor x, int tag, *, int lane=-1) -> Tensor", _scan, lambda x, tag, lane=-1: torch.empty_like(x))
vendor = _op("vendor(Tensor x, int tag) -> Tensor", _vendor, lambda x, tag: torch.empty_like(x))
fill = _op("fill(Tensor x, Tensor(a!) out, int tag, *, int lane=-1) -> ()", _fill, lambda x, out, tag, lane=-1: None)
vendor_fill = _op("vendor_fill(Tensor x, Tensor(a!) out, int tag) -> ()", _vendor_fill, lambda x, out, tag: None)
with_scratch = _op("with_scratch(Tensor x, Tensor(a!) workspace, *, int lane=-1) -> Tensor", _with_scratch, lambda x, workspace, lane=-1: torch.empty_like(x))

torch.library.register_autograd(f"{NAMESPACE}::scan", lambda ctx, grad: (grad * 2, None), lib=_library)

SHADOW = register_workspace_op(vendor)
for op in (scan, fill, vendor_fill, with_scratch):
    register_workspace_op(op)


@contextlib.contextmanager
def logged() -> Iterator[list[tuple[int, int]]]:
    """(tag of the call, lane it used) of the calls inside, in the order of running."""
    MANAGER.uses.clear()
    entries: list[tuple[int, int]] = []
    yield entries
    entries += [(int(use.op), use.lane) for use in MANAGER.uses]


def lanes_of(function: Callable[..., Any], *args: Any) -> tuple[Any, list[tuple[int, int]]]:
    """Result, and (tag, lane) of every call, sorted: the compiler may reorder calls, never change their lane."""
    with logged() as entries:
        result = function(*args)
    return result, sorted(entries)


def capture(programs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """A backend that keeps Dynamo's graphs and runs them as they are."""

    def compile_nothing(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        programs.append(gm)
        return gm.forward

    compile_nothing.handles_lanes = True  # type: ignore[attr-defined]  # the tests bind what it keeps
    return compile_nothing


def dynamo_graph(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """Dynamo's graph of ``function``, nothing run."""
    programs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(function, backend=capture(programs), fullgraph=True)(*args)
    (gm,) = programs
    return gm
