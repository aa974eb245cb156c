"""Target and draft captured, replayed in any order and spoiled in between: run on a GPU with CUDA graphs, on a CPU with tapes.

Every replay is followed by poison in all scratch that it may not rely on: the other lane, and everything that was retired.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dsv4_ops
from dsv4_ops import workspace
from dsv4_ops.graphs import CudaRecorder, GraphPool, Recorder, StepInput, StepOutputs
from dsv4_ops.testing import TapeRecorder
from dsv4_ops.workspace import WorkspaceManager, use_workspace_lane
from tests import scratch_toys as toys

SIZES = (1, 2, 4, 8, 16)
COLUMNS = 2048
F32 = torch.float32
X_INPUT = StepInput(F32, (COLUMNS,))


def recorder_for(device: str) -> Recorder:
    return CudaRecorder(torch.device(device, torch.cuda.current_device())) if device == "cuda" else TapeRecorder()


@contextlib.contextmanager
def fresh_manager(device: str, num_lanes: int = 2, num_ubatches: int = 1) -> Iterator[WorkspaceManager]:
    """The manager that ops use inside, with no scratch yet."""
    mine = WorkspaceManager(device, num_lanes, num_ubatches)
    before = workspace.set_workspace_manager(device, mine)
    try:
        yield mine
    finally:
        workspace.set_workspace_manager(device, before)


def target(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = toys.mix(x, 3)
    y = y + toys.mix(y * 0.5, 1)
    return y, dsv4_ops.topk(y, torch.full((y.shape[0],), COLUMNS - 5, dtype=torch.int32, device=y.device), 64)


def draft(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = toys.mix(x - 1, 2)
    return y * toys.mix(y, 1), dsv4_ops.topk(y, torch.full((y.shape[0],), COLUMNS, dtype=torch.int32, device=y.device), 8)


SIDES: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {"target": target, "draft": draft}


class HandCaptured:
    """``function`` at one size, captured without anything of ``dsv4_ops.graphs`` but the recorder. ``lease`` is its hold on scratch."""

    def __init__(self, manager: WorkspaceManager, recorder: Recorder, function: Callable[[torch.Tensor], Any], size: int, lane: int) -> None:
        self.x = torch.zeros(size, COLUMNS, device=manager.device)
        self.outputs: tuple[torch.Tensor, ...] = ()

        def body() -> None:
            with torch.no_grad(), use_workspace_lane(lane):
                results = function(self.x)
            results = results if isinstance(results, tuple) else (results,)
            if not self.outputs:
                self.outputs = tuple(torch.empty_like(r) for r in results)
            for out, result in zip(self.outputs, results, strict=True):
                out.copy_(result)

        with recorder.warming():
            body()
        self.graph = recorder.new_graph()
        with manager.capture(self.graph) as self.lease, recorder.recording(self.graph):
            body()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.x.copy_(x)
        self.graph.replay()
        return self.outputs


def poison(manager: WorkspaceManager, keep: Sequence[int] = ()) -> None:
    """NaN and -1 into retired storage and the current storage of all lanes but ``keep``."""
    for buffer in (*manager._slots.values(), *manager._retired):
        if buffer in manager._retired or buffer.lane not in keep:
            buffer.storage.fill_(0xFF)


class Mismatches:
    """Counts, without waiting for the device, how often outputs were not the expected bits."""

    def __init__(self, device: str) -> None:
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def compare(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        for g, e in zip(got, expected, strict=True):
            self._count += (g.view(torch.int32) != e.view(torch.int32)).any()

    def __int__(self) -> int:
        return int(self._count)


@dataclass
class Outcome:
    replays: int
    mismatches: int
    retired_bytes: int
    buffers: int


def campaign(device: str, *, ascending: bool, replays: int, seed: int = 0, inputs: int = 32) -> Outcome:
    """Whole steps and steps in two pieces of both sides, at all sizes, replayed in random order with changed inputs.

    Nothing is reserved, so that ascending captures retire the scratch of smaller ones; then both lanes grow once more, so that the
    scratch of every whole step is retired. Pieces are captured last: what lies in scratch between them is in the current storage.
    """
    rng, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    bank = torch.rand(inputs, max(SIZES), COLUMNS, generator=generator, device=device) * 2 - 1
    with fresh_manager(device), torch.no_grad():
        expected = {(side, size): [tuple(o.clone() for o in SIDES[side](bank[i, :size])) for i in range(inputs)] for side in SIDES for size in SIZES}
    with fresh_manager(device) as manager:
        recorder = recorder_for(device)
        order = SIZES if ascending else SIZES[::-1]
        whole = {(side, size): HandCaptured(manager, recorder, SIDES[side], size, lane) for size in order for lane, side in enumerate(SIDES)}
        manager.reserve(4 * max(r.nbytes for r in manager.report()))
        pieces = {(side, size): tuple(HandCaptured(manager, recorder, f, size, lane) for f in (toys.stash, toys.fetch)) for size in order for lane, side in enumerate(SIDES)}
        assert not any(c.lease.is_current for c in whole.values()) and all(p.lease.is_current for pair in pieces.values() for p in pair)
        wrong, done = Mismatches(device), 0

        def run_whole(side: str, keep: tuple[int, ...] = ()) -> None:
            nonlocal done
            size, i = rng.choice(SIZES), rng.randrange(inputs)
            wrong.compare(whole[side, size](bank[i, :size]), expected[side, size][i])
            poison(manager, keep)
            done += 1

        while done < replays:
            lane, side = rng.choice(list(enumerate(SIDES)))
            if rng.random() < 0.7:
                run_whole(side)
                continue
            size, i = rng.choice(SIZES), rng.randrange(inputs)
            write, read = pieces[side, size]
            x = bank[i, :size]
            wrong.compare(write(x), (x.sum(-1),))
            poison(manager, keep=(lane,))
            for _ in range(rng.randint(0, 2)):
                run_whole("draft" if lane == 0 else "target", keep=(lane,))
            wrong.compare(read(x), (x * 3.0 + 1,))
            poison(manager)
            done += 2
        return Outcome(done, int(wrong), manager.retired_bytes, len(manager._retired) + len(manager._slots))


def pieces_with_the_draft_between(device: str, draft_lane: int) -> float:
    """Largest error of a target whose scratch is written in one graph and read in the next, the draft's two graphs replayed in between."""
    with fresh_manager(device) as manager:
        recorder = recorder_for(device)
        write, read = (HandCaptured(manager, recorder, f, 16, 0) for f in (toys.stash, toys.fetch))
        between = [HandCaptured(manager, recorder, f, 16, draft_lane) for f in (toys.stash, toys.fetch)]
        error = 0.0
        for i in range(3):
            x = torch.rand(16, COLUMNS, device=device) + i
            write(x)
            for piece in between:
                piece(x + 20)
            error = max(error, float((read(x)[0] - (x * 3.0 + 1)).abs().max()))
        return error


