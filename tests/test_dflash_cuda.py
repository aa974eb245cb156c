"""The kernel of the draft inputs, alone and with window rows, against the references on random calls: interpreted on CPU, compiled on a GPU."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dsv4_ops import dflash, testing
from dsv4_ops.draft_step import PREPARE_DRAFT_STEP, DraftStep
from dsv4_ops.testing import Sample
from tests.interpreter import Interpreter
from tests.test_triton import needs_triton

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STATIC: list[dict[str, Any]] = [
    {"num_speculative_tokens": 3},
    {"num_speculative_tokens": 5, "sample_from_anchor": True},
    {"num_speculative_tokens": 1, "sample_from_anchor": True},
    {"num_speculative_tokens": 7, "cp_size": 2, "cp_rank": 1, "cp_interleave": 2},
    {"num_speculative_tokens": 4, "cp_size": 4, "cp_rank": 2, "cp_interleave": 1, "cp_sharded": [True, False]},
]
"""What kernels are compiled for: few, so that thousands of draws compile little."""
BLOCK_SIZES = ((4, 64), (16, 2))
EXTREMES = (-(2**31), -1, 0, 1, 2**31 - 1)


def draw(seed: int, most_requests: int = 24, most_padding: int = 300) -> Sample:
    """A call with values of any kind; every third one has nothing out of range."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    wild = seed % 3 > 0
    static = rng.choice(STATIC)
    sizes: tuple[int, ...] = rng.choice(BLOCK_SIZES) if rng.random() < 0.8 or "cp_sharded" in static else ()
    requests, states = rng.choice((0, 1, 2, 5, rng.randint(0, most_requests))), rng.choice((0, 1, 7, 40))
    lens = [rng.choice((0, 1, 3, 4, 6, 17)) for _ in range(requests)]
    max_model_len = rng.choice((1, 9, 60, 2**31 - 1))

    def integers(n: int, low: int, high: int, dtype: torch.dtype = torch.int32, odd: float = 0.15) -> torch.Tensor:
        values = torch.randint(low, high, (n,), generator=generator, dtype=dtype)
        if wild:
            extreme = torch.tensor(EXTREMES if dtype == torch.int32 else (*EXTREMES, -(2**63), 2**63 - 1), dtype=dtype)
            picked = extreme[torch.randint(0, len(extreme), (n,), generator=generator)]
            values = torch.where(torch.rand(n, generator=generator) < odd, picked, values)
        return spaced(values)

    def spaced(values: torch.Tensor) -> torch.Tensor:
        step = rng.choice((1, 1, 2, 3))
        return torch.zeros(len(values) * step, dtype=values.dtype)[::step].copy_(values)

    tokens = sum(lens) + rng.choice((0, 0, 5))
    positions = torch.cat([torch.zeros(0, dtype=torch.int64)] + [rng.randint(0, 70) + torch.arange(n) for n in lens] + [torch.zeros(tokens - sum(lens), dtype=torch.int64)])
    starts = torch.tensor([sum(lens[:i]) for i in range(requests + 1)], dtype=torch.int32)
    for _ in range(rng.randrange(4) if wild else 0):
        starts[rng.randrange(requests + 1)] = rng.choice((*EXTREMES, 3, 9, rng.randint(0, 60)))
    if wild and tokens:
        positions[rng.randrange(tokens)] = rng.choice((*EXTREMES, 2**63 - 1, -(2**63)))
    tables = []
    for _ in sizes:
        blocks = rng.choice((0, 1, 3, 20))
        table = torch.randint(-1, 60, (requests + rng.choice((0, 2)), blocks + rng.choice((0, 3))), generator=generator, dtype=torch.int32)
        tables.append(table[:, :blocks])
    queries = static["num_speculative_tokens"] + (0 if static.get("sample_from_anchor") else 1)
    args = (
        spaced(positions), spaced(starts), integers(requests, 0, max(states, 1)), integers(requests, 0, 3), integers(requests, 0, rng.choice((7, 60))),
        integers(states, 0, 900, torch.int64), integers(states, 0, 900, torch.int64), spaced(torch.rand(states, generator=generator)), integers(states, 0, 2**40, torch.int64),
        tables, list(sizes),
    )  # fmt: skip
    max_reqs = requests + rng.choice((0, 0, 1, most_padding // 5))
    return Sample(
        f"draw {seed}", args,
        {"mask_token_id": rng.choice((0, 999, 2**31 - 1)), "max_reqs": max_reqs, "max_tokens": requests * queries + rng.choice((0, 0, 1, most_padding)), "max_model_len": max_model_len, **static},
    )  # fmt: skip


def on(sample: Sample, device: str) -> Sample:
    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        base = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    return Sample(sample.label, tuple(map(move, sample.args)), {k: move(v) for k, v in sample.kwargs.items()})


def step_of(sample: Sample, seed: int) -> Sample:
    """The same call with window rows."""
    generator = torch.Generator().manual_seed(seed)
    queries = sample.kwargs["num_speculative_tokens"] + (0 if sample.kwargs.get("sample_from_anchor") else 1)
    window, spare, late = ((9, 5, True), (128, 3, False))[seed % 2]
    start = torch.randint(-3, 80, (2 * sample.args[2].shape[0],), generator=generator, dtype=torch.int32)[::2] if late else None
    return Sample(sample.label, sample.args, sample.kwargs | {"window": window, "width": window + queries + spare, "draft_start": start})


def compare(sample: Sample, device: str) -> None:
    op, names = (PREPARE_DRAFT_STEP, DraftStep._fields) if "window" in sample.kwargs else (dflash.PREPARE_DFLASH_INPUTS, dflash.DFlashInputs._fields)
    expected = op.reference(*sample.args, **sample.kwargs)
    mine = on(sample, device)
    with testing.poisoned():
        actual = op.triton(*mine.args, **mine.kwargs)  # type: ignore[misc]
    for name, a, e in zip(names, actual, expected, strict=True):
        testing.assert_same(a.cpu(), e, f"{sample.label}: {name}")


def compare_drawn(seed: int, device: str, *sizes: int) -> None:
    sample = draw(seed, *sizes)
    compare(sample, device)
    if "cp_size" not in sample.kwargs:
        compare(step_of(sample, seed), device)


def interpreted(first: int, last: int) -> None:
    """Programs so small that every kind of boundary between programs and between chunks is met."""
    from dsv4_ops._triton import dflash as kernels

    with patch.multiple(kernels, ROWS=8, CHUNK=4, SPAN=2):
        for seed in range(first, last):
            compare_drawn(seed, "cpu", 9, 50)


@needs_triton
@pytest.mark.parametrize("part", range(5))
def test_random_calls_interpreted(part: int, interpreter: Interpreter) -> None:
    interpreter(interpreted, part * 24, part * 24 + 24)


@needs_cuda
@needs_triton
@pytest.mark.parametrize("part", range(10))
def test_random_calls_on_cuda(part: int) -> None:
    for seed in range(part * 500, part * 500 + 500):
        compare_drawn(seed, "cuda")


@needs_cuda
@needs_triton
def test_server_sizes_on_cuda() -> None:
    """8192 rows, 1024 requests, two groups: all live, a few live, and a prefill chunk of thousands of tokens beside decodes."""
    for lens, requests in (([8] * 1024, 1024), ([8], 1), ([1, 6000, 8, 8, 0, 700], 6)):
        generator = torch.Generator().manual_seed(len(lens))
        args, kwargs = dflash._make("cpu", generator, lens, groups=(64, 16), blocks=256, n=7, max_model_len=20000)
        sample = Sample(f"{requests} requests", args, {**kwargs, "max_reqs": 1024, "max_tokens": 8192})
        compare(sample, "cuda")
        plain = {name: value for name, value in sample.kwargs.items() if not name.startswith("cp_")}
        compare(step_of(Sample(sample.label, args, plain), requests), "cuda")


@needs_cuda
@needs_triton
def test_table_past_two_to_the_31_elements(room: int) -> None:
    """The last request's row of a block table lies 2**31 elements in: a view of few rows with a huge stride."""
    if room < 10 << 30:
        pytest.skip(f"needs 10 GiB of GPU memory, {room >> 30} are free")
    args, kwargs = dflash._make("cpu", torch.Generator().manual_seed(3), [4, 4, 4])
    expected = dflash.PREPARE_DFLASH_INPUTS.reference(*args, **kwargs)
    mine = on(Sample("wide", args, kwargs), "cuda")
    stride = 2**30 + 17
    wide = torch.empty(2 * stride + 12, dtype=torch.int32, device="cuda").as_strided((3, 12), (stride, 1))
    wide.copy_(args[9][0])
    actual = dflash.PREPARE_DFLASH_INPUTS.triton(*mine.args[:9], [wide], *mine.args[10:], **mine.kwargs)  # type: ignore[misc]
    for name, a, e in zip(dflash.DFlashInputs._fields, actual, expected, strict=True):
        testing.assert_same(a.cpu(), e, name)
