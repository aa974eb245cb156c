"""Lanes that would be lost are said so: programs compiled without a binder, ops that no one registered, settings given twice."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch._inductor.compile_fx import compile_fx

from dsv4_ops import _registry, lane_context, passes
from dsv4_ops.errors import LaneError
from dsv4_ops.passes import BindLanes, VerifyLanes, install, with_marks
from dsv4_ops.workspace import use_workspace_lane, workspace_manager
from tests import lane_toys as toys

SLOT = "post_grad_custom_post_pass"
_library = torch.library.Library("dsv4_warning_toys", "DEF")


def _get(x: torch.Tensor) -> torch.Tensor:
    (scratch,) = workspace_manager(x.device).get((x.shape, x.dtype))
    scratch.copy_(x)
    return scratch + 1


def op(name: str) -> Any:
    """A user's op that takes the current lane."""
    _library.define(f"{name}(Tensor x) -> Tensor")
    _library.impl(name, _get, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4_warning_toys::{name}", torch.empty_like, lib=_library)
    return getattr(torch.ops.dsv4_warning_toys, name).default


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    lane_context._warned_programs.clear()
    lane_context._warned_ops.clear()


def marked(x: torch.Tensor) -> torch.Tensor:
    with use_workspace_lane(1):
        x = toys.scan(x, 1)
    with use_workspace_lane(2):
        return toys.scan(x, 2)


def warned(function: Callable[..., Any], *args: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [w for w in caught if "use_workspace_lane" in str(w.message)]


def no_binder(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    return gm.forward


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager", no_binder, with_marks(no_binder)], ids=["inductor", "aot_eager", "eager", "own", "marks"])
def test_a_program_compiled_without_a_binder_warns_once_with_its_place(backend: Any) -> None:
    """Also the pin of what is read of Dynamo: where that changes, no warning comes."""
    compiled = torch.compile(marked, backend=backend, fullgraph=True, dynamic=False)
    (warning,) = warned(compiled, torch.rand(3))
    assert warning.category is UserWarning and "use_workspace_lane in marked" in str(warning.message) and "backend=dsv4_ops.passes.backend()" in str(warning.message)
    line = marked.__code__.co_firstlineno + 1
    assert (warning.filename, line <= warning.lineno <= line + 1) == (__file__, True)
    assert not warned(compiled, torch.rand(4))  # a recompile of the same program


def test_the_warning_is_true() -> None:
    compiled = torch.compile(marked, fullgraph=True)
    with pytest.warns(UserWarning, match="without a pass that binds lanes"):
        assert toys.lanes_of(compiled, torch.rand(3))[1] == [(1, 0), (2, 0)]


def test_what_binds_or_verifies_does_not_warn() -> None:
    bound = [(1, 1), (2, 2)]

    def wrapped(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return passes.backend()(gm, example_inputs)

    wrapped.__wrapped__ = passes.backend()  # type: ignore[attr-defined]
    for options in ({"backend": passes.backend()}, {"backend": passes.backend("aot_eager")}, {"backend": functools.partial(passes.backend())}, {"backend": wrapped}, {"options": {SLOT: BindLanes()}}):
        torch._dynamo.reset()
        compiled = torch.compile(marked, fullgraph=True, **options)
        assert not warned(lambda compiled=compiled: toys.lanes_of(compiled, torch.rand(3))[1] == bound or pytest.fail("lanes")), options
    torch._dynamo.reset()
    with install(BindLanes(), VerifyLanes()):
        assert not warned(torch.compile(marked, fullgraph=True), torch.rand(3))
    torch._dynamo.reset()
    with config.patch({SLOT: [BindLanes()] if slot_takes_a_list() else BindLanes()}):
        assert not warned(torch.compile(marked, fullgraph=True), torch.rand(3))


def slot_takes_a_list() -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


@pytest.mark.parametrize("backend", ["aot_eager", "eager", functools.partial(torch._dynamo.lookup_backend("aot_eager"))], ids=["aot_eager", "eager", "wrapped"])
def test_a_lane_pass_in_a_slot_that_the_backend_does_not_run_is_no_binder(backend: Any) -> None:
    with install(BindLanes(), VerifyLanes()):
        compiled = torch.compile(marked, backend=backend, fullgraph=True)
        assert warned(lambda: toys.lanes_of(compiled, torch.rand(3))[1] == [(1, 0), (2, 0)] or pytest.fail("lanes"))


def test_a_verifier_that_lets_marked_ops_through_is_no_binder() -> None:
    for slot in ((VerifyLanes("allow"),), (VerifyLanes("allow"), VerifyLanes("allow"))):
        torch._dynamo.reset()
        lane_context._warned_programs.clear()
        with install(*slot):
            assert warned(torch.compile(marked, fullgraph=True), torch.rand(3))
    torch._dynamo.reset()
    with install(VerifyLanes("allow"), BindLanes()):
        assert not warned(torch.compile(marked, fullgraph=True), torch.rand(3))


def test_a_lane_around_the_compiled_call_does_not_warn() -> None:
    compiled = torch.compile(lambda x: toys.scan(x, 1), fullgraph=True)

    def step() -> None:
        with use_workspace_lane(1):
            assert toys.lanes_of(compiled, torch.rand(3))[1] == [(1, 1)]

    assert not warned(step)


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_an_unregistered_op_warns_once_when_it_asks_for_the_lane(inner: str) -> None:
    unknown, known = op(f"unknown_{inner}"), op(f"known_{inner}")
    passes.register_workspace_op(known)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = known(x)  # unmarked: ambient is what was asked for
        with use_workspace_lane(1):
            return unknown(known(x))

    compiled = torch.compile(step, backend=passes.backend(inner), fullgraph=True)
    (warning,) = warned(compiled, torch.rand(3))
    text = str(warning.message)
    assert text.startswith(f"dsv4_warning_toys.unknown_{inner}.default asks") and "runs in lane 0" in text and "use_workspace_lane(1)" in text
    assert f"register_workspace_op(torch.ops.dsv4_warning_toys.unknown_{inner}.default)" in text
    assert not warned(compiled, torch.rand(3)) and not lane_context._unregistered.get()


def test_an_unregistered_op_warns_where_lanes_are_bound_in_the_slot() -> None:
    unknown = op("unknown_in_the_slot")

    def step(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return unknown(toys.scan(x, 1))

    with install(BindLanes(), VerifyLanes()):
        (warning,) = warned(torch.compile(step, backend=with_marks(compile_fx), fullgraph=True), torch.rand(3))
    assert str(warning.message).startswith("dsv4_warning_toys.unknown_in_the_slot.default asks")


@pytest.mark.parametrize("ambient", [False, True])
def test_an_unregistered_op_called_without_a_python_frame(ambient: bool) -> None:
    """As by Inductor's C++ code (cpp_wrapper; by default PyTorch 2.11, 2.13 and 2.14 put a frame of the op there). Who asks is told from ops
    that were left ambient only where there are none: silent otherwise."""
    unknown, other = op(f"unknown_in_cpp_{ambient}"), op(f"other_in_cpp_{ambient}")

    def step(x: torch.Tensor) -> torch.Tensor:
        if ambient:
            x = toys.scan(x, 2)
        with use_workspace_lane(1):
            return other(unknown(toys.scan(x, 1)))

    def calls_in_cpp(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return lambda x: [other._op(unknown._op(x))]

    found = warned(torch.compile(step, backend=passes.backend(calls_in_cpp), fullgraph=True), torch.rand(3))
    assert [str(w.message).split(" asks")[0] for w in found] == ([] if ambient else [f"one of {other}, {unknown}"])


def test_an_unregistered_op_does_not_warn_where_its_lane_is_right() -> None:
    unknown = op("unmarked_or_right")

    def step(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            x = unknown(x)
        return x

    compiled = torch.compile(step, backend=passes.backend("aot_eager"), fullgraph=True)
    with use_workspace_lane(1):
        assert not warned(compiled, torch.rand(3))
    assert not warned(unknown, torch.rand(3))  # outside a program


def test_programs_without_unregistered_ops_are_not_wrapped() -> None:
    compiled: list[Any] = []

    def inner(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        compiled.append(gm.forward)
        return compiled[-1]

    gm = toys.dynamo_graph(marked, torch.rand(3))
    assert passes.backend(inner)(gm, []) is compiled[0]


def test_mode_of_torch_compile_is_honoured_and_a_contradiction_refused() -> None:
    def unmarked(x: torch.Tensor) -> torch.Tensor:
        return toys.scan(x, 1)

    for keywords in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=r"left ambient \(lane=-1\)"):  # as with backend(mode=...): a replay would keep the first lane
            torch.compile(unmarked, backend=passes.backend(), **keywords)(torch.rand(3))
    for mine, keywords in (({"mode": "max-autotune"}, {"mode": "reduce-overhead"}), ({"options": {"max_fusion_size": 2}}, {"options": {"max_fusion_size": 3}})):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=r"in torch.compile and .* Give it once"):
            torch.compile(unmarked, backend=passes.backend(**mine), **keywords)(torch.rand(3))


def test_repr_of_a_backend_shows_what_was_asked() -> None:
    assert repr(passes.backend()) == "dsv4_ops.passes.backend('inductor')"
    assert repr(passes.backend("aot_eager", unmarked=0, mode="reduce-overhead")) == "dsv4_ops.passes.backend('aot_eager', unmarked=0, mode='reduce-overhead')"


def test_every_op_with_a_lane_refuses_one_that_cannot_exist() -> None:
    with_lane = [single for single in _registry.ops() if passes.workspace_op(single.overload) is not None]
    assert {single.name for single in with_lane} >= {"topk", "topk_values", "sparse_mla_decode", "rejection_sample"}
    for single in with_lane:
        sample = single.sized("cpu", 2, seed=0)
        single(*sample.args, **{**sample.kwargs, "lane": lane_context.MAX_LANES - 1})
        for lane in (lane_context.MAX_LANES, 99, -2):
            with pytest.raises(ValueError, match=f"lane must be between -1 and {lane_context.MAX_LANES - 1}, got {lane}"):
                single(*sample.args, **{**sample.kwargs, "lane": lane})
    with pytest.raises(LaneError):
        lane_context.resolve_lane(99)
