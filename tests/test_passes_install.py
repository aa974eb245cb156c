"""Identity, caching and installation of the passes: nothing stale, nothing dropped, nothing left behind."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch._inductor import custom_graph_pass
from torch._inductor.compile_fx import compile_fx

import dsv4_ops
from dsv4_ops import passes
from dsv4_ops.errors import PassError
from dsv4_ops.passes import BindLanes, LanePass, VerifyLanes, bind_lanes, chain, graph_text, install, lanes, marks_digest, with_marks
from dsv4_ops.workspace import use_workspace_lane
from tests import lane_toys as toys

SLOT = "post_grad_custom_post_pass"
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def step(x: torch.Tensor) -> torch.Tensor:
    x = toys.scan(x, 1)
    with use_workspace_lane(1):
        return toys.scan(x, 2)


class Counting(custom_graph_pass.CustomGraphPass):
    """Another library's pass."""

    def __init__(self, identity: Any = "counting") -> None:
        self.identity, self.calls = identity, 0

    def uuid(self) -> Any:
        return self.identity

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1


# Identity


class Baked(LanePass):
    """A pass with settings of the kinds that reports name."""

    def __init__(self, **settings: int) -> None:
        self.settings = settings

    def config(self) -> dict[str, Any]:
        return dict(self.settings)

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Nothing: only its identity is looked at."""


def test_case_I09_uuid_contains_every_setting_the_source_and_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids: dict[str, Any] = {}
    for ambient in ("allow", "unmarked", "refuse"):
        uuids[f"verify {ambient}"] = VerifyLanes(ambient).uuid()
    one, two = (toys.dynamo_graph(f, torch.rand(3)) for f in (step, lambda x: toys.scan(toys.scan(x, 1), 2)))
    for (name, gm), unmarked in itertools.product((("marked", one), ("plain", two)), (None, 0, 1)):
        with lanes._marks_of(gm):
            uuids[f"bind {name} {unmarked}"] = BindLanes(unmarked).uuid()
            assert BindLanes(unmarked).uuid() == uuids[f"bind {name} {unmarked}"]
    for settings in ({}, {"rank": 0}, {"rank": 1}, {"window": 128}, {"window": 192}, {"next_n": 1}, {"next_n": 2}):
        uuids[f"base {settings}"] = Baked(**settings).uuid()
    assert None not in uuids.values() and len(set(uuids.values())) == len(uuids)

    source = tmp_path / "extra.py"
    monkeypatch.setattr(Baked, "files", (source,))
    edited = []
    for text in ("x = 1\n", "x = 2\n"):
        source.write_text(text)
        edited.append(Baked().uuid())
    before = VerifyLanes().uuid()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert len({*edited, uuids["base {}"]}) == 3 and VerifyLanes().uuid() != before


def test_case_I09_uuid_covers_the_files_that_decide_the_output() -> None:
    for single, needed in ((VerifyLanes(), {"verify.py", "lanes.py"}), (BindLanes(), {"lanes.py"})):
        names = {Path(sys.modules[type(single).__module__].__file__ or "").name, *(path.name for path in single.files)}
        assert needed | {"workspace_ops.py", "lane_context.py"} <= names and all(path.is_file() for path in single.files)


def test_case_I09_uuid_is_equal_in_another_process() -> None:
    code = "from dsv4_ops.passes import VerifyLanes; print(VerifyLanes().uuid())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"})
    assert other.stdout.strip() == VerifyLanes().uuid()


def test_with_marks_takes_a_backend_by_its_name() -> None:
    with install(BindLanes(), VerifyLanes()):
        compiled = torch.compile(step, backend=with_marks("inductor"), fullgraph=True)
        assert toys.lanes_of(compiled, torch.rand(3))[1] == [(1, 0), (2, 1)]
    with pytest.raises(PassError, match=r"with_marks: there is no backend 'indcutor'; torch.compile knows .*inductor"):
        with_marks("indcutor")
    with pytest.raises(PassError, match="with_marks: inner must be a backend or the name of one, got 3"):
        with_marks(3)  # type: ignore[arg-type]


def test_a_backend_that_was_not_called_says_so() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"Call it: torch\.compile\(\.\.\., backend=dsv4_ops\.passes\.backend\(\)\)") as caught:
        torch.compile(torch.sin, backend=passes.backend)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, PassError)


def test_bind_pass_turns_caching_off_where_it_does_not_know_the_marks() -> None:
    assert BindLanes().uuid() is None and chain(Counting(), BindLanes()).uuid() is None
    seen: list[Any] = []

    def inner(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(BindLanes().uuid())
        return gm.forward

    torch.compile(step, backend=with_marks(inner))(torch.rand(3))
    assert seen[0] is not None and BindLanes().uuid() is None


def test_marks_digest_depends_on_lanes_only() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        x = toys.scan(x, 1)
        with use_workspace_lane(2):
            return toys.scan(x, 2)

    first, again, changed = (marks_digest(toys.dynamo_graph(f, torch.rand(3))) for f in (step, step, other))
    assert first == again != changed


# Slots


def test_case_I10_the_slot_is_chained_and_restored() -> None:
    counting, mine = Counting(), VerifyLanes()
    ran = []
    mine.check = lambda gm: ran.append(1) or 0  # type: ignore[method-assign]
    with config.patch({SLOT: counting, "force_disable_caches": True}):
        with install(mine):
            assert getattr(config, SLOT).uuid() == ("counting", mine.uuid())
            torch.compile(lambda x: toys.scan(x, 1))(torch.rand(3))
        assert (counting.calls, len(ran)) == (1, 1)
        assert getattr(config, SLOT) is counting
        torch._dynamo.reset()
        torch.compile(lambda x: toys.scan(x, 2))(torch.rand(3))
        assert (counting.calls, len(ran)) == (2, 1)
        with pytest.raises(KeyError), install(mine):
            raise KeyError
        assert getattr(config, SLOT) is counting
    assert getattr(config, SLOT) is None


def test_case_I10_the_backend_keeps_what_is_in_the_slot_and_in_the_options() -> None:
    in_slot, in_options = Counting(), Counting("options")
    with config.patch({SLOT: in_slot, "force_disable_caches": True}):
        torch.compile(step, backend=passes.backend(), fullgraph=True)(torch.rand(3))
        torch._dynamo.reset()
        torch.compile(step, backend=passes.backend(options={SLOT: in_options}), fullgraph=True)(torch.rand(3))
        assert getattr(config, SLOT) is in_slot
    assert (in_slot.calls, in_options.calls) == (1, 1)


def test_case_I10_a_failing_compile_restores_the_slot() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            return toys.scan(x, 1, lane=0)

    counting = Counting()
    with config.patch({SLOT: counting}):
        with pytest.raises(RuntimeError, match=r"called with lane=0 inside use_workspace_lane\(1\)"):
            torch.compile(wrong, backend=passes.backend())(torch.rand(3))
        assert getattr(config, SLOT) is counting


def test_chain_combines_any_kind_of_slot() -> None:
    a, b, c = Counting("a"), Counting("b"), Counting("c")
    assert chain(None, a) is a
    assert chain(a, a) is a
    assert chain([a, b], c).passes == chain(chain(a, b), c).passes == (a, b, c)
    assert chain((a, b), b, c).uuid() == ("a", "b", "c")
    plain: Callable[..., None] = lambda graph: None  # noqa: E731
    assert chain(plain, a).uuid() is None and chain(Counting(None), a).uuid() is None
    with pytest.raises(PassError, match="slot must be one of post_grad_custom_post_pass"), install(a, slot="pre_grad_custom_pass"):
        raise AssertionError("entered")


@pytest.mark.parametrize("kind", ["callable", "list", "pass", "chain"])
def test_whatever_is_in_the_global_slot_runs_beside_ours(kind: str) -> None:
    """Through both doors, in a real compile; after an exception the slot holds the same object."""
    calls: list[str] = []
    first, second = Counting("first"), Counting("second")
    slot: Any = {"callable": lambda graph: calls.append("callable"), "list": [first, second], "pass": first, "chain": chain(first, second)}[kind]

    def ran() -> int:
        return len(calls) + first.calls + second.calls

    parts = 2 if kind in ("list", "chain") else 1
    with config.patch({SLOT: slot, "force_disable_caches": True}):
        for number, (backend, ours) in enumerate([(passes.backend(), ()), (with_marks(compile_fx), (BindLanes(), VerifyLanes()))], start=1):
            torch._dynamo.reset()
            with install(*ours):
                assert toys.lanes_of(torch.compile(step, backend=backend, fullgraph=True), torch.rand(3))[1] == [(1, 0), (2, 1)]
            assert ran() == parts * number
            assert getattr(config, SLOT) is slot
        with pytest.raises(KeyError), install(VerifyLanes()):
            raise KeyError
        assert getattr(config, SLOT) is slot


def test_chain_tells_a_part_that_asks_whether_it_is_inference() -> None:
    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if aware is None:
        return  # this PyTorch has no such passes
    told: list[Any] = []

    class Asks(aware):  # type: ignore[misc, valid-type]
        def uuid(self) -> Any:
            return "asks"

        def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
            told.append(is_inference)

    other = Counting()
    combined = chain(Asks(), other)
    assert isinstance(combined, aware)
    with config.patch({SLOT: combined, "force_disable_caches": True}), torch.no_grad():
        torch.compile(lambda x: toys.scan(x, 3))(torch.rand(3))
    assert told == [True] and other.calls == 1


# Both functionalized forms


def fill_whole(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    with use_workspace_lane(1):
        toys.fill(x, out, 1)
    return out + 1


def vendor_whole(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    with use_workspace_lane(1):
        toys.vendor_fill(x, out, 1)
    return out + 1


def fill_view(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    with use_workspace_lane(1):
        toys.fill(x, out.view(3), 1)
    return out + 1


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("function", [fill_whole, fill_view, vendor_whole])
def test_case_I12_the_post_grad_pass_binds_both_functionalized_forms(function: Callable[..., Any], v2: bool) -> None:
    def arguments() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(3.0), torch.zeros(1, 3) if function is fill_view else torch.zeros(3)

    expected_args, args = arguments(), arguments()
    expected, eager = toys.lanes_of(function, *expected_args)
    binder = BindLanes()
    with config.patch(enable_auto_functionalized_v2=v2), install(binder, VerifyLanes()):
        actual, compiled = toys.lanes_of(torch.compile(function, fullgraph=True), *args)
    name = "dsv4_ops_lanes.dsv4_lane_toys_vendor_fill" if function is vendor_whole else "dsv4_lane_toys.fill"
    assert binder.last is not None and binder.last.bound == {f"{name}.default@1": 1}
    assert compiled == eager == [(1, 1)]
    assert torch.equal(actual, expected) and torch.equal(args[1], expected_args[1])


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return toys.scan(x, 1)


@pytest.mark.parametrize("first", [1, None])
def test_a_region_shared_by_two_lanes_in_the_slot(first: int | None) -> None:
    """Inductor runs the slot on the region first, without its callers, and the region has the mark of the caller that was traced first."""

    def shared(x: torch.Tensor) -> torch.Tensor:
        if first is None:
            x = region(x)
        with use_workspace_lane(1):
            x = region(x)
        return region(x) if first == 1 else x

    with config.patch(force_disable_caches=True), install(BindLanes()):
        with pytest.raises(RuntimeError, match=r"is shared by .* so its ops cannot be bound"):
            torch.compile(shared, fullgraph=True)(torch.rand(3))
        torch._dynamo.reset()
        with install(VerifyLanes()):
            assert toys.lanes_of(torch.compile(shared, backend=with_marks(compile_fx), fullgraph=True), torch.rand(3))[1] == [(1, 0), (1, 1)]


# Effects


def decode(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, logits: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor, table: torch.Tensor) -> Any:
    dsv4_ops.kv_cache_insert(kv, cache, slots)
    with use_workspace_lane(1):
        chosen = dsv4_ops.topk(logits, lengths, 4)
        return dsv4_ops.global_topk_indices(chosen, tokens, valid, table, block_size=8)


def decode_arguments() -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(2, 512),
        torch.zeros(3, 8, 512),
        torch.tensor([8, 17]),
        torch.randn(2, 16),
        torch.tensor([16, 9]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([True, True]),
        torch.tensor([[1, 2], [2, 1]], dtype=torch.int32),
    )


def run_pass(name: str, gm: torch.fx.GraphModule) -> None:
    {"bind": lambda: BindLanes()(gm.graph), "verify": lambda: VerifyLanes("allow")(gm.graph)}[name]()


@pytest.mark.parametrize("order", [["bind"], ["verify"], ["bind", "verify"], ["verify", "bind"]])
def test_case_I13_passes_remove_and_reorder_nothing(order: Sequence[str]) -> None:
    args = decode_arguments()
    gm = toys.dynamo_graph(decode, *args)
    names = [node.name for node in gm.graph.nodes]
    insert = torch.ops.dsv4_ops.kv_cache_insert.default
    (before,) = passes.find_op_nodes(insert, gm.graph)
    assert not before.node.users
    for name in order:
        run_pass(name, gm)
    gm.graph.lint()
    assert [node.name for node in gm.graph.nodes] == names
    assert [call.node for call in passes.find_op_nodes(insert, gm.graph)] == [before.node]
    once = graph_text(gm)
    for name in order:
        run_pass(name, gm)
    assert graph_text(gm) == once
    fresh = decode_arguments()
    reference = decode_arguments()
    for mine, other in zip(fresh, reference, strict=True):
        mine.copy_(other)
    gm(*fresh)
    decode(*reference)
    assert torch.equal(fresh[1], reference[1]) and fresh[1].any()


def test_case_I13_insert_without_users_still_happens_when_compiled() -> None:
    mine, other = decode_arguments(), decode_arguments()
    for a, b in zip(mine, other, strict=True):
        a.copy_(b)
    expected = decode(*other)
    actual = torch.compile(decode, backend=passes.backend(), fullgraph=True)(*mine)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(mine[1], other[1]) and mine[1].any()


# Two processes, one cache

PROCESS = """
import json, sys, torch
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from dsv4_ops import passes
from dsv4_ops.workspace import use_workspace_lane
from tests import lane_toys as toys

