"""Draft inputs against an oracle that asks, for each output element, what belongs there; and the handed cases."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from dsv4_ops import (
    DFlashInputs,
    capture_query_lens,
    draft_buffer_tokens,
    kv_cache_insert,
    new_kv_cache,
    prepare_dflash_inputs,
    round_to_capture_size,
    scratch_rows,
)
from dsv4_ops.dflash import PREPARE_DFLASH_INPUTS
from dsv4_ops.errors import ArgumentDtypeError, ArgumentError

MASK = 7777


def prepare(
    contexts: list[list[int]],
    tables: list[Any],
    block_sizes: list[int],
    *,
    n: int,
    mapping: list[int] | None = None,
    sampled: list[int] | None = None,
    rejected: list[int] | None = None,
    last: list[int] | None = None,
    following: list[int] | None = None,
    anchor: bool = True,
    max_reqs: int | None = None,
    max_tokens: int | None = None,
    max_model_len: int = 8192,
    padding: int = 0,
    device: str = "cpu",
    **kwargs: Any,
) -> DFlashInputs:
    """One call from Python lists: ``contexts`` are the target's positions of each request."""
    count = len(contexts)
    states = max([count, *(m + 1 for m in mapping or [])])
    starts = [sum(map(len, contexts[:i])) for i in range(count + 1)]
    queries = n if anchor else n + 1

    def tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    i32, i64 = torch.int32, torch.int64
    return prepare_dflash_inputs(
        tensor([p for c in contexts for p in c] + [0] * padding, i64),
        tensor(starts, i32),
        tensor(mapping if mapping is not None else list(range(count)), i32),
        tensor(sampled if sampled is not None else [1] * count, i32),
        tensor(rejected if rejected is not None else [0] * count, i32),
        tensor(last if last is not None else [100 + i for i in range(states)], i64),
        tensor(following if following is not None else [200 + i for i in range(states)], i64),
        torch.linspace(0, 1, states, device=device),
        torch.arange(states, device=device),
        [t if isinstance(t, torch.Tensor) else tensor(t, i32) for t in tables],
        block_sizes,
        mask_token_id=MASK,
        num_speculative_tokens=n,
        max_reqs=count if max_reqs is None else max_reqs,
        max_tokens=count * queries if max_tokens is None else max_tokens,
        max_model_len=max_model_len,
        sample_from_anchor=anchor,
        **kwargs,
    )


# The oracle.


