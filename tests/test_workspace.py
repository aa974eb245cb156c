"""Workspace lanes: no two views that live together overlap, and nothing a captured graph has seen is freed or moved under it.

Graphs are simulated by objects that write through a raw address, as a CUDA graph's kernels do; the same manager code runs on a GPU.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import itertools
import random
import threading
import types
import weakref

import pytest
import torch

from dsv4_ops import envs, workspace
from dsv4_ops.errors import LaneError, WorkspaceError, WorkspaceLockedError
from dsv4_ops.workspace import CapturedGraphs, WorkspaceManager, current_lane, num_workspace_lanes, use_workspace_lane, use_workspace_ubatch

MIB = 1 << 20
U8 = torch.uint8


class RawGraph:
    """A captured graph: knows addresses, keeps no tensor alive."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int, int]] = []

    def record_fill(self, view: torch.Tensor, byte: int) -> None:
        self.writes.append((view.data_ptr(), view.numel() * view.element_size(), byte))

    def replay(self) -> None:
        for address, size, byte in self.writes:
            ctypes.memset(address, byte, size)


class Capturing:
    """Stands for torch.cuda.is_current_stream_capturing."""

    active = False

    def __call__(self) -> bool:
        return self.active


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def assert_disjoint(tensors: list[torch.Tensor]) -> None:
    ranges = sorted(span(t) for t in tensors if t.numel())
    for (_, end), (start, _) in itertools.pairwise(ranges):
        assert end <= start


# Handed cases


