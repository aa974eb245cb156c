"""Captured steps: padding, staleness, locking and errors. On a CPU without graphs, and with graphs that replay a recorded tape."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dsv4_ops.errors import (
    ArgumentDeviceError,
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
    GraphError,
    LaneError,
    StaleOutputError,
    WorkspaceError,
    WorkspaceLockedError,
)
from dsv4_ops.graphs import FollowingStep, GraphPool, GraphStep, StepInput
from dsv4_ops.testing import TapeRecorder
from dsv4_ops.workspace import WorkspaceManager, use_workspace_lane, use_workspace_ubatch
from tests import lane_campaign
from tests import scratch_toys as toys
from tests.lane_campaign import COLUMNS, SIZES, X_INPUT, fresh_manager

F32, I64 = torch.float32, torch.int64


@pytest.fixture
def manager() -> Iterator[WorkspaceManager]:
    with fresh_manager("cpu", 1) as mine:
        yield mine


@pytest.fixture(params=["plain", "tape"])
def pool(request: pytest.FixtureRequest, manager: WorkspaceManager) -> GraphPool:
    return GraphPool("cpu", manager=manager, recorder=TapeRecorder() if request.param == "tape" else None)


class Results(NamedTuple):
    doubled: torch.Tensor
    rest: tuple[torch.Tensor | None, ...]


def double(x: torch.Tensor, ids: torch.Tensor) -> Results:
    return Results(toys.mix(x, 1) * 2, (ids + 1, None))


INPUTS = {"x": StepInput(F32, (COLUMNS,)), "ids": StepInput(I64, pad=-1)}


def some(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(rows, COLUMNS), torch.randint(0, 100, (rows,))


def same(actual: Results, expected: Results, rows: int) -> bool:
    got, want = actual.rest[0], expected.rest[0]
    assert got is not None and want is not None
    return torch.equal(actual.doubled[:rows], expected.doubled[:rows]) and torch.equal(got[:rows], want[:rows])


# What a call computes


def test_any_number_of_rows_runs_at_the_next_capture_size(pool: GraphPool) -> None:
    step = pool.step("double", double, INPUTS, sizes=(8, 2, 4, 2))
    pool.capture()
    for rows, size in ((3, 4), (8, 8), (1, 2), (2, 2), (0, 2), (5, 8), (4, 4)):
        inputs = some(rows)
        outputs = step(*inputs)
        assert (outputs.rows, outputs.size) == (rows, size)
        result = outputs.read()
        assert isinstance(result, Results) and result.rest[1] is None and result.doubled.shape == (size, COLUMNS)
        assert same(result, double(*inputs), rows) and same(result, step.eager(*inputs), size), f"{rows} rows"


def test_buffers_are_written_whole_in_every_call(pool: GraphPool) -> None:
    """Nothing of a larger call is left behind a smaller one, also where the function writes its inputs."""
    seen: list[torch.Tensor] = []

    def spoil(x: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        out = torch.cat([ids.clone(), table[0].clone(), x.sum(-1).long()])
        for t in (x, ids, table):
            t.fill_(77)
        return out

    step = pool.step("spoil", spoil, {"x": StepInput(F32, (3,), pad=2.0), "ids": StepInput(I64, pad=-1), "table": StepInput(I64, (2, 2), rows=0)}, sizes=(4,))
    pool.capture()
    for rows in (4, 2, 0):
        seen.append(step(torch.ones(rows, 3), torch.arange(rows), torch.full((2, 2), rows)).copy())
    assert [s.tolist() for s in seen] == [[0, 1, 2, 3, 4, 4, 3, 3, 3, 3], [0, 1, -1, -1, 2, 2, 3, 3, 6, 6], [-1, -1, -1, -1, 0, 0, 6, 6, 6, 6]]


def test_rows_are_counted_in_units(pool: GraphPool) -> None:
    """Requests with four rows each, and one length each."""
    step = pool.step("verify", lambda ids, lens: (ids.view(-1, 4).sum(1), lens * 2), {"ids": StepInput(I64, rows=4), "lens": StepInput(I64)}, sizes=(2, 8))
    pool.capture()
    outputs = step(torch.arange(12), torch.arange(3))
    assert (outputs.rows, outputs.size) == (3, 8)
    assert outputs.read()[0].tolist() == [6, 22, 38, 0, 0, 0, 0, 0] and outputs.read()[1].tolist() == [0, 2, 4, 0, 0, 0, 0, 0]
    with pytest.raises(ArgumentShapeError, match=r"ids must be of a multiple of 4 rows, got 6"):
        step(torch.arange(6), torch.arange(1))
    with pytest.raises(ArgumentShapeError, match=r"lens must be of 3 rows, as many units as ids, got 2"):
        step(torch.arange(12), torch.arange(2))


def test_a_compiled_step_compiles_once_for_its_sizes_and_once_for_one_row(manager: WorkspaceManager) -> None:
    def add(ids: torch.Tensor, x: torch.Tensor, flag: torch.Tensor, wide: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x.sum(1) + ids + flag + wide.float().sum((1, 2)) + table.sum()

    counter = CompileCounter()
    inputs = {"ids": StepInput(I64), "x": StepInput(F32, (COLUMNS,)), "flag": StepInput(torch.bool), "wide": StepInput(torch.bfloat16, (2, 3)), "table": StepInput(I64, (5, 2), rows=0)}
    pool = GraphPool("cpu", manager=manager)
    step = pool.step("sum", torch.compile(add, backend=counter, fullgraph=True, dynamic=True), inputs, sizes=(1, 2, 4, 8))
    pool.capture()
    assert counter.frame_count == 2
    some = (torch.arange(3), torch.randn(3, COLUMNS), torch.arange(3) > 0, torch.randn(3, 2, 3).bfloat16(), torch.ones(5, 2, dtype=I64))
    torch.testing.assert_close(step(*some).read()[:3], add(*some))
    assert counter.frame_count == 2


def test_a_step_without_rows_has_one_size(pool: GraphPool) -> None:
    fixed = {"x": StepInput(F32, (5,), rows=0), "n": StepInput(F32, (), rows=0)}
    step = pool.step("fixed", lambda x, n: x + n, fixed)
    pool.capture()
    assert step(torch.ones(5), torch.tensor(2.0)).read().tolist() == [3.0] * 5 == step.eager(torch.ones(5), torch.tensor(2.0)).tolist()
    with pytest.raises(ArgumentError, match="sizes must be one size, because no input has rows"):
        pool.step("more", lambda x, n: x, fixed, sizes=(1, 2))


def test_calls_past_the_largest_size_run_without_a_graph_or_are_refused(pool: GraphPool, manager: WorkspaceManager) -> None:
    step = pool.step("double", double, INPUTS, sizes=(2, 4), max_size=9)
    pool.capture()
    reserved = manager.nbytes
    assert reserved >= 9 * COLUMNS * 4, "warm-up ran the largest call too"
    for rows in (9, 5, 4):
        inputs = some(rows)
        outputs = step(*inputs)
        assert outputs.size == max(rows, 4) and same(outputs.read(), double(*inputs), rows)
    assert manager.nbytes == reserved
    with pytest.raises(ArgumentError, match=r"x must be of at most 9 units, the largest size of the step, got 10\. Make the step with a larger size, or with max_size="):
        step(*some(10))


# Inputs that the host writes


def test_staged_inputs_are_padding_to_write_over(pool: GraphPool) -> None:
    """At every size and past the largest, whatever was staged before."""
    inputs = {"ids": StepInput(I64, pad=-1), "x": StepInput(F32, (COLUMNS,)), "flag": StepInput(torch.bool, (3,), rows=0, pad=True), "scale": StepInput(F32, (), rows=0, pad=2.0)}

    def function(ids: torch.Tensor, x: torch.Tensor, flag: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ids + flag.sum(), toys.mix(x, 1) * scale

    step = pool.step("f", function, inputs, sizes=(2, 8), max_size=11)
    pool.capture()
    for rows in (8, 1, 0, 11, 2, 9, 3):
        staged = step.stage(rows)
        assert (staged.rows, staged.size) == (rows, 2 if rows <= 2 else 8 if rows <= 8 else rows)
        ids, x, flag, scale = staged.tensors
        assert (ids == -1).all() and not x.any() and flag.all() and scale == 2 and ids.shape == (staged.size,) and x.shape == (staged.size, COLUMNS)
        given = some(rows)
        x[:rows], ids[:rows], flag[1] = given[0], given[1], False
        staged.arrays[3].fill(3.0)
        outputs = staged.run()
        assert (outputs.rows, outputs.size) == (rows, staged.size)
        assert outputs.read()[0].tolist() == [*(given[1] + 2).tolist(), *[1] * (staged.size - rows)]
        assert torch.equal(outputs.read()[1][:rows], toys.mix(given[0], 1) * 3)
        assert torch.equal(outputs.inputs()[0], ids) and len({t.untyped_storage().data_ptr() for t in outputs.inputs()}) == 1
    with pytest.raises(ArgumentError, match="step 'f': rows must be between 0 and 11, got 12"):
        step.stage(12)


def test_staged_inputs_run_once_and_in_order(pool: GraphPool) -> None:
    step = pool.step("double", double, INPUTS, sizes=(2, 4))
    pool.capture()
    before = step(*some(2))
    kept = before.copy()
    first, second = step.stage(1), step.stage(3)
    second.tensors[0].fill_(5.0)
    assert same(before.read(), kept, 2), "nothing has run yet"
    message = r"step 'double': staged inputs run once, and before others are staged. Call stage\(\) for each call"
    with pytest.raises(GraphError, match=message):
        first.run()
    with pytest.raises(GraphError, match=message):
        second.run()
    third = step.stage(3)
    third.run()
    assert before.is_stale and not third.tensors[0].any()
    with pytest.raises(GraphError, match=message):
        third.run()


def test_memory_is_staged_again_only_after_its_copy(manager: WorkspaceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copy is queued, and reads pinned memory when its turn comes."""
    step = GraphPool("cpu", manager=manager).step("double", double, INPUTS, sizes=(4,))
    log: list[str] = []

    class Event:
        def record(self, stream: Any) -> None:
            log.append("copy queued")

        def synchronize(self) -> None:
            log.append(f"waited, memory holds {step._staging._calls[4][0].tensors[1].tolist()}")

    monkeypatch.setattr(step._staging, "_copied", Event())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    for value in (7, 8):
        staged = step.stage(4)
        staged.tensors[1].fill_(value)
        staged.run()
    assert log == ["waited, memory holds [-1, -1, -1, -1]", "copy queued", "waited, memory holds [7, 7, 7, 7]", "copy queued"]


