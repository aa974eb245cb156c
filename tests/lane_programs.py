"""Random programs with target and draft branches, for the tests of the lane passes.

A program is a text, loaded twice: once with PyTorch's control flow, to be compiled, and once with plain Python in its place, as the
oracle (``torch.cond`` and ``while_loop`` called in eager mode compile themselves, and lose lanes that their bodies enter).
"""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint

from dsv4_ops.workspace import use_workspace_lane
from tests import lane_toys as toys

LANES = 3
ROWS = 3
"""Rows of the cache that programs write."""

FEATURES = ("scan", "vendor", "fill", "vendor_fill", "cond", "while_loop", "for", "try", "lane", "region", "module", "checkpoint", "graph_break", "training", "dynamic")


@dataclass(frozen=True)
class Program:
    seed: int
    source: str
    marks: dict[int, int | None]
    """Lane of each call by its tag (None: unmarked), where the text alone tells it: not in shared functions outside their own lanes."""
    features: frozenset[str]

    @property
    def training(self) -> bool:
        return "training" in self.features

    @property
    def dynamic(self) -> bool:
        return "dynamic" in self.features

    @property
    def fullgraph(self) -> bool:
        return "graph_break" not in self.features

    def load(self, plain: bool = False) -> Callable[..., Any]:
        """Its function ``step(x, cache)``; ``plain``: the oracle. Modules that it calls are ``step.__globals__["modules"]``."""
        name = f"<program {self.seed}>"
        scope: dict[str, Any] = {"torch": torch, "toys": toys, "use_workspace_lane": use_workspace_lane, "modules": [], **(PLAIN if plain else COMPILED)}
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        exec(compile(self.source, name, "exec"), scope)
        step: Callable[..., Any] = scope["step"]
        return step


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def _plain_cond(predicate: torch.Tensor, yes: Callable[..., Any], no: Callable[..., Any], operands: Any) -> Any:
    return (yes if predicate else no)(*operands)


def _plain_while(condition: Callable[..., Any], body: Callable[..., Any], carried: Any) -> Any:
    while condition(*carried):
        carried = body(*carried)
    return carried


COMPILED = {
    "cond": torch.cond,
    "while_loop": torch._higher_order_ops.while_loop,
    "checkpoint": _checkpoint,
    "graph_break": torch._dynamo.graph_break,
    "nested_region": torch.compiler.nested_compile_region,
}
PLAIN = {
    "cond": _plain_cond,
    "while_loop": _plain_while,
    "checkpoint": lambda function, *args: function(*args),
    "graph_break": lambda: None,
    "nested_region": lambda function: function,
}

SHARED = -2
"""In place of a lane: the caller's, which the text of a shared function does not tell."""


