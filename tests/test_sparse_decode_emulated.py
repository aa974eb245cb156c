"""The CUDA kernels of sparse MLA decode, csrc/cuda/sparse_decode.cu with its host side, run on a CPU by the emulator (tests/emulator/).

Each access, barrier and send of every call here is watched: a race, a byte out of place or a wait without an end is an EmulatorError.
On a GPU the checks of rows and bits are those of test_sparse_decode_cuda.py.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from dsv4_ops import _decode_backends, kv_cache_insert, new_kv_cache
from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE
from tests.emulated import COMPILER, EmulatorError, driver
from tests.test_sparse_decode import BF16, CUDA_KINDS, U8, batch, bits, draw_calls, filled, known_rows, poison, rows

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

H200, TWO_CLUSTERS, ONE_CLUSTER, AMPERE, LITTLE_SHARED = range(5)
"""Of tests/emulator/sparse_decode.cpp: how many clusters run at once decides how many heads a block has."""
SCALE = 512**-0.5
NAN, INF = float("nan"), float("inf")


def launched(*arguments: Any, scale: float, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, *segments, sink = [*arguments, *[None] * (8 - len(arguments))]
    segments = [a for a in segments if a is not None]
    tensors = [q, *segments] + ([] if sink is None else [sink])
    out, lse = driver("sparse_decode")("decode", tensors, [struct.unpack("q", struct.pack("d", scale))[0], int(len(segments) > 3), int(sink is not None)], **options)
    return out, lse


def compare(found: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(found[0], right[0], rtol=2**-7, atol=2**-6, equal_nan=True)
    torch.testing.assert_close(found[1], right[1], rtol=1e-5, atol=1e-5, equal_nan=True)


def served(arguments: tuple[Any, ...]) -> bool:
    shape = _decode_backends.shape_of(arguments[0], arguments[1], arguments[2], *(arguments[4:6] if len(arguments) > 5 else (None, None)))
    return all(r.ok for r in _decode_backends.requirements("cuda", shape, (9, 0)) if r.name != "library")


# ---- against the reference -------------------------------------------------------------------------------------------


def test_samples_of_the_op() -> None:
    """In the dtypes that the kernels take."""
    count = 0
    for seed in range(2):
        for sample in SPARSE_MLA_DECODE.samples("cpu", seed):
            arguments = [sample.args[0].bfloat16(), *sample.args[1:]]
            for place in (1, 4):
                if len(arguments) > place and arguments[place] is not None and arguments[place].dtype == torch.float32:
                    arguments[place] = arguments[place].bfloat16()
            if served(tuple(arguments)):
                compare(launched(*arguments, **sample.kwargs, order="random", seed=seed), SPARSE_MLA_DECODE.reference(*arguments, **sample.kwargs))
                count += 1
    assert count >= 14, "most samples"


@pytest.mark.parametrize("seed", range(2))
def test_random_calls_match_the_reference(seed: int) -> None:
    draw_calls("cpu", len(CUDA_KINDS), 2, seed, launched, CUDA_KINDS)


@pytest.mark.parametrize("check", [known_rows, poison])
def test_rows_that_need_no_oracle(check: Any) -> None:
    check("cpu", launched, (BF16, U8))


@pytest.mark.parametrize(("heads", "widths"), [(64, (128, 512)), (16, (128, 0)), (128, (133, 0)), (16, (192, 0)), (16, (256, 0)), (16, (256, 64)), (16, (192, 512)), (16, (128, 1024)), (8, (5, 3))])
def test_error_at_served_sizes(heads: int, widths: tuple[int, int]) -> None:
    arguments = batch(1, heads, widths, U8, BF16, "cpu")
    out, lse = launched(*arguments, scale=SCALE)
    right, right_lse = SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE)
    assert float((out.double() - right.double()).norm() / right.double().norm()) < 2.5e-3, "what bf16 weights and a bf16 result cost"
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [192, 193, 384, 385, 768, 769])
def test_where_clusters_grow_and_passes_begin(columns: int) -> None:
    """The last tile of a plan, and the first one of the next; all keys count."""
    arguments = batch(1, 3, (columns, 0), U8, BF16, "cpu")
    arguments[2][:] = torch.randint(64, 6 * 64, (1, columns), dtype=torch.int32)
    compare(launched(*arguments, scale=SCALE), SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "widths"), [(48, (40, 20)), (40, (128, 512)), (64, (128, 0)), (33, (192, 0)), (20, (150, 500)), (17, (128, 1000))])
def test_bits_depend_on_nothing_but_the_row(heads: int, widths: tuple[int, int]) -> None:
    """Not on the batch, on how many heads a block has, nor on the order in which warps and blocks run."""
    arguments = batch(3, heads, widths, U8, BF16, "cpu")
    whole = bits(launched(*arguments, scale=0.05))
    for device in (TWO_CLUSTERS, ONE_CLUSTER):
        assert all(torch.equal(a, b) for a, b in zip(bits(launched(*arguments, scale=0.05, device=device, order="backward")), whole, strict=True)), device
    for index, options in (([1], {"device": ONE_CLUSTER}), ([2, 0], {"order": "random", "seed": 1}), ([0], {"order": "backward"})):
        for part, full in zip(bits(launched(*rows(arguments, torch.tensor(index)), scale=0.05, **options)), whole, strict=True):
            assert torch.equal(part, full[index]), (index, options)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_warps_and_blocks(seed: int) -> None:
    arguments = batch(1, 20, ((128, 512), (128, 0), (192, 800))[seed % 3], U8, BF16, "cpu")
    one, other = launched(*arguments, scale=SCALE), launched(*arguments, scale=SCALE, order="random", seed=seed)
    assert all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def test_passes_without_a_key_are_left_out() -> None:
    """Blocks whose keys begin behind the dead end of a long window, and blocks that have none."""
    arguments = batch(4, 2, (900, 900), U8, BF16, "cpu")
    arguments[3][:], arguments[6][:] = torch.tensor([10, 900, 0, 0]), torch.tensor([900, 10, 3, 0])
    found = launched(*arguments, scale=SCALE)
    compare(found, SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))
    assert not bool(found[0][3].any()) and bool((found[1][3] == -INF).all())


# ---- rows that nobody sends on purpose -------------------------------------------------------------------------------


def test_every_code_and_every_exponent() -> None:
    """Each key is one of the 256 exponents with codes 0 to 255 in its groups: logits of the reference, NaN where it has one."""
    cache = new_kv_cache(4, 64)
    pages = cache.view(4, -1)
    for slot in range(256):
        page, offset = divmod(slot, 64)
        pages[page, 576 * offset : 576 * offset + 448] = (torch.arange(448) * 7 + slot * 13).remainder(256).to(torch.uint8)
        pages[page, 576 * 64 + 8 * offset : 576 * 64 + 8 * offset + 7] = torch.full((7,), slot, dtype=torch.uint8)
        pages[page, 576 * offset + 448 : 576 * offset + 576] = torch.randn(64).bfloat16().view(torch.uint8)
    finite = cache.clone()
    codes = finite.as_strided((4, 64, 448), (64 * 584, 576, 1))
    codes[(codes & 0x7F) == 0x7F] = 0x3A
    q = torch.zeros(256, 2, 512)
    q[:, 0, 450], q[:, 1, 3] = 1.0, 2.0**-90
    indices, lens = torch.arange(256, dtype=torch.int32)[:, None], torch.ones(256, dtype=torch.int32)
    for pages_of in (cache, finite):
        found, right = launched(q.bfloat16(), pages_of, indices, lens, scale=1.0), SPARSE_MLA_DECODE.reference(q.bfloat16(), pages_of, indices, lens, scale=1.0)
        alike = right[0].isfinite() & (right[0].abs() > 2.0**-120)
        assert torch.equal(found[0].isnan(), right[0].isnan()) and torch.equal(found[1].isnan(), right[1].isnan())
        assert torch.equal(found[0][alike], right[0][alike]), "the weight of an only key is 1"
        assert bool((found[0][right[0].abs() <= 2.0**-120].abs() <= 2.0**-119).all())
    assert bool(found[0][:246].isfinite().all()), "up to where the largest code leaves the range, NaN came from codes alone"


def test_indices_and_lengths_of_any_value() -> None:
    """Slots past the cache, negative and 64-bit ones, lengths out of range: no keys, and nothing else of the row is another."""
    arguments = batch(6, 5, (40, 90), U8, BF16, "cpu")
    for place, kind in ((2, torch.int64), (5, torch.int32)):
        arguments[place] = arguments[place].to(kind)
        slots = arguments[place - 1].shape[0] * arguments[place - 1].shape[1]
        wild = [slots, -5, 2**31 - 1, -(2**31), slots + 7, -1] if kind == torch.int32 else [slots, -5, 2**32 + 3, -(2**63), 2**63 - 1, 2**31]
        arguments[place][:, ::7] = torch.tensor(wild, dtype=kind)[:, None]
        lens = torch.tensor([2**31 - 1, -(2**31), 0, 1, 40, 17] if kind == torch.int32 else [2**63 - 1, -(2**63), -(2**32), 2**32 + 1, 2**31, 40], dtype=kind)
        arguments[place + 1] = lens.repeat_interleave(3)[::3]
    compare(launched(*arguments, scale=SCALE, order="random", seed=3), SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))


def test_strides_of_everything() -> None:
    """A query inside a wider one, wide index rows, pages with room behind them, a sink of every second head; the same bits as dense ones."""
    arguments = batch(3, 4, (50, 20), U8, BF16, "cpu")
    dense = bits(launched(*arguments, scale=0.05))
    wide_q = torch.randn(6, 9, 528).bfloat16()
    wide_q[::2, 1::2, 8:520] = arguments[0]
    padded = filled(6, 64, U8, torch.Generator().manual_seed(9), 48)
    padded.copy_(arguments[1])
    wide = torch.full((3, 71), 3, dtype=torch.int32)
    wide[:, 5:55] = arguments[2]
    sink = torch.stack([arguments[7], arguments[7] + 1], 1).flatten()[::2]
    strided = [wide_q[::2, 1::2, 8:520], padded.unsqueeze(2), wide[:, 5:55], *arguments[3:7], sink]
    assert all(torch.equal(a, b) for a, b in zip(bits(launched(*strided, scale=0.05)), dense, strict=True))


def test_rows_of_bfloat16_and_codes_side_by_side() -> None:
    arguments = batch(2, 3, (44, 70), U8, BF16, "cpu")
    arguments[4] = filled(6, 16, BF16, torch.Generator().manual_seed(1), 8)
    compare(launched(*arguments, scale=SCALE), SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))
    arguments[1:4], arguments[4:7] = arguments[4:7], arguments[1:4]
    compare(launched(*arguments, scale=SCALE), SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))


def test_sinks_and_scales_of_any_value() -> None:
    arguments = batch(2, 6, (20, 12), U8, BF16, "cpu")
    for dtype in (torch.float32, BF16):
        arguments[7] = torch.tensor([INF, -INF, 1000.0, -1000.0, 0.0, NAN]).to(dtype)
        for scale in (SCALE, 0.0, -0.3):
            compare(launched(*arguments, scale=scale), SPARSE_MLA_DECODE.reference(*arguments, scale=scale))


def test_numbers_at_the_ends_of_their_range() -> None:
    """What travels between blocks as float16 keeps its scale: keys of 2^-100, of 2^100, and both in neighbouring columns."""
    cache = new_kv_cache(2, 64, dtype=BF16)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 512, generator=generator)
    values[:, :256] *= 2.0**100
    values[:, 256:384] *= 2.0**-100
    values[:, 384::2] *= 2.0**12
    cache[1] = values.bfloat16()
    q = torch.zeros(1, 3, 512)
    q[..., 385::2] = torch.randn(1, 3, 64, generator=generator)
    indices, lens = torch.arange(64, 128, dtype=torch.int32)[None], torch.tensor([64])
    out, lse = launched(q.bfloat16(), cache, indices, lens, scale=0.5)
    right, right_lse = SPARSE_MLA_DECODE.reference(q.bfloat16(), cache, indices, lens, scale=0.5)
    for part in (slice(0, 256), slice(256, 384), slice(384, 512, 2), slice(385, 512, 2)):
        assert float((out[..., part].double() - right[..., part].double()).norm() / right[..., part].double().norm()) < 4e-3, part
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_in_its_row() -> None:
    cache = filled(2, 64, BF16, torch.Generator().manual_seed(0))
    cache[1, 5, 500], cache[1, 6, 10] = INF, NAN
    q = torch.rand(4, 2, 512).bfloat16()
    q[3, 1] = NAN
    indices = torch.tensor([[70, 71, 72], [70, 69, 72], [70, 70, 71], [71, 72, 73]], dtype=torch.int32)
    indices[0, 0] = 73
    out, lse = launched(q, cache, indices, torch.tensor([3, 3, 2, 3]), scale=SCALE)
    assert bool(out[0].isfinite().all()) and bool(out[1].isnan().all()) and bool(out[2].isnan().all()) and bool(lse[2].isnan().all())
    assert bool(out[3, 0].isfinite().all()) and bool(out[3, 1].isnan().all())
    right, _ = SPARSE_MLA_DECODE.reference(q[:1], cache, indices[:1], torch.tensor([3]), scale=SCALE)
    torch.testing.assert_close(out[:1], right, rtol=2**-7, atol=2**-6)


def test_pages_far_apart_and_of_odd_sizes() -> None:
    """Slots are divided by multiplication: block sizes that are and are not powers of two."""
    for block_size, pad in ((1, 8), (3, 8), (7, 8), (100, 0), (256, 16)):
        cache = filled(4, block_size, U8, torch.Generator().manual_seed(block_size), pad)
        indices = torch.randint(0, 4 * block_size, (1, 33), dtype=torch.int32)
        arguments = (torch.randn(1, 2, 512).bfloat16(), cache, indices, torch.tensor([33]))
        compare(launched(*arguments, scale=SCALE), SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_calls_that_no_kernel_takes() -> None:
    """By the checks of C++, for callers that pass the gate of Python by."""
    arguments = batch(2, 4, (12, 4), U8, BF16, "cpu")
    wide = torch.zeros(2, 4, 520).bfloat16()[..., 1:513]
    odd = filled(6, 64, U8, torch.Generator().manual_seed(0), 8)
    changed = [
        (0, arguments[0].float(), "q must be bfloat16"), (0, wide, "rows of q must start at multiples of 16 bytes"), (0, arguments[0][..., :256], r"q must be bfloat16 \[tokens, heads, 512\]"),
        (1, odd, "rows of a cache must start at multiples of 16 bytes"), (1, filled(6, 64, torch.float32, torch.Generator()), "a cache must be of uint8 or bfloat16"),
        (1, arguments[1][..., :512], "a cache must be of shape"), (2, arguments[2].float(), "indices must be int32 or int64"), (2, arguments[2][:1], r"indices must be \[tokens, width\]"),
        (6, arguments[6][:1], r"lens \[tokens\]"), (7, arguments[7][:3], r"attn_sink must be float32 or bfloat16 \[heads\]"),
    ]  # fmt: skip
    for place, value, words in changed:
        with pytest.raises(EmulatorError, match=words):
            launched(*arguments[:place], value, *arguments[place + 1 :], scale=SCALE)
    for device in (AMPERE, LITTLE_SHARED):
        with pytest.raises(EmulatorError, match=r"capability 9\.0 to 11\.x"):
            launched(*arguments, scale=SCALE, device=device)


def test_a_cache_in_use_is_not_written() -> None:
    """Nor anything but the results: inputs are exposed for reading alone, and a key that was just inserted is seen."""
    arguments = batch(1, 2, (3, 0), U8, BF16, "cpu")
    kv_cache_insert(torch.ones(1, 512), arguments[1], torch.tensor([70]))
    arguments[2][:], arguments[3][:] = 70, 3
    out, _ = launched(*arguments[:4], scale=SCALE)
    assert torch.equal(out, torch.ones(1, 2, 512).bfloat16())
