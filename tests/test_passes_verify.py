"""The verifier refuses every program whose lanes are not what the user wrote, and never edits one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch._inductor.config as config

from dsv4_ops import passes
from dsv4_ops.errors import PassError
from dsv4_ops.passes import VerifyLanes, bind_lanes, fx_utils, graph_text, verify
from dsv4_ops.workspace import use_workspace_lane
from tests import lane_toys as toys


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def step(x: torch.Tensor) -> torch.Tensor:
    x = toys.scan(x, 1)
    with use_workspace_lane(1):
        return toys.scan(x, 2)


def bound(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    gm = toys.dynamo_graph(function, *args)
    bind_lanes(gm)
    return gm


def refused(gm: torch.fx.GraphModule, match: str, ambient: str = "unmarked") -> None:
    before = graph_text(gm)
    with pytest.raises(PassError, match=match):
        VerifyLanes(ambient).check(gm)
    assert graph_text(gm) == before


def test_a_right_program_passes_and_is_not_edited() -> None:
    gm = bound(step, torch.rand(3))
    before, version = graph_text(gm), gm.code
    assert VerifyLanes().check(gm) == 2
    assert graph_text(gm) == before and gm.code == version


def test_lane_that_differs_from_its_region_is_refused_with_node_line_and_both_lanes() -> None:
    gm = bound(step, torch.rand(3))
    list(passes.find_op_nodes(toys.scan, gm.graph))[1].set_argument("lane", 0)
    refused(gm, r"scan.default \(scan_default_1 at .*test_passes_verify.py:\d+, in step\): lane=0, its region is lane 1")


@pytest.mark.parametrize("ambient", ["allow", "unmarked", "refuse"])
def test_ambient_ops(ambient: str) -> None:
    marked = toys.dynamo_graph(step, torch.rand(3))
    if ambient == "allow":
        assert VerifyLanes(ambient).check(marked) == 2
    else:
        refused(marked, r"left ambient \(lane=-1\), its region is lane 1. Compile with dsv4_ops.passes.backend", ambient)
    unmarked = bound(step, torch.rand(3))
    if ambient == "refuse":
        refused(unmarked, r"left ambient \(lane=-1\), its region is unmarked. Enter use_workspace_lane", ambient)
    else:
        assert VerifyLanes(ambient).check(unmarked) == 2


def test_op_of_another_package_left_unbound_is_ambient() -> None:
    def vendor(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return toys.vendor(x, 1)

    refused(toys.dynamo_graph(vendor, torch.rand(3)), r"vendor.default .*left ambient")
    assert VerifyLanes("refuse").check(bound(vendor, torch.rand(3))) == 1


def test_computed_lane_is_refused() -> None:
    programs: list[torch.fx.GraphModule] = []
    torch.compile(lambda x, k: toys.scan(x, 1, lane=k), backend=toys.capture(programs), dynamic=True, fullgraph=True)(torch.rand(3), 3)
    refused(programs[0], "is computed by the program, expected a constant")


def test_body_shared_by_two_lanes_is_refused() -> None:
    @torch.compiler.nested_compile_region
    def block(x: torch.Tensor) -> torch.Tensor:
        return toys.scan(x, 1)

    def shared(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            x = block(x)
        with use_workspace_lane(2):
            return block(x)

    gm = toys.dynamo_graph(shared, torch.rand(3))
    refused(gm, "its body is shared by calls of lane 1 and lane 2. Clone the body", "allow")
    bind_lanes(gm)
    assert VerifyLanes("refuse").check(gm) == 2


def test_wrong_lane_inside_a_body_is_refused() -> None:
    def conditional(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return torch.cond(x.sum() > 0, lambda x: toys.scan(x, 1), lambda x: toys.scan(x, 2), (x,))

    gm = bound(conditional, torch.rand(3))
    assert VerifyLanes("refuse").check(gm) == 2
    bodies = [body.module for body in fx_utils.bodies(gm.graph)]
    next(passes.find_op_nodes(toys.scan, bodies[1].graph)).set_argument("lane", 2)
    refused(gm, "lane=2, its region is lane 1")


def test_all_problems_are_listed_up_to_ten() -> None:
    def many(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            for tag in range(12):
                x = toys.scan(x, tag)
        return x

    with pytest.raises(PassError) as error:
        VerifyLanes().check(toys.dynamo_graph(many, torch.rand(3)))
    lines = str(error.value).splitlines()
    assert len(lines) == 12 and lines[-1] == "  - ... and 2 more"


# The message of every rule, word by word


def message(gm: torch.fx.GraphModule, ambient: str = "unmarked") -> str:
    """What the verifier says, without what differs between versions and machines: names of nodes, folders, line numbers."""
    before = graph_text(gm)
    with pytest.raises(PassError) as error:
        VerifyLanes(ambient).check(gm)
    assert graph_text(gm) == before
    return re.sub(r"\(\w+ at [^,]*?(\w+\.py):\d+", r"(NODE at \1:LINE", str(error.value))


def expect(actual: str, expected: str) -> None:
    expecttest.assert_expected_inline(actual, expected, skip=1)


def with_lane(lane: int) -> torch.fx.GraphModule:
    gm = bound(step, torch.rand(3))
    list(passes.find_op_nodes(toys.scan, gm.graph))[1].set_argument("lane", lane)
    return gm


def test_message_lane_that_differs() -> None:
    expect(message(with_lane(0)), """\
