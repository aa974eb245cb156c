"""Captured steps as real CUDA graphs: the pool's memory, streams, threads, micro-batches, and the engine."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_ops.errors import GraphError, WorkspaceError
from dsv4_ops.graphs import GraphPool, StepInput
from dsv4_ops.workspace import WorkspaceManager, use_workspace_ubatch
from tests import lane_campaign
from tests import scratch_toys as toys
from tests.lane_campaign import COLUMNS, SIZES, X_INPUT, fresh_manager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

X = {"x": X_INPUT}


@pytest.fixture
def manager() -> Iterator[WorkspaceManager]:
    with fresh_manager("cuda") as mine:
        yield mine


def some(rows: int) -> torch.Tensor:
    return torch.rand(rows, COLUMNS, device="cuda")


def same(outputs: Any, expected: Any, rows: int) -> bool:
    return all(torch.equal(g[:rows], e[:rows]) for g, e in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("ascending", [True, False])
def test_any_number_of_rows_is_eager_to_the_bit(manager: WorkspaceManager, ascending: bool) -> None:
    """Capture of small after large, and of large after small; host inputs and device inputs; nothing retained."""
    pool = GraphPool("cuda", manager=manager)
    step = pool.step("target", lane_campaign.target, X, sizes=SIZES, max_size=24)
    report = pool.capture(ascending=ascending)
    assert report.pool_bytes > 0 and report.retained_bytes == 0, str(report)
    assert manager.is_locked and manager.retired_bytes == 0
    for rows in (16, 1, 3, 16, 7, 2, 24, 5):
        x = some(rows)
        for given in (x, x.cpu()):
            assert same(step(given).read(), step.eager(x), rows), f"{rows} rows"
    assert step.report().output_bytes == 16 * COLUMNS * 4 + 16 * 64 * 4


def test_staged_calls_in_a_row_each_read_what_was_written_for_them(manager: WorkspaceManager) -> None:
    """The step sleeps some 5 ms, so the host is ahead of its copies: memory that one still has to read must not be written."""

    def slow(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.cuda._sleep(10_000_000)
        return x * 2, ids + 1

    pool = GraphPool("cuda", manager=manager)
    inputs = {"x": StepInput(torch.float32, (COLUMNS,)), "ids": StepInput(torch.int64, pad=-1)}
    step = pool.step("slow", slow, inputs, sizes=(4, 16), max_size=24)
    follower = pool.follow(step, "after", lambda given, left: left[0] + given[1][:, None], lane=1)
    pool.capture()
    calls, copies = [(16, 1), (3, 2), (24, 3), (16, 4), (4, 5), (24, 6), (0, 7), (16, 8)], []
    for rows, value in calls:
        staged = step.stage(rows)
        assert all(tensor.is_pinned() for tensor in staged.tensors)
        staged.tensors[0][:rows], staged.arrays[1][:rows] = float(value), value
        outputs = staged.run()
        copies.append((outputs.copy(), follower(outputs).copy()))
    torch.cuda.synchronize()
    for (rows, value), ((x, ids), after) in zip(calls, copies, strict=True):
        padding = ids.shape[0] - rows
        assert ids.tolist() == [value + 1] * rows + [0] * padding
        assert x[:, 0].tolist() == [2.0 * value] * rows + [0.0] * padding
        assert after[:, -1].tolist() == [3.0 * value] * rows + [-1.0] * padding


def test_growth_under_capture_is_refused_and_the_pool_works_afterwards(manager: WorkspaceManager) -> None:
    calls: list[int] = []

    def growing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return toys.mix(x.repeat(len(calls), 1), 1)[: x.shape[0]]

    pool = GraphPool("cuda", manager=manager)
    step = pool.step("growing", growing, X, sizes=(4,))
    with pytest.raises(WorkspaceError, match="by mix during a CUDA graph capture: it cannot grow there"):
        pool.capture()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    calls.clear()
    calls.append(1)  # the warm-up now asks for twice the rows, the capture for three times
    manager.reserve(4 * 4 * 2 * COLUMNS * 4)  # not locked: nothing was captured
    pool.capture()
    x = some(3)
    calls.clear()
    assert same([step(x).read()], [step.eager(x)], 3)


def test_a_host_read_under_capture_is_refused(manager: WorkspaceManager) -> None:
    """In a process of its own: a broken capture leaves the CUDA context of some versions in doubt."""
    import subprocess
    import sys

    code = (
        "import torch\n"
        "from dsv4_ops.errors import GraphError\n"
        "from dsv4_ops.graphs import GraphPool, StepInput\n"
        "pool = GraphPool('cuda')\n"
        "pool.step('f', lambda x: x * x.sum().item(), {'x': StepInput(torch.float32)}, sizes=(4,))\n"
        "try:\n"
        "    pool.capture()\n"
        "except GraphError as error:\n"
        "    print(error, flush=True)\n"
        "assert torch.cuda.current_stream() == torch.cuda.default_stream()\n"
        "print('on the stream of before', flush=True)\n"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.startswith("step 'f' cannot be captured at size 4: ") and "must not read tensors on the host" in done.stdout and "on the stream of before" in done.stdout, done.stdout + done.stderr


def test_replays_of_one_pool_follow_one_another_on_any_stream(manager: WorkspaceManager) -> None:
    """A call on another stream waits for the one before, which sleeps first: else buffers and pool memory would be overwritten under it."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.cuda._sleep(10_000_000)
        return y + x

    pool = GraphPool("cuda", manager=manager)
    step = pool.step("slow", slow, X, sizes=(4,))
    pool.capture()
    xs, copies = [some(4) for _ in range(4)], []
    torch.cuda.synchronize()
    for x in xs:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            copies.append(step(x).copy())
    torch.cuda.synchronize()
    for x, copied in zip(xs, copies, strict=True):
        assert torch.equal(copied, x * 2 + x)


