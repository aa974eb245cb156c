"""Cases of mixed sparse index rows (window and compressed entries): the op's samples, and small batches worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .basics import check_function, check_options, samples
from .cases import EXACT, Case, Report, from_sample, from_source, kept, run_cases

__all__ = ["assert_index_rows", "check_mixed_indices", "mixed_indices_cases"]

OP = "build_mixed_sparse_indices"
# Two decode rows and two prefill rows of two requests. The window (4) is narrower than its storage (8).
BASE = """
def i32(values): return torch.tensor(values, dtype=torch.int32, device=device)
decode_swa_indices = i32([[20, 21, 22, 23, -1, -1, -1, -1], [12, 13, 14, -1, -1, -1, -1, -1]])
decode_swa_lens = i32([4, 3])
decode_topk_indices = i32([[0, 2, 5], [1, 4, -1]])
prefill_topk_indices = i32([[0, -1, -1], [3, 0, 4]])
positions = torch.tensor([3, 2, 2, 9], device=device)
token_to_req_indices = i32([0, 1, 1, 0])
is_valid_token = torch.tensor([True, True, True, True], device=device)
block_table = i32([[5, 2, 7], [3, 6, 4]])
compressed_block_table = i32([[1, 2, 3], [4, 5, 6]])
"""
SIZES = {"block_size": 4, "compressed_block_size": 2, "window": 4, "compress_ratio": 2}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "C02 storage wider than the window": ("", {}),
    "C02 a position far behind the window": (
        "decode_swa_indices, decode_swa_lens, decode_topk_indices = decode_swa_indices[:0], decode_swa_lens[:0], decode_topk_indices[:0]\n"
        "decode_swa_indices = torch.empty((0, 256), dtype=torch.int32, device=device)\n"
        "prefill_topk_indices, positions, token_to_req_indices, is_valid_token = i32([[0, 1, 2]]), torch.tensor([300], device=device), i32([0]), is_valid_token[:1]\n"
        "block_table, compressed_block_table = i32([[5, 9, 20, 7, 11]]), i32([[1, 2, 3]])",
        {"block_size": 64, "window": 128, "compressed_block_size": 64},
    ),
    "block rows run past the window": ("decode_swa_indices, decode_swa_lens = i32([[20, 21, 22, 23, 28, 29, -1, -1], [12, 13, 14, 15, 24, -1, -1, -1]]), i32([6, 5])", {}),
    "block rows fill the storage": ("decode_swa_indices, decode_swa_lens = torch.arange(8, 24, dtype=torch.int32, device=device).view(2, 8), i32([8, 8])", {}),
    "C03 a row of 16-byte steps": ("decode_topk_indices, prefill_topk_indices = decode_topk_indices[:, :2].contiguous(), prefill_topk_indices[:, :2].contiguous()", {}),
    "padding tokens with request ids of others": ("is_valid_token = torch.tensor([True, False, False, True], device=device)\ntoken_to_req_indices = i32([0, 1, 1, 0])", {}),
    "padding tokens with any request id": ("is_valid_token = torch.tensor([False, True, True, False], device=device)\ntoken_to_req_indices = i32([2**31 - 1, 1, 1, -7])", {}),
    "null block inside a prefill window": ("block_table = i32([[5, 0, 7], [3, 6, 4]])", {}),
    "null block of records": ("compressed_block_table = i32([[1, 0, 3], [4, 5, 6]])", {}),
    "C15 record past the table": ("decode_topk_indices = i32([[0, 6, 5], [1, 99, 4]])\nprefill_topk_indices = i32([[7, 0, -1], [3, 0, 6]])", {}),
    "holes among the records": ("decode_topk_indices = i32([[0, -1, 5], [-1, -1, -1]])", {}),
    "every record that a prefill sees": ("prefill_topk_indices = None", {}),
    "decode entries are slots": ("decode_topk_indices = i32([[8, 3, 11], [9, -1, 2]])\ndecode_topk_lens = i32([2, 3])", {"decode_indices_are_global": True}),
    "decode entries are records, with lengths": ("decode_topk_lens = i32([1, 3])", {}),
    "packed pages": ("", {"block_span": 5, "compressed_block_span": 3}),
    "a layer without records": ("decode_topk_indices, prefill_topk_indices = decode_topk_indices[:, :0], prefill_topk_indices[:, :0]", {}),
    "a length past the storage": ("decode_swa_lens = i32([2**31 - 1, -1])", {}),
    "blocks past 2**24": ("compressed_block_table = compressed_block_table + 2**29\nblock_table = block_table + 2**28", {}),
}
_ALONE = "prefill_topk_indices, positions, token_to_req_indices, is_valid_token = prefill_topk_indices[:0], positions[:2], token_to_req_indices[:2], is_valid_token[:2]\n"
SOURCES |= {
    "decode rows alone": (_ALONE, {}),
    "block rows alone run past the window": (_ALONE + SOURCES["block rows run past the window"][0], {}),
    "block rows alone, short histories": (_ALONE + "decode_swa_indices, decode_swa_lens = i32([[20, 21, 22, 23, 28, -1, -1, -1], [12, -1, -1, -1, -1, -1, -1, -1]]), i32([5, 1])", {}),
    "block rows alone, a padding token": (_ALONE + "is_valid_token = torch.tensor([True, False], device=device)", {}),
}
# Each again where the window is as wide as its storage: then a causal row has no column between its window and its records.
SOURCES |= {f"{label}; window as wide as its storage": (more, {**sizes, "window": 8}) for label, (more, sizes) in SOURCES.items() if "window" not in sizes}


def _rows(case: Case) -> Any:
    return case.inputs


def _mapped(case: Case) -> bool:
    """Every page that a valid token may name is mapped."""
    return bool((_rows(case)["block_table"] > 0).all() and (_rows(case)["compressed_block_table"] > 0).all())


def _in_range(case: Case) -> bool:
    a = _rows(case)
    valid, requests = a["is_valid_token"], a["block_table"].shape[0]
    ids, (decodes, width) = a["token_to_req_indices"][valid], a["decode_swa_indices"].shape
    tokens, records = a["block_table"].shape[1] * a["block_size"], a["compressed_block_table"].shape[1] * a["compressed_block_size"]
    positions = a["positions"][decodes:][valid[decodes:]]
    fine = ((ids >= 0) & (ids < requests)).all() and ((a["decode_swa_lens"] >= 0) & (a["decode_swa_lens"] <= width)).all() and ((positions >= 0) & (positions < tokens)).all()
    for entries in (None if a.get("decode_indices_are_global") else a["decode_topk_indices"], a["prefill_topk_indices"]):
        fine = fine and (entries is None or bool((entries < records).all()))
    lens = a.get("decode_topk_lens")
    return bool(fine) and (lens is None or bool(((lens >= 0) & (lens <= a["decode_topk_indices"].shape[1])).all()))


def _no_holes(case: Case) -> bool:
    """No -1 before the length of any expected row, but for the columns between a short history and the window's width."""
    for entries in (case.inputs["decode_topk_indices"], case.inputs["prefill_topk_indices"]):
        if entries is not None and entries.shape[1] > 1 and bool(((entries[:, :-1] < 0) & (entries[:, 1:] >= 0)).any()):
            return False
    return _mapped(case) and _in_range(case)