def expected_slot(row: list[int], size: int, position: int, rank: int, ranks: int, interleave: int) -> int:
    """By counting: walk the positions of a table entry and see which one this rank stores where."""
    entry = position // (size * ranks)
    if not entry < len(row) or row[entry] <= 0:
        return -1
    stored = 0
    for p in range(entry * size * ranks, position + 1):
        owner = (p // interleave) % ranks
        if p == position:
            return row[entry] * size + stored if owner == rank else -1
        stored += owner == rank
    raise AssertionError


def expected(args: tuple[Any, ...], kw: dict[str, Any]) -> list[Any]:
    positions, starts, mapping, sampled, rejected, last, following, temperature, seeds = ([*a.tolist()] for a in args[:9])
    tables, sizes = [t.tolist() for t in args[9]], args[10]
    n, limit = kw["num_speculative_tokens"], kw["max_model_len"]
    queries = n if kw["sample_from_anchor"] else n + 1
    flags = kw.get("cp_sharded") or [True] * len(tables)
    tokens, requests = len(positions), len(starts) - 1

    def slot(g: int, i: int, p: int) -> int:
        return expected_slot(tables[g][i], sizes[g], p, kw["cp_rank"] if flags[g] else 0, kw["cp_size"] if flags[g] else 1, kw["cp_interleave"])

    clean, top = [], 0
    for s in starts:
        top = max(top, min(max(s, 0), tokens))
        clean.append(top)
    first: dict[int, int] = {}  # live requests: first query position
    kept: dict[int, int] = {}
    for i in range(requests):
        mine = positions[clean[i] : clean[i + 1]]
        if mine and 0 <= mapping[i] < len(last):
            kept[i] = len(mine) - max(0, min(rejected[i], len(mine)))
            start = max(0, mine[kept[i] - 1] + 1 if kept[i] else mine[0])
            if start < limit:
                first[i] = start

    def query_row(k: int) -> tuple[int, int, bool, list[int]]:
        i, j = divmod(k, queries)
        if i not in first:
            return 0, 0, True, [-1] * len(tables)
        p = first[i] + j
        token = MASK if j else (last if sampled[i] > 0 else following)[mapping[i]]
        return min(max(token, 0), 2**31 - 1), min(p, limit - 1), False, [slot(g, i, p) if p < limit else -1 for g in range(len(tables))]

    def context_row(t: int) -> tuple[int, list[int]]:
        for i in kept:
            if clean[i] <= t < clean[i] + kept[i] and 0 <= positions[t] < limit:
                return positions[t], [slot(g, i, positions[t]) for g in range(len(tables))]
        return 0, [-1] * len(tables)

    def sample_row(k: int) -> tuple[int, int, int]:
        i, j = divmod(k, n)
        if i not in first:
            return 0, 0, -1
        j += queries - n
        p = first[i] + j
        return i * queries + j, p + (queries == n), mapping[i] if p < limit and sampled[i] > 0 else -1

    rows = [query_row(k) for k in range(kw["max_tokens"])]
    context = [context_row(t) for t in range(tokens)]
    samples = [sample_row(k) for k in range(kw["max_reqs"] * n)]
    return [
        [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], [min(i, requests) * queries for i in range(kw["max_reqs"] + 1)],
        [min(first[i] + queries, limit) if i in first else 0 for i in range(kw["max_reqs"])], [[r[3][g] for r in rows] for g in range(len(tables))],
        [c[0] for c in context], [[c[1][g] for c in context] for g in range(len(tables))],
        [s[0] for s in samples], [s[1] for s in samples], [s[2] for s in samples], temperature, seeds,
    ]  # fmt: skip


def draw(rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    requests, n, anchor = rng.randint(0, 5), rng.randint(1, 5), rng.random() < 0.5
    lens = [rng.choice([0, 1, 2, 4, 6]) for _ in range(requests)]
    limit = rng.choice([4, 17, 40, 100])
    wild = rng.random() < 0.2
    positions = []
    for length in lens:
        start = rng.randint(0, limit + 3)
        positions += [start + k for k in range(length)]
    positions += [rng.randint(0, limit) for _ in range(rng.choice([0, 0, 3]))]
    starts = [sum(lens[:i]) for i in range(requests + 1)]
    states = max(1, requests) + rng.randint(0, 3)
    mapping = rng.sample(range(states), requests)
    mapping = [m if rng.random() < 0.9 else rng.choice([-1, -7, states, 2**31 - 1]) for m in mapping]
    rejected = [rng.randint(0, length) for length in lens]
    if wild:
        positions = [p if rng.random() < 0.8 else rng.choice([-5, -(2**63), 2**63 - 1, limit]) for p in positions]
        starts = [s if rng.random() < 0.8 else rng.choice([-3, 2**31 - 1, 0, 2]) for s in starts]
        rejected = [rng.choice([-2, 0, 99, 2**31 - 1, -(2**31), r]) for r in rejected]
    interleave = rng.choice([1, 2])
    size_of_world = rng.choice([1, 1, 2, 3])
    groups = rng.randint(0, 3)
    sizes = [interleave * rng.choice([1, 2, 4, 8]) for _ in range(groups)]
    blocks = rng.choice([0, 1, 4, 30])
    tables = [[[rng.choice([0, -1, 5, 9, 12, 70000000]) for _ in range(blocks)] for _ in range(requests + rng.choice([0, 2]))] for _ in range(groups)]
    queries = n if anchor else n + 1
    ids = [rng.choice([3, 8, 500, -1, 2**40]) for _ in range(states)]
    i32, i64 = torch.int32, torch.int64
    args = (
        torch.tensor(positions, dtype=i64), torch.tensor(starts, dtype=i32), torch.tensor(mapping, dtype=i32), torch.tensor([rng.choice([0, 1, 3, -1]) for _ in lens], dtype=i32),
        torch.tensor(rejected, dtype=i32), torch.tensor(ids, dtype=i64), torch.tensor(ids[::-1], dtype=i64) + 1, torch.rand(states), torch.randint(0, 2**62, (states,)),
        [torch.tensor(t, dtype=i32).reshape(len(t), blocks) for t in tables], sizes,
    )  # fmt: skip
    spare = rng.choice([0, 1, 3])
    kw = {
        "mask_token_id": MASK, "num_speculative_tokens": n, "max_reqs": requests + spare, "max_tokens": requests * queries + spare * rng.choice([1, queries]), "max_model_len": limit,
        "sample_from_anchor": anchor, "cp_rank": rng.randrange(size_of_world), "cp_size": size_of_world, "cp_interleave": interleave,
        "cp_sharded": rng.choice([None, [rng.random() < 0.5 for _ in range(groups)]]),
    }  # fmt: skip
    return args, kw


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_random_steps_match_the_oracle(seed: int, device: str) -> None:
    rng = random.Random(seed)
    for k in range(500):
        args, kw = draw(rng)
        want = expected(args, kw)
        moved = (*(a.to(device) for a in args[:9]), [t.to(device) for t in args[9]], args[10])
        for implementation in (PREPARE_DFLASH_INPUTS, PREPARE_DFLASH_INPUTS.reference):
            got = implementation(*moved, **kw)
            for name, value, right in zip(DFlashInputs._fields, got, want, strict=True):
                if name in ("temperature", "seeds"):
                    assert value.tolist() == right
                else:
                    assert value.tolist() == right, f"seed {seed}, step {k}: {name}\n{args}\n{kw}"


def test_dtypes_and_shapes_of_every_output(device: str) -> None:
    out = prepare([[3, 4], [8]], [[[1], [2]], [[3, 4], [5, 6]]], [16, 8], n=3, max_reqs=4, max_tokens=20, padding=2, device=device)
    i32, i64 = torch.int32, torch.int64
    assert {name: (value.dtype, list(value.shape)) for name, value in out._asdict().items()} == {
        "input_ids": (i32, [20]), "positions": (i64, [20]), "is_padding": (torch.bool, [20]), "query_start_loc": (i32, [5]), "seq_lens": (i32, [4]),
        "query_slots": (i64, [2, 20]), "context_positions": (i64, [5]), "context_slots": (i64, [2, 5]), "sample_indices": (i64, [12]),
        "sample_pos": (i64, [12]), "sample_idx_mapping": (i32, [12]), "temperature": (torch.float32, [2]), "seeds": (i64, [2]),
    }  # fmt: skip
    assert all(value.is_contiguous() for value in out)


def test_dflash_samples_the_masks_and_dspark_every_row(device: str) -> None:
    flash = prepare([[8, 9]], [[[1]]], [64], n=3, anchor=False, device=device)
    assert flash.input_ids.tolist() == [100, MASK, MASK, MASK] and flash.positions.tolist() == [10, 11, 12, 13]
    assert flash.sample_indices.tolist() == [1, 2, 3] and flash.sample_pos.tolist() == [11, 12, 13] and flash.seq_lens.tolist() == [14]
    spark = prepare([[8, 9]], [[[1]]], [64], n=3, device=device)
    assert spark.input_ids.tolist() == [100, MASK, MASK] and spark.positions.tolist() == [10, 11, 12]
    assert spark.sample_indices.tolist() == [0, 1, 2] and spark.sample_pos.tolist() == [11, 12, 13] and spark.seq_lens.tolist() == [13]


# Handed cases.


def test_case_D01_look_ahead_past_the_allocated_blocks(device: str) -> None:
    out = prepare([[28, 29]], [[[4, 9, 0, 0]]], [16], n=4, device=device)
    assert out.positions.tolist() == [30, 31, 32, 33]
    assert out.query_slots.tolist() == [[158, 159, -1, -1]]


@pytest.mark.parametrize("anchor", [True, False])
def test_sibling_of_D01_no_slot_is_ever_in_block_0(anchor: bool, device: str) -> None:
    for last in range(70):
        out = prepare([[last]], [[[0, 3, 0, -1]]], [16], n=4, anchor=anchor, max_reqs=2, max_tokens=12, device=device)
        for slots in (out.query_slots, out.context_slots):
            assert bool(((slots == -1) | (slots >= 16)).all())


def test_case_D02_position_past_the_limit_has_no_slot(device: str) -> None:
    out = prepare([[30, 31]], [[[4, 9, 6]]], [16], n=4, max_model_len=34, device=device)
    assert out.positions.tolist() == [32, 33, 33, 33]
    assert out.query_slots.tolist() == [[96, 97, -1, -1]]
    assert out.seq_lens.tolist() == [34]
    assert out.sample_idx_mapping.tolist() == [0, 0, -1, -1] and out.sample_pos.tolist() == [33, 34, 35, 36], "sample_pos keys the noise: not clamped"


def test_case_D04_rejected_suffix_is_not_written(device: str) -> None:
    out = prepare([list(range(20, 26))], [[[4, 9, 0, 0]]], [16], n=4, rejected=[2], device=device)
    assert out.context_slots.tolist() == [[148, 149, 150, 151, -1, -1]]
    assert out.context_positions.tolist() == [20, 21, 22, 23, 0, 0]
    assert out.positions.tolist() == [24, 25, 26, 27] and out.query_slots.tolist() == [[152, 153, 154, 155]]
    assert out.seq_lens.tolist() == [28]


def test_sibling_of_D04_nothing_kept_starts_at_the_requests_own_first_position(device: str) -> None:
    """The request before ends at position 50: reading one row back would give 51."""
    out = prepare([[49, 50], [20, 21, 22]], [[[4] * 8, [5] * 8]], [16], n=2, rejected=[0, 9], device=device)
    assert out.positions.tolist() == [51, 52, 20, 21]
    assert out.context_slots.tolist() == [[4 * 16 + 1, 4 * 16 + 2, -1, -1, -1]] and out.seq_lens.tolist() == [53, 22]


@pytest.mark.parametrize(("sizes", "error", "match"), [
    ([8, 0], ArgumentError, r"capture_sizes[1] must be at least 1, got 0."),
    ([-4], ArgumentError, r"capture_sizes[0] must be at least 1, got -4."),
    ([8, 16.0], ArgumentDtypeError, r"capture_sizes[1] must be an integer, got float."),
    ([True], ArgumentDtypeError, r"capture_sizes[0] must be an integer, got bool."),
    (8, ArgumentDtypeError, "capture_sizes must be a sequence of integers, got int."),
    ("8", ArgumentDtypeError, "capture_sizes must be a sequence of integers, got str."),
])  # fmt: skip
def test_capture_sizes_are_checked(sizes: Any, error: type[Exception], match: str) -> None:
    for name, call in (("round_to_capture_size", lambda: round_to_capture_size(3, sizes)), ("draft_buffer_tokens", lambda: draft_buffer_tokens(2, 3, sizes))):
        with pytest.raises(error, match=re.escape(f"{name}: {match}")):
            call()


def test_case_D06_query_buffers_hold_the_capture_size(device: str) -> None:
    sizes = [1, 2, 4, 8, 136, 272]
    assert round_to_capture_size(132, sizes) == 136
    assert draft_buffer_tokens(33, 4, [1, 2, 4, 8, 136]) == 136
    assert round_to_capture_size(8, [1, 2, 4, 24]) == 24 and draft_buffer_tokens(1, 8, [1, 2, 4, 24]) == 24
    assert round_to_capture_size(300, sizes) == 300, "past the largest: eager, exact size"
    assert round_to_capture_size(0, sizes) == 1 and round_to_capture_size(5, []) == 5 and draft_buffer_tokens(3, 4, []) == 12
    out = prepare([[i, i + 1] for i in range(33)], [[[1, 2]] * 33], [64], n=3, anchor=False, max_reqs=34, max_tokens=136, device=device)
    assert not bool(out.is_padding[:132].any()) and bool(out.is_padding[132:].all())
    assert out.input_ids[132:].tolist() == [0] * 4 and out.positions[132:].tolist() == [0] * 4 and out.query_slots[0, 132:].tolist() == [-1] * 4
    with pytest.raises(ArgumentError, match=r"max_tokens must be at least 33 requests \* 4 query rows = 132, got 131"):
        prepare([[i] for i in range(33)], [], [], n=3, anchor=False, max_tokens=131, device=device)


def test_case_D07_dummies_write_to_a_row_of_their_own(device: str) -> None:
    live = {11: 0, 22: 1}
    mapping = torch.tensor([live.get(request, -1) for request in (11, 22, 33, 44)], dtype=torch.int32, device=device)
    rows = scratch_rows(mapping, 4)
    assert rows.tolist() == [0, 1, 4, 4]
    state = torch.arange(5, device=device)
    state[rows] = 99
    assert state.tolist() == [99, 99, 2, 3, 99]
    # and the draft op itself gives dummies neither slot nor sample
    out = prepare([[5]] * 4, [[[3]] * 4], [16], n=2, mapping=mapping.tolist(), device=device)
    assert out.query_slots.tolist() == [[54, 55, 54, 55, -1, -1, -1, -1]] and out.context_slots.tolist() == [[53, 53, -1, -1]]
    assert out.sample_idx_mapping.tolist() == [0, 0, 1, 1, -1, -1, -1, -1]


def test_case_D09_requests_are_counted_by_query_start_loc(device: str) -> None:
    """5 requests of 6, padded to 36 tokens, and a block table with a sixth row."""
    out = prepare([list(range(6))] * 5, [[[7]] * 6], [64], n=6, max_reqs=6, max_tokens=36, device=device)
    assert out.query_slots[0].tolist() == [7 * 64 + p for p in range(6, 12)] * 5 + [-1] * 6
    assert out.query_start_loc.tolist() == [0, 6, 12, 18, 24, 30, 30] and out.seq_lens.tolist() == [12] * 5 + [0]


def test_case_D12_padding_rows_map_to_no_request(device: str) -> None:
    out = prepare([[4]] * 3, [[[1]] * 3], [16], n=2, mapping=[5, 0, 9], max_reqs=4, max_tokens=8, device=device)
    assert out.sample_idx_mapping.tolist() == [5, 5, 0, 0, 9, 9, -1, -1]
    assert out.sample_indices.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    state = torch.zeros(11, device=device)
    state[scratch_rows(out.sample_idx_mapping, 10)] = 1
    assert state.tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1], "row 4, which an old mapping named, is unchanged; the last row is scratch"


def test_sibling_of_D12_no_stale_value_survives_in_persistent_buffers(device: str) -> None:
    """The out form on buffers that a larger batch filled."""
    names = DFlashInputs._fields
    big_args, kw = next(s for s in [(s.args, s.kwargs) for s in PREPARE_DFLASH_INPUTS.samples(device)])
    buffers = dict(zip(PREPARE_DFLASH_INPUTS.out_names, PREPARE_DFLASH_INPUTS(*big_args, **kw), strict=True))
    for name in ("out_context_positions", "out_context_slots", "out_temperature", "out_seeds"):
        assert buffers[name].numel()
    small = list(big_args)
    small[1] = big_args[1][:2].clone()  # one request instead of three; the other tokens are padding now
    for place in (2, 3, 4):
        small[place] = big_args[place][:1]
    PREPARE_DFLASH_INPUTS.out_overload(*small, **kw, **buffers)
    want = expected((*(a.cpu() for a in small[:9]), [t.cpu() for t in small[9]], small[10]), {**kw})
    mask = kw["mask_token_id"]
    for name, right in zip(names, want, strict=True):
        got = buffers[f"out_{name}"].tolist()
        if name == "input_ids":
            right = [mask if v == MASK else v for v in right]
        assert got == right or name in ("temperature",), name


@pytest.mark.parametrize("compiled", [False, True])
def test_case_D14_a_dummy_step_writes_nothing(compiled: bool, device: str) -> None:
    """All inputs zero, as idle ranks replay them: the cache of the last real step stays."""

    def step(value: torch.Tensor, cache: torch.Tensor, *args: Any) -> torch.Tensor:
        out = prepare_dflash_inputs(
            *args[:9], [args[9]], [16], mask_token_id=MASK, num_speculative_tokens=4, max_reqs=2, max_tokens=8, max_model_len=64, sample_from_anchor=True
        )
        kv_cache_insert(value.expand(out.query_slots.shape[1], 512).contiguous(), cache, out.query_slots[0])
        kv_cache_insert(value.expand(out.context_slots.shape[1], 512).contiguous(), cache, out.context_slots[0])
        return out.query_slots

    def args(positions: list[int], starts: list[int], table: list[int]) -> list[torch.Tensor]:
        i32, i64 = torch.int32, torch.int64
        ones = [torch.tensor([1], dtype=d, device=device) for d in (i32, i32, i32, i64, i64, torch.float32, i64)]
        ones[0].zero_(), ones[2].zero_()
        return [torch.tensor(positions, dtype=i64, device=device), torch.tensor(starts, dtype=i32, device=device), *ones, torch.tensor([table], dtype=i32, device=device)]

    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True) if compiled else step
    cache = new_kv_cache(12, 16, dtype=torch.float32, device=device)
    slots = run(torch.tensor([1.0], device=device), cache, *args([18, 19], [0, 2], [4, 9]))
    assert slots.tolist() == [[148, 149, 150, 151, -1, -1, -1, -1]]
    assert bool((cache.view(-1, 512)[146:152] == 1).all())
    before = cache.clone()
    zero = [a.zero_() for a in args([18, 19], [0, 2], [4, 9])]
    slots = run(torch.tensor([7.0], device=device), cache, *zero)
    assert bool((slots == -1).all()) and torch.equal(cache, before)


