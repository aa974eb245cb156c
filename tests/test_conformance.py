"""The conformance kit: our ops pass it, and functions with a fault fail in the case that shows it, with code that repeats it."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dsv4_ops
from dsv4_ops import WorkspaceManager, testing, use_workspace_lane
from dsv4_ops.dflash import DFlashInputs
from dsv4_ops.errors import ArgumentError
from dsv4_ops.testing import (
    Case,
    ConformanceError,
    assert_graph_replay,
    assert_topk,
    check_dflash_inputs,
    check_mixed_indices,
    check_sparse_decode,
    check_topk,
    check_workspace,
    dflash_inputs_cases,
    mixed_indices_cases,
    sparse_decode_cases,
    topk_cases,
    workspace_cases,
)

OURS: dict[str, Callable[..., Any]] = {
    "topk": dsv4_ops.topk,
    "build_mixed_sparse_indices": dsv4_ops.build_mixed_sparse_indices,
    "prepare_dflash_inputs": dsv4_ops.prepare_dflash_inputs,
    "sparse_mla_decode": dsv4_ops.sparse_mla_decode,
}
CHECKS = {"topk": check_topk, "build_mixed_sparse_indices": check_mixed_indices, "prepare_dflash_inputs": check_dflash_inputs, "sparse_mla_decode": check_sparse_decode}
ALL = [*topk_cases(), *mixed_indices_cases(), *dflash_inputs_cases(), *sparse_decode_cases()]
i32 = torch.int32


def named(case: Case) -> str:
    return f"{case.op}-{case.id.replace(' ', '_')}"


# Our own ops


@pytest.mark.parametrize("case", ALL, ids=named)
def test_our_ops_pass_and_the_printed_code_agrees(case: Case) -> None:
    case.run(OURS[case.op])
    exec(case.reproduction(), {"fn": OURS[case.op]})


@pytest.mark.parametrize("case", ALL, ids=named)
def test_printed_arguments_are_those_of_the_case(case: Case) -> None:
    seen: list[Any] = []

    def fn(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return OURS[case.op](*args, **kwargs)

    exec(case.reproduction(), {"fn": fn})
    ((args, kwargs),) = seen
    pairs = zip(testing.leaves(testing.Sample("", args, kwargs)), testing.leaves(testing.Sample("", case.args, case.kwargs)), strict=True)
    for pasted, given in pairs:
        if not isinstance(given, torch.Tensor):
            assert pasted == given
            continue
        assert (pasted.dtype, pasted.shape) == (given.dtype, given.shape)
        assert pasted.stride() == given.stride() or given.numel() <= 1
        if given.numel():
            same = pasted.contiguous().view(torch.uint8) == given.contiguous().view(torch.uint8) if given.dim() else pasted == given
            assert bool(same.all()) or (bool(given.isnan().any()) and bool(torch.equal(pasted.isnan(), given.isnan()) and torch.equal(pasted.nan_to_num(), given.nan_to_num())))


def test_ids_are_unique_and_code_is_small_enough_to_paste() -> None:
    assert len({(case.op, case.id) for case in ALL}) == len(ALL)
    assert max(len(case.reproduction()) for case in ALL) < 15_000


@pytest.mark.parametrize("op", OURS)
@pytest.mark.parametrize("seed", [1, 2])
def test_our_ops_pass_with_other_seeds(op: str, seed: int, device: str) -> None:
    report = CHECKS[op](OURS[op], device, seed)  # type: ignore[operator]
    assert not report.failed and not report.left_out and len(report.passed) > 20


@pytest.mark.parametrize("function", workspace_cases(), ids=lambda case: case.id.replace(" ", "_"))
def test_our_workspace_manager_passes(function: testing.WorkspaceCase, device: str) -> None:
    def make() -> WorkspaceManager:
        return WorkspaceManager(device, num_lanes=2, num_ubatches=2)

    function.run(make)
    exec(function.reproduction(), {"make": make})


# Functions with a fault: what is wrong, the op, a case that must show it, the function


def _select(row: torch.Tensor, length: int, k: int) -> list[int]:
    scores = row[:length].tolist()
    return sorted(sorted((c for c in range(len(scores)) if scores[c] == scores[c]), key=lambda c: (-scores[c], c))[:k])


def _topk_by(rows: Callable[[torch.Tensor, int, int], list[int]], lengths_of: Callable[[torch.Tensor, int], torch.Tensor] | None = None, pad: bool = True) -> Callable[..., torch.Tensor]:
    """A plain top-k, with one piece exchanged."""

    def fn(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None) -> torch.Tensor:
        width = logits.shape[1] if max_seq_len is None else min(max_seq_len, logits.shape[1])
        flat = lengths.flatten().long()
        clamped = flat.clamp(0, width) if lengths_of is None else lengths_of(flat, width)
        out = torch.full((logits.shape[0], k), -1, dtype=i32) if pad else torch.empty((logits.shape[0], k), dtype=i32)
        for i, length in enumerate(clamped.tolist()):
            columns = rows(logits[i], length, k)
            out[i, : len(columns)] = torch.tensor(columns, dtype=i32)
        return out

    return fn


def _unclamped(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None) -> torch.Tensor:
    """Reads a row as far as its length says, the stride being the only limit."""
    whole = logits.as_strided((logits.shape[0], max(logits.stride(0), logits.shape[1])), (logits.stride(0), 1), 0) if logits.numel() else logits
    return dsv4_ops.topk(whole, lengths, k, max_seq_len)


def _masks_in_place(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None) -> torch.Tensor:
    found = dsv4_ops.topk(logits, lengths, k, max_seq_len)
    logits[:, ::2] = 0
    return found


def _coarse(row: torch.Tensor, length: int, k: int) -> list[int]:
    return _select(row.half(), length, k)


def _hard_coded_k(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None) -> torch.Tensor:
    return dsv4_ops.topk(logits, lengths, 512, max_seq_len)[:, :k]


def _last_tie(row: torch.Tensor, length: int, k: int) -> list[int]:
    scores = row[:length].tolist()
    return sorted(sorted((c for c in range(len(scores)) if scores[c] == scores[c]), key=lambda c: (-scores[c], -c))[:k])


def _mixed(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """Our op, with its arguments changed."""
    names = ["decode_swa_indices", "decode_swa_lens", "decode_topk_indices", "prefill_topk_indices", "positions", "token_to_req_indices", "is_valid_token", "block_table", "compressed_block_table"]

    def fn(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=True)) | kwargs
        change(arguments)
        return dsv4_ops.build_mixed_sparse_indices(**arguments)

    return fn


def _width_for_window(a: dict[str, Any]) -> None:
    a["window"] = a["decode_swa_indices"].shape[1]


def _smaller_window(a: dict[str, Any]) -> None:
    a["window"] -= 1


def _one_too_few(a: dict[str, Any]) -> None:
    a["positions"] = a["positions"] - 1


def _padding_for_real(a: dict[str, Any]) -> None:
    a["is_valid_token"] = torch.ones_like(a["is_valid_token"])


def _no_lengths_of_records(a: dict[str, Any]) -> None:
    a.pop("decode_topk_lens", None)


def _null_is_block_0(*args: Any, **kwargs: Any) -> Any:
    """A null page is read as physical block 0: its slots are 0, 1, ..."""
    size, far = kwargs["block_size"], 2**20
    indices, lens = dsv4_ops.build_mixed_sparse_indices(*args[:7], torch.where(args[7] == 0, far, args[7]), args[8], **kwargs)
    base = far * (kwargs.get("block_span") or size)
    return torch.where((indices >= base) & (indices < base + size), indices - base, indices), lens


def _compacts(a: dict[str, Any]) -> None:
    """Closes the holes among the records of decode rows, so that columns move."""
    records = a["decode_topk_indices"]
    a["decode_topk_indices"] = records.gather(1, (records < 0).int().argsort(dim=1, stable=True))


def _draft(change: Callable[[list[Any], dict[str, Any]], None] | None = None, after: Callable[[dict[str, torch.Tensor], dict[str, Any]], None] | None = None) -> Callable[..., Any]:
    def fn(*args: Any, **kwargs: Any) -> Any:
        mine, options = list(args), dict(kwargs)
        if change is not None:
            change(mine, options)
        out = dsv4_ops.prepare_dflash_inputs(*mine, **options)._asdict()
        if after is not None:
            after(out, kwargs | {"requests": args[1].shape[0] - 1})
        return DFlashInputs(**out)

    return fn


def _keeps_rejected(args: list[Any], options: dict[str, Any]) -> None:
    args[4] = torch.zeros_like(args[4])


def _ignores_unfinished(args: list[Any], options: dict[str, Any]) -> None:
    args[3] = torch.ones_like(args[3])


def _writes_to_null_blocks(*args: Any, **kwargs: Any) -> Any:
    far = 2**24
    out = dsv4_ops.prepare_dflash_inputs(*args[:9], [torch.where(t == 0, far, t) for t in args[9]], *args[10:], **kwargs)
    sizes = torch.tensor(args[10], dtype=torch.int64)[:, None]
    query, context = (torch.where(s // sizes == far, s - far * sizes, s) if len(sizes) else s for s in (out.query_slots, out.context_slots))
    return out._replace(query_slots=query, context_slots=context)


def _clamps_without_masking(*args: Any, **kwargs: Any) -> Any:
    out = dsv4_ops.prepare_dflash_inputs(*args, **{**kwargs, "max_model_len": 2**31 - 1})
    return out._replace(positions=out.positions.clamp(max=kwargs["max_model_len"] - 1), seq_lens=out.seq_lens.clamp(max=kwargs["max_model_len"]))


def _requests_of_the_table(*args: Any, **kwargs: Any) -> Any:
    """Lays out as many requests as the table has rows, as far as the sizes allow."""
    out = dsv4_ops.prepare_dflash_inputs(*args, **kwargs)
    queries = kwargs["num_speculative_tokens"] + (not kwargs.get("sample_from_anchor", False))
    rows = min(args[9][0].shape[0], kwargs["max_reqs"]) if args[9] else args[1].shape[0] - 1
    return out._replace(query_start_loc=torch.arange(kwargs["max_reqs"] + 1, dtype=i32).clamp(max=rows) * queries)


def _stale_mapping(out: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    out["sample_idx_mapping"][options["requests"] * options["num_speculative_tokens"] :] = 1


def _stale_ids(out: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    out["input_ids"][out["is_padding"]] = options["mask_token_id"]


def _attention(
    q: torch.Tensor, *segments: Any, scale: float, width_is_length: bool = False, hole_is_a_slot: bool = False, mask_by_product: bool = False, once: bool = False,
    base_2: bool = False, sink_in_lse: bool = False, slot_0_is_null: bool = False, attn_sink: torch.Tensor | None = None, **_: Any,
) -> Any:  # fmt: skip
    """A plain attention with one fault by request; the cases that it gets right otherwise are compared too."""
    given = [segments[i : i + 3] for i in (0, 3) if len(segments) > i and segments[i] is not None]
    attn_sink = segments[6] if len(segments) > 6 else attn_sink
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf)
    for t in range(q.shape[0]):
        keys, weights = [], []
        for cache, indices, lens in given:
            rows = dsv4_ops.kv_cache_gather(cache, torch.arange(cache.shape[0] * cache.shape[1])).double()
            row = indices[t, : indices.shape[1] if width_is_length else max(0, int(lens[t]))].tolist()
            for slot in dict.fromkeys(row) if once else row:
                inside = (slot > 0 if slot_0_is_null else slot >= 0) and slot < len(rows)
                if inside or (slot == -1 and len(rows) and (hole_is_a_slot or mask_by_product)):
                    keys.append(rows[slot])
                    weights.append(1.0 if inside or hole_is_a_slot else 0.0)
        if not keys:
            continue
        key, weight = torch.stack(keys), torch.tensor(weights, dtype=torch.float64)
        logits = scale * (q[t].double() @ key.T)
        p = (logits - logits.nan_to_num().amax()).exp() * weight
        total = p.sum(-1) if not mask_by_product else p.nan_to_num().sum(-1)
        lse[t] = total.log() + logits.nan_to_num().amax()
        denominator = lse[t].double() if attn_sink is None else torch.logaddexp(lse[t].double(), attn_sink.double())
        out[t] = ((p @ key) / total[:, None] * (lse[t].double() - denominator).exp()[:, None]).to(q.dtype) if bool((total > 0).all()) else 0.0
        lse[t] = denominator if sink_in_lse else lse[t]
    return out, lse / math.log(2) if base_2 else lse


def _with(**fault: bool) -> Callable[..., Any]:
    return lambda *args, **kwargs: _attention(*args, **kwargs, **fault)


FAULTS: list[tuple[str, str, str, Callable[..., Any]]] = [
    ("unsigned length", "topk", "A01 negative length beside long rows", _topk_by(_select, lambda n, w: torch.where(n < 0, w, n.clamp(max=w)))),
    ("unclamped length", "topk", "A11 length above the width", _unclamped),
    ("max_seq_len forgotten", "topk", "A11 max_seq_len below the length", lambda logits, lengths, k, max_seq_len=None: dsv4_ops.topk(logits, lengths, k)),
    ("lengths cut to 32 bits", "topk", "int64 extremes, max_seq_len", lambda logits, lengths, k, m=None: dsv4_ops.topk(logits, lengths.to(i32), k, m)),
    ("NaN is the largest", "topk", "A09 NaN everywhere but in 100 columns", lambda logits, lengths, k, m=None: dsv4_ops.topk(logits.nan_to_num(nan=torch.inf), lengths, k, m)),
    ("-inf is masked", "topk", "-inf is an ordinary lowest score", lambda logits, lengths, k, m=None: dsv4_ops.topk(torch.where(logits == -torch.inf, torch.nan, logits), lengths, k, m)),
    ("-0.0 below 0.0", "topk", "A18 all zeros, both signs", lambda logits, lengths, k, m=None: dsv4_ops.topk(torch.where((logits == 0) & logits.signbit(), -1e-40, logits), lengths, k, m)),
    ("ties to the last column", "topk", "A18 eight levels", _topk_by(_last_tie)),
    ("sixteen bits of a score", "topk", "A07 scores of one coarse bin, 8000", _topk_by(_coarse)),
    ("best first", "topk", "plain", lambda logits, lengths, k, m=None: dsv4_ops.topk(logits, lengths, k, m).flip(1)),
    ("a column twice", "topk", "A18 eight levels", lambda logits, lengths, k, m=None: (x := dsv4_ops.topk(logits, lengths, k, m)).index_copy(1, torch.tensor([k - 1]), x[:, :1])),
    ("k of a constant", "topk", "A22 k above the width", _hard_coded_k),
    ("padding not written", "topk", "k above the width, int64 lengths", _topk_by(_select, pad=False)),
    ("mask written into the scores", "topk", "plain", _masks_in_place),
    ("rows taken as dense", "topk", "padded rows and 2-D lengths", lambda logits, lengths, k, m=None: dsv4_ops.topk(logits.as_strided(logits.shape, (logits.shape[1], 1)), lengths, k, m)),
    ("padded width taken for the window", "build_mixed_sparse_indices", "C02 storage wider than the window", _mixed(_width_for_window)),
    ("off by one window", "build_mixed_sparse_indices", "C02 a position far behind the window", _mixed(_smaller_window)),
    ("off by one position", "build_mixed_sparse_indices", "C02 a position far behind the window", _mixed(_one_too_few)),
    ("padding tokens taken for real ones", "build_mixed_sparse_indices", "padding tokens with request ids of others", _mixed(_padding_for_real)),
    ("lengths of records ignored", "build_mixed_sparse_indices", "decode entries are records, with lengths", _mixed(_no_lengths_of_records)),
    ("null block taken for block 0", "build_mixed_sparse_indices", "null block inside a prefill window", _null_is_block_0),
    ("holes closed", "build_mixed_sparse_indices", "holes among the records", _mixed(_compacts)),
    ("spans forgotten", "build_mixed_sparse_indices", "packed pages", lambda *a, **k: dsv4_ops.build_mixed_sparse_indices(*a, **{**k, "block_span": None, "compressed_block_span": None})),
    ("rejected suffix kept", "prepare_dflash_inputs", "D04 a rejected suffix", _draft(_keeps_rejected)),
    ("anchor of an unfinished chunk", "prepare_dflash_inputs", "D15 an unfinished prefill chunk", _draft(_ignores_unfinished)),
    ("null-block write", "prepare_dflash_inputs", "D01 look-ahead past the allocated blocks", _writes_to_null_blocks),
    ("clamped position keeps its slot", "prepare_dflash_inputs", "D02 positions past the limit", _clamps_without_masking),
    ("requests counted by the table", "prepare_dflash_inputs", "D09 a table with a phantom row", _requests_of_the_table),
    ("stale mapping past the batch", "prepare_dflash_inputs", "D12 padding rows map to no request", _draft(after=_stale_mapping)),
    ("stale ids past the batch", "prepare_dflash_inputs", "two requests, padded", _draft(after=_stale_ids)),
    ("ranks forgotten", "prepare_dflash_inputs", "D17 context parallel, rank 1 of 2", lambda *a, **k: dsv4_ops.prepare_dflash_inputs(*a, **{**k, "cp_size": 1, "cp_rank": 0})),
    ("width taken for the length", "sparse_mla_decode", "C09 padding that names a real slot", _with(width_is_length=True)),
    ("-1 reads the last slot", "sparse_mla_decode", "C08 -1 inside a row", _with(hole_is_a_slot=True)),
    ("masked by a product", "sparse_mla_decode", "C08 NaN where no key is", _with(mask_by_product=True)),
    ("a repeated key counts once", "sparse_mla_decode", "a key listed twice counts twice", _with(once=True)),
    ("lse to base 2", "sparse_mla_decode", "C09 the width is not the length", _with(base_2=True)),
    ("sink in the lse", "sparse_mla_decode", "a sink joins the denominator only", _with(sink_in_lse=True)),
    ("slot 0 taken for null", "sparse_mla_decode", "slot 0 is a slot", _with(slot_0_is_null=True)),
]


@pytest.mark.parametrize(("op", "shows", "fn"), [pytest.param(*rest, id=name.replace(" ", "_")) for name, *rest in FAULTS])
def test_a_fault_fails_in_its_case_with_code_that_repeats_it(op: str, shows: str, fn: Callable[..., Any]) -> None:
    report = CHECKS[op](fn, raises=False)  # type: ignore[operator]
    assert shows in report.failed, report
    assert report.passed, "a function with one fault passes the cases that do not touch it"
    for label, error in report.failed.items():
        text = str(error)
        assert text.startswith(f"{op}: case {label!r}: ") and error.reproduction in text
        with pytest.raises(Exception) as caught:
            exec(error.reproduction, {"fn": fn})
        assert isinstance(caught.value, AssertionError) or type(caught.value).__name__ in text or "wrote to its argument" in text
        exec(error.reproduction, {"fn": OURS[op]})
    with pytest.raises(ConformanceError, match="cases fail") as all_of_them:
        report.raise_for_failures()
    assert repr(shows) in str(all_of_them.value) and all(label in str(all_of_them.value) for label in report.failed)


def test_the_attention_of_these_tests_is_right_without_a_fault() -> None:
    check_sparse_decode(_attention)


def test_a_failing_row_of_many_is_shown_alone() -> None:
    fn = next(fn for name, _, _, fn in FAULTS if name == "unsigned length")
    error = check_topk(fn, raises=False).failed["A01 negative length beside long rows"]
    seen: list[torch.Tensor] = []
    with pytest.raises(AssertionError):
        exec(error.reproduction, {"fn": lambda logits, *rest: (seen.append(logits), fn(logits, *rest))[1]})
    assert seen[0].shape == (1, 16384)


# What a top-k failure says

SAID: list[tuple[str, str, str]] = [
    ("unsigned length", "A01 negative length beside long rows", "row 6: lists 15872, 15873, 15874, 15875 and 508 more, past its length: L = clamp(-1, 0, 16384) = 0"),
    ("unclamped length", "A11 length above the width", "row 0: lists 1000, 1001, 1002, 1003 and 20 more, outside the columns [0, 1000): L = clamp(5000, 0, 1000) = 1000; leaves out 488, 489, 490, 491 and 20 more"),
    ("max_seq_len forgotten", "A11 max_seq_len below the length", "past its length: L = clamp(5000, 0, min(1000, 700)) = 700"),
    ("NaN is the largest", "A09 NaN everywhere but in 100 columns", "row 0: lists 0, 1, 2, 3 and 508 more, which are NaN: NaN is never selected; leaves out 7, 47, 87, 127 and 96 more: the row holds min(|C|, k) = 100"),
    ("NaN is the largest", "NaN of negative sign", "nan='any' judges a kernel that promises nothing for a row with NaN."),
    ("-inf is masked", "-inf is an ordinary lowest score", "row 1: leaves out 0, 1, 2, 3 and 36 more: the row holds min(|C|, k) = 45, and -inf is an ordinary lowest score"),
    ("ties to the last column", "A18 eight levels", "row 0: lists 12289, 12297, 12305, 12313 and 508 more in place of 1, 9, 17, 25 and 508 more, of equal scores (7): ties go to the lowest column"),
    ("ties to the last column", "A18 eight levels", "ties='any' judges a kernel that promises no tie rule."),
    ("sixteen bits of a score", "A07 scores of one coarse bin, 8000", "leaves out 7488, 7489, 7490, 7491 and 508 more and lists 4097, 4098, 4099, 4100 and 508 more, though 7488 scores 1.00089264 and 4097 only 1.0004884"),
    ("a column twice", "A18 eight levels", "row 3: listed twice or more: 0; leaves out 511: the row holds min(|C|, k) = 512; not ascending: 510 stands before 0"),
    ("k of a constant", "A22 k above the width", "torch.int32 [1, 512], expected int32 [1, 2048]"),
    ("padding not written", "k above the width, int64 lengths", "row 1: lists 2147483647, outside the columns [0, 10): 2147483647 marks memory that was never written"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "label", "text"), SAID, ids=[f"{name}-{i}".replace(" ", "_") for i, (name, *_) in enumerate(SAID)])
def test_a_topk_failure_names_rows_columns_and_the_rule_that_they_break(name: str, label: str, text: str) -> None:
    fn = next(fn for fault, _, _, fn in FAULTS if fault == name)
    error = check_topk(fn, raises=False).failed[label]
    assert text in error.difference and str(error).startswith(f"topk: case {label!r}: {error.difference}\n\n")
    assert "absolute difference" not in str(error) and "in another order" not in error.difference and "order='any'" not in error.difference


def test_the_right_columns_in_another_order_are_said_to_be_that() -> None:
    def best_first(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None) -> torch.Tensor:
        found = dsv4_ops.topk(logits, lengths, k, max_seq_len)
        for i, row in enumerate(found):
            columns = row[row >= 0].long()
            row[: len(columns)] = columns[logits[i, columns].float().argsort(descending=True)].to(i32)
        return found

    failed = check_topk(best_first, raises=False).failed
    assert len(failed) > 20
    for error in failed.values():
        assert re.match(r"row \d: the same columns in another order, not ascending: \d+ stands before \d+\n", error.difference)
        assert error.difference.endswith("\norder='any' judges a kernel that promises no order.") and error.rows
        assert "absolute difference" not in str(error) and "leaves out" not in str(error)
    error = failed["A01 negative length beside long rows"]
    assert "row 0: the same columns in another order, not ascending: 98 stands before 97" in error.difference and "and 2 more of 8 rows" in error.difference
    assert error.rows == (0, 1, 2, 3, 4, 5) and "\n\nRow 0 fails alone too; what follows is that row.\n\nTo repeat it" in str(error)
    assert not check_topk(best_first, order="any").failed


def test_rows_with_a_fault_are_told_before_those_in_another_order() -> None:
    logits, lengths = torch.tensor([[1.0, 2.0, 3.0, 3.0]]).repeat(3, 1), torch.tensor([4, 4, 4])
    got = torch.tensor([[3, 2], [-1, 2], [1, 2]], dtype=i32)
    with pytest.raises(AssertionError) as caught:
        assert_topk(got, logits, lengths, 2)
    assert str(caught.value).split("\n") == [
        "row 1: -1 stands at place 0, before columns: padding comes last; leaves out 3: the row holds min(|C|, k) = 2",
        "row 2: leaves out 3 and lists 1, though 3 scores 3 and 1 only 2",
        "row 0: the same columns in another order, not ascending: 3 stands before 2",
        "order='any' judges a kernel that promises no order.",
    ]


def test_a_result_that_is_no_tensor_is_named() -> None:
    assert "got int, expected an int32 tensor [1, 8]" in str(check_topk(lambda *args: 3, raises=False).failed["plain"])


@pytest.mark.parametrize("options", [dict(zip(("order", "ties", "nan"), chosen, strict=True)) for chosen in itertools.product(("ascending", "any"), ("lowest", "any"), ("never", "any"))], ids=str)
def test_assert_topk_refuses_exactly_what_is_no_answer(options: dict[str, str]) -> None:
    """Every row of three entries from -2 to 4, for a few rows of four scores, against a plain definition."""
    nan, accepted = math.nan, 0
    rows: list[tuple[list[float], int]] = [([1, 1, 2, 1], 4), ([nan, 1, nan, -math.inf], 4), ([0.0, -0.0, 5, nan], 3), ([3, 2, 1, 0], 2), ([1, 1, 1, 1], -1), ([nan] * 4, 9)]
    for scores, length in rows:
        length = max(0, min(length, 4))
        numbers = [c for c in range(length) if scores[c] == scores[c]]
        count = min(len(numbers), 3)
        sets = [set(s) for s in itertools.combinations(numbers, count) if sorted((scores[c] for c in s), reverse=True) == sorted((scores[c] for c in numbers), reverse=True)[:count]]
        if options["ties"] == "lowest":
            sets = [set(sorted(numbers, key=lambda c: (-scores[c], c))[:count])]
        if options["nan"] == "any" and len(numbers) < length:
            sets = [set(s) for n in range(count, 4) for s in itertools.combinations(range(length), n)]
        for row in itertools.product(range(-2, 5), repeat=3):
            listed = [c for c in row if c != -1]
            right = list(row[: len(listed)]) == listed and len(set(listed)) == len(listed) and set(listed) in sets and (options["order"] == "any" or listed == sorted(listed))
            said = ""
            try:
                assert_topk(torch.tensor([row], dtype=i32), torch.tensor([scores]), torch.tensor([length]), 3, **options)
            except AssertionError as error:
                said = str(error)
            assert said == "" if right else said.startswith("row 0: "), (scores, length, row, said)
            accepted += right
    assert accepted >= len(rows)


# Relaxations


def _any_order(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None) -> torch.Tensor:
    """Best first, ties to the last column, NaN left out: right as a set, but for the tie rule."""
    found = _topk_by(_last_tie)(logits, lengths, k, max_seq_len)
    for row in found:
        count = int((row >= 0).sum())
        row[:count] = row[:count].flip(0)
    return found


def test_relaxations_of_topk_allow_what_they_name_and_no_more() -> None:
    with pytest.raises(ConformanceError):
        check_topk(_any_order, order="any")
    with pytest.raises(ConformanceError):
        check_topk(_any_order, ties="any")
    report = check_topk(_any_order, order="any", ties="any")
    assert not report.left_out
    for name, op, shows, fn in FAULTS:
        if op == "topk" and name in ("unsigned length", "unclamped length", "NaN is the largest", "sixteen bits of a score", "a column twice", "padding not written"):
            relaxed = check_topk(fn, order="any", ties="any", raises=False)
            assert shows in relaxed.failed, name
            error = relaxed.failed[shows]
            assert "testing.assert_topk(got, logits, lengths, k" in error.reproduction
            with pytest.raises(AssertionError):
                exec(error.reproduction, {"fn": fn})


def test_nan_any_lets_rows_with_nan_hold_any_columns_of_the_row() -> None:
    fn = next(fn for name, _, _, fn in FAULTS if name == "NaN is the largest")
    assert not check_topk(fn, nan="any").failed
    with pytest.raises(ConformanceError, match="listed twice"):
        check_topk(lambda logits, lengths, k, m=None: torch.where(logits.isnan().any(1)[:, None], 0, dsv4_ops.topk(logits, lengths, k, m)).to(i32), nan="any")


def test_lengths_in_range_leaves_out_the_cases_that_are_not() -> None:
    unsigned = next(fn for name, _, _, fn in FAULTS if name == "unsigned length")
    report = check_topk(unsigned, lengths_in_range=True)
    assert report.left_out["A01 negative length beside long rows"] == "lengths_in_range" and len(report.passed) > 15


def test_a_kernel_of_one_k_and_dtype_is_given_those() -> None:
    seen: set[Any] = set()

    def fn(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        seen.add((k, logits.dtype))
        return dsv4_ops.topk(logits, lengths, k)

    report = check_topk(fn, k=512, dtypes=(torch.float32,), max_seq_len=False)
    assert seen == {(512, torch.float32)} and set(report.left_out.values()) == {"dtypes", "max_seq_len"}


def test_relaxations_of_index_rows() -> None:
    def garbage(*args: Any, **kwargs: Any) -> Any:
        indices, lens = dsv4_ops.build_mixed_sparse_indices(*args, **kwargs)
        beyond = torch.arange(indices.shape[1]) >= lens[:, None]
        return torch.nn.functional.pad(indices.masked_fill(beyond, 77), (0, 4), value=77), lens

    with pytest.raises(ConformanceError):
        check_mixed_indices(garbage)
    with pytest.raises(ConformanceError):
        check_mixed_indices(garbage, width="any")
    check_mixed_indices(garbage, width="any", beyond_length="any")
    null = next(fn for name, _, _, fn in FAULTS if name == "null block taken for block 0")
    assert check_mixed_indices(null, raises=False).failed
    report = check_mixed_indices(null, mapped=True)
    assert report.left_out["null block inside a prefill window"] == "mapped" and len(report.passed) > 10
    compacting = next(fn for name, _, _, fn in FAULTS if name == "holes closed")
    assert "holes among the records" in check_mixed_indices(compacting, holes=False, raises=False).left_out


def test_relaxations_of_draft_inputs() -> None:
    def partial(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        out = dsv4_ops.prepare_dflash_inputs(*args, **kwargs)
        inert = out.sample_idx_mapping < 0
        return {"positions": out.positions, "sample_idx_mapping": out.sample_idx_mapping, "sample_pos": out.sample_pos.masked_fill(inert, 5)}

    with pytest.raises(ConformanceError, match="input_ids is missing"):
        check_dflash_inputs(partial, inert_samples="any")
    fields = ("positions", "sample_idx_mapping", "sample_pos")
    with pytest.raises(ConformanceError, match="sample_pos: "):
        check_dflash_inputs(partial, fields=fields)
    check_dflash_inputs(partial, fields=fields, inert_samples="any")
    null = next(fn for name, _, _, fn in FAULTS if name == "null-block write")
    assert len(check_dflash_inputs(null, mapped=True).passed) > 10
    assert len(check_dflash_inputs(dsv4_ops.prepare_dflash_inputs, in_range=True, mapped=True, groups=1, context_parallel=False).passed) > 5


def test_relaxations_of_sparse_decode() -> None:
    def rounded(*args: Any, **kwargs: Any) -> torch.Tensor:
        return (dsv4_ops.sparse_mla_decode(*args, **kwargs)[0].float() * 1.005).to(args[0].dtype)

    with pytest.raises(ConformanceError):
        check_sparse_decode(rounded, lse=False)
    with pytest.raises(ConformanceError, match="1 outputs"):
        check_sparse_decode(rounded, rtol=0.02, atol=1e-3)
    check_sparse_decode(rounded, rtol=0.02, atol=1e-3, lse=False)
    holes = next(fn for name, _, _, fn in FAULTS if name == "-1 reads the last slot")
    report = check_sparse_decode(holes, holes=False)
    assert report.left_out["C08 -1 inside a row"] == "holes" and len(report.passed) > 10
    assert "no key at all" in check_sparse_decode(dsv4_ops.sparse_mla_decode, empty_rows=False).left_out


def test_a_check_of_nothing_is_refused() -> None:
    for check in CHECKS.values():
        with pytest.raises(ValueError, match="no case is left"):
            check(lambda *args, **kwargs: None, accepts=lambda case: False)  # type: ignore[operator]
    with pytest.raises(TypeError, match="no option lenghts_in_range"):
        check_topk(dsv4_ops.topk, lenghts_in_range=True)
    with pytest.raises(ValueError, match="order must be 'ascending' or 'any'"):
        check_topk(dsv4_ops.topk, order="descending")
    with pytest.raises(ValueError, match="beyond_length must be '-1' or 'any', got 'none'"):
        check_mixed_indices(dsv4_ops.build_mixed_sparse_indices, beyond_length="none")
    with pytest.raises(ValueError, match=r"fields must be some of input_ids, .*, got \['slots'\]"):
        check_dflash_inputs(dsv4_ops.prepare_dflash_inputs, fields=["slots"])


@pytest.mark.parametrize("op", OURS)
@pytest.mark.parametrize("result", [(), 3, "text", (torch.zeros(2), torch.zeros(3), torch.zeros(4)), torch.zeros(1), {"a": torch.zeros(1)}, [None, None]], ids=str)
def test_an_odd_result_is_a_failure_and_no_crash(op: str, result: Any) -> None:
    report = CHECKS[op](lambda *args, **kwargs: result, raises=False)  # type: ignore[operator]
    assert not report.passed and len(report.failed) > 20


@pytest.mark.parametrize("as_", [tuple, list, lambda out: out._asdict(), lambda out: out])
def test_draft_inputs_may_come_in_order_or_by_name(as_: Callable[[DFlashInputs], Any]) -> None:
    check_dflash_inputs(lambda *args, **kwargs: as_(dsv4_ops.prepare_dflash_inputs(*args, **kwargs)))


def test_nothing_returned_is_said() -> None:
    with pytest.raises(ConformanceError, match="returned nothing; wrap an out form"):
        check_topk(lambda *args: None)


def _no_such_thing(table: dict[str, int]) -> torch.Tensor:
    return torch.zeros(table["k"]).view(7)


def _last_line(error: BaseException | None) -> str:
    assert error is not None
    return next(frame.name for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.filename == __file__)


@pytest.mark.parametrize(("table", "kind"), [({}, "KeyError: 'k'"), ({"k": 6}, "RuntimeError: shape '[7]' is invalid for input of size 6")])
def test_an_exception_of_the_function_is_a_failure_with_its_name_and_line(table: dict[str, int], kind: str) -> None:
    def raises(*args: Any) -> torch.Tensor:
        return _no_such_thing(table)

    report = check_topk(raises, raises=False)
    assert not report.passed
    line = _no_such_thing.__code__.co_firstlineno + 1
    shown = f': {kind}\n  File "{__file__}", line {line}, in _no_such_thing\n    return torch.zeros(table["k"]).view(7)\n\nTo repeat it'
    for error in report.failed.values():
        assert shown in str(error) and _last_line(error.__cause__) == "_no_such_thing"
    with pytest.raises(ConformanceError) as caught:
        report.raise_for_failures()
    assert shown in str(caught.value) and _last_line(caught.value.__cause__) == "_no_such_thing"
    with pytest.raises(ConformanceError) as caught:
        topk_cases()[0].run(raises)
    assert _last_line(caught.value.__cause__) == "_no_such_thing"


def test_an_exception_inside_this_package_is_shown_where_the_function_calls_it() -> None:
    def calls(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return dsv4_ops.topk(logits, torch.zeros(1), 3)

    text = str(check_topk(calls, raises=False).failed["plain"])
    assert "ArgumentDtypeError: topk: lengths must be" in text and ", in calls\n    return dsv4_ops.topk(logits, torch.zeros(1), 3)\n" in text
    assert "File" not in str(check_topk(torch.topk, raises=False).failed["plain"]), "there is no line of the caller's"


def test_a_report_of_wrong_results_alone_has_no_cause() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_topk(_any_order)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("op", OURS)
@pytest.mark.parametrize("fn", ["x", None, 3, torch.zeros(1)], ids=str)
def test_what_cannot_be_called_is_refused_at_once(op: str, fn: Any) -> None:
    with pytest.raises(ArgumentError, match=f"fn must be a function that is called as dsv4_ops.{op} is, got {type(fn).__name__}") as caught:
        CHECKS[op](fn, raises=False)  # type: ignore[operator]
    assert isinstance(caught.value, TypeError)
    with pytest.raises(TypeError, match="run_cases: fn must be a function"):
        testing.run_cases(fn, [])


@pytest.mark.parametrize("k", [0, -1, 4097, 5000, True, 8.0, "8"], ids=repr)
def test_a_k_that_the_contract_does_not_have_is_refused(k: Any) -> None:
    def never(*args: Any) -> torch.Tensor:
        raise SystemExit("called")

    with pytest.raises(ArgumentError, match=f"topk_cases: k must be (between 1 and 4096, got {k}|an integer, got {type(k).__name__})"):
        check_topk(never, k=k, raises=False)
    with pytest.raises(ArgumentError):
        topk_cases(k=k)


@pytest.mark.parametrize("k", [1, 4096])
def test_every_k_of_the_contract_is_taken(k: int) -> None:
    assert not check_topk(dsv4_ops.topk, k=k).failed


# Workspaces with a fault


class OneBufferForAll(WorkspaceManager):
    def get(self, *specs: Any, lane: int = -1, ubatch: int = -1, op: str = "") -> tuple[torch.Tensor, ...]:
        super()._slot(lane, ubatch)
        return super().get(*specs, lane=0, ubatch=0, op=op)


class EveryViewAtTheStart(WorkspaceManager):
    def get(self, *specs: Any, lane: int = -1, ubatch: int = -1, op: str = "") -> tuple[torch.Tensor, ...]:
        return tuple(super(EveryViewAtTheStart, self).get(spec, lane=lane, ubatch=ubatch, op=op)[0] for spec in specs)


class NeverLocked(WorkspaceManager):
    def lock(self, owner: object | None = None) -> None:
        pass


class NewEveryTime(WorkspaceManager):
    def get(self, *specs: Any, lane: int = -1, ubatch: int = -1, op: str = "") -> tuple[torch.Tensor, ...]:
        super().get(*specs, lane=lane, ubatch=ubatch, op=op)
        self.kept = [*getattr(self, "kept", []), *(torch.empty(shape, dtype=dtype) for shape, dtype in specs)]
        return tuple(self.kept[-len(specs) :])


class ForgetsGraphs(WorkspaceManager):
    @contextlib.contextmanager
    def capture(self, graph: object) -> Iterator[Any]:
        yield None


class NamelessErrors(WorkspaceManager):
    def get(self, *specs: Any, lane: int = -1, ubatch: int = -1, op: str = "") -> tuple[torch.Tensor, ...]:
        try:
            return super().get(*specs, lane=lane, ubatch=ubatch, op=op)
        except Exception:
            raise RuntimeError("workspace too small") from None


class OnlyTheUsedUbatch(WorkspaceManager):
    def _even_out(self) -> None:
        pass


@pytest.mark.parametrize(
    ("manager", "shows"),
    [
        (OneBufferForAll, "lanes and ubatches share no bytes"),
        (EveryViewAtTheStart, "views asked for together do not overlap"),
        (NeverLocked, "a locked manager refuses growth by name"),
        (NewEveryTime, "a smaller request keeps the address"),
        (ForgetsGraphs, "growth inside a capture is refused"),
        (ForgetsGraphs, "scratch of a captured graph outlives growth"),
        (NamelessErrors, "a locked manager refuses growth by name"),
        (OnlyTheUsedUbatch, "a lock covers the ubatch that warm up did not use"),
    ],
)
def test_a_workspace_fault_fails_in_its_case(manager: type[WorkspaceManager], shows: str) -> None:
    def make() -> WorkspaceManager:
        return manager("cpu", num_lanes=2, num_ubatches=2)

    report = check_workspace(make, raises=False)
    assert shows in report.failed and report.passed
    error = report.failed[shows]
    assert error.reproduction in str(error) and repr(shows) in str(error)
    with pytest.raises(Exception):  # noqa: B017 - what a manager raises is its own
        exec(error.reproduction, {"make": make})
    with pytest.raises(ConformanceError, match=f"workspace: .* cases fail: .*{shows}"):
        check_workspace(make)


class Raises(WorkspaceManager):
    def get(self, *specs: Any, lane: int = -1, ubatch: int = -1, op: str = "") -> tuple[torch.Tensor, ...]:
        assert not specs
        return ()


def test_an_exception_of_a_manager_is_shown_with_its_line() -> None:
    report = check_workspace(lambda: Raises("cpu", num_lanes=2, num_ubatches=2), raises=False)  # type: ignore[abstract, unused-ignore]
    error = report.failed["views asked for together do not overlap"]
    assert ", in get\n    assert not specs\n" in str(error) and _last_line(error.__cause__) == "get"
    assert report.passed == ["lanes that do not exist are refused"], "what a thread of a case raises counts too"
    wrong = check_workspace(lambda: NewEveryTime("cpu", num_lanes=2, num_ubatches=2), raises=False).failed["a smaller request keeps the address"]
    assert "File" not in str(wrong).split("To repeat it")[0], "the assertion is the case's own"


def test_check_workspace_wants_a_function_that_makes_managers() -> None:
    with pytest.raises(TypeError, match="a function that gives a new manager"):
        check_workspace(WorkspaceManager("cpu"))  # type: ignore[arg-type]
    report = check_workspace(lambda: WorkspaceManager("cpu", num_lanes=2, num_ubatches=2), captures=False)
    assert len(report.left_out) == 2 and set(report.left_out.values()) == {"captures"}


# Replay


def _inputs(device: str) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 64, generator=generator).to(device), torch.tensor(lens, dtype=i32, device=device)) for lens in ([64, 3, 0, 20], [1, 64, 33, -5], [9, 9, 9, 64])]


def test_our_topk_replays(device: str) -> None:
    assert_graph_replay(lambda logits, lengths: dsv4_ops.topk(logits, lengths, 8), _inputs(device), expected=lambda logits, lengths: testing.reference("topk")(logits, lengths, 8))


@pytest.mark.parametrize("op", ["topk", "build_mixed_sparse_indices", "prepare_dflash_inputs", "kv_cache_insert", "sparse_mla_decode"])
def test_our_ops_replay_on_their_samples(op: str, device: str) -> None:
    function = next(o for o in testing.ops() if o.name == op)
    for several in zip(*(testing.samples(op, device, seed) for seed in range(3)), strict=True):
        if all(isinstance(a, torch.Tensor) or a == b for a, b in zip(testing.leaves(several[0]), testing.leaves(several[1]), strict=True)):
            assert_graph_replay(function, several)


def right(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _scratch(manager: WorkspaceManager, lane: int, shape: tuple[int, ...]) -> torch.Tensor:
    return manager.get((shape, torch.float32), lane=lane)[0]


def _stale(manager: WorkspaceManager) -> Callable[[torch.Tensor], torch.Tensor]:
    """The first call computes, later ones (the capture) use what it kept."""
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        if tuple(x.shape) not in kept:
            kept[tuple(x.shape)] = x * 2
        return kept[tuple(x.shape)] + 1

    return fn


def _assumes_zeros(manager: WorkspaceManager) -> Callable[[torch.Tensor], torch.Tensor]:
    _scratch(manager, 0, (4, 5)).zero_()
    return lambda x: _scratch(manager, 0, tuple(x.shape)).clone() + x * 2 + 1


def _accumulates(manager: WorkspaceManager) -> Callable[[torch.Tensor], torch.Tensor]:
    """A reset that is decided on the host, from what the first call saw."""
    done = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        total = _scratch(manager, 0, tuple(x.shape))
        if not done:
            total.zero_()
            done.append(True)
        return total.add_(x * 2 + 1).clone()

    return fn


def _other_lane(manager: WorkspaceManager) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = _scratch(manager, 0, tuple(x.shape))
        return torch.mul(x, 2, out=a) + 1

    _scratch(manager, 1, (4, 5))
    return fn


def _reads_host(manager: WorkspaceManager) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * 2 + int(x.shape[0] > 0 and float(x.abs().sum()) >= 0)


@pytest.mark.parametrize(
    ("build", "lane", "message"),
    [
        (_stale, None, "replay of a graph captured with"),
        (_assumes_zeros, None, "replay of a graph captured with"),
        (_accumulates, None, "replay of a graph captured with"),
        (_other_lane, 1, "bytes of the scratch of lane 0, ubatch 0 were written, though the function's lane is 1"),
        (_reads_host, None, "cannot be captured: operation not permitted"),
    ],
)
def test_a_function_with_a_fault_fails_on_replay(build: Callable[[WorkspaceManager], Callable[[torch.Tensor], torch.Tensor]], lane: int | None, message: str) -> None:
    manager = WorkspaceManager("cpu", num_lanes=2)
    sets = [(torch.full((4, 5), float(i)),) for i in range(3)]
    with pytest.raises(AssertionError, match=message):
        assert_graph_replay(build(manager), sets, expected=right, lane=lane, manager=manager)
    assert_graph_replay(right, sets, expected=right, manager=manager)


def test_scratch_used_as_it_should_be_replays() -> None:
    manager = WorkspaceManager("cpu", num_lanes=2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2, out=_scratch(manager, 1, tuple(x.shape))) + 1

    fn(torch.zeros(4, 5))
    for lane in (None, 1):
        assert_graph_replay(fn, [(torch.full((4, 5), float(i)),) for i in range(3)], expected=right, lane=lane, manager=manager)


def test_an_op_that_is_called_again_asks_in_the_lane_that_it_was_recorded_in() -> None:
    manager = WorkspaceManager("cpu", num_lanes=2)

    @torch.library.custom_op("dsv4_replay_toys::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2, out=manager.get((x.shape, torch.float32))[0]).clone()

    def in_lane(lane: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def fn(x: torch.Tensor) -> torch.Tensor:
            with use_workspace_lane(lane):
                return torch.ops.dsv4_replay_toys.twice(x) + 1  # type: ignore[no-any-return]

        return fn

    for lane in (0, 1):
        in_lane(lane)(torch.zeros(4, 5))
    sets = [(torch.full((4, 5), float(i)),) for i in range(3)]
    for lane in (0, 1):
        assert_graph_replay(in_lane(lane), sets, expected=right, lane=lane, manager=manager)
        with pytest.raises(AssertionError, match=f"scratch of lane {1 - lane}, ubatch 0 were written"):
            assert_graph_replay(in_lane(1 - lane), sets, expected=right, lane=lane, manager=manager)


def test_a_function_that_changes_its_arguments_is_compared_in_them() -> None:
    sets = [(torch.full((4,), float(i)), torch.zeros(4)) for i in range(2)]
    assert_graph_replay(lambda x, out: out.copy_(x).mul_(2), sets)
    with pytest.raises(AssertionError, match=r"\(arguments\)"):
        assert_graph_replay(lambda x, out: out.copy_(x).mul_(2).sum(), sets, expected=lambda x, out: (x * 2).sum())


def test_inputs_of_a_replay_are_checked() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="at least two sets"):
        assert_graph_replay(right, [(x,)])
    with pytest.raises(ValueError, match=r"inputs\[1\] must differ from inputs\[0\] in the values of its tensors only"):
        assert_graph_replay(right, [(x,), (torch.zeros(4),)])
    with pytest.raises(ValueError, match="must differ"):
        assert_graph_replay(lambda x, n: x, [(x, 1), (x, 2)])


# Literals


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0.1, -0.0, float("nan"), float("inf"), 1e-45, 3.4028235e38]),
        torch.tensor([1.1, 300.0], dtype=torch.bfloat16),
        torch.tensor([[1, 2**63 - 1], [-(2**63), 0]]),
        torch.arange(100).view(10, 10)[2:7, 1::3],
        torch.arange(12).view(3, 4).t(),
        torch.tensor([True, False]),
        torch.tensor(5, dtype=torch.int32),
        torch.zeros(0, 3),
        torch.full((3, 9), -1, dtype=torch.int32),
        torch.tensor([*range(3, 40), *[7] * 20, 1]),
    ],
)
def test_a_literal_gives_the_tensor_back(tensor: torch.Tensor) -> None:
    from dsv4_ops.testing.cases import literal

    back = eval(literal(tensor), {"torch": torch, "inf": math.inf, "nan": math.nan})
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and back.storage_offset() == tensor.storage_offset()
    assert back.stride() == tensor.stride() or tensor.numel() == 0
    torch.testing.assert_close(back, tensor, rtol=0, atol=0, equal_nan=True)
    if tensor.is_floating_point():
        assert torch.equal(back.signbit(), tensor.signbit())
