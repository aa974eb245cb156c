"""torch.compile and every op: fakes, aliases, recompilations, lanes without context, padding rows; and what Inductor gets wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as config

import dsv4_ops
from dsv4_ops import passes, testing
from dsv4_ops.testing import Op, Sample
from dsv4_ops.workspace import current_lane, use_workspace_lane
from tests import lane_toys as toys

OPS = testing.ops()
EACH = [pytest.param(op, id=op.name) for op in OPS]

VERSION = ".".join(torch.__version__.split(".")[:2])

_toys = torch.library.Library("dsv4_compile_toys", "DEF")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


# Every registered op


def layouts(op: Op, sample: Sample) -> Iterator[Sample]:
    """The same call with inputs laid out otherwise: shifted, transposed in memory, with padded rows, expanded."""

    def shifted(t: torch.Tensor) -> torch.Tensor:
        base = t.new_zeros(t.numel() + 3)
        base[3:] = t.reshape(-1)
        return base[3:].view(t.shape)

    def transposed(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    def padded(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, t[..., :1]], -1)[..., :-1] if t.dim() and t.shape[-1] else t

    def expanded(t: torch.Tensor) -> torch.Tensor:
        return t[:1].expand(t.shape) if t.dim() and t.shape[0] else t

    written = set(op.mutates)
    names = [a.name for a in op.overload._schema.arguments]
    for label, change in (("shifted", shifted), ("transposed", transposed), ("padded rows", padded), ("expanded", expanded)):

        def convert(name: str, value: Any, change: Callable[[torch.Tensor], torch.Tensor] = change) -> Any:
            if isinstance(value, list):
                return [convert(name, item) for item in value]
            return change(value) if isinstance(value, torch.Tensor) and value.dim() and name not in written else value

        args = tuple(convert(name, value) for name, value in zip(names, sample.args, strict=False))
        yield Sample(f"{sample.label}, {label}", args, {k: convert(k, v) for k, v in sample.kwargs.items()})


def refusal(call: Callable[[], Any]) -> tuple[type[Exception], str] | None:
    try:
        call()
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("op", EACH)
def test_case_I01_fakes_never_inherit_the_strides_of_inputs(op: Op) -> None:
    accepted = 0
    for n in (4, 0):
        for sample in layouts(op, op.sized("cpu", n)):
            mine = testing.clone_args(sample)
            refused = refusal(lambda mine=mine: op(*mine.args, **mine.kwargs))
            if refused is not None:  # then the fake must refuse with the same words
                assert refusal(lambda sample=sample: testing.fake_call(sample)(op.overload)) == refused, sample.label
                continue
            testing.check_fake(op.overload, sample)
            for result in testing.outputs(op(*mine.args, **mine.kwargs)):
                assert result.is_contiguous() and result.storage_offset() == 0, sample.label
            accepted += 1
    assert accepted >= 2, "an op that takes no other layout than the dense one says so in its table; this finds none to test"


def _wrong(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[::-1]).t()


def test_case_I03_the_projects_own_checker_finds_wrong_strides_on_cpu() -> None:
    _toys.define("wrong_fake(Tensor x) -> Tensor")
    _toys.impl("wrong_fake", lambda x: x + 1, "CompositeExplicitAutograd")
    torch.library.register_fake("dsv4_compile_toys::wrong_fake", _wrong, lib=_toys)
    op = torch.ops.dsv4_compile_toys.wrong_fake.default
    with pytest.raises(AssertionError, match=r"toy: output 0 of the fake has strides \(1, 3\), the op's has \(4, 1\)"):
        testing.check_fake(op, Sample("toy", (torch.randn(3, 4),)))


@pytest.mark.parametrize(
    ("what", "fake"),
    [
        ("shape", lambda x: x.new_empty(4, 4)),
        ("dtype", lambda x: torch.empty_like(x, dtype=torch.float64)),
        ("storage offset", lambda x: x.new_empty(13)[1:].view(3, 4)),
        ("2 outputs", lambda x: (torch.empty_like(x), torch.empty_like(x))),
    ],
)
def test_checker_finds_every_kind_of_wrong_metadata(what: str, fake: Callable[..., Any]) -> None:
    def op(x: torch.Tensor) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        return fake(x) if isinstance(x, FakeTensor) else x + 1

    with pytest.raises(AssertionError, match=what):
        testing.check_fake(op, Sample("toy", (torch.randn(3, 4),)))


def test_case_I04_every_op_of_the_namespace_is_whole() -> None:
    assert testing.incomplete_ops() == {}
    from tests import test_every_op

    tested = {param.values[0].name for param in test_every_op.LABELLED}  # type: ignore[union-attr]
    assert tested == {op.name for op in OPS}, "each op has entries in the opcheck list"


def test_case_I04_an_op_without_fake_or_kernel_is_noticed() -> None:
    with torch.library._scoped_library("dsv4_ops", "FRAGMENT") as library:
        library.define("forgotten(Tensor(a!) x) -> ()")
        assert testing.incomplete_ops() == {"dsv4_ops::forgotten": ["CPU kernel", "fake", "entry in the registry"]}
        library.impl("forgotten", lambda x: None, "CompositeExplicitAutograd")
        assert testing.incomplete_ops() == {"dsv4_ops::forgotten": ["fake", "entry in the registry"]}
    assert testing.incomplete_ops() == {}


@pytest.mark.parametrize("op", EACH)
def test_case_I14_compiled_results_are_fresh_and_mutating_ops_return_nothing(op: Op) -> None:
    schema = op.overload._schema
    assert all(r.alias_info is None for r in schema.returns) and not (op.mutates and schema.returns)
    compiled = torch.compile(op.__call__, backend="aot_eager", fullgraph=True)
    for n in (3, 0):
        mine = testing.clone_args(op.sized("cpu", n))
        inputs = {leaf.untyped_storage()._cdata for leaf in testing.leaves(mine) if isinstance(leaf, torch.Tensor)}
        results = testing.outputs(compiled(*mine.args, **mine.kwargs))
        assert len(results) == len(schema.returns)
        assert not inputs & {r.untyped_storage()._cdata for r in results}


def test_case_I14_results_are_fresh_when_k_is_the_width() -> None:
    logits, lengths = torch.rand(3, 8), torch.full((3,), 8)
    for results in (testing.outputs(dsv4_ops.topk(logits, lengths, 8)), dsv4_ops.topk_values(logits, lengths, 8), dsv4_ops.topk_merge(logits, torch.arange(24, dtype=torch.int32).view(3, 8), 8)):
        for result in results:
            assert result.data_ptr() != logits.data_ptr() and result.untyped_storage()._cdata != logits.untyped_storage()._cdata


@torch.compiler.nested_compile_region
def functional_region(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return dsv4_ops.kv_cache_gather(cache, slots.flip(0))


@torch.compiler.nested_compile_region
def writing_region(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    dsv4_ops.kv_cache_insert(kv, cache, slots)
    return dsv4_ops.kv_cache_gather(cache, slots.flip(0))


def region_result(step: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    cache = torch.arange(3 * 8 * 512, dtype=torch.float32).view(3, 8, 512)
    result = step(torch.ones(3, 512), cache, torch.tensor([8, 11, 14]))
    return result, cache


def test_case_I14_nested_compiled_regions_take_functional_ops() -> None:
    def step(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        dsv4_ops.kv_cache_insert(kv, cache, slots)
        return functional_region(cache, slots) + functional_region(cache, slots + 1)

    for actual, expected in zip(region_result(torch.compile(step, backend="aot_eager", fullgraph=True)), region_result(step), strict=True):
        assert torch.equal(actual, expected)


NESTED_WRITES_REFUSED = {"2.11": True, "2.13": True, "2.14": False}
"""Whether PyTorch refuses a nested compiled region that mutates an argument by a custom op, by version tried."""


def unless_refused(call: Callable[[], Any]) -> Any:
    """What ``call`` gives, or None where PyTorch refuses it, in the words known, as this version is known to."""
    refused, result = "", None
    try:
        result = call()
    except RuntimeError as error:
        refused = str(error)
    assert bool(refused) == NESTED_WRITES_REFUSED.get(VERSION, bool(refused)), f"changed with torch {torch.__version__}: update NESTED_WRITES_REFUSED. {refused}"
    assert "functionaliz" in refused or not refused, refused
    return result


def test_case_I14_nested_compiled_regions_that_write_a_cache_are_refused_or_right() -> None:
    """Before torch 2.14 insert outside the region: it is not supported. Never silently wrong: either the compile fails or the result is eager's."""

    def step(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return writing_region(kv * 2, cache, slots) + writing_region(kv, cache, slots + 1)

    expected = region_result(step)
    actual = unless_refused(lambda: region_result(torch.compile(step, backend="aot_eager", fullgraph=True)))
    if actual is not None:
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@torch.compiler.nested_compile_region
def writing_region_with_scratch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    toys.fill(x, out, 1)
    toys.vendor_fill(x + out, out, 2)
    return toys.scan(out, 3) + x


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_nested_compiled_regions_that_write_are_refused_or_keep_each_callers_lane(inner: str) -> None:
    """Traced once, with the marks of the first caller: the pass must clone what writes, too."""

    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        with use_workspace_lane(1):
            x = writing_region_with_scratch(x, out)
        x = writing_region_with_scratch(x, out)
        with use_workspace_lane(2):
            return writing_region_with_scratch(x * 2, out)

    x, theirs, mine = torch.rand(3), torch.zeros(3), torch.zeros(3)
    expected, lanes = toys.lanes_of(step, x, theirs)
    with config.patch(force_disable_caches=True):
        found = unless_refused(lambda: toys.lanes_of(torch.compile(step, backend=passes.backend(inner), fullgraph=True), x, mine))
    if found is not None:
        actual, used = found
        assert torch.equal(actual, expected) and torch.equal(mine, theirs) and used == lanes
        assert {lane for _, lane in lanes} == {0, 1, 2}


def chain(seq_lens: torch.Tensor, logits: torch.Tensor, table: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tokens = torch.arange(seq_lens.shape[0], dtype=torch.int32)
    lens = dsv4_ops.mtp_context_lens(seq_lens, 1, 4)
    chosen = dsv4_ops.topk(logits, lens, 4)
    slots, counts = dsv4_ops.global_topk_indices(chosen, tokens, seq_lens > 0, table, block_size=4)
    return slots, counts, dsv4_ops.swiglu(gate_up, limit=10.0)


def test_case_I16_a_chain_compiles_once_and_at_most_once_more_for_small_batches() -> None:
    compilations = 0

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return gm.forward

    compiled = torch.compile(chain, backend=counting, fullgraph=True, dynamic=True)
    seen = []
    for n in (4, 1, 2, 8, 0, 1, 3, 0, 5):
        args = (torch.arange(n, dtype=torch.int32) * 9, torch.rand(n, 32), torch.arange(n * 8, dtype=torch.int32).view(n, 8) + 1, torch.randn(n, 64))
        for actual, expected in zip(compiled(*args), chain(*args), strict=True):
            torch.testing.assert_close(actual, expected)
        seen.append(compilations)
    assert seen[0] == seen[2] - (seen[1] - seen[0]) == 1, "2 rows are served by the graph of 4"
    assert seen[-1] <= 3 and seen[4:] == [seen[4]] * 5, "one graph, and at most one each for 1 and 0 rows"


# Lanes without context, padding rows


@pytest.mark.parametrize("op", EACH)
def test_case_E16_every_op_runs_without_a_context_in_fresh_threads_and_after_an_exception(op: Op) -> None:
    sample = op.sized("cpu", 3)

    def call() -> tuple[torch.Tensor, ...]:
        mine = testing.clone_args(sample)
        return testing.outputs(op(*mine.args, **mine.kwargs))

    expected = call()
    results: dict[str, Any] = {}

    def worker(name: str, lane: int | None) -> None:
        with torch.no_grad():
            if lane is None:
                results[name] = (current_lane(), call())
            else:
                with use_workspace_lane(lane):
                    results[name] = (current_lane(), call())

    with use_workspace_lane(1):
        threads = [threading.Thread(target=worker, args=a) for a in (("fresh", None), ("target", 0), ("draft", 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with pytest.raises(KeyError), use_workspace_lane(1):
        raise KeyError(call())
    results["after"] = (current_lane(), call())
    assert {name: lane for name, (lane, _) in results.items()} == {"fresh": 0, "target": 0, "draft": 1, "after": 0}
    for name, (_, got) in results.items():
        testing.assert_same(got, expected, f"{op.name}, {name}")


def padded_step(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, logits: torch.Tensor, lens: torch.Tensor, valid: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Insert, select, translate, attend, activate: a step on a bucket whose last rows are padding."""
    tokens = torch.zeros(kv.shape[0], dtype=torch.int32)
    dsv4_ops.kv_cache_insert(kv, cache, slots)
    chosen = dsv4_ops.topk(logits, lens, 4)
    indices, counts = dsv4_ops.global_topk_indices(chosen, tokens, valid, table, block_size=8)
    out, lse = dsv4_ops.sparse_mla_decode(kv[:, None].expand(-1, 2, -1).contiguous(), cache, indices, counts, scale=0.04)
    return chosen, indices, counts, out, lse, dsv4_ops.swiglu(kv, limit=10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_case_E15_garbage_in_padding_rows_changes_no_live_row_and_writes_nothing(dtype: torch.dtype) -> None:
    live, bucket = 5, 8
    kv, logits = torch.randn(bucket, 512), torch.randn(bucket, 24)
    slots = torch.tensor([8, 9, 10, 17, 18, -1, -1, -1])
    lens = torch.tensor([16, 9, 3, 1, 12, 0, 0, 0])
    valid = torch.arange(bucket) < live
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    step = torch.compile(padded_step, backend=passes.backend("aot_eager", unmarked=0), fullgraph=True)
    runs = []
    for poison in (0.0, float("nan"), float("inf"), 1e30):
        kv[live:] = poison
        logits[live:] = poison
        cache = dsv4_ops.new_kv_cache(3, 8, dtype=dtype)
        runs.append([*step(kv, cache, slots, logits, lens, valid, table), cache])
    first = runs[0]
    for run in runs[1:]:
        for a, b in zip(run[:-1], first[:-1], strict=True):
            assert torch.equal(a[:live], b[:live])
        assert torch.equal(run[-1], first[-1]), "a padding row was written"
        chosen, indices, counts, out, lse, _ = (t[live:] for t in run[:-1])
        assert (chosen == -1).all() and (indices == -1).all() and (counts == 0).all() and (out == 0).all() and (lse == -torch.inf).all()
    assert first[-1].view(torch.uint8).any() and first[3][:live].isfinite().all()


# What Inductor gets wrong with mutable ops. Kept as tests so that the version that repairs it shows.

_same_memory: list[bool] = []


def _write(x: torch.Tensor, out: torch.Tensor) -> None:
    _same_memory.append(x.data_ptr() == out.data_ptr())
    out.copy_(x.flip(0) + 1)


_toys.define("write(Tensor x, Tensor(a!) out) -> ()")
_toys.impl("write", _write, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4_compile_toys::write", lambda x, out: None, lib=_toys)
_toys.define("written(Tensor x) -> Tensor")
_toys.impl("written", lambda x: x.flip(0) + 1, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4_compile_toys::written", lambda x: torch.empty_like(x), lib=_toys)
write, written = torch.ops.dsv4_compile_toys.write, torch.ops.dsv4_compile_toys.written

SEEN_WRONG = {
    "late read": {"2.11": True, "2.13": True, "2.14": True},
    "lost clone": {"2.11": True, "2.13": True, "2.14": True},
    "symbolic offset": {"2.11": True, "2.13": True, "2.14": True},
}
"""Whether the fault was there, by version of PyTorch on which this very test ran. Update it when a version repairs the fault."""


def record(fault: str, wrong: bool) -> None:
    known = SEEN_WRONG[fault].get(VERSION)
    if known is None:
        pytest.skip(f"{fault}: not recorded for torch {VERSION}, where it is {'there' if wrong else 'gone'}: add it to SEEN_WRONG")
    assert wrong == known, f"{fault} is {'there' if wrong else 'repaired'} with torch {torch.__version__}: update SEEN_WRONG and the pages that warn of it"


def late_read(o: torch.Tensor) -> torch.Tensor:
    y = o * 2
    write(y, o)
    return o + y


def late_read_functional(o: torch.Tensor) -> torch.Tensor:
    y = o * 2
    return written(y) + y


def differs(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> bool:
    expected = function(*(a.clone() for a in args))
    with config.patch(force_disable_caches=True):
        actual = torch.compile(function, fullgraph=True)(*(a.clone() for a in args))
    return not torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_known_fault_of_inductor_a_pointwise_result_is_computed_again_after_its_input_was_overwritten() -> None:
    """``y`` is passed to the op that overwrites what ``y`` was computed from, then fused into a later kernel that reads the new contents."""
    record("late read", differs(late_read, torch.rand(4, 512)))
    assert not differs(late_read_functional, torch.rand(4, 512)), "functional ops are not affected"


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_known_fault_of_inductor_the_clone_that_protects_an_input_is_dropped() -> None:
    """An op that reads its input after it began to write its output would see its own output."""

    def lost_clone(x: torch.Tensor) -> torch.Tensor:
        v = x * 2
        o = v.clone()
        write(v, o)
        return o

    _same_memory.clear()
    with config.patch(force_disable_caches=True):
        torch.compile(lost_clone, fullgraph=True)(torch.rand(64))
    record("lost clone", _same_memory == [True])


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_known_fault_of_inductor_a_view_at_a_symbolic_offset_is_written_at_offset_zero() -> None:
    """A mutable op on ``cache[2]``, taken inside a program with dynamic shapes, writes ``cache[0]``. Take such views outside."""

    def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        write(x, cache[2])
        return x + 1

    def rows(dynamic: bool, v2: bool) -> list[bool]:
        torch._dynamo.reset()
        cache = torch.zeros(3, 4)
        with config.patch(force_disable_caches=True, enable_auto_functionalized_v2=v2):
            torch.compile(step, fullgraph=True, dynamic=dynamic)(torch.ones(4), cache)
        return cache.any(1).tolist()

    right, wrong = [False, False, True], [True, False, False]
    found = rows(dynamic=True, v2=True)
    assert found in (right, wrong)
    record("symbolic offset", found == wrong)
    assert rows(dynamic=False, v2=True) == rows(dynamic=True, v2=False) == right


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_our_functional_ops_and_insert_then_gather_are_not_affected() -> None:
    """The same shapes of program as the faults above, with this package's ops; a cache is read through ops, never by plain indexing."""

    def functional(x: torch.Tensor) -> torch.Tensor:
        o = dsv4_ops.swiglu(x)
        y = torch.cat([o, o], 1) * 2
        return dsv4_ops.swiglu(y) + y[:, :256]

    def insert_gather(kv: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(8, 12)
        dsv4_ops.kv_cache_insert(kv, cache, slots)
        y = dsv4_ops.kv_cache_gather(cache, slots) * 2
        dsv4_ops.kv_cache_insert(y.flip(0), cache, slots)
        return dsv4_ops.kv_cache_gather(cache, slots) + y

    assert not differs(functional, torch.randn(4, 512))
    assert not differs(insert_gather, torch.randn(4, 512), torch.zeros(3, 8, 512))
