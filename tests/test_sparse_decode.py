"""Sparse MLA decode against a scalar loop, the handed cases, and bit-for-bit batch invariance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_ops import kv_cache_gather, kv_cache_insert, new_kv_cache, sparse_mla_decode
from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE
from tests.interpreter import Interpreter

D = 512
NEG_INF = float("-inf")


def oracle(q: torch.Tensor, segments: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], sink: torch.Tensor | None, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax key by key, in float64; ``segments`` are (all rows of the cache in float64, indices, lengths)."""
    tokens, heads, _ = q.shape
    out, lse = torch.zeros(tokens, heads, D, dtype=torch.float64), torch.full((tokens, heads), NEG_INF, dtype=torch.float64)
    for t in range(tokens):
        keys = []
        for rows, indices, lens in segments:
            for column in range(indices.shape[1]):
                slot = int(indices[t, column])
                if column < int(lens[t]) and 0 <= slot < rows.shape[0]:
                    keys.append(rows[slot])
        for h in range(heads if keys else 0):
            logits = [scale * float((q[t, h].double() * key).sum()) for key in keys]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            lse[t, h] = top + math.log(sum(weights))
            denominator = sum(weights) + (0.0 if sink is None else math.exp(min(700.0, float(sink[h]) - top)))
            for weight, key in zip(weights, keys, strict=True):
                out[t, h] += weight / denominator * key
    return out, lse


def filled(blocks: int, block_size: int, dtype: torch.dtype, generator: torch.Generator, pad: int = 0, device: str = "cpu") -> torch.Tensor:
    """A cache whose every row but those of block 0 is random; block 0 is zero."""
    width = 584 if dtype == torch.uint8 else D
    cache = new_kv_cache(blocks, block_size, dtype=dtype, page_stride=block_size * width + pad, device=device)
    slots = torch.arange(block_size, blocks * block_size)
    kv_cache_insert(torch.randn(len(slots), D, generator=generator).to(device), cache, slots.to(device))
    return cache


def all_rows(cache: torch.Tensor) -> torch.Tensor:
    return kv_cache_gather(cache, torch.arange(cache.shape[0] * cache.shape[1], device=cache.device)).double().cpu()


def test_random_calls_match_the_oracle(device: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def rand(low: int, high: int, *shape: int) -> Any:
        value = torch.randint(low, high, shape or (1,), generator=generator)
        return value if shape else int(value)

    for draw in range(250):
        tokens, heads = rand(0, 11), rand(1, 5)
        q = torch.randn(tokens, heads, D, generator=generator).to((torch.float32, torch.bfloat16)[draw % 2])
        arguments: list[torch.Tensor] = []
        segments = []
        for segment in range(1 + (draw % 3 > 0)):
            block_size = rand(1, 6)
            dtype = (torch.float32, torch.bfloat16, torch.uint8)[rand(0, 3)]
            cache = filled(4, block_size, dtype, generator, pad=(0, 6, 576, 512)[rand(0, 4)])
            width = rand(0, (40, 150)[segment])
            indices = rand(-2, 4 * block_size + 2, tokens, width).to((torch.int32, torch.int64)[rand(0, 2)])
            lens = rand(-2, width + 3, tokens).to(torch.int32)
            arguments += [cache, indices, lens]
            segments.append((all_rows(cache), indices, lens))
        sink = torch.randn(heads, generator=generator) * 3 if draw % 5 else None
        scale = 0.01 + 0.1 * (draw % 7)
        expected, expected_lse = oracle(q, segments, sink, scale)
        arguments = [_to(a, device) for a in arguments]
        arguments += [None] * (6 - len(arguments))  # type: ignore[list-item]
        for implementation in (SPARSE_MLA_DECODE, SPARSE_MLA_DECODE.reference):
            out, lse = implementation(q.to(device), *arguments, None if sink is None else sink.to(device), scale=scale)
            assert out.dtype == q.dtype and lse.dtype == torch.float32
            tolerance = 2e-5 if q.dtype == torch.float32 else 2**-7
            rounded_weights = q.dtype == torch.bfloat16 and SPARSE_MLA_DECODE.backends[device] == "triton"
            torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=2**-6 if rounded_weights else tolerance)
            torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)


