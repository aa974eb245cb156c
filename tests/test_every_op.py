"""What every op owes by construction: the registry gives the ops, each op gives its own inputs.

Nothing here names an op. A new op is tested the moment it is registered, and cannot be registered without its inputs
(tests/test_registry.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.testing import Op, Sample

OPS = testing.ops()
LABELLED = [pytest.param(op, i, id=f"{op.name}-{sample.label.replace(' ', '_')}") for op in OPS for i, sample in enumerate(op.samples("cpu"))]
BAD = [pytest.param(op, i, id=f"{op.name}-{bad.label.replace(' ', '_')}") for op in OPS for i, bad in enumerate(op.bad_inputs("cpu"))]
NO_GPU = [pytest.param(None, 0, marks=pytest.mark.skip(reason="no CUDA device"))]
REPLAYED = [p for p in LABELLED if p.values[0].graph_safe] if torch.cuda.is_available() else NO_GPU  # type: ignore[union-attr]
EACH = [pytest.param(op, id=op.name) for op in OPS]


def nth(op: Op, index: int, device: str, seed: int = 0) -> Sample:
    return list(op.samples(device, seed))[index]


def run(function: Any, sample: Sample) -> tuple[tuple[torch.Tensor, ...], Sample]:
    """Results, and the call's own tensors after it (they show mutations)."""
    mine = testing.clone_args(sample)
    return testing.outputs(function(*mine.args, **mine.kwargs)), mine


def mutated(op: Op, sample: Sample) -> list[torch.Tensor]:
    named = dict(zip((a.name for a in op.overload._schema.arguments), sample.args, strict=False)) | sample.kwargs
    return [named[name] for name in op.mutates]


@pytest.mark.parametrize(("op", "index"), LABELLED)
def test_matches_its_reference_with_poisoned_outputs(op: Op, index: int, device: str) -> None:
    sample = nth(op, index, device)
    expected, after = run(op.reference, sample)
    with testing.poisoned():
        actual, mine = run(op, sample)
    testing.assert_same(actual, expected, sample.label)
    testing.assert_same(mutated(op, mine), mutated(op, after), sample.label + " (mutated arguments)")
    pairs = zip(testing.leaves(mine), testing.leaves(sample), strict=True)
    untouched = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and not any(a is m for m in mutated(op, mine))]
    for a, b in untouched:
        assert torch.equal(torch.nan_to_num(a) if a.is_floating_point() else a, torch.nan_to_num(b) if b.is_floating_point() else b), f"{sample.label}: an input changed"


@pytest.mark.parametrize(("op", "index"), LABELLED)
def test_same_bits_twice(op: Op, index: int, device: str) -> None:
    sample = nth(op, index, device)
    first, _ = run(op, sample)
    second, _ = run(op, sample)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.view(torch.uint8) if a.dim() and a.numel() else a, b.view(torch.uint8) if b.dim() and b.numel() else b)


@pytest.mark.parametrize(("op", "index"), LABELLED)
def test_results_never_alias_inputs(op: Op, index: int) -> None:
    sample = nth(op, index, "cpu")
    results, mine = run(op, sample)
    for result in results:
        for value in testing.leaves(mine):
            if isinstance(value, torch.Tensor):
                assert result.untyped_storage()._cdata != value.untyped_storage()._cdata


@pytest.mark.parametrize(("op", "index"), LABELLED)
def test_opcheck(op: Op, index: int, device: str) -> None:
    sample = testing.clone_args(nth(op, index, device))
    torch.library.opcheck(op.overload, sample.args, sample.kwargs)


@pytest.mark.parametrize(("op", "index"), LABELLED)
def test_fake_has_the_metadata_of_the_real_op(op: Op, index: int, device: str) -> None:
    """opcheck has skipped strides on CPU in some versions of PyTorch, so they are compared here."""
    testing.check_fake(op.overload, nth(op, index, device))


