"""The steps of an engine as CUDA graphs, captured so that no replay reads or writes what is not its own.

::

    pool = GraphPool("cuda")
    target = pool.step("target", run_target, {"ids": StepInput(torch.int64), "slots": StepInput(torch.int64, pad=-1)}, sizes=(1, 2, 4, 8))
    draft = pool.follow(target, "draft", run_draft, lane=1)     # run_draft(inputs, outputs): those of target, where they lie
    pool.capture()
    outputs = target(ids, slots)              # any number of rows up to 8, on the device or the host
    draft(outputs)                            # refused once target has run again
    staged = target.stage(5)                  # or, with less work for the host: memory of the step, pinned beside a GPU, to write inputs to
    staged.tensors[0][:5] = ids
    outputs = staged.run()                    # one copy and one replay

================  ==================================================================================================================
inputs            copied into static buffers; the rows behind those given are filled with ``pad``, in every call. What the host makes
                  for every call is written into memory of the step (``stage``) and crosses in one copy. A step that follows another
                  (``follow``) has no inputs of its own: it reads the other's inputs and outputs in place
outputs           copied by the graph into buffers outside the pool, one set a step for all its sizes. They stay as they are while
                  other steps replay, and are the step's again at its next call: :meth:`StepOutputs.read` then raises
scratch           of the step's lane and the pool's micro-batch: sized by the warm-up, then locked; a graph whose scratch has moved
                  since is captured again, never replayed
memory            one pool for all graphs: larger sizes first, so that smaller ones fit into the same memory. Nothing that a
                  step computes on its way is kept; what still holds memory after a capture is in the report
order             graphs of one pool share its memory and run one after another, on whatever streams they are called. Steps that may
                  overlap belong to two pools: these share neither memory, nor stream, nor (with two micro-batches) scratch
================  ==================================================================================================================

A step's function takes the static buffers in the order of ``inputs`` and returns tensors (or tuples, lists, dicts of them; None is
allowed). It reads nothing on the host, runs the same kernels in every call, and rows of padding write nothing: warm-up and capture run
it on padding alone. Tensors that it closes over keep their place in memory. Without graphs (on a CPU, or ``graphs=False``) the
function is called at every step, on the same buffers and under the same rules.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree

from . import _checks
from ._step_inputs import InputBlock, StagedInputs, Staging, StepInput
from .dflash import round_to_capture_size
from .errors import ArgumentDeviceError, ArgumentDtypeError, ArgumentError, ArgumentShapeError, Dsv4OpsError, GraphError, StaleOutputError
from .workspace import (
    CapturedGraphs,
    SlotReport,
    WorkspaceManager,
    current_ubatch,
    use_workspace_lane,
    use_workspace_ubatch,
    workspace_manager,
)

__all__ = ["CudaRecorder", "FollowingStep", "GraphPool", "GraphReport", "GraphStep", "Recorder", "StagedInputs", "StepInput", "StepOutputs", "StepReport"]

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """How graphs are made. ``CudaRecorder`` is the one for GPUs; tests put another in its place."""

    def warming(self) -> AbstractContextManager[None]:
        """Where a function runs before it is captured: its own memory must not come from the pool."""

    def new_graph(self) -> Any:
        """An empty graph, with ``replay()``."""

    def recording(self, graph: Any) -> AbstractContextManager[None]:
        """What runs inside is captured into ``graph``."""

    def memory(self) -> tuple[int, int]:
        """Bytes that the pool holds, and those of them that something outside a replay still uses."""


class CudaRecorder:
    """CUDA graphs in one memory pool, captured on one stream.

    The pool object keeps the memory pool alive between captures: dropping every graph and capturing again works. Warm-up runs on the
    capture stream, because libraries (cuBLAS) keep a workspace for each stream, which must not come from the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool, self.stream = torch.cuda.MemPool(), torch.cuda.Stream()

    @contextlib.contextmanager
    def warming(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                yield
            current.wait_stream(self.stream)

    def new_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # The outer stream scope restores the stream when a broken capture makes the inner one fail to. Other threads may allocate
        # meanwhile. A collection of garbage could destroy another graph, or free memory, in the middle.
        scope = torch.cuda.graph(graph, pool=self.pool.id, stream=self.stream, capture_error_mode="thread_local")  # type: ignore[arg-type]
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)), _no_collection(), scope:
            yield

    def memory(self) -> tuple[int, int]:
        segments = self.pool.snapshot(include_traces=False)
        return sum(s["total_size"] for s in segments), sum(s["allocated_size"] for s in segments)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_one_capture = threading.RLock()
