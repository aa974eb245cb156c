"""Workspace lanes with real CUDA graphs: what goes wrong with one shared buffer, and that lanes and retired storage keep it right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from dsv4_ops import passes, workspace
from dsv4_ops.errors import WorkspaceError
from dsv4_ops.workspace import CapturedGraphs, WorkspaceManager, use_workspace_lane

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

N = 1 << 20
F32 = torch.float32


@pytest.fixture
def manager() -> Iterator[WorkspaceManager]:
    mine = WorkspaceManager("cuda", num_lanes=2)
    before = workspace.set_workspace_manager("cuda", mine)
    yield mine
    workspace.set_workspace_manager("cuda", before)


def captured(manager: WorkspaceManager, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of ``body``, warmed up on a side stream as CUDA graphs need."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with manager.capture(graph), torch.cuda.graph(graph, stream=stream):
        body()
    return graph


def junk(nbytes: int) -> list[torch.Tensor]:
    """Fills memory that the allocator has free with NaN."""
    return [torch.full((nbytes // 4,), float("nan"), device="cuda") for _ in range(8)]


def test_target_scratch_read_by_a_later_graph_survives_the_drafts_replays(manager: WorkspaceManager) -> None:
    """The target writes scratch in one graph and reads it in the next; the draft's graph replays in between."""
    x, out = torch.rand(N, device="cuda"), torch.empty(N, device="cuda")

    def programs(draft_lane: int) -> list[torch.cuda.CUDAGraph]:
        def write() -> None:
            manager.get(((N,), F32), lane=0)[0].copy_(x * 2)

        def draft() -> None:
            manager.get(((N,), F32), lane=draft_lane)[0].fill_(20.0)

        def read() -> None:
            out.copy_(manager.get(((N,), F32), lane=0)[0] + 1)

        return [captured(manager, body) for body in (write, draft, read)]

    errors = {}
    for draft_lane in (0, 1):
        graphs = programs(draft_lane)
        for seed in range(3):
            x.copy_(torch.rand(N, device="cuda") + seed)
            for graph in graphs:
                graph.replay()
            torch.cuda.synchronize()
            errors[draft_lane] = max(errors.get(draft_lane, 0.0), float((out - (x * 2 + 1)).abs().max()))
    assert errors[0] > 10, "one shared buffer is wrong, else this test shows nothing"
    assert errors[1] == 0


