"""The binder: every op runs in the lane that the same program uses in eager mode, whatever the compiler does with it.

Programs run toy ops that log the lane they really used; eager and compiled logs must be equal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

import dsv4_ops
from dsv4_ops import passes
from dsv4_ops.errors import LaneError, PassError
from dsv4_ops.passes import bind_lanes, fx_utils, graph_text, workspace_ops
from dsv4_ops.workspace import use_workspace_lane
from tests import lane_toys as toys


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def assert_same_lanes(step: Callable[..., Any], *args: Any, backend: Any = None, fullgraph: bool = True) -> passes.BindReport:
    expected, eager = toys.lanes_of(step, *args)
    backend = backend or passes.backend("aot_eager")
    actual, compiled = toys.lanes_of(torch.compile(step, backend=backend, fullgraph=fullgraph), *args)
    assert compiled == eager
    torch.testing.assert_close(actual, expected)
    report: passes.BindReport = backend.last
    return report


def two_branches(x: torch.Tensor) -> torch.Tensor:
    target = toys.scan(x, 1)
    with use_workspace_lane(1):
        draft = toys.vendor(toys.scan(x + 1, 2), 3)
    return toys.scan(target, 4) + draft


def expect(actual: str, expected: str) -> None:
    expecttest.assert_expected_inline(actual, expected, skip=1)


# Golden text


def test_two_branches_before_and_after() -> None:
    gm = toys.dynamo_graph(two_branches, torch.rand(3))
    expect(
        graph_text(gm),
        """\
def forward(self, L_x_ : torch.Tensor):
    l_x_ = L_x_
    target = torch.ops.dsv4_lane_toys.scan.default(l_x_, 1)
    add = l_x_ + 1
    scan_default_1 = torch.ops.dsv4_lane_toys.scan.default(add, 2)
    draft = torch.ops.dsv4_lane_toys.vendor.default(scan_default_1, 3)
    scan_default_2 = torch.ops.dsv4_lane_toys.scan.default(target, 4)
    add_1 = scan_default_2 + draft
    return (add_1,)""",
    )
    report = bind_lanes(gm)
    expect(
        graph_text(gm),
        """\
def forward(self, L_x_ : torch.Tensor):
    l_x_ = L_x_
    target = torch.ops.dsv4_lane_toys.scan.default(l_x_, 1)
    add = l_x_ + 1
    scan_default_1 = torch.ops.dsv4_lane_toys.scan.default(add, 2, lane = 1)
    draft = torch.ops.dsv4_ops_lanes.dsv4_lane_toys_vendor.default(scan_default_1, 3, lane = 1)
    scan_default_2 = torch.ops.dsv4_lane_toys.scan.default(target, 4)
    add_1 = scan_default_2 + draft
    return (add_1,)""",
    )
    assert report.bound == {"dsv4_lane_toys.scan.default@1": 1, "dsv4_ops_lanes.dsv4_lane_toys_vendor.default@1": 1} and report.ambient == 2


@torch.compiler.nested_compile_region
def block(x: torch.Tensor) -> torch.Tensor:
    x = toys.scan(x, 1)
    with use_workspace_lane(2):
        return toys.scan(x, 2)


def shared_region(x: torch.Tensor) -> torch.Tensor:
    with use_workspace_lane(1):
        x = block(x)
    x = block(x)
    with use_workspace_lane(1):
        return block(x)


def renamed(text: str) -> str:
    """Node names of each function as v0, v1, ...: Dynamo names the results of regions differently in different versions."""

    def function(match: re.Match[str]) -> str:
        code = match.group()
        for index, name in enumerate(dict.fromkeys(re.findall(r"^    (\w+) = ", code, re.M))):
            code = re.sub(rf"(?<![.'\w]){name}(?![\w'])", f"v{index}", code)
        return code

    return re.sub(r"^def .*\n(    .*\n?)+", function, text, flags=re.M)


def test_shared_region_before_and_after() -> None:
    gm = toys.dynamo_graph(shared_region, torch.rand(3))
    expect(renamed(graph_text(gm)), """\
