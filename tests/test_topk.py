"""Top-k against an oracle of its own, the handed cases, and what it may cost.

The C++ kernel, the vectorized PyTorch path, the reference and a numpy oracle must agree on every index.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_ops import loaded, testing, topk, topk_merge, topk_values
from dsv4_ops.testing import assert_topk
from dsv4_ops.topk import (
    _topk_merge_reference,
    _topk_merge_torch,
    _topk_reference,
    _topk_torch,
    _topk_triton,
    _topk_values_torch,
    _topk_values_triton,
)
from tests.interpreter import Interpreter

needs_cpp = pytest.mark.skipif("_C" not in loaded, reason="dsv4_ops._C is not built")
I32 = torch.int32
NAN, INF = float("nan"), float("inf")


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def row_of(*columns: range | int, k: int) -> list[int]:
    """A result row: the columns, then -1."""
    flat = [c for part in columns for c in (part if isinstance(part, range) else [part])]
    return flat + [-1] * (k - len(flat))


def oracle(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None) -> np.ndarray:
    scores = logits.float().numpy()
    bound = scores.shape[1] if max_seq_len is None else min(scores.shape[1], max_seq_len)
    result = np.full((scores.shape[0], k), -1, dtype=np.int32)
    for i, length in enumerate(lengths.numpy().reshape(-1)):
        row = scores[i, : int(np.clip(length, 0, bound))]
        columns = np.nonzero(~np.isnan(row))[0]
        ranked = columns[np.lexsort((columns, -row[columns]))]
        chosen = np.sort(ranked[:k])
        result[i, : len(chosen)] = chosen
    return result


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result, or a failure after ``seconds`` (kernels release the interpreter, so a hang is seen)."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"no result after {seconds} s"
    return results[0]


def untouched_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages exist once they are written: address ranges of many GB cost nothing."""
    size = elements * torch.empty((), dtype=dtype).element_size()
    try:
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    except (OSError, AttributeError) as error:
        pytest.skip(f"no {size >> 30} GiB of address space: {error}")
    return torch.frombuffer(buffer, dtype=dtype)


# ---- random rows ----------------------------------------------------------------------------------------------------

SPECIAL = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.1754942e-38, 3.4028235e38, -3.4028235e38])
SPECIAL[1].view(torch.int32).fill_(-1)  # a NaN with its sign bit set


