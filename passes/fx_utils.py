"""What the passes need of FX graphs: op calls in every form, lane marks, bodies of higher-order ops.

Everything here that PyTorch does not document is used nowhere else: ``node.meta["custom"]`` (written by
``torch.fx.traceback.annotate``) and ``node.meta["eager_input_vals"]``, the two auto_functionalized forms, and the arguments of
``invoke_subgraph``. Tried with torch 2.11, 2.13 and 2.14.

========================  ==========================================================================================
form                      a call of ``toy::scan(Tensor x, Tensor(a!) out, *, int lane=-1) -> ()`` in the graph
========================  ==========================================================================================
direct                    ``torch.ops.toy.scan.default(x, out, lane = 1)`` (or the overload packet, in Dynamo's graph)
auto_functionalized       ``auto_functionalized(torch.ops.toy.scan.default, x = x, out = out, lane = 1)``
auto_functionalized_v2    ``auto_functionalized_v2(torch.ops.toy.scan.default, x = x, lane = 1, _out_base_index = 0, ...)``
========================  ==========================================================================================
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ..errors import PassError
from ..lane_context import LANE_MARK, REGION_MARK

__all__ = ["Body", "OpCall", "as_op_call", "bodies", "clone_body", "find_op_nodes", "graph_text", "lane_mark", "region_mark", "set_lane_mark", "source_of", "storage_of"]

_FUNCTIONALIZED = ("auto_functionalized", "auto_functionalized_v2")
EAGER_VALUES = "eager_input_vals"


@dataclass(frozen=True)
class OpCall:
    """One call of a registered op, whatever form it has in the graph."""

    node: torch.fx.Node
    op: OpOverload
    form: str
    """"direct", "auto_functionalized" or "auto_functionalized_v2"."""

    def argument(self, name: str) -> Any:
        """Value of the argument called ``name`` (its default when the call does not give it)."""
        if name in self.node.kwargs:
            return self.node.kwargs[name]
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if self.form == "direct" and not argument.kwarg_only and position < len(self.node.args):
                    return self.node.args[position]
                return argument.default_value
        raise KeyError(f"{self.op} has no argument {name}")

    def set_argument(self, name: str, value: Any) -> None:
        """Replace it, where it stands."""
        if self.form == "direct" and name not in self.node.kwargs:
            for position, argument in enumerate(self.op._schema.arguments):
                if argument.name == name and not argument.kwarg_only and position < len(self.node.args):
                    self.node.update_arg(position, value)
                    self._eager_value(position, value)
                    return
        self.node.update_kwarg(name, value)
        self._eager_value(name, value)

    def set_op(self, op: OpOverload) -> None:
        """Call ``op`` instead, in the same form."""
        if self.form == "direct":
            self.node.target = op
        else:
            self.node.update_arg(0, op)
            self._eager_value(0, op)

    def _eager_value(self, where: int | str, value: Any) -> None:
        """Inductor keeps the arguments of eager mode beside the node's own, and wants as many of them."""
        if EAGER_VALUES in self.node.meta:
            args, kwargs = self.node.meta[EAGER_VALUES]
            if isinstance(where, str):
                kwargs = {**kwargs, where: value}
            elif where < len(args):
                args = (*args[:where], value, *args[where + 1 :])
            self.node.meta[EAGER_VALUES] = (args, kwargs)