def _to(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on ``device`` that keeps the page stride."""
    base = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).to(device)
    return base.as_strided(tensor.shape, tensor.stride())


# Bits.


def bits(result: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return [r.contiguous().view(torch.int16 if r.dtype == torch.bfloat16 else torch.int32) for r in result]


def batch(tokens: int, heads: int, widths: tuple[int, int], dtype: torch.dtype, query: torch.dtype, device: str, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, D, generator=generator).to(query)
    arguments = [q]
    for width, block_size in zip(widths, (64, 16), strict=True):
        cache = filled(6, block_size, dtype, generator)
        indices = torch.randint(-1, 6 * block_size, (tokens, width), generator=generator, dtype=torch.int32)
        lens = torch.randint(0, width + 1, (tokens,), generator=generator, dtype=torch.int32)
        lens[:: 1 + tokens // 3] = width
        arguments += [cache, indices, lens]
    return [a.to(device) for a in [*arguments, torch.randn(heads, generator=generator)]]


def rows(arguments: list[torch.Tensor], index: torch.Tensor) -> list[torch.Tensor]:
    return [a[index] if i in (0, 2, 3, 5, 6) else a for i, a in enumerate(arguments)]


@pytest.mark.parametrize(
    ("heads", "dtype", "query", "widths", "threads"),
    [
        (1, torch.float32, torch.float32, (7, 1), 1),
        (1, torch.uint8, torch.bfloat16, (133, 20), 1),
        (3, torch.uint8, torch.bfloat16, (192, 0), 1),
        (8, torch.float32, torch.float32, (128, 512), 1),
        (8, torch.bfloat16, torch.bfloat16, (133, 20), 2),
        (16, torch.float32, torch.bfloat16, (130, 70), 1),
        (64, torch.float32, torch.float32, (128, 64), 2),
    ],
)
def test_a_rows_bits_do_not_depend_on_its_batch(heads: int, dtype: torch.dtype, query: torch.dtype, widths: tuple[int, int], threads: int, device: str) -> None:
    arguments = batch(37, heads, widths, dtype, query, device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = bits(sparse_mla_decode(*arguments, scale=0.05))
        generator = torch.Generator().manual_seed(1)
        cases = [torch.arange(start, start + count) for count in (1, 2, 3, 4, 5, 8, 9, 15) for start in (0, 1, 22)]
        cases += [torch.tensor([i]) for i in range(5, 37, 4)] + [torch.randperm(37, generator=generator) for _ in range(2)] + [torch.zeros(5, dtype=torch.int64)]
        for index in cases:
            index = index.to(device)
            for part, full in zip(bits(sparse_mla_decode(*rows(arguments, index), scale=0.05)), whole, strict=True):
                assert torch.equal(part, full[index]), f"rows {index.tolist()}"
    finally:
        torch.set_num_threads(before)


def test_neighbours_full_of_nan_change_no_bit(device: str) -> None:
    arguments = batch(9, 2, (40, 70), torch.float32, torch.float32, device)
    whole = bits(sparse_mla_decode(*arguments, scale=0.05))
    for bad in (float("nan"), float("inf"), 1e30):
        poisoned = [a.clone() for a in arguments]
        poisoned[0][1::2] = bad
        for part, full in zip(bits(sparse_mla_decode(*poisoned, scale=0.05)), whole, strict=True):
            assert torch.equal(part[::2], full[::2])


def test_sibling_of_E15_padding_rows_of_any_content(device: str) -> None:
    """Bucket of 8 rows, 5 live: whatever the padding rows hold, live rows keep their bits and padding rows are inert."""
    arguments = batch(8, 4, (128, 64), torch.uint8, torch.bfloat16, device)
    arguments[3][5:] = 0
    arguments[6][5:] = 0
    results = []
    for bad in (float("nan"), float("inf"), 1e30):
        arguments[0][5:] = bad
        arguments[2][5:] = 2**31 - 1
        out, lse = sparse_mla_decode(*arguments, scale=0.05)
        assert not bool(out[5:].any()) and bool((lse[5:] == NEG_INF).all())
        results.append(bits((out[:5], lse[:5])))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# Keys that count, and keys that do not.


def ones_at(blocks: int, block_size: int, device: str) -> torch.Tensor:
    """fp32 cache of which row s is filled with the number s."""
    rows = torch.arange(blocks * block_size, dtype=torch.float32, device=device)
    return rows[:, None].expand(-1, D).reshape(blocks, block_size, D).contiguous()


def zeros_query(tokens: int, device: str, heads: int = 1) -> torch.Tensor:
    return torch.zeros(tokens, heads, D, device=device)


def test_case_C06_holes_of_unmapped_blocks_are_masked(device: str) -> None:
    """Table [5, -1, 7], position 150: softmax over 64 keys out of a length of 128."""
    indices = torch.tensor([[*range(343, 384), *[-1] * 64, *range(448, 471)]], dtype=torch.int32, device=device)
    assert indices.shape == (1, 128)
    cache = ones_at(8, 64, device)
    out, lse = sparse_mla_decode(zeros_query(1, device), cache, indices, torch.tensor([128], dtype=torch.int32, device=device), scale=1.0)
    keys = [*range(343, 384), *range(448, 471)]
    assert len(keys) == 64
    torch.testing.assert_close(out[0, 0, 0], torch.tensor(sum(keys) / 64, device=device), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse[0, 0], torch.tensor(math.log(64), device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 3])
def test_case_C08_nan_before_the_cache_never_leaks(dtype: torch.dtype, length: int, device: str) -> None:
    base = torch.full((1 + 2 * 4, D), float("nan"), dtype=dtype, device=device)
    base[5] = torch.randn(D, device=device).to(dtype)
    cache = base[1:].view(2, 4, D)  # slot 4 is the only finite row; one row of NaN stands in front
    indices = torch.tensor([[-1, 4, -1], [-1, -1, -1]], dtype=torch.int32, device=device)
    lens = torch.tensor([3, length], dtype=torch.int32, device=device)
    out, lse = sparse_mla_decode(torch.ones(2, 2, D, device=device), cache, indices, lens, scale=1.0)
    assert torch.equal(out[0], cache[1, 0].float().expand(2, D))
    assert not bool(out[1].any()) and bool((lse[1] == NEG_INF).all()) and bool(lse[0].isfinite().all())


def test_sibling_of_C08_nan_in_fp8_pages_outside_the_row(device: str) -> None:
    cache = new_kv_cache(3, 4, device=device)
    cache.fill_(0xFF)  # every code, every scale and every bfloat16 is NaN
    kv = torch.randn(1, D, device=device)
    kv_cache_insert(kv, cache, torch.tensor([6], device=device))
    indices = torch.tensor([[6, 7, 0], [7, 6, -1]], dtype=torch.int32, device=device)
    lens = torch.tensor([1, 0], dtype=torch.int32, device=device)
    out, lse = sparse_mla_decode(torch.ones(2, 1, D, device=device), cache, indices, lens, scale=0.01)
    assert torch.equal(out[0, 0], kv_cache_gather(cache, torch.tensor([6], device=device))[0].float())
    assert not bool(out[1].any()) and bool(lse[1] == NEG_INF)


def test_a_nan_key_reaches_its_own_rows_only(device: str) -> None:
    cache = ones_at(2, 4, device)
    cache[1, 2] = float("nan")
    indices = torch.tensor([[4, 6], [4, 5]], dtype=torch.int32, device=device)
    out, _ = sparse_mla_decode(torch.ones(2, 1, D, device=device), cache, indices, torch.tensor([2, 2], device=device), scale=0.0)
    assert bool(out[0].isnan().all()) and bool((out[1] == 4.5).all())


@pytest.mark.parametrize("committed", [1000, 3])
@pytest.mark.parametrize("width", [192, 256])
def test_case_C09_padding_never_enters_the_softmax(committed: int, width: int, device: str) -> None:
    """N = 5, window 128: 133 keys, or 8; 133/256 = 0.5195 or 133/192 = 0.6927 would be the fault's signature."""
    from dsv4_ops import draft_swa_indices

    table = torch.arange(1, 18, dtype=torch.int32, device=device)[None]
    indices, lens = draft_swa_indices(
        torch.tensor([committed], dtype=torch.int32, device=device), table, torch.tensor([True], device=device),
        block_size=64, window=128, block_queries=5, width=width,
    )  # fmt: skip
    assert lens.tolist() == [min(committed, 128) + 5] * 5
    cache = torch.ones(18, 64, D, device=device)
    out, lse = sparse_mla_decode(zeros_query(5, device, 3), cache, indices, lens, scale=1.0)
    assert bool((out == 1.0).all())
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(min(committed, 128) + 5)))


