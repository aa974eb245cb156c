"""Top-k with translation to slots: an oracle of its own, hand numbers, and siblings of the handed cases of both halves."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from dsv4_ops import global_topk_indices, loaded, skipped, testing, topk, topk_slots
from dsv4_ops.global_indices import _global_torch
from dsv4_ops.topk import _topk_torch
from dsv4_ops.topk_slots import _slots_reference, _slots_torch
from tests.common import INT32_MAX, i32, i64, yes
from tests.test_topk_cuda import captured

NAN, INF = float("nan"), float("inf")
needs_cpp = pytest.mark.skipif("_C" not in loaded, reason="dsv4_ops._C is not built")


def oracle(scores: list[list[float]], lengths: list[int], ids: list[int], valid: list[bool], table: list[list[int]], k: int, block_size: int, bound: int) -> tuple[list[list[int]], list[int]]:
    """By a map from (request, record) to slot, and by repeatedly taking the best column that is left."""
    where = {(r, b * block_size + o): page * block_size + o for r, row in enumerate(table) for b, page in enumerate(row) for o in range(block_size) if page > 0}
    slots, lens = [], []
    for i, row in enumerate(scores):
        live = valid[i] and 0 <= ids[i] < len(table)
        length = max(0, min(lengths[i] if i < len(lengths) else 0, bound)) if live else 0
        left = {c: s for c, s in enumerate(row[:length]) if s == s}
        chosen: list[int] = []
        while left and len(chosen) < k:
            best = max(left.values())
            chosen.append(min(c for c, s in left.items() if s == best))
            del left[chosen[-1]]
        found = [where.get((ids[i], c), -1) for c in sorted(chosen)]
        slots.append([s if s <= INT32_MAX else -1 for s in found] + [-1] * (k - len(found)))
        lens.append(len(found))
    return slots, lens


@pytest.mark.parametrize("seed", range(6))
def test_matches_an_independent_oracle(seed: int, device: str) -> None:
    rng = random.Random(seed)
    for draw in range(80):
        rows, width, requests, blocks = rng.randrange(0, 6), rng.randrange(0, 40), rng.randrange(0, 4), rng.randrange(0, 6)
        block_size, k = rng.choice([1, 3, 4, 7, 64]), rng.randrange(1, width + 6)
        scores = [[rng.choice([rng.gauss(0, 1), float(rng.randrange(3)), NAN, INF, -INF, 0.0, -0.0]) for _ in range(width)] for _ in range(rows)]
        lengths = [rng.choice([rng.randrange(width + 3), -1, INT32_MAX, -(2**31)]) for _ in range(rng.randrange(rows + 1) if draw % 5 == 0 else rows)]
        ids = [rng.choice([rng.randrange(max(1, requests)), rng.randrange(max(1, requests)), -1, 4, INT32_MAX, -(2**31)]) for _ in range(rows)]
        valid = [rng.random() < 0.85 for _ in range(rows)]
        table = [[rng.choice([0, -1, rng.randrange(1, 40), rng.randrange(1, 40), INT32_MAX // block_size, INT32_MAX]) for _ in range(blocks)] for _ in range(requests)]
        bound = rng.randrange(width + 2) if draw % 3 == 0 else None
        dtype = torch.bfloat16 if draw % 2 else torch.float32
        logits = torch.tensor(scores, dtype=torch.float32).reshape(rows, width).to(dtype)
        expected = oracle(logits.tolist(), lengths, ids, valid, table, k, block_size, width if bound is None else min(width, bound))
        arguments = (
            logits.to(device), torch.tensor(lengths, dtype=torch.int64 if draw % 4 == 0 else torch.int32, device=device), i32(ids, device),
            torch.tensor(valid, dtype=torch.bool, device=device), i32(table, device).reshape(requests, blocks), k, block_size, bound,
        )  # fmt: skip
        for implementation in (topk_slots, _slots_torch, _slots_reference):
            slots, lens = implementation(*arguments)
            assert slots.shape == (rows, k) and (slots.tolist(), lens.tolist()) == expected, f"draw {draw}: {rows} x {width}, k {k}"


def test_is_the_two_ops_one_after_the_other(device: str) -> None:
    """Sizes of an engine, where several blocks of threads share a row."""
    generator = torch.Generator().manual_seed(3)
    for rows, width, k, block_size in ((3, 5000, 512, 64), (9, 300, 512, 2), (2, 70000, 2048, 64), (5, 9000, 100, 48)):
        logits = ((torch.randn(rows, width, generator=generator) * 8).round() / 8).to(device)
        lengths = torch.randint(-1, width + 2, (rows,), generator=generator, dtype=torch.int32).to(device)
        blocks = -(-width // block_size) - 3
        table = torch.randint(-1, 4000, (4, blocks), generator=generator, dtype=torch.int32).to(device)
        ids, valid = torch.randint(0, 4, (rows,), generator=generator, dtype=torch.int32).to(device), (torch.arange(rows) != 1).to(device)
        slots, lens = topk_slots(logits, lengths, ids, valid, table, k, block_size)
        expected, expected_lens = global_topk_indices(topk(logits, lengths, k), ids, valid, table, block_size=block_size)
        assert torch.equal(slots, expected) and torch.equal(lens, expected_lens), (rows, width)


def test_case_C14_sibling_padding_tokens_use_nothing_of_their_row(device: str) -> None:
    logits = torch.tensor([[5.0, 1, 4, 2], [NAN, INF, 9, 9], [0.0, 0, 0, 7]], device=device)
    valid = torch.tensor([True, False, True], device=device)
    slots, lens = topk_slots(logits, i32([4, 2143289344, 4], device), i32([0, INT32_MAX, 1], device), valid, i32([[8], [2]], device), 2, 64)
    assert slots.tolist() == [[512, 514], [-1, -1], [128, 131]] and lens.tolist() == [2, 0, 2]


def test_case_C15_sibling_columns_without_a_page_keep_their_place(device: str) -> None:
    """Table of pages 8, null, 6 and then no more, two records a page: columns 2 and 3 are unmapped, 6 is past the table."""
    logits = torch.tensor([[0.0, 5, 4, -9, 3, -8, 2, -7]], device=device)
    backing = i32([8, 0, 6, 4242, 4242], device)
    for table in (backing[:3][None], backing.as_strided((1, 3), (5, 1)), i32([[8], [0], [6]], device).t()):
        slots, lens = topk_slots(logits, i32([8], device), i32([0], device), yes(1, device), table, 5, 2)
        assert slots.tolist() == [[16, 17, -1, 12, -1]] and lens.tolist() == [5], "holes count, the last one too"


def test_case_A21_sibling_every_one_of_the_columns_is_translated(device: str) -> None:
    table = i32([[200 + 3 * b for b in reversed(range(32))]], device)
    slots, lens = topk_slots(torch.zeros(1, 4096, device=device), i32([2048], device), i32([0], device), yes(1, device), table, 2048, 64)
    assert slots[0].tolist() == [(200 + 3 * b) * 64 + o for b in reversed(range(32)) for o in range(64)], "the order of columns, not of slots"
    assert lens.tolist() == [2048]


def test_case_A01_sibling_negative_and_huge_lengths(device: str) -> None:
    results: list[Any] = []
    table = i32([[1, 2, 3, 4]], device)
    arguments = (torch.arange(16.0, device=device).expand(5, 16).contiguous(), i32([-1, 3, 0, INT32_MAX, -(2**31)], device), i32([0] * 5, device), yes(5, device), table, 4, 4)
    thread = threading.Thread(target=lambda: results.append([t.cpu() for t in topk_slots(*arguments)]), daemon=True)
    thread.start()
    thread.join(60)
    assert results, "no result after 60 s"
    slots, lens = results[0]
    assert slots.tolist() == [[-1] * 4, [4, 5, 6, -1], [-1] * 4, [16, 17, 18, 19], [-1] * 4] and lens.tolist() == [0, 3, 0, 4, 0]


def test_case_A09_sibling_nan_columns_are_neither_listed_nor_counted(device: str) -> None:
    logits = torch.tensor([[NAN, 1, -NAN, 2, NAN, -INF]], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        slots, lens = topk_slots(logits.to(dtype), i32([6], device), i32([0], device), yes(1, device), i32([[1, 2]], device), 5, 3)
        assert slots.tolist() == [[4, 6, 8, -1, -1]] and lens.tolist() == [3]


def test_slots_that_int32_cannot_hold_never_wrap(device: str) -> None:
    """2**31 - 1 is 44739242 * 48 + 31: the last 16 records of that page have no slot, nor has any record of a page beyond."""
    slots, lens = topk_slots(torch.zeros(1, 144, device=device), i32([144], device), i32([0], device), yes(1, device), i32([[44739242, INT32_MAX, 2]], device), 144, 48)
    assert slots.tolist() == [[*range(INT32_MAX - 31, INT32_MAX + 1), *[-1] * 64, *range(96, 144)]] and lens.tolist() == [144]


def test_nothing_is_left_unwritten_where_nothing_can_be_chosen(device: str) -> None:
    """No columns, no pages, no requests, no lengths: the out form overwrites what the last step left."""
    ids, valid = i32([0, 0], device), yes(2, device)
    for width, lengths, table, count in ((0, [3, 3], [[1]], 0), (8, [8, 8], [[]], 4), (8, [], [[1, 1]], 0), (8, [8, 8], [], 0)):
        slots, lens = torch.full((2, 4), 99, dtype=torch.int32, device=device), torch.full((2,), 99, dtype=torch.int32, device=device)
        block_table = i32(table, device).reshape(len(table), -1) if table else i32([], device).reshape(0, 2)
        torch.ops.dsv4_ops.topk_slots.out(torch.zeros(2, width, device=device), i32(lengths, device), ids, valid, block_table, 4, 4, slots=slots, lens=lens)
        assert bool((slots == -1).all()) and lens.tolist() == [count] * 2


def test_lens_do_not_depend_on_the_table(device: str) -> None:
    logits, lengths = torch.randn(4, 64, device=device), i64([64, 10, 3, 0], device)
    ids, valid = i32([0, 1, 0, 1], device), yes(4, device)
    for table in (torch.zeros(2, 8, dtype=torch.int32, device=device), torch.ones(2, 8, dtype=torch.int32, device=device), torch.ones(2, 1, dtype=torch.int32, device=device)):
        assert topk_slots(logits, lengths, ids, valid, table, 16, 8)[1].tolist() == [16, 10, 3, 0]


def test_vectorized_form_reads_nothing_back() -> None:
    """Fake tensors have no values: a hidden .item(), boolean-mask index or nonzero raises instead of synchronizing."""
    for sample in testing.samples("topk_slots"):
        testing.fake_call(sample)(_slots_torch)


@needs_cpp
@pytest.mark.parametrize(("name", "value", "message"), [
    ("token_to_req_indices", torch.zeros(2, dtype=torch.int32), "one entry a row of logits"),
    ("token_to_req_indices", torch.zeros(3, dtype=torch.int64), "token_to_req_indices must be int32"),
    ("is_valid_token", torch.zeros(3, dtype=torch.int32), "is_valid_token must be bool"),
    ("is_valid_token", torch.zeros(3, 1, dtype=torch.bool), "one entry a row of logits"),
    ("block_table", torch.zeros(3, dtype=torch.int32), "2-dimensional"),
    ("block_table", torch.zeros(3, 2), "block_table must be int32"),
    ("block_size", 0, "block_size must be between 1"),
    ("block_size", 2**31, "block_size must be between 1"),
    ("k", 4097, "between 1 and 4096"),
])  # fmt: skip
def test_cpp_refuses_what_is_unsafe_without_the_python_check(name: str, value: Any, message: str) -> None:
    """Compiled graphs reach the kernel without the Python wrapper."""
    arguments: dict[str, Any] = {
        "logits": torch.zeros(3, 8), "lengths": i32([8, 8, 8]), "token_to_req_indices": i32([0, 0, 0]), "is_valid_token": yes(3),
        "block_table": i32([[1, 1]]), "k": 2, "block_size": 4,
    } | {name: value}  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dsv4_ops.topk_slots(**arguments)


@pytest.mark.skipif(not torch.cuda.is_available() or "_C_cuda" not in loaded, reason="no CUDA device, or no kernel: " + skipped.get("_C_cuda", ""))
def test_cuda_kernel_on_every_plan_and_under_replay() -> None:
    """Widths and rows of all launch plans; lengths, pages and validity change between replays of one graph."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    for width in (100, 2048, 4000, 8192, 16384, 32768, 65536, 131072, 262144, 300000, 2000000):
        for rows in (1, 8, 12, 20, 40, 100, 140) if width <= 65536 else (1, 8, 12, 40) if width <= 300000 else (2,):
            for k in (1, 512, 2048):
                logits = torch.randn(rows, width, generator=generator, device="cuda").to(torch.bfloat16 if k == 512 else torch.float32)
                lengths, ids = torch.zeros(rows, dtype=torch.int32, device="cuda"), torch.zeros(rows, dtype=torch.int32, device="cuda")
                valid, table = torch.ones(rows, dtype=torch.bool, device="cuda"), torch.ones(3, width // 48, dtype=torch.int32, device="cuda")
                graph, (slots, lens) = captured(lambda: topk_slots(logits, lengths, ids, valid, table, k, 48))  # noqa: B023
                for _ in range(2):
                    lengths.random_(-3, width + 4, generator=generator)
                    ids.random_(-1, 4, generator=generator)
                    valid.copy_(torch.rand(rows, generator=generator, device="cuda") < 0.8)
                    table.random_(-1, 5000, generator=generator)
                    slots.fill_(-7)
                    lens.fill_(-7)
                    graph.replay()
                    expected, expected_lens = _global_torch(_topk_torch(logits, lengths, k), ids, valid, table, block_size=48)  # no kernel of ours
                    assert torch.equal(slots, expected) and torch.equal(lens, expected_lens), f"{rows} x {width}, k {k}"