def as_op_call(node: torch.fx.Node) -> OpCall | None:
    """The op that ``node`` calls, or None when it calls something else."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, OpOverload):
        return OpCall(node, node.target, "direct")
    if isinstance(node.target, OpOverloadPacket):
        overload = _overload_of(node.target, node)
        return None if overload is None else OpCall(node, overload, "direct")
    if isinstance(node.target, HigherOrderOperator) and node.target.name() in _FUNCTIONALIZED and node.args and isinstance(node.args[0], OpOverload):
        return OpCall(node, node.args[0], node.target.name())
    return None


def _overload_of(packet: OpOverloadPacket, node: torch.fx.Node) -> OpOverload | None:
    """The overload that takes the arguments of this call."""
    for name in sorted(packet.overloads(), key=lambda name: name != "default"):
        overload: OpOverload = getattr(packet, name)
        arguments = overload._schema.arguments
        positional = [a.name for a in arguments if not a.kwarg_only]
        given = {*positional[: len(node.args)], *node.kwargs}
        required = {a.name for a in arguments if not a.has_default_value()}
        if len(node.args) <= len(positional) and required <= given <= {a.name for a in arguments}:
            return overload
    return None


def find_op_nodes(op: OpOverload | OpOverloadPacket, graph: torch.fx.Graph) -> Iterator[OpCall]:
    """Calls of ``op`` (any overload of a packet) in ``graph``, through both functionalized forms, in graph order."""
    wanted = {op} if isinstance(op, OpOverload) else {getattr(op, name) for name in op.overloads()}
    for node in graph.nodes:
        call = as_op_call(node)
        if call is not None and call.op in wanted:
            yield call


@dataclass(frozen=True)
class Body:
    """One graph module that a higher-order op calls."""

    call: torch.fx.Node
    attribute: torch.fx.Node
    """The ``get_attr`` node that gives the module to the call."""
    module: torch.fx.GraphModule


def owner_of(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """The module that runs ``graph``."""
    if graph.owning_module is None:
        raise PassError("this graph belongs to no module, so the bodies that it calls cannot be found. Run the pass on the graph of a GraphModule.")
    return graph.owning_module


def bodies(graph: torch.fx.Graph) -> Iterator[Body]:
    """Graph modules that the higher-order ops of ``graph`` run, in order of their calls."""
    owner = graph.owning_module
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator) and owner is not None:
            for argument in node.all_input_nodes:
                if argument.op == "get_attr":
                    module = _attribute(owner, str(argument.target))
                    if isinstance(module, torch.fx.GraphModule):
                        yield Body(node, argument, module)


def _attribute(owner: torch.nn.Module, path: str) -> Any:
    value: Any = owner
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def clone_body(body: Body, module: torch.fx.GraphModule, suffix: str) -> None:
    """Make ``body.call`` run ``module`` instead, by a new attribute, and for ``invoke_subgraph`` a new identifier.

    ``invoke_subgraph`` caches what it traced by identifier: with the old one the clone would run the original's code.
    """
    graph, owner = body.call.graph, owner_of(body.call.graph)
    name = f"{str(body.attribute.target).replace('.', '_')}_{suffix}"
    while getattr(owner, name, module) is not module:
        name += "_"
    owner.add_module(name, module)
    with graph.inserting_before(body.call):
        attribute = graph.get_attr(name)
    attribute.meta = copy.copy(body.attribute.meta)
    body.call.replace_input_with(body.attribute, attribute)
    if body.call.target is torch.ops.higher_order.invoke_subgraph:
        body.call.update_arg(1, f"{body.call.args[1]}_{suffix}")
    if not body.attribute.users:
        graph.erase_node(body.attribute)


def _custom(node: torch.fx.Node) -> dict[str, Any]:
    custom = node.meta.get("custom")
    return custom if isinstance(custom, dict) else {}


def lane_mark(node: torch.fx.Node) -> int | None:
    """The lane that ``use_workspace_lane`` left on this node."""
    lane = _custom(node).get(LANE_MARK)
    return lane if isinstance(lane, int) else None


def region_mark(node: torch.fx.Node) -> int | None:
    """Which entry of ``use_workspace_lane`` marked this node."""
    region = _custom(node).get(REGION_MARK)
    return region if isinstance(region, int) else None


def set_lane_mark(node: torch.fx.Node, lane: int | None) -> None:
    """Replace the mark (None: remove it). Both dictionaries are copied: a body's placeholder shares ``meta`` with the caller's node."""
    custom = {key: value for key, value in _custom(node).items() if key not in (LANE_MARK, REGION_MARK)}
    if lane is not None:
        custom |= {LANE_MARK: lane} | ({REGION_MARK: region_mark(node)} if region_mark(node) is not None else {})
    node.meta = {**node.meta, "custom": custom}


def source_of(node: torch.fx.Node) -> str:
    """Where the user's code called this: ``file:line, in function``, or "unknown source"."""
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return "unknown source"
    file, line, *rest = lines[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{line.removeprefix('line ')}" + (f", {rest[0]}" if rest else "")


def storage_of(node: Any) -> int | None:
    """Identity of the storage of a node's (fake) tensor."""
    if not isinstance(node, torch.fx.Node):
        return None
    value = node.meta.get("example_value", node.meta.get("val"))
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def copy_module(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A second graph module with a graph of its own; nested modules are shared, nodes keep their metadata."""
    clone = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    clone.meta = copy.copy(module.meta)
    return clone


def modules(gm: torch.fx.GraphModule) -> Iterable[tuple[str, torch.fx.GraphModule]]:
    """``gm`` and every body reached from it, each once, with a readable path."""
    seen: set[int] = set()
    pending = [("", gm)]
    while pending:
        path, module = pending.pop(0)
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            pending += [(f"{path}{body.attribute.target}.", body.module) for body in bodies(module.graph)]


def graph_text(gm: torch.fx.GraphModule) -> str:
    """The program as stable text: each graph's code without blank lines, bodies after their callers."""
    parts = []
    for path, module in modules(gm):
        code = module.graph.python_code("self").src
        kept = [line.split(";  ")[0].rstrip() for line in code.splitlines() if line.strip()]
        parts.append("\n".join(([path.rstrip(".") + ":"] if path else []) + kept))
    return "\n".join(parts)