def test_case_D15_anchor_of_an_unfinished_prefill_chunk(device: str) -> None:
    chunk = prepare([list(range(6))], [[[1]]], [16], n=3, sampled=[0], last=[999], following=[7], device=device)
    assert int(chunk.input_ids[0]) == 7 and int(chunk.positions[0]) == 6
    assert chunk.sample_idx_mapping.tolist() == [-1] * 3 and chunk.query_slots.tolist() == [[22, 23, 24]]
    final = prepare([list(range(6, 10))], [[[1]]], [16], n=3, sampled=[1], last=[42], following=[0], device=device)
    assert int(final.input_ids[0]) == 42 and int(final.positions[0]) == 10 and final.sample_idx_mapping.tolist() == [0] * 3


def test_case_D16_the_drafts_own_position_limit(device: str) -> None:
    """Draft limit 4096: a request at 4094, one at 5000, one far below."""
    tables = [[[1] * 80, [2] * 80, [3] * 80]]
    out = prepare([[4093], [4998, 4999], [9]], tables, [64], n=4, max_model_len=4096, device=device)
    assert out.positions.tolist() == [4094, 4095, 4095, 4095, 0, 0, 0, 0, 10, 11, 12, 13]
    assert out.query_slots.tolist() == [[126, 127, -1, -1, -1, -1, -1, -1, 202, 203, 204, 205]]
    assert out.is_padding.tolist() == [False] * 4 + [True] * 4 + [False] * 4 and out.seq_lens.tolist() == [4096, 0, 14]
    assert out.sample_idx_mapping.tolist() == [0, 0, -1, -1, -1, -1, -1, -1, 2, 2, 2, 2]
    assert out.context_positions.tolist() == [4093, 0, 0, 9], "positions past the draft's rotary table reach no look-up"
    assert out.context_slots.tolist() == [[64 + 61, -1, -1, 201]]
    assert out.query_start_loc.tolist() == [0, 4, 8, 12], "an inert request keeps its place"