workspace lanes of this program are wrong:
  - dsv4_lane_toys.scan.default (NODE at test_passes_verify.py:LINE, in step): lane=0, its region is lane 1.""")


def test_message_left_ambient_in_a_lane() -> None:
    expect(message(toys.dynamo_graph(step, torch.rand(3))), """\
workspace lanes of this program are wrong:
  - dsv4_lane_toys.scan.default (NODE at test_passes_verify.py:LINE, in step): left ambient (lane=-1), its region is lane 1. Compile with dsv4_ops.passes.backend(...), which binds it.""")


def test_message_left_ambient_where_nothing_may_be() -> None:
    expect(message(bound(step, torch.rand(3)), "refuse"), """\
workspace lanes of this program are wrong:
  - dsv4_lane_toys.scan.default (NODE at test_passes_verify.py:LINE, in step): left ambient (lane=-1), its region is unmarked. Enter use_workspace_lane there, or compile with passes.backend(unmarked=0).""")


def test_message_op_of_another_package_left_ambient() -> None:
    def vendor(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return toys.vendor(x, 1)

    expect(message(toys.dynamo_graph(vendor, torch.rand(3))), """\
workspace lanes of this program are wrong:
  - dsv4_lane_toys.vendor.default (NODE at test_passes_verify.py:LINE, in vendor): left ambient (lane=-1), its region is lane 1. Compile with dsv4_ops.passes.backend(...), which binds it.""")


def test_message_computed_lane() -> None:
    def computed(x: torch.Tensor, k: int) -> torch.Tensor:
        return toys.scan(x, 1, lane=k)

    programs: list[torch.fx.GraphModule] = []
    torch.compile(computed, backend=toys.capture(programs), dynamic=True, fullgraph=True)(torch.rand(3), 3)
    expect(re.sub(r"lane=\w+", "lane=SYMBOL", message(programs[0])), """\
workspace lanes of this program are wrong:
  - dsv4_lane_toys.scan.default (NODE at test_passes_verify.py:LINE, in computed): lane=SYMBOL is computed by the program, expected a constant.""")


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return toys.scan(x, 1)


def two_callers(x: torch.Tensor) -> torch.Tensor:
    with use_workspace_lane(1):
        x = region(x)
    return region(x)


def test_message_shared_body() -> None:
    expect(message(toys.dynamo_graph(two_callers, torch.rand(3)), "allow"), """\
workspace lanes of this program are wrong:
  - dsv4_lane_toys.scan.default (NODE at test_passes_verify.py:LINE, in region): its body is shared by calls of lane 1 and unmarked. Clone the body, or call it in one lane.""")


def test_message_shared_scratch() -> None:
    slab = torch.zeros(16)
    expect(message(bound(two_lanes, torch.rand(3), slab[:8], slab[8:])), """\
