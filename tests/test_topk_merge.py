"""The merge of top-k lists in one launch: at the sizes of a split context and beyond a block, by Triton's interpreter and on a GPU.

Samples: test_triton.py and test_every_op.py. By hand, and shards against the undivided row: test_topk.py.
"""

from __future__ import annotations

import importlib.util
from unittest.mock import patch

import pytest
import torch

from benchmarks.sanitizer import KINDS, scores
from dsv4_ops import testing, topk_values
from dsv4_ops.bench.timing import launches
from dsv4_ops.topk import _topk_merge_reference, _topk_merge_torch, _topk_merge_triton
from tests.interpreter import Interpreter

needs_triton = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="Triton is not installed" if torch.cuda.is_available() else "no CUDA device",
)
I32 = torch.int32
SIZES = ((1024, 512), (3000, 512), (4096, 512), (4097, 64), (9001, 2048), (700, 700), (100, 4096), (8200, 4096))
"""Candidates and k: two to eight ranks, rows of one block and of more, rows that are kept whole."""


def candidates(kind: str, rows: int, count: int, largest: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of one of KINDS and indices below ``largest``, a tenth of them missing."""
    device = generator.device
    indices = torch.randint(0, largest, (rows, count), generator=generator, device=device).to(I32)
    missing = torch.rand(rows, count, generator=generator, device=device) < 0.1
    return scores(kind, rows, count, generator), torch.where(missing, -1 - indices, indices)


def same_bits(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], where: str) -> None:
    bits = I32 if actual[0].dtype == torch.float32 else torch.int16
    assert actual[0].dtype == expected[0].dtype and actual[1].dtype == I32, where
    assert torch.equal(actual[1], expected[1]), f"{where}: indices"
    assert torch.equal(actual[0].view(bits), expected[0].view(bits)), f"{where}: values"


def merge_draws(kind: str, device: str, rows: int, sizes: tuple[tuple[int, int], ...]) -> None:
    generator = torch.Generator(device).manual_seed(len(kind))
    for draw, (count, k) in enumerate(sizes):
        dtype = torch.bfloat16 if draw % 3 == 2 else torch.float32
        values, indices = candidates(kind, rows, count, (2**31, 40, 1 << 20)[draw % 3], generator)
        values = values.to(dtype)
        if draw % 2:
            values, indices = values.t().contiguous().t(), torch.cat([indices, indices], 1)[:, count // 2 : count // 2 + count]
        expected = _topk_merge_torch(values, indices, k)
        where = f"{kind}: {count} candidates, k {k}, {dtype}"
        same_bits(_topk_merge_triton(values, indices, k), expected, where)
        order = torch.randperm(count, generator=generator, device=device)
        same_bits(_topk_merge_triton(values[:, order], indices[:, order], k), expected, f"{where}, in another order")
        if rows > 1:
            same_bits(_topk_merge_triton(values[-1:], indices[-1:], k), (expected[0][-1:], expected[1][-1:]), f"{where}, a row alone")


@pytest.mark.parametrize("kind", KINDS)
def test_the_pytorch_path_is_the_reference_in_any_order(kind: str) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    for count, k, largest in ((90, 20, 30), (90, 90, 5), (40, 70, 2**31), (200, 1, 1)):
        values, indices = candidates(kind, 6, count, largest, generator)
        for dtype in (torch.float32, torch.bfloat16):
            expected = _topk_merge_reference(values.to(dtype), indices, k)
            order = torch.randperm(count, generator=generator)
            same_bits(_topk_merge_torch(values.to(dtype), indices, k), expected, f"{count} candidates, k {k}, {dtype}")
            same_bits(_topk_merge_torch(values[:, order].to(dtype), indices[:, order], k), expected, f"{count} candidates, k {k}, {dtype}, in another order")
            same_bits(_topk_merge_reference(values[:, order].to(dtype), indices[:, order], k), expected, "the reference itself")


def merge_in_small_blocks(kind: str) -> None:
    """Every boundary between blocks, and k at each side of the candidates; kinds take turns, because the interpreter sorts slowly."""
    from dsv4_ops._triton import topk_merge as kernels

    sizes = ((31, 30), (32, 32), (33, 16), (64, 7), (65, 64), (95, 96), (200, 1), (200, 33), (130, 129))
    with patch.object(kernels, "WIDEST", 32):
        merge_draws(kind, "cpu", 2, sizes[KINDS.index(kind) % 3 :: 3])


@pytest.mark.parametrize("kind", KINDS)
def test_draws_interpreted(kind: str, interpreter: Interpreter) -> None:
    interpreter(merge_in_small_blocks, kind)


def test_blocks_of_full_size_interpreted(interpreter: Interpreter) -> None:
    """Nearly all scores of a row are one: the cut lies among indices, in both blocks."""
    interpreter(merge_draws, "few above a sea", "cpu", 2, ((4500, 90), (4096, 60)))


def test_the_largest_k_interpreted(interpreter: Interpreter) -> None:
    interpreter(merge_draws, "ties", "cpu", 1, ((5000, 4096),))


def merge_far_apart(device: str) -> None:
    """Candidates of a row 2**30 elements apart, more than 2**31 from the first to the last."""
    stride, count = 2**30 + 3, 4
    extent = stride * (count - 1) + 8
    values, indices = (torch.empty(extent, dtype=dtype, device=device).as_strided((2, count), (5, stride)) for dtype in (torch.bfloat16, I32))
    values.copy_(torch.tensor([[1.0, 3.0, 2.0, 4.0], [4.0, -1.0, 4.0, -2.0]]))
    indices.copy_(torch.tensor([[7, 5, 9, 1], [7, 5, 3, 1]]))
    merged = _topk_merge_triton(values, indices, 2)
    assert merged[1].tolist() == [[1, 5], [3, 7]] and merged[0].tolist() == [[4.0, 3.0], [4.0, 4.0]]


def test_candidates_past_2_to_the_31_elements_interpreted(interpreter: Interpreter) -> None:
    try:
        torch.empty(3 * 2**30 + 64, dtype=I32)  # never touched but for a few pages
    except RuntimeError:
        pytest.skip("this machine does not promise 13 GB")
    interpreter(merge_far_apart, "cpu")


@needs_triton
def test_candidates_past_2_to_the_31_elements(room: int) -> None:
    if room < 21 << 30:
        pytest.skip(f"needs 21 GiB of GPU memory, {room >> 30} are free")
    merge_far_apart("cuda")


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 37, 200])
def test_draws(kind: str, rows: int) -> None:
    merge_draws(kind, "cuda", rows, (*SIZES, (8192, 1024), (16384, 2048), (65536, 512)))


@needs_triton
@pytest.mark.parametrize(("ranks", "k"), [(2, 512), (4, 1024), (8, 2048)])
def test_shards_give_the_topk_of_the_whole_row(ranks: int, k: int) -> None:
    logits, lengths = torch.randn(16, 8192 * ranks, device="cuda").mul(8).round(), torch.randint(-2, 8192 * ranks + 3, (16,), device="cuda")
    parts = []
    for rank in range(ranks):
        values, columns = topk_values(logits[:, rank::ranks].contiguous(), (lengths.clamp(min=0) - rank + ranks - 1) // ranks, k)
        parts.append((values, torch.where(columns < 0, -1, columns * ranks + rank)))
    merged = _topk_merge_triton(torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1), k)
    testing.assert_same(merged, topk_values(logits, lengths, k))


@needs_triton
def test_the_same_bits_in_a_hundred_runs() -> None:
    values, indices = candidates("ties", 64, 4096, 300, torch.Generator("cuda").manual_seed(0))
    first = _topk_merge_triton(values, indices, 512)
    for _ in range(100):
        same_bits(_topk_merge_triton(values, indices, 512), first, "again")


@needs_triton
def test_one_launch() -> None:
    values, indices = candidates("normal", 8, 4096, 1 << 20, torch.Generator("cuda").manual_seed(0))
    _topk_merge_triton(values, indices, 512)
    assert launches(lambda: _topk_merge_triton(values, indices, 512)) == 1