@pytest.mark.parametrize("row_pad", [0, 3])
@pytest.mark.parametrize(("op", "index"), [p for p in LABELLED if p.values[0].out_names])  # type: ignore[union-attr]
def test_out_form_writes_its_buffer_and_nothing_else(op: Op, index: int, row_pad: int, device: str) -> None:
    sample = nth(op, index, device)
    expected, _ = run(op, sample)
    guarded = testing.canaries(expected, row_pad=row_pad)
    op.out_overload(*sample.args, **sample.kwargs, **dict(zip(op.out_names, (c.view for c in guarded), strict=True)))
    for canary, want in zip(guarded, expected, strict=True):
        canary.check()
        torch.testing.assert_close(canary.view, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", [p for p in EACH if p.values[0].out_names])  # type: ignore[union-attr]
def test_out_form_refuses_wrong_buffers(op: Op) -> None:
    sample = op.sized("cpu", 4)
    expected, _ = run(op, sample)
    first = op.out_names[0]
    good = {n: torch.empty_like(e) for n, e in zip(op.out_names, expected, strict=True)}
    for wrong, text in ((expected[0].new_empty((*expected[0].shape[:-1], expected[0].shape[-1] + 1)), "of shape"), (expected[0].to(torch.float16), "must be")):
        with pytest.raises(ValueError, match=text):
            op.out_overload(*sample.args, **sample.kwargs, **(good | {first: wrong}))


@pytest.mark.parametrize(("op", "index"), BAD)
def test_bad_input_is_refused(op: Op, index: int, device: str) -> None:
    testing.check_bad_input(op, list(op.bad_inputs(device))[index])


@pytest.mark.parametrize(("op", "index"), BAD)
def test_bad_input_is_refused_when_traced(op: Op, index: int) -> None:
    """The fake runs the same check: a bad shape fails at trace time, with the same text."""
    bad = list(op.bad_inputs("cpu"))[index]
    call = testing.fake_call(Sample(bad.label, bad.args, bad.kwargs))
    testing.check_bad_input(lambda *args, **kwargs: call(op.overload), bad)


@pytest.mark.parametrize("op", EACH)
def test_requires_grad_is_refused(op: Op) -> None:
    sample = testing.clone_args(op.sized("cpu", 2))
    floats = [i for i, a in enumerate(sample.args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    if not floats:
        return  # no floating-point input: nothing can require grad
    args = tuple(a.clone().requires_grad_() if i == floats[0] else a for i, a in enumerate(sample.args))
    for way in (op, op.overload):  # torch.ops called directly passes no Python check where the kernel is C++
        with pytest.raises(RuntimeError, match="inference only"):
            way(*args, **sample.kwargs)
        with torch.no_grad():
            way(*args, **sample.kwargs)


@pytest.mark.parametrize("op", EACH)
def test_one_graph_for_all_batch_sizes(op: Op) -> None:
    """fullgraph, dynamic: sizes 2 and up share one compilation; 1 and 0 may add one each, never more."""
    torch._dynamo.reset()
    compiled_graphs = 0

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compiled_graphs
        compiled_graphs += 1
        return gm.forward

    function = torch.compile(op.__call__, backend=counting, fullgraph=True, dynamic=True)
    for n in (4, 2, 3, 8, 33):
        sample = op.sized("cpu", n, seed=n)
        expected, after = run(op, sample)
        actual, mine = run(function, sample)
        testing.assert_same(actual, expected, f"{op.name} at {n}")
        testing.assert_same(mutated(op, mine), mutated(op, after), f"{op.name} at {n}")
    assert compiled_graphs == 1
    for n in (1, 0, 5, 1, 0):
        sample = op.sized("cpu", n, seed=n)
        expected, _ = run(op, sample)
        actual, _ = run(function, sample)
        testing.assert_same(actual, expected, f"{op.name} at {n}")
    assert compiled_graphs <= 3


@pytest.mark.parametrize("op", EACH)
def test_row_does_not_depend_on_seed_of_labels(op: Op) -> None:
    """Another seed gives other values of the same shapes: what capture and replay tests rely on."""
    first, second = list(op.samples("cpu", 0)), list(op.samples("cpu", 1))
    assert [s.label for s in first] == [s.label for s in second]
    assert len({s.label for s in first}) == len(first), "labels must be unique"
    different = False
    for a, b in zip(first, second, strict=True):
        for x, y in zip(testing.leaves(a), testing.leaves(b), strict=True):
            if isinstance(x, torch.Tensor):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype), a.label
                different |= not torch.equal(x, y)
            else:
                assert x == y or isinstance(x, float), a.label
    assert different, "seed changes nothing"


@pytest.mark.parametrize(("op", "index"), REPLAYED)
def test_graph_replay_with_changed_inputs(op: Op, index: int) -> None:
    static = testing.clone_args(nth(op, index, "cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are made there
    with torch.cuda.stream(stream):
        op(*static.args, **static.kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = testing.outputs(op(*static.args, **static.kwargs))
    for seed in (1, 2):
        changed = nth(op, index, "cuda", seed)
        for mine, new in zip(testing.leaves(static), testing.leaves(changed), strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(new)
        for result in results:
            result.view(torch.uint8).fill_(0x7B) if result.numel() and result.dim() else None
        graph.replay()
        torch.cuda.synchronize()
        expected, after = run(op.reference, changed)
        testing.assert_same(results, expected, f"{changed.label}, seed {seed}")
        testing.assert_same(mutated(op, static), mutated(op, after), f"{changed.label}, seed {seed} (mutated)")