def test_case_D17_slots_under_context_parallelism(device: str) -> None:
    def stored(rank: int, interleave: int, sharded: bool = True, size: int = 4) -> list[int]:
        out = prepare([list(range(8))], [[[3, 0]]], [size], n=1, cp_rank=rank, cp_size=2, cp_interleave=interleave, cp_sharded=[sharded], device=device)
        return out.context_slots[0].tolist()

    assert stored(0, 1) == [12, -1, 13, -1, 14, -1, 15, -1] and stored(1, 1) == [-1, 12, -1, 13, -1, 14, -1, 15]
    assert stored(0, 2) == [12, 13, -1, -1, 14, 15, -1, -1] and stored(1, 2) == [-1, -1, 12, 13, -1, -1, 14, 15]
    for rank in (0, 1):
        assert stored(rank, 1, sharded=False, size=8) == list(range(24, 32)), "a replica stores every position on every rank"
        # rejected suffix, null block and look-ahead of D04 and D01, on every rank
        out = prepare([list(range(4, 8))], [[[3, 0]], [[5, 0]]], [4, 8], n=4, rejected=[1], cp_rank=rank, cp_size=2, cp_sharded=[True, False], device=device)
        assert out.context_slots.tolist() == [[14, -1, 15, -1] if rank == 0 else [-1, 14, -1, -1], [44, 45, 46, -1]]
        assert out.query_slots.tolist() == [[-1, -1, -1, -1] if rank == 0 else [15, -1, -1, -1], [47, -1, -1, -1]]


