"""What is wrong in the rows of a top-k result, in the words of the contract: a difference of column ids says nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .basics import check_options

__all__ = ["TopkError", "assert_topk"]

_SHOWN = 4
"""Columns of a clause, and rows of a failure, that are spelled out."""
_UNWRITTEN = torch.iinfo(torch.int32).max
"""What an int32 output that was never written holds in ``poisoned()``."""
_HINTS = {
    "order": "order='any' judges a kernel that promises no order.",
    "ties": "ties='any' judges a kernel that promises no tie rule.",
    "nan": "nan='any' judges a kernel that promises nothing for a row with NaN.",
}


class TopkError(AssertionError):
    """A top-k result is wrong in ``rows``; the text says in what."""

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rows = rows


def assert_topk(
    indices: torch.Tensor, logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, *, order: str = "ascending", ties: str = "lowest", nan: str = "never"
) -> None:
    """``indices`` is *the* answer of ``topk`` for these inputs, whichever kernel gave it; AssertionError names rows, columns and the rule they break.

    Compares no other kernel's result: it checks that each row's entries are in range, unique, ascending and padded with
    -1 at the end only, that there are as many as there can be, and that no column left out should have been in. Equal
    multisets of scores are not enough: a duplicate that replaces a tied column would pass.

    What other kernels promise less of is said by name: ``order="any"`` (a row's columns in any order, still before the
    padding), ``ties="any"`` (which of several equal scores at the boundary are taken), ``nan="any"`` (in a row that holds a
    NaN the columns need only be distinct and in range, and no more than there can be).
    """
    check_options("assert_topk", order=(order, "ascending"), ties=(ties, "lowest"), nan=(nan, "never"))
    shape = [logits.shape[0], k]
    assert isinstance(indices, torch.Tensor), f"got {type(indices).__name__}, expected an int32 tensor {shape}"
    assert indices.dtype == torch.int32 and list(indices.shape) == shape, f"{indices.dtype} {list(indices.shape)}, expected int32 {shape}"
    width = logits.shape[1]
    limit = width if max_seq_len is None else min(width, max_seq_len)
    given = lengths.flatten().tolist()
    given += [0] * (shape[0] - len(given))
    wrong: dict[int, list[tuple[str, str]]] = {}
    for i, row in enumerate(indices.cpu()):
        length = min(max(given[i], 0), limit)
        clamp = f"L = clamp({given[i]}, 0, {width if max_seq_len is None else f'min({width}, {max_seq_len})'}) = {length}"
        faults = list(_faults(row.long(), logits[i, :length].float().cpu(), width, clamp, order, ties, nan))
        if faults:
            wrong[i] = faults
    if wrong:
        # A row that only has another order says least: it comes last. Only such a row tells that order is what the kernel does not promise.
        reordered = {i for i in wrong if [rule for rule, _ in wrong[i]] == ["order"]}
        rows = sorted(wrong, key=lambda i: i in reordered)
        lines = [f"row {i}: {'; '.join(text for _, text in wrong[i])}" for i in rows[:_SHOWN]]
        lines += [f"and {len(rows) - _SHOWN} more of {shape[0]} rows"] if len(rows) > _SHOWN else []
        broken = {rule for faults in wrong.values() for rule, _ in faults if rule != "order" or reordered}
        raise TopkError("\n".join(lines + [hint for rule, hint in _HINTS.items() if rule in broken]), tuple(sorted(wrong)))


def _faults(row: torch.Tensor, scores: torch.Tensor, width: int, clamp: str, order: str, ties: str, nan: str) -> Iterator[tuple[str, str]]:
    """(option that would allow it, or nothing; text) of all that is wrong in a row; ``scores`` are those of its length."""
    length, k = len(scores), len(row)
    listed = row[row != -1]
    inside = listed[(listed >= 0) & (listed < length)]
    before = (row[: len(listed)] == -1).nonzero().flatten()
    clean = True
    for text in _misplaced(listed, length, width, clamp):
        clean = False
        yield "", text
    if len(before):
        clean = False
        yield "", f"-1 stands at place {int(before[0])}, before columns: padding comes last"

    number = ~scores.isnan()
    count = min(int(number.sum()), k)
    mine = torch.zeros(length, dtype=torch.bool)
    mine[inside] = True
    free = nan == "any" and not bool(number.all())
    if free:
        if int(mine.sum()) < count:
            clean = False
            yield "", f"lists {int(mine.sum())} columns, though {count} are numbers"
    else:
        for fault in _wrong_set(mine, scores, number, count, ties):
            clean = False
            yield fault

    falls = (inside[1:] < inside[:-1]).nonzero().flatten()
    if order == "ascending" and len(falls):
        at = int(falls[0])
        what = "the same columns in another order, not ascending" if clean and not free else "not ascending"
        yield "order", f"{what}: {int(inside[at])} stands before {int(inside[at + 1])}"


def _misplaced(listed: torch.Tensor, length: int, width: int, clamp: str) -> Iterator[str]:
    """Entries that no row of these sizes may hold, and those that it may hold once."""
    outside = listed[(listed < 0) | (listed >= width)]
    if len(outside):
        why = f"{_UNWRITTEN} marks memory that was never written" if bool((outside == _UNWRITTEN).any()) else clamp
        yield f"lists {_some(outside.unique())}, outside the columns [0, {width}): {why}"
    past = listed[(listed >= length) & (listed < width)]
    if len(past):
        yield f"lists {_some(past.unique())}, past its length: {clamp}"
    columns, times = listed[(listed >= 0) & (listed < width)].unique(return_counts=True)
    if bool((times > 1).any()):
        yield f"listed twice or more: {_some(columns[times > 1])}"


def _wrong_set(mine: torch.Tensor, scores: torch.Tensor, number: torch.Tensor, count: int, ties: str) -> Iterator[tuple[str, str]]:
    """Columns of ``mine`` that do not belong, and those that do and are not there."""
    lowest = scores.masked_fill(~number, -torch.inf).topk(count).values[-1] if count else scores.new_tensor(torch.nan)
    above, tied = number & (scores > lowest), number & (scores == lowest)
    right = above | tied & (tied.cumsum(0) <= count - int(above.sum()))

    not_numbers = (mine & ~number).nonzero().flatten()
    if len(not_numbers):
        yield "nan", f"lists {_some(not_numbers)}, which {'is' if len(not_numbers) == 1 else 'are'} NaN: NaN is never selected"
    # Columns of the boundary's score, listed for others of it, break the tie rule alone.
    later, earlier = (mine & tied & ~right).nonzero().flatten(), (right & tied & ~mine).nonzero().flatten()
    swapped = min(len(later), len(earlier))
    if swapped and ties == "lowest":
        yield "ties", f"lists {_some(later[:swapped])} in place of {_some(earlier[:swapped])}, of equal scores ({float(lowest) + 0.0:.9g}): ties go to the lowest column"
    extra = torch.cat([(mine & number & (scores < lowest)).nonzero().flatten(), later[swapped:]]).sort().values
    missing = torch.cat([(above & ~mine).nonzero().flatten(), earlier[swapped:]]).sort().values
    if len(extra):
        out, listed = int(missing[0]), int(extra[0])
        yield "", f"leaves out {_some(missing)} and lists {_some(extra)}, though {out} scores {float(scores[out]) + 0.0:.9g} and {listed} only {float(scores[listed]) + 0.0:.9g}"
    elif len(missing):
        low = ", and -inf is an ordinary lowest score" if bool((scores[missing] == -torch.inf).all()) else ""
        yield "", f"leaves out {_some(missing)}: the row holds min(|C|, k) = {count}{low}"


def _some(columns: torch.Tensor) -> str:
    more = len(columns) - _SHOWN
    return ", ".join(map(str, columns[:_SHOWN].tolist())) + (f" and {more} more" if more > 0 else "")
