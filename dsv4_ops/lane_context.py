"""In which lane an op takes its scratch: a context variable in eager code, marks on graph nodes while tracing.

==============================  =====================================================================================
``with use_workspace_lane(k)``  ops inside use lane k. Eager: a context variable of this thread (a new thread starts at
                                lane 0, an exception restores the lane before). Under ``torch.compile``: the traced nodes
                                are marked, and ``dsv4_ops.passes`` bakes the lane into each op that takes scratch
``resolve_lane(lane)``          what an op does with its ``int lane=-1`` when it runs: -1 is the ambient lane
==============================  =====================================================================================

A program whose marks nobody will read is warned about when it is traced, an op that asks for the ambient lane inside a marked region when it
runs: both would work in the scratch of the other side. The memory behind a lane is ``workspace.py``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback

from .errors import LaneError

__all__ = ["AMBIENT", "MAX_LANES", "current_lane", "current_ubatch", "resolve_lane", "use_workspace_lane", "use_workspace_ubatch"]

AMBIENT = -1
"""Value of an op's ``lane`` argument that means: the lane of ``use_workspace_lane`` when the op runs."""

MAX_LANES = 16

LANE_MARK = "dsv4_lane"
REGION_MARK = "dsv4_region"
"""Keys of ``node.meta["custom"]``. The region tells a mark that a nested function inherited from its first caller from one of its own."""

# (thread, value): where a new thread inherits its parent's context (free-threaded Python), it still starts at the default.
_lane: ContextVar[tuple[int, int]] = ContextVar("dsv4_ops_workspace_lane", default=(0, 0))
_ubatch: ContextVar[tuple[int, int]] = ContextVar("dsv4_ops_workspace_ubatch", default=(0, 0))
_regions = 0


def _next_region() -> int:
    """Called while Dynamo traces, as plain Python."""
    global _regions
    _regions += 1
    _warn_unless_bound()
    return _regions


_warned_programs: weakref.WeakSet[Any] = weakref.WeakSet()
_POST_GRAD_SLOTS = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")


def _warn_unless_bound() -> None:
    """Warn, once a program, when nothing will read the marks of the program being traced: its ops would run in the ambient lane."""
    try:
        translator = _current_translator()
        program, compiler = translator.output.root_tx.f_code, translator.output.compiler_fn
        while translator.parent is not None and translator.f_code.co_filename in (__file__, contextlib.__file__):
            translator = translator.parent
        place = translator.f_code.co_filename, translator.lineno or program.co_firstlineno
    except (ImportError, AttributeError):
        return  # not traced by Dynamo, or by one whose insides have changed: a test for each supported PyTorch would tell
    if program in _warned_programs or _reads_marks(compiler):
        return
    _warned_programs.add(program)
    warnings.warn_explicit(
        f"use_workspace_lane in {program.co_name}, compiled without a pass that binds lanes: every op inside runs in the ambient lane (0 unless entered "
        "outside), in the scratch of the other side. Compile with torch.compile(..., backend=dsv4_ops.passes.backend()); an engine that owns the "
        "backend runs dsv4_ops.passes.BindLanes in Inductor's post_grad_custom_post_pass, or enters use_workspace_lane around the compiled call.",
        UserWarning,
        *place,
    )


def _current_translator() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


def _reads_marks(compiler: Any) -> bool:
    """Whether this backend, one that it wraps, or a pass in Inductor's post-grad slots has ``handles_lanes`` set.

    The slots count unless the backend is one of PyTorch's own that does not run Inductor. One that nobody knows might.
    """
    config = sys.modules.get("torch._inductor.config")
    slots = [getattr(config, name, None) for name in _POST_GRAD_SLOTS]
    registry = getattr(sys.modules.get("torch._dynamo.backends.registry"), "_COMPILER_FNS", {})
    without_slots = {id(function) for name, function in registry.items() if name != "inductor"}
    runs_slots = True
    seen: set[int] = set()
    while compiler is not None and id(compiler) not in seen:
        seen.add(id(compiler))
        if getattr(compiler, "handles_lanes", False):
            return True
        runs_slots = runs_slots and id(compiler) not in without_slots
        keywords = getattr(compiler, "kwargs", None)
        for options in (getattr(compiler, "config", None), keywords.get("options") if isinstance(keywords, dict) else None):
            slots += [options.get(name) for name in _POST_GRAD_SLOTS] if isinstance(options, dict) else []
        inner = ("_torchdynamo_orig_backend", "compiler_fn", "__wrapped__", "func")  # Dynamo's, torch.compile's, functools'
        compiler = next((value for name in inner if (value := getattr(compiler, name, None)) is not None), None)
    return runs_slots and any(map(_handles_lanes, slots))


def _handles_lanes(slot: Any) -> bool:
    parts = slot if isinstance(slot, list | tuple) else getattr(slot, "passes", ())
    return bool(getattr(slot, "handles_lanes", False)) or any(map(_handles_lanes, parts))


# What torch.compiler.assume_constant_result sets; calling that would import all of torch._dynamo with this package.
_next_region._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _constant_lane(lane: int) -> int:
    """The lane as a Python constant: comparing specializes an int that Dynamo made symbolic."""
    for constant in range(MAX_LANES):
        if lane == constant:
            return constant
    raise LaneError(f"use_workspace_lane: lane must be between 0 and {MAX_LANES - 1}, got {lane}.")


