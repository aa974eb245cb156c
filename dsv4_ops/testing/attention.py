"""Cases of sparse MLA decode: the op's samples, and rows whose answer can be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .basics import TOLERANCES, check_function, outputs, samples
from .cases import Case, Report, from_sample, from_source, kept, run_cases

__all__ = ["assert_attention", "check_sparse_decode", "sparse_decode_cases"]

OP = "sparse_mla_decode"
# Every row of slot s holds s: with a query of zeros the answer is the mean of the slots that are keys.
BASE = """
def i32(values): return torch.tensor(values, dtype=torch.int32, device=device)
q = torch.zeros(2, 2, 512, device=device)
swa_cache = torch.arange(24.0, device=device).view(6, 4, 1).repeat(1, 1, 512)
swa_indices = i32([[4, 5, 6, 7, -1, -1], [9, 8, 20, -1, -1, -1]])
swa_lens = i32([4, 3])
"""
_EXTRA = "extra_cache = 100 * torch.arange(12.0, device=device).view(6, 2, 1).repeat(1, 1, 512)\nextra_indices, extra_lens = i32([[3, 2, -1, -1], [5, -1, -1, -1]]), i32([2, 1])\n"
SOURCES: dict[str, str] = {
    "C09 the width is not the length": "",
    "C09 padding that names a real slot": "swa_indices = i32([[4, 5, 6, 7, 23, 23], [9, 8, 20, 23, 23, 23]])",
    "window and records": _EXTRA,
    "records alone": _EXTRA + "swa_lens = i32([0, 0])",
    "C08 -1 inside a row": "swa_indices, swa_lens = i32([[-1, 4, -1, -1, 7, -1], [-1, -1, -1, 9, -1, -1]]), i32([6, 4])",
    "C08 NaN where no key is": (
        "rows = torch.full((1 + 24, 512), nan, device=device)\nrows[5] = 4.0\nswa_cache = rows[1:].view(6, 4, 512)\nswa_indices, swa_lens = i32([[-1, 4, -1, 9, 9, 9], [-1, -1, -1, 9, 9, 9]]), i32([3, 3])"
    ),
    "no key at all": "swa_indices, swa_lens = i32([[-1] * 6, [4, 5, 6, 7, 8, 9]]), i32([6, 0])",
    "no key at all, with a sink": "swa_indices, swa_lens = i32([[-1] * 6, [4, 5, 6, 7, 8, 9]]), i32([6, 0])\nextra_cache = extra_indices = extra_lens = None\nattn_sink = torch.tensor([0.5, -2.0], device=device)",
    "a sink joins the denominator only": "extra_cache = extra_indices = extra_lens = None\nattn_sink = torch.tensor([0.5, -2.0], device=device)",
    "a key listed twice counts twice": "swa_indices, swa_lens = i32([[4, 4, 4, 8, -1, -1], [9, 9, -1, -1, -1, -1]]), i32([4, 2])",
    "slots past the cache": "swa_indices, swa_lens = i32([[4, 24, 2**31 - 1, 6, -1, -1], [9, 25, -(2**31), 10, -1, -1]]), i32([4, 4])",
    "lengths out of range": "swa_lens = i32([2**31 - 1, -1])",
    "slot 0 is a slot": "swa_indices = i32([[0, 1, 2, 3, -1, -1], [0, 8, 20, -1, -1, -1]])",
    "keys that differ, large logits": "q = 30 * torch.sin(torch.arange(2048.0, device=device)).view(2, 2, 512)\nswa_cache = torch.sin(0.37 * torch.arange(24 * 512.0, device=device)).view(6, 4, 512)",
    "pages with a padded stride": "pages = torch.full((6, 5, 512), nan, device=device)\npages[:, :4] = swa_cache\nswa_cache = pages[:, :4]",
    "bfloat16 query and cache": "q, swa_cache = torch.cos(torch.arange(2048.0, device=device)).view(2, 2, 512).bfloat16(), swa_cache.bfloat16() / 8",
    "fp8 pages": (
        "from dsv4_ops import kv_cache_insert\nfrom dsv4_ops.kv_cache import new_kv_cache\nrows = swa_cache.view(24, 512)\nswa_cache = new_kv_cache(6, 4, device=device)\n"
        "kv_cache_insert(rows, swa_cache, torch.arange(24, device=device))\nq = torch.cos(torch.arange(2048.0, device=device)).view(2, 2, 512)"
    ),
}


def _segments(case: Case) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    a = case.inputs
    return [tuple(a[f"{name}_{part}"] for part in ("cache", "indices", "lens")) for name in ("swa", "extra") if a.get(f"{name}_cache") is not None]  # type: ignore[misc]


def _listed(indices: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    return torch.arange(indices.shape[1], device=indices.device) < lens[:, None]


def _in_range(case: Case) -> bool:
    for cache, indices, lens in _segments(case):
        if not bool(((lens >= 0) & (lens <= indices.shape[1])).all()):
            return False
        entries = indices[_listed(indices, lens)]
        if not bool(((entries >= -1) & (entries < cache.shape[0] * cache.shape[1])).all()):
            return False
    return True


def _no_holes(case: Case) -> bool:
    return all(bool((indices[_listed(indices, lens)] >= 0).all()) for _, indices, lens in _segments(case))


def _some_key(case: Case) -> bool:
    rows = [((indices >= 0) & _listed(indices, lens)).any(1) for _, indices, lens in _segments(case)]
    return bool(torch.stack(rows).any(0).all()) if rows else True


def assert_attention(got: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, lse: bool = True) -> None:
    """``(out, lse)`` within tolerances (default: of the query's dtype); ``lse=False`` compares the output alone, which may then be all there is."""
    found, right = outputs(got), outputs(expected)
    default = TOLERANCES[right[0].dtype]
    bounds: dict[str, Any] = {"rtol": default[0] if rtol is None else rtol, "atol": default[1] if atol is None else atol}
    assert len(found) == 2 or not lse, f"{len(found)} outputs, expected (out, lse)"
    torch.testing.assert_close(found[0], right[0], **bounds, msg=lambda m: f"out: {m}")
    if lse:
        torch.testing.assert_close(found[1], right[1], **bounds, msg=lambda m: f"lse: {m}")


def _select(
    device: torch.device | str,
    seed: int,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    lse: bool = True,
    in_range: bool = False,
    holes: bool = True,
    empty_rows: bool = True,
    accepts: Callable[[Case], bool] | None = None,
) -> tuple[list[Case], dict[str, str]]:
    relaxed = {name: value for name, value in (("rtol", rtol), ("atol", atol), ("lse", None if lse else False)) if value is not None}
    comparison = f"testing.assert_attention({', '.join(['got', 'expected', *(f'{n}={v!r}' for n, v in relaxed.items())])})"
    cases = [from_sample(OP, i, sample, device, seed, comparison) for i, sample in enumerate(samples(OP, device, seed))]
    cases += [from_source(OP, label, BASE + more, device, comparison, scale=512**-0.5) for label, more in SOURCES.items()]
    return kept(
        cases, {"in_range": _in_range if in_range else None, "holes": None if holes else _no_holes, "empty_rows": None if empty_rows else _some_key, "accepts": accepts}
    )


def sparse_decode_cases(device: torch.device | str = "cpu", seed: int = 0, **relaxations: Any) -> list[Case]:
    """Cases for a function called as ``dsv4_ops.sparse_mla_decode``, which returns ``(out, lse)``.

    The default is that op's contract. What a kernel promises less of: ``rtol`` and ``atol`` (default: of the query's dtype), ``lse=False``
    (it returns the output alone); cases are left out by ``in_range=True`` (no lengths or slots out of range), ``holes=False`` (no -1
    before a length), ``empty_rows=False`` (every row has a key), and ``accepts(case)``.
    """
    return _select(device, seed, **relaxations)[0]


def check_sparse_decode(fn: Callable[..., Any], device: torch.device | str = "cpu", seed: int = 0, *, raises: bool = True, **relaxations: Any) -> Report:
    """Run ``sparse_decode_cases`` against ``fn``: ConformanceError with the failing cases (or, ``raises=False``, a report of them). ArgumentDtypeError for a ``fn`` that cannot be called."""
    check_function("check_sparse_decode", "fn", fn, "a function that is called as dsv4_ops.sparse_mla_decode is")
    cases, left_out = _select(device, seed, **relaxations)
    report = run_cases(fn, cases, left_out=left_out)
    if raises:
        report.raise_for_failures()
    return report
