"""Captured graphs on a CPU: what a graph does is recorded op by op with the tensors it used, and replayed on these very tensors.

So a replay reads and writes the memory it was captured with, as a CUDA graph does: stale scratch, moved buffers and overwritten outputs
show here. Ops that read on the host are refused. It runs what it records (a CUDA capture does not), and its memory is never given back while the graph lives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

PYTHON_KERNELS: dict[Any, Callable[..., Any]] = {}
"""Ops whose kernel is Python: recorded by what they do, since a replay does not run Python."""


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
    def __init__(self) -> None:
        self.tape: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    @torch.no_grad()
    def replay(self) -> None:
        for op, args, kwargs, results in self.tape:
            if op.overloadpacket in _NO_REPLAY:
                continue
            for recorded, new in zip(results, _tensors(op(*args, **kwargs)), strict=True):
                if recorded.numel() and recorded.data_ptr() != new.data_ptr():
                    recorded.copy_(new)


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
        super().__init__()
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
        self.graph.tape.append((op, args, kwargs, _tensors(result)))
        return result


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