def test_every_position_is_stored_by_exactly_one_rank_at_its_own_offset(device: str) -> None:
    for size, ranks, interleave in ((4, 2, 1), (4, 2, 2), (4, 2, 4), (6, 3, 2), (64, 4, 1)):
        contexts = [list(range(3 * size * ranks))]
        per_rank = [
            prepare(contexts, [[[5, 0, 8]]], [size], n=1, cp_rank=r, cp_size=ranks, cp_interleave=interleave, device=device).context_slots[0].tolist() for r in range(ranks)
        ]
        for entry, block in ((0, 5), (1, 0), (2, 8)):
            positions = range(entry * size * ranks, (entry + 1) * size * ranks)
            owners = [[r for r in range(ranks) if per_rank[r][p] >= 0] for p in positions]
            assert all(len(o) == (1 if block else 0) for o in owners)
            for r in range(ranks):
                stored = [per_rank[r][p] for p in positions if per_rank[r][p] >= 0]
                assert stored == ([block * size + k for k in range(size)] if block else [])


def test_case_D18_wide_draft_pages_and_narrow_target_pages(device: str) -> None:
    """One page list: the draft's replica has pages of 64 * 4 tokens, a target rank holds 64 of them."""
    for rank in range(4):
        out = prepare([[300]], [[[9, 5]], [[9, 5]]], [256, 64], n=1, cp_rank=rank, cp_size=4, cp_sharded=[False, True], device=device)
        assert out.context_slots.tolist() == [[1324], [331 if rank == 0 else -1]]