def draw_scores(kind: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    if kind == "normal":
        return normal
    if kind == "ties":
        return (normal * 2).round()
    if kind == "special":
        pick = torch.randint(0, 2 * len(SPECIAL), shape, generator=generator)
        return torch.where(pick < len(SPECIAL), SPECIAL[pick % len(SPECIAL)], normal)
    if kind == "only special":
        return SPECIAL[torch.randint(0, len(SPECIAL), shape, generator=generator)]
    if kind == "denormal":
        return torch.randint(-(2**22), 2**22, shape, generator=generator, dtype=torch.int32).view(torch.float32).abs() * normal.sign()
    if kind == "any bits":
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    assert kind == "one bin"
    return 1.0 + torch.randint(0, 64, shape, generator=generator) * 2.0**-23


KINDS = ["normal", "ties", "special", "only special", "denormal", "any bits", "one bin"]


Draw = tuple[str, torch.Tensor, torch.Tensor, int, int | None]


def draws(kind: str, dtype: torch.dtype, count: int, rows_below: int = 25, widths: tuple[tuple[int, int], tuple[int, int]] = ((1, 400), (1000, 2300))) -> Iterator[Draw]:
    """A label and the arguments of ``count`` calls; one in four takes its width from the second range."""
    generator = torch.Generator().manual_seed(len(kind))

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for draw in range(count):
        rows, width = number(1, rows_below), number(*widths[draw % 4 == 0])
        k = number(1, width + 8)
        base = draw_scores(kind, (rows, width + 9), generator).to(dtype)
        offset = number(0, 5)
        logits = base[:, offset : offset + width]
        lengths = torch.randint(-3, width + 5, (rows,), generator=generator, dtype=torch.int64 if draw % 2 else I32)
        if draw % 3 == 0:
            lengths = lengths.repeat_interleave(2)[::2]  # not contiguous
        if draw % 5 == 0:
            lengths = lengths[: number(0, rows + 1)]
        limit = number(0, width + 3) if draw % 3 == 1 else None
        yield f"{kind}, draw {draw}: {list(logits.shape)}, k {k}", logits, lengths, k, limit


def values_of(logits: torch.Tensor, expected: np.ndarray) -> torch.Tensor:
    want = torch.full(expected.shape, -INF, dtype=logits.dtype)
    for r, c in np.argwhere(expected >= 0):
        want[r, c] = logits[r, expected[r, c]]
    return want.view(torch.int32 if logits.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_all_implementations_agree_with_an_independent_oracle(kind: str, dtype: torch.dtype) -> None:
    for label, logits, lengths, k, limit in draws(kind, dtype, 24):  # 24 calls x 14 kinds x up to 24 rows: some 4,000 rows
        expected = oracle(logits, lengths, k, limit)
        actual = topk(logits, lengths, k, limit)
        assert (actual.numpy() == expected).all(), label
        assert (_topk_torch(logits, lengths, k, limit).numpy() == expected).all(), label
        assert (_topk_reference(logits, lengths, k, limit).numpy() == expected).all(), label
        assert_topk(actual, logits, lengths, k, limit)
        values, indices = topk_values(logits, lengths, k, limit)
        assert torch.equal(indices, actual), label
        want = values_of(logits, expected)
        assert torch.equal(values.view(want.dtype), want), label
        assert torch.equal(_topk_values_torch(logits, lengths, k, limit)[0].view(want.dtype), want), label


def interpreted_draws(kind: str, dtype: torch.dtype) -> None:
    """Narrow blocks stand for long rows: a row of up to 90 columns is read in up to six."""
    from dsv4_ops._triton import topk as kernels

    usual = kernels.BLOCK
    try:
        for i, (label, logits, lengths, k, limit) in enumerate(draws(kind, dtype, 16, rows_below=5, widths=((1, 40), (60, 90)))):
            kernels.BLOCK = (16, 32, 256)[i % 3]
            label += f", blocks of {kernels.BLOCK}"
            expected = oracle(logits, lengths, k, limit)
            if i % 4 == 1:
                assert (_topk_triton(logits, lengths, k, limit).numpy() == expected).all(), label
                continue
            values, indices = _topk_values_triton(logits, lengths, k, limit)
            want = values_of(logits, expected)
            assert (indices.numpy() == expected).all() and torch.equal(values.view(want.dtype), want), label
    finally:
        kernels.BLOCK = usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_agrees_with_the_oracle(kind: str, dtype: torch.dtype, interpreter: Interpreter) -> None:
    interpreter(interpreted_draws, kind, dtype)


def test_lengths_of_every_layout_read_row_by_row() -> None:
    logits = torch.randn(12, 50)
    flat = torch.randint(0, 51, (12,), dtype=I32)
    expected = oracle(logits, flat, 8)
    square = flat.reshape(4, 3)
    wide = torch.zeros(4, 7, dtype=I32)
    wide[:, 1:7:2] = square
    transposed = square.t().contiguous().t()
    backwards_store = torch.zeros(24, dtype=torch.int64)
    backwards_store[::2] = flat
    for lengths in (flat, square, wide[:, 1:7:2], transposed, backwards_store[::2], square.long(), square[:, None].squeeze(1)):
        assert (topk(logits, lengths, 8).numpy() == expected).all()
        assert (_topk_torch(logits, lengths, 8).numpy() == expected).all()
    assert (topk(logits, lens(9).expand(12), 8).numpy() == oracle(logits, lens(9).expand(12).clone(), 8)).all()


def test_row_does_not_depend_on_its_batch_position_or_threads() -> None:
    logits = (torch.randn(64, 3000) * 4).round()
    lengths = torch.randint(0, 3001, (64,), dtype=I32)
    expected = topk(logits, lengths, 256)
    order = torch.randperm(64)
    assert torch.equal(topk(logits[order], lengths[order], 256), expected[order])
    for i in range(0, 64, 7):
        assert torch.equal(topk(logits[i : i + 1], lengths[i : i + 1], 256), expected[i : i + 1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(topk(logits, lengths, 256), expected)
    finally:
        torch.set_num_threads(threads)


def test_pytorch_path_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, lengths = torch.randn(11, 300), torch.randint(0, 301, (11,))
    monkeypatch.setattr(sys.modules["dsv4_ops.topk"], "_CHUNK", 1000)  # the name dsv4_ops.topk is the function
    assert (_topk_torch(logits, lengths, 40).numpy() == oracle(logits, lengths, 40)).all()


# ---- merge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
def test_merging_shards_gives_the_global_topk(kind: str, dtype: torch.dtype) -> None:
    """The merge's purpose: columns dealt to ranks, each ranks its own, the merge equals one top-k over all columns."""
    generator = torch.Generator().manual_seed(5)
    for world, k in ((1, 9), (2, 16), (3, 40), (8, 25)):
        logits = draw_scores(kind, (20, 48 * world), generator).to(dtype)
        lengths = torch.randint(0, 48 * world + 1, (20,), generator=generator)
        parts = []
        for rank in range(world):
            share = (lengths - rank + world - 1).clamp(min=0) // world
            values, indices = topk_values(logits[:, rank::world].contiguous(), share, k)
            parts.append((values, torch.where(indices < 0, -1, indices * world + rank)))
        order = torch.randperm(world, generator=generator).tolist()
        merged_values, merged = topk_merge(torch.cat([parts[p][0] for p in order], 1), torch.cat([parts[p][1] for p in order], 1), k)
        expected_values, expected = topk_values(logits, lengths, k)
        assert torch.equal(merged, expected)
        assert torch.equal(merged_values, expected_values)


def test_merge_agrees_with_its_reference_on_random_candidates() -> None:
    generator = torch.Generator().manual_seed(11)
    for draw in range(40):
        count, k = int(torch.randint(0, 60, (), generator=generator)), int(torch.randint(1, 70, (), generator=generator))
        values = draw_scores(KINDS[draw % len(KINDS)], (16, count), generator)
        indices = torch.randint(-5, 2**31 - 1 if draw % 2 else 40, (16, count), generator=generator).to(I32)  # with repeats
        testing.assert_same(topk_merge(values, indices, k), _topk_merge_reference(values, indices, k), f"draw {draw}")
        testing.assert_same(_topk_merge_torch(values, indices, k), _topk_merge_reference(values, indices, k), f"draw {draw}")


def test_merge_by_hand() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, NAN, -INF, 3.0, 9.0]])
    indices = lens(50, 40, 30, 20, 10, 35, -1)[None]
    assert topk_merge(values, indices, 2)[1].tolist() == [[30, 35]]
    assert topk_merge(values, indices, 4)[1].tolist() == [[30, 35, 40, 50]]
    merged_values, merged = topk_merge(values, indices, 7)
    assert merged.tolist() == [[10, 30, 35, 40, 50, -1, -1]]
    assert merged_values.tolist() == [[-INF, 3.0, 3.0, 3.0, 1.0, -INF, -INF]]


# ---- handed cases ---------------------------------------------------------------------------------------------------


def test_case_A01_negative_length_returns() -> None:
    logits = torch.arange(16384.0).expand(8, 16384).contiguous()
    lengths = lens(99, 100, 4999, 5000, 8999, 9000, -1, 0)
    result = within(10, lambda: topk(logits, lengths, 512)).tolist()
    ends = [99, 100, 4999, 5000, 8999, 9000]
    assert result == [row_of(range(max(0, e - 512), e), k=512) for e in ends] + [row_of(k=512)] * 2


def test_case_A03_short_row_between_long_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 16384, generator=generator)
    lengths = lens(10000, 100, 16384, 7500, 10000, 0, 16384, 8250).repeat_interleave(8)
    expected = topk(logits, lengths, 1024)
    assert_topk(expected, logits, lengths, 1024)
    for _ in range(3):
        order = torch.randperm(64, generator=generator)
        assert torch.equal(topk(logits[order], lengths[order], 1024), expected[order])
        shuffled = lengths[torch.randperm(64, generator=generator)]
        assert_topk(topk(logits, shuffled, 1024), logits, shuffled, 1024)


