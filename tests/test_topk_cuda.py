"""The CUDA top-k against the PyTorch path and the definition, under graph replay, and its launch plan (no GPU needed)."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dsv4_ops
from benchmarks.sanitizer import INF, KINDS, NAN, scores
from dsv4_ops import loaded, skipped, topk, topk_values
from dsv4_ops.testing import assert_topk
from dsv4_ops.topk import _topk_reference, _topk_torch

if not torch.cuda.is_available():
    _reason = "no CUDA device"
elif "_C_cuda" not in loaded:
    _reason = "dsv4_ops._C_cuda is not loaded: " + skipped.get("_C_cuda", "")
else:
    _reason = ""
needs_kernel = pytest.mark.skipif(bool(_reason), reason=_reason or "the CUDA kernel is there")
needs_library = pytest.mark.skipif("_C" not in loaded, reason="dsv4_ops._C is not built")
I32 = torch.int32


def lens(*values: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


def row_of(*columns: range | int, k: int) -> list[int]:
    flat = [c for part in columns for c in (part if isinstance(part, range) else [part])]
    return flat + [-1] * (k - len(flat))


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result, or a failure after ``seconds``: a kernel that hangs keeps only its own thread."""
    results: list[Any] = []

    def run() -> None:
        value = call()
        torch.cuda.synchronize()
        results.append(value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"no result after {seconds} s"
    assert results, "the call failed"
    return results[0]


def captured(body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result


# ---- the launch plan ------------------------------------------------------------------------------------------------

WIDTHS = (0, 1, 100, 2048, 2049, 4096, 8192, 8193, 16384, 16385, 32768, 65536, 131072, 262144, 262145, 2**20, 2**31 - 1)
DIRECT, RESIDENT, STREAMED, PASSES = range(4)
BUILT = {
    DIRECT: {(512, 1), (512, 2), (512, 4), (512, 8), (1024, 4), (1024, 8)},
    RESIDENT: {(512, 2), (512, 4), (512, 8), (1024, 2), (1024, 4), (1024, 8)},
    STREAMED: {(512, 4), (1024, 2)},
    PASSES: {(1024, 0)},
}


def plan(shared_bytes: int, largest_cluster: int, rows: int, width: int, k: int = 512, processors: int = 132) -> tuple[int, ...]:
    library = ctypes.CDLL(dsv4_ops._C.__file__)  # type: ignore[attr-defined]
    out = (ctypes.c_int64 * 7)()
    library.dsv4_ops_topk_plan(*[ctypes.c_int64(int(v)) for v in (shared_bytes, processors, largest_cluster, rows, width, k)], out)
    return tuple(out)


@needs_library
def test_case_A25_every_device_gets_a_launchable_plan() -> None:
    """Shared memory holds histograms, a bit a column and as many candidates as fit, never scores: no device's limit decides whether a call runs."""
    assert plan(101376, 8, 8, 262144)[6] <= 101376 and plan(232448, 16, 8, 262144)[6] <= 232448
    assert plan(49152, 1, 8, 16384)[6] <= 49152
    for shared_bytes, largest, processors in ((49152, 1, 20), (101376, 1, 108), (101376, 8, 84), (232448, 16, 132), (232448, 16, 148)):
        for rows, width, k in itertools.product((1, 4, 5, 8, 16, 17, 32, 48, 64, 65, 128, 133, 256, 100000), WIDTHS, (1, 512, 4096)):
            kernel, threads, vectors, cluster, listed, words, used = plan(shared_bytes, largest, rows, width, k, processors)
            assert (threads, vectors) in BUILT[kernel] and used <= shared_bytes
            assert cluster in (1, 2, 4, 8, 16) and cluster <= largest
            if kernel in (DIRECT, RESIDENT):
                assert threads * vectors * 4 * cluster >= width, "a row that stays in registers must fit"
            if kernel in (RESIDENT, STREAMED):
                assert words * 32 >= width and words % 4 == 0 and listed >= 1024, "a bit for each column, and room for candidates"
                assert used >= 3 * 2048 * 4 + 4 * words + 8 * listed
    assert plan(232448, 16, 8, 2**20)[0] != PASSES, "a row of a million columns is read once on this chip"
    assert plan(232448, 16, 8, 32768)[0] == RESIDENT and plan(232448, 16, 8, 32768, 2048)[0] == plan(101376, 1, 8, 32768)[0] == DIRECT


# ---- draws ----------------------------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_draws(kind: str) -> None:
    """910 calls of each kind: shapes, strides, alignments, dtypes, lengths. The PyTorch path has its own oracle (test_topk.py)."""
    generator = torch.Generator(device="cuda").manual_seed(len(kind))
    host = torch.Generator().manual_seed(len(kind))

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=host))

    for draw in range(910):
        rows = number(0, 10) if draw % 7 else number(10, 300)
        limit = (300, 5000, 20000, 70000, 300000)[number(0, 5)] if rows < 10 else 5000
        width = number(1, limit)
        k = (1, 64, 512, 1000, 2048, 4096)[number(0, 6)] if draw % 2 else number(1, min(width, 4096) + 1)
        offset = number(0, 5)
        logits = scores(kind, rows, width + 7, generator).to(torch.bfloat16 if draw % 3 == 0 else torch.float32)[:, offset : offset + width]
        near = torch.randint(-3, width + 4, (rows,), generator=generator, device="cuda")
        far = torch.randint(-(2**31), 2**31, (rows,), generator=generator, device="cuda")
        lengths = torch.where(torch.rand(rows, generator=generator, device="cuda") < 0.2, far, near).to(torch.int64 if draw % 5 == 0 else I32)
        if draw % 4 == 0:
            lengths = lengths.repeat_interleave(2)[::2]
        if draw % 6 == 0 and rows:
            lengths = lengths[: number(0, rows + 1)]
        bound = number(0, width + 3) if draw % 8 == 0 else None
        expected = _topk_torch(logits, lengths, k, bound)
        values, indices = topk_values(logits, lengths, k, bound)
        where = f"draw {draw}: {rows} x {width}, k {k}, offset {offset}, {logits.dtype}"
        assert torch.equal(indices, expected), where
        assert torch.equal(topk(logits, lengths, k, bound), expected), where
        if width:
            gathered = logits.gather(1, indices.clamp(min=0).long())
            bits = torch.int32 if logits.dtype == torch.float32 else torch.int16
            wanted = torch.where(indices >= 0, gathered, -INF).view(bits)
            assert torch.equal(values.view(bits), wanted), where
        if draw % 100 == 0 and rows * width < 200000:
            assert torch.equal(indices.cpu(), _topk_reference(logits.cpu(), lengths.cpu(), k, bound)), where


