"""Which ops take scratch from a workspace lane, this package's and others'.

An op with an argument ``int lane=-1`` can be bound directly. An op of another package that asks for scratch in the *current* lane has
no such argument: :func:`register_workspace_op` generates a shadow op of the same schema plus ``int lane``, which enters the lane and
calls the original, and the lane pass swaps the calls::

    before   y = torch.ops.vendor.scan.default(x)                              # marked with lane 1
    after    y = torch.ops.dsv4_ops_lanes.vendor_scan.default(x, lane = 1)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from .. import lane_context
from ..errors import PassError

__all__ = ["WorkspaceOp", "register_workspace_op", "workspace_op"]

NAMESPACE = "dsv4_ops_lanes"
SCRATCH_NAMES = ("workspace", "scratch")


@dataclass(frozen=True)
class WorkspaceOp:
    """How a lane is bound in one op."""

    op: OpOverload
    """Called by users."""
    bound: OpOverload
    """Takes ``lane``: the op itself, or its shadow."""
    scratch: tuple[str, ...]
    """Arguments that are scratch tensors of the caller."""


_registered: dict[OpOverload, WorkspaceOp] = {}
_libraries: list[Any] = []
_originals: dict[str, OpOverload] = {}
"""What each shadow calls, by the shadow's name: the newest op of that name, since a notebook's cell that is run again defines its ops again."""


def register_workspace_op(op: OpOverload | OpOverloadPacket, scratch: Sequence[str] = SCRATCH_NAMES) -> WorkspaceOp:
    """Declare that ``op`` takes scratch: from the current lane, or from its arguments named in ``scratch``. Idempotent.

    Raises PassError for an op that returns an alias of an argument (such an op cannot be functionalized) and for a packet with
    several overloads (name the overload), and for what is no op, as what ``torch.library.custom_op`` returns.
    """
    if not isinstance(op, OpOverload | OpOverloadPacket):
        raise PassError(f"register_workspace_op: op must be an op, as torch.ops.NAMESPACE.NAME, got {op!r}. An op of torch.library.custom_op is found there by its name.")
    overload = _single(op) if isinstance(op, OpOverloadPacket) else op
    if overload in _registered:
        return _registered[overload]
    names = tuple(a.name for a in overload._schema.arguments if a.name in scratch)
    entry = WorkspaceOp(overload, overload if has_lane(overload) else _shadow(overload), names)
    _registered[entry.op] = entry
    if entry.bound is not overload:
        _registered[entry.bound] = WorkspaceOp(entry.bound, entry.bound, names)
    return entry


def _single(packet: OpOverloadPacket) -> OpOverload:
    names = packet.overloads()
    if len(names) != 1:
        raise PassError(f"register_workspace_op: {packet} has overloads {', '.join(names)}. Register each by name, as {packet}.default.")
    overload: OpOverload = getattr(packet, names[0])
    return overload


def workspace_op(op: OpOverload) -> WorkspaceOp | None:
    """The entry of ``op``, or None when it takes no scratch. Ops of this package count when they have a ``lane``."""
    entry = _registered.get(op)
    if entry is None and op.namespace == "dsv4_ops" and has_lane(op):
        entry = register_workspace_op(op)
    return entry


def has_lane(op: OpOverload) -> bool:
    """Whether the schema has ``int lane=-1``."""
    return any(a.name == "lane" and isinstance(a.type, torch.IntType) and a.has_default_value() and a.default_value == lane_context.AMBIENT for a in op._schema.arguments)


def _shadow(op: OpOverload) -> OpOverload:
    schema = op._schema
    if any(r.alias_info is not None for r in schema.returns):
        raise PassError(f"register_workspace_op: {op} returns an alias of an argument, so it cannot be functionalized and bound. Wrap it in an op that returns fresh tensors or nothing.")
    if any(a.name == "lane" for a in schema.arguments):
        raise PassError(f"register_workspace_op: {op} has an argument lane, but not 'int lane=-1': declare it so, or rename it.")
    name = f"{op.namespace}_{schema.name.split('::')[1]}" + (f"_{schema.overload_name}" if schema.overload_name else "")
    while (known := _originals.get(name)) is not None and str(known._schema) != str(schema):
        name += "_again"
    _originals[name] = op
    if known is not None:
        return _registered[known].bound
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(schema_with_lane(str(schema), name), tags=tuple(op.tags))

    def kernel(*args: Any, lane: int = lane_context.AMBIENT, **kwargs: Any) -> Any:
        if lane == lane_context.AMBIENT:
            return _originals[name](*args, **kwargs)
        with lane_context.use_workspace_lane(lane):
            return _originals[name](*args, **kwargs)

    def fake(*args: Any, lane: int = lane_context.AMBIENT, **kwargs: Any) -> Any:
        return _originals[name](*args, **kwargs)

    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    if not schema.is_mutable:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", _refuse_gradient(op), lib=library)
    _libraries.append(library)  # an op lives as long as its library
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


def _refuse_gradient(op: OpOverload) -> Callable[..., Any]:
    """The formula of ``op`` is not the shadow's, and without any, autograd would return no gradient and go on."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        raise PassError(
            f"{op}: a gradient is asked through its call in a workspace lane, which runs as an op without one. Give {op} an argument 'int lane=-1' of its own "
            "(then it is bound as it is, with its formula), or call it under torch.no_grad()."
        )

    return backward


def schema_with_lane(schema: str, name: str) -> str:
    """``ns::f.over(Tensor x, *, bool y) -> Tensor`` as ``name(Tensor x, *, bool y, int lane=-1) -> Tensor``."""
    head, returns = schema.rsplit(" -> ", 1)
    arguments = head.split("(", 1)[1].removesuffix(")").strip()
    star = "" if re.search(r"(^|,)\s*\*\s*,", arguments) else "*, "
    return f"{name}({arguments + ', ' if arguments else ''}{star}int lane=-1) -> {returns}"