def test_case_C15_a_local_index_past_the_table_is_a_hole(device: str) -> None:
    indices = torch.tensor([[127, -1, -1, 522]], dtype=torch.int32, device=device)
    out, lse = sparse_mla_decode(zeros_query(1, device), ones_at(9, 64, device), indices, torch.tensor([4], dtype=torch.int32, device=device), scale=1.0)
    assert bool((out == (127 + 522) / 2).all())
    torch.testing.assert_close(float(lse), math.log(2), rtol=1e-6, atol=0)


def test_columns_past_the_length_and_slots_past_the_cache_are_no_keys(device: str) -> None:
    cache = ones_at(2, 4, device)
    indices = torch.tensor([[4, 8, 2**31 - 1, 5, 6, 7]], dtype=torch.int32, device=device).expand(4, 6)
    lens = torch.tensor([4, 1, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    out, lse = sparse_mla_decode(zeros_query(4, device), cache, indices, lens, scale=1.0)
    assert out[:, 0, 0].tolist() == [4.5, 4.0, 5.5, 0.0]
    torch.testing.assert_close(lse[:, 0].cpu(), torch.tensor([math.log(2), 0.0, math.log(4), NEG_INF]))


def test_a_slot_listed_twice_counts_twice(device: str) -> None:
    indices = torch.tensor([[4, 4, 7]], dtype=torch.int32, device=device)
    out, lse = sparse_mla_decode(zeros_query(1, device), ones_at(2, 4, device), indices, torch.tensor([3], device=device), scale=1.0)
    torch.testing.assert_close(float(out[0, 0, 0]), 5.0)
    torch.testing.assert_close(float(lse), math.log(3), rtol=1e-6, atol=0)
    both, _ = sparse_mla_decode(
        zeros_query(1, device), ones_at(2, 4, device), indices[:, :1], torch.tensor([1], device=device),
        ones_at(4, 2, device), indices[:, 1:], torch.tensor([2], device=device), scale=1.0,
    )  # fmt: skip
    torch.testing.assert_close(float(both[0, 0, 0]), 5.0)


def test_the_sink_joins_the_denominator_only(device: str) -> None:
    cache = ones_at(2, 4, device)
    indices, lens = torch.tensor([[6, 6, 6], [-1, -1, -1]], dtype=torch.int32, device=device), torch.tensor([3, 3], device=device)
    sinks = [0.0, math.log(3), NEG_INF, float("inf"), 1000.0, -1000.0]
    out, lse = sparse_mla_decode(zeros_query(2, device, 6), cache, indices, lens, attn_sink=torch.tensor(sinks, device=device), scale=1.0)
    torch.testing.assert_close(out[0, :, 0].cpu(), torch.tensor([6 * 3 / 4, 3.0, 6.0, 0.0, 0.0, 6.0]))
    torch.testing.assert_close(lse[0].cpu(), torch.full((6,), math.log(3)))
    assert not bool(out[1].any()) and bool((lse[1] == NEG_INF).all()), "a row of nothing but a sink is zero"


def test_logits_far_apart_neither_overflow_nor_vanish(device: str) -> None:
    cache = torch.zeros(2, 200, D, device=device)
    cache[1, :, 0] = torch.linspace(-1e4, 1e4, 200, device=device)
    q = torch.zeros(2, 1, D, device=device)
    q[:, :, 0] = torch.tensor([[1.0], [-1.0]], device=device)
    indices = torch.arange(200, 400, device=device).expand(2, 200)
    out, lse = sparse_mla_decode(q, cache, indices, torch.tensor([200, 200], device=device), scale=1.0)
    torch.testing.assert_close(out[:, 0, 0].cpu(), torch.tensor([1e4, -1e4]))
    torch.testing.assert_close(lse[:, 0].cpu(), torch.tensor([1e4, 1e4]))


def test_pages_beyond_two_gib_are_read_where_they_are() -> None:
    """Sibling of J01: a block id times the page stride, here past 2**31 and 2**32 bytes."""
    page, blocks = 1435968, 4566
    cache = torch.empty(blocks * page, dtype=torch.uint8).as_strided((blocks, 64, 584), (page, 584, 1))
    small = new_kv_cache(4, 64)
    kv = torch.randn(3, D)
    far = torch.tensor([b * 64 + 5 for b in (1500, 4564, 4565)])
    near = torch.tensor([64, 128, 192])
    kv_cache_insert(kv, cache, far)
    kv_cache_insert(kv, small, near)
    q, lens = torch.randn(1, 2, D), torch.tensor([3])
    for a, b in zip(sparse_mla_decode(q, cache, far[None], lens, scale=0.1), sparse_mla_decode(q, small, near[None], lens, scale=0.1), strict=True):
        assert torch.equal(a, b)


# How it runs.


class LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return result


def test_memory_stays_bounded_when_tokens_and_widths_grow() -> None:
    from dsv4_ops import sparse_decode

    largest = []
    for tokens, width in ((64, 640), (256, 640), (64, 4096)):
        arguments = batch(tokens, 2, (128, width - 128), torch.uint8, torch.bfloat16, "cpu")
        with LargestTensor() as mode:
            sparse_decode._torch(*arguments, scale=0.05)
        largest.append(mode.largest - tokens * width * 8)  # the index rows themselves, int64
    assert max(largest) < 8 << 20, "keys are gathered a tile at a time"


def test_compiled_with_its_neighbours(device: str) -> None:
    def step(kv: torch.Tensor, slots: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv_cache_insert(kv, cache, slots)
        result = sparse_mla_decode(q * 2, cache, indices, lens, scale=0.05)
        return result.out + 1, result.lse

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    for seed in (0, 1):
        arguments = batch(5, 2, (40, 8), torch.uint8, torch.bfloat16, device, seed)
        kv, slots = torch.randn(5, D, device=device), torch.arange(64, 69, device=device)
        caches = [arguments[1].clone(), arguments[1].clone()]
        want = step(kv, slots, arguments[0], caches[0], *arguments[2:4])
        got = compiled(kv, slots, arguments[0], caches[1], *arguments[2:4])
        assert torch.equal(caches[0], caches[1])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


# The Triton launcher: interpreted here, on a GPU in test_sparse_decode_cuda.py.


def launched(*arguments: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return SPARSE_MLA_DECODE.triton(*arguments, scale=scale)  # type: ignore[no-any-return, misc]


F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
KINDS: list[tuple[int, torch.dtype, torch.dtype, torch.dtype | None, list[tuple[int, int, torch.dtype, int]]]] = [
    (64, BF16, torch.int32, F32, [(128, 64, U8, 64), (512, 64, U8, 64)]),
    (128, BF16, torch.int32, F32, [(128, 64, U8, 0), (512, 32, U8, 0)]),
    (64, BF16, torch.int32, None, [(133, 64, U8, 0)]),
    (8, BF16, torch.int64, BF16, [(192, 256, U8, 8), (64, 1, U8, 6)]),
    (16, BF16, torch.int32, None, [(128, 64, BF16, 0)]),
    (65, BF16, torch.int32, F32, [(64, 3, BF16, 5), (300, 16, U8, 0)]),
    (1, BF16, torch.int32, F32, [(0, 16, U8, 0), (70, 16, U8, 0)]),
    (3, BF16, torch.int32, None, [(1, 2, U8, 6), (1500, 64, U8, 0)]),
    (2, F32, torch.int32, F32, [(133, 16, F32, 0), (20, 5, F32, 3)]),
    (17, F32, torch.int64, BF16, [(20, 16, U8, 0)]),
    (4, F32, torch.int32, None, [(40, 64, BF16, 0), (300, 3, U8, 6)]),
    (3, BF16, torch.int32, F32, [(128, 64, F32, 0), (0, 4, U8, 0)]),
]
"""Heads, dtypes of query, indices and sink, and of each segment: width, page size, dtype, padding of a page. Few, so that many draws compile little."""


CUDA_KINDS: list[tuple[int, torch.dtype, torch.dtype, torch.dtype | None, list[tuple[int, int, torch.dtype, int]]]] = [
    *KINDS[:3],
    (8, BF16, torch.int64, BF16, [(192, 256, U8, 16), (64, 1, U8, 8)]),
    KINDS[4],
    (65, BF16, torch.int32, F32, [(64, 3, BF16, 8), (300, 16, U8, 0)]),
    KINDS[6],
    (3, BF16, torch.int32, None, [(1, 2, U8, 0), (1500, 64, U8, 0)]),
]
"""What the CUDA C++ kernels take of these: bf16 queries, FP8 or bf16 rows on 16 bytes."""


def draw_calls(device: str, count: int, tokens: int, seed: int = 0, launch: Any = None, kinds: Any = None) -> None:
    """Random calls of a launcher against the fp64 reference: fp32 ones to fp32's precision."""
    launch, kinds = launch or launched, kinds or KINDS
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    for draw in range(count):
        heads, query, index, sink, segments = kinds[draw % len(kinds)]
        rows = pick(1, tokens + 1)
        arguments: list[torch.Tensor | None] = [torch.randn(rows, heads, D, generator=generator).to(query).to(device)]
        for width, block_size, dtype, pad in segments:
            cache = filled(3, block_size, dtype, generator, pad)
            reach = (1, 2)[pick(0, 2)] * block_size + 2  # slots past the cache now and then, or many of block 0, whose rows are zeros
            indices = torch.randint(-2, block_size + reach, (rows, width), generator=generator)
            lens = torch.randint(-2, width + 3, (rows,), generator=generator)
            arguments += [_to(cache, device), indices.to(index).to(device), lens.to(device)]
        arguments += [None] * (7 - len(arguments))
        arguments.append(None if sink is None else (torch.randn(heads, generator=generator) * 3).to(sink).to(device))
        scale = (0.01, D**-0.5, 0.2, -0.05)[pick(0, 4)]
        out, lse = launch(*arguments, scale=scale)
        expected, expected_lse = SPARSE_MLA_DECODE.reference(*arguments, scale=scale)
        assert out.dtype == query and out.is_contiguous() and lse.dtype == F32
        rtol, atol = (2e-5, 2e-5) if query == F32 else (2**-7, 2**-6)  # weights, too, are rounded to bf16: 2**-8 of keys up to 5
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol, msg=lambda m, draw=draw: f"draw {draw}: {m}")
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5, msg=lambda m, draw=draw: f"draw {draw}: {m}")


def row_bits(device: str, heads: int, dtype: str, query: str, widths: tuple[int, int], launch: Any = None) -> None:
    """A row's bits do not depend on its batch, nor on the slices in which the Triton launcher runs many tokens."""
    from dsv4_ops._triton import sparse_decode as kernels

    launch = launch or launched
    arguments = batch(10, heads, widths, getattr(torch, dtype), getattr(torch, query), device)
    whole = bits(launch(*arguments, scale=0.05))
    cases = [torch.arange(start, start + count) for count, start in ((1, 0), (1, 7), (2, 3), (8, 2))] + [torch.randperm(10), torch.zeros(3, dtype=torch.int64)]
    for index in cases:
        index = index.to(device)
        for part, full in zip(bits(launch(*rows(arguments, index), scale=0.05)), whole, strict=True):
            assert torch.equal(part, full[index]), f"rows {index.tolist()}"
    if launch is not launched:
        return
    before = kernels.SCRATCH_BYTES
    try:
        for scratch in (1, 5 * heads * D * 4 * kernels.MAX_SPLITS):
            kernels.SCRATCH_BYTES = scratch
            assert all(torch.equal(a, b) for a, b in zip(bits(launched(*arguments, scale=0.05)), whole, strict=True)), "in slices"
    finally:
        kernels.SCRATCH_BYTES = before


BIT_CASES = [(8, "uint8", "bfloat16", (128, 512)), (3, "uint8", "bfloat16", (128, 0)), (2, "float32", "float32", (133, 20)), (65, "bfloat16", "bfloat16", (70, 1))]


def known_rows(device: str, launch: Any = None, dtypes: tuple[torch.dtype, ...] = (F32, BF16, U8)) -> None:
    """Rows without a key, with one, with lengths past the width: numbers that need no oracle."""
    launch = launch or launched
    for dtype in dtypes:
        query = F32 if dtype == F32 else BF16
        cache = filled(3, 4, dtype, torch.Generator().manual_seed(0)).to(device)
        stored = all_rows(cache).to(device)
        for width in (6, 300):
            indices = torch.full((5, width), -1, dtype=torch.int32, device=device)
            indices[1, -1], indices[2, 0], indices[3, :], indices[4, 2] = 7, 5, 12, 9
            lens = torch.tensor([width, 2**31 - 1, width + 5, width, 2], dtype=torch.int32, device=device)
            q = torch.randn(5, 3, D, device=device).to(query)
            for extra in ((), (cache, indices[:, :0], lens)):
                out, lse = launch(q, cache, indices, lens, *extra, scale=0.1)
                for row, slot in ((1, 7), (2, 5)):
                    assert torch.equal(out[row], stored[slot].to(query).expand(3, D)), "the weight of an only key is 1"
                    torch.testing.assert_close(lse[row].double(), 0.1 * (q[row].double() @ stored[slot]), rtol=1e-5, atol=1e-5)
                for row in (0, 3, 4):  # holes, slots past the cache, a key past the length
                    assert not bool(out[row].any()) and bool((lse[row] == NEG_INF).all())


def poison(device: str, launch: Any = None, dtypes: tuple[torch.dtype, ...] = (F32, U8)) -> None:
    """NaN in every row of the cache and every column that is no key, and in scratch that no program wrote."""
    launch = launch or launched
    for dtype in dtypes:
        query = F32 if dtype == F32 else BF16
        cache = filled(3, 16, dtype, torch.Generator().manual_seed(0)).to(device)
        kept = torch.arange(16, 32, device=device)
        clean = cache.clone()
        if dtype == torch.uint8:
            cache[0].fill_(0xFF)
            cache[2].fill_(0xFF)
        else:
            cache[0], cache[2] = float("nan"), float("nan")
        indices = torch.cat([kept.flip(0), torch.full((200,), 40, device=device)]).expand(2, -1).to(torch.int32)
        lens = torch.tensor([16, 3], device=device)
        q = torch.randn(2, 4, D, device=device).to(query)
        for _ in range(2):
            for dirty, right in zip(launch(q, cache, indices, lens, scale=0.1), launch(q, clean, indices, lens, scale=0.1), strict=True):
                assert bool(dirty.isfinite().all()) and torch.equal(dirty, right)
        out, lse = launch(q, cache, indices, torch.tensor([17, 16], device=device), scale=0.1)
        assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all()) and bool(out[1].isfinite().all())


def test_launcher_matches_the_reference_in_random_calls(interpreter: Interpreter) -> None:
    interpreter(draw_calls, "cpu", 2 * len(KINDS), 3)


@pytest.mark.parametrize("case", BIT_CASES)
def test_launcher_gives_a_row_the_same_bits_in_any_batch(case: tuple[int, str, str, tuple[int, int]], interpreter: Interpreter) -> None:
    interpreter(row_bits, "cpu", *case)


@pytest.mark.parametrize("check", [known_rows, poison])
def test_launcher_on_rows_that_need_no_oracle(check: Any, interpreter: Interpreter) -> None:
    interpreter(check, "cpu")


def programs_of(capability: int) -> list[Any]:
    """What calls of served sizes compile on an architecture."""
    from dsv4_ops._triton import sparse_decode as kernels
    from tests.test_triton import launches

    shape, found = kernels.shape_of_programs, []
    try:
        kernels.shape_of_programs = lambda device, width: shape(device, width) if capability == 90 else kernels.OTHERS  # no GPU here: Hopper's
        for widths in ((128, 512), (128, 0)):
            with launches() as seen:
                launched(*batch(1, 64, widths, torch.uint8, torch.bfloat16, "cpu"), scale=0.05)
            found += seen
    finally:
        kernels.shape_of_programs = shape
    return found


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_programs_of_served_sizes_compile(capability: int, interpreter: Interpreter, compiler: Interpreter) -> None:
    from tests.test_triton import compile_for

    found = interpreter(programs_of, capability)
    assert {one.kernel for one in found} == {"attend_kernel", "combine_kernel"}
    compiler(compile_for, found, capability)


def test_splits_follow_from_widths_alone(interpreter: Interpreter) -> None:
    interpreter(check_splits)


def check_splits() -> None:
    from dsv4_ops._triton import sparse_decode as kernels

    assert kernels.split_keys(128, 512, 64) == (1, 2, 8) and kernels.split_keys(192, 0, 32) == (1, 6, 0) and kernels.split_keys(0, 0, 64) == (1, 0, 0)
    assert [kernels.shape_of_programs(torch.device("cpu"), width)[1] for width in (0, 128, 256, 257, 640)] == [32, 32, 32, 64, 64]
    for swa in (0, 1, 64, 65, 128, 192, 256, 4096, 100000):
        for extra in (0, 1, 128, 512, 2048, 99999):
            for keys in (16, 32, 64):
                tiles, *splits = kernels.split_keys(swa, extra, keys)
                assert sum(splits) <= kernels.MAX_SPLITS
                for width, count in zip((swa, extra), splits, strict=True):
                    assert (count - 1) * tiles * keys < width <= count * tiles * keys or width == count == 0, "every column in one split, no split without a column"
