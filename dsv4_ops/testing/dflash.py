"""Cases of draft inputs (DFlash and DSpark): the op's samples, and small steps worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dflash import DFlashInputs
from .basics import check_function, check_options, outputs, samples
from .cases import Case, Report, from_sample, from_source, kept, run_cases

__all__ = ["assert_draft_inputs", "check_dflash_inputs", "dflash_inputs_cases"]

OP = "prepare_dflash_inputs"
# One request of two tokens at positions 28 and 29, none rejected; state row 1 of 3.
BASE = """
def i32(values): return torch.tensor(values, dtype=torch.int32, device=device)
def i64(values): return torch.tensor(values, dtype=torch.int64, device=device)
target_positions, query_start_loc, idx_mapping = i64([28, 29]), i32([0, 2]), i32([1])
num_sampled, num_rejected = i32([1]), i32([0])
last_sampled, next_prefill_tokens = i64([100, 101, 102]), i64([200, 201, 202])
temperature, seeds = torch.tensor([0.5, 1.0, 0.0], device=device), i64([7, 2**40, 9])
block_tables, block_sizes = [i32([[4, 9, 6, 8]])], [16]
"""
SIZES = {"mask_token_id": 999, "num_speculative_tokens": 4, "max_reqs": 1, "max_tokens": 5, "max_model_len": 64}
_ANCHOR = {"sample_from_anchor": True, "max_tokens": 4}
_TWO = (  # positions 48, 49 of state 2; 20, 21, 22 of state 0
    "target_positions, query_start_loc, idx_mapping = i64([48, 49, 20, 21, 22]), i32([0, 2, 5]), i32([2, 0])\n"
    "num_sampled, num_rejected = i32([1, 1]), i32([0, 0])\nblock_tables = [i32([[4, 9, 6, 8], [5, 7, 3, 2]])]\n"
)
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "one request": ("", {}),
    "one request, sampled from the anchor": ("", _ANCHOR),
    "two requests, padded": (_TWO, {"max_reqs": 4, "max_tokens": 24}),
    "two requests, sampled from the anchor, padded": (_TWO, {"max_reqs": 4, "max_tokens": 24, "sample_from_anchor": True}),
    "D01 look-ahead past the allocated blocks": ("block_tables = [i32([[4, 9, 0, 0]])]", _ANCHOR),
    "D01 look-ahead past the table": ("block_tables = [i32([[4, 9]])]", _ANCHOR),
    "D02 positions past the limit": ("block_tables, target_positions = [i32([[4, 9, 6]])], i64([30, 31])", {**_ANCHOR, "max_model_len": 34}),
    "D04 a rejected suffix": ("target_positions, query_start_loc, num_rejected = i64([20, 21, 22, 23, 24, 25]), i32([0, 6]), i32([2])", _ANCHOR),
    "D04 nothing kept beside a neighbour": (_TWO + "num_rejected = i32([0, 9])", {"max_reqs": 2, "max_tokens": 10}),
    "D09 a table with a phantom row": (_TWO + "block_tables = [i32([[4, 9, 6, 8], [5, 7, 3, 2], [1, 1, 1, 1]])]", {"max_reqs": 3, "max_tokens": 15}),
    "D12 padding rows map to no request": (_TWO, {"max_reqs": 3, "max_tokens": 12, "num_speculative_tokens": 2}),
    "D15 an unfinished prefill chunk": (_TWO + "num_sampled = i32([0, 1])", {"max_reqs": 2, "max_tokens": 10}),
    "D16 a request past the draft's limit": (_TWO, {"max_reqs": 2, "max_tokens": 10, "max_model_len": 40}),
    "D17 context parallel, rank 1 of 2": ("block_sizes = [8]", {"cp_rank": 1, "cp_size": 2}),
    "a request without tokens": (_TWO + "query_start_loc = i32([0, 0, 5])", {"max_reqs": 2, "max_tokens": 10}),
    "a request of no state": (_TWO + "idx_mapping = i32([-1, 2])", {"max_reqs": 2, "max_tokens": 10}),
    "two KV groups": ("block_tables, block_sizes = [i32([[4, 9, 6, 8]]), i32([[3, 2]])], [16, 32]", {}),
    "blocks past 2**31 tokens": ("block_tables = [i32([[2**30, 2**30 + 1, 2**30 + 2, 8]])]", {}),
}


def _mapped(case: Case) -> bool:
    a = case.inputs
    last = int(a["target_positions"].max()) + 1 + a["num_speculative_tokens"] if a["target_positions"].numel() else 0
    ranks = a.get("cp_size", 1)
    return all(bool((t > 0).all()) and t.shape[1] * size * ranks > last for t, size in zip(a["block_tables"], a["block_sizes"], strict=True))


def _in_range(case: Case) -> bool:
    a = case.inputs
    starts, lens, states = a["query_start_loc"], a["query_start_loc"].diff(), a["last_sampled"].shape[0]
    inside = (
        ((a["idx_mapping"] >= 0) & (a["idx_mapping"] < states)).all()
        and (lens > 0).all()
        and ((a["num_rejected"] >= 0) & (a["num_rejected"] < lens)).all()
        and (a["num_sampled"] >= 0).all()
        and int(starts[0]) == 0
        and int(starts[-1]) == a["target_positions"].shape[0]
        and (a["target_positions"] >= 0).all()
        and ((a["last_sampled"] >= 0) & (a["last_sampled"] < 2**31)).all()
    )
    last = int(a["target_positions"].max()) + 1 + a["num_speculative_tokens"] if a["target_positions"].numel() else 0
    return bool(inside) and last < a["max_model_len"]


def assert_draft_inputs(got: Any, expected: Sequence[torch.Tensor], *, fields: Sequence[str] | None = None, inert_samples: str = "exact") -> None:
    """Draft inputs as expected, field by field. ``got`` is a tuple in the op's order, or has the fields by name.

    ``fields`` names those to compare (default: all); ``inert_samples="any"`` leaves out ``sample_indices`` and ``sample_pos`` where the
    mapping is -1 (their rows do nothing).
    """
    right = DFlashInputs(*expected)
    assert hasattr(got, "keys") or hasattr(got, "_asdict") or len(outputs(got)) == len(right), f"{len(outputs(got))} outputs, expected {len(right)}: {', '.join(right._fields)}"
    found = got if isinstance(got, dict) else got._asdict() if hasattr(got, "_asdict") else dict(zip(DFlashInputs._fields, outputs(got), strict=True))
    inert = right.sample_idx_mapping < 0
    for name in fields or DFlashInputs._fields:
        assert name in found, f"{name} is missing"
        mine, wanted = found[name], getattr(right, name)
        if inert_samples == "any" and name in ("sample_indices", "sample_pos") and mine.shape == wanted.shape:
            mine, wanted = mine.masked_fill(inert, 0), wanted.masked_fill(inert, 0)
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]


def _select(
    device: torch.device | str,
    seed: int,
    *,
    fields: Sequence[str] | None = None,
    inert_samples: str = "exact",
    mapped: bool = False,
    in_range: bool = False,
    context_parallel: bool = True,
    groups: int | None = None,
    accepts: Callable[[Case], bool] | None = None,
) -> tuple[list[Case], dict[str, str]]:
    check_options("dflash_inputs_cases", inert_samples=(inert_samples, "exact"))
    unknown = set(fields or ()) - set(DFlashInputs._fields)
    if unknown or (fields is not None and not fields):
        raise ValueError(f"dflash_inputs_cases: fields must be some of {', '.join(DFlashInputs._fields)}, got {fields!r}.")
    relaxed = ([f"fields={list(fields)!r}"] if fields is not None else []) + ([f"inert_samples={inert_samples!r}"] if inert_samples != "exact" else [])
    comparison = f"testing.assert_draft_inputs({', '.join(['got', 'expected', *relaxed])})"
    cases = [from_sample(OP, i, sample, device, seed, comparison) for i, sample in enumerate(samples(OP, device, seed))]
    cases += [from_source(OP, label, BASE + more, device, comparison, **(SIZES | sizes)) for label, (more, sizes) in SOURCES.items()]
    rules: dict[str, Callable[[Case], bool] | None] = {
        "mapped": _mapped if mapped else None,
        "in_range": _in_range if in_range else None,
        "context_parallel": None if context_parallel else lambda case: case.kwargs.get("cp_size", 1) == 1,
        "groups": None if groups is None else lambda case: len(case.inputs["block_tables"]) == groups,
        "accepts": accepts,
    }
    return kept(cases, rules)


def dflash_inputs_cases(device: torch.device | str = "cpu", seed: int = 0, **relaxations: Any) -> list[Case]:
    """Cases for a function called as ``dsv4_ops.prepare_dflash_inputs``, which returns its outputs in that order or by name.

    The default is that op's contract. What a kernel promises less of: ``fields`` (names of the outputs it has), ``inert_samples="any"``
    as in ``assert_draft_inputs``; cases are left out by ``mapped=True`` (only full block tables that reach far enough), ``in_range=True``
    (every request live, nothing past ``max_model_len``), ``context_parallel=False``, ``groups`` (only so many KV groups), ``accepts(case)``.
    """
    return _select(device, seed, **relaxations)[0]


def check_dflash_inputs(fn: Callable[..., Any], device: torch.device | str = "cpu", seed: int = 0, *, raises: bool = True, **relaxations: Any) -> Report:
    """Run ``dflash_inputs_cases`` against ``fn``: ConformanceError with the failing cases (or, ``raises=False``, a report of them). ArgumentDtypeError for a ``fn`` that cannot be called."""
    check_function("check_dflash_inputs", "fn", fn, "a function that is called as dsv4_ops.prepare_dflash_inputs is")
    cases, left_out = _select(device, seed, **relaxations)
    report = run_cases(fn, cases, left_out=left_out)
    if raises:
        report.raise_for_failures()
    return report
