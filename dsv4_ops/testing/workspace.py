"""Cases of a scratch manager with lanes: what captured graphs rely on.

A manager is judged through the few methods that engines use: ``get(*specs, lane=, ubatch=)``, ``reserve(nbytes, lane=)``, ``lock()`` and,
where it has one, ``capture(graph)``. Each case is a plain function: its source is its reproduction.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .basics import check_function
from .cases import ConformanceError, Report, own_frame

__all__ = ["WorkspaceCase", "check_workspace", "workspace_cases"]

Make = Callable[[], Any]


@dataclass(frozen=True)
class WorkspaceCase:
    """``run(make)`` calls the function with ``make``, which gives a manager of two lanes and two ubatches."""

    id: str
    function: Callable[[Make], None]
    captures: bool = False

    def run(self, make: Make) -> None:
        try:
            self.function(make)
        except Exception as error:
            where = own_frame(error)  # none: what was asserted is the case's own
            what = str(error) if isinstance(error, AssertionError) and not where else f"{type(error).__name__}: {error}{where}"
            failure = ConformanceError(f"workspace: case {self.id!r}: {what}\n\nTo repeat it, define make and run:\n\n{self.reproduction()}")
            failure.reproduction = self.reproduction()
            raise failure from error

    def reproduction(self) -> str:
        """Python that expects ``make()`` to give a new manager, and raises when the manager is wrong."""
        source = textwrap.dedent(inspect.getsource(self.function)).replace("make: Make", "make").replace(" -> None:", ":")
        helpers = "".join(inspect.getsource(helper) + "\n\n" for helper in (_Graph, _refused) if helper.__name__ in source)
        return f"# workspace: {self.id}\nimport functools, gc, itertools, threading\nfrom collections.abc import Callable\n\nimport torch\nfrom torch.multiprocessing.reductions import StorageWeakRef\n\n\n{helpers}{source}\n\n{self.function.__name__}(make)\n"


class _Graph:
    """Stands for a captured graph: it can be weakly referenced."""


def _refused(call: Callable[[], object]) -> str:
    """The text of the exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("accepted, expected an exception")


def views_asked_for_together_do_not_overlap(make: Make) -> None:
    manager = make()
    for shapes in ([(7,), (1,), (64, 3)], [(1 << 20,), (2 << 20,), (512 << 10,)], [(0,), (5,), (0, 9), (300,)]):
        for lane in (0, 1):
            views = manager.get(*((shape, torch.uint8) for shape in shapes), lane=lane)
            for i, view in enumerate(views):
                assert view.shape == shapes[i] and view.is_contiguous(), f"view {i} of {shapes} has shape {tuple(view.shape)}"
                view.fill_(i + 1)
            for i, view in enumerate(views):
                assert bool((view == i + 1).all()), f"view {i} of {shapes} shares bytes with another one"


def views_of_every_dtype_can_be_used(make: Make) -> None:
    manager = make()
    dtypes = [torch.uint8, torch.float32, torch.bool, torch.int64, torch.bfloat16]
    views = manager.get(*(((3,), dtype) for dtype in dtypes), lane=0)
    for view, dtype in zip(views, dtypes, strict=True):
        assert view.dtype == dtype and view.data_ptr() % view.element_size() == 0, f"{view.dtype} at {view.data_ptr():#x}, expected an aligned {dtype}"
        view.fill_(1)
    assert all(bool((view == 1).all()) for view in views), "views of different dtypes share bytes"


def lanes_and_ubatches_share_no_bytes(make: Make) -> None:
    manager = make()
    slots = [(lane, ubatch) for lane in (0, 1) for ubatch in (0, 1)]
    views = [manager.get(((4096,), torch.uint8), lane=lane, ubatch=ubatch)[0] for lane, ubatch in slots]
    for i, view in enumerate(views):
        view.fill_(i)
    for i, view in enumerate(views):
        assert bool((view == i).all()), f"(lane, ubatch) {slots[i]} shares bytes with another slot"


def growth_of_a_lane_leaves_the_others_where_they_are(make: Make) -> None:
    manager = make()
    before = manager.get(((1000,), torch.uint8), lane=1)[0].fill_(7)
    address = before.data_ptr()
    for size in (1000, 100_000, 10_000_000):
        manager.get(((size,), torch.uint8), lane=0)[0].fill_(9)
    after = manager.get(((1000,), torch.uint8), lane=1)[0]
    assert after.data_ptr() == address, "lane 1 moved when lane 0 grew"
    assert bool((before == 7).all()), "growth of lane 0 wrote to lane 1"


def a_smaller_request_keeps_the_address(make: Make) -> None:
    manager = make()
    address = manager.get(((1 << 20,), torch.uint8), lane=0)[0].data_ptr()
    for size in (1, 1 << 19, 1 << 20):
        assert manager.get(((size,), torch.uint8), lane=0)[0].data_ptr() == address, f"a request of {size} bytes moved the scratch of lane 0"


def reserved_scratch_does_not_move(make: Make) -> None:
    manager = make()
    manager.reserve(1 << 20, lane=0)
    addresses = {manager.get(((size,), torch.uint8), lane=0)[0].data_ptr() for size in (1, 4096, 1 << 20)}
    assert len(addresses) == 1, "requests within the reserved size have several addresses"