"""CUDA allows one capture at a time in a process, as PyTorch's allocator sees it."""


class StepOutputs:
    """What one call of a step left. Valid until the same step is called again."""

    def __init__(self, step: GraphStep, size: int, rows: int, value: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self.size, self.rows = size, rows
        """The capture size that ran, and the rows of it that were given; those behind are padding."""
        self._step, self._writes, self._call, self._value, self._inputs = step, step._writes, step.calls, value, inputs

    @property
    def is_stale(self) -> bool:
        return self._writes != self._step._writes

    def read(self) -> Any:
        """The outputs, as the function returned them, in the step's buffers. StaleOutputError when the step has run since.

        Use them (or queue their use on the stream of the call) before the next call of the step; :meth:`copy` what must live longer.
        """
        self._check()
        return self._value

    def copy(self) -> Any:
        """The outputs in memory of their own."""
        self._check()
        return _pytree.tree_map_only(torch.Tensor, torch.clone, self._value)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The padded inputs of the call on the device, for whoever needs them next. (None of a step that follows another.)"""
        self._check()
        return self._inputs

    def _check(self) -> None:
        if self.is_stale:
            later = self._step.calls - self._call
            event = f"has run {later} more time(s)" if later else "was warmed up, or failed in a call,"
            raise StaleOutputError(
                f"outputs of step {self._step.name!r}, call {self._call}: the step {event} since and has written over them. Read them before its "
                "next call, or keep a copy() of them."
            )


class GraphStep:
    """One function at several sizes. Made by :meth:`GraphPool.step`."""

    def __init__(self, pool: GraphPool, name: str, function: Callable[..., Any], inputs: Mapping[str, StepInput], sizes: Sequence[int], lane: int, max_size: int) -> None:
        self.pool, self.name, self.function, self.lane = pool, name, function, lane
        self.specs, self.sizes, self.max_size = dict(inputs), tuple(sizes), max_size
        self.calls = 0
        self._writes = 0
        """How often the buffers have been written over: outputs of before are stale."""
        self.captures: dict[int, int] = {}
        """Size -> bytes by which its capture made the pool grow."""
        self.recaptures = 0
        """Captures that were repeated because scratch had moved."""
        self._graphs = CapturedGraphs(pool.manager)
        self._block = self._new_block(self.sizes[-1])
        self._parts = {size: self._block.part(size) for size in self.sizes}
        self._outputs: list[torch.Tensor | None] = []
        self._tree: Any = None
        self._views: dict[int, Any] = {}
        self._streams: set[tuple[torch.cuda.Stream, int]] = set()
        self._followers: list[FollowingStep] = []

    def __call__(self, *inputs: torch.Tensor) -> StepOutputs:
        """Run the step on ``inputs`` (on its device or the CPU), in the order of its specification.

        Tensors on the CPU are copied one by one without waiting: pinned ones must not change before the step has run. Inputs that the host
        makes anew for every call are better written where :meth:`stage` says. Raises ArgumentError and its kinds for inputs that do not fit,
        GraphError when it cannot run here (not captured, wrong micro-batch).
        """
        rows = self._rows(inputs)
        size = round_to_capture_size(rows, self.sizes)
        with self.pool._mutex:
            graph = self._begin(size)
            if size > self.sizes[-1]:
                return self._finish(size, rows, graph, tuple(t.to(self.pool.device) for t in inputs))
            self._fill(size, inputs)
            return self._finish(size, rows, graph, self._inputs(size))

    def stage(self, rows: int) -> StagedInputs:
        """Memory on the host for the inputs of the next call, of ``rows`` units: padding, to be written over. Then ``run()`` it.

        One copy takes all of it to the device, and nothing is checked on the way but the order of calls. Waits until the copy of the
        last call is over. Raises ArgumentError for more rows than the step takes.
        """
        _checks.integer(f"step {self.name!r}", "rows", rows, 0, self.max_size)
        with self.pool._mutex:
            return self._staging.begin(round_to_capture_size(rows, self.sizes), rows)

    def eager(self, *inputs: torch.Tensor) -> Any:
        """The function on copies of ``inputs`` padded as a call pads them, without a graph; the outputs are the caller's own.

        What a graph is compared with. Runs in the step's lane, on the current stream.
        """
        rows = self._rows(inputs)
        with self.pool._mutex:
            self.pool._begin_call(self)
            padded = self._new_block(round_to_capture_size(rows, self.sizes)).whole
            for mine, given, spec in zip(padded, inputs, self.specs.values(), strict=True):
                (mine[: given.shape[0]] if spec.rows else mine).copy_(given)
            return self._call(tuple(padded))

    def reset(self) -> None:
        """Drop the graphs (:meth:`GraphPool.capture` makes new ones) and their hold on scratch. Waits for the device.

        So do the steps that follow this one: their graphs hold the addresses of its outputs.
        """
        with self.pool._mutex:
            for follower in self._followers:
                follower.reset()
            if self.pool.device.type == "cuda":
                torch.cuda.synchronize(self.pool.device)
            self._graphs.clear()
            self.captures.clear()

    def report(self) -> StepReport:
        def nbytes(tensors: Sequence[torch.Tensor | None]) -> int:
            return sum(t.numel() * t.element_size() for t in tensors if t is not None)

        return StepReport(self.name, self.lane, self.sizes, nbytes(self._block.whole), nbytes(self._outputs), dict(self.captures), self.recaptures, self.calls)

    def __repr__(self) -> str:
        return f"GraphStep({self.name!r}, sizes {list(self.sizes)}, lane {self.lane}, {len(self._graphs)} graphs)"

    # Inputs

    def _rows(self, inputs: Sequence[torch.Tensor]) -> int:
        """The number of rows (units of size) that the inputs hold, after checking them."""
        where = f"step {self.name!r}"
        if len(inputs) != len(self.specs):
            raise ArgumentError(where, "inputs", f"{len(self.specs)} tensors ({', '.join(self.specs)})", len(inputs))
        rows, first = self.sizes[-1], ""
        for (name, spec), given in zip(self.specs.items(), inputs, strict=True):
            _checks.tensor(where, name, given, (spec.dtype,), len(spec.shape) + bool(spec.rows))
            if given.device.type not in ("cpu", self.pool.device.type) or (given.device.type == "cuda" and given.device != self.pool.device):
                raise ArgumentDeviceError(where, name, f"on {self.pool.device}, where the step was made, or on the CPU", given.device)
            if tuple(given.shape[bool(spec.rows) :]) != spec.shape:
                raise ArgumentShapeError(where, name, f"of shape {list(('rows', *spec.shape) if spec.rows else spec.shape)}", f"shape {list(given.shape)}")
            if not spec.rows:
                continue
            count, rest = divmod(given.shape[0], spec.rows)
            if rest:
                raise ArgumentShapeError(where, name, f"of a multiple of {spec.rows} rows", given.shape[0])
            if first and count != rows:
                raise ArgumentShapeError(where, name, f"of {rows * spec.rows} rows, as many units as {first}", given.shape[0])
            rows, first = count, first or name
        if rows > self.max_size:
            raise ArgumentError(
                where, first, f"of at most {self.max_size} units, the largest size of the step", rows, "Make the step with a larger size, or with max_size= to run larger calls without a graph."
            )
        return rows

    def _inputs(self, size: int) -> tuple[Any, ...]:
        return self._parts[size].tensors

    def _new_block(self, size: int) -> InputBlock:
        return InputBlock(tuple(self.specs.values()), size, self.pool.device)

    @functools.cached_property
    def _staging(self) -> Staging:
        return Staging(tuple(self.specs.values()), self.sizes, self.pool.device, self._run_staged)

    def _fill(self, size: int, inputs: Sequence[torch.Tensor]) -> None:
        """Write every element of the buffers up to ``size``: what is given, and padding behind it."""
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        with torch.no_grad():
            for buffer, spec, given in zip(self._inputs(size), self.specs.values(), inputs, strict=True):
                live = buffer[: given.shape[0]] if spec.rows else buffer
                if spec.rows and given.shape[0] < buffer.shape[0]:
                    buffer[given.shape[0] :].fill_(spec.pad)
                if not live.numel():
                    continue
                if given.device == buffer.device:
                    group = groups.setdefault(spec.dtype, ([], []))
                    group[0].append(live)
                    group[1].append(given)
                else:
                    live.copy_(given, non_blocking=True)
            for buffers, sources in groups.values():
                torch._foreach_copy_(buffers, sources)  # type: ignore[arg-type]

    # Running

    def _begin(self, size: int) -> Any | None:
        """The graph to replay, or None. From here on the outputs of before are stale."""
        self.pool._begin_call(self)
        graph = self._graph(size)
        self._writes += 1
        return graph

    def _finish(self, size: int, rows: int, graph: Any | None, inputs: tuple[Any, ...]) -> StepOutputs:
        """Run on ``inputs``, which up to the largest size are the static ones."""
        if size > self.sizes[-1]:
            value = self._call(inputs)
        else:
            if graph is None:
                self._run(size)
            else:
                graph.replay()
                self._used_on(self.pool._stream, size)
            value = self._views[size]
        self.calls += 1
        return StepOutputs(self, size, rows, value, inputs if self.specs else ())

    def _run_staged(self, staged: StagedInputs) -> StepOutputs:
        size = staged.size
        with self.pool._mutex:
            if not self._staging.take(staged):
                raise GraphError(f"step {self.name!r}: staged inputs run once, and before others are staged. Call stage() for each call.")
            graph = self._begin(size)
            part = self._parts.get(size) or self._new_block(size).part(size)
            self._staging.copy(staged, part.data)
            return self._finish(size, staged.rows, graph, part.tensors)

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        with torch.no_grad(), use_workspace_lane(self.lane), use_workspace_ubatch(self.pool.ubatch):
            return self.function(*inputs)

    def _run(self, size: int) -> None:
        """What a graph holds: the function on the static buffers, and the copies of its results."""
        leaves, tree = _pytree.tree_flatten(self._call(self._inputs(size)))
        if not self._outputs:
            self._outputs, self._tree = [None] * len(leaves), tree
        if tree != self._tree:
            raise GraphError(f"step {self.name!r} at size {size} returned {tree}, at another size {self._tree}. Return the same structure of tensors at every size.")
        views = [self._keep(size, i, leaf) for i, leaf in enumerate(leaves)]
        self._views[size] = _pytree.tree_unflatten(views, tree)

    def _keep(self, size: int, i: int, leaf: Any) -> torch.Tensor | None:
        where = f"step {self.name!r} at size {size}, output {i}"
        if leaf is None:
            return None
        if not isinstance(leaf, torch.Tensor) or leaf.device != self.pool.device:
            got = f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else f"{leaf!r} ({type(leaf).__name__})"
            raise GraphError(f"{where}: must be a tensor on {self.pool.device} or None, got {got}. A graph cannot return what the host computed while it was captured.")
        buffer = self._outputs[i]
        if buffer is not None and (buffer.dtype, buffer.shape[1:]) != (leaf.dtype, leaf.shape[1:]):
            raise GraphError(f"{where}: {leaf.dtype} {list(leaf.shape)}, at another size {buffer.dtype} {list(buffer.shape)}. Only the first dimension may follow the size.")
        if buffer is None or (leaf.dim() and leaf.shape[0] > buffer.shape[0]):
            if len(self._graphs):
                raise GraphError(f"{where}: {list(leaf.shape)} is larger than at any size before ({list(buffer.shape) if buffer is not None else None}), and graphs hold the address of its buffer. Larger sizes must give the larger outputs.")
            with torch.inference_mode(False):
                buffer = self._outputs[i] = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        view = buffer[: leaf.shape[0]] if leaf.dim() else buffer
        view.copy_(leaf)
        return view

    # Graphs

    def _warm_up(self, recorder: Recorder | None) -> None:
        for size in (*([self.max_size] if self.max_size > self.sizes[-1] else []), *reversed(self.sizes)):
            with recorder.warming() if recorder is not None else contextlib.nullcontext():
                self._run_padding(size)

    def _run_padding(self, size: int) -> tuple[tuple[Any, ...], Any]:
        """A call of padding alone: its inputs and what it gives."""
        self._writes += 1
        if size > self.sizes[-1]:
            inputs = self._new_block(size).part(size).tensors
            return inputs, self._call(inputs)
        for buffer, spec in zip(self._inputs(size), self.specs.values(), strict=True):
            buffer.fill_(spec.pad)
        self._run(size)
        return self._inputs(size), self._views[size]

    def _graph(self, size: int) -> Any | None:
        """The graph of ``size``, captured again when its scratch has moved; None without graphs, and past the largest size."""
        recorder = self.pool.recorder
        if recorder is None or size > self.sizes[-1]:
            return None
        if size not in self.captures:
            raise GraphError(f"step {self.name!r} has no graph of size {size}. Call GraphPool.capture() once, before the first call.")
        graph = self._graphs.get(size)
        if graph is None:
            self.recaptures += 1
            graph = self._capture(recorder, size)
        return graph

    def _used_on(self, stream: torch.cuda.Stream | None, size: int) -> None:
        """Memory that a replay on ``stream`` may still use is not given away before it has ended, should the step be dropped."""
        if stream is None or (stream, size) in self._streams:
            return
        self._streams.add((stream, size))
        for tensor in self._memory():
            tensor.record_stream(stream)
        lease = self._graphs.lease(size)
        if lease is not None:
            lease.replays_on(stream)

    def _memory(self) -> Iterator[torch.Tensor]:
        """What a graph holds the addresses of."""
        yield self._block.data
        yield from (tensor for tensor in self._outputs if tensor is not None)

    def _capture(self, recorder: Recorder, size: int) -> Any:
        before = recorder.memory()[0]
        graph = recorder.new_graph()
        try:
            with _one_capture, self._graphs.capture(size, graph), recorder.recording(graph):
                self._run(size)
        except RuntimeError as error:
            root: BaseException = error
            while root.__context__ is not None and not isinstance(root, Dsv4OpsError):
                root = root.__context__
            if isinstance(root, Dsv4OpsError):
                raise root from None
            raise GraphError(
                f"step {self.name!r} cannot be captured at size {size}: {str(root).splitlines()[0]}. A captured function must not read tensors on the host "
                "(.item(), .cpu(), boolean indexing), copy from pageable host memory, or wait for the device."
            ) from root
        self.captures[size] = recorder.memory()[0] - before
        logger.debug("step %r captured at size %d: %d bytes more in the pool", self.name, size, self.captures[size])
        self._streams = {(stream, other) for stream, other in self._streams if other != size}
        return graph


class FollowingStep(GraphStep):
    """A step that reads what a call of another was given and has left, where it lies. Made by :meth:`GraphPool.follow`."""

    def __init__(self, leader: GraphStep, name: str, function: Callable[..., Any], lane: int) -> None:
        super().__init__(leader.pool, name, function, {}, leader.sizes, lane, leader.max_size)
        self.leader = leader
        leader._followers.append(self)

    def __call__(self, outputs: StepOutputs) -> StepOutputs:  # type: ignore[override]
        """Run the step after the call of the other that left ``outputs``; at the same size, without a copy.

        Raises ArgumentError for outputs of another step, StaleOutputError when the other has run since, GraphError as :meth:`GraphStep.__call__`.
        """
        given = self._given(outputs)
        with self.pool._mutex:
            return self._finish(outputs.size, outputs.rows, self._begin(outputs.size), given)

    def eager(self, outputs: StepOutputs) -> Any:  # type: ignore[override]
        """The function on the same memory, without a graph; its outputs are the caller's own."""
        given = self._given(outputs)
        with self.pool._mutex:
            self.pool._begin_call(self)
            return self._call(given)

    def stage(self, rows: int) -> StagedInputs:
        """Always GraphError: the step has no inputs of its own."""
        raise GraphError(f"step {self.name!r} follows {self.leader.name!r} and has no inputs of its own: call it with what that step returned.")

    def _given(self, outputs: StepOutputs) -> tuple[Any, ...]:
        if not isinstance(outputs, StepOutputs) or outputs._step is not self.leader:
            got = f"those of {outputs._step.name!r}" if isinstance(outputs, StepOutputs) else type(outputs).__name__
            raise ArgumentError(f"step {self.name!r}", "outputs", f"StepOutputs of step {self.leader.name!r}, which it follows", got)
        return outputs.inputs(), outputs.read()

    def _inputs(self, size: int) -> tuple[Any, ...]:
        return self.leader._inputs(size), self.leader._views[size]

    def _run_padding(self, size: int) -> tuple[tuple[Any, ...], Any]:
        self._writes += 1
        given = self.leader._run_padding(size)
        if size > self.sizes[-1]:
            return given, self._call(given)
        self._run(size)
        return given, self._views[size]

    def _memory(self) -> Iterator[torch.Tensor]:
        yield from super()._memory()
        yield from self.leader._memory()


class GraphPool:
    """Graphs that share memory, on one device and for one micro-batch.

    ``manager``: whose scratch the steps use (default: the device's). ``ubatch``: the micro-batch that they are captured for (default: the
    current one). ``graphs=False`` calls functions instead of capturing them; ``recorder`` replaces CUDA graphs.
    """

    def __init__(
        self, device: torch.device | str, *, manager: WorkspaceManager | None = None, ubatch: int | None = None, graphs: bool = True, recorder: Recorder | None = None
    ) -> None:
        self.manager = workspace_manager(device) if manager is None else manager
        self.device = self.manager.device
        self.ubatch = current_ubatch() if ubatch is None else ubatch
        self.recorder: Recorder | None = recorder or (CudaRecorder(self.device) if graphs and self.device.type == "cuda" else None)
        self.steps: dict[str, GraphStep] = {}
        self._mutex = threading.RLock()
        self._stream: torch.cuda.Stream | None = None

    def step(
        self, name: str, function: Callable[..., Any], inputs: Mapping[str, StepInput], *, sizes: Sequence[int] = (1,), lane: int = 0, max_size: int | None = None
    ) -> GraphStep:
        """A step of this pool. ``inputs``: its inputs by name, in the order of its arguments. ``lane``: whose scratch its ops use, where they are
        not bound to another. ``max_size``: calls between the largest capture size and this run without a graph (default: they are refused).
        Raises ArgumentError (a name that is taken, sizes below 1 or none), LaneError (a lane past the largest).
        """
        where = f"GraphPool.step({name!r})"
        if not isinstance(inputs, Mapping):
            raise ArgumentDtypeError(where, "inputs", "a dict of StepInput by name, in the order of the function's arguments", type(inputs).__name__)
        if isinstance(sizes, int):
            raise ArgumentDtypeError(where, "sizes", "a sequence", sizes, f"Pass sizes=({sizes},).")
        for size in sizes:
            _checks.integer(where, "sizes", size, 1)
        if not sizes:
            raise ArgumentError(where, "sizes", "at least one size", list(sizes))
        ascending = sorted(set(sizes))
        largest = ascending[-1] if max_size is None else max(max_size, ascending[-1])
        if not any(spec.rows for spec in inputs.values()) and largest != ascending[0]:
            raise ArgumentError(where, "sizes", "one size, because no input has rows that follow the size (rows=1)", ascending)
        self._reserve(name, lane)
        step = self.steps[name] = GraphStep(self, name, function, inputs, ascending, lane, largest)
        return step

    def follow(self, leader: GraphStep, name: str, function: Callable[..., Any], *, lane: int = 0) -> FollowingStep:
        """A step that runs after a call of ``leader``, a step of this pool, and is called with what that call returned.

        ``function(inputs, outputs)``: the static inputs of the leader, a tuple, and what its function returned, where they lie: nothing is
        copied. At all sizes of the leader. Raises ArgumentError (a name that is taken, a leader of another pool), LaneError.
        """
        if self.steps.get(leader.name) is not leader:
            raise ArgumentError(f"GraphPool.follow({name!r})", "leader", "a step of this pool", leader)
        self._reserve(name, lane)
        step = self.steps[name] = FollowingStep(leader, name, function, lane)
        return step

    def _reserve(self, name: str, lane: int) -> None:
        if name in self.steps:
            raise ArgumentError("GraphPool.step", "name", f"a new name (there are {', '.join(self.steps)})", name)
        with self.manager.unlocked():
            self.manager.raise_counts(lane + 1, self.ubatch + 1)

    def capture(self, *, ascending: bool = False) -> GraphReport:
        """Run every step at every size on padding, capture what is not captured yet, and lock the workspace.

        Larger sizes go first unless ``ascending``, which is right too but takes more memory. Without graphs it only warms up. A workspace
        that another pool has locked may grow here: graphs that used it are then captured again at their next call.
        """
        with self._mutex, self.manager.unlocked():
            missing = [(size, step) for step in self.steps.values() for size in step.sizes if size not in step.captures]
            for step in dict.fromkeys(step for _, step in missing):
                step._warm_up(self.recorder)
            if self.recorder is not None:
                for size, step in sorted(missing, key=lambda pair: pair[0], reverse=not ascending):
                    step._capture(self.recorder, size)
                self.manager.lock(self)
        return self.report()

    def reset(self) -> None:
        """Drop all graphs, and the lock of the workspace. The steps can be captured again."""
        for step in self.steps.values():
            step.reset()
        self.manager.unlock(self)

    def report(self) -> GraphReport:
        """Bytes by step, of the pool and of the workspace."""
        held, retained = self.recorder.memory() if self.recorder is not None else (0, 0)
        steps = tuple(step.report() for step in self.steps.values())
        return GraphReport(steps, held, retained, tuple(self.manager.report()), self.manager.retired_bytes)

    def _begin_call(self, step: GraphStep) -> None:
        if current_ubatch() != self.ubatch:
            raise GraphError(
                f"step {step.name!r} was made for micro-batch {self.ubatch}, whose scratch its graphs hold, and was called in micro-batch {current_ubatch()}. "
                "Make one GraphPool for each micro-batch."
            )
        if self.device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            raise GraphError(f"step {step.name!r} was called inside a capture. Call its function there: a graph cannot hold a replay of another.")
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)  # buffers and pool memory may still be in use there
        self._stream = current


