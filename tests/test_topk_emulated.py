"""The CUDA sources of the top-k, host side and kernels, run on a CPU by the emulator (tests/emulator/README.md): results bit for bit, and no fault seen.

Every launch plan that a chip can get is run, with score kinds that the GPU's own tests draw (``benchmarks.sanitizer``). The definition
is ``_topk_torch``, which other tests hold to the reference; calls that are small enough go to the reference itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from benchmarks.sanitizer import INF, KINDS, scores, topk_cases
from dsv4_ops import testing
from dsv4_ops.global_indices import _global_reference
from dsv4_ops.testing import Sample
from dsv4_ops.topk import _topk_torch
from tests.emulated import EmulatorError, driver, needs_compiler
from tests.test_topk_cuda import BUILT, DIRECT, PASSES, RESIDENT, STREAMED

pytestmark = needs_compiler
OPS = ("topk", "topk_values", "topk_slots")
ORDERS = ("forward", "backward", "random")
DEVICES = range(4)  # of tests/emulator/topk.cpp: clusters of 16, of 8, none, and little shared memory
PLANS: list[tuple[int, ...]] = [
    (DIRECT, 512, 1, 1), (DIRECT, 512, 2, 1), (DIRECT, 512, 4, 1), (DIRECT, 512, 8, 1), (DIRECT, 1024, 4, 1), (DIRECT, 1024, 8, 1),
    (RESIDENT, 512, 2, 8), (RESIDENT, 512, 4, 4), (RESIDENT, 512, 4, 8), (RESIDENT, 512, 8, 4), (RESIDENT, 1024, 2, 16), (RESIDENT, 1024, 4, 8), (RESIDENT, 1024, 4, 16), (RESIDENT, 1024, 8, 8),
    (STREAMED, 1024, 2, 1), (STREAMED, 1024, 2, 2), (STREAMED, 1024, 2, 4), (STREAMED, 1024, 2, 8), (STREAMED, 512, 4, 1), (PASSES, 1024, 0, 1),
]  # fmt: skip
NAMES = {DIRECT: "direct", RESIDENT: "resident", STREAMED: "streamed", PASSES: "passes"}


def emulate(op: str, sample: Sample, **how: Any) -> list[torch.Tensor]:
    """Results of a top-k op by the emulated kernels, in the op's order."""
    tensors = [value for value in sample.args if isinstance(value, torch.Tensor)]
    integers = [int(value) for value in sample.args if not isinstance(value, torch.Tensor)]
    bound = sample.kwargs.get("max_seq_len")
    if len(integers) > (2 if op == "topk_slots" else 1):
        bound = integers.pop()
    return driver("topk")(op, tensors, [integers[0], -1 if bound is None else bound, *integers[1:]], **how)


def defined(op: str, sample: Sample) -> list[torch.Tensor]:
    """The same by definition."""
    logits, lengths, *more = sample.args
    if logits.numel() < 5000:
        return list(testing.outputs(testing.reference(op)(*sample.args, **sample.kwargs)))
    if op == "topk_slots":
        ids, valid, table, k, block_size = more
        return list(_global_reference(_topk_torch(logits, lengths, k), ids, valid, table, block_size=block_size))
    columns = _topk_torch(logits, lengths, *more, **sample.kwargs)
    return [columns] if op == "topk" else [logits.gather(1, columns.clamp(min=0).long()).masked_fill(columns < 0, -INF), columns]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]) if tensor.is_floating_point() else tensor


def compare(op: str, sample: Sample, **how: Any) -> list[torch.Tensor]:
    results = emulate(op, sample, **how)
    for result, expected in zip(results, defined(op, sample), strict=True):
        assert torch.equal(bits(result), bits(expected)), f"{op}: {sample.label} {how}"
    return results