def test_case_E01_growth_after_lock_is_refused_and_smaller_requests_keep_the_address() -> None:
    manager = WorkspaceManager("cpu", num_lanes=2)
    (v1,) = manager.get(((MIB,), U8))
    address, graph = v1.data_ptr(), RawGraph()
    with manager.capture(graph):
        graph.record_fill(v1, 7)
    manager.lock()
    with pytest.raises(WorkspaceLockedError, match=rf"lane 0, ubatch 0 .*holds {MIB} bytes, asked for {2 * MIB} by test_case_E01.*test_workspace.py.*locked"):
        manager.get(((2 * MIB,), U8))
    (half,) = manager.get(((MIB // 2,), U8))
    assert half.data_ptr() == address
    bystanders = [torch.full((MIB,), 3, dtype=U8) for _ in range(4)]
    v1.zero_()
    graph.replay()
    assert (v1 == 7).all() and all((b == 3).all() for b in bystanders)


def test_case_E02_captures_in_ascending_batch_size_keep_the_earlier_scratch_alive() -> None:
    manager = WorkspaceManager("cpu")
    graphs: dict[int, RawGraph] = {}
    addresses: dict[int, int] = {}
    for batch in (1, 2, 4, 8):
        manager.get(((batch, MIB), U8))  # warm-up, outside the capture
        graphs[batch] = RawGraph()
        with manager.capture(graphs[batch]):
            (scratch,) = manager.get(((batch, MIB), U8))
            graphs[batch].record_fill(scratch, batch)
            addresses[batch] = scratch.data_ptr()
    del scratch
    gc.collect()
    others = [torch.full((k * MIB,), 0xFF, dtype=U8) for k in (1, 2, 4, 8) for _ in range(3)]  # would land in freed scratch
    assert len(set(addresses.values())) == 4
    assert all(manager.owns(a) and manager.owns(a + b * MIB - 1) for b, a in addresses.items())
    for batch in (1, 8, 1):
        graphs[batch].replay()
        assert all((o == 0xFF).all() for o in others)
        assert ctypes.string_at(addresses[batch], batch * MIB) == bytes([batch]) * (batch * MIB)
    assert manager.nbytes == 8 * MIB and manager.retired_bytes == 7 * MIB


def test_case_E02_reserved_before_the_first_capture_nothing_moves() -> None:
    manager = WorkspaceManager("cpu")
    manager.reserve(8 * MIB)
    pointers = {manager.get(((batch, MIB), U8))[0].data_ptr() for batch in (1, 2, 4, 8)}
    assert len(pointers) == 1 and manager.generation() == 1 and manager.retired_bytes == 0


def test_case_E04_every_ubatch_of_a_lane_is_sized_at_lock_and_lanes_are_independent() -> None:
    manager = WorkspaceManager("cpu", num_lanes=2, num_ubatches=2)
    manager.get(((4 * MIB,), U8), lane=0, ubatch=0)
    manager.lock()
    (view,) = manager.get(((4 * MIB,), U8), lane=0, ubatch=1)
    assert view.numel() == 4 * MIB
    with pytest.raises(WorkspaceLockedError, match=f"lane 0, ubatch 0 .*holds {4 * MIB} bytes, asked for {4 * MIB + 256}"):
        manager.get(((4 * MIB + 1,), U8), lane=0, ubatch=0)
    with pytest.raises(WorkspaceLockedError, match=r"lane 1, ubatch 0 .*holds 0 bytes"):
        manager.get(((1,), U8), lane=1, ubatch=0)
    assert [(r.ubatch, r.lane, r.nbytes) for r in manager.report()] == [(0, 0, 4 * MIB), (1, 0, 4 * MIB)]


def test_case_E07_first_call_inside_a_capture_is_refused_and_later_calls_work() -> None:
    capturing = Capturing()
    manager = WorkspaceManager("cpu", is_capturing=capturing)
    capturing.active = True
    with pytest.raises(WorkspaceError, match=r"asked for 256 by first_op during a CUDA graph capture.*reserve\(256, lane=0\)"):
        manager.get(((100,), U8), op="first_op")
    capturing.active = False
    assert manager.nbytes == 0 and manager.generation() == 0
    manager.get(((100,), U8), op="first_op")
    capturing.active = True
    (again,) = manager.get(((100,), U8), op="first_op")
    assert manager.owns(again.data_ptr())


def test_case_E09_views_asked_for_together_are_disjoint_and_reused_by_the_next_step() -> None:
    manager = WorkspaceManager("cpu")
    sizes = (MIB, 2 * MIB, MIB // 2)
    step = manager.get(*(((s,), U8) for s in sizes))
    assert_disjoint(list(step))
    assert [v.numel() for v in step] == list(sizes) and manager.nbytes >= sum(sizes)
    before = [span(v) for v in step]
    assert [span(v) for v in manager.get(*(((s,), U8) for s in sizes))] == before


def test_case_E16_default_lane_without_context_in_threads_and_after_exceptions() -> None:
    manager = WorkspaceManager("cpu", num_lanes=3)
    assert current_lane() == 0 and manager.get(((1,), U8))[0].numel() == 1
    with use_workspace_lane(1):
        with pytest.raises(RuntimeError, match="inside lane 2"), use_workspace_lane(2):
            raise RuntimeError(f"inside lane {current_lane()}")
        assert current_lane() == 1
        seen: list[int] = []
        fresh = threading.Thread(target=lambda: seen.append(current_lane()))
        fresh.start()
        fresh.join()
        inherited = contextvars.copy_context()  # as free-threaded Python starts its threads
        heir = threading.Thread(target=lambda: seen.append(inherited.run(current_lane)))
        heir.start()
        heir.join()
        assert seen == [0, 0]
    assert current_lane() == 0

    barrier, lanes, slots = threading.Barrier(2), {}, {}

    def worker(lane: int) -> None:
        with use_workspace_lane(lane):
            barrier.wait(10)
            lanes[lane] = current_lane()
            slots[lane] = manager.get(((64,), U8))[0].data_ptr()
            barrier.wait(10)

    threads = [threading.Thread(target=worker, args=(k,)) for k in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lanes == {1: 1, 2: 2} and slots[1] != slots[2] and current_lane() == 0
    assert [r.lane for r in manager.report()] == [0, 1, 2]


def test_case_E17_a_graph_whose_buffer_has_moved_is_a_miss() -> None:
    manager = WorkspaceManager("cpu", num_lanes=2)
    graphs = CapturedGraphs(manager)
    manager.get(((MIB,), U8))
    with graphs.capture("decode 8", RawGraph()):
        manager.get(((MIB,), U8))
    first = graphs.get("decode 8")
    assert first is not None and manager.generation() == 1
    manager.get(((MIB,), U8), lane=1)
    assert graphs.get("decode 8") is first, "a lane that the graph does not use has moved"
    manager.get(((2 * MIB,), U8))
    assert manager.generation() == 2 and manager.generations() == (((0, 0), 2), ((0, 1), 1))
    gone = weakref.ref(first)
    del first
    assert graphs.get("decode 8") is None and len(graphs) == 0
    gc.collect()
    assert gone() is None and manager.retired_bytes == 0
    with graphs.capture("decode 8", RawGraph()):
        manager.get(((2 * MIB,), U8))
    assert graphs.get("decode 8") is not None


# Views


@pytest.mark.parametrize("seed", range(20))
def test_random_sets_of_simultaneous_views_never_overlap(seed: int) -> None:
    draw = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
    manager = WorkspaceManager("cpu", num_lanes=3, num_ubatches=2)
    latest: dict[tuple[int, int], list[torch.Tensor]] = {}
    for _ in range(30):
        specs = [(tuple(draw.randint(0, 9) for _ in range(draw.randint(0, 3))), draw.choice(dtypes)) for _ in range(draw.randint(0, 6))]
        lane, ubatch = draw.randrange(3), draw.randrange(2)
        with use_workspace_lane(lane), use_workspace_ubatch(ubatch):
            views = manager.get(*specs)
        latest[(ubatch, lane)] = list(views)
        assert_disjoint([view for slot in latest.values() for view in slot])
        for view, (shape, dtype) in zip(views, specs, strict=True):
            assert (tuple(view.shape), view.dtype, view.is_contiguous()) == (shape, dtype, True)
            assert view.numel() == 0 or view.data_ptr() % 256 == 0
            view.fill_(1)  # a view past its storage would fail here
            assert view.numel() == 0 or manager.owns(span(view)[1] - 1)


def test_a_request_resizes_its_own_slot_only() -> None:
    manager = WorkspaceManager("cpu", num_lanes=2, num_ubatches=2)
    pointers = {(u, k): manager.get(((100,), U8), lane=k, ubatch=u)[0].data_ptr() for u in (0, 1) for k in (0, 1)}
    manager.get(((MIB,), U8), lane=1, ubatch=0)
    after = {(u, k): manager.get(((100,), U8), lane=k, ubatch=u)[0].data_ptr() for u in (0, 1) for k in (0, 1)}
    assert {slot for slot in after if after[slot] != pointers[slot]} == {(0, 1)}


def test_scratch_first_used_in_inference_mode_can_be_written_outside_it() -> None:
    manager = WorkspaceManager("cpu")
    with torch.inference_mode():
        manager.get(((8,), torch.float32))
    (view,) = manager.get(((8,), torch.float32))
    view.fill_(1.0)
    assert not view.is_inference() and view.sum() == 8


def test_bad_requests_name_what_is_wrong() -> None:
    manager = WorkspaceManager("cpu")
    with pytest.raises(WorkspaceError, match=r"at least 0, got shape \[4, -1\]"):
        manager.get(((4, -1), U8))
    with pytest.raises(WorkspaceError, match="nbytes must be at least 0, got -1"):
        manager.reserve(-1)
    with pytest.raises(LaneError, match=r"has 1 lane\(s\), asked for lane 1.*num_lanes=2"):
        manager.get(((4,), U8), lane=1)
    with pytest.raises(LaneError, match=r"has 1 ubatch\(es\), asked for ubatch 3"):
        manager.get(((4,), U8), ubatch=3)
    for lane in (-2, 16):
        with pytest.raises(LaneError, match=rf"lane must be -1 \(ambient\) or between 0 and 15, got {lane}"):
            workspace.resolve_lane(lane)
    for bad in (-1, 16, True, "draft", 1.0):
        with pytest.raises(LaneError, match="lane must be an integer between 0 and 15"), use_workspace_lane(bad):  # type: ignore[arg-type]
            raise AssertionError("entered")
    with pytest.raises(LaneError, match="ubatch must be an integer of at least 0"), use_workspace_ubatch(-1):
        raise AssertionError("entered")
    with pytest.raises(WorkspaceError, match="num_lanes must be between 1 and 16"):
        WorkspaceManager("cpu", num_lanes=0)
    assert manager.nbytes == 0


def test_a_failed_allocation_leaves_the_slot_as_it_was() -> None:
    fail = False

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        if fail:
            raise torch.OutOfMemoryError("no memory")
        return torch.empty(nbytes, dtype=U8, device=device)

    manager = WorkspaceManager("cpu", allocate=allocate)
    (view,) = manager.get(((512,), U8))
    fail = True
    with pytest.raises(torch.OutOfMemoryError):
        manager.get(((MIB,), U8))
    assert manager.generation() == 1 and manager.get(((512,), U8))[0].data_ptr() == view.data_ptr()


def test_fake_tensors_never_reach_the_workspace() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    manager = WorkspaceManager("cpu")
    with FakeTensorMode(), pytest.raises(WorkspaceError, match="while tracing"):
        manager.get(((4,), U8))
    assert manager.nbytes == 0


# Captured graphs


def test_growth_inside_a_capture_scope_is_refused_and_the_scope_ends() -> None:
    manager = WorkspaceManager("cpu")
    graph = RawGraph()
    manager.get(((100,), U8))
    with pytest.raises(WorkspaceError, match="during a CUDA graph capture"), manager.capture(graph):
        manager.get(((MIB,), U8))
    manager.get(((MIB,), U8))  # the failed capture holds nothing
    assert manager.retired_bytes == 0
    with manager.capture(graph), pytest.raises(WorkspaceError, match="already inside a capture scope"), manager.capture(graph):
        raise AssertionError("entered")


def test_retired_storage_goes_with_the_last_graph_that_saw_it() -> None:
    manager = WorkspaceManager("cpu")
    (view,) = manager.get(((MIB,), U8))
    address = view.data_ptr()
    del view
    one, two = RawGraph(), RawGraph()
    with manager.capture(one):
        manager.get(((MIB,), U8))
    lease = manager.retain(two)
    manager.get(((2 * MIB,), U8))
    assert manager.retired_bytes == MIB and not lease.is_current
    del one
    gc.collect()
    assert manager.owns(address)
    del two
    gc.collect()
    assert not manager.owns(address) and manager.retired_bytes == 0


def test_a_graph_keeps_its_storage_when_the_manager_goes() -> None:
    freed = []

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=U8, device=device)
        weakref.finalize(tensor, freed.append, nbytes)
        return tensor

    manager = WorkspaceManager("cpu", allocate=allocate)
    graph = RawGraph()
    with manager.capture(graph):
        pass
    manager.get(((MIB,), U8))
    lease = manager.retain(graph)
    del manager
    gc.collect()
    assert not freed and lease.nbytes == MIB and not lease.is_current
    del graph, lease
    gc.collect()
    assert freed == [MIB + 256]


def test_storage_used_in_a_capture_that_nobody_declared_is_kept_for_good() -> None:
    capturing = Capturing()
    manager = WorkspaceManager("cpu", is_capturing=capturing)
    manager.get(((MIB,), U8))
    capturing.active = True
    (view,) = manager.get(((MIB,), U8))
    address = view.data_ptr()
    del view
    capturing.active = False
    graph = RawGraph()
    manager.retain(graph)
    manager.get(((2 * MIB,), U8))
    del graph
    gc.collect()
    assert manager.owns(address) and manager.retired_bytes == MIB


def test_growth_without_graphs_keeps_nothing() -> None:
    manager = WorkspaceManager("cpu")
    for size in (1, 2, 4):
        manager.get(((size * MIB,), U8))
    assert manager.nbytes == 4 * MIB and manager.retired_bytes == 0


def test_locked_restores_what_was_there() -> None:
    manager = WorkspaceManager("cpu")
    with pytest.raises(WorkspaceLockedError), manager.locked():
        manager.get(((1,), U8))
    assert not manager.is_locked
    manager.lock()
    with manager.locked():
        pass
    assert manager.is_locked
    manager.unlock()
    manager.get(((1,), U8))


def test_a_finalizer_never_waits_for_a_thread_that_holds_the_manager() -> None:
    """A collection on the allocating thread may run a graph's finalizer while the manager waits for that thread."""
    state: dict[str, object] = {}

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        if "graph" in state:
            helper = threading.Thread(target=state.clear)
            helper.start()
            helper.join(10)
            assert not helper.is_alive(), "deadlock"
        return torch.empty(nbytes, dtype=U8, device=device)

    manager = WorkspaceManager("cpu", allocate=allocate)
    manager.get(((256,), U8))
    state["graph"] = RawGraph()
    manager.retain(state["graph"])
    manager.get(((512,), U8))
    assert manager.retired_bytes == 0


def test_threads_that_grow_one_slot_at_once_see_whole_buffers() -> None:
    manager = WorkspaceManager("cpu", num_lanes=2)
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def worker(seed: int) -> None:
        try:
            draw = random.Random(seed)
            start.wait(10)
            with use_workspace_lane(seed % 2):
                for _ in range(200):
                    size = draw.randint(1, 50_000)
                    first, second = manager.get(((size,), U8), ((size,), torch.int32))
                    first.fill_(1)
                    second.fill_(1)
                    assert_disjoint([first, second])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=worker, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(manager.report()) == 2


# Debug mode, default managers, lane count


def test_debug_mode_records_pointers_and_finds_scratch_of_another_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_OPS_DEBUG_WORKSPACE", "1")
    assert envs.debug_workspace()
    manager = WorkspaceManager("cpu", num_lanes=2)
    (target,) = manager.get(((64,), torch.float32), lane=0, op="topk")
    with use_workspace_lane(1):
        (draft,) = manager.get(((64,), torch.float32), op="topk")
    assert [(u.op, u.lane, u.ubatch, u.address, u.nbytes) for u in manager.uses] == [("topk", 0, 0, target.data_ptr(), 256), ("topk", 1, 0, draft.data_ptr(), 256)]
    with pytest.raises(WorkspaceError, match=r"attention: scratch of lane 1, ubatch 0 .* lies in the storage of lane 0, ubatch 0"):
        manager.record("attention", [target.view(8, 8)[:, 2:4]], lane=1)
    manager.record("attention", [target, draft[:0], torch.empty(4)], lane=0)
    monkeypatch.setenv("DSV4_OPS_DEBUG_WORKSPACE", "0")
    manager.get(((64,), torch.float32))
    assert len(manager.uses) == 5


def test_default_manager_is_one_for_each_device_and_never_loses_lanes() -> None:
    before = workspace.set_workspace_manager("cpu", None)
    try:
        manager = workspace.workspace_manager("cpu")
        assert (manager.num_lanes, manager.num_ubatches, manager.nbytes) == (2, 1, 0)
        assert workspace.workspace_manager(torch.device("cpu"), num_lanes=3, num_ubatches=2) is manager
        assert (manager.num_lanes, manager.num_ubatches) == (3, 2)
        assert workspace.workspace_manager("cpu", num_lanes=1).num_lanes == 3
        manager.lock()
        with pytest.raises(WorkspaceLockedError, match="is locked: it has 3 lanes"):
            workspace.workspace_manager("cpu", num_lanes=4)
        mine = WorkspaceManager("cpu")
        assert workspace.set_workspace_manager("cpu", mine) is manager and workspace.workspace_manager("cpu") is mine
    finally:
        workspace.set_workspace_manager("cpu", before)


@pytest.mark.parametrize(
    ("config", "lanes"),
    [
        ({"mode": "plain", "capture_sizes": (1, 8)}, 1),
        ({"mode": "mtp", "capture_sizes": ()}, 1),
        ({"mode": "mtp", "capture_sizes": (1, 8)}, 2),
        ({"mode": "dspark", "capture_sizes": (8,)}, 2),
        ({"mode": "dflash", "capture_sizes": [8], "draft_capture_sizes": []}, 1),
        ({"mode": "dflash", "capture_sizes": [8], "draft_capture_sizes": [8]}, 2),
        ({"speculative_config": None, "compilation_config": types.SimpleNamespace(cudagraph_capture_sizes=[1, 2])}, 1),
        ({"speculative_config": object(), "compilation_config": types.SimpleNamespace(cudagraph_capture_sizes=[1, 2])}, 2),
        ({"speculative_config": object(), "enforce_eager": True, "cudagraph_capture_sizes": [1, 2]}, 1),
        ({"speculative_config": object(), "compilation_config": None}, 1),
    ],
)
def test_two_lanes_only_when_a_drafter_captures_graphs_of_its_own(config: dict[str, object], lanes: int) -> None:
    assert num_workspace_lanes(types.SimpleNamespace(**config)) == lanes


def test_lane_count_of_an_unknown_config_is_an_error() -> None:
    with pytest.raises(LaneError, match="has neither mode nor speculative_config"):
        num_workspace_lanes(object())


def test_a_lock_with_an_owner_ends_with_the_owner() -> None:
    manager = WorkspaceManager("cpu", num_lanes=1, num_ubatches=2)
    first, second = RawGraph(), RawGraph()
    manager.get(((1024,), torch.uint8))
    manager.lock(first)
    manager.lock(second)
    with manager.unlocked():
        assert not manager.is_locked
        manager.get(((4096,), torch.uint8))
    assert manager.is_locked and {r.nbytes for r in manager.report()} == {4096}, "locked again, every ubatch as large as the largest"
    manager.unlock(first)
    with pytest.raises(WorkspaceLockedError):
        manager.get(((8192,), torch.uint8))
    del second
    gc.collect()
    manager.get(((8192,), torch.uint8))
    manager.lock(first)
    manager.lock()
    manager.unlock()
    assert not manager.is_locked