@dataclass(frozen=True)
class StepReport:
    """One step: bytes of its static inputs and outputs, and of pool growth by capture size."""

    name: str
    lane: int
    sizes: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    pool_growth: dict[int, int]
    recaptures: int
    calls: int


@dataclass(frozen=True)
class GraphReport:
    """Memory of a :class:`GraphPool`."""

    steps: tuple[StepReport, ...]
    pool_bytes: int
    retained_bytes: int
    """Of the pool: still held by something after the captures. 0, unless a step's function keeps what it computed."""
    workspace: tuple[SlotReport, ...]
    retired_bytes: int

    def __str__(self) -> str:
        lines = [f"graph pool {self.pool_bytes} B, {self.retained_bytes} B of it retained; retired scratch {self.retired_bytes} B"]
        for s in self.steps:
            growth = ", ".join(f"{size}: {s.pool_growth[size]}" for size in s.sizes if size in s.pool_growth) or "no graphs"
            lines.append(f"  {s.name} (lane {s.lane}): inputs {s.input_bytes} B, outputs {s.output_bytes} B; pool growth by size {growth}; {s.recaptures} captured again")
        lines += [f"  scratch of lane {r.lane}, ubatch {r.ubatch}: {r.nbytes} B, seen by {r.graphs} graphs" for r in self.workspace]
        return "\n".join(lines)