def plans(device: int, sizes: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """(kernel, threads, vectors, cluster) of each (rows, width, k)."""
    (found,) = driver("topk")("plan", [torch.tensor(sizes)], device=device)
    return [tuple(plan) for plan in found.tolist()]


SIZES = list(
    itertools.product((1, 5, 9, 17, 21, 65, 133), (1, 2047, 4096, 4097, 8193, 16385, 32769, 65537, 110000, 131073, 262145), (40, 700))
)


def cheapest(plan: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(device, rows, width, k) of the smallest call that gets this plan."""
    found = [
        (rows * width, device, rows, width, k)
        for device in DEVICES
        for (rows, width, k), given in zip(SIZES, plans(device, SIZES), strict=True)
        if given == plan
    ]
    return min(found)[1:]


def test_every_plan_is_run_here() -> None:
    given = {plan for device in DEVICES for plan in plans(device, SIZES)}
    assert given == set(PLANS)
    assert {(kernel, threads, vectors) for kernel, threads, vectors, _ in PLANS} == {
        (kernel, *one) for kernel, all_of in BUILT.items() for one in all_of
    }


def lengths_of(rows: int, width: int, k: int, draw: int) -> torch.Tensor:
    """The whole row, lengths around k, and of all sizes; in turn the int32 extremes, none and one."""
    special = (width, k, -(2**31), k + 1, 0, width + 5, k - 1, 1, 2**31 - 1, -1)
    generator = torch.Generator().manual_seed(draw)
    some = torch.randint(0, min(width, 3000) + 3, (rows,), generator=generator)
    for row in range(0, rows, 2):
        some[row] = special[(row // 2 + draw) % len(special)]
    return some.to(torch.int64 if draw % 3 == 1 else torch.int32)


def call(op: str, kind: str, rows: int, width: int, k: int, draw: int) -> Sample:
    generator = torch.Generator().manual_seed(draw)
    offset = draw % 5
    logits = scores(kind, rows, width + 7, generator).to(torch.bfloat16 if draw % 2 else torch.float32)[:, offset : offset + width]
    more: tuple[Any, ...] = (k,)
    if op == "topk_slots":
        table = torch.randint(-1, 5000, (3, width // 48 + 1), generator=generator, dtype=torch.int32)
        more = (
            torch.randint(-1, 4, (rows,), generator=generator, dtype=torch.int32),
            torch.rand(rows, generator=generator) < 0.9,
            table,
            k,
            48,
        )
    return Sample(f"{kind}, {rows} x {width}, k {k}, {logits.dtype}, draw {draw}", (logits, lengths_of(rows, width, k, draw), *more))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{NAMES[plan[0]]}-{plan[1]}x{plan[2]}-cluster{plan[3]}")
def test_plan(plan: tuple[int, ...]) -> None:
    """Scores of every kind on short rows, of fewer on long ones; k from 1 to 4096; all ops and orders in turn."""
    device, rows, width, k = cheapest(plan)
    turn = PLANS.index(plan)
    for draw in range(max(4, min(2 * len(KINDS), 1_000_000 // (rows * width)))):
        op, kind, order = OPS[(draw + turn) % 3], KINDS[(draw + 3 * turn) % len(KINDS)], ORDERS[(draw // 2 + turn) % 3]
        wanted = (k, 1, k, 4096 if plans(device, [(rows, width, 4096)]) == [plan] else k, k + 24)[draw % 5]
        compare(op, call(op, kind, rows, width, wanted, draw), order=order, seed=draw, device=device)


@pytest.mark.parametrize("op", OPS)
def test_samples(op: str) -> None:
    """The op's own samples: strides, views, 2-D lengths, int64 extremes, no rows, no columns."""
    for i, sample in enumerate(testing.samples(op)):
        compare(op, sample, order=ORDERS[i % 3], seed=i, device=i % len(DEVICES))


def test_cases_of_the_sanitizer() -> None:
    """What compute-sanitizer runs on a GPU, as far as it is small."""
    for i, sample in enumerate(case for op in OPS for case in topk_cases(op) if case.args[0].numel() <= 20000):
        op = "topk_slots" if len(sample.args) > 3 else OPS[i % 2]
        compare(op, sample, order=ORDERS[i % 3], seed=i)


@pytest.mark.parametrize("plan", [(DIRECT, 512, 2, 1), (RESIDENT, 512, 2, 8), (STREAMED, 512, 4, 1)], ids=lambda plan: NAMES[plan[0]])
def test_same_bits_in_every_order(plan: tuple[int, ...]) -> None:
    """Ties by the hundred, and 12 schedules: one answer."""
    device, rows, width, k = cheapest(plan)
    logits = torch.randint(0, 16, (min(rows, 3), width), generator=torch.Generator().manual_seed(7)).float()
    if rows > 3:
        logits = logits.repeat(7, 1)[:rows]
    lengths = torch.full((rows,), width, dtype=torch.int32)
    lengths[3:] = 5
    sample = Sample("16 values", (logits, lengths, k))
    for seed in range(10):
        compare("topk", sample, order="random", seed=seed, device=device)
    for order in ("forward", "backward"):
        compare("topk", sample, order=order, device=device)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_with_other_bounds(order: str) -> None:
    """One block of a cluster holds most of the winners, all equal: its bound is theirs, and the others list what they have of them."""
    device, rows, width, k = cheapest((RESIDENT, 512, 2, 8))
    logits = torch.ones(rows, width)
    logits[:, torch.arange(width) // 32 % 8 == 3] = 2.0  # chunks of 32 columns are dealt out in turn
    logits[:, 7::701] = 2.0
    compare("topk", Sample("two values", (logits, torch.full((rows,), width), k)), order=order, device=device)


def test_lengths_of_64_bits() -> None:
    lengths = torch.tensor([-(2**32) + 7, 2**32 + 1, -(2**63), 2**63 - 1])
    compare("topk", Sample("int64 lengths", (torch.arange(80.0).reshape(4, 20), lengths, 5)))


def test_host_checks_come_first() -> None:
    logits, lengths = torch.zeros(3, 8), torch.ones(3, dtype=torch.int32)
    for args, words in (
        ((logits.half(), lengths, 2), "logits must be float32 or bfloat16"),
        ((logits.t(), lengths, 2), "dense in its last dimension"),
        ((logits, lengths.float(), 2), "lengths must be int32 or int64"),
        ((logits, lengths.repeat(2), 2), "lengths must have at most 3 entries"),
        ((logits, lengths, 0), "k must be between 1 and 4096, got 0"),
        ((logits, lengths, 4097), "k must be between 1 and 4096, got 4097"),
    ):
        with pytest.raises(EmulatorError, match=words):
            emulate("topk", Sample("bad", args))
