"""Captured graphs under test: ``assert_graph_replay``, and a stand-in for CUDA graphs that runs on a CPU.

The stand-in records what a step does, op by op, with the tensors that it used, and replays it on these very tensors. So a replay
reads and writes the memory it was captured with, as a CUDA graph does: stale scratch, moved buffers, overwritten outputs and values
that Python baked in show here. Ops that read on the host are refused. It runs what it records (a CUDA capture does not), and its
memory is never given back while the graph lives.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import graphs, workspace
from .basics import Sample, assert_same, clone_args, leaves, outputs

__all__ = ["PYTHON_KERNELS", "TapeGraph", "TapeRecorder", "assert_graph_replay"]

PYTHON_KERNELS: dict[Any, Callable[..., Any]] = {}
"""Ops (``torch._ops.OpOverload``) whose kernel is Python: recorded by what they do, since a replay does not run Python."""


aten = torch.ops.aten
_NO_REPLAY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
_HOST_READS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2)
"""Ops that wait for the device: a CUDA capture fails in them. So do those of ``_reads_host``."""


def _reads_host(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    packet = op.overloadpacket
    if packet in (aten.index, aten.index_put, aten.index_put_):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    # lift_fresh: torch.tensor(...), which copies from the host.
    return packet in _HOST_READS or packet is aten.lift_fresh


class TapeGraph:
    """What was recorded, with ``replay()``."""

    def __init__(self) -> None:
        self.tape: list[tuple[contextvars.Context, Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self._allocated: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def replay(self) -> None:
        for context, op, args, kwargs, results in self.tape:
            if op.overloadpacket in _NO_REPLAY:
                continue
            for recorded, new in zip(results, _tensors(context.run(op, *args, **kwargs)), strict=True):
                if op.namespace == "_c10d_functional":
                    torch.ops._c10d_functional.wait_tensor(new)  # collectives return before they are done
                if recorded.numel() and recorded.data_ptr() != new.data_ptr():
                    recorded.copy_(new)

    def poison(self, byte: int) -> None:
        """Fill all memory that was allocated inside the graph: another graph of the same pool may do so between replays."""
        for tensor in self._allocated.values():
            _fill_storage(tensor, byte)

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]) -> None:
        # With its context: an op whose kernel asks for scratch is called again, and must ask in the lane that it was recorded in.
        self.tape.append((contextvars.copy_context(), op, args, kwargs, results))
        before = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        for result in results:
            if _storage(result) not in before:
                self._allocated[_storage(result)] = result


class TapeRecorder:
    """Stands in for ``dsv4_ops.graphs.CudaRecorder``."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextlib.contextmanager
    def warming(self) -> Iterator[None]:
        self.log.append("warm up")
        yield

    def new_graph(self) -> TapeGraph:
        return TapeGraph()

    @contextlib.contextmanager
    def recording(self, graph: TapeGraph) -> Iterator[None]:
        self.log.append("capture")
        with _Recording(graph):
            yield

    def memory(self) -> tuple[int, int]:
        return 0, 0


