"""Window rows and their layouts, against a map of where every token's KV stands, and the handed cases of area C."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_ops import (
    causal_swa_indices,
    decode_swa_width,
    draft_swa_indices,
    expand_block_table,
    global_topk_indices,
    packed_page_slots,
    page_block_span,
    swa_index_width,
    swa_indices_to_csr,
)
from dsv4_ops.errors import ArgumentError
from tests.common import INT32_MAX, i32, i64, yes


def placed(table: list[list[int]], block_size: int) -> dict[tuple[int, int], int]:
    """Where the KV of (request, position) stands: every token of every mapped page, laid out one by one."""
    where = {}
    for request, blocks in enumerate(table):
        position = 0
        for block in blocks:
            for offset in range(block_size):
                slot = block * block_size + offset
                if block >= 1 and slot <= INT32_MAX:
                    where[request, position] = slot
                position += 1
    return where


def one_row(position: int, table: list[int], block_size: int, window: int, width: int, device: str) -> tuple[list[int], int]:
    indices, lens = causal_swa_indices(i64([position], device), i32([0], device), yes(1, device), i32([table], device), block_size=block_size, window=window, width=width)
    return indices[0].tolist(), int(lens[0])


def test_widths_are_the_window_plus_the_block_rounded_to_64() -> None:
    assert [swa_index_width(128, q) for q in (1, 5, 7, 64, 65)] == [192, 192, 192, 192, 256]
    assert swa_index_width(59, 5) == 64 and swa_index_width(60, 5) == 128
    assert decode_swa_width(128) == decode_swa_width(128, 5) == 128
    assert decode_swa_width(128, 5, non_causal=True) == 192
    for call in (lambda: swa_index_width(0, 1), lambda: swa_index_width(128, 0), lambda: decode_swa_width(0)):
        with pytest.raises(ArgumentError, match="must be at least 1, got 0"):
            call()


@pytest.mark.parametrize("width", [128, 192, 256])
def test_case_C01_the_width_of_a_row_travels_with_it(width: int, device: str) -> None:
    table = i32([[5, 9, 20, 7, 11]], device)
    if width == 128:
        indices, lens = causal_swa_indices(i64(range(293, 300), device), i32([0] * 7, device), yes(7, device), table, block_size=64, window=128, width=width)
    else:
        indices, lens = draft_swa_indices(i32([293], device), table, yes(1, device), block_size=64, window=128, block_queries=7, width=width)
    assert indices.shape == (7, width) and int(lens.max()) <= width
    indptr, flat = swa_indices_to_csr(indices, lens)
    assert flat.numel() == 7 * width
    for t in range(7):
        assert flat[indptr[t] : indptr[t + 1]].tolist() == indices[t, : lens[t]].tolist()
        assert (indices[t, lens[t] :] == -1).all()


def test_case_C02_padded_width_is_not_the_window(device: str) -> None:
    row, length = one_row(300, [5, 9, 20, 7, 11], 64, 128, 256, device)
    assert length == 128
    expected = {173: 1325, 191: 1343, 192: 448, 255: 511, 256: 704, 300: 748}
    for position, slot in expected.items():
        assert row[position - 173] == slot
    assert row[128:] == [-1] * 128


def test_case_C05_padding_tokens_leave_nothing_of_the_last_step(device: str) -> None:
    slots = i64([17, -1, 40, -1, -1, -1], device)
    indices, lens = torch.full((6, 128), 7, dtype=torch.int32, device=device), torch.full((6,), 128, dtype=torch.int32, device=device)
    torch.ops.dsv4_ops.causal_swa_indices.out(
        i64([17, 0, 40, 99, 10**6, -5], device), i32([0] * 6, device), slots >= 0, i32([[1, 2]], device), block_size=64, window=128, width=128, indices=indices, lens=lens
    )
    assert lens.tolist() == [18, 0, 41, 0, 0, 0]
    assert (indices[[1, 3, 4, 5]] == -1).all()
    assert indices[0].tolist() == [64 + p for p in range(18)] + [-1] * 110
    assert indices[2].tolist() == [64 + p for p in range(41)] + [-1] * 87


def test_case_C06_an_unmapped_page_leaves_holes_in_the_row(device: str) -> None:
    for hole in (-1, 0, -(2**31)):
        row, length = one_row(150, [5, hole, 7], 64, 128, 128, device)
        assert length == 128
        assert row == list(range(343, 384)) + [-1] * 64 + list(range(448, 471))
        assert sum(slot >= 0 for slot in row[:length]) == 64


def test_a_page_past_the_table_leaves_holes_too(device: str) -> None:
    row, length = one_row(130, [5, 6], 64, 8, 8, device)
    assert (row, length) == ([6 * 64 + 59 + i for i in range(5)] + [-1, -1, -1], 8)
    drafts, lens = draft_swa_indices(i32([126], device), i32([[5, 6]], device), yes(1, device), block_size=64, window=4, block_queries=4, width=8)
    assert drafts.tolist() == [[6 * 64 + 58 + i for i in range(6)] + [-1, -1]] * 4 and lens.tolist() == [8] * 4


def test_case_C09_length_of_a_draft_row_is_not_its_width(device: str) -> None:
    table = i32([list(range(1, 20))] * 2, device)
    for width in (192, 256):
        indices, lens = draft_swa_indices(i32([1000, 3], device), table, yes(2, device), block_size=64, window=128, block_queries=5, width=width)
        assert lens.tolist() == [133] * 5 + [8] * 5
        assert (indices >= 0).sum(1).tolist() == [133] * 5 + [8] * 5
        assert indices[0, :133].tolist() == [64 + p for p in range(872, 1005)]
        assert indices[9, :8].tolist() == [64 + p for p in range(8)]


def test_case_C11_packed_pages_move_every_page_by_its_span(device: str) -> None:
    slots = i32([197, 63, 64, -1], device)
    assert packed_page_slots(slots, 64, page_block_span(37376, 584)).tolist() == [197, 63, 64, -1]
    assert page_block_span(149504, 584) == 256
    assert packed_page_slots(slots, 64, 256).tolist() == [773, 63, 256, -1]
    with pytest.raises(ArgumentError, match=r"page_stride must be a multiple of token_stride 584, got 149760\. Pad the page to 150088"):
        page_block_span(149760, 584)
    assert packed_page_slots(slots, 64, page_block_span(150088, 584)).tolist() == [776, 63, 257, -1]
    with pytest.raises(ArgumentError, match="Pad the page to 37960"):
        page_block_span(37440, 584)


def test_packed_slots_that_do_not_fit_are_minus_one(device: str) -> None:
    last_page = INT32_MAX // 257
    slots = i32([last_page * 64 - 1, last_page * 64, (last_page + 1) * 64, INT32_MAX, -7], device)
    got = packed_page_slots(slots, 64, 257).tolist()
    assert got == [(last_page - 1) * 257 + 63, last_page * 257, -1, -1, -1]
    assert packed_page_slots(slots.long(), 64, 257).tolist()[2:4] == [(last_page + 1) * 257, INT32_MAX // 64 * 257 + 63]


def test_case_C13_tables_are_read_by_their_stride(device: str) -> None:
    backing = torch.full((3, 16), 999, dtype=torch.int32, device=device)
    table = backing[:, :4]
    table.copy_(i32([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], device))
    ids, expected = i32([0, 1, 2], device), [134, 390, 646]
    indices, lens = causal_swa_indices(i64([70] * 3, device), ids, yes(3, device), table, block_size=64, window=1, width=1)
    assert indices[:, 0].tolist() == expected and lens.tolist() == [1, 1, 1]
    drafts, _ = draft_swa_indices(i32([70] * 3, device), table, yes(3, device), block_size=64, window=1, block_queries=1, width=2)
    assert drafts[:, 1].tolist() == expected
    slots, _ = global_topk_indices(i32([[70]] * 3, device), ids, yes(3, device), table, block_size=64)
    assert slots[:, 0].tolist() == expected
    assert expand_block_table(table, ids, yes(3, device)).tolist() == table.tolist()
    past, _ = causal_swa_indices(i64([256] * 3, device), ids, yes(3, device), table, block_size=64, window=1, width=1)
    assert past.tolist() == [[-1]] * 3, "999 stands behind the row and belongs to nobody"


def test_case_C20_padded_rows_of_a_draft_batch_are_defined(device: str) -> None:
    valid = torch.tensor([True] * 5 + [False] * 3, device=device)
    positions, ids = i64([130, 131, 132, 133, 134, 0, 0, 0], device), i32([0] * 5 + [INT32_MAX] * 3, device)
    indices, lens = causal_swa_indices(positions, ids, valid, i32([[3, 4, 5]], device), block_size=64, window=128, width=128)
    assert indices.shape == (8, 128) and lens.shape == (8,)
    assert lens.tolist() == [128] * 5 + [0] * 3 and (indices[5:] == -1).all() and (indices[:5] >= 0).all()
    requests = torch.tensor([True, False], device=device)
    drafts, draft_lens = draft_swa_indices(i32([130, 777], device), i32([[3, 4, 5], [9, 9, 9]], device), requests, block_size=64, window=128, block_queries=4, width=192)
    assert draft_lens.tolist() == [132] * 4 + [0] * 4 and (drafts[4:] == -1).all()


def test_case_D11_rows_start_where_the_drafter_has_kv(device: str) -> None:
    table = i32([[1, 2, 3, 4, 5]] * 3, device)
    indices, lens = draft_swa_indices(
        i32([256] * 3, device), table, yes(3, device), block_size=64, window=128, block_queries=4, width=192, draft_start=i32([192, 0, 256], device)
    )
    assert lens.tolist() == [68] * 4 + [132] * 4 + [4] * 4
    assert indices[0, :68].tolist() == [64 + p for p in range(192, 260)] and (indices[0, 68:] == -1).all()
    assert indices[4, 0] == 64 + 128
    assert indices[11, :5].tolist() == [64 + p for p in range(256, 260)] + [-1]


def test_block_positions_past_the_model_limit_are_holes(device: str) -> None:
    indices, lens = draft_swa_indices(i32([30, 34], device), i32([[4, 9, 6]] * 2, device), yes(2, device), block_size=16, window=4, block_queries=6, width=10, max_model_len=33)
    assert indices[0].tolist() == [9 * 16 + p - 16 for p in range(26, 32)] + [6 * 16] + [-1] * 3
    assert indices[6].tolist() == [9 * 16 + p - 16 for p in range(30, 32)] + [6 * 16] + [-1] * 7
    assert lens.tolist() == [10] * 12


def test_requests_without_committed_tokens_have_no_rows(device: str) -> None:
    indices, lens = draft_swa_indices(i32([0, -1, -(2**31), 1], device), i32([[4]] * 4, device), yes(4, device), block_size=16, window=4, block_queries=2, width=6)
    assert lens.tolist() == [0] * 6 + [3, 3] and (indices[:6] == -1).all()
    assert indices[6].tolist() == [64, 65, 66, -1, -1, -1]


def test_slots_that_int32_cannot_hold_are_minus_one_and_never_wrap(device: str) -> None:
    full, first_past = 33554431, 33554432  # full * 64 + 63 == 2**31 - 1
    row, length = one_row(255, [full, first_past, INT32_MAX, 2], 64, 256, 256, device)
    assert length == 256
    assert row == [full * 64 + i for i in range(64)] + [-1] * 128 + [128 + i for i in range(64)]
    # 48 does not divide 2**31: the page that holds the limit is used up to it.
    page = INT32_MAX // 48
    row, _ = one_row(47, [page], 48, 48, 48, device)
    fitting = INT32_MAX - page * 48 + 1
    assert 0 < fitting < 48 and row == [page * 48 + i for i in range(fitting)] + [-1] * (48 - fitting)
    drafts, _ = draft_swa_indices(i32([63], device), i32([[full, first_past]], device), yes(1, device), block_size=64, window=1, block_queries=2, width=3)
    assert drafts.tolist() == [[full * 64 + 62, INT32_MAX, -1]] * 2
    slots, lens = global_topk_indices(i32([[63, 64, 127]], device), i32([0], device), yes(1, device), i32([[full, first_past]], device), block_size=64)
    assert slots.tolist() == [[INT32_MAX, -1, -1]] and lens.tolist() == [3]


def test_ids_of_padding_tokens_are_never_used(device: str) -> None:
    ids = i32([INT32_MAX, -1, -(2**31), 2, 0, 0], device)
    valid = torch.tensor([False, False, True, True, False, True], device=device)
    indices, lens = causal_swa_indices(i64([5, 5, 5, 5, 2**62, 5], device), ids, valid, i32([[1], [2]], device), block_size=16, window=4, width=4)
    assert lens.tolist() == [0, 0, 0, 0, 0, 4]
    assert (indices[:5] == -1).all() and indices[5].tolist() == [18, 19, 20, 21]


@pytest.mark.parametrize("seed", range(5))
def test_causal_rows_match_the_map(seed: int, device: str) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        block_size, window, requests, blocks = rng.choice([1, 2, 3, 8]), rng.randrange(1, 12), rng.randrange(0, 4), rng.randrange(0, 6)
        width, tokens = window + rng.choice([0, 0, 1, 7]), rng.randrange(0, 7)
        table = [[rng.choice([0, -1, rng.randrange(1, 40), rng.randrange(1, 40), INT32_MAX // block_size]) for _ in range(blocks)] for _ in range(requests)]
        where = placed(table, block_size)
        positions = [rng.randrange(-2, blocks * block_size + 5) for _ in range(tokens)]
        ids = [rng.choice([rng.randrange(max(1, requests)), rng.randrange(-1, 5)]) for _ in range(tokens)]
        valid = [rng.random() < 0.8 for _ in range(tokens)]
        indices, lens = causal_swa_indices(
            i64(positions, device), i32(ids, device), torch.tensor(valid, dtype=torch.bool, device=device), i32(table, device).reshape(requests, blocks), block_size=block_size, window=window, width=width
        )
        for t in range(tokens):
            live = valid[t] and 0 <= ids[t] < requests and positions[t] >= 0
            seen = [p for p in range(positions[t] + 1) if positions[t] - p < window] if live else []
            expected = [where.get((ids[t], p), -1) for p in seen]
            assert lens[t] == len(seen)
            assert indices[t].tolist() == expected + [-1] * (width - len(seen))


@pytest.mark.parametrize("seed", range(5))
def test_draft_rows_match_the_map(seed: int, device: str) -> None:
    rng = random.Random(100 + seed)
    for _ in range(300):
        block_size, window, queries = rng.choice([1, 2, 3, 8]), rng.randrange(1, 12), rng.randrange(1, 6)
        requests, blocks, width = rng.randrange(0, 4), rng.randrange(0, 6), window + queries + rng.choice([0, 0, 1, 7])
        table = [[rng.choice([0, -1, rng.randrange(1, 40), rng.randrange(1, 40), INT32_MAX // block_size]) for _ in range(blocks)] for _ in range(requests)]
        where = placed(table, block_size)
        committed = [rng.randrange(-1, blocks * block_size + 4) for _ in range(requests)]
        valid = [rng.random() < 0.8 for _ in range(requests)]
        start = rng.choice([None, [rng.randrange(-2, 20) for _ in range(requests)]])
        limit = rng.choice([None, rng.randrange(1, 30)])
        indices, lens = draft_swa_indices(
            i32(committed, device),
            i32(table, device).reshape(requests, blocks),
            torch.tensor(valid, dtype=torch.bool, device=device),
            block_size=block_size,
            window=window,
            block_queries=queries,
            width=width,
            draft_start=None if start is None else i32(start, device),
            max_model_len=limit,
        )
        assert indices.shape == (requests * queries, width)
        for r in range(requests):
            context = [p for p in range(committed[r]) if committed[r] - p <= window]
            block = list(range(committed[r], committed[r] + queries))
            seen = [p for p in context + block if start is None or p >= start[r]] if valid[r] and committed[r] > 0 else []
            expected = [-1 if limit is not None and p >= limit else where.get((r, p), -1) for p in seen]
            for row in range(r * queries, (r + 1) * queries):
                assert lens[row] == len(seen)
                assert indices[row].tolist() == expected + [-1] * (width - len(seen))


def test_causal_token_and_draft_token_of_one_query_agree(device: str) -> None:
    """A block of one token lists what a causal token with a window one wider lists."""
    table = i32([[3, 0, 9, 4]], device)
    for committed in range(1, 64):
        causal = causal_swa_indices(i64([committed], device), i32([0], device), yes(1, device), table, block_size=16, window=8, width=8)
        draft = draft_swa_indices(i32([committed], device), table, yes(1, device), block_size=16, window=7, block_queries=1, width=8)
        assert torch.equal(causal[0], draft[0]) and torch.equal(causal[1], draft[1])


def test_csr_keeps_holes_or_drops_them_in_order(device: str) -> None:
    indices, lens = i32([[4, -1, 6, 9], [1, 2, 3, 4], [-1, -1, 8, -1], [5, 5, 5, 5]], device), i32([3, 0, 4, 99], device)
    indptr, flat = swa_indices_to_csr(indices, lens)
    assert indptr.tolist() == [0, 3, 3, 7, 11] and flat.tolist() == [4, -1, 6, -1, -1, 8, -1, 5, 5, 5, 5] + [-1] * 5
    indptr, flat = swa_indices_to_csr(indices, lens, drop_holes=True)
    assert indptr.tolist() == [0, 2, 2, 3, 7] and flat.tolist() == [4, 6, 8, 5, 5, 5, 5] + [-1] * 9


def test_csr_rows_match_slices(device: str) -> None:
    rng = random.Random(3)
    for _ in range(300):
        tokens, width, drop = rng.randrange(0, 6), rng.randrange(0, 7), rng.random() < 0.5
        rows = [[rng.choice([-1, rng.randrange(100)]) for _ in range(width)] for _ in range(tokens)]
        lens = [rng.randrange(-1, width + 2) for _ in range(tokens)]
        indptr, flat = swa_indices_to_csr(i32(rows, device).reshape(tokens, width), i32(lens, device), drop_holes=drop)
        for t in range(tokens):
            kept = [s for c, s in enumerate(rows[t]) if c < lens[t] and not (drop and s == -1)]
            assert flat[indptr[t] : indptr[t + 1]].tolist() == kept
        assert flat.shape == (tokens * width,) and (flat[indptr[-1] :] == -1).all()