# Steps that follow another


def lead(x: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
    return {"y": toys.mix(x, 1), "next": [ids + 1, None]}


def trail(inputs: tuple[torch.Tensor, ...], outputs: dict[str, Any]) -> torch.Tensor:
    return outputs["y"] + inputs[0] * 2 + (inputs[1] + outputs["next"][0])[:, None]


def test_a_step_follows_another_in_place(pool: GraphPool) -> None:
    seen: list[int] = []

    def follower(inputs: tuple[torch.Tensor, ...], outputs: dict[str, Any]) -> torch.Tensor:
        seen.extend(t.data_ptr() for t in (*inputs, outputs["y"]))
        return trail(inputs, outputs)

    target = pool.step("target", lead, INPUTS, sizes=(2, 4), max_size=6)
    draft = pool.follow(target, "draft", follower, lane=1)
    pool.capture()
    assert isinstance(draft, FollowingStep) and draft.report().input_bytes == 0 and (draft.sizes, draft.max_size) == ((2, 4), 6)
    for rows in (4, 1, 6, 3, 0, 5):
        seen.clear()
        x, ids = some(rows)
        outputs = target(x, ids)
        drafted = draft(outputs)
        wanted = trail((x, ids), lead(x, ids))
        assert torch.equal(drafted.read()[:rows], wanted) and torch.equal(draft.eager(outputs)[:rows], wanted)
        assert (drafted.rows, drafted.size) == (rows, outputs.size) and drafted.inputs() == ()
        places = [t.data_ptr() for t in (*outputs.inputs(), outputs.read()["y"])]
        assert seen[-3:] == places, "what the target has is not copied"
        target(*some(2))
        assert torch.equal(drafted.read()[:rows], wanted), "the follower's outputs are its own"
        with pytest.raises(StaleOutputError, match=r"outputs of step 'target', call \d+: the step has run 1 more time\(s\) since"):
            draft(outputs)


def test_a_follower_warms_up_on_padding(pool: GraphPool) -> None:
    """Also one that is added when its leader has run on live inputs: it may write state."""
    target = pool.step("target", lead, INPUTS, sizes=(2,))
    pool.capture()
    outputs = target(*some(2))
    written: list[list[int]] = []

    def follower(inputs: tuple[torch.Tensor, ...], outputs: dict[str, Any]) -> torch.Tensor:
        if len(written) < 2:
            written.append(inputs[1].numpy().tolist())
        return outputs["y"] + 0

    pool.follow(target, "draft", follower)
    pool.capture()
    assert written and all(ids == [-1, -1] for ids in written)
    assert outputs.is_stale


def test_graphs_of_a_follower_go_with_those_of_its_leader(pool: GraphPool) -> None:
    """They hold the addresses of its outputs, which may be others after its next capture."""
    rows = [2]
    target = pool.step("target", lambda x, ids: {"y": x.repeat(rows[0], 1), "next": [ids + 1]}, INPUTS, sizes=(2,))
    draft = pool.follow(target, "draft", lambda inputs, outputs: outputs["y"] * 2)
    pool.capture()
    rows[0] = 3
    target.reset()
    pool.capture()
    x, ids = some(2)
    assert torch.equal(draft(target(x, ids)).read(), x.repeat(3, 1) * 2)


def test_what_does_not_follow_is_refused(pool: GraphPool, manager: WorkspaceManager) -> None:
    target, other = pool.step("target", lead, INPUTS, sizes=(2,)), pool.step("other", lead, INPUTS, sizes=(2,))
    draft = pool.follow(target, "draft", trail)
    pool.capture()
    with pytest.raises(ArgumentError, match="step 'draft': outputs must be StepOutputs of step 'target', which it follows, got those of 'other'"):
        draft(other(*some(2)))
    with pytest.raises(ArgumentError, match="which it follows, got Tensor"):
        draft(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="step 'draft' follows 'target' and has no inputs of its own"):
        draft.stage(1)
    with pytest.raises(ArgumentError, match="leader must be a step of this pool"):
        GraphPool("cpu", manager=manager).follow(target, "far", trail)
    with pytest.raises(ArgumentError, match="name must be a new name"):
        pool.follow(target, "other", trail)


# Outputs


def test_outputs_are_refused_once_the_step_has_run_again_and_survive_other_steps(pool: GraphPool) -> None:
    first, second = (pool.step(name, double, INPUTS, sizes=(4,), lane=lane) for lane, name in enumerate(("first", "second")))
    pool.capture()
    inputs = some(3)
    outputs = first(*inputs)
    kept, copied = outputs.read(), outputs.copy()
    second(*some(4))
    assert not outputs.is_stale and same(outputs.read(), double(*inputs), 3), "another step's outputs are another's"
    assert torch.equal(outputs.inputs()[1], torch.cat([inputs[1], torch.tensor([-1])]))
    later = some(4)
    first(*later)
    assert outputs.is_stale
    for access in (outputs.read, outputs.copy, outputs.inputs):
        with pytest.raises(StaleOutputError, match=r"outputs of step 'first', call 1: the step has run 1 more time\(s\) since and has written over them\. Read them before its next call, or keep a copy\(\)"):
            access()
    again = first(*later)
    pool.reset()
    pool.capture()
    with pytest.raises(StaleOutputError, match="call 3: the step was warmed up, or failed in a call, since"):
        again.read()
    first(*later)
    assert same(copied, double(*inputs), 3), "a copy stays"
    assert same(kept, double(*later), 4), "what was read and kept is the step's own memory"


def test_a_call_that_fails_takes_the_outputs_of_the_one_before(manager: WorkspaceManager) -> None:
    """It has written the inputs already, and perhaps some outputs."""

    def fail(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] < 0:
            raise KeyError("negative")
        return x * 2

    step = GraphPool("cpu", manager=manager).step("f", fail, {"x": StepInput(F32, (1,))}, sizes=(2,))
    outputs = step(torch.ones(2, 1))
    with pytest.raises(ArgumentShapeError):
        step(torch.ones(2, 3))
    assert outputs.read().tolist() == [[2.0], [2.0]], "a refused call leaves them alone"
    with pytest.raises(KeyError):
        step(-torch.ones(2, 1))
    with pytest.raises(StaleOutputError, match="call 1: the step was warmed up, or failed in a call, since"):
        outputs.read()


def test_case_E11_what_is_read_after_the_drafts_replay_lives_outside_the_pool(pool: GraphPool) -> None:
    """h = output of the target; c = a copy before; replay the draft; h == c, at every pair of sizes."""
    target = pool.step("target", lane_campaign.target, {"x": X_INPUT}, sizes=SIZES)
    draft = pool.step("draft", lane_campaign.draft, {"x": X_INPUT}, sizes=SIZES, lane=1)
    pool.capture()
    for size in SIZES:
        outputs = target(torch.rand(size, COLUMNS))
        copied = outputs.copy()
        for other in SIZES:
            draft(torch.rand(other, COLUMNS))
            assert all(torch.equal(h, c) for h, c in zip(outputs.read(), copied, strict=True))


def test_a_steps_output_may_be_its_next_input(pool: GraphPool) -> None:
    step = pool.step("next", lambda x: x * 2 + 1, {"x": StepInput(F32, (2,))}, sizes=(1, 4))
    pool.capture()
    x = torch.arange(6.0).view(3, 2)
    value, expected = x, x
    for _ in range(4):
        value, expected = step(value).read()[:3], expected * 2 + 1
    assert torch.equal(value, expected)


def test_nothing_that_a_step_computes_on_its_way_is_kept(manager: WorkspaceManager) -> None:
    pool = GraphPool("cpu", manager=manager)  # a tape keeps what it recorded
    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        middle = x * 2
        result = middle + 1
        seen.extend(map(weakref.ref, (middle, result)))
        return result

    step = pool.step("f", function, {"x": StepInput(F32, (4,))}, sizes=(1, 4))
    pool.capture()
    step(torch.ones(3, 4))
    gc.collect()
    assert len(seen) == 6 and not any(ref() is not None for ref in seen)
    assert step.report().output_bytes == 4 * 4 * 4, "one set of outputs for all sizes"


# Scratch


def test_warm_up_reserves_the_lanes_and_capture_locks_them(manager: WorkspaceManager) -> None:
    recorder = TapeRecorder()
    pool = GraphPool("cpu", manager=manager, recorder=recorder)
    target = pool.step("target", lane_campaign.target, {"x": X_INPUT}, sizes=SIZES)
    pool.step("draft", lane_campaign.draft, {"x": X_INPUT}, sizes=(1, 2), lane=1)
    report = pool.capture()
    assert recorder.log == ["warm up"] * 7 + ["capture"] * 7
    assert manager.is_locked and manager.num_lanes == 2 and manager.retired_bytes == 0
    assert [(r.lane, r.nbytes, r.graphs) for r in report.workspace] == [(0, 2 * 16 * COLUMNS * 4, 7), (1, 2 * 2 * COLUMNS * 4, 7)]
    assert [(s.name, s.lane, s.input_bytes, sorted(s.pool_growth)) for s in report.steps] == [
        ("target", 0, 16 * COLUMNS * 4, list(SIZES)),
        ("draft", 1, 2 * COLUMNS * 4, [1, 2]),
    ]
    text = str(report)
    assert "target (lane 0): inputs 131072 B, outputs 135168 B" in text and "scratch of lane 1, ubatch 0: 32768 B, seen by 7 graphs" in text
    with pytest.raises(WorkspaceLockedError, match="Reserve the largest step before lock"):
        toys.mix(torch.rand(17, COLUMNS), 1)
    pool.capture()
    assert recorder.log == ["warm up"] * 7 + ["capture"] * 7, "what is captured is not captured again"
    assert not target.recaptures


def test_a_step_that_asks_for_more_under_capture_is_refused(manager: WorkspaceManager) -> None:
    calls: list[int] = []

    def growing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return toys.mix(x.repeat(len(calls), 1), 1)

    pool = GraphPool("cpu", manager=manager, recorder=TapeRecorder())
    step = pool.step("growing", growing, {"x": X_INPUT}, sizes=(1,))
    with pytest.raises(WorkspaceError, match=r"asked for 32768 by mix during a CUDA graph capture: it cannot grow there.*call reserve\(32768, lane=0\)"):
        pool.capture()
    with pytest.raises(GraphError, match=r"step 'growing' has no graph of size 1\. Call GraphPool\.capture\(\) once"):
        step(torch.rand(1, COLUMNS))


def test_a_graph_whose_scratch_has_moved_is_captured_again(manager: WorkspaceManager) -> None:
    """A second pool grows the lane: the first one's graphs keep their storage until they are called, then move with it."""
    pools = [GraphPool("cpu", manager=manager, recorder=TapeRecorder()) for _ in range(2)]
    small = pools[0].step("small", double, INPUTS, sizes=(1, 2))
    pools[0].capture()
    large = pools[1].step("large", double, INPUTS, sizes=(16,))
    pools[1].capture()
    assert manager.retired_bytes and manager.is_locked
    for rows in (1, 2, 1, 2):
        inputs = some(rows)
        assert same(small(*inputs).read(), double(*inputs), rows)
    assert small.recaptures == 2 and large.recaptures == 0 and manager.retired_bytes == 0
    inputs = some(16)
    assert same(large(*inputs).read(), double(*inputs), 16)


def test_a_step_runs_in_its_own_lane_whatever_lane_is_entered(pool: GraphPool) -> None:
    step = pool.step("mix", lambda x: toys.mix(x, 1), {"x": StepInput(F32, (4,))}, lane=1)
    toys.lanes.clear()
    pool.capture()
    with use_workspace_lane(0):
        step(torch.ones(1, 4))
        step.eager(torch.ones(1, 4))
    assert toys.lanes == [1] * 3
    with pytest.raises(LaneError, match="at most 16 lanes"):
        pool.step("far", lambda x: x, {"x": StepInput(F32)}, lane=16)


def test_a_pool_belongs_to_one_micro_batch(manager: WorkspaceManager) -> None:
    pools = [GraphPool("cpu", manager=manager, ubatch=ubatch, recorder=TapeRecorder()) for ubatch in (0, 1)]
    steps = [pool.step("double", double, INPUTS, sizes=(2,)) for pool in pools]
    for pool in pools:
        pool.capture()
    inputs = some(2)
    with use_workspace_ubatch(1):
        assert same(steps[1](*inputs).read(), steps[1].eager(*inputs), 2)
        with pytest.raises(GraphError, match=r"step 'double' was made for micro-batch 0, .* called in micro-batch 1\. Make one GraphPool for each micro-batch"):
            steps[0](*inputs)
    assert {(r.ubatch, r.nbytes > 0) for r in manager.report()} == {(0, True), (1, True)}
    lease = steps[1]._graphs.lease(2)
    assert lease is not None and set(lease._used) == {(1, 0)}


def test_case_E12_capture_destroy_capture_with_one_pool(manager: WorkspaceManager) -> None:
    """A pass that only measures memory, thrown away; then the real captures of both steps, in the same pool."""
    recorder = TapeRecorder()
    pool = GraphPool("cpu", manager=manager, recorder=recorder)
    steps = [pool.step(name, double, INPUTS, sizes=(1, 4), lane=lane) for lane, name in enumerate(("target", "draft"))]
    for round_ in range(2):
        pool.capture()
        assert recorder.log.count("capture") == 4 * (round_ + 1)
        for step in steps:
            inputs = some(3)
            assert same(step(*inputs).read(), double(*inputs), 3)
        graphs = [weakref.ref(step._graphs.get(size)) for step in steps for size in (1, 4)]
        pool.reset()
        gc.collect()
        assert not any(ref() is not None for ref in graphs) and {r.graphs for r in manager.report()} == {0}
        with pytest.raises(GraphError, match="has no graph"):
            steps[0](*some(1))


@pytest.mark.parametrize("ascending", [True, False])
def test_random_interleavings_of_padded_calls_are_those_of_eager(pool: GraphPool, manager: WorkspaceManager, ascending: bool) -> None:
    assert lane_campaign.interleaved_calls(pool, manager, ascending=ascending, calls=150) == 0


# The campaign of tests/test_lanes_cuda.py on tapes: small, to keep it right where there is no GPU.


@pytest.mark.parametrize("ascending", [True, False])
def test_replays_with_everything_else_poisoned(ascending: bool) -> None:
    outcome = lane_campaign.campaign("cpu", ascending=ascending, replays=300, inputs=4)
    assert outcome.mismatches == 0 and outcome.retired_bytes > 0 and outcome.replays >= 300
    assert outcome.buffers == (2 + 2 * len(SIZES) if ascending else 4), "ascending captures retire the scratch of every smaller size"


def test_control_scratch_read_by_a_later_graph() -> None:
    assert lane_campaign.pieces_with_the_draft_between("cpu", draft_lane=0) > 10, "one shared lane is wrong, else the campaign shows nothing"
    assert lane_campaign.pieces_with_the_draft_between("cpu", draft_lane=1) == 0


def test_control_growth_without_retirement() -> None:
    assert not lane_campaign.growth_after_capture("cpu", retire=False)
    assert lane_campaign.growth_after_capture("cpu", retire=True)


# Errors


def test_inputs_that_do_not_fit_are_refused_by_name(pool: GraphPool) -> None:
    step = pool.step("double", double, INPUTS, sizes=(4,))
    pool.capture()
    x, ids = some(2)
    bad: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((x,), ArgumentError, r"step 'double': inputs must be 2 tensors \(x, ids\), got 1"),
        ((x, ids.float()), ArgumentDtypeError, r"ids must be int64, got float32"),
        ((x, [1, 2]), ArgumentDtypeError, r"ids must be a tensor, got list"),
        ((x[:, :5], ids), ArgumentShapeError, r"x must be of shape \['rows', 2048\], got shape \[2, 5\]"),
        ((x[0], ids), ArgumentShapeError, r"x must be 2-dimensional"),
        ((x, ids[:1]), ArgumentShapeError, r"ids must be of 2 rows, as many units as x, got 1"),
        ((x.to("meta"), ids), ArgumentDeviceError, r"x must be on cpu, where the step was made, or on the CPU, got meta"),
    ]
    for inputs, error, match in bad:
        with pytest.raises(error, match=match):
            step(*inputs)
    assert step.calls == 0, "a refused call leaves earlier outputs alone"


