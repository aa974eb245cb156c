"""How calls are timed. On a GPU: cold L2, inside a CUDA graph, so that neither the host nor a cache helps.

One graph holds one call for each of several input sets. Before each replay 256 MB are read, so nothing of the inputs is in
L2 (60 MB on an H200). Time of a replay over the number of calls, in microseconds: what a call costs in a captured step, the
gap to the next kernel included; an empty kernel timed the same way is the floor. On a CPU: the wall time of single calls.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

REPLAYS = 11
Call = Callable[[], Any]


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """``us_p20``, ``us_p50`` and ``us_p80`` of times in microseconds."""
    ordered = sorted(times)
    return {f"us_p{p}": round(ordered[len(ordered) * p // 100], 3) for p in (20, 50, 80)}


class ColdReplays:
    """Times calls on the current CUDA device."""

    def __init__(self) -> None:
        self._flushed, self._sink = torch.ones(64 << 20, device="cuda"), torch.zeros((), device="cuda")

    def measure(self, calls: Sequence[Call], cold: bool = True) -> tuple[dict[str, float], Any]:
        """``us_p20``, ``us_p50`` and ``us_p80`` of a call, and what the last call of the last replay returned.

        Not ``cold``: nothing is read before a replay, so that the inputs of the last one are still in L2.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        graph, result = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph):
            for call in calls:
                result = call()
        graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
        for before, after in events:
            if cold:
                self._sink.copy_(self._flushed.sum())
            before.record()
            graph.replay()
            after.record()
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) * 1000 / len(calls) for before, after in events]
        result = [t.clone() if isinstance(t, torch.Tensor) else t for t in (result if isinstance(result, tuple | list) else (result,))]  # the graph's memory goes with it
        return percentiles(times), result


class HostCalls:
    """Times calls on the CPU: the wall time of each, one after the other on its own inputs, caches as they are."""

    FEWEST, MOST, SECONDS = 5, 100, 0.2

    def measure(self, calls: Sequence[Call], cold: bool = True) -> tuple[dict[str, float], Any]:
        """As that of :class:`ColdReplays`; ``cold`` changes nothing."""
        times: list[float] = []
        calls[0]()
        while len(times) < self.FEWEST or len(times) < len(calls) or (len(times) < self.MOST and sum(times) < self.SECONDS * 1e6):
            call = calls[len(times) % len(calls)]
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        result = calls[-1]()
        return percentiles(times), list(result) if isinstance(result, tuple | list) else [result]


def launches(call: Call) -> int | None:
    """How many nodes (kernels, copies, fills) a CUDA graph of one call has; None where that cannot be asked."""
    try:
        graph, count = torch.cuda.CUDAGraph(keep_graph=True), ctypes.c_size_t()
        with torch.cuda.graph(graph):
            call()
        status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
        return count.value if status == 0 else None
    except (OSError, RuntimeError, TypeError, AttributeError, AssertionError):
        return None


def copy_rate(device: str = "cuda") -> float:
    """GB/s of a copy from memory to memory, bytes read and written counted: 1 GiB on a GPU, 64 MiB on a CPU."""
    source = torch.ones((256 if device == "cuda" else 16) << 20, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(12):
        if device == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            target.copy_(source)
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
        else:
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
    return float(round(2 * source.numel() * 4 / sorted(times)[6] / 1e9, 1))