def test_growth_after_capture_leaves_the_captured_scratch_alone(manager: WorkspaceManager) -> None:
    x, out = torch.rand(N, device="cuda"), torch.empty(N, device="cuda")

    def body() -> None:
        (scratch,) = manager.get(((N,), F32))
        scratch.copy_(x * 2)
        out.copy_(scratch + 1)

    graph = captured(manager, body)
    address = manager.get(((N,), F32))[0].data_ptr()
    manager.get(((4 * N,), F32))
    fill = junk(4 * N)
    assert manager.owns(address) and manager.retired_bytes == 4 * N
    x.copy_(torch.rand(N, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x * 2 + 1) and all(t.isnan().all() for t in fill)
    del graph
    gc.collect()
    assert manager.retired_bytes == 0 and not manager.owns(address)


def test_two_lanes_may_replay_on_overlapping_streams(manager: WorkspaceManager) -> None:
    xs, outs = torch.rand(2, N, device="cuda"), torch.empty(2, N, device="cuda")

    def body(side: int) -> Callable[[], None]:
        def run() -> None:
            with use_workspace_lane(side):
                (scratch,) = manager.get(((N,), F32))
                for _ in range(20):
                    scratch.copy_(xs[side])
                    scratch.mul_(side + 2)
                    outs[side].copy_(scratch)

        return run

    graphs = [captured(manager, body(side)) for side in (0, 1)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(outs[0], xs[0] * 2) and torch.equal(outs[1], xs[1] * 3)


def test_ascending_captures_replay_right_in_any_order(manager: WorkspaceManager) -> None:
    x = torch.rand(8, N, device="cuda")
    outs = {batch: torch.empty(batch, N, device="cuda") for batch in (1, 2, 4, 8)}
    graphs = CapturedGraphs(manager)
    stream = torch.cuda.Stream()
    kept = {}
    for batch, out in outs.items():

        def body(batch: int = batch, out: torch.Tensor = out) -> None:
            (scratch,) = manager.get(((batch, N), F32))
            scratch.copy_(x[:batch] * batch)
            out.copy_(scratch)

        with torch.cuda.stream(stream):
            body()
        torch.cuda.synchronize()
        graph = kept[batch] = torch.cuda.CUDAGraph()
        with graphs.capture(batch, graph), torch.cuda.graph(graph, stream=stream):
            body()
    fill = junk(4 * N)
    for batch in (1, 8, 1, 4, 2):
        x.uniform_()
        kept[batch].replay()
        torch.cuda.synchronize()
        assert torch.equal(outs[batch], x[:batch] * batch)
    assert graphs.get(8) is kept[8] and all(graphs.get(batch) is None for batch in (1, 2, 4)), "moved since: captured again before use"
    assert all(t.isnan().all() for t in fill)


def test_first_request_inside_a_real_capture_is_refused(manager: WorkspaceManager) -> None:
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WorkspaceError, match="by first during a CUDA graph capture"), torch.cuda.graph(graph, stream=stream):
        manager.get(((N,), F32), op="first")
    torch.cuda.synchronize()
    del graph
    torch.cuda.empty_cache()
    out = torch.empty(N, device="cuda")

    def body() -> None:
        (scratch,) = manager.get(((N,), F32))
        scratch.fill_(3.0)
        out.copy_(scratch)

    again = captured(manager, body)
    out.zero_()
    again.replay()
    torch.cuda.synchronize()
    assert (out == 3).all()


def test_scratch_never_comes_from_a_memory_pool_that_happens_to_be_active(manager: WorkspaceManager) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        (scratch,) = manager.get(((N,), F32))
        inside = torch.empty(N, device="cuda")
    segments = [(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
    assert any(low <= inside.data_ptr() < high for low, high in segments), "the pool was active"
    assert not any(low <= scratch.data_ptr() < high for low, high in segments)


_toys = torch.library.Library("dsv4_cuda_toys", "DEF")
_toys.define("doubled(Tensor x, *, int lane=-1) -> Tensor")


def _doubled(x: torch.Tensor, lane: int = -1) -> torch.Tensor:
    (scratch,) = workspace.workspace_manager(x.device).get((x.shape, x.dtype), lane=lane, op="doubled")
    scratch.copy_(x)
    return scratch * 2


_toys.impl("doubled", _doubled, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4_cuda_toys::doubled", lambda x, lane=-1: torch.empty_like(x), lib=_toys)
passes.register_workspace_op(torch.ops.dsv4_cuda_toys.doubled.default)


def test_graph_trees_of_inductor_with_explicit_lanes(manager: WorkspaceManager) -> None:
    """``mode="reduce-overhead"``: warm-up, recording and replays, both lanes, growth between sizes."""
    doubled = torch.ops.dsv4_cuda_toys.doubled

    def step(x: torch.Tensor) -> torch.Tensor:
        target = doubled(x)
        with use_workspace_lane(1):
            draft = doubled(x + 1)
        return doubled(target) + draft

    compiled = torch.compile(step, backend=passes.backend(mode="reduce-overhead", unmarked=0), fullgraph=True, dynamic=False)
    with torch.no_grad():
        for size in (1024, 4096, 1024, 4096):
            for _ in range(4):
                x = torch.rand(size, device="cuda")
                torch.compiler.cudagraph_mark_step_begin()
                result = compiled(x).clone()
                torch.testing.assert_close(result, step(x))
    assert [r.lane for r in manager.report()] == [0, 1] and manager.retired_bytes > 0, "storage that recorded graphs have seen is kept"