def growth_after_capture(device: str, retire: bool) -> bool:
    """Whether a captured target is right after its lane has grown, its scratch retired or freed, and someone else has taken free memory."""
    size = 512  # 4 MiB: not one of the small blocks that everything shares
    with fresh_manager(device) as manager:
        recorder = recorder_for(device)
        write, read = (HandCaptured(manager, recorder, f, size, 0) for f in (toys.stash, toys.fetch))
        old = manager._slots[0, 0].storage
        address, nbytes = old.data_ptr(), old.numel()
        memory = None if device == "cuda" else old
        del old
        if not retire:
            for piece in (write, read):
                piece.lease.release()
        manager.reserve(2 * nbytes, lane=0)
        x = torch.rand(size, COLUMNS, device=device)
        write(x)
        someone = _take(address, nbytes) if device == "cuda" else [memory] if memory is not None and not manager.owns(address + 256) else []
        for tensor in someone:
            tensor.fill_(0xFF)
        right = torch.equal(read(x)[0], x * 3.0 + 1)
        assert retire == manager.owns(address + 256)
        return right


def _take(address: int, nbytes: int) -> list[torch.Tensor]:
    """Allocate blocks of this size as long as the allocator has free ones at or near ``address``: 64, or until one lies there."""
    torch.cuda.synchronize()
    taken: list[torch.Tensor] = []
    while len(taken) < 64:
        taken.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        if taken[-1].data_ptr() == address:
            break
    return taken


def overlapping_streams(draft_lane: int, cycles: int = 20_000_000) -> float:
    """Largest error of a target on one stream while the draft runs on another. The target waits between writing and reading its
    scratch for twice as long as the draft waits before it writes, some 10 ms each: they overlap however the launches are spaced."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        toys.stash(x)
        torch.cuda._sleep(2 * cycles)
        return toys.fetch(x)

    def late(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(cycles)
        return toys.stash(x)

    with fresh_manager("cuda") as manager:
        # A recorder for each side: what may overlap must not share a pool.
        sides = [HandCaptured(manager, recorder_for("cuda"), f, 16, lane) for f, lane in ((slow, 0), (late, draft_lane))]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        error = 0.0
        for i in range(3):
            xs = [torch.rand(16, COLUMNS, device="cuda") + i, torch.rand(16, COLUMNS, device="cuda") + 20 + i]
            torch.cuda.synchronize()
            for side, stream, x in zip(sides, streams, xs, strict=True):
                with torch.cuda.stream(stream):
                    side(x)
            torch.cuda.synchronize()
            error = max(error, float((sides[0].outputs[0] - (xs[0] * 3.0 + 1)).abs().max()))
        return error


def interleaved_calls(pool: GraphPool, manager: WorkspaceManager, *, ascending: bool, calls: int, seed: int = 0) -> int:
    """Target and draft as steps of one pool, called with any number of rows in random order, everything else poisoned after each call: how
    often an output, read at a random later time, was not eager's to the bit."""
    rng, device = random.Random(seed), pool.device
    steps = {side: pool.step(side, function, {"x": X_INPUT}, sizes=SIZES, lane=lane) for lane, (side, function) in enumerate(SIDES.items())}
    pool.capture(ascending=ascending)
    wrong = Mismatches(device.type)
    pending: dict[str, tuple[StepOutputs, Any]] = {}

    def read(side: str) -> None:
        outputs, expected = pending.pop(side)
        wrong.compare([g[: outputs.rows] for g in outputs.read()], [e[: outputs.rows] for e in expected])

    for _ in range(calls):
        side = rng.choice(list(steps))
        if side in pending:
            read(side)
        x = torch.rand(rng.randint(1, max(SIZES)), COLUMNS, device=device)
        expected = steps[side].eager(x)
        poison(manager)
        pending[side] = steps[side](x), expected
        poison(manager, keep=(steps[side].lane,))
        if rng.random() < 0.5:
            read(side)
    for side in list(pending):
        read(side)
    assert sum(step.calls for step in steps.values()) == calls and not any(step.recaptures for step in steps.values())
    return int(wrong)