@pytest.mark.parametrize("k", [512, 2048])
def test_case_A07_scores_in_one_coarse_bin(k: int) -> None:
    for width, start, step in ((8000, 1.0, 2.0**-23), (32000, 1.0, 2.0**-23), (200000, 0.5, 2.0**-24)):
        logits = (start + torch.arange(width, dtype=torch.float64) * step).float()[None]
        for implementation in (topk, _topk_torch):
            assert implementation(logits, lens(width), k).tolist() == [list(range(width - k, width))]


def test_case_A07_sibling_bfloat16_plateau() -> None:
    logits = torch.full((1, 32000), 1.0, dtype=torch.bfloat16)
    logits[0, 20000:20100] = 1.0078125
    assert topk(logits, lens(32000), 512).tolist() == [row_of(range(412), range(20000, 20100), k=512)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_A09_nan_is_never_selected(sign: int, dtype: torch.dtype) -> None:
    columns = range(7, 4000, 40)
    bits, quiet = (torch.int32, 0x7FC00000) if dtype == torch.float32 else (torch.int16, 0x7FC0)
    logits = torch.full((1, 4096), quiet if sign > 0 else quiet - (1 << (8 * dtype.itemsize - 1)), dtype=bits).view(dtype)
    assert bool(logits.isnan().all()) and bool((logits.view(bits) < 0).all()) == (sign < 0)
    for c in columns:
        logits[0, c] = float(c)
    out = torch.full((1, 512), 123456789, dtype=I32)
    torch.ops.dsv4_ops.topk.out(logits, lens(4096), 512, out=out)
    assert out.tolist() == [row_of(*columns, k=512)]
    assert topk_values(logits, lens(4096), 512)[1].tolist() == out.tolist()
    assert topk(logits[:, :7], lens(7), 512).tolist() == [[-1] * 512]


def test_case_A11_length_past_the_width() -> None:
    buffer = torch.full((2, 1024), 1e9)
    logits = buffer[:, :1000]
    logits.copy_(torch.arange(1000.0).expand(2, 1000))
    for implementation in (topk, _topk_torch, _topk_reference):
        assert implementation(logits, lens(5000, 2**31 - 1), 512).tolist() == [list(range(488, 1000))] * 2
        assert implementation(logits, torch.tensor([5000, 2**63 - 1]), 512).tolist() == [list(range(488, 1000))] * 2
        assert implementation(logits, lens(5000, 2**31 - 1), 512, 700).tolist() == [list(range(188, 700))] * 2


@needs_cpp
def test_case_A13_row_offset_past_2_to_the_31() -> None:
    rows, width = 32769, 65536
    logits = untouched_memory(rows * width, torch.bfloat16).view(rows, width)
    logits[rows - 1, 1007], logits[0, 1011] = 5, 9
    lengths = torch.zeros(rows, dtype=I32)
    lengths[[0, 1, rows - 2, rows - 1]] = width
    values, indices = topk_values(logits, lengths, 512)
    assert indices[rows - 1].tolist() == [*range(511), 1007]
    assert indices[0].tolist() == [*range(511), 1011]
    assert indices[1].tolist() == indices[rows - 2].tolist() == [*range(512)]
    assert values[rows - 1, -1] == 5 and values[0, -1] == 9
    assert bool((indices[2 : rows - 2] == -1).all())


def test_case_A13_sibling_row_stride_past_2_to_the_31() -> None:
    stride = 2**31 + 5
    logits = untouched_memory(2 * stride + 1000, torch.bfloat16).as_strided((3, 1000), (stride, 1))
    for i in range(3):
        logits[i, 10 * i + 900] = 7
    for implementation in (topk, _topk_torch):
        assert implementation(logits, lens(1000, 1000, 1000), 512).tolist() == [row_of(range(511), 10 * i + 900, k=512) for i in range(3)]


def test_case_A14_output_offset_past_2_to_the_31() -> None:
    stride = 2**29
    buffer = untouched_memory(4 * stride + 2 * 512, I32)
    out = buffer.as_strided((5, 512), (stride, 1))
    logits = torch.stack([torch.arange(1024.0).roll(100 * i) for i in range(5)])
    torch.ops.dsv4_ops.topk.out(logits, torch.full((5,), 1024), 512, out=out)
    expected = oracle(logits, torch.full((5,), 1024), 512)
    assert buffer[2147483648 : 2147483648 + 512].tolist() == expected[4].tolist()
    assert buffer[:512].tolist() == expected[0].tolist()
    assert not bool(buffer[2147483648 + 512 :].any()) and not bool(buffer[512:1024].any())


def test_case_A15_short_rows_at_odd_addresses() -> None:
    lengths = lens(1, 2, 3, 3, 2, 1, 0, 3)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.full((8, 1001), 1e9, dtype=dtype)
        for i, length in enumerate(lengths.tolist()):
            logits[i, :length] = torch.tensor([0.1, 0.9, 0.5])[:length].to(dtype)
        assert topk(logits, lengths, 512).tolist() == [row_of(range(n), k=512) for n in lengths.tolist()]
        assert topk(logits, lengths, 2).tolist() == [[0, -1], [0, 1], [1, 2], [1, 2], [0, 1], [0, -1], [-1, -1], [1, 2]]


@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_case_A18_tie_heavy_rows_many_launches(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    quantized = torch.randint(0, 8, (32, 4096), generator=generator).float()
    for logits in (quantized, torch.zeros(32, 4096)):
        lengths = torch.randint(0, 4097, (32,), generator=generator, dtype=I32)
        first = topk(logits, lengths, k)
        assert_topk(first, logits, lengths, k)
        full = topk_values(logits, torch.full((32,), 4096), k)[0]
        assert torch.equal(full.sum(1), logits.topk(k).values.sum(1))
        for _ in range(30):
            assert torch.equal(topk(logits, lengths, k), first)


@pytest.mark.parametrize("k", [1, 64, 100, 384, 512, 513, 1000, 1024, 1536, 2048, 4096])
def test_case_A20_exactly_k_columns_are_written(k: int) -> None:
    big = torch.full((3, k + 1024), -7, dtype=I32)
    logits = torch.randn(3, 3000)
    lengths = lens(3000, 10, 0)
    torch.ops.dsv4_ops.topk.out(logits, lengths, k, out=big[:, :k])
    assert (big[:, :k].numpy() == oracle(logits, lengths, k)).all()
    assert bool((big[:, k:] == -7).all())


def test_case_A20_sibling_k_past_the_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="k must be between 1 and 4096, got 4097"):
        topk(torch.randn(1, 8), lens(8), 4097)


def test_case_A22_k_above_the_width() -> None:
    logits, lengths = torch.randn(2, 64), lens(64, 10)
    expected = [row_of(range(64), k=2048), row_of(range(10), k=2048)]
    for implementation in (topk, _topk_torch, _topk_reference):
        assert implementation(logits, lengths, 2048).tolist() == expected
    with FakeTensorMode() as mode:
        fake = topk(mode.from_tensor(logits), mode.from_tensor(lengths), 2048)
        values, indices = topk_values(mode.from_tensor(logits), mode.from_tensor(lengths), 2048)
    assert fake.shape == indices.shape == values.shape == (2, 2048) and fake.dtype == indices.dtype == I32
    assert topk(logits.to("meta"), lengths.to("meta"), 2048).shape == (2, 2048)


CORRUPTIONS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "duplicate for a tied column": (lambda row: row.__setitem__(1, 0), "listed twice"),
    "later tied column": (lambda row: row.__setitem__(511, 600), "lists 600 in place of 511, of equal scores .*lowest column"),
    "out of range": (lambda row: row.__setitem__(511, 4096), "outside"),
    "NaN bits as an index": (lambda row: row.__setitem__(511, 0x7FC00000), "outside"),
    "too few": (lambda row: row.__setitem__(511, -1), r"leaves out 511: the row holds min\(\|C\|, k\) = 512"),
    "not ascending": (lambda row: row.__setitem__(slice(0, 2), lens(1, 0)), "not ascending"),
    "NaN selected": (lambda row: row.__setitem__(511, 4000), "is NaN"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_case_A24_checker_rejects_wrong_answers(name: str) -> None:
    logits = torch.full((2, 4096), 0.5)
    logits[:, 4000] = NAN
    lengths = lens(4096, 700)
    good = topk(logits, lengths, 512)
    assert_topk(good, logits, lengths, 512)
    corrupt, message = CORRUPTIONS[name]
    bad = good.clone()
    corrupt(bad[0])
    with pytest.raises(AssertionError, match=f"row 0: .*{message}"):
        assert_topk(bad, logits, lengths, 512)


def test_case_A24_checker_rejects_a_lower_score_and_wrong_padding() -> None:
    logits = torch.arange(100.0).expand(1, 100)
    with pytest.raises(AssertionError, match="leaves out 99 and lists 97, though 99 scores 99 and 97 only 97"):
        assert_topk(lens(97, 98)[None], logits, lens(100), 2)
    with pytest.raises(AssertionError, match=r"lists 3, past its length: L = clamp\(3, 0, 100\) = 3"):
        assert_topk(lens(0, 1, 2, 3)[None], logits, lens(3), 4)
    with pytest.raises(AssertionError, match="expected int32"):
        assert_topk(torch.tensor([[98, 99]]), logits, lens(100), 2)


def test_case_B08_two_dimensional_lengths_are_not_reduced_again() -> None:
    logits = torch.zeros(4, 16)
    counts = (topk(logits, lens(4, 5, 9, 10).reshape(2, 2), 12) >= 0).sum(1)
    assert counts.tolist() == [4, 5, 9, 10]


def test_case_B10_padded_rows_and_a_canary_row() -> None:
    decode_lens = [3, 1, 4]
    logits = torch.randn(12, 2000)
    lengths = torch.zeros(3, 4, dtype=I32)
    for r, n in enumerate(decode_lens):
        lengths[r, :n] = torch.arange(900, 900 + n)
    buffer = torch.full((13, 512), -77, dtype=I32)
    torch.ops.dsv4_ops.topk.out(logits, lengths, 512, out=buffer[:12])
    assert bool((buffer[12] == -77).all())
    real = [0, 1, 2, 4, 8, 9, 10, 11]
    assert torch.equal(buffer[real], topk(logits[real], lengths.flatten()[real], 512))
    assert bool((buffer[[3, 5, 6, 7]] == -1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_B12_more_rows_than_lengths(dtype: torch.dtype) -> None:
    logits = torch.randn(8, 100).to(dtype)
    lengths = lens(5, 6, 7, 8, 9)
    for implementation in (topk, _topk_torch, _topk_reference):
        assert implementation(logits, lengths, 512).tolist() == [row_of(range(n), k=512) for n in (5, 6, 7, 8, 9)] + [[-1] * 512] * 3
    with pytest.raises(ValueError, match="lengths must be of at most 4 entries"):
        topk(logits[:4], lengths, 512)


# ---- compiled, and unchecked callers --------------------------------------------------------------------------------


def test_max_seq_len_is_dynamic_under_compile() -> None:
    torch._dynamo.reset()
    graphs = 0

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return gm.forward

    step = torch.compile(lambda x, n, limit: topk(x, n, 16, limit) + 1, backend=counting, fullgraph=True, dynamic=True)
    logits, lengths = torch.randn(4, 100), lens(100, 60, 30, 0)
    for limit in (90, 50, 71, 33):
        assert (step(logits, lengths, limit).numpy() == oracle(logits, lengths, 16, limit) + 1).all()
    assert graphs == 1


def test_inductor_calls_the_op() -> None:
    torch._dynamo.reset()

    def step(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = topk_values(x * 2, n, 32)
        return values.clamp(min=-100) + 1, indices * 2

    logits, lengths = torch.randn(6, 300), torch.randint(0, 301, (6,))
    testing.assert_same(torch.compile(step, fullgraph=True)(logits, lengths), step(logits, lengths))


@needs_cpp
@pytest.mark.parametrize(("change", "message"), [
    ({"logits": torch.zeros(3, 8, dtype=torch.float64)}, "logits must be float32 or bfloat16"),
    ({"logits": torch.zeros(8, 3).t()}, "dense in its last dimension"),
    ({"logits": torch.zeros(8)}, "2-dimensional"),
    ({"lengths": torch.zeros(4, dtype=I32)}, "at most 3 entries"),
    ({"lengths": torch.zeros(3)}, "int32 or int64"),
    ({"lengths": torch.zeros((), dtype=I32)}, "1- or 2-dimensional"),
    ({"k": 0}, "between 1 and 4096"),
    ({"k": 4097}, "between 1 and 4096"),
    ({"max_seq_len": -1}, "max_seq_len must be at least 0, got -1"),
])  # fmt: skip
def test_cpp_refuses_what_is_unsafe_without_the_python_check(change: dict[str, Any], message: str) -> None:
    """Compiled graphs reach the kernel without the Python wrapper."""
    arguments: dict[str, Any] = {"logits": torch.zeros(3, 8), "lengths": torch.zeros(3, dtype=I32), "k": 2, "max_seq_len": None} | change
    for name in ("topk", "topk_values"):
        with pytest.raises(RuntimeError, match=message) as caught:
            getattr(torch.ops.dsv4_ops, name)(**arguments)
        assert "/" not in str(caught.value).replace("csrc/checks.h", "").replace("csrc/topk_checks.h", "").replace("csrc/cpu/topk.cpp", ""), "a path of the building machine"


# ---- cost -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def best_of(attempts: int, measure: Callable[[], float], bound: float) -> float:
    """The smallest measured figure: other work on the machine only ever adds. Stops early under ``bound``."""
    smallest = INF
    for _ in range(attempts):
        smallest = min(smallest, measure())
        if smallest <= bound:
            break
    return smallest


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@needs_cpp
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_costs_at_most_twice_torch_topk_on_masked_scores(threads: None) -> None:
    logits = torch.randn(64, 65536)
    lengths = torch.full((64,), 65536, dtype=I32)
    masked = logits.masked_fill(torch.arange(65536) >= lengths[:, None], -INF)

    def ratio() -> float:
        pairs = [(seconds(lambda: topk(logits, lengths, 512)), seconds(lambda: masked.topk(512))) for _ in range(5)]
        return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)

    topk(logits, lengths, 512)
    assert best_of(5, ratio, 2.0) <= 2.0


def adversaries(rows: int, width: int) -> dict[str, torch.Tensor]:
    normal = torch.randn(rows, width)
    coin = torch.rand(rows, width) < 0.5
    return {
        "normal": normal,
        "all equal": torch.zeros(rows, width),
        "few distinct": (normal * 2).round(),
        "nearly equal": (1 + torch.arange(width) * 2.0**-23).expand(rows, width).contiguous(),
        "two bins": torch.where(coin, 1.0, 1.5),
        "all but a few -inf": torch.where(torch.rand(rows, width) < 0.999, -INF, normal),
        "half NaN": torch.where(coin, NAN, normal),
        "ascending": normal.sort(1).values,
        "descending": normal.sort(1, descending=True).values,
        "any low bits": torch.randint(0x3F800000, 0x3FFFFFFF, (rows, width)).to(torch.int32).view(torch.float32),
        "any bits": torch.randint(-(2**31), 2**31, (rows, width)).to(torch.int32).view(torch.float32),
    }


@needs_cpp
@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cost_does_not_depend_on_the_scores(dtype: torch.dtype, threads: None) -> None:
    lengths = torch.full((8,), 65536, dtype=I32)
    cases = {name: logits.to(dtype) for name, logits in adversaries(8, 65536).items()}
    best = dict.fromkeys(cases, INF)

    def spread() -> float:
        for _ in range(10):
            for name, logits in cases.items():
                best[name] = min(best[name], seconds(lambda logits=logits: topk(logits, lengths, 512)))
        return max(best.values()) / min(best.values())

    assert best_of(8, spread, 1.25) <= 1.25, {name: round(1e3 * t, 3) for name, t in best.items()}
