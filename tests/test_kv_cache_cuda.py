"""The kernels of the paged KV rows against the references on random calls: interpreted on CPU, compiled on a GPU."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch

from dsv4_ops import kv_cache, testing
from dsv4_ops.kv_cache import (
    GROUP,
    HEAD_DIM,
    KV_CACHE_GATHER,
    KV_CACHE_INSERT,
    NOPE_DIM,
    TOKEN_BYTES,
    kv_cache_gather,
    kv_cache_insert,
    new_kv_cache,
)
from tests.interpreter import Interpreter
from tests.test_triton import needs_triton

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

EXTREMES = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3.4e38, -3.4e38, 1e-45, 448.0, 1e-4])


def rows(n: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Rows of groups of any magnitude: ordinary ones, values halfway between two codes and beside it, and some extremes."""
    scale = torch.exp2(torch.randint(-30, 100, (n, HEAD_DIM // GROUP, 1), generator=generator).float())
    ordinary = torch.randn(n, HEAD_DIM // GROUP, GROUP, generator=generator)
    # Odd multiples of half a code's last place, and one float beside them.
    ties = (torch.randint(0, 32, ordinary.shape, generator=generator) + 0.5) * torch.exp2(torch.randint(-14, 5, ordinary.shape, generator=generator).float())
    ties = (ties.view(torch.int32) + torch.randint(-1, 2, ordinary.shape, generator=generator, dtype=torch.int32)).view(torch.float32)
    values = torch.where(torch.rand(n, HEAD_DIM // GROUP, 1, generator=generator) < 0.5, ordinary, ties) * scale
    extreme = EXTREMES[torch.randint(0, len(EXTREMES), values.shape, generator=generator)]
    values = torch.where(torch.rand(values.shape, generator=generator) < 0.002, extreme, values).flatten(1)
    values[:, NOPE_DIM:].nan_to_num_(0.0, 1.0, -1.0)  # which NaN an fp32 NaN becomes in bf16 is up to the machine
    return values.to(dtype)


FP8, BF16, FP32, I32, I64 = torch.uint8, torch.bfloat16, torch.float32, torch.int32, torch.int64
KINDS = [
    (FP8, BF16, I64, 64, 0), (FP8, BF16, I64, 64, 64), (FP8, FP32, I64, 4, 0), (FP8, BF16, I32, 1, 5), (FP8, FP32, I32, 4, 3), (FP8, BF16, I64, 4, 8),
    (BF16, BF16, I64, 4, 0), (BF16, FP32, I32, 1, 1), (FP32, BF16, I64, 64, 0), (FP32, FP32, I32, 4, 2),
]  # fmt: skip
"""Dtypes of the cache, the rows and the slots, tokens a page, and what pads a page: few, so that thousands of draws compile little."""


def cache_of(rng: random.Random, generator: torch.Generator, dtype: torch.dtype, block_size: int, pad: int) -> torch.Tensor:
    width = TOKEN_BYTES if dtype == torch.uint8 else HEAD_DIM
    stride, blocks = block_size * width + pad, rng.choice((1, 2, 6))
    base = torch.randint(0, 256, (blocks, stride), generator=generator, dtype=torch.uint8) if dtype == torch.uint8 else torch.randn(blocks, stride, generator=generator).to(dtype)
    cache = base.as_strided((blocks, block_size, width), (stride, width, 1))
    return cache.unsqueeze(2) if rng.random() < 0.3 else cache


def to(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides."""
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device, copy=True)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def compare(seed: int, device: str) -> None:
    """An insert, then a gather of all that is there, from caches of one kind."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, source, index, block_size, pad = rng.choice(KINDS)
    stored = cache_of(rng, generator, dtype, block_size, pad)
    mine = to(stored, device)
    capacity, tokens = stored.shape[0] * block_size, rng.choice((0, 1, 3, 8, 13))
    slots = torch.randint(-2, capacity + 3, (tokens,), generator=generator, dtype=index)
    step = rng.choice((1, 2))
    kv = rows(tokens * step, generator, source)[::step]
    KV_CACHE_INSERT.reference(kv, stored, slots)
    KV_CACHE_INSERT.triton(to(kv, device), mine, slots.to(device))  # type: ignore[misc]
    testing.assert_same(mine.cpu().contiguous(), stored.contiguous(), f"draw {seed}: insert", dict.fromkeys(testing.TOLERANCES, (0.0, 0.0)))
    asked = torch.randint(-3, capacity + 3, rng.choice(((5,), (3, 4)) if block_size != 64 else ((), (2, 1, 3))), generator=generator, dtype=index)
    asked = asked.t() if asked.dim() == 2 else asked
    actual = KV_CACHE_GATHER.triton(mine, to(asked, device))  # type: ignore[misc]
    testing.assert_same(actual.cpu(), KV_CACHE_GATHER.reference(stored, asked), f"draw {seed}: gather", dict.fromkeys(testing.TOLERANCES, (0.0, 0.0)))


def interpreted(first: int, last: int, backwards: bool) -> None:
    """The interpreter runs programs one after the other: backwards too, since a GPU may run them in any order."""
    from triton.runtime.interpreter import interpreter_builder

    from dsv4_ops._triton import kv_cache as kernels

    forwards = interpreter_builder.set_grid_idx

    def reversed_grid(x: int, y: int, z: int) -> None:
        forwards(interpreter_builder.grid_dim[0] - 1 - x, y, z)

    with patch.multiple(kernels, CHUNK=4, ROWS=2), patch.object(interpreter_builder, "set_grid_idx", reversed_grid if backwards else forwards):
        for seed in range(first, last):
            compare(seed, "cpu")


def every_value(device: str) -> None:
    """Each of the 2**16 bf16 values, in groups of many magnitudes: the bytes of the vectorized path on the CPU."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.cat([values[: NOPE_DIM * 146], values[-NOPE_DIM:]]).view(-1, NOPE_DIM)
    kv = torch.cat([values, torch.zeros(len(values), HEAD_DIM - NOPE_DIM, dtype=torch.bfloat16)], 1)
    # A negative NaN keeps its sign here and loses it on the way through other machines' multipliers.
    kv = torch.where(kv.isnan(), torch.nan, kv)
    slots = torch.arange(64, 64 + len(kv))
    caches = [new_kv_cache(4, 64, device=d) for d in (device, "cpu")]
    KV_CACHE_INSERT.triton(kv.to(device), caches[0], slots.to(device))  # type: ignore[misc]
    kv_cache._insert_torch(kv, caches[1], slots)
    assert torch.equal(caches[0].cpu(), caches[1])
    every = torch.arange(256, device=device)
    bits = [KV_CACHE_GATHER.triton(caches[0], every).cpu(), kv_cache._gather_torch(caches[1], every.cpu())]  # type: ignore[misc]
    testing.assert_same(bits[0], bits[1], "gather", dict.fromkeys(testing.TOLERANCES, (0.0, 0.0)))


@needs_triton
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("part", range(2))
def test_random_calls_interpreted(part: int, backwards: bool, interpreter: Interpreter) -> None:
    interpreter(interpreted, part * 60, part * 60 + 60, backwards)


@needs_triton
def test_every_bf16_value_interpreted(interpreter: Interpreter) -> None:
    interpreter(every_value, "cpu")


@needs_cuda
@needs_triton
def test_every_bf16_value_on_cuda() -> None:
    every_value("cuda")


@needs_cuda
@needs_triton
@pytest.mark.parametrize("part", range(10))
def test_random_calls_on_cuda(part: int) -> None:
    for seed in range(part * 500, part * 500 + 500):
        compare(seed, "cuda")


@needs_cuda
@needs_triton
@pytest.mark.parametrize("tokens", [64, 1024, 5000])
def test_last_of_equal_slots_wins_on_cuda(tokens: int) -> None:
    """Many rows for few slots, rows of one slot in many programs."""
    generator = torch.Generator().manual_seed(tokens)
    kv, slots = rows(tokens, generator, torch.bfloat16), torch.randint(0, 300, (tokens,), generator=generator)
    caches = [new_kv_cache(8, 64, device=d) for d in ("cuda", "cpu")]
    for _ in range(20):
        kv_cache_insert(kv.cuda(), caches[0], slots.cuda())
    kv_cache._insert_torch(kv, caches[1], slots)
    assert torch.equal(caches[0].cpu(), caches[1])


@needs_cuda
@needs_triton
def test_pages_and_rows_past_two_to_the_31_on_cuda(room: int) -> None:
    """The last page starts past 2**31 bytes, the last row of kv past 2**31 elements: views of few rows with huge strides."""
    if room < 16 << 30:
        pytest.skip(f"needs 16 GiB of GPU memory, {room >> 30} are free")
    stride, generator = 2**31 + 576, torch.Generator().manual_seed(0)
    memory = torch.empty(2 * stride + 4 * TOKEN_BYTES, dtype=torch.uint8, device="cuda")
    cache = memory.as_strided((3, 4, TOKEN_BYTES), (stride, TOKEN_BYTES, 1)).zero_()
    kv, slots = rows(3, generator, torch.bfloat16), torch.tensor([11, 4, 9])
    wide = torch.empty(2 * (2**30 + 8) + HEAD_DIM, dtype=torch.bfloat16, device="cuda").as_strided((3, HEAD_DIM), (2**30 + 8, 1))
    wide.copy_(kv)
    expected = new_kv_cache(3, 4)
    KV_CACHE_INSERT.reference(kv, expected, slots)
    kv_cache_insert(wide, cache, slots.cuda())
    assert torch.equal(cache.cpu(), expected)
    asked = torch.arange(-1, 13)
    assert torch.equal(kv_cache_gather(cache, asked.cuda()).cpu().nan_to_num(), KV_CACHE_GATHER.reference(expected, asked).nan_to_num())
