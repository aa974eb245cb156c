"""Triton kernels on a GPU: what they compile in service, and tensors past 2**31 elements.

Equality on samples, capture and replay with changed inputs: test_every_op.py and test_triton.py, for every op. Random calls
of the index builders: test_index_draws.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.errors import ArgumentError
from dsv4_ops.testing import Op, Sample
from tests.test_triton import BY_NAME, EACH, needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FAR = 2**31  # elements
COUNTS = (1, 2, 15, 16, 17, 32)


@pytest.mark.parametrize("op", EACH)
def test_counts_compile_nothing_new(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler itself is asked: no count of tokens or requests leads to it, once an op has run."""
    from triton.runtime.jit import JITFunction

    compiled: list[str] = []
    compile_one = JITFunction._do_compile

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(self.__name__)
        return compile_one(self, *args, **kwargs)

    def call(sample: Sample) -> None:
        op.triton(*sample.args, **sample.kwargs)  # type: ignore[misc]

    monkeypatch.setattr(JITFunction, "_do_compile", counting)
    call(op.sized("cuda", 3))
    compiled.clear()
    for count in COUNTS:
        call(op.sized("cuda", count))
    torch.cuda.synchronize()
    assert compiled == []


def spread_out(value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The same values, rows so far apart in ``memory`` (bytes) that the last stands past 2**31 elements."""
    inner = value[0].contiguous().stride() if value.dim() > 1 else ()
    row = (FAR // (value.shape[0] - 1) // 64 + 1) * 64
    return memory.view(value.dtype).as_strided(value.shape, (row, *inner)).copy_(value)


def results(op: Op, named: dict[str, Any]) -> list[torch.Tensor]:
    """What a call returns, and its mutated arguments after it; the caller's stay as they are."""
    mine = named | {n: testing.clone_args(Sample(n, (named[n],))).args[0] for n in op.mutates}
    found = [*testing.outputs(op(**mine)), *(mine[n] for n in op.mutates)]
    return [t.nan_to_num() if t.is_floating_point() else t for t in found]


def by_name(op: Op, sample: Sample) -> dict[str, Any]:
    return dict(zip((a.name for a in op.overload._schema.arguments), sample.args, strict=False)) | sample.kwargs


@pytest.mark.parametrize("op", EACH)
def test_inputs_past_2_to_the_31_elements(op: Op, room: int) -> None:
    """Each input in turn stands in a buffer so large that 32-bit offsets would wrap."""
    named = by_name(op, op.sized("cuda", 3))
    expected = results(op, named)
    tensors = {n: a for n, a in named.items() if isinstance(a, torch.Tensor) and a.dim() and a.shape[0] > 1 and a.numel() and n not in op.mutates}
    size = max((a.element_size() for a in tensors.values()), default=0) * (FAR + 2**22)
    if room < size + 2**30:
        pytest.skip(f"{size >> 30} GiB of GPU memory are needed")
    memory, tried = torch.empty(size, dtype=torch.uint8, device="cuda"), 0
    for name, value in tensors.items():
        try:
            actual = results(op, named | {name: spread_out(value, memory)})
        except ArgumentError:  # an input that must be dense
            continue
        tried += 1
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), name
    assert tried


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("op", EACH)
def test_launches_where_its_inputs_are(op: Op) -> None:
    """Not on the current device, where the addresses of another mean nothing."""
    assert torch.cuda.current_device() == 0
    expected, actual = (results(op, by_name(op, op.sized(device, 5))) for device in ("cuda:0", "cuda:1"))
    for a, e in zip(actual, expected, strict=True):
        assert a.device.index == 1 and torch.equal(a.cpu(), e.cpu())


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the step, compiled before, and what it gives."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def tensors_of(named: dict[str, Any], op: Op) -> list[torch.Tensor]:
    items = (item for name, value in named.items() if name not in op.mutates for item in (value if isinstance(value, list) else [value]))
    return [item for item in items if isinstance(item, torch.Tensor) and item.numel()]


needs_dependent_launch = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="a GPU without programmatic dependent launch"
)


@needs_dependent_launch
@pytest.mark.parametrize("op", EACH)
def test_kernels_wait_for_the_one_before(op: Op) -> None:
    """Inputs are written late, each in turn last, by kernels that let the next begin at once; such kernels also read the results."""
    from tests.triton_toys import late_copy

    true, shown, plain, empty = (testing.clone_args(op.sized("cuda", 16)) for _ in range(4))
    named, seen = by_name(op, true), by_name(op, shown)
    inputs = list(zip(tensors_of(named, op), tensors_of(seen, op), strict=True))

    def launched(sample: Sample) -> list[torch.Tensor]:
        return [*testing.outputs(op.triton(*sample.args, **sample.kwargs)), *(by_name(op, sample)[name] for name in op.mutates)]  # type: ignore[misc]

    def same(found: list[torch.Tensor]) -> bool:
        return all(torch.equal(*(t.nan_to_num() if t.is_floating_point() else t for t in pair)) for pair in zip(found, expected, strict=True))

    expected = launched(plain)
    for target in tensors_of(by_name(op, empty), op):
        target.zero_()
    assert not same(launched(empty))  # what a kernel gives that does not wait
    copies = [torch.empty_like(t) for t in expected]

    def step(order: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        for name in op.mutates:
            seen[name].copy_(named[name])
        for _, target in order:
            target.zero_()
        for source, target in order:
            late_copy(source, target)
        found = launched(shown)
        for source, target in zip(found, copies, strict=True):
            late_copy(source, target)
        return copies

    for last in range(len(inputs)):
        graph, found = capture(lambda last=last: step(inputs[last + 1 :] + inputs[: last + 1]))  # type: ignore[misc]
        for _ in range(3):
            graph.replay()
            assert same(found), f"input {last}"


@needs_dependent_launch
def test_a_kernel_after_two_branches_waits_for_both() -> None:
    from tests.triton_toys import late_copy

    op = BY_NAME["global_topk_indices"]
    true, shown = (testing.clone_args(op.sized("cuda", 16)) for _ in range(2))
    side = torch.cuda.Stream()

    def step() -> Any:
        for target in (shown.args[0], shown.args[3]):
            target.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            late_copy(true.args[3], shown.args[3])
        late_copy(true.args[0], shown.args[0])
        torch.cuda.current_stream().wait_stream(side)
        return op(*shown.args, **shown.kwargs)

    graph, found = capture(step)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(g, e) for g, e in zip(found, op(*true.args, **true.kwargs), strict=True))


