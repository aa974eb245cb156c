"""Lanes on a GPU: 10,000 poisoned replays that stay exact, three controls with one shared lane that do not, Inductor's graphs, and pools."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dsv4_ops import passes, testing
from dsv4_ops.errors import PassError
from dsv4_ops.graphs import GraphPool
from dsv4_ops.testing import Op
from dsv4_ops.workspace import WorkspaceManager, use_workspace_lane
from tests import lane_campaign
from tests import scratch_toys as toys
from tests.lane_campaign import COLUMNS, SIZES, X_INPUT, fresh_manager, poison

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def manager() -> Iterator[WorkspaceManager]:
    with fresh_manager("cuda") as mine:
        yield mine


# Target and draft, all sizes, everything else poisoned


@pytest.mark.parametrize("ascending", [True, False])
def test_ten_thousand_replays_with_everything_else_poisoned(ascending: bool) -> None:
    outcome = lane_campaign.campaign("cuda", ascending=ascending, replays=10_000)
    assert outcome.mismatches == 0 and outcome.replays >= 10_000 and outcome.retired_bytes > 0
    assert outcome.buffers == (2 + 2 * len(SIZES) if ascending else 4)


@pytest.mark.parametrize("ascending", [True, False])
def test_steps_of_one_pool_interleaved_with_everything_else_poisoned(manager: WorkspaceManager, ascending: bool) -> None:
    assert lane_campaign.interleaved_calls(GraphPool("cuda", manager=manager), manager, ascending=ascending, calls=2_000) == 0


# Controls: each must corrupt with one shared lane, else the tests above show nothing


def test_control_scratch_read_by_a_later_graph() -> None:
    assert lane_campaign.pieces_with_the_draft_between("cuda", draft_lane=0) > 10
    assert lane_campaign.pieces_with_the_draft_between("cuda", draft_lane=1) == 0


def test_control_growth_without_retirement() -> None:
    assert not lane_campaign.growth_after_capture("cuda", retire=False)
    assert lane_campaign.growth_after_capture("cuda", retire=True)


def test_control_overlapping_streams() -> None:
    assert lane_campaign.overlapping_streams(draft_lane=0) > 10
    assert lane_campaign.overlapping_streams(draft_lane=1) == 0


# Inductor's own graphs


def two_sides(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    target = toys.mix(x, 2)
    with use_workspace_lane(1):
        draft = toys.mix(target - 1, 1)
    return toys.mix(target + draft, 1), draft


@pytest.mark.parametrize("ascending", [True, False])
def test_reduce_overhead_with_explicit_lanes(manager: WorkspaceManager, ascending: bool) -> None:
    """Graph trees record once a size; scratch is reserved before the first call, and poisoned between the calls."""
    torch._dynamo.reset()
    compiled = torch.compile(two_sides, backend=passes.backend(mode="reduce-overhead", unmarked=0), fullgraph=True, dynamic=False)
    manager.reserve(2 * max(SIZES) * COLUMNS * 4)
    manager.lock()
    rng = random.Random(0)
    with torch.no_grad():
        order = [size for size in (SIZES if ascending else SIZES[::-1]) for _ in range(3)] + [rng.choice(SIZES) for _ in range(60)]
        for size in order:
            x = torch.rand(size, COLUMNS, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            result = [r.clone() for r in compiled(x)]
            poison(manager)
            toys.lanes.clear()
            expected = two_sides(x)
            assert toys.lanes == [0, 1, 0]
            for got, want in zip(result, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        # Still without gradients: their mode is a guard, and a new program would be traced, which runs Python.
        toys.lanes.clear()
        torch.compiler.cudagraph_mark_step_begin()
        compiled(torch.rand(1, COLUMNS, device="cuda"))
        assert toys.lanes == [], f"a replay runs no Python: graphs were recorded; {dict(torch._dynamo.utils.counters['inductor'])}"
    assert manager.retired_bytes == 0 and manager.is_locked


def test_reduce_overhead_with_an_ambient_lane_is_refused(manager: WorkspaceManager) -> None:
    """A replay would keep the lane of the first run."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: toys.mix(x, 1), backend=passes.backend(mode="reduce-overhead"), fullgraph=True, dynamic=False)
    with pytest.raises((PassError, torch._dynamo.exc.BackendCompilerFailed), match=r"left ambient \(lane=-1\)"):
        compiled(torch.rand(2, COLUMNS, device="cuda"))