def forward(self, L_x_ : torch.Tensor):
    v0 = L_x_
    v1 = self.subgraph_0
    v2 = torch.ops.higher_order.invoke_subgraph(v1, 'subgraph_0', v0)
    v3 = v2[0]
    v4 = self.subgraph_0
    v5 = torch.ops.higher_order.invoke_subgraph(v4, 'subgraph_0', v3)
    v6 = v5[0]
    v7 = self.subgraph_0
    v8 = torch.ops.higher_order.invoke_subgraph(v7, 'subgraph_0', v6)
    v9 = v8[0]
    return (v9,)
subgraph_0:
def forward(self, l_x_ : torch._subclasses.fake_tensor.FakeTensor):
    v0 = torch.ops.dsv4_lane_toys.scan.default(l_x_, 1)
    v1 = torch.ops.dsv4_lane_toys.scan.default(v0, 2)
    return (v1,)""")
    assert bind_lanes(gm).cloned == ["subgraph_0_ambient"]
    expect(renamed(graph_text(gm)), """\
def forward(self, L_x_ : torch.Tensor):
    v0 = L_x_
    v1 = self.subgraph_0
    v2 = torch.ops.higher_order.invoke_subgraph(v1, 'subgraph_0', v0)
    v3 = v2[0]
    v4 = self.subgraph_0_ambient
    v5 = torch.ops.higher_order.invoke_subgraph(v4, 'subgraph_0_ambient', v3)
    v6 = v5[0]
    v7 = self.subgraph_0
    v8 = torch.ops.higher_order.invoke_subgraph(v7, 'subgraph_0', v6)
    v9 = v8[0]
    return (v9,)
subgraph_0:
def forward(self, l_x_ : torch._subclasses.fake_tensor.FakeTensor):
    v0 = torch.ops.dsv4_lane_toys.scan.default(l_x_, 1, lane = 1)
    v1 = torch.ops.dsv4_lane_toys.scan.default(v0, 2, lane = 2)
    return (v1,)
subgraph_0_ambient:
def forward(self, l_x_ : torch._subclasses.fake_tensor.FakeTensor):
    v0 = torch.ops.dsv4_lane_toys.scan.default(l_x_, 1)
    v1 = torch.ops.dsv4_lane_toys.scan.default(v0, 2, lane = 2)
    return (v1,)""")


def test_a_second_run_changes_nothing_and_the_graph_is_sound() -> None:
    for step in (two_branches, shared_region):
        gm = toys.dynamo_graph(step, torch.rand(3))
        bind_lanes(gm)
        once = graph_text(gm)
        again = bind_lanes(gm)
        assert graph_text(gm) == once and not again.bound and not again.cloned
        for _, module in fx_utils.modules(gm):
            module.graph.lint()


# Programs (random ones: test_program_campaign.py)


def test_shared_region_is_cloned_for_the_second_lane() -> None:
    assert assert_same_lanes(shared_region, torch.rand(3)).cloned == ["subgraph_0_ambient"]


def test_marks_of_a_body_never_reach_the_callers_nodes() -> None:
    """A body's placeholder shares its metadata with the caller's node that computed the operand."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x = toys.scan(x, 1)
        with use_workspace_lane(1):
            y = torch.cond(x.sum() > 0, lambda x: toys.scan(x, 2), lambda x: toys.scan(x, 3), (x,))
        return x + y

    gm = toys.dynamo_graph(step, torch.rand(3))
    bind_lanes(gm)
    (call,) = passes.find_op_nodes(toys.scan, gm.graph)
    assert fx_utils.lane_mark(call.node) is None and call.argument("lane") == -1
    assert_same_lanes(step, torch.rand(3))