def numbers(n: int, modulus: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(n, device="cuda").remainder_(modulus).to(dtype)


def yes(n: int) -> torch.Tensor:
    return torch.ones(1, dtype=torch.bool, device="cuda").expand(n)


def table(pages: int = 64) -> torch.Tensor:
    return numbers(7 * pages, 1000).view(7, pages) + 1


def large_causal() -> Sample:
    n = FAR // 128 + 5
    return Sample("", (numbers(n, 3001, torch.int64), numbers(n, 7), yes(n), table()), {"block_size": 64, "window": 128, "width": 128})


def large_draft() -> Sample:
    n = FAR // (5 * 192) + 3
    return Sample("", (numbers(n, 3001), table()[:1].expand(n, 64), yes(n)), {"block_size": 64, "window": 128, "block_queries": 5, "width": 192})


def large_global() -> Sample:
    n = FAR // 512 + 3
    return Sample("", (numbers(512, 4096)[None].expand(n, 512), numbers(n, 7), yes(n), table()), {"block_size": 64})


def large_mixed() -> Sample:
    n = FAR // 640 + 3
    rows = numbers(512, 4096)[None].expand(n, 512)
    args = (rows[:, :128], numbers(n, 129), rows, rows[:0], numbers(n, 3001, torch.int64), numbers(n, 7), yes(n), table(), table())
    return Sample("", args, {"block_size": 64, "compressed_block_size": 64, "window": 128})


def large_expand() -> Sample:
    n = FAR // 256 + 3
    return Sample("", (table(256), numbers(n, 7), yes(n)))


def large_merge() -> Sample:
    n, scores, columns = FAR // 4096 + 3, torch.arange(8.0, dtype=torch.bfloat16, device="cuda"), numbers(8, 5)
    return Sample("", (scores.expand(n, 8), columns.expand(n, 8), 4096))


LARGE: dict[str, tuple[Callable[[], Sample], int]] = {
    "causal_swa_indices": (large_causal, 1),
    "draft_swa_indices": (large_draft, 5),
    "global_topk_indices": (large_global, 1),
    "build_mixed_sparse_indices": (large_mixed, 1),
    "expand_block_table": (large_expand, 1),
    "mtp_context_lens": (lambda: Sample("", (numbers(FAR // 8 + 3, 5003), 8, 4)), 1),
    "packed_page_slots": (lambda: Sample("", (numbers(FAR // 192 + 3, 100003)[:, None].expand(-1, 192), 64, 65)), 1),
    "local_context_lens": (lambda: Sample("", (numbers(FAR // 192 + 3, 100003)[:, None].expand(-1, 192), 1, 4, 16)), 1),
    "topk_merge": (large_merge, 1),
}
"""Calls whose output has more than 2**31 elements, and the output rows of one input row."""


@pytest.mark.parametrize("name", LARGE)
def test_outputs_past_2_to_the_31_elements(name: str, room: int) -> None:
    """The last rows are what the same rows give in a small call; so are the first, which a wrapped store would hit."""
    if room < 14 << 30:
        pytest.skip("14 GiB of GPU memory are needed")
    op, (make, outputs_a_row) = BY_NAME[name], LARGE[name]
    sample = make()
    rows = next(a.shape[0] for a in sample.args if isinstance(a, torch.Tensor) and a.shape[0] > 1000)
    got = testing.outputs(op.overload(*sample.args, **sample.kwargs))
    assert got[0].numel() > FAR
    for part in (slice(0, 100), slice(rows - 100, rows)):
        args = [a[part] if isinstance(a, torch.Tensor) and a.shape[0] == rows else a for a in sample.args]
        expected = testing.outputs(op.reference(*[a.cpu() if isinstance(a, torch.Tensor) else a for a in args], **sample.kwargs))
        for large, small in zip(got, expected, strict=True):
            assert torch.equal(large[part.start * outputs_a_row : part.stop * outputs_a_row].cpu(), small), part


def test_ragged_lens_past_2_to_the_31_tokens(room: int) -> None:
    """Starts are int32: tokens past them all belong to nobody, and are written all the same."""
    if room < 30 << 30:
        pytest.skip("30 GiB of GPU memory are needed")
    starts = torch.tensor([0, 5, 2**31 - 1], dtype=torch.int32, device="cuda")
    lens, requests, valid = BY_NAME["ragged_context_lens"].overload(torch.tensor([9, 2**31 + 7], device="cuda"), starts, FAR + 40)
    assert lens[:6].tolist() == [5, 6, 7, 8, 9, 14] and requests[:6].tolist() == [0, 0, 0, 0, 0, 1] and bool(valid[: 2**31 - 1].all())
    assert lens[2**31 - 2].item() == 2**31 - 1 and not bool(valid[2**31 - 1 :].any()) and not bool(lens[2**31 - 1 :].any()) and not bool(requests[2**31 - 1 :].any())