def test_case_D19_capture_geometry_follows_the_tokens(device: str) -> None:
    assert capture_query_lens(42, 6, 8) == [6] * 7
    assert capture_query_lens(192, 6, 32) == [6] * 32
    assert capture_query_lens(44, 6, 8) == [6] * 7 + [2] and capture_query_lens(0, 6, 8) == []
    with pytest.raises(ArgumentError, match="8 requests have at most that many rows"):
        capture_query_lens(49, 6, 8)


def test_case_E14_draft_geometry_is_not_the_targets() -> None:
    """K = 7, 16 requests: 128 target rows are 112 draft rows, which are 16 requests of 7 and not 14 of 8."""
    assert capture_query_lens(112, 7, 16) == [7] * 16 and capture_query_lens(128, 8, 16) == [8] * 16
    assert capture_query_lens(7, 7, 1) == [7]


def test_sibling_of_C13_block_tables_are_read_by_their_stride(device: str) -> None:
    backing = torch.full((3, 16), 999, dtype=torch.int32, device=device)
    backing[:, :4] = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    out = prepare([[70]] * 3, [backing[:, :4]], [64], n=1, device=device)
    assert out.context_slots.tolist() == [[134, 390, 646]]
    far = prepare([[255, 256]] * 3, [backing[:, :4]], [64], n=1, device=device)
    assert far.context_slots.tolist() == [[4 * 64 + 63, -1, 8 * 64 + 63, -1, 12 * 64 + 63, -1]], "the poison behind the view is not read"