def test_region_whose_ops_all_have_lanes_of_their_own_stays_shared() -> None:
    @torch.compiler.nested_compile_region
    def own(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return toys.scan(x, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            x = own(x)
        return own(own(x))

    assert assert_same_lanes(step, torch.rand(3)).cloned == []


def test_graph_break_inside_a_region_falls_back_to_the_ambient_lane() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x = toys.scan(x, 1)
        with use_workspace_lane(1):
            x = toys.scan(x, 2)
            torch._dynamo.graph_break()
            x = toys.scan(x, 3)
        return toys.scan(x, 4)

    assert_same_lanes(step, torch.rand(3), fullgraph=False)


def test_unmarked_ops_follow_the_lane_of_the_moment_unless_bound() -> None:
    x = torch.rand(3)
    ambient = torch.compile(two_branches, backend=passes.backend("aot_eager"), fullgraph=True)
    bound = torch.compile(two_branches, backend=passes.backend("aot_eager", unmarked=0), fullgraph=True)
    for k in (0, 2):
        with use_workspace_lane(k):
            assert toys.lanes_of(ambient, x)[1] == [(1, k), (2, 1), (3, 1), (4, k)]
            assert toys.lanes_of(bound, x)[1] == [(1, 0), (2, 1), (3, 1), (4, 0)]


def test_mutable_ops_and_grad_mode_under_inductor() -> None:
    """Training graph, both functionalized forms of a mutable op, all lanes right and verified after Inductor's passes."""

    def step(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        toys.fill(x, out[0], 1)
        with use_workspace_lane(1):
            toys.fill(x + 1, out[1], 2)
            y = toys.scan(out[1], 3)
        return (w * y).sum()

    import torch._inductor.config as config

    for v2 in (True, False):
        torch._dynamo.reset()
        w = torch.rand(3, requires_grad=True)
        with config.patch(enable_auto_functionalized_v2=v2):
            assert_same_lanes(step, torch.rand(3), w, torch.zeros(2, 3), backend=passes.backend())
        assert w.grad is None


def test_ops_of_this_package_are_bound() -> None:
    def step(logits: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = dsv4_ops.topk(logits, lengths, 4)
        with use_workspace_lane(1):
            second, _ = dsv4_ops.topk_values(logits, lengths, 4)
        return first, second

    args = (torch.rand(2, 16), torch.tensor([16, 3]))
    gm = toys.dynamo_graph(step, *args)
    assert bind_lanes(gm, unmarked=0).bound == {"dsv4_ops.topk.default@0": 1, "dsv4_ops.topk_values.default@1": 1}
    torch.testing.assert_close(gm(*args), step(*args))


def test_every_op_of_this_package_with_a_lane_can_be_bound() -> None:
    from dsv4_ops import testing

    with_lane = [op for op in testing.ops() if "lane" in {a.name for a in op.overload._schema.arguments}]
    assert {"topk", "topk_values", "sparse_mla_decode"} <= {op.name for op in with_lane}
    for op in with_lane:
        entry = passes.workspace_op(op.overload)
        assert entry is not None and entry.bound is op.overload, f"{op.name}: lane must be declared 'int lane=-1'"


# Marks: everything that we need of torch.fx.traceback.annotate, which PyTorch calls unstable


def marks(step: Callable[..., Any], *args: Any) -> dict[int, int | None]:
    """Lane mark of each scan by its tag, bodies included."""
    found = {}
    for _, module in fx_utils.modules(toys.dynamo_graph(step, *args)):
        for call in passes.find_op_nodes(toys.scan, module.graph):
            found[call.argument("tag")] = fx_utils.lane_mark(call.node)
    return found


def test_marks_nest_and_end() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x = toys.scan(x, 1)
        with use_workspace_lane(1):
            x = toys.scan(x, 2)
            with use_workspace_lane(0):
                x = toys.scan(x, 3)
            for tag in (4, 5):
                x = toys.scan(x, tag)
            try:
                with use_workspace_lane(2):
                    x = toys.scan(x, 6)
                    raise KeyError
            except KeyError:
                x = toys.scan(x, 7)
        return toys.scan(x, 8)

    assert marks(step, torch.rand(3)) == {1: None, 2: 1, 3: 0, 4: 1, 5: 1, 6: 2, 7: 1, 8: None}


def test_marks_reach_bodies() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        def body(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return n + 1, toys.scan(x, 3)

        with use_workspace_lane(1):
            x = torch.cond(x.sum() > 0, lambda x: toys.scan(x, 1), lambda x: toys.scan(x, 2), (x,))
            _, x = torch._higher_order_ops.while_loop(lambda n, x: n < 2, body, (torch.zeros((), dtype=torch.int64), x))
            return torch.utils.checkpoint.checkpoint(lambda x: toys.scan(x, 4), x, use_reentrant=False)

    assert marks(step, torch.rand(3)) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_a_lane_that_dynamo_made_symbolic_is_specialized() -> None:
    programs: list[torch.fx.GraphModule] = []

    def step(x: torch.Tensor, k: int) -> torch.Tensor:
        with use_workspace_lane(k):
            return toys.scan(x, 1)

    compiled = torch.compile(step, backend=toys.capture(programs), dynamic=True, fullgraph=True)
    for k in (0, 1, 2, 1, 0):
        compiled(torch.rand(3), k)
    assert [fx_utils.lane_mark(next(passes.find_op_nodes(toys.scan, gm.graph)).node) for gm in programs] == [0, 1, 2]


def test_entering_a_bad_lane_in_compiled_code_is_an_error() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(16):
            return toys.scan(x, 1)

    with pytest.raises(LaneError, match="between 0 and 15, got 16"):
        torch.compile(step, backend="eager")(torch.rand(3))


# Forms of a call


def call_scan(form: str, x: torch.Tensor) -> torch.Tensor:
    ops = torch.ops.dsv4_lane_toys
    match form:
        case "overload":
            return ops.scan.default(x, 1)
        case "packet":
            return ops.scan(x, 1)
        case "keywords":
            return ops.scan(tag=1, x=x)
        case "ambient given":
            return ops.scan(x, 1, lane=-1)
        case _:
            return ops.scan(x, 1, lane=1)


@pytest.mark.parametrize("form", ["overload", "packet", "keywords", "ambient given", "lane given"])
def test_every_way_to_write_a_call_is_bound(form: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return call_scan(form, x)

    gm = toys.dynamo_graph(step, torch.rand(3))
    bind_lanes(gm)
    (call,) = passes.find_op_nodes(toys.scan, gm.graph)
    assert call.argument("lane") == 1
    assert toys.lanes_of(gm, torch.rand(3))[1] == [(1, 1)]


def test_a_lane_that_contradicts_its_region_is_refused_with_its_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return toys.scan(x, 1, lane=2)

    with pytest.raises(PassError, match=r"scan.default \(\w+ at .*test_passes_lanes.py:\d+, in step\): called with lane=2 inside use_workspace_lane\(1\)"):
        bind_lanes(toys.dynamo_graph(step, torch.rand(3)))


def test_a_computed_lane_is_refused() -> None:
    def step(x: torch.Tensor, k: int) -> torch.Tensor:
        return toys.scan(x, 1, lane=k)

    programs: list[torch.fx.GraphModule] = []
    torch.compile(step, backend=toys.capture(programs), dynamic=True, fullgraph=True)(torch.rand(3), 3)
    with pytest.raises(PassError, match="its lane is computed by the program"):
        bind_lanes(programs[0])


def test_a_shared_region_is_refused_where_it_cannot_be_cloned() -> None:
    with pytest.raises(PassError, match=r"subgraph_0 .* is shared by lane 1 and the ambient lane"):
        bind_lanes(toys.dynamo_graph(shared_region, torch.rand(3)), clone=False)


# Ops of other packages


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("v::f(Tensor x) -> Tensor", "g(Tensor x, *, int lane=-1) -> Tensor"),
        ("v::f.out(Tensor x, *, Tensor(a!) out) -> ()", "g(Tensor x, *, Tensor(a!) out, int lane=-1) -> ()"),
        ("v::f(Tensor x, int[2] k=[1, 2], *, str m=\"a*b\") -> (Tensor, Tensor)", "g(Tensor x, int[2] k=[1, 2], *, str m=\"a*b\", int lane=-1) -> (Tensor, Tensor)"),
        ("v::f() -> Tensor[]", "g(*, int lane=-1) -> Tensor[]"),
    ],
)
def test_shadow_schema(schema: str, expected: str) -> None:
    assert workspace_ops.schema_with_lane(schema, "g") == expected
    torch._C.parse_schema(expected)


def test_registering_twice_gives_the_same_shadow_and_bad_ops_are_refused() -> None:
    assert passes.register_workspace_op(toys.vendor) is toys.SHADOW and passes.register_workspace_op(torch.ops.dsv4_lane_toys.vendor) is toys.SHADOW
    assert str(toys.SHADOW.bound._schema) == "dsv4_ops_lanes::dsv4_lane_toys_vendor(Tensor x, int tag, *, int lane=-1) -> Tensor"
    with pytest.raises(PassError, match="returns an alias"):
        passes.register_workspace_op(torch.ops.aten.view.default)
    with pytest.raises(PassError, match="has overloads default, out"):
        passes.register_workspace_op(torch.ops.dsv4_ops.topk)


def test_what_custom_op_returns_is_no_op() -> None:
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    handles: list[Any] = ["dsv4_lane_refused::scan", torch.library.custom_op("dsv4_lane_refused::scan", scan, mutates_args=())]
    for handle in handles:
        with pytest.raises(PassError, match=r"op must be an op, as torch\.ops\.NAMESPACE\.NAME, got .*dsv4_lane_refused::scan"):
            passes.register_workspace_op(handle)


def test_an_op_that_is_defined_again_is_bound_again() -> None:
    """As in a notebook, where a cell is run twice."""

    def compiled(factor: int, renamed: bool) -> Callable[..., Any]:
        def times(x: torch.Tensor) -> torch.Tensor:
            (scratch,) = toys.MANAGER.get((x.shape, x.dtype), op=f"times {factor}")
            return torch.mul(x, factor, out=scratch).clone()

        def renamed_times(y: torch.Tensor) -> torch.Tensor:
            return times(y)

        torch.library.custom_op("dsv4_lane_again::times", renamed_times if renamed else times, mutates_args=()).register_fake(torch.empty_like)
        passes.register_workspace_op(torch.ops.dsv4_lane_again.times)

        def step(x: torch.Tensor) -> torch.Tensor:
            with use_workspace_lane(1):
                return torch.ops.dsv4_lane_again.times(x)  # type: ignore[no-any-return]

        return torch.compile(step, backend=passes.backend("aot_eager"), fullgraph=True)

    for factor, renamed in ((2, False), (3, False), (4, True), (5, True)):
        toys.MANAGER.uses.clear()
        assert compiled(factor, renamed)(torch.ones(3)).tolist() == [factor] * 3
        assert [(use.op, use.lane) for use in toys.MANAGER.uses] == [(f"times {factor}", 1)]


def test_shadow_op_is_the_original_in_its_lane() -> None:
    x = torch.rand(3)
    torch.library.opcheck(toys.SHADOW.bound, (x, 5), {"lane": 1})
    result, lanes = toys.lanes_of(functools.partial(toys.SHADOW.bound, lane=1), x, 5)
    assert lanes == [(5, 1)] and torch.equal(result, toys.vendor(x, 5))
    with use_workspace_lane(2):
        assert toys.lanes_of(toys.SHADOW.bound, x, 5)[1] == [(5, 2)]


@pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackward")
def test_a_gradient_through_a_shadow_op_is_refused_not_lost() -> None:
    """Autograd would go on with none where the original has a formula."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return toys.vendor(x, 1).sum()

    compiled = torch.compile(loss, backend=passes.backend("aot_eager"), fullgraph=True)
    with pytest.raises(RuntimeError, match=r"vendor.default: a gradient is asked through its call in a workspace lane"):
        compiled(torch.rand(3, requires_grad=True)).backward()
    torch._dynamo.reset()
    with torch.no_grad():
        assert toys.lanes_of(compiled, torch.rand(3, requires_grad=True))[1] == [(1, 1)]


def test_lanes_of_a_backward_graph() -> None:
    """A checkpoint in a lane runs its ops again in the backward graph, in the same lane, whatever is ambient then."""

    def step(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return torch.utils.checkpoint.checkpoint(lambda x: toys.scan(x, 1).tanh(), x, use_reentrant=False)

    x = torch.rand(3, requires_grad=True)
    with toys.logged() as log, use_workspace_lane(2):
        torch.compile(step, backend=passes.backend("aot_eager"), fullgraph=True)(x).sum().backward()
    assert log == [(1, 1), (1, 1)] and x.grad is not None


def test_find_op_nodes_takes_overload_or_packet() -> None:
    gm = toys.dynamo_graph(two_branches, torch.rand(3))
    assert [c.argument("tag") for c in passes.find_op_nodes(torch.ops.dsv4_lane_toys.scan, gm.graph)] == [1, 2, 4]
    assert [c.argument("tag") for c in passes.find_op_nodes(toys.vendor, gm.graph)] == [3]
    with pytest.raises(KeyError, match="has no argument window"):
        next(passes.find_op_nodes(toys.scan, gm.graph)).argument("window")
