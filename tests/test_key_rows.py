"""Rows of keys for back ends of others: hand numbers, a brute force, and what a back end may take from them."""

from __future__ import annotations

import pytest
import torch

from dsv4_ops import build_mixed_sparse_indices, packed_page_slots, sparse_key_rows
from tests.common import INT32_MAX, i32, yes


def test_every_kind_of_entry_that_is_no_key(device: str) -> None:
    window = i32([[3, -1, 7, 8, 2, 5], [3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6]], device)  # 8 is past the cache; 5 is past the length
    kept = sparse_key_rows(window, i32([5, INT32_MAX, -4], device), swa_slots=8, swa_columns=8)
    assert kept.rows.tolist() == [[3, -1, 7, -1, 2, -1, -1, -1], [3, 4, 5, 6, 7, 0, -1, -1], [-1] * 8]
    assert kept.swa_counts.tolist() == [5, 6, 0] and kept.extra_counts.tolist() == [0, 0, 0]
    dropped = sparse_key_rows(window, i32([5, INT32_MAX, -4], device), swa_slots=8, swa_columns=8, drop_holes=True)
    assert dropped.rows.tolist() == [[3, 7, 2, -1, -1, -1, -1, -1], [3, 4, 5, 6, 7, 0, -1, -1], [-1] * 8]
    assert dropped.swa_counts.tolist() == [3, 6, 0]


def test_window_that_runs_on_is_followed_by_the_records(device: str) -> None:
    """One table with four window columns: no -1 stands before either count."""
    window, records = i32([[0, 1, -1, 2, 3, 4, 5], [6, -1, -1, -1, -1, -1, -1]], device), i32([[10, -1, 11], [-1, 12, -1]], device)
    rows, swa, extra = sparse_key_rows(window, i32([7, 7], device), records, i32([3, 3], device), swa_slots=9, extra_slots=99, swa_columns=4, extra_columns=8, drop_holes=True)
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5, 10, 11, -1, -1, -1, -1], [6, -1, -1, -1, 12, -1, -1, -1, -1, -1, -1, -1]]
    assert (swa.tolist(), extra.tolist()) == ([6, 1], [2, 1])


def test_slots_are_rewritten_once_and_as_packed_page_slots_does(device: str) -> None:
    slots = torch.randint(0, 640, (5, 24), dtype=torch.int32, device=device)
    lens = torch.full((5,), 24, dtype=torch.int32, device=device)
    rows, *_ = sparse_key_rows(slots, lens, slots, lens, swa_slots=640, extra_slots=640, swa_columns=24, extra_columns=24, swa_block_size=64, swa_block_span=65)
    assert torch.equal(rows[:, :24], packed_page_slots(slots, 64, 65)) and torch.equal(rows[:, 24:], slots)


@pytest.mark.parametrize("seed", range(4))
def test_against_a_brute_force(seed: int, device: str) -> None:
    g = torch.Generator().manual_seed(seed)
    for _ in range(25):
        tokens, width, k, columns = (int(torch.randint(0, high, (), generator=g)) for high in (5, 12, 12, 14))
        window, records = (torch.randint(-2, 12, (tokens, w), generator=g, dtype=torch.int32) for w in (width, k))
        lens, counts = (torch.randint(-2, 14, (tokens,), generator=g, dtype=torch.int32) for _ in range(2))
        expected, numbers = [], []
        for t in range(tokens):
            keys = [[s for s in row[t].tolist()[: max(0, int(n[t]))] if 0 <= s < 9] for row, n in ((window, lens), (records, counts))]
            line = keys[0] + [-1] * (columns - len(keys[0])) + keys[1]
            expected.append(line + [-1] * (columns + 24 - len(line)))
            numbers.append([len(part) for part in keys])
        found = sparse_key_rows(
            *(x.to(device) for x in (window, lens, records, counts)), swa_slots=9, extra_slots=9, swa_columns=columns, extra_columns=24, drop_holes=True
        )  # fmt: skip
        assert found.rows.tolist() == expected
        assert torch.stack([found.swa_counts, found.extra_counts], 1).tolist() == numbers


def test_mixed_rows_without_holes_are_the_same_table() -> None:
    """Where no page is missing, ``build_mixed_sparse_indices`` gives such a row to start with: same columns, same lengths."""
    window, width, k, block = 8, 13, 6, 4
    table = torch.arange(1, 9, dtype=torch.int32).view(1, 8)
    swa = torch.arange(4, 4 + width, dtype=torch.int32)[None].expand(3, -1).contiguous()
    lens, records = i32([13, 8, 3]), torch.arange(k, dtype=torch.int32)[None].expand(3, -1).contiguous()
    columns = torch.arange(width)
    swa = torch.where(columns < lens[:, None], swa, -1).int()
    mixed, total = build_mixed_sparse_indices(
        swa, lens, records, None, torch.zeros(3, dtype=torch.int64), i32([0, 0, 0]), yes(3), table, table,
        block_size=block, compressed_block_size=block, window=window, decode_indices_are_global=True,
    )  # fmt: skip
    mine = sparse_key_rows(swa, lens, records, i32([k] * 3), swa_slots=36, extra_slots=36, swa_columns=window, extra_columns=mixed.shape[1] - window, drop_holes=True)
    assert torch.equal(mine.rows, mixed)
    assert torch.equal(mine.swa_counts.clamp(min=window) + mine.extra_counts, total)
