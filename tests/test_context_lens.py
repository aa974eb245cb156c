"""Context lengths and the host's decisions about a batch, against counting by hand and the handed cases of area B."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_ops import (
    classify_batch,
    expand_block_table,
    is_uniform_decode,
    local_context_lens,
    mtp_context_lens,
    ragged_context_lens,
    topk,
    unpadded_token_rows,
)
from dsv4_ops.errors import ArgumentDeviceError, ArgumentError
from tests.common import i32


def starts(query_lens: list[int], device: str = "cpu") -> torch.Tensor:
    return i32([sum(query_lens[:i]) for i in range(len(query_lens) + 1)], device)


def count_visible(seq_len: int, query_len: int, offset: int, ratio: int, limit: int | None = None) -> int:
    """Records that are complete at one query token, counted one by one: the definition in words."""
    position = seq_len - query_len + offset
    tokens = [p for p in range(max(0, seq_len)) if p <= position and (limit is None or p < limit)]
    return sum(1 for p in tokens if p % ratio == ratio - 1)


def test_case_B01_lengths_of_padded_requests_never_go_negative(device: str) -> None:
    for next_n, expected in ((2, [[9, 10], [6, 7], [11, 12], [0, 0]]), (4, [[7, 8, 9, 10], [4, 5, 6, 7], [9, 10, 11, 12], [0, 0, 0, 0]])):
        lens = mtp_context_lens(i32([10, 7, 12, 0], device), next_n)
        assert lens.tolist() == expected
        assert lens.dtype == torch.int32 and lens.is_contiguous()


def test_short_and_negative_sequences_have_no_negative_lengths(device: str) -> None:
    assert mtp_context_lens(i32([1, -1, -(2**31)], device), 3).tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    lens, _, valid = ragged_context_lens(i32([1, -5], device), starts([3, 2], device), 5)
    assert lens.tolist() == [0, 0, 1, 0, 0] and valid.all()


@pytest.mark.parametrize("total", [4, 8])
def test_case_B03_equal_totals_do_not_make_a_batch_uniform(total: int, device: str) -> None:
    query_lens = [1, 3] if total == 4 else [1, 3, 2, 2]
    assert not is_uniform_decode(starts(query_lens), 2)
    lens, requests, valid = ragged_context_lens(i32([7, 10, 5, 6][: len(query_lens)], device), starts(query_lens, device), total)
    assert lens.tolist()[:4] == [7, 8, 9, 10]
    assert requests.tolist()[:4] == [0, 1, 1, 1]
    assert valid.all()
    assert mtp_context_lens(i32([7, 10], device), 2).flatten().tolist() == [6, 7, 9, 10], "what the uniform form would give"


def test_uniform_batches_are_recognized() -> None:
    assert is_uniform_decode([0, 2, 4, 6], 2)
    assert is_uniform_decode(starts([2, 2, 0, 0]), 2), "padding requests stand behind the live ones"
    assert is_uniform_decode([0, 0, 0], 3) and is_uniform_decode([0], 3), "nothing live"
    assert not is_uniform_decode(starts([2, 0, 2]), 2), "an empty request in front of a live one moves the rows"
    assert not is_uniform_decode([0, 2, 4], 1) and not is_uniform_decode([0, 1, 2], 2)
    assert not is_uniform_decode([2, 4, 6], 2), "rows that do not start at 0"
    for wrong in ([], [[0, 2]]):
        with pytest.raises(ArgumentError, match="query_start_loc"):
            is_uniform_decode(torch.tensor(wrong), 2)
    with pytest.raises(ArgumentDeviceError, match="decision of the host"):
        is_uniform_decode(torch.empty(3, dtype=torch.int32, device="meta"), 2)


def test_uniform_form_and_ragged_form_agree_where_both_apply(device: str) -> None:
    rng = random.Random(5)
    for _ in range(200):
        requests, next_n, ratio = rng.randrange(1, 6), rng.randrange(1, 6), rng.choice([1, 4, 128])
        padding = rng.randrange(3)
        seq_lens = [rng.randrange(0, 600) for _ in range(requests)] + [0] * padding
        query_lens = [next_n] * requests + [0] * padding
        assert is_uniform_decode(starts(query_lens), next_n)
        uniform = mtp_context_lens(i32(seq_lens, device), next_n, ratio).flatten()
        ragged, _, valid = ragged_context_lens(i32(seq_lens, device), starts(query_lens, device), len(uniform), ratio)
        assert torch.equal(uniform, ragged)
        assert int(valid.sum()) == requests * next_n


def test_case_B04_empty_request_inside_and_padding_after(device: str) -> None:
    lens, requests = torch.full((12,), 99, dtype=torch.int32, device=device), torch.full((12,), 99, dtype=torch.int32, device=device)
    valid = torch.ones(12, dtype=torch.bool, device=device)
    torch.ops.dsv4_ops.ragged_context_lens.out(
        i32([10, 7, 12, 0], device), starts([3, 1, 4, 0], device), 12, lens=lens, token_to_req_indices=requests, is_valid_token=valid
    )
    assert lens.tolist() == [8, 9, 10, 7, 9, 10, 11, 12, 0, 0, 0, 0]
    assert requests.tolist()[:8] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert all(0 <= r < 4 for r in requests.tolist()[8:]), "a row that may be loaded"
    assert valid.tolist() == [True] * 8 + [False] * 4


def test_expanded_table_of_that_batch_is_null_for_padding(device: str) -> None:
    table = i32([[5, 6], [7, 0], [8, 9], [3, 3]], device)
    _, requests, valid = ragged_context_lens(i32([10, 7, 12, 0], device), starts([3, 1, 4, 0], device), 10)
    assert expand_block_table(table, requests, valid).tolist() == [[5, 6]] * 3 + [[7, 0]] + [[8, 9]] * 4 + [[0, 0]] * 2


def test_case_B05_the_share_of_a_rank_is_taken_of_expanded_lengths(device: str) -> None:
    bounds = mtp_context_lens(i32([10], device), 3)
    assert bounds.tolist() == [[8, 9, 10]]
    assert local_context_lens(bounds, 1, 2).tolist() == [[4, 4, 5]]
    assert local_context_lens(bounds, 0, 2).tolist() == [[4, 5, 5]]


def test_shares_of_all_ranks_count_every_entry_once(device: str) -> None:
    for size in (1, 2, 3, 4, 8):
        for interleave in (1, 2, 5, 16):
            lens = torch.arange(-3, 150, device=device)
            shares = torch.stack([local_context_lens(lens, rank, size, interleave) for rank in range(size)])
            owned = [[sum(1 for p in range(n) if p // interleave % size == rank) for n in range(-3, 150)] for rank in range(size)]
            assert shares.tolist() == owned


def test_case_B07_lengths_stay_within_the_block_table(device: str) -> None:
    addressable = 625 * 128
    for lens in (
        mtp_context_lens(i32([80001], device), 1, max_seq_len=addressable),
        mtp_context_lens(i32([80003], device), 3, max_seq_len=addressable),
        ragged_context_lens(i32([80001], device), starts([1], device), 1, max_seq_len=addressable)[0],
    ):
        assert int(lens.max()) == 80000
    assert mtp_context_lens(i32([80003], device), 3, 128, max_seq_len=addressable).tolist() == [[625, 625, 625]]
    assert mtp_context_lens(i32([80001], device), 2).tolist() == [[80000, 80001]], "no limit, no clamp"


def test_case_B08_per_token_lengths_are_used_as_they_are(device: str) -> None:
    two_dimensional = mtp_context_lens(i32([5, 10], device), 2)
    assert two_dimensional.tolist() == [[4, 5], [9, 10]]
    logits = torch.arange(16, dtype=torch.float32, device=device).expand(4, 16).contiguous()
    for lens in (two_dimensional, two_dimensional.flatten()):
        assert (topk(logits, lens, 16) >= 0).sum(1).tolist() == [4, 5, 9, 10]


def test_case_B10_a_padded_rectangle_is_unpadded_in_token_order(device: str) -> None:
    start = starts([3, 1, 4], device)
    _, requests, valid = ragged_context_lens(i32([9, 9, 9], device), start, 8)
    rows = unpadded_token_rows(start, requests, valid, 4)
    assert rows.tolist() == [0, 1, 2, 4, 8, 9, 10, 11]
    guarded = torch.full((13, 512), -7, dtype=torch.int32, device=device)
    lens = i32([[7, 8, 9, 0], [9, 0, 0, 0], [6, 7, 8, 9]], device)
    torch.ops.dsv4_ops.topk.out(torch.rand(12, 16, device=device), lens, 512, out=guarded[:12])
    assert (guarded[12] == -7).all() and (guarded[:12] != -7).all()
    assert (guarded.index_select(0, rows) >= 0).sum(1).tolist() == [7, 8, 9, 9, 6, 7, 8, 9]


def test_rows_of_padding_tokens_and_of_too_long_queries_stay_in_place(device: str) -> None:
    start = starts([2, 5], device)
    _, requests, valid = ragged_context_lens(i32([9, 9], device), start, 9)
    assert unpadded_token_rows(start, requests, valid, 3).tolist() == [0, 1, 3, 4, 5, 5, 5, 0, 0]
    assert unpadded_token_rows(i32([0], device), i32([0, 0], device), torch.zeros(2, dtype=torch.bool, device=device), 3).tolist() == [0, 0]


def test_case_B11_records_are_counted_per_token(device: str) -> None:
    assert mtp_context_lens(i32([17, 16, 3, 0], device), 2, 4).tolist() == [[4, 4], [3, 4], [0, 0], [0, 0]]
    lens, _, _ = ragged_context_lens(i32([17, 16, 3, 0], device), starts([2, 2, 2, 2], device), 8, 4)
    assert lens.tolist() == [4, 4, 3, 4, 0, 0, 0, 0]


def test_case_B13_rows_behind_the_live_requests_count_as_nothing() -> None:
    for padded in (([2, 0], None), ([2, 0], 1), ([2, 9], 1)):
        query_lens, num_reqs = padded
        kind = classify_batch(query_lens, [600, 10], [500, 600], num_reqs)
        assert kind.is_pure_decode
        assert (kind.num_decodes, kind.num_decode_tokens, kind.num_prefills, kind.num_prefill_tokens) == (1, 2, 0, 0)
    stale = classify_batch([2, 9], [600, 10], [500, 600])
    assert (stale.num_prefills, stale.num_prefill_tokens, stale.is_pure_decode) == (1, 9, False)


def test_batches_are_classified_by_each_request() -> None:
    kind = classify_batch(torch.tensor([1, 3, 0, 5, 1]), [10, 7, 0, 0, 4], [10, 5, 9, 5, 5])
    assert kind == (2, 4, 2, 6, True)
    assert not classify_batch([5, 1], [0, 9], [5, 5]).is_decode_first
    assert classify_batch([5, 0], [0, 9], [5, 5]).is_decode_first, "an empty decode behind a prefill has no rows"
    assert classify_batch([], [], []) == (0, 0, 0, 0, True)
    with pytest.raises(ArgumentError, match="num_prompt_tokens must be at least one entry for each of the 2 requests"):
        classify_batch([1, 1], [5, 5], [5])


def test_lengths_match_counting(device: str) -> None:
    rng = random.Random(7)
    for _ in range(400):
        requests, ratio = rng.randrange(0, 6), rng.choice([1, 2, 4, 7])
        query_lens = [rng.choice([0, 1, 1, 2, 5, 9]) for _ in range(requests)]
        seq_lens = [rng.choice([0, q, q + rng.randrange(60), rng.randrange(-2, 60)]) for q in query_lens]
        tokens, limit = sum(query_lens) + rng.randrange(-2, 5), rng.choice([None, None, 0, 17])
        tokens = max(0, tokens)
        dtype = rng.choice([torch.int32, torch.int64])
        got = ragged_context_lens(torch.tensor(seq_lens, dtype=dtype, device=device), starts(query_lens, device), tokens, ratio, max_seq_len=limit)
        flat = [(count_visible(s, q, j, ratio, limit), r) for r, (s, q) in enumerate(zip(seq_lens, query_lens, strict=True)) for j in range(q)][:tokens]
        pad = tokens - len(flat)
        assert got[0].tolist() == [length for length, _ in flat] + [0] * pad
        assert got[1].tolist()[: len(flat)] == [r for _, r in flat]
        assert got[2].tolist() == [True] * len(flat) + [False] * pad


def test_lengths_past_int32_do_not_wrap(device: str) -> None:
    huge = torch.tensor([2**31, 2**33 + 5, 2**63 - 1, -(2**63)], device=device)
    assert mtp_context_lens(huge, 2).tolist() == [[2**31 - 1] * 2] * 3 + [[0, 0]]
    assert mtp_context_lens(huge[1:2], 1, 4).tolist() == [[2**31 - 1]]
    assert mtp_context_lens(huge[:1], 1, 4).tolist() == [[2**29]]
    lens, _, _ = ragged_context_lens(huge, starts([1, 1, 1, 1], device), 4)
    assert lens.tolist() == [2**31 - 1] * 3 + [0]
    assert local_context_lens(huge, 0, 1).tolist() == [2**31 - 1] * 3 + [0]


def test_a_tail_of_zeros_in_the_starts_is_no_request(device: str) -> None:
    lens, requests, valid = ragged_context_lens(i32([10, 7, 5, 5], device), i32([0, 2, 3, 0, 0], device), 5)
    assert lens.tolist() == [9, 10, 7, 0, 0] and valid.tolist() == [True] * 3 + [False] * 2 and requests.tolist()[:3] == [0, 0, 1]


def test_expansion_never_loads_by_an_id_outside(device: str) -> None:
    backing = torch.full((4, 16), 999, dtype=torch.int32, device=device)
    table = backing[1:3, 2:6]
    table.copy_(i32([[1, 2, 3, 4], [5, 6, 7, 8]], device))
    ids, valid = i32([1, 2, -1, 2**31 - 1, 0, 0], device), torch.tensor([True, True, True, True, False, True], device=device)
    assert expand_block_table(table, ids, valid).tolist() == [[5, 6, 7, 8], [0] * 4, [0] * 4, [0] * 4, [0] * 4, [1, 2, 3, 4]]