@dataclass
class _Writer:
    draw: random.Random
    training: bool
    lines: list[str] = field(default_factory=list)
    marks: dict[int, int | None] = field(default_factory=dict)
    features: set[str] = field(default_factory=set)
    regions: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    tag: int = 0
    names: int = 0

    def emit(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def call(self, lane: int | None) -> int:
        self.tag += 1
        if lane != SHARED:
            self.marks[self.tag] = lane
        return self.tag

    def name(self, what: str) -> str:
        self.names += 1
        return f"{what}{self.names}"

    def kinds(self, where: str, level: int) -> list[str]:
        kinds = ["scan", "scan", "pointwise"]
        if not self.training:
            kinds += ["vendor"] + (["fill", "vendor_fill"] if where in ("step", "loop") else [])
        if level < 3:
            kinds += ["lane", "lane", "checkpoint"]
            kinds += [] if self.training else ["cond", "while_loop"] if where != "body" else ["cond"]
            if where in ("step", "loop"):
                kinds += ["for", "try", *(["region", "region"] if self.regions else []), *(["module", "module"] if self.modules else [])]
            if where == "step" and level < 2 and not self.training:  # eager checkpoints recompute outside the lane
                kinds += ["graph_break"] if self.draw.random() < 0.4 else []
        return kinds

    def block(self, depth: int, level: int, v: str, lane: int | None, where: str) -> None:
        """Statements that compute ``v`` from ``v``; ``where``: "step", "loop" (no graph break) or "body" (of a higher-order op: nothing is written)."""
        for _ in range(self.draw.randint(1, 2)):
            self.statement(depth, level, v, lane, where)

    def statement(self, depth: int, level: int, v: str, lane: int | None, where: str) -> None:
        kind = self.draw.choice(self.kinds(where, level))
        if kind != "pointwise":
            self.features.add(kind)
        match kind:
            case "scan" | "vendor":
                self.emit(depth, f"{v} = toys.{kind}({v}, {self.call(lane)})")
            case "pointwise":
                self.emit(depth, f"{v} = {v}.tanh() + 0.5")
            case "fill" | "vendor_fill":  # read back through an op: Inductor miscompiles pointwise reads of what a custom op overwrote
                row = f"cache[{self.draw.randrange(ROWS)}]"
                self.emit(depth, f"toys.{kind}({v}, {row}, {self.call(lane)})")
                self.emit(depth, f"{v} = {v} + toys.scan({row}, {self.call(lane)})")
            case "lane":
                inner = self.draw.randrange(LANES)
                self.emit(depth, f"with use_workspace_lane({inner}):")
                self.block(depth + 1, level + 1, v, inner, where)
            case "for":
                self.emit(depth, f"for _ in range({self.draw.randint(1, 2)}):")
                self.block(depth + 1, level + 1, v, lane, "loop")
            case "try":
                inner = self.draw.randrange(LANES)
                self.emit(depth, "try:")
                self.emit(depth + 1, f"with use_workspace_lane({inner}):")
                self.emit(depth + 2, f"{v} = toys.scan({v}, {self.call(inner)})")
                self.emit(depth + 2, "raise KeyError")
                self.emit(depth, "except KeyError:")
                self.emit(depth + 1, f"{v} = toys.scan({v}, {self.call(lane)})")
            case "region":
                self.emit(depth, f"{v} = {self.draw.choice(self.regions)}({v})")
            case "module":
                self.emit(depth, f"{v} = {self.draw.choice(self.modules)}({v}, cache)")
            case "graph_break":
                self.emit(depth, "graph_break()")
            case "checkpoint":
                body = self.function(depth, level, lane, "v", "v + 1")
                self.emit(depth, f"{v} = checkpoint({body}, {v})")
            case "cond":
                yes, no = (self.function(depth, level, lane, "v", f"v + {i}.0") for i in (1, 2))
                self.emit(depth, f"{v} = cond({v}.sum() {self.draw.choice('<>')} {self.draw.choice([0.0, 3.0, 30.0])}, {yes}, {no}, ({v},))")
            case "while_loop":
                body = self.function(depth, level, lane, "n, v", "n + 1, v + 1")
                self.emit(depth, f"_, {v} = while_loop(lambda n, v: n < {self.draw.randint(1, 2)}, {body}, (torch.zeros((), dtype=torch.int64), {v}))")

    def function(self, depth: int, level: int, lane: int | None, parameters: str, returned: str) -> str:
        name = self.name("body")
        self.emit(depth, f"def {name}({parameters}):")
        self.emit(depth + 1, f"v = toys.scan(v, {self.call(lane)})")
        self.block(depth + 1, max(level + 1, 2), "v", lane, "body")
        self.emit(depth + 1, f"return {returned}")
        return name

    def shared(self) -> None:
        """Functions that target and draft both call."""
        for _ in range(0 if self.training else self.draw.randint(0, 2)):
            name = self.name("region")
            self.emit(0, "@nested_region")
            self.emit(0, f"def {name}(v):")
            self.emit(1, "v = v + 1")  # a region that returns its input is refused by PyTorch
            self.block(1, 2, "v", SHARED, "body")
            if self.regions and self.draw.random() < 0.5:
                self.emit(1, f"v = {self.regions.pop()}(v)")  # there only: PyTorch fails on one that is called inside another region, then outside
            self.emit(1, "return v")
            self.regions.append(name)
        for _ in range(self.draw.randint(0, 1)):
            name = self.name("module")
            self.emit(0, f"class {name.title()}(torch.nn.Module):")
            self.emit(1, "def __init__(self):")
            self.emit(2, "super().__init__()")
            self.emit(2, "self.weight = torch.nn.Parameter(torch.tensor(0.75))")
            self.emit(1, "def forward(self, v, cache):")
            self.emit(2, "v = v * self.weight")
            self.block(2, 1, "v", SHARED, "loop")
            self.emit(2, f"return toys.scan(v, {self.call(SHARED)})")
            self.emit(0, f"{name} = {name.title()}()")
            self.emit(0, f"modules.append({name})")
            self.modules.append(name)

    def step(self) -> None:
        self.shared()
        self.emit(0, "def step(x, cache):")
        self.emit(1, "t, d = x + 1, x + 2")
        for _ in range(self.draw.randint(1, 2)):  # independent branches, so that the compiler may interleave them
            self.block(1, 0, "t", None, "step")
            lane = self.draw.choice([1, 1, 1, 0, 2])
            self.emit(1, f"with use_workspace_lane({lane}):")
            self.emit(2, f"d = toys.scan(d, {self.call(lane)})")
            self.block(2, 1, "d", lane, "step")
            both = self.regions[-1:] + self.modules
            for depth, v in ((2, "d"), (1, "t")):
                for shared in both:
                    self.emit(depth, f"{v} = {shared}({v}{', cache' if shared in self.modules else ''})")
                    self.features.add(shared.rstrip("0123456789"))
        self.emit(1, f"return t.tanh() + toys.scan(d, {self.call(None)}), d")


def program(seed: int) -> Program:
    """The program of ``seed``: 1 in 6 is trained (backward is run too), 1 in 8 compiled for dynamic shapes."""
    draw = random.Random(seed)
    writer = _Writer(draw, training=seed % 6 == 5)
    writer.step()
    writer.features |= ({"training"} if writer.training else set()) | ({"dynamic"} if seed % 8 == 3 else set())
    return Program(seed, "\n".join(writer.lines) + "\n", writer.marks, frozenset(writer.features))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither the warnings nor the logs of programs that are compiled wrongly on purpose."""
    import logging
    import warnings

    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    print(program(int(sys.argv[1])).source)