def test_a_call_inside_a_capture_is_refused(manager: WorkspaceManager) -> None:
    pool = GraphPool("cuda", manager=manager)
    step = pool.step("target", lane_campaign.target, X, sizes=(1,))
    pool.capture()
    x = some(1)
    with pytest.raises(GraphError, match="called inside a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(x)


def test_what_a_function_keeps_is_reported(manager: WorkspaceManager) -> None:
    kept: list[torch.Tensor] = []

    def keeping(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if torch.cuda.is_current_stream_capturing():
            kept.append(y)
        return y + 1

    pool = GraphPool("cuda", manager=manager)
    pool.step("keeping", keeping, X, sizes=(16, 32))
    assert pool.capture().retained_bytes == (16 + 32) * COLUMNS * 4
    kept.clear()
    assert pool.report().retained_bytes == 0


def test_smaller_sizes_fit_into_the_memory_of_larger_ones(manager: WorkspaceManager) -> None:
    def heavy(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x.repeat(1, 8)[:, :COLUMNS] * 0.5 + x
        return x

    pool = GraphPool("cuda", manager=manager)
    step = pool.step("heavy", heavy, X, sizes=(256, 512, 1024))
    pool.capture()
    growth = step.report().pool_growth
    assert growth[1024] > 0 and growth[512] == growth[256] == 0, growth


def test_two_threads(manager: WorkspaceManager) -> None:
    """Each with a pool, a stream and a micro-batch of its own; both replay at once, with changed inputs."""
    manager.raise_counts(num_ubatches=2)
    barrier, wrong, errors = threading.Barrier(2, timeout=60), [0, 0], []

    def work(ubatch: int) -> None:
        try:
            with use_workspace_ubatch(ubatch), torch.cuda.stream(torch.cuda.Stream()):
                pool = GraphPool("cuda", manager=manager)
                steps = [pool.step(side, function, X, sizes=SIZES, lane=lane) for lane, (side, function) in enumerate(lane_campaign.SIDES.items())]
                pool.capture()
                barrier.wait()
                for i in range(200):
                    step, x = steps[i % 2], torch.rand(1 + i % 16, COLUMNS, device="cuda")
                    got = step(x).copy()
                    wrong[ubatch] += not same(got, step.eager(x), x.shape[0])
                barrier.wait()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(u,)) for u in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and wrong == [0, 0], (errors, wrong)


def sleeping_pieces(x: torch.Tensor) -> torch.Tensor:
    toys.stash(x)
    torch.cuda._sleep(20_000_000)
    return toys.fetch(x)


@pytest.mark.parametrize("ubatches", [(0, 1), (0, 0)], ids=["one each", "shared: must be wrong"])
def test_two_micro_batches_on_two_streams(manager: WorkspaceManager, ubatches: tuple[int, int]) -> None:
    """Both write scratch, wait some 10 ms and read it: they overlap. In one micro-batch the second overwrites what the first reads."""
    manager.raise_counts(num_ubatches=2)
    steps = []
    for i, ubatch in enumerate(ubatches):
        pool = GraphPool("cuda", manager=manager, ubatch=ubatch)
        steps.append(pool.step(f"piece {i}", sleeping_pieces, X, sizes=(16,)))
        pool.capture()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    xs = [some(16), some(16) + 20]
    torch.cuda.synchronize()
    outputs = []
    for step, stream, x, ubatch in zip(steps, streams, xs, ubatches, strict=True):
        with torch.cuda.stream(stream), use_workspace_ubatch(ubatch):
            outputs.append(step(x))
    torch.cuda.synchronize()
    right = [torch.equal(o.read(), x * 3.0 + 1) for o, x in zip(outputs, xs, strict=True)]
    assert right == ([True, True] if ubatches == (0, 1) else [False, True]), right


def test_case_E12_capture_destroy_capture_in_one_pool(manager: WorkspaceManager) -> None:
    """A pass that only measures memory: its graphs are destroyed, its pool is used again. A pool handle alone would be dead by then."""
    pool = GraphPool("cuda", manager=manager)
    steps = [pool.step(side, function, X, sizes=(1, 16), lane=lane) for lane, (side, function) in enumerate(lane_campaign.SIDES.items())]
    held = []
    for _ in range(3):
        held.append(pool.capture().pool_bytes)
        for step in steps:
            x = some(11)
            assert same(step(x).read(), step.eager(x), 11)
        pool.reset()
        gc.collect()
        torch.cuda.empty_cache()
    assert held[0] > 0 and max(held) == held[0], held


def test_case_E11_outputs_in_a_shared_pool_are_overwritten_unless_they_are_copied(manager: WorkspaceManager) -> None:
    """The fault itself, by hand: an output that nobody holds is given to the next graph of the pool. A step's outputs are not in the pool."""
    recorder, x = lane_campaign.recorder_for("cuda"), some(16)
    graphs, addresses = [recorder.new_graph() for _ in range(2)], []
    for graph, function in zip(graphs, (lambda: x * 2, lambda: x + 20), strict=True):
        with recorder.warming():
            function()
        with recorder.recording(graph):
            addresses.append(function().data_ptr())
    assert addresses[0] == addresses[1], "the draft's output lies on the target's"

    pool = GraphPool("cuda", manager=manager)
    steps = [pool.step(side, function, X, sizes=SIZES, lane=lane) for lane, (side, function) in enumerate(lane_campaign.SIDES.items())]
    pool.capture()
    segments = [(s["address"], s["address"] + s["total_size"]) for s in pool.recorder.pool.snapshot(include_traces=False)]  # type: ignore[union-attr]
    for size in SIZES:
        outputs = steps[0](some(size))
        copied = outputs.copy()
        for other in SIZES:
            steps[1](some(other))
        torch.cuda.synchronize()
        assert same(outputs.read(), copied, size)
        assert not any(low <= o.data_ptr() < high for o in outputs.read() for low, high in segments)


# The engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from dsv4_ops.engine import tiny

    path = tmp_path_factory.mktemp("tiny")
    tiny.make_tiny(path)
    return path


@pytest.mark.parametrize("mode", ["plain", "mtp", "dspark", "dflash"])
def test_captured_engine_gives_the_tokens_of_the_eager_one(mode: str, checkpoint: Path, manager: WorkspaceManager) -> None:
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.engine import Engine
    from dsv4_ops.engine.requests import Request

    text = "The old lighthouse keeper climbed the stairs each night, counting them aloud, and the sea answered in its own time. "
    requests = [Request(i, tuple((text * 2).encode()[3 * i : 3 * i + n]), 12, temperature=0.8 * (i % 2), seed=i) for i, n in enumerate((30, 1, 90))]
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64, "num_speculative_tokens": 3, "capture_sizes": (8, 16, 48), "device": "cuda"}
    tokens = {}
    variants: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}, "captured": {}, **({"fused": {"fused": True}} if mode in ("mtp", "dflash") else {})}
    for name, options in variants.items():
        engine = Engine(checkpoint, EngineConfig(mode=mode, **sizes, **options))
        tokens[name] = [c.token_ids for c in engine.generate(requests)]
        report = engine.executor.pool.report()
        assert report.retained_bytes == 0 and not any(s.recaptures for s in report.steps), str(report)
        assert bool(report.pool_bytes) == (name != "eager")
        assert engine.stats.workspace_lanes == (1 if mode == "plain" or name == "eager" else 2)
        del engine
        gc.collect()
    assert all(each == tokens["eager"] for each in tokens.values()), tokens


@pytest.mark.parametrize("mode", ["plain", "dspark"])
def test_a_decode_step_has_one_copy_each_way(mode: str, manager: WorkspaceManager) -> None:
    """What ``tests/test_engine_host.py`` counts on a CPU, as the GPU sees it."""
    pytest.importorskip("transformers")
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.engine import Engine
    from dsv4_ops.engine.requests import Request
    from dsv4_ops.engine.runner import default_model

    config = EngineConfig(mode=mode, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64, capture_sizes=(20, 64), num_speculative_tokens=4, device="cuda")
    engine, steps = Engine(default_model(), config), 3
    for i in range(4):
        engine.scheduler.add(Request(i, tuple(range(60, 75 + i)), 100))
    while engine.scheduler.waiting or not engine.scheduler.running or not all(s.decoding for s in engine.scheduler.running):
        engine.step()
    engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA and "Memcpy" in event.name]
    assert [sum(way in name for name in names) for way in ("HtoD", "DtoH")] == [steps, steps], names
