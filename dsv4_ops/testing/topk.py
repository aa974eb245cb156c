"""Cases of row-wise top-k: the op's samples, and faults that kernels of this kind have had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _checks
from ..topk import MAX_K
from .basics import check_function, check_options, samples
from .cases import EXACT, Case, Report, from_sample, from_source, kept, run_cases

__all__ = ["check_topk", "topk_cases"]

_LENS = "torch.tensor({}, dtype=torch.int32, device=device)"
SOURCES: dict[str, str] = {
    "A01 negative length beside long rows": f"logits = torch.arange(16384.0, device=device).repeat(8, 1)\nlengths = {_LENS.format('[99, 100, 4999, 5000, 8999, 9000, -1, 0]')}\nk = 512",
    "A03 short rows between long rows": (
        "logits = torch.randn(8, 65536, generator=torch.Generator().manual_seed(3)).to(device)\n"
        f"lengths = {_LENS.format('[40000, 100, 65536, 30000, 40000, 0, 65536, 33000]')}\nk = 1024"
    ),
    "A07 scores of one coarse bin, 8000": f"logits = (1 + torch.arange(8000, device=device) * 2.0**-23)[None]\nlengths = {_LENS.format('[8000]')}\nk = 512",
    "A07 scores of one coarse bin, 32000": f"logits = (1 + torch.arange(32000, device=device) * 2.0**-23)[None]\nlengths = {_LENS.format('[32000]')}\nk = 512",
    "A07 scores of one coarse bin, 200000": f"logits = (0.5 + torch.arange(200000, device=device) * 2.0**-24)[None]\nlengths = {_LENS.format('[200000]')}\nk = 512",
    "A09 NaN everywhere but in 100 columns": (
        f"logits = torch.full((1, 4096), nan, device=device)\nlogits[0, 7:4007:40] = torch.arange(7.0, 4007.0, 40, device=device)\nlengths = {_LENS.format('[4096]')}\nk = 512"
    ),
    "NaN of negative sign": f"logits = torch.arange(2048.0, device=device).repeat(2, 1)\nlogits[:, ::3] = -nan\nlengths = {_LENS.format('[2048, 700]')}\nk = 512",
    "A11 length above the width": (
        f"buffer = torch.full((2, 1024), 1e9, device=device)\nbuffer[:, :1000] = torch.arange(1000.0, device=device)\nlogits = buffer[:, :1000]\nlengths = {_LENS.format('[5000, 2**31 - 1]')}\nk = 512"
    ),
    "A11 max_seq_len below the length": (
        f"buffer = torch.full((2, 1024), 1e9, device=device)\nbuffer[:, :1000] = torch.arange(1000.0, device=device)\nlogits = buffer[:, :1000]\nlengths = {_LENS.format('[5000, 1000]')}\nk = 512\nmax_seq_len = 700"
    ),
    "A15 misaligned short rows": (
        f"lengths = {_LENS.format('[1, 2, 3, 3, 2, 1, 0, 3]')}\ncolumns = torch.arange(1001.0, device=device)\nlogits = torch.where(columns < lengths[:, None], -columns, 1e9)\nk = 512"
    ),
    "A15 misaligned short rows, k 2": (
        f"logits = torch.full((8, 1001), 1e9, device=device)\nlogits[:, :3] = torch.tensor([0.1, 0.9, 0.5], device=device)\nlengths = {_LENS.format('[1, 2, 3, 3, 2, 1, 0, 3]')}\nk = 2"
    ),
    "A18 eight levels": f"logits = (torch.arange(4 * 16384, device=device) * 7919 % 8).float().view(4, 16384)\nlengths = {_LENS.format('[16384, 16383, 9001, 513]')}\nk = 512",
    "A18 all zeros, both signs": f"logits = torch.zeros(2, 8192, device=device)\nlogits[:, 1::2] = -0.0\nlengths = {_LENS.format('[8192, 600]')}\nk = 512",
    "A22 k above the width": f"logits = torch.arange(64.0, device=device).repeat(2, 1)\nlengths = {_LENS.format('[64, 10]')}\nk = 2048",
    "-inf is an ordinary lowest score": f"logits = torch.full((2, 1024), -inf, device=device)\nlogits[:, 40:50] = 1\nlengths = {_LENS.format('[1024, 45]')}\nk = 512",
    "as many columns as k": f"logits = torch.arange(2048.0, device=device).neg().repeat(3, 1)\nlengths = {_LENS.format('[512, 511, 513]')}\nk = 512",
}


def _in_range(case: Case) -> bool:
    logits, lengths = case.args[:2]
    return lengths.numel() == logits.shape[0] and bool(((lengths >= 0) & (lengths <= logits.shape[1])).all())


def _select(
    order: str,
    ties: str,
    nan: str,
    lengths_in_range: bool,
    max_seq_len: bool,
    k: int | None,
    dtypes: Sequence[torch.dtype] | None,
    accepts: Callable[[Case], bool] | None,
    device: torch.device | str,
    seed: int,
) -> tuple[list[Case], dict[str, str]]:
    check_options("topk_cases", order=(order, "ascending"), ties=(ties, "lowest"), nan=(nan, "never"))
    if k is not None:
        _checks.integer("topk_cases", "k", k, 1, MAX_K)
    comparison = EXACT
    relaxed = {name: value for name, value, strict in (("order", order, "ascending"), ("ties", ties, "lowest"), ("nan", nan, "never")) if value != strict}
    cases = [from_sample("topk", i, sample, device, seed) for i, sample in enumerate(samples("topk", device, seed))]
    cases += [from_source("topk", label, source, device) for label, source in SOURCES.items()]
    result = []
    for case in cases:
        args, source = case.args, case.source
        if k is not None:
            args = (*args[:2], k, *args[3:])
            source = source and f"{source.strip()}\nk = {k}"
        if relaxed:
            limit = ", max_seq_len" if len(args) > 3 else ""
            comparison = f"testing.assert_topk(got, logits, lengths, k{limit}, {', '.join(f'{n}={v!r}' for n, v in relaxed.items())})"
        result.append(Case(case.id, "topk", args, case.kwargs, source, comparison, case.device))
    rules: dict[str, Callable[[Case], bool] | None] = {
        "lengths_in_range": _in_range if lengths_in_range else None,
        "max_seq_len": None if max_seq_len else lambda case: len(case.args) < 4,
        "dtypes": None if dtypes is None else lambda case: case.args[0].dtype in dtypes,
        "accepts": accepts,
    }
    return kept(result, rules)


def topk_cases(
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    order: str = "ascending",
    ties: str = "lowest",
    nan: str = "never",
    lengths_in_range: bool = False,
    max_seq_len: bool = True,
    k: int | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    accepts: Callable[[Case], bool] | None = None,
) -> list[Case]:
    """Cases for ``fn(logits, lengths, k[, max_seq_len]) -> indices``, as ``dsv4_ops.topk``.

    The default is that op's contract. What a kernel promises less of: ``order="any"``, ``ties="any"`` and ``nan="any"`` as in
    ``assert_topk``; ``lengths_in_range=True`` leaves out cases with lengths outside ``[0, width]`` (or fewer than rows);
    ``max_seq_len=False`` those that pass it; ``k`` (1 to 4096) replaces every case's k; ``dtypes`` and ``accepts(case)`` leave out what it does not take.
    """
    return _select(order, ties, nan, lengths_in_range, max_seq_len, k, dtypes, accepts, device, seed)[0]


def check_topk(fn: Callable[..., Any], device: torch.device | str = "cpu", seed: int = 0, *, raises: bool = True, **relaxations: Any) -> Report:
    """Run ``topk_cases`` against ``fn``: ConformanceError with the failing cases (or, ``raises=False``, a report of them). ArgumentDtypeError for a ``fn`` that cannot be called."""
    check_function("check_topk", "fn", fn, "a function that is called as dsv4_ops.topk is")
    defaults: dict[str, Any] = {"order": "ascending", "ties": "lowest", "nan": "never", "lengths_in_range": False, "max_seq_len": True, "k": None, "dtypes": None, "accepts": None}
    unknown = set(relaxations) - set(defaults)
    if unknown:
        raise TypeError(f"check_topk: no option {', '.join(sorted(unknown))}; there are {', '.join(defaults)}.")
    cases, left_out = _select(**(defaults | relaxations), device=device, seed=seed)
    report = run_cases(fn, cases, left_out=left_out)
    if raises:
        report.raise_for_failures()
    return report