def test_sibling_of_C20_padded_draft_rows_are_defined(device: str) -> None:
    out = prepare([[9]], [[[1, 2]]], [16], n=5, max_reqs=2, max_tokens=8, device=device)
    assert out.positions.tolist() == [10, 11, 12, 13, 14, 0, 0, 0] and out.query_slots.tolist() == [[26, 27, 28, 29, 30, -1, -1, -1]]
    assert out.seq_lens.tolist() == [15, 0] and out.is_padding.tolist() == [False] * 5 + [True] * 3


def test_slots_are_64_bit(device: str) -> None:
    out = prepare([[62]], [[[2**31 - 1]]], [64], n=1, max_model_len=64, device=device)
    assert out.context_slots.tolist() == [[(2**31 - 1) * 64 + 62]] and out.query_slots.tolist() == [[(2**31 - 1) * 64 + 63]]


def test_a_request_at_its_limit_still_writes_its_context(device: str) -> None:
    """No query fits, but the tokens are cached for whoever shares the prefix."""
    out = prepare([[61, 62, 63], [5]], [[[7], [8]]], [64], n=2, rejected=[0, 0], max_model_len=64, device=device)
    assert out.context_slots.tolist() == [[7 * 64 + 61, 7 * 64 + 62, 7 * 64 + 63, 8 * 64 + 5]] and out.context_positions.tolist() == [61, 62, 63, 5]
    assert out.is_padding.tolist() == [True, True, False, False] and out.seq_lens.tolist() == [0, 8]


def test_inputs_of_the_neighbour_do_not_matter(device: str) -> None:
    """Request 1 has the same rows whatever request 0 is."""
    ours = None
    for context, rejected, mapping, sampled in (([3, 4, 5], 0, 0, 1), ([3, 4, 5], 3, 0, 0), ([3, 4, 5], -9, -1, 1), ([90, 91, 92], 1, 0, 1)):
        out = prepare([context, [20, 21]], [[[4, 9, 2], [6, 7, 8]]], [16], n=3, mapping=[mapping, 2], sampled=[sampled, 1], rejected=[rejected, 1], max_model_len=64, device=device)
        mine = [v[..., s].tolist() for v, s in ((out.input_ids, slice(3, 6)), (out.positions, slice(3, 6)), (out.query_slots, slice(3, 6)), (out.context_slots, slice(3, 5)))]
        ours = ours or mine
        assert mine == ours