def _read(variable: ContextVar[tuple[int, int]]) -> int:
    thread, value = variable.get()
    return value if thread == threading.get_ident() else 0


@contextlib.contextmanager
def use_workspace_lane(lane: int) -> Iterator[None]:
    """Run what is inside in workspace lane ``lane``. Nests; works in eager code and in compiled code.

    Compiled code needs a pass that binds the marks: ``torch.compile(step, backend=dsv4_ops.passes.backend())``. Without one (any other
    backend) every op inside runs in the ambient lane, and tracing warns once a program. A backend of your own that binds
    (``dsv4_ops.passes.bind_lanes``) says so with an attribute ``handles_lanes = True``. With one, an op of yours that takes the current lane must
    be known to ``dsv4_ops.passes.register_workspace_op``; it runs in the ambient lane otherwise and warns when it asks.
    Entered *around* a compiled call it sets the ambient lane and needs no pass.

    Raises LaneError for a lane outside ``[0, MAX_LANES)``.
    """
    if torch.compiler.is_compiling():
        with torch.fx.traceback.annotate({LANE_MARK: _constant_lane(lane), REGION_MARK: _next_region()}):
            yield
        return
    if isinstance(lane, bool) or not isinstance(lane, int) or not 0 <= lane < MAX_LANES:
        raise LaneError(f"use_workspace_lane: lane must be an integer between 0 and {MAX_LANES - 1}, got {lane!r}.")
    token = _lane.set((threading.get_ident(), lane))
    try:
        yield
    finally:
        _lane.reset(token)


@contextlib.contextmanager
def use_workspace_ubatch(ubatch: int) -> Iterator[None]:
    """Run what is inside as micro-batch ``ubatch``: always ambient, so it is set outside compiled code.

    Raises LaneError for a negative ``ubatch``, and while tracing.
    """
    if torch.compiler.is_compiling():
        raise LaneError("use_workspace_ubatch: a micro-batch is never baked into compiled code. Enter it around the compiled call.")
    if isinstance(ubatch, bool) or not isinstance(ubatch, int) or ubatch < 0:
        raise LaneError(f"use_workspace_ubatch: ubatch must be an integer of at least 0, got {ubatch!r}.")
    token = _ubatch.set((threading.get_ident(), ubatch))
    try:
        yield
    finally:
        _ubatch.reset(token)


def current_lane() -> int:
    """The ambient lane of this thread (0 when none was entered). Not available while tracing: there, lanes are marks.

    Raises LaneError while tracing.
    """
    if torch.compiler.is_compiling():
        raise LaneError("current_lane: lanes are marks on graph nodes while tracing and have no ambient value. Leave the op's lane at -1.")
    lane = _read(_lane)
    unregistered = _unregistered.get()
    if unregistered:
        _warn_unregistered(unregistered, lane)
    return lane


@dataclass(frozen=True)
class Unregistered:
    """Ops in the marked regions of a program that no one registered."""

    lanes: Mapping[Any, frozenset[int]]
    """The lanes of the regions of each."""
    are_all_that_ask: bool
    """No op that is known to take scratch was left ambient."""


_unregistered: ContextVar[Unregistered | None] = ContextVar("dsv4_ops_unregistered_ops", default=None)
"""Those of the bound program that is running."""
_warned_ops: set[Any] = set()


def _warn_unregistered(unregistered: Unregistered, lane: int) -> None:
    suspects = {op for op, lanes in unregistered.lanes.items() if lanes - {lane}} - _warned_ops
    frame, called = sys._getframe(2) if suspects else None, []
    while frame is not None:
        if frame.f_code is torch._ops.OpOverload.__call__.__code__:
            called.append(frame.f_locals.get("self"))
        frame = frame.f_back
    if not called and suspects and unregistered.are_all_that_ask:  # called by C++ (Inductor's cpp_wrapper): no frame says which op it was
        _warn_lost(sorted(suspects, key=str), unregistered, lane)
    for op in called:
        if op in suspects - _warned_ops:
            _warn_lost([op], unregistered, lane)


def _warn_lost(ops: Sequence[Any], unregistered: Unregistered, lane: int) -> None:
    _warned_ops.update(ops)
    wanted = ", ".join(map(str, sorted(frozenset().union(*(unregistered.lanes[op] for op in ops)))))
    names, calls = ", ".join(map(str, ops)), ", ".join(f"dsv4_ops.passes.register_workspace_op(torch.ops.{op})" for op in ops)
    warnings.warn(
        f"{names if len(ops) == 1 else 'one of ' + names} asks for the current workspace lane and runs in lane {lane}, though the program calls it inside "
        f"use_workspace_lane({wanted}): it has no lane bound, because it is not known to take scratch. Call {calls} before compiling.",
        UserWarning,
        stacklevel=4,
    )


def current_ubatch() -> int:
    """The ambient micro-batch of this thread (0 when none was entered)."""
    return _read(_ubatch)


def resolve_lane(lane: int = AMBIENT) -> int:
    """The lane an op uses for its argument ``lane``: itself, or the ambient one for -1. For op implementations, at run time."""
    if lane == AMBIENT:
        return current_lane()
    if not 0 <= lane < MAX_LANES:
        raise LaneError(f"lane must be -1 (ambient) or between 0 and {MAX_LANES - 1}, got {lane}.")
    return lane