lane = int(sys.argv[1])

def step(x):
    with use_workspace_lane(lane):
        return toys.scan(x, 1)

for backend, slot in ((passes.backend(), ()), (passes.with_marks(compile_fx), (passes.BindLanes(), passes.VerifyLanes()))):
    torch._dynamo.reset()
    counters.clear()
    with passes.install(*slot):
        _, lanes = toys.lanes_of(torch.compile(step, backend=backend, fullgraph=True), torch.rand(3))
    print(json.dumps([lanes, counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def test_a_second_process_with_another_lane_never_runs_the_first_ones_code(tmp_path: Path) -> None:
    """Node metadata is in no cache key: baked lanes, or the digest in the uuid, keep artifacts apart, and equal programs still hit."""
    results = []
    for lane in (1, 2, 1):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
        done = subprocess.run([sys.executable, "-c", PROCESS, str(lane)], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        results.append([json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")])
    for door in (0, 1):
        first, second, third = (result[door] for result in results)
        assert (first[0], second[0], third[0]) == ([[1, 1]], [[1, 2]], [[1, 1]])
        assert first[1] == second[1] == 0 and third[1] > 0


def test_importing_the_package_does_not_import_the_passes() -> None:
    code = "import sys, dsv4_ops; print([m for m in sys.modules if m.startswith(('dsv4_ops.passes', 'torch._inductor', 'torch._dynamo'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "[]"
    done = subprocess.run([sys.executable, "-c", "import passes"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "import dsv4_ops.passes, not the checkout's passes/ folder" in done.stderr


def test_bind_lanes_is_the_same_through_every_door() -> None:
    _, eager = toys.lanes_of(step, torch.rand(3))
    doors: list[Any] = [passes.backend(), passes.backend("aot_eager"), passes.backend(toys.capture([]))]
    for door in doors:
        torch._dynamo.reset()
        assert toys.lanes_of(torch.compile(step, backend=door, fullgraph=True), torch.rand(3))[1] == eager
    gm = toys.dynamo_graph(step, torch.rand(3))
    bind_lanes(gm)
    assert toys.lanes_of(gm, torch.rand(3))[1] == eager
