"""The kernels of sparse MLA decode on a GPU, Triton's and CUDA's: random calls, bits in any batch, graphs, memory that they leave alone.

The checks of rows and bits are those that test_sparse_decode.py runs interpreted and test_sparse_decode_emulated.py emulated; samples: test_triton.py
and test_every_op.py.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_ops import _decode_backends, sparse_mla_decode, testing, use_workspace_lane
from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE
from dsv4_ops.testing import Canary
from tests.test_sparse_decode import (
    BF16,
    BIT_CASES,
    CUDA_KINDS,
    F32,
    KINDS,
    U8,
    batch,
    bits,
    draw_calls,
    filled,
    known_rows,
    poison,
    row_bits,
    rows,
)
from tests.test_triton import needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDE = [(16, (133, 512)), (64, (128, 1024))]
"""More keys than a block of the CUDA kernels usually has at once, or in one pass."""
SERVED = [(64, (128, 512)), (128, (128, 512)), (64, (133, 0)), (128, (128, 0)), (8, (192, 128))]


def served(tokens: int, heads: int, widths: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    return batch(tokens, heads, widths, torch.uint8, torch.bfloat16, "cuda", seed)


@pytest.fixture(params=["triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    plain = _decode_backends.DecodeShape(64, torch.bfloat16, 128, _decode_backends.Pages())
    if unmet := [str(r) for r in _decode_backends.requirements(name, plain, torch.cuda.get_device_capability()) if not r.ok]:
        pytest.skip(f"{name} cannot serve here: {' '.join(unmet)}")
    return name


@pytest.fixture
def launch(backend: str) -> Any:
    return functools.partial(sparse_mla_decode, backend=backend)


def test_who_serves_cuda_calls() -> None:
    assert SPARSE_MLA_DECODE.backends["cuda"] == "triton"
    sample = SPARSE_MLA_DECODE.sized("cuda", 3)
    assert SPARSE_MLA_DECODE.chosen is not None
    assert SPARSE_MLA_DECODE.chosen(*sample.args, **sample.kwargs) == _decode_backends.ours("triton", _decode_backends.DecodeShape(8, BF16, 128, _decode_backends.Pages(), 512, _decode_backends.Pages(U8, 16, 16 * 584)), torch.cuda.get_device_capability())


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_a_first_call_may_be_a_captured_one(backend: str) -> None:
    """What the CUDA kernels ask of a device once, they can ask inside a capture; Triton's compile before it."""
    code = """
import torch
from dsv4_ops import sparse_mla_decode
from tests.test_sparse_decode import batch, bits
arguments = batch(9, 64, (128, 512), torch.uint8, torch.bfloat16, "cuda")
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    results = sparse_mla_decode(*arguments, scale=0.05, backend="cuda")
for result in results:
    result.fill_(-7)
graph.replay()
torch.cuda.synchronize()
found = bits(results)
assert all(torch.equal(a, b) for a, b in zip(found, bits(sparse_mla_decode(*arguments, scale=0.05, backend="cuda")), strict=True))
print("equal")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=200)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stdout + done.stderr


def test_bits_of_a_thousand_calls_behind_changes_of_their_inputs(backend: str, launch: Any) -> None:
    """Nothing waits in between: a kernel that began before its inputs were whole would show."""
    calls = [served(8, 64, (128, 512), seed) for seed in range(4)]
    expected = [bits(launch(*call, scale=0.05)) for call in calls]
    mine = [argument.clone() for argument in calls[0]]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        for argument, its in zip(mine, calls[i % 4], strict=True):
            argument.copy_(its)
        for a, b in zip(bits(launch(*mine, scale=0.05)), expected[i % 4], strict=True):
            wrong += (a != b).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("seed", range(10))
def test_500_random_calls_match_the_reference(seed: int, backend: str, launch: Any) -> None:
    """Over all seeds."""
    draw_calls("cuda", 50, 20, seed, launch, KINDS if backend == "triton" else CUDA_KINDS)


@pytest.mark.parametrize("case", [*BIT_CASES, *((heads, "uint8", "bfloat16", widths) for heads, widths in SERVED + WIDE)])
def test_a_row_has_the_same_bits_in_any_batch(case: tuple[int, str, str, tuple[int, int]], backend: str, launch: Any) -> None:
    if backend == "cuda" and "float32" in case:
        pytest.skip("the CUDA kernels take no fp32")
    row_bits("cuda", *case, launch)


@pytest.mark.parametrize(("heads", "widths"), SERVED + WIDE)
def test_bits_of_large_batches_are_those_of_single_rows(heads: int, widths: tuple[int, int], launch: Any) -> None:
    arguments = served(300, heads, widths)
    whole = bits(launch(*arguments, scale=0.05))
    for first, count in ((0, 1), (299, 1), (17, 2), (40, 8), (100, 33), (0, 128)):
        index = torch.arange(first, first + count, device="cuda")
        for part, full in zip(bits(launch(*rows(arguments, index), scale=0.05)), whole, strict=True):
            assert torch.equal(part, full[index]), (first, count)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(bits(launch(*arguments, scale=0.05)), whole, strict=True)), "another run"


@pytest.mark.parametrize("check", [known_rows, poison])
def test_rows_that_need_no_oracle(check: Any, backend: str, launch: Any) -> None:
    check("cuda", launch, (F32, BF16, U8) if backend == "triton" else (BF16, U8))


@pytest.mark.parametrize(("heads", "widths"), SERVED + WIDE)
@pytest.mark.parametrize("tokens", [1, 16])
def test_error_at_served_sizes(tokens: int, heads: int, widths: tuple[int, int], launch: Any) -> None:
    """Of the whole output: a few thousandths, what bf16 weights and a bf16 result cost."""
    arguments = served(tokens, heads, widths)
    out, lse = launch(*arguments, scale=512**-0.5)
    right, right_lse = SPARSE_MLA_DECODE.reference(*arguments, scale=512**-0.5)
    assert float((out.double() - right.double()).norm() / right.double().norm()) < 5e-3
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "widths"), SERVED)
def test_captured_once_replayed_on_other_inputs(heads: int, widths: tuple[int, int], backend: str) -> None:
    first, *others = (served(9, heads, widths, seed) for seed in range(4))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sparse_mla_decode(*first, scale=0.05, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sparse_mla_decode(*first, scale=0.05, backend=backend)
    for other in others:
        expected = bits(sparse_mla_decode(*other, scale=0.05, backend=backend))
        for mine, theirs in zip(first, other, strict=True):
            mine.copy_(theirs)
        for _ in range(3):
            for result in results:
                result.fill_(-7)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(bits(results), expected, strict=True))


def test_two_streams_in_two_lanes_do_not_disturb_each_other(backend: str) -> None:
    calls = [served(8, 64, (128, 512), seed) for seed in (0, 1)]
    expected = [bits(sparse_mla_decode(*call, scale=0.05, backend=backend)) for call in calls]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream), use_workspace_lane(i):
                results.append((i, sparse_mla_decode(*calls[i], scale=0.05, backend=backend)))
    torch.cuda.synchronize()
    for i, result in results:
        assert all(torch.equal(a, b) for a, b in zip(bits(result), expected[i], strict=True))


@pytest.mark.parametrize(("heads", "widths"), SERVED)
def test_memory_around_the_arguments_is_left_alone(heads: int, widths: tuple[int, int], launch: Any) -> None:
    arguments = served(5, heads, widths)
    expected = bits(launch(*arguments, scale=0.05))
    guarded = [Canary(argument) for argument in arguments]
    for canary, argument in zip(guarded, arguments, strict=True):
        canary.view.copy_(argument)
    with testing.poisoned():
        actual = bits(launch(*(canary.view for canary in guarded), scale=0.05))
    torch.cuda.synchronize()
    for canary, argument in zip(guarded, arguments, strict=True):
        canary.check()
        assert torch.equal(canary.view.view(torch.uint8), argument.contiguous().view(torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("pad", [6, 8, 16, 64])
@pytest.mark.parametrize("block_size", [3, 32, 64, 256])
def test_pages_of_any_stride_give_the_same_bits(pad: int, block_size: int, backend: str, launch: Any) -> None:
    """Single-byte and 8-byte loads of what packed pages load more widely; the CUDA kernels take multiples of 16 bytes alone."""
    if backend == "cuda" and (pad % 16 or block_size == 3):
        pytest.skip("no multiple of 16 bytes")
    generator = torch.Generator().manual_seed(0)
    packed = filled(3, block_size, torch.uint8, generator, device="cuda")
    padded = torch.zeros(3, packed.stride(0) + pad, dtype=torch.uint8, device="cuda").as_strided(packed.shape, (packed.stride(0) + pad, 584, 1))
    padded.copy_(packed)
    q = torch.randn(4, 64, 512, device="cuda").bfloat16()
    indices = torch.randint(-1, 3 * block_size, (4, 160), dtype=torch.int32, device="cuda")
    lens = torch.tensor([160, 1, 77, 0], device="cuda")
    one, other = (bits(launch(q, cache, indices, lens, scale=0.05)) for cache in (packed, padded))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_queries_that_lie_anywhere_are_served_by_cuda() -> None:
    """Those whose rows do not start at multiples of 16 bytes are copied."""
    arguments = served(4, 64, (128, 512))
    if any(not r.ok for r in _decode_backends.requirements("cuda", _decode_backends.shape_of(*arguments[:3], *arguments[4:6]), torch.cuda.get_device_capability())):
        pytest.skip("cuda cannot serve here")
    expected = bits(sparse_mla_decode(*arguments, scale=0.05, backend="cuda"))
    for offset in (1, 8):
        q = torch.zeros(4, 64, 520, dtype=torch.bfloat16, device="cuda")[..., offset : offset + 512].copy_(arguments[0])
        assert all(torch.equal(a, b) for a, b in zip(bits(sparse_mla_decode(q, *arguments[1:], scale=0.05, backend="cuda")), expected, strict=True))


@pytest.mark.parametrize("offset", [1, 8, 16])
def test_caches_that_begin_anywhere_are_served(offset: int) -> None:
    """By Triton's kernels where the CUDA kernels could not load them."""
    arguments = served(4, 64, (128, 512))
    expected = {name: bits(sparse_mla_decode(*arguments, scale=0.05, backend=name)) for name in ("triton", "auto")}
    for place in (1, 4):
        whole = arguments[place]
        room = torch.zeros(whole.numel() + 16, dtype=torch.uint8, device="cuda")
        moved = [*arguments[:place], room[offset : offset + whole.numel()].view(whole.shape).copy_(whole), *arguments[place + 1 :]]
        found = bits(sparse_mla_decode(*moved, scale=0.05))
        assert all(torch.equal(a, b) for a, b in zip(found, expected["triton" if offset % 16 else "auto"], strict=True)), place


def test_counts_of_tokens_compile_nothing_new() -> None:
    from dsv4_ops._triton import sparse_decode as kernels

    def compiled() -> list[int]:
        device = torch.cuda.current_device()
        return [len(kernel.device_caches[device][0]) for kernel in (kernels.attend_kernel, kernels.combine_kernel)]

    sparse_mla_decode(*served(3, 64, (128, 512)), scale=0.05, backend="triton")
    before = compiled()
    for tokens in (1, 2, 16, 17, 130):
        sparse_mla_decode(*served(tokens, 64, (128, 512)), scale=0.05, backend="triton")
    assert compiled() == before