class _Recording(TorchDispatchMode):
    def __init__(self, graph: TapeGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kernel = PYTHON_KERNELS.get(op)
        if kernel is not None:
            with self:
                return kernel(*args, **kwargs)
        if _reads_host(op, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {op}")
        result = op(*args, **kwargs)
        self.graph.record(op, args, kwargs, _tensors(result))
        return result


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _fill_storage(tensor: torch.Tensor, byte: int) -> None:
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(byte)


_BYTES = (0x7B, 0xFF)
"""Of poison: huge integers and floats, then -1 and NaN."""
_FLOOD = 64 << 20  # bytes of freed device memory that are filled before a replay


def assert_graph_replay(
    fn: Callable[..., Any],
    inputs: Sequence[Sample | Sequence[Any]],
    *,
    expected: Callable[..., Any] | None = None,
    lane: int | None = None,
    manager: workspace.WorkspaceManager | None = None,
    recorder: graphs.Recorder | None = None,
    tolerances: dict[torch.dtype, tuple[float, float]] | None = None,
) -> None:
    """``fn`` captured once gives, on every replay, what it gives when it is called: whatever the memory around it holds.

    ``inputs`` are two or more sets of arguments (tuples, or samples) that differ in values only. The first is captured. Then, for each
    set and each of two patterns: the set is copied into the captured tensors; outputs, memory of the graph, freed memory and the scratch
    of ``manager`` (default: the device's own) are filled with the pattern; the graph is replayed; results and the arguments after it are
    compared with an eager call of ``expected`` (default: ``fn``) on copies.

    With ``lane``, that lane's scratch is left alone (a step in pieces that keeps something there), and nothing may be written to the
    scratch of any other. On tensors of a CPU, ``TapeRecorder`` stands in for CUDA graphs. Raises AssertionError.
    """
    sets = [given if isinstance(given, Sample) else Sample(f"inputs[{i}]", tuple(given)) for i, given in enumerate(inputs)]
    static, device = clone_args(sets[0]), _check_sets(sets)
    manager = workspace.workspace_manager(device) if manager is None else manager
    recorder = _recorder(device) if recorder is None else recorder
    with torch.no_grad():
        wanted = []
        for given in sets:
            mine = clone_args(given)
            wanted.append((_copied(outputs((expected or fn)(*mine.args, **mine.kwargs))), mine))
        with recorder.warming():
            fn(*static.args, **static.kwargs)
        _load(static, sets[0])
        graph = recorder.new_graph()
        try:
            with manager.capture(graph), recorder.recording(graph):
                results = outputs(fn(*static.args, **static.kwargs))
        except Exception as error:
            raise AssertionError(f"{sets[0].label}: cannot be captured: {error}") from error
        given_storages = {_storage(t) for t in _tensors((static.args, static.kwargs))}
        for given, (want, after) in zip(sets, wanted, strict=True):
            for byte in _BYTES:
                label = f"{given.label}, replay of a graph captured with {sets[0].label}, memory filled with {byte:#x}"
                scratch = _poison(manager, lane, graph, [r for r in results if _storage(r) not in given_storages], byte)
                _load(static, given)
                try:
                    graph.replay()
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                except Exception as error:
                    raise AssertionError(f"{label}: the replay failed: {error}") from error
                assert_same(results, want, label, tolerances)
                assert_same([t for t in leaves(static) if isinstance(t, torch.Tensor)], [t for t in leaves(after) if isinstance(t, torch.Tensor)], f"{label} (arguments)", tolerances)
                for where, buffer in scratch if lane is not None else ():
                    written = int((buffer != byte).sum())
                    assert not written, f"{label}: {written} bytes of the scratch of {where} were written, though the function's lane is {lane}"


def _check_sets(sets: Sequence[Sample]) -> torch.device:
    if len(sets) < 2:
        raise ValueError("assert_graph_replay: inputs must be at least two sets of arguments, a replay with the captured values shows little.")
    first = leaves(sets[0])
    devices = {leaf.device for leaf in first if isinstance(leaf, torch.Tensor)}
    if len(devices) != 1:
        raise ValueError(f"assert_graph_replay: the tensors of inputs must be on one device, got {sorted(map(str, devices))}.")
    for other in sets[1:]:
        values = leaves(other)
        same = len(values) == len(first) and all(_alike(a, b) for a, b in zip(first, values, strict=True))
        if not same:
            raise ValueError(f"assert_graph_replay: {other.label} must differ from {sets[0].label} in the values of its tensors only: a captured graph has one shape.")
    return devices.pop()


def _recorder(device: torch.device) -> graphs.Recorder:
    return graphs.CudaRecorder(device) if device.type == "cuda" else TapeRecorder()


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return type(a) is type(b) and a == b


def _load(static: Sample, given: Sample) -> None:
    for mine, new in zip(leaves(static), leaves(given), strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(new)


def _copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that keep strides: results may be buffers that the next call overwrites."""
    return list(clone_args(Sample("", tuple(tensors))).args)


def _poison(manager: workspace.WorkspaceManager, lane: int | None, graph: Any, results: Sequence[torch.Tensor], byte: int) -> list[tuple[str, torch.Tensor]]:
    """Fill what a replay must not depend on; the slots of ``manager`` that were filled, by name."""
    for result in results:
        if 0 not in result.stride():
            result.copy_(_pattern(result, byte))
    if isinstance(graph, TapeGraph):
        graph.poison(byte)
    else:
        flood = [torch.empty(_FLOOD // 64, dtype=torch.uint8, device=manager.device).fill_(byte) for _ in range(64)]
        del flood
    others = {slot: buffer for slot, buffer in manager._slots.items() if slot[1] != lane}
    return [(f"lane {k}, ubatch {u}", buffer.carve(0, (buffer.nbytes,), torch.uint8).fill_(byte)) for (u, k), buffer in sorted(others.items())]


def _pattern(like: torch.Tensor, byte: int) -> torch.Tensor:
    if like.dtype == torch.bool:
        return torch.ones_like(like)
    return torch.full((max(like.numel(), 1) * like.element_size(),), byte, dtype=torch.uint8, device=like.device).view(like.dtype)[: like.numel()].view(like.shape)
