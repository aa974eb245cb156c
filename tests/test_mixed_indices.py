"""Slots of compressed records and mixed rows, read as a back end reads them, and the handed cases of area C."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_ops import (
    batch,
    build_mixed_sparse_indices,
    causal_swa_indices,
    context_lens,
    draft_swa_indices,
    global_indices,
    global_topk_indices,
    mixed_indices,
    mixed_row_width,
    page_block_span,
    ragged_context_lens,
    slot_layouts,
    swa_index_width,
    swa_indices,
    testing,
)
from dsv4_ops.errors import ArgumentError
from tests.common import INT32_MAX, i32, i64, yes


def empty(rows: int, columns: int, device: str = "cpu") -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.int32, device=device)


def keys(row: list[int], length: int, position: int, window: int) -> tuple[list[int], list[int]]:
    """What a back end without an own window length reads: columns [0, min(W, position + 1)) and [W, length)."""
    return row[: min(window, position + 1)], row[window:length]


# ------------------------------------------------------------------------------------------ global_topk_indices


def test_case_C14_garbage_of_padding_tokens_is_not_translated(device: str) -> None:
    local = i32([[0, 3, -1, -1], [2143289344, 77, 5, 9], [4, -1, -1, -1]], device)
    valid = torch.tensor([True, False, True], device=device)
    slots, lens = global_topk_indices(local, i32([0, INT32_MAX, 1], device), valid, i32([[8], [2]], device), block_size=64)
    assert slots.tolist() == [[512, 515, -1, -1], [-1] * 4, [132, -1, -1, -1]]
    assert lens.tolist() == [2, 0, 1]


def test_case_C15_records_past_the_table_are_holes(device: str) -> None:
    backing = torch.tensor([8, 3, 6, 1, 4242, 4242, 4242, 4242], dtype=torch.int32, device=device)
    for table in (backing[:4][None], backing.as_strided((1, 4), (4, 1))):
        slots, lens = global_topk_indices(i32([[255, 256, 300, 10]], device), i32([0], device), yes(1, device), table, block_size=64)
        assert slots.tolist() == [[127, -1, -1, 522]]
        assert lens.tolist() == [4], "holes count"


def test_holes_at_the_end_of_the_records_count_too(device: str) -> None:
    slots, lens = global_topk_indices(i32([[1, -1, 300, -1], [-1, -1, -1, -1]], device), i32([0, 0], device), yes(2, device), i32([[8]], device), block_size=64)
    assert slots.tolist() == [[513, -1, -1, -1], [-1] * 4] and lens.tolist() == [3, 0]


def test_case_A21_every_one_of_the_columns_is_translated(device: str) -> None:
    table = i32([[200 + 3 * b for b in range(32)]], device)
    slots, lens = global_topk_indices(torch.arange(2048, dtype=torch.int32, device=device)[None], i32([0], device), yes(1, device), table, block_size=64)
    assert slots[0].tolist() == [(200 + 3 * b) * 64 + o for b in range(32) for o in range(64)]
    assert lens.tolist() == [2048]


def test_out_form_leaves_no_column_of_the_last_step(device: str) -> None:
    slots, lens = torch.full((2, 2048), -9, dtype=torch.int32, device=device), torch.full((2,), 77, dtype=torch.int32, device=device)
    local = torch.full((2, 2048), -1, dtype=torch.int32, device=device)
    torch.ops.dsv4_ops.global_topk_indices.out(local, i32([0, 0], device), yes(2, device), i32([[8]], device), block_size=64, slots=slots, lens=lens)
    assert (slots == -1).all() and lens.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_translation_matches_a_map(seed: int, device: str) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        block_size, requests, blocks, tokens, k = rng.choice([1, 2, 3, 64]), rng.randrange(0, 4), rng.randrange(0, 5), rng.randrange(0, 6), rng.randrange(0, 9)
        table = [[rng.choice([0, -1, rng.randrange(1, 40), rng.randrange(1, 40), INT32_MAX // block_size]) for _ in range(blocks)] for _ in range(requests)]
        where = {}
        for r, row in enumerate(table):
            for b, page in enumerate(row):
                for o in range(block_size if page > 0 else 0):
                    if page * block_size + o <= INT32_MAX:
                        where[r, b * block_size + o] = page * block_size + o
        local = [[rng.choice([-1, rng.randrange(blocks * block_size + 3), INT32_MAX, -(2**31)]) for _ in range(k)] for _ in range(tokens)]
        ids = [rng.choice([rng.randrange(max(1, requests)), rng.randrange(-1, 5), INT32_MAX]) for _ in range(tokens)]
        valid = [rng.random() < 0.8 for _ in range(tokens)]
        slots, lens = global_topk_indices(
            i32(local, device).reshape(tokens, k), i32(ids, device), torch.tensor(valid, dtype=torch.bool, device=device), i32(table, device).reshape(requests, blocks), block_size=block_size
        )
        for t in range(tokens):
            live = valid[t] and 0 <= ids[t] < requests
            assert slots[t].tolist() == [where.get((ids[t], record), -1) if live else -1 for record in local[t]]
            assert lens[t] == (k - next((c for c, record in enumerate(reversed(local[t])) if record >= 0), k) if live else 0)


# ----------------------------------------------------------------------------------- build_mixed_sparse_indices


@pytest.mark.parametrize(("swa_width", "k", "width"), [(133, 512, 648), (133, 0, 136), (128, 511, 640), (192, 512, 704), (1, 1, 4)])
def test_case_C03_every_row_starts_on_16_bytes(swa_width: int, k: int, width: int, device: str) -> None:
    assert mixed_row_width(swa_width, k) == width
    window = min(swa_width, 128)
    decode = torch.zeros(3, swa_width, dtype=torch.int32, device=device)
    topk = torch.zeros(3, k, dtype=torch.int32, device=device)
    tables = i32([[1]], device), i32([[2]], device)
    lens = torch.full((3,), swa_width, dtype=torch.int32, device=device)
    indices, mixed_lens = build_mixed_sparse_indices(
        decode, lens, topk, empty(0, k, device), i64([0] * 3, device), i32([0] * 3, device), yes(3, device), *tables, block_size=64, compressed_block_size=64, window=window
    )
    assert indices.shape == (3, width) and indices.stride(0) * 4 % 16 == 0 and indices.data_ptr() % 16 == 0
    assert mixed_lens.tolist() == [swa_width + k] * 3
    assert (indices[:, swa_width + k :] == -1).all() and (indices[:, : swa_width + k] >= 0).all()


def test_case_C19_the_row_stride_does_not_depend_on_the_batch(device: str) -> None:
    tables = i32([[1, 2], [3, 4]], device), i32([list(range(1, 13)), list(range(20, 32))], device)
    window_rows = torch.arange(256, dtype=torch.int32, device=device).reshape(2, 128)
    indices = torch.full((2, 1024), 5, dtype=torch.int32, device=device)
    lens = torch.full((2,), 5, dtype=torch.int32, device=device)
    for records in ((0, 0), (2, 700), (700, 1), (896, 896)):
        topk = torch.full((2, 896), -1, dtype=torch.int32, device=device)
        for row, count in enumerate(records):
            topk[row, :count] = torch.arange(count, device=device).clamp(max=64 * 12 - 1)
        torch.ops.dsv4_ops.build_mixed_sparse_indices.out(
            window_rows, i32([128, 128], device), topk, None, i64([500, 700], device), i32([0, 1], device), yes(2, device), *tables,
            block_size=64, compressed_block_size=64, window=128, indices=indices, lens=lens,
        )  # fmt: skip
        assert lens.tolist() == [128 + records[0], 128 + records[1]]
        flat = indices.flatten().tolist()
        for row, (count, first) in enumerate(zip(records, (64, 20 * 64), strict=True)):
            assert flat[row * 1024 : row * 1024 + 128] == window_rows[row].tolist()
            assert flat[row * 1024 + 128 : row * 1024 + 128 + count] == [first + min(i, 767) for i in range(count)]
            assert set(flat[row * 1024 + 128 + count : (row + 1) * 1024]) <= {-1}


@pytest.mark.parametrize("committed", [1, 3, 120, 123, 124, 127, 128, 129, 1000])
@pytest.mark.parametrize("records", [0, 1, 30])
def test_draft_rows_lose_nothing_and_show_no_padding(committed: int, records: int, device: str) -> None:
    window, queries = 128, 5
    width, k = swa_index_width(window, queries), 32
    table, compressed = i32([list(range(1, 20))], device), i32([[40, 41]], device)
    rows, lens = draft_swa_indices(i32([committed], device), table, yes(1, device), block_size=64, window=window, block_queries=queries, width=width)
    topk = torch.full((queries, k), -1, dtype=torch.int32, device=device)
    topk[:, :records] = torch.arange(records, device=device)
    positions = i64([committed + queries - 1] * queries, device)
    indices, mixed = build_mixed_sparse_indices(
        rows, lens, topk, None, positions, i32([0] * queries, device), yes(queries, device), table, compressed, block_size=64, compressed_block_size=64, window=window
    )
    visible = [64 + p for p in range(max(0, committed - window), committed + queries)]
    entries = [40 * 64 + i for i in range(records)]
    overflow = max(0, len(visible) - window)
    for t in range(queries):
        row = indices[t].tolist()
        assert mixed[t] == window + overflow + records
        in_window, behind = keys(row, int(mixed[t]), committed + queries - 1, window)
        assert in_window == visible[:window] and behind == visible[window:] + entries
        assert row[int(mixed[t]) :] == [-1] * (len(row) - int(mixed[t]))


@pytest.mark.parametrize("swa_width", [8, 13])
def test_causal_rows_put_compressed_entries_at_the_window(swa_width: int, device: str) -> None:
    window, k, table, compressed = 8, 3, i32([[3, 5, 9]], device), i32([[7, 6]], device)
    decode_positions, prefill_positions = [0, 4, 20], [0, 7, 8, 19]
    rows, lens = causal_swa_indices(i64(decode_positions, device), i32([0] * 3, device), yes(3, device), table, block_size=8, window=window, width=swa_width)
    positions = decode_positions + prefill_positions
    local = i32([[0, 2, -1]] * 7, device)
    indices, mixed = build_mixed_sparse_indices(
        rows, lens, local[:3], local[3:], i64(positions, device), i32([0] * 7, device), yes(7, device), table, compressed, block_size=8, compressed_block_size=2, window=window
    )
    assert indices.shape == (7, mixed_row_width(swa_width, k))
    for t, position in enumerate(positions):
        expected = [[3, 5, 9][p // 8] * 8 + p % 8 for p in range(max(0, position - 7), position + 1)]
        in_window, behind = keys(indices[t].tolist(), int(mixed[t]), position, window)
        assert in_window == expected and behind == [14, 12] and mixed[t] == 10


def test_decode_entries_may_be_slots_already(device: str) -> None:
    """Local records translated here, and translated before by global_topk_indices: the same rows."""
    rng = torch.Generator().manual_seed(1)
    table, compressed = i32([[3, 0, 9, 2], [4, 4, 4, 4]], device), i32([[7, 0, 6], [5, -1, 3]], device)
    local = torch.randint(-1, 8, (6, 10), generator=rng, dtype=torch.int32).to(device)
    ids, valid = i32([0, 1, 0, 1, 0, 1], device), torch.tensor([True, True, False, True, True, True], device=device)
    rows, lens = causal_swa_indices(i64([3, 9, 1, 30, 31, 12], device), ids, valid, table, block_size=8, window=8, width=8)
    slots, topk_lens = global_topk_indices(local, ids, valid, compressed, block_size=2)
    common = (i64([3, 9, 1, 30, 31, 12], device), ids, valid, table, compressed)
    sizes: dict[str, Any] = {"block_size": 8, "compressed_block_size": 2, "window": 8}
    one = build_mixed_sparse_indices(rows, lens, local, None, *common, **sizes)
    two = build_mixed_sparse_indices(rows, lens, slots, None, *common, **sizes, decode_topk_lens=topk_lens, decode_indices_are_global=True)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert one[1][2] == 0 and (one[0][2] == -1).all()
    packed = build_mixed_sparse_indices(rows, lens, local, None, *common, **sizes, block_span=page_block_span(90, 10), compressed_block_span=5)
    for c, slot in enumerate(one[0][5].tolist()):
        size, span = (8, 9) if c < 8 else (2, 5)
        assert packed[0][5, c] == (slot // size * span + slot % size if slot >= 0 else -1)


def test_all_records_of_a_prefill_are_those_that_are_complete(device: str) -> None:
    positions = [0, 126, 127, 128, 255, 300, 1000]
    n = len(positions)
    indices, lens = build_mixed_sparse_indices(
        empty(0, 4, device), empty(0, 1, device)[:, 0], empty(0, 5, device), None, i64(positions, device), i32([0] * n, device), yes(n, device), i32([list(range(1, 20))], device), i32([[9, 8, 7, 0]], device),
        block_size=64, compressed_block_size=2, window=4, compress_ratio=128,
    )  # fmt: skip
    assert (lens - 4).tolist() == [0, 0, 1, 1, 2, 2, 5], "the last row sees 7 records and has room for 5"
    assert indices[4, 4:].tolist()[:5] == [18, 19, -1, -1, -1]
    assert indices[6, 4:].tolist()[:5] == [18, 19, 16, 17, 14]


@pytest.mark.parametrize("ratio", [1, 4])
def test_the_last_position_of_int64_sees_records_like_any_other(ratio: int, device: str) -> None:
    rows = [
        build_mixed_sparse_indices(
            empty(0, 4, device), empty(0, 1, device)[:, 0], empty(0, 3, device), None, i64([position], device), i32([0], device), yes(1, device), i32([[1]], device), i32([[9, 8]], device),
            block_size=64, compressed_block_size=2, window=4, compress_ratio=ratio,
        )
        for position in (2**40, 2**63 - 1)
    ]  # fmt: skip
    assert rows[0][1].tolist() == [7]
    assert torch.equal(rows[1][0], rows[0][0]) and torch.equal(rows[1][1], rows[0][1])


@pytest.mark.parametrize("seed", range(4))
def test_mixed_rows_match_rows_put_together_by_hand(seed: int, device: str) -> None:
    rng = random.Random(seed)
    for _ in range(120):
        window, requests, blocks, k = rng.randrange(1, 9), rng.randrange(1, 4), rng.randrange(1, 5), rng.randrange(0, 6)
        decodes, prefills, swa_width = rng.randrange(0, 5), rng.randrange(0, 5), window + rng.randrange(0, 5)
        block_size, compressed_size, ratio = rng.choice([2, 3, 8]), rng.choice([1, 2]), rng.choice([1, 2, 4])
        tokens = decodes + prefills
        table, compressed = ([[rng.choice([0, rng.randrange(1, 30), rng.randrange(1, 30)]) for _ in range(blocks)] for _ in range(requests)] for _ in range(2))
        ids, valid = [rng.choice([rng.randrange(requests), rng.randrange(-1, 5)]) for _ in range(tokens)], [rng.random() < 0.85 for _ in range(tokens)]
        positions = [rng.randrange(-1, blocks * block_size + 2) for _ in range(tokens)]
        topk = [[rng.choice([-1, rng.randrange(blocks * compressed_size + 2)]) for _ in range(k)] for _ in range(tokens)]
        swa_lens = [rng.randrange(0, swa_width + 1) for _ in range(decodes)]
        swa = [[rng.choice([-1, rng.randrange(99), rng.randrange(99)]) for _ in range(swa_width)] for _ in range(decodes)]
        derive = rng.random() < 0.4
        indices, lens = build_mixed_sparse_indices(
            i32(swa, device).reshape(decodes, swa_width), i32(swa_lens, device), i32(topk[:decodes], device).reshape(decodes, k), None if derive else i32(topk[decodes:], device).reshape(prefills, k),
            i64(positions, device), i32(ids, device), torch.tensor(valid, dtype=torch.bool, device=device), i32(table, device), i32(compressed, device),
            block_size=block_size, compressed_block_size=compressed_size, window=window, compress_ratio=ratio,
        )  # fmt: skip

        def lookup(pages: list[int], place: int, size: int) -> int:
            flat = [page * size + o if page > 0 else -1 for page in pages for o in range(size)]
            return flat[place] if 0 <= place < len(flat) else -1

        for t in range(tokens):
            live = valid[t] and 0 <= ids[t] < requests and (t < decodes or positions[t] >= 0)
            if not live:
                assert lens[t] == 0 and (indices[t] == -1).all()
                continue
            if t < decodes:
                seen, records = swa[t][: swa_lens[t]], topk[t]
            else:
                seen = [lookup(table[ids[t]], p, block_size) for p in range(positions[t] + 1)][-window:]
                records = topk[t] if not derive else list(range((positions[t] + 1) // ratio))[:k]
            while records and records[-1] < 0:
                records = records[:-1]
            entries = [lookup(compressed[ids[t]], record, compressed_size) for record in records]
            row = seen + [-1] * max(0, window - len(seen)) + entries
            assert lens[t] == len(row)
            assert indices[t].tolist() == row + [-1] * (indices.shape[1] - len(row))


def test_a_window_layer_needs_no_compressed_group(device: str) -> None:
    rows, lens = causal_swa_indices(i64([5], device), i32([0], device), yes(1, device), i32([[2]], device), block_size=8, window=4, width=4)
    indices, mixed = build_mixed_sparse_indices(
        rows, lens, empty(1, 0, device), None, i64([5, 6], device), i32([0, 0], device), yes(2, device), i32([[2]], device), empty(1, 0, device), block_size=8, compressed_block_size=1, window=4
    )
    assert indices.tolist() == [[18, 19, 20, 21], [19, 20, 21, 22]] and mixed.tolist() == [4, 4]


def test_negative_widths_are_refused() -> None:
    for swa_width, k in ((0, 4), (4, -1)):
        with pytest.raises(ArgumentError, match="must be at least"):
            mixed_row_width(swa_width, k)


# --------------------------------------------------------------------------------------------- of all index ops

VECTORIZED: dict[str, Callable[..., Any]] = {
    "mtp_context_lens": context_lens._mtp_torch,
    "ragged_context_lens": context_lens._ragged_torch,
    "expand_block_table": context_lens._expand_torch,
    "local_context_lens": context_lens._local_torch,
    "causal_swa_indices": swa_indices._causal_torch,
    "draft_swa_indices": swa_indices._draft_torch,
    "swa_indices_to_csr": slot_layouts._csr_torch,
    "packed_page_slots": slot_layouts._packed_torch,
    "global_topk_indices": global_indices._global_torch,
    "build_mixed_sparse_indices": mixed_indices._mixed_torch,
}


@pytest.mark.parametrize("name", VECTORIZED)
def test_vectorized_form_reads_nothing_back(name: str) -> None:
    """Fake tensors have no values: a hidden .item(), boolean-mask index or nonzero raises instead of synchronizing."""
    for sample in testing.samples(name):
        with FakeTensorMode() as mode:
            convert = lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v  # noqa: E731
            VECTORIZED[name](*map(convert, sample.args), **{key: convert(v) for key, v in sample.kwargs.items()})


def test_unpadding_reads_nothing_back() -> None:
    with FakeTensorMode():
        ids = torch.zeros(6, dtype=torch.int32)
        batch.unpadded_token_rows(torch.zeros(3, dtype=torch.int32), ids, ids == 0, 4)


def test_a_chain_of_index_ops_is_one_graph_for_all_batches(device: str) -> None:
    """From lengths to rows in one compiled function; batches of 0 and 1 may add a compilation, no other does."""
    graphs = 0

    def counting(gm: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return gm.forward

    def step(seq_lens: torch.Tensor, start: torch.Tensor, positions: torch.Tensor, local: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lens, ids, valid = ragged_context_lens(seq_lens, start, positions.shape[0])
        rows, swa_lens = causal_swa_indices(positions, ids, valid, table, block_size=8, window=16, width=16)
        return lens, *build_mixed_sparse_indices(rows, swa_lens, local, None, positions, ids, valid, table, table, block_size=8, compressed_block_size=8, window=16)

    def inputs(requests: int) -> tuple[torch.Tensor, ...]:
        start = torch.arange(requests + 1, dtype=torch.int32, device=device) * 2
        positions = torch.arange(3 * requests, device=device)
        local = torch.arange(7, dtype=torch.int32, device=device).expand(3 * requests, 7).contiguous()
        return torch.full((requests,), 40, dtype=torch.int32, device=device), start, positions, local, torch.ones(requests, 9, dtype=torch.int32, device=device)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=counting, fullgraph=True, dynamic=True)
    for requests in (4, 2, 8, 1, 0, 3, 1, 0):
        arguments = inputs(requests)
        for actual, expected in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(actual, expected)
    assert graphs <= 3