def test_a_step_that_is_described_wrongly_is_refused_by_name(pool: GraphPool) -> None:
    with pytest.raises(ArgumentDtypeError, match=r"StepInput: dtype must be a dtype, as torch\.int64, got 'float32'"):
        StepInput("float32")  # type: ignore[arg-type]
    with pytest.raises(ArgumentDtypeError, match=r"StepInput: shape must be a tuple of sizes, as \(64,\), got 64"):
        StepInput(F32, 64)  # type: ignore[arg-type]
    with pytest.raises(ArgumentDtypeError, match=r"step\('double'\): inputs must be a dict of StepInput by name, .*, got list"):
        pool.step("double", double, [StepInput(F32, (COLUMNS,))])  # type: ignore[arg-type]
    with pytest.raises(ArgumentDtypeError, match=r"step\('double'\): sizes must be a sequence, got 4. Pass sizes=\(4,\)"):
        pool.step("double", double, INPUTS, sizes=4)  # type: ignore[arg-type]
    pool.step("double", double, INPUTS, sizes=(4,))  # a refused name is free


def refused(function: Callable[..., Any], sizes: tuple[int, ...] = (1, 2)) -> str:
    with fresh_manager("cpu") as manager:
        pool = GraphPool("cpu", manager=manager, recorder=TapeRecorder())
        pool.step("f", function, {"x": StepInput(F32)}, sizes=sizes)
        with pytest.raises(GraphError) as caught:
            pool.capture()
        return str(caught.value)


