"""The fused draft step: by hand, against the single ops through their public functions, and as the engine asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_ops import DFlashInputs, DraftStep, draft_swa_indices, prepare_dflash_inputs, prepare_draft_step, swa_index_width
from dsv4_ops.draft_step import PREPARE_DRAFT_STEP
from tests.common import i32, i64


def call(**changed: Any) -> DraftStep:
    """Two DSpark requests (K = 2, pages of 4, window 3): request 0 keeps 5, 6 of 5, 6, 7; request 1 keeps 1, 2; padded to 4 and 9 rows."""
    arguments: dict[str, Any] = {
        "target_positions": i64([5, 6, 7, 1, 2]), "query_start_loc": i32([0, 3, 5]), "idx_mapping": i32([1, 0]), "num_sampled": i32([2, 1]), "num_rejected": i32([1, 0]),
        "last_sampled": i64([70, 71]), "next_prefill_tokens": i64([80, 81]), "temperature": torch.tensor([0.0, 0.5]), "seeds": i64([3, 4]),
        "block_tables": [i32([[9, 3, 6], [5, 0, 0]])], "block_sizes": [4], "mask_token_id": 99, "num_speculative_tokens": 2, "max_reqs": 4, "max_tokens": 9,
        "max_model_len": 100, "window": 3, "width": 8, "sample_from_anchor": True,
    }  # fmt: skip
    return prepare_draft_step(**(arguments | changed))


def test_by_hand() -> None:
    step = call()
    assert step.input_ids.tolist() == [71, 99, 70, 99, 0, 0, 0, 0, 0]
    assert step.positions.tolist() == [7, 8, 3, 4, 0, 0, 0, 0, 0]
    assert step.query_slots.tolist() == [[15, 24, 23, -1, -1, -1, -1, -1, -1]]
    assert step.context_slots.tolist() == [[13, 14, -1, 21, 22]]
    # Request 0: S = 7, so positions 4 to 8; request 1: S = 3, positions 0 to 4, of which 4 lies on an unmapped page.
    zero, one, none = [12, 13, 14, 15, 24, -1, -1, -1], [20, 21, 22, 23, -1, -1, -1, -1], [-1] * 8
    assert step.swa_indices.tolist() == [[zero, zero, one, one, none, none, none, none, none]]
    assert step.swa_lens.tolist() == [5, 5, 5, 5, 0, 0, 0, 0, 0]


def test_drafter_that_starts_late() -> None:
    step = call(draft_start=i32([6, 50]))
    assert step.swa_indices[0, 0].tolist() == [14, 15, 24, -1, -1, -1, -1, -1] and step.swa_indices[0, 2].tolist() == [-1] * 8
    assert step.swa_lens.tolist() == [3, 3, 0, 0, 0, 0, 0, 0, 0]


def test_inert_requests_have_no_window() -> None:
    """No tokens, a state outside the table, no room, and no committed token: the places stay, empty."""
    for changed in ({"query_start_loc": i32([0, 0, 5])}, {"idx_mapping": i32([-1, 0])}, {"idx_mapping": i32([2, 0])}, {"max_model_len": 7}):
        step = call(**changed)
        assert step.swa_lens[:2].tolist() == [0, 0] and step.swa_lens[2] > 0, changed
        assert step.is_padding[:4].tolist() == [True, True, False, False]
        assert bool((step.swa_indices[0, :2] == -1).all())
    step = call(target_positions=i64([0, 1, 2, 1, 2]), num_rejected=i32([3, 0]))
    assert step.positions[:2].tolist() == [0, 1] and step.swa_lens[:2].tolist() == [0, 0]


def test_past_the_model_length_columns_stay_and_hold_nothing() -> None:
    step = call(max_model_len=8)
    assert step.swa_indices[0, 0].tolist() == [12, 13, 14, 15, -1, -1, -1, -1] and step.swa_lens[0] == 5


@pytest.mark.parametrize("requests", [0, 1, 5, 64])
@pytest.mark.parametrize("anchor", [False, True])
def test_equals_the_single_ops(requests: int, anchor: bool) -> None:
    """As an engine calls them: K = 5, two groups, half of the drafts rejected, some requests still in prefill."""
    g = torch.Generator().manual_seed(requests)
    queries, window = 5 if anchor else 6, 128
    lens = torch.randint(1, 7, (requests,), generator=g)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).to(torch.int32)
    base = torch.randint(0, 900, (requests,), generator=g)
    positions = torch.cat([torch.zeros(0, dtype=torch.int64)] + [base[i] + torch.arange(int(n)) for i, n in enumerate(lens)])
    tables = [torch.randint(0, 500, (requests, blocks), generator=g, dtype=torch.int32) for blocks in (16, 64)]
    arguments = (
        positions, starts, torch.arange(requests, dtype=torch.int32).flip(0), torch.randint(0, 3, (requests,), generator=g, dtype=torch.int32),
        torch.randint(0, 6, (requests,), generator=g, dtype=torch.int32), torch.arange(requests) + 100, torch.arange(requests) + 900, torch.rand(requests, generator=g),
        torch.arange(requests),
    )  # fmt: skip
    sizes: dict[str, Any] = {"mask_token_id": 7, "num_speculative_tokens": 5, "max_reqs": requests + 3, "max_tokens": (requests + 3) * queries, "max_model_len": 1000, "sample_from_anchor": anchor}
    width = swa_index_width(window, queries)
    start = torch.randint(0, 800, (requests,), generator=g, dtype=torch.int32)
    step = prepare_draft_step(*arguments, tables, (64, 16), **sizes, window=window, width=width, draft_start=start)
    single = prepare_dflash_inputs(*arguments, tables, (64, 16), **sizes)
    for name, a, b in zip(DFlashInputs._fields, step.inputs, single, strict=True):
        assert torch.equal(a, b), name
    first = single.positions[: requests * queries : queries].to(torch.int32)
    valid = ~single.is_padding[: requests * queries : queries]
    for group, block_size in enumerate((64, 16)):
        indices, rows = draft_swa_indices(
            first, tables[group], valid, block_size=block_size, window=window, block_queries=queries, width=width, draft_start=start, max_model_len=1000
        )
        assert torch.equal(step.swa_indices[group, : requests * queries], indices) and bool((step.swa_indices[group, requests * queries :] == -1).all())
        assert torch.equal(step.swa_lens[: requests * queries], rows) and not bool(step.swa_lens[requests * queries :].any())


def test_lane_is_of_no_consequence() -> None:
    """The op takes no scratch, so a lane neither changes results nor makes a buffer."""
    for lane in (-1, 0, 1):
        assert torch.equal(call(lane=lane).swa_indices, call().swa_indices)
    assert PREPARE_DRAFT_STEP.schema.count("int lane=-1") == 1