@needs_kernel
@pytest.mark.parametrize("width", [2048, 8192, 16384, 32768, 65536, 131072, 262144])
def test_a_row_has_the_same_bits_in_any_batch(width: int) -> None:
    """Each number of rows may take another launch plan; the answer for a row stays."""
    base = (torch.randn(160, width, device="cuda") * 8).round() / 8
    lengths = torch.randint(width // 2, width + 1, (160,), device="cuda", dtype=I32)
    expected = topk(base, lengths, 512)
    assert torch.equal(expected, _topk_torch(base, lengths, 512))
    for rows in (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 48, 64, 65, 128, 133):
        assert torch.equal(topk(base[:rows], lengths[:rows], 512), expected[:rows]), rows
        assert torch.equal(topk(base[160 - rows :], lengths[160 - rows :], 512), expected[160 - rows :]), rows


@needs_kernel
def test_the_same_bits_in_a_hundred_runs() -> None:
    for rows, width in ((1, 2048), (8, 65536), (64, 32768), (133, 16384), (4, 262144)):
        logits = (torch.randn(rows, width, device="cuda") * 4).round()
        lengths = torch.randint(0, width + 1, (rows,), device="cuda", dtype=I32)
        first = topk(logits, lengths, 512)
        for _ in range(100):
            assert torch.equal(topk(logits, lengths, 512), first)


@needs_kernel
def test_drain_storm() -> None:
    """Replays with random lengths, negative ones beside long rows. ``DSV4_OPS_STORM`` sets their number (a million: half a minute)."""
    replays = int(os.environ.get("DSV4_OPS_STORM", "20000"))
    rows, width, k = 8, 65536, 512
    logits = torch.arange(float(width), device="cuda").expand(rows, width).contiguous()
    lengths = torch.zeros(rows, dtype=I32, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    column = torch.arange(k, device="cuda")

    def body() -> None:
        kind = torch.randint(0, 4, (rows,), device="cuda")
        some = torch.randint(-5, 700, (rows,), device="cuda")
        long = torch.randint(0, width + 1, (rows,), device="cuda")
        lengths.copy_(torch.where(kind == 0, -1, torch.where(kind == 1, some, long)))
        live = lengths.clamp(0, width)[:, None]
        expected = (live - k).clamp(min=0) + column
        wrong.add_((topk(logits, lengths, k) != torch.where(expected < live, expected, -1)).sum())

    graph, _ = captured(body)

    def storm() -> int:
        for i in range(replays):
            graph.replay()
            if i % 1000 == 999:
                torch.cuda.synchronize()
        return int(wrong)

    assert within(60 + replays / 5000, storm) == 0


# ---- handed cases on the GPU ----------------------------------------------------------------------------------------


@needs_kernel
def test_case_A01_cuda_negative_length_returns() -> None:
    logits = torch.arange(16384.0, device="cuda").expand(8, 16384).contiguous()
    lengths = lens(99, 100, 4999, 5000, 8999, 9000, -1, 0)
    ends = [99, 100, 4999, 5000, 8999, 9000]
    expected = [row_of(range(max(0, e - 512), e), k=512) for e in ends] + [row_of(k=512)] * 2
    assert within(10, lambda: topk(logits, lengths, 512)).tolist() == expected
    graph, result = captured(lambda: topk(logits, lengths, 512))
    result.fill_(7)
    within(10, graph.replay)
    assert result.tolist() == expected


@needs_kernel
def test_case_A03_cuda_short_row_between_long_rows() -> None:
    logits = torch.randn(512, 65536, device="cuda")
    lengths = lens(40000, 100, 65536, 30000, 40000, 0, 65536, 33000).repeat_interleave(64)
    expected = _topk_torch(logits, lengths, 1024)
    assert torch.equal(topk(logits, lengths, 1024), expected)
    for _ in range(20):
        order = torch.randperm(512, device="cuda")
        shuffled = lengths[order]
        assert torch.equal(topk(logits, shuffled, 1024), _topk_torch(logits, shuffled, 1024))
    assert torch.equal(topk(logits[order], lengths[order], 1024), expected[order])


@needs_kernel
def test_case_A05_lengths_change_between_replays() -> None:
    logits = torch.randn(4, 65536, device="cuda")
    lengths = lens(64, 64, 64, 64)
    graph, result = captured(lambda: topk(logits, lengths, 512))
    for i in range(50):
        for values in ((65536, 40000, 33000, 64), (64, 64, 64, 64)):
            lengths.copy_(lens(*values))
            result.fill_(-5)
            graph.replay()
            assert torch.equal(result, _topk_torch(logits, lengths, 512)), (i, values)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_A05_sibling_scores_and_lengths_change_between_replays(dtype: torch.dtype) -> None:
    for rows, width in ((1, 2048), (16, 16384), (40, 131072), (3, 300000)):
        logits, lengths = torch.zeros(rows, width, device="cuda", dtype=dtype), torch.zeros(rows, dtype=I32, device="cuda")
        graph, (values, indices) = captured(lambda logits=logits, lengths=lengths: topk_values(logits, lengths, 512))
        for kind in KINDS:
            logits.copy_(scores(kind, rows, width, torch.Generator(device="cuda").manual_seed(rows)))
            lengths.random_(-5, width + 6)
            graph.replay()
            expected = _topk_torch(logits, lengths, 512)
            assert torch.equal(indices, expected), kind
            assert torch.equal(values.nan_to_num(), torch.where(expected >= 0, logits.gather(1, expected.clamp(min=0).long()), -INF).nan_to_num()), kind


@needs_kernel
@pytest.mark.parametrize("k", [512, 2048])
def test_case_A07_cuda_scores_in_one_coarse_bin(k: int) -> None:
    for width, start, step in ((8000, 1.0, 2.0**-23), (32000, 1.0, 2.0**-23), (200000, 0.5, 2.0**-24)):
        logits = (start + torch.arange(width, dtype=torch.float64) * step).float()[None].cuda()
        assert topk(logits, lens(width), k).tolist() == [list(range(width - k, width))]


@needs_kernel
@pytest.mark.parametrize("sign", [1, -1])
def test_case_A09_cuda_nan_is_never_selected(sign: int) -> None:
    columns = range(7, 4000, 40)
    logits = torch.full((1, 4096), 0x7FC00000 if sign > 0 else 0x7FC00000 - 2**31, dtype=I32, device="cuda").view(torch.float32)
    for c in columns:
        logits[0, c] = float(c)
    out = torch.full((1, 512), 123456789, dtype=I32, device="cuda")
    torch.ops.dsv4_ops.topk.out(logits, lens(4096), 512, out=out)
    assert out.tolist() == [row_of(*columns, k=512)]
    assert topk(logits.to(torch.bfloat16), lens(4096), 512).tolist() == out.tolist()
    assert topk(torch.full((3, 70000), NAN, device="cuda"), lens(70000, 512, 1), 512).tolist() == [[-1] * 512] * 3


@needs_kernel
def test_case_A11_cuda_length_past_the_width() -> None:
    buffer = torch.full((2, 1024), 1e9, device="cuda")
    logits = buffer[:, :1000]
    logits.copy_(torch.arange(1000.0).expand(2, 1000))
    for lengths in (lens(5000, 2**31 - 1), lens(5000, 2**63 - 1, dtype=torch.int64)):
        assert topk(logits, lengths, 512).tolist() == [list(range(488, 1000))] * 2
        assert topk(logits, lengths, 512, 700).tolist() == [list(range(188, 700))] * 2


@needs_kernel
def test_case_A13_cuda_row_offset_past_2_to_the_32(room: int) -> None:
    if room < 12 << 30:
        pytest.skip(f"needs 12 GiB of GPU memory, {room >> 30} are free")
    rows, width = 32769, 131072
    logits = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")  # 8.6 GB
    logits[rows - 1, 1007], logits[0, 1011] = 5, 9
    result = topk(logits, torch.full((rows,), width, dtype=I32, device="cuda"), 512)
    assert result[rows - 1].tolist() == [*range(511), 1007] and result[0].tolist() == [*range(511), 1011]
    assert bool((result[1 : rows - 1] == torch.arange(512, device="cuda")).all())


@needs_kernel
def test_case_A14_cuda_output_offset_past_2_to_the_31(room: int) -> None:
    if room < 24 << 30:
        pytest.skip(f"needs 24 GiB of GPU memory, {room >> 30} are free")
    stride = 2**29
    buffer = torch.zeros(4 * stride + 1024, dtype=I32, device="cuda")
    logits = torch.stack([torch.arange(1024.0).roll(100 * i) for i in range(5)]).cuda()
    lengths = lens(*[1024] * 5)
    torch.ops.dsv4_ops.topk.out(logits, lengths, 512, out=buffer.as_strided((5, 512), (stride, 1)))
    expected = _topk_torch(logits, lengths, 512)
    assert torch.equal(buffer[2147483648 : 2147483648 + 512], expected[4]) and torch.equal(buffer[:512], expected[0])
    assert not bool(buffer[2147483648 + 512 :].any()) and not bool(buffer[512:1024].any())
    # The op's own output, past 2**31 elements: rows * k in 64 bits.
    rows = 2**19 + 1
    few = topk(torch.arange(8.0, device="cuda").expand(rows, 8), torch.full((rows,), 8, dtype=I32, device="cuda"), 4096)
    assert few[-1].tolist() == few[0].tolist() == row_of(range(8), k=4096)


@needs_kernel
def test_case_A15_cuda_short_rows_at_odd_addresses() -> None:
    lengths = lens(1, 2, 3, 3, 2, 1, 0, 3)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.full((8, 1001), 1e9, dtype=dtype, device="cuda")
        for i, length in enumerate(lengths.tolist()):
            logits[i, :length] = torch.tensor([0.1, 0.9, 0.5])[:length].to(dtype)
        assert topk(logits, lengths, 512).tolist() == [row_of(range(n), k=512) for n in lengths.tolist()]
        assert topk(logits, lengths, 2).tolist() == [[0, -1], [0, 1], [1, 2], [1, 2], [0, 1], [0, -1], [-1, -1], [1, 2]]


@needs_kernel
@pytest.mark.parametrize(("batch", "dtype"), [(8, torch.float32), (32, torch.float32), (8, torch.bfloat16)])
def test_case_A17_replay_after_memory_was_refilled(batch: int, dtype: torch.dtype) -> None:
    logits = torch.randn(batch, 16384, device="cuda").to(dtype)
    lengths = torch.full((batch,), 16384 // 4, dtype=I32, device="cuda")
    graph, result = captured(lambda: topk(logits, lengths, 512))
    fill = [torch.full((2**26,), -1, dtype=I32, device="cuda") for _ in range(4)]
    for n in (4096, 16384):
        lengths.fill_(n)
        for _ in range(20):
            graph.replay()
            assert torch.equal(result, topk(logits, lengths, 512))
        assert_topk(result, logits, lengths, 512)
    assert all(bool((t == -1).all()) for t in fill)


@needs_kernel
@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_case_A18_cuda_tie_heavy_rows_many_launches(k: int) -> None:
    quantized = torch.randint(0, 8, (1024, 16384), device="cuda").float()
    lengths = torch.full((1024,), 16384, dtype=I32, device="cuda")
    for logits in (quantized, torch.zeros_like(quantized)):
        expected = _topk_torch(logits, lengths, k)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(300):
            wrong += (topk(logits, lengths, k) != expected).sum()
        assert int(wrong) == 0


@needs_kernel
@pytest.mark.parametrize("k", [1, 64, 100, 384, 512, 513, 1000, 1024, 1536, 2048, 4096])
def test_case_A20_cuda_exactly_k_columns_are_written(k: int) -> None:
    big = torch.full((3, k + 1024), -7, dtype=I32, device="cuda")
    logits, lengths = torch.randn(3, 3000, device="cuda"), lens(3000, 10, 0)
    torch.ops.dsv4_ops.topk.out(logits, lengths, k, out=big[:, :k])
    assert torch.equal(big[:, :k], _topk_torch(logits, lengths, k)) and bool((big[:, k:] == -7).all())


@needs_kernel
def test_case_A22_cuda_k_above_the_width() -> None:
    logits = torch.randn(2, 64, device="cuda")
    assert topk(logits, lens(64, 10), 2048).tolist() == [row_of(range(64), k=2048), row_of(range(10), k=2048)]


@needs_kernel
def test_neighbours_of_a_row_are_never_read() -> None:
    """Everything outside the live columns is NaN or huge; a read of it would show."""
    for width in (1, 3, 130, 2047, 8191, 16385, 70001, 262145):
        buffer = torch.full((6, width + 11), INF, device="cuda")
        for start in (0, 1, 2, 3):
            view = buffer[1:5, start : start + width]
            view.normal_()
            lengths = lens(width, width - 1, width // 2, 1)
            assert_topk(topk(view, lengths, 512), view, lengths, 512)
            buffer.fill_(INF)


@needs_kernel
def test_side_stream_and_other_current_device() -> None:
    logits, lengths = torch.randn(4, 5000, device="cuda"), lens(5000, 1, 700, 5000)
    expected = _topk_torch(logits, lengths, 300)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = topk(logits, lengths, 300)
    stream.synchronize()
    assert torch.equal(result, expected)
    with pytest.raises(RuntimeError, match="lengths must be on"):
        torch.ops.dsv4_ops.topk(logits, lengths.cpu(), 300)