def test_a_compiled_target_and_draft_captured_by_hand(manager: WorkspaceManager) -> None:
    """One fullgraph program with both sides, lanes bound, in a pool at every size."""
    torch._dynamo.reset()
    backend = passes.backend(unmarked=0)
    compiled = torch.compile(two_sides, backend=backend, fullgraph=True, dynamic=True)
    pool = GraphPool("cuda", manager=manager)
    step = pool.step("fused", compiled, {"x": X_INPUT}, sizes=SIZES)
    assert pool.capture().retained_bytes == 0
    assert backend.last is not None and {call.split("@")[1] for call in backend.last.bound} == {"0", "1"}
    for rows in (1, 16, 3, 5, 2):
        x = torch.rand(rows, COLUMNS, device="cuda")
        got = step(x).copy()
        for g, e in zip(got, step.eager(x), strict=True):
            assert torch.equal(g[:rows], e[:rows])
    assert [r.lane for r in manager.report()] == [0, 1]


# Pools


def own_kernel(op: Op) -> bool:
    """Whether a kernel of this package serves it on a GPU, so that its temporaries are its own choice."""
    return op.backends["cuda"] in ("c++", "triton")


def outputs_alone(call: Callable[[], tuple[torch.Tensor, ...]], name: str) -> None:
    """``call`` inside a memory pool asks for the bytes of its outputs and for no others, not even for a moment."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    pool = torch.cuda.MemPool()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with torch.cuda.use_mem_pool(pool):
        outputs = call()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    wanted = sum(o.numel() * o.element_size() for o in outputs)
    assert grown == wanted, f"{name}: asked for {grown} bytes at the peak, its outputs have {wanted}"
    held = sum(b["requested_size"] for s in pool.snapshot(include_traces=False) for b in s["blocks"] if b["state"] == "active_allocated")
    assert held == wanted, f"{name}: the pool holds {held} bytes, its outputs have {wanted}"
    del outputs


@pytest.mark.parametrize("rows", [6, 30, 48])
def test_case_E10_inside_a_memory_pool_only_outputs_are_allocated(manager: WorkspaceManager, rows: int) -> None:
    """Rows that are as wide as a long context: a temporary of that size would show at any depth. Scratch is not in the pool."""
    logits = torch.rand(rows, 131072, device="cuda")
    lengths = torch.full((rows,), 131072, dtype=torch.int32, device="cuda")
    x = torch.rand(rows, COLUMNS, device="cuda")
    outputs_alone(lambda: testing.outputs(toys.mix(x, 3)), "mix, which works in scratch")
    for op in testing.ops():
        if op.name in ("topk", "topk_values") and own_kernel(op):
            outputs_alone(lambda op=op: testing.outputs(op(logits, lengths, 2048)), op.name)  # type: ignore[misc]


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in testing.ops()])
def test_case_E10_no_kernel_makes_temporaries_in_a_pool(op: Op, manager: WorkspaceManager) -> None:
    if not own_kernel(op):
        pytest.skip(f"{op.name} has no kernel of its own on CUDA here: PyTorch's ops make temporaries")
    for rows in (6, 30, 48):
        sample = op.sized("cuda", rows)
        outputs_alone(lambda sample=sample: testing.outputs(op(*sample.args, **sample.kwargs)), f"{op.name}, {sample.label}")  # type: ignore[misc]


# The page on lanes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lanes.md"
BLOCKS = re.findall(r"```python cuda\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_the_pages_cuda_code_runs(code: str, manager: WorkspaceManager) -> None:
    exec(compile(code, str(PAGE), "exec"), {"__name__": "__snippet__"})