def assert_index_rows(got: Any, expected: Any, *, beyond_length: str = "-1", width: str = "exact") -> None:
    """``(indices, lens)`` as expected; ``beyond_length="any"`` compares the columns of each row's length only, ``width="any"`` allows wider storage."""
    check_options("assert_index_rows", beyond_length=(beyond_length, "-1"), width=(width, "exact"))
    assert isinstance(got, tuple | list) and len(got) == 2, "expected two outputs: (indices, lens)"
    (indices, lens), (right, right_lens) = got, expected
    torch.testing.assert_close(lens, right_lens, rtol=0, atol=0)
    assert indices.dtype == right.dtype and indices.dim() == 2 and indices.shape[0] == right.shape[0], f"{indices.dtype} {list(indices.shape)}, expected {right.dtype} {list(right.shape)}"
    fits = indices.shape[1] == right.shape[1] if width == "exact" else indices.shape[1] >= int(right_lens.max() if right_lens.numel() else 0)
    assert fits, f"rows of {indices.shape[1]} columns, expected {right.shape[1]}"
    columns = max(indices.shape[1], right.shape[1])
    mine, wanted = (torch.nn.functional.pad(t, (0, columns - t.shape[1]), value=-1) for t in (indices, right))
    if beyond_length == "any":
        inside = torch.arange(columns, device=indices.device) < lens[:, None]
        mine, wanted = mine.masked_fill(~inside, -1), wanted.masked_fill(~inside, -1)
    torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


def _select(
    device: torch.device | str, seed: int, *, beyond_length: str = "-1", width: str = "exact", mapped: bool = False, in_range: bool = False, holes: bool = True, accepts: Callable[[Case], bool] | None = None
) -> tuple[list[Case], dict[str, str]]:
    check_options("mixed_indices_cases", beyond_length=(beyond_length, "-1"), width=(width, "exact"))
    relaxed = {name: value for name, value, strict in (("beyond_length", beyond_length, "-1"), ("width", width, "exact")) if value != strict}
    comparison = f"testing.assert_index_rows(got, expected, {', '.join(f'{n}={v!r}' for n, v in relaxed.items())})" if relaxed else EXACT
    cases = [from_sample(OP, i, sample, device, seed, comparison) for i, sample in enumerate(samples(OP, device, seed))]
    cases += [from_source(OP, label, BASE + more, device, comparison, keywords=("decode_topk_lens",), **(SIZES | sizes)) for label, (more, sizes) in SOURCES.items()]
    return kept(cases, {"mapped": _mapped if mapped else None, "in_range": _in_range if in_range else None, "holes": None if holes else _no_holes, "accepts": accepts})


def mixed_indices_cases(device: torch.device | str = "cpu", seed: int = 0, **relaxations: Any) -> list[Case]:
    """Cases for a function called as ``dsv4_ops.build_mixed_sparse_indices``, which returns ``(indices, lens)``.

    The default is that op's contract. What a kernel promises less of: ``beyond_length="any"`` (columns from a row's length on hold
    anything), ``width="any"`` (wider storage); cases are left out by ``mapped=True`` (only full block tables), ``in_range=True`` (no
    lengths, positions, request ids or records out of range), ``holes=False`` (no -1 among the entries of a row), and ``accepts(case)``.
    """
    return _select(device, seed, **relaxations)[0]


def check_mixed_indices(fn: Callable[..., Any], device: torch.device | str = "cpu", seed: int = 0, *, raises: bool = True, **relaxations: Any) -> Report:
    """Run ``mixed_indices_cases`` against ``fn``: ConformanceError with the failing cases (or, ``raises=False``, a report of them). ArgumentDtypeError for a ``fn`` that cannot be called."""
    check_function("check_mixed_indices", "fn", fn, "a function that is called as dsv4_ops.build_mixed_sparse_indices is")
    cases, left_out = _select(device, seed, **relaxations)
    report = run_cases(fn, cases, left_out=left_out)
    if raises:
        report.raise_for_failures()
    return report
