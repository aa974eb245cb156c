"""The fused decode step: by hand, against the single ops, and its kernel on random calls, interpreted and compiled."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dsv4_ops import DecodeStep, causal_swa_indices, expand_block_table, prepare_decode_step, ragged_context_lens, testing
from dsv4_ops.decode_step import PREPARE_DECODE_STEP, _make
from dsv4_ops.testing import Sample
from tests.common import i32, i64
from tests.interpreter import Interpreter
from tests.test_triton import needs_triton

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_by_hand() -> None:
    """Two requests verify one draft each (1 + 1 tokens) and one padding token; pages of 4, window 3, ratio 2."""
    step = prepare_decode_step(
        i64([4, 5, 0, 1, 0]), i32([6, 2]), i32([0, 2, 4]), i32([[7, 3], [0, 5]]), i32([[1, 2], [8, 9]]), block_size=4, window=3, width=4, compress_ratios=[2, 1]
    )
    assert step.token_to_req_indices.tolist() == [0, 0, 1, 1, 0]
    assert step.is_valid_token.tolist() == [True, True, True, True, False]
    assert step.slot_mapping.tolist() == [12, 13, -1, -1, -1]  # request 1's first page is not mapped
    assert step.swa_indices.tolist() == [[30, 31, 12, -1], [31, 12, 13, -1], [-1] * 4, [-1] * 4, [-1] * 4]
    assert step.swa_lens.tolist() == [3, 3, 1, 2, 0]
    assert step.context_lens.tolist() == [[2, 3, 0, 1, 0], [5, 6, 1, 2, 0]]
    assert step.expanded_block_table.tolist() == [[1, 2], [1, 2], [8, 9], [8, 9], [0, 0]]


def test_without_compressed_layers() -> None:
    step = prepare_decode_step(i64([3]), i32([4]), i32([0, 1]), i32([[6]]), block_size=4, window=2, width=2)
    assert step.context_lens.shape == (0, 1) and step.expanded_block_table.shape == (1, 0) and step.slot_mapping.tolist() == [27]


@pytest.mark.parametrize("lens", [[1] * 8, [6] * 5, [1, 40, 0, 6], []])
def test_equals_the_single_ops(lens: list[int]) -> None:
    """As an engine's attention metadata is built: a decode, an MTP and a mixed batch."""
    args, kwargs = _make("cpu", len(lens), lens, pad=3, blocks=12, block_size=8, longest=40, window=16, width=16)
    positions, seq_lens, starts, table, pages = args
    step, tokens = prepare_decode_step(*args, **kwargs), positions.shape[0]
    _, requests, valid = ragged_context_lens(seq_lens, starts, tokens)
    indices, swa_lens = causal_swa_indices(positions, requests, valid, table, block_size=8, window=16, width=16)
    for actual, expected in ((step.token_to_req_indices, requests), (step.is_valid_token, valid), (step.swa_indices, indices), (step.swa_lens, swa_lens)):
        assert torch.equal(actual, expected)
    assert torch.equal(step.expanded_block_table, expand_block_table(pages, requests, valid))
    for i, ratio in enumerate((4, 128)):
        assert torch.equal(step.context_lens[i], ragged_context_lens(seq_lens, starts, tokens, ratio)[0])


RATIOS: tuple[list[int], ...] = ([], [4], [4, 128], [1, 3])
SIZES = ({"window": 6, "width": 8, "block_size": 4}, {"window": 128, "width": 128, "block_size": 64}, {"window": 1, "width": 5, "block_size": 1})