def a_locked_manager_refuses_growth_by_name(make: Make) -> None:
    manager = make()
    address = manager.get(((1 << 20,), torch.uint8), lane=1)[0].data_ptr()
    manager.lock()
    text = _refused(lambda: manager.get(((3 << 20,), torch.uint8), lane=1))
    assert "lane 1" in text and str(3 << 20) in text, f"the error should name the lane (1) and the size ({3 << 20}): {text!r}"
    assert manager.get(((1 << 19,), torch.uint8), lane=1)[0].data_ptr() == address, "the scratch moved though the manager is locked"


def a_lock_covers_the_ubatch_that_warm_up_did_not_use(make: Make) -> None:
    manager = make()
    manager.get(((4 << 20,), torch.uint8), lane=0, ubatch=0)
    manager.lock()
    manager.get(((4 << 20,), torch.uint8), lane=0, ubatch=1)
    _refused(lambda: manager.get((((4 << 20) + 4096,), torch.uint8), lane=0, ubatch=1))


def lanes_that_do_not_exist_are_refused(make: Make) -> None:
    manager = make()
    for lane in (2, 15, -2):
        _refused(functools.partial(manager.get, ((8,), torch.uint8), lane=lane))


def scratch_of_a_captured_graph_outlives_growth(make: Make) -> None:
    manager, graph = make(), _Graph()
    manager.get(((1 << 20,), torch.uint8), lane=0)  # warm-up
    with manager.capture(graph):
        view = manager.get(((1 << 20,), torch.uint8), lane=0)[0]
        address, storage = view.data_ptr(), StorageWeakRef(view.untyped_storage())
        del view
    owned = not storage.expired()  # else each view is made anew over memory that PyTorch does not own, and only addresses can tell
    manager.get(((4 << 20,), torch.uint8), lane=0)  # another step, larger: the graph still holds the old address
    gc.collect()
    assert not (owned and storage.expired()), "memory that a captured graph writes to was freed"
    device = manager.get(((1,), torch.uint8), lane=0)[0].device
    others = [torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(64)]
    for other in (*others, manager.get(((4 << 20,), torch.uint8), lane=0)[0]):
        start = other.data_ptr()
        assert not start <= address < start + other.numel(), "memory that a captured graph writes to was given to someone else"


def growth_inside_a_capture_is_refused(make: Make) -> None:
    manager, graph = make(), _Graph()
    manager.get(((1 << 10,), torch.uint8), lane=0)

    def grow() -> None:
        with manager.capture(graph):
            manager.get(((1 << 20,), torch.uint8), lane=0)

    _refused(grow)
    manager.get(((1 << 20,), torch.uint8), lane=0)


def threads_that_use_their_own_slots_do_not_disturb_each_other(make: Make) -> None:
    manager, wrong, errors = make(), [], []
    barrier = threading.Barrier(4)

    def work(lane: int, ubatch: int) -> None:
        barrier.wait()
        try:
            for size in itertools.islice(itertools.cycle((100, 5000, 70_000)), 30):
                view = manager.get(((size,), torch.uint8), lane=lane, ubatch=ubatch)[0].fill_(2 * lane + ubatch + 1)
                if not bool((view == 2 * lane + ubatch + 1).all()):
                    wrong.append((lane, ubatch))
        except Exception as error:  # a thread's exceptions do not reach the one that joins it
            errors.append(error)

    workers = [threading.Thread(target=work, args=slot) for slot in itertools.product((0, 1), (0, 1))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    assert not wrong, f"scratch of (lane, ubatch) {sorted(set(wrong))} was overwritten by another thread"


FUNCTIONS = (
    views_asked_for_together_do_not_overlap,
    views_of_every_dtype_can_be_used,
    lanes_and_ubatches_share_no_bytes,
    growth_of_a_lane_leaves_the_others_where_they_are,
    a_smaller_request_keeps_the_address,
    reserved_scratch_does_not_move,
    a_locked_manager_refuses_growth_by_name,
    a_lock_covers_the_ubatch_that_warm_up_did_not_use,
    lanes_that_do_not_exist_are_refused,
    scratch_of_a_captured_graph_outlives_growth,
    growth_inside_a_capture_is_refused,
    threads_that_use_their_own_slots_do_not_disturb_each_other,
)
_CAPTURES = (scratch_of_a_captured_graph_outlives_growth, growth_inside_a_capture_is_refused)


def workspace_cases(*, captures: bool = True) -> list[WorkspaceCase]:
    """Cases of a manager; ``captures=False`` leaves out those that need ``capture(graph)``."""
    return [WorkspaceCase(f.__name__.replace("_", " "), f, f in _CAPTURES) for f in FUNCTIONS if captures or f not in _CAPTURES]


def check_workspace(manager: Make, *, captures: bool = True, raises: bool = True) -> Report:
    """Run ``workspace_cases``. ``manager()`` gives a new manager with two lanes and two ubatches: each case starts with its own.

    For instance ``check_workspace(lambda: WorkspaceManager("cpu", num_lanes=2, num_ubatches=2))``.
    """
    check_function("check_workspace", "manager", manager, "a function that gives a new manager (cases lock theirs)")
    report = Report("workspace", left_out={} if captures else {f.__name__.replace("_", " "): "captures" for f in _CAPTURES})
    for case in workspace_cases(captures=captures):
        try:
            case.run(manager)
        except ConformanceError as error:
            report.failed[case.id] = error
        else:
            report.passed.append(case.id)
    if raises:
        report.raise_for_failures()
    return report
