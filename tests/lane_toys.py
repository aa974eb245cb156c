"""Toy ops that log the lane they really used, and programs to run them in. For the tests of the passes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4_ops import workspace
from dsv4_ops.passes import register_workspace_op

NAMESPACE = "dsv4_lane_toys"
_library = torch.library.Library(NAMESPACE, "DEF")

log: list[tuple[int, int]] = []
"""(tag of the call, lane it used), in the order of running."""


def _op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _scan(x: torch.Tensor, tag: int, lane: int = -1) -> torch.Tensor:
    log.append((tag, workspace.resolve_lane(lane)))
    return x * 2 + tag


def _vendor(x: torch.Tensor, tag: int) -> torch.Tensor:
    log.append((tag, workspace.current_lane()))
    return x * 3 + tag


def _fill(x: torch.Tensor, out: torch.Tensor, tag: int, lane: int = -1) -> None:
    log.append((tag, workspace.resolve_lane(lane)))
    out.copy_(x * 2 + tag)


def _with_scratch(x: torch.Tensor, workspace: torch.Tensor, lane: int = -1) -> torch.Tensor:
    workspace.fill_(lane)
    return x + 1


scan = _op("scan(Tensor x, int tag, *, int lane=-1) -> Tensor", _scan, lambda x, tag, lane=-1: torch.empty_like(x))
vendor = _op("vendor(Tensor x, int tag) -> Tensor", _vendor, lambda x, tag: torch.empty_like(x))
fill = _op("fill(Tensor x, Tensor(a!) out, int tag, *, int lane=-1) -> ()", _fill, lambda x, out, tag, lane=-1: None)
with_scratch = _op("with_scratch(Tensor x, Tensor(a!) workspace, *, int lane=-1) -> Tensor", _with_scratch, lambda x, workspace, lane=-1: torch.empty_like(x))

SHADOW = register_workspace_op(vendor)
for op in (scan, fill, with_scratch):
    register_workspace_op(op)


@contextlib.contextmanager
def logged() -> Iterator[list[tuple[int, int]]]:
    """The lanes used inside."""
    log.clear()
    entries: list[tuple[int, int]] = []
    yield entries
    entries += log


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


def random_program(seed: int, regions: bool = True) -> str:
    """Source of a function ``step(x)`` with target and draft branches: nested lanes, cond, loops, shared nested regions, exceptions."""
    draw = random.Random(seed)
    tags = iter(range(1, 10_000))
    lines: list[str] = []

    def emit(depth: int, text: str) -> None:
        lines.append("    " * depth + text)

    def block(depth: int, level: int, names: list[str]) -> None:
        for _ in range(draw.randint(1, 3)):
            kind = draw.choice(["scan", "scan", "vendor", "pointwise", "lane", "cond", "loop", "region", "try"] if level < 3 else ["scan", "vendor", "pointwise"])
            if kind in ("scan", "vendor"):
                emit(depth, f"x = toys.{kind}(x, {next(tags)})")
            elif kind == "pointwise":
                emit(depth, "x = x.tanh() + 0.5")
            elif kind == "lane":
                emit(depth, f"with use_workspace_lane({draw.randrange(3)}):")
                block(depth + 1, level + 1, names)
            elif kind == "loop":
                emit(depth, f"for _ in range({draw.randint(1, 2)}):")
                block(depth + 1, level + 1, names)
            elif kind == "try":
                emit(depth, "try:")
                emit(depth + 1, f"with use_workspace_lane({draw.randrange(3)}):")
                emit(depth + 2, f"x = toys.scan(x, {next(tags)})")
                emit(depth + 2, "raise KeyError")
                emit(depth, "except KeyError:")
                emit(depth + 1, f"x = toys.scan(x, {next(tags)})")
            elif kind == "cond":
                a, b = next(tags), next(tags)
                emit(depth, f"x = torch.cond(x.sum() > {draw.choice([-1e9, 1e9])}, lambda x: toys.scan(x, {a}), lambda x: toys.scan(x, {b}) + 1, (x,))")
            elif names:
                emit(depth, f"x = {draw.choice(names)}(x)")

    names: list[str] = []
    for index in range(draw.randint(1, 2) if regions else 0):
        emit(0, "@torch.compiler.nested_compile_region")
        emit(0, f"def region{index}(x):")
        emit(1, "x = x + 1")  # a region that returns its input is refused by PyTorch
        block(1, 2, list(names))
        emit(1, "return x")
        names.append(f"region{index}")
    emit(0, "def step(x):")
    block(1, 0, names)
    emit(1, "t = x")
    emit(1, "with use_workspace_lane(1):")
    block(2, 1, names)
    emit(1, f"return t + x + toys.scan(t, {next(tags)})")
    return "\n".join(lines)


def load(source: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function ``step`` of ``source``."""
    import sys

    scope: dict[str, Any] = {"torch": torch, "toys": sys.modules[__name__], "use_workspace_lane": workspace.use_workspace_lane}
    exec(compile(source, "<random program>", "exec"), scope)
    step: Callable[[torch.Tensor], torch.Tensor] = scope["step"]
    return step