def test_functions_that_cannot_be_captured_are_refused() -> None:
    assert "output 0: must be a tensor on cpu or None, got 1.0 (float)" in refused(lambda x: float(x.sum()) + 1)
    assert "output 0: must be a tensor on cpu or None, got a tensor on meta" in refused(lambda x: x.to("meta"))
    assert "Return the same structure of tensors at every size" in refused(lambda x: x if x.shape[0] == 1 else (x, x))
    assert "Only the first dimension may follow the size" in refused(lambda x: x.expand(2, -1).clone())
    calls: list[int] = []

    def growing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.zeros(len(calls))

    assert "[4] is larger than at any size before ([3]), and graphs hold the address of its buffer" in refused(growing)

    for function in (lambda x: x[x > 0], lambda x: x * x.sum().item(), lambda x: x + torch.tensor([1.0]), lambda x: x.repeat_interleave(x.long())):
        assert refused(function, (2,)).startswith("step 'f' cannot be captured at size 2: operation not permitted when stream is capturing: aten.")
    assert refused(lambda x: x[x > 0], (2,)).endswith(
        "A captured function must not read tensors on the host (.item(), .cpu(), boolean indexing), copy from pageable host memory, or wait for the device."
    )


def test_bad_definitions_are_refused(pool: GraphPool) -> None:
    pool.step("f", double, INPUTS)
    with pytest.raises(ArgumentError, match=r"name must be a new name \(there are f\), got f"):
        pool.step("f", double, INPUTS)
    for sizes in ((), (0,), (-1, 2)):
        with pytest.raises(ArgumentError, match="sizes must be"):
            pool.step("g", double, INPUTS, sizes=sizes)
    with pytest.raises(ArgumentError, match="rows must be at least 0"):
        StepInput(F32, rows=-1)
    with pytest.raises((RuntimeError, TypeError, OverflowError)):
        StepInput(torch.int32, pad=2**40)
    assert isinstance(pool.steps["f"], GraphStep) and "sizes [1], lane 0" in repr(pool.steps["f"])


def test_random_sizes_and_orders(manager: WorkspaceManager) -> None:
    """Capture sizes drawn at random, calls of any length, several steps in one pool."""
    rng = random.Random(0)
    for _ in range(5):
        pool = GraphPool("cpu", manager=manager, recorder=TapeRecorder())
        sizes = tuple(rng.sample(range(1, 20), rng.randint(1, 4)))
        steps = [pool.step(f"s{i}", double, INPUTS, sizes=sizes, max_size=20, lane=i) for i in range(2)]
        pool.capture(ascending=rng.random() < 0.5)
        for _ in range(20):
            rows = rng.randint(0, 20)
            inputs = some(rows)
            assert same(rng.choice(steps)(*inputs).read(), double(*inputs), rows)