def draw(seed: int) -> Sample:
    rng = random.Random(seed)
    lens = [rng.choice((0, 1, 1, 4, 6, 30)) for _ in range(rng.choice((0, 1, 3, 20)))]
    kind = rng.randrange(len(SIZES))
    sizes: dict[str, Any] = SIZES[kind]
    args, kwargs = _make(
        "cpu", seed, lens, pad=rng.choice((0, 0, 7)), blocks=rng.choice((0, 3, 20)), cblocks=rng.choice((None, 0, 5, 300)), longest=rng.choice((3, 60, 1000)),
        high=rng.choice((500, 2**31 - 1)), compress_ratios=rng.choice((RATIOS[kind], RATIOS[kind + 1])), max_seq_len=rng.choice((None, 0, 77)), **sizes,
    )  # fmt: skip
    if seed % 3 == 0:  # values out of range
        positions, seq_lens, starts, *tables = args
        if len(positions):
            positions[rng.randrange(len(positions))] = rng.choice((-(2**63), -1, 2**63 - 1, 2**33))
        if len(seq_lens):
            seq_lens[rng.randrange(len(seq_lens))] = rng.choice((-(2**31), -1, 2**31 - 1))
        starts[rng.randrange(len(starts))] = rng.choice((-(2**31), -1, 0, 3, 2**31 - 1))
        args = (positions, seq_lens.to(rng.choice((torch.int32, torch.int64))), starts, *tables)
    return Sample(f"draw {seed}", args, kwargs)


def compare(sample: Sample, device: str) -> None:
    expected = PREPARE_DECODE_STEP.reference(*sample.args, **sample.kwargs)
    mine = [a.to(device) if isinstance(a, torch.Tensor) else a for a in sample.args]
    with testing.poisoned():
        actual = PREPARE_DECODE_STEP.triton(*mine, **sample.kwargs)  # type: ignore[misc]
    for name, a, e in zip(DecodeStep._fields, actual, expected, strict=True):
        testing.assert_same(a.cpu(), e, f"{sample.label}: {name}")


def interpreted(first: int, last: int) -> None:
    """Both searches for a token's request, and the second's loop."""
    from dsv4_ops._triton import decode_step as kernels

    with patch.multiple(kernels, FEW_REQUESTS=2, MANY_REQUESTS=8):
        for seed in range(first, last):
            compare(draw(seed), "cpu")


@needs_triton
@pytest.mark.parametrize("part", range(3))
def test_random_calls_interpreted(part: int, interpreter: Interpreter) -> None:
    interpreter(interpreted, part * 40, part * 40 + 40)


@needs_cuda
@needs_triton
@pytest.mark.parametrize("part", range(10))
def test_random_calls_on_cuda(part: int) -> None:
    for seed in range(part * 500, part * 500 + 500):
        compare(draw(seed), "cuda")


@needs_cuda
@needs_triton
@pytest.mark.parametrize("requests", [127, 128, 1024, 3000])
def test_many_requests_on_cuda(requests: int) -> None:
    """Sizes around those at which the search for a token's request changes."""
    rng = random.Random(requests)
    args, kwargs = _make("cpu", requests, [rng.choice((0, 1, 1, 6)) for _ in range(requests)], pad=17, longest=500, blocks=9, block_size=64, window=128, width=128)
    compare(Sample(f"{requests} requests", args, kwargs), "cuda")


@needs_cuda
@needs_triton
def test_tables_past_two_to_the_31_elements_on_cuda(room: int) -> None:
    if room < 20 << 30:
        pytest.skip(f"needs 20 GiB of GPU memory, {room >> 30} are free")
    args, kwargs = _make("cpu", 5, [2, 3, 4])
    expected = PREPARE_DECODE_STEP.reference(*args, **kwargs)
    wide = []
    for table in args[3:]:
        stride = 2**30 + 9
        wide.append(torch.empty(2 * stride + table.shape[1], dtype=torch.int32, device="cuda").as_strided(table.shape, (stride, 1)))
        wide[-1].copy_(table)
    actual = PREPARE_DECODE_STEP.triton(*(a.cuda() for a in args[:3]), *wide, **kwargs)  # type: ignore[misc]
    for name, a, e in zip(DecodeStep._fields, actual, expected, strict=True):
        testing.assert_same(a.cpu(), e, name)