workspace lanes of this program are wrong:
  - one scratch storage is used in 2 lanes (lane 0: dsv4_lane_toys.with_scratch.default (NODE at test_passes_verify.py:LINE, in two_lanes), argument workspace; lane 1: dsv4_lane_toys.with_scratch.default (NODE at test_passes_verify.py:LINE, in two_lanes), argument workspace). Give each lane a buffer of its own.""")


def test_every_rule_has_its_message_here() -> None:
    rules = Path(verify.__file__).read_text().count("self._add(")
    assert rules == 5, "a rule came or went: give it a program and its message here"


def test_bad_setting_is_refused() -> None:
    for make in (VerifyLanes, lambda ambient: passes.backend(ambient=ambient)):
        with pytest.raises(PassError, match="ambient must be 'allow', 'unmarked' or 'refuse', got 'maybe'"):
            make("maybe")


# Explicit scratch tensors


def two_lanes(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    x = toys.with_scratch(x, one, lane=0)
    with use_workspace_lane(1):
        return toys.with_scratch(x, two)


@torch.compiler.nested_compile_region
def draft(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    return toys.with_scratch(x, scratch[1:3])


def in_a_body(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    x = toys.with_scratch(x, one, lane=0)
    with use_workspace_lane(1):
        return draft(x, two)


@pytest.mark.parametrize("function", [two_lanes, in_a_body])
def test_scratch_of_two_lanes_must_not_share_storage(function: Callable[..., Any]) -> None:
    slab = torch.zeros(16)
    assert VerifyLanes().check(bound(function, torch.rand(3), torch.zeros(8), torch.zeros(8))) == 2
    gm = bound(function, torch.rand(3), slab[:8], slab[8:])
    refused(gm, r"one scratch storage is used in 2 lanes \(lane 0: .*with_scratch.default .*argument workspace; lane 1: ")


def in_a_shared_body(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The body is traced once, with the first call's buffer."""
    with use_workspace_lane(2):
        x = draft(x, one)
    with use_workspace_lane(1):
        return draft(x, two)


def test_scratch_passed_to_a_shared_body_is_the_callers() -> None:
    slab = torch.zeros(16)
    assert VerifyLanes().check(bound(in_a_shared_body, torch.rand(3), torch.zeros(8), torch.zeros(8))) == 2
    refused(bound(in_a_shared_body, torch.rand(3), slab[:8], slab[8:]), r"one scratch storage is used in 2 lanes \(lane 1: .*; lane 2: ")


def test_views_of_scratch_made_in_the_program_are_followed() -> None:
    def views(x: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        return two_lanes(x, slab[:4].view(2, 2), slab[4:])

    refused(bound(views, torch.rand(3), torch.zeros(8)), "one scratch storage is used in 2 lanes")


# In Inductor


def functionalized(function: Callable[..., Any], v2: bool, *args: Any) -> list[tuple[str, int, int | None]]:
    """(form, lane, mark) of each fill that a post-grad pass sees."""
    seen: list[tuple[str, int, int | None]] = []

    class Look(passes.LanePass):
        def uuid(self) -> Any:
            return None

        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.extend((c.form, c.argument("lane"), fx_utils.lane_mark(c.node)) for c in passes.find_op_nodes(toys.fill, graph))

    torch._dynamo.reset()
    with config.patch(enable_auto_functionalized_v2=v2), passes.install(Look()):
        torch.compile(function, backend=passes.backend(), fullgraph=True)(*args)
    return seen


def test_both_functionalized_forms_are_read_after_inductors_passes() -> None:
    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        with use_workspace_lane(1):
            toys.fill(x, out, 1)

    assert functionalized(fill, True, torch.rand(3), torch.zeros(3)) == [("auto_functionalized_v2", 1, 1)]
    assert functionalized(fill, False, torch.rand(3), torch.zeros(3)) == [("auto_functionalized", 1, 1)]


@pytest.mark.parametrize("v2", [True, False])
def test_inductor_compile_of_an_unbound_mutable_op_fails(v2: bool) -> None:
    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        with use_workspace_lane(1):
            toys.fill(x, out, 1)

    with config.patch(enable_auto_functionalized_v2=v2), passes.install(VerifyLanes()), pytest.raises(RuntimeError, match=r"fill.default .*left ambient"):
        torch.compile(fill, fullgraph=True)(torch.rand(3), torch.zeros(3))


@pytest.mark.parametrize("how", ["mode", "options", "argument of torch.compile"])
def test_ambient_lanes_are_refused_with_cuda_graphs(how: str) -> None:
    """A recorded graph replays the lane of its first run, so calling it in two ambient lanes would use the first for both."""
    where: dict[str, Any] = {"mode": {"mode": "reduce-overhead"}, "options": {"options": {"triton.cudagraphs": True}}}.get(how, {})
    late = {} if where else {"mode": "reduce-overhead"}
    with pytest.raises(RuntimeError, match=r"left ambient .*its region is unmarked"):
        torch.compile(step, backend=passes.backend(**where), fullgraph=True, **late)(torch.rand(3))


def test_explicit_lanes_are_accepted_with_cuda_graphs() -> None:
    compiled = torch.compile(step, backend=passes.backend(mode="reduce-overhead", unmarked=0), fullgraph=True)
    assert toys.lanes_of(compiled, torch.rand(3))[1] == [(1, 0), (2, 1)]
