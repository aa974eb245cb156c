"""What is measured: an op at a size. Where an op's own ``sized`` call is small for the sake of tests, a model's sizes stand here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import testing
from ..kv_cache import kv_cache_insert, new_kv_cache
from ..testing import Op, Sample

__all__ = ["SWEPT", "Case", "cases", "least_bytes", "outcome"]

SWEPT = ("topk", "topk_values", "topk_slots")
"""Ops with a size of their own beside rows: columns."""
ROWS = {"cpu": (1, 8, 64), "cuda": (1, 8, 64, 256, 1024)}
SWEPT_ROWS = {"cpu": (1, 8), "cuda": (1, 8, 64, 256)}
COLUMNS = {"cpu": (2048, 8192, 32768), "cuda": (2048, 8192, 32768, 131072, 262144)}
TOPK = 512
PAGE = 64
VOCABULARY = 129280
HEADS, HEAD_DIM, WINDOW, RECORDS, PAGE_STRIDE = 64, 512, 128, 512, 37440
WIDE_ROWS = {"cpu": 8, "cuda": 64}
"""The most rows of a vocabulary that are measured unasked."""


@dataclass(frozen=True)
class Case:
    """``draw(device, seed)`` is a call of ``op`` at the size that ``params`` names."""

    op: Op
    params: dict[str, Any]
    draw: Callable[[str, int], Sample]

    @property
    def size(self) -> int:
        """What the time is drawn against: columns where they are swept, else rows."""
        return int(self.params.get("columns", self.params["rows"]))


def cases(op: Op, device: str, rows: Sequence[int] = (), columns: Sequence[int] = (), k: int | None = None) -> Iterator[Case]:
    """The sizes of ``op``: those given, else the usual ones of the device type. Columns narrower than k are left out."""
    if op.name in SWEPT:
        k = TOPK if k is None else k
        for wide in columns or COLUMNS[device]:
            for count in rows or SWEPT_ROWS[device]:
                if wide >= k:
                    params = {"rows": count, "columns": wide, "k": k, "dtype": "float32"}
                    yield Case(op, params, lambda where, seed, count=count, wide=wide: _topk(op, where, seed, count, wide, k))  # type: ignore[misc]
        return
    draw: Callable[[str, int, int], Sample] = DRAWN.get(op.name, op.sized)
    largest = WIDE_ROWS[device] if op.name in ("gumbel_sample", "rejection_sample") else max(ROWS[device])
    for count in rows or (n for n in ROWS[device] if n <= largest):
        yield Case(op, {"rows": count}, lambda where, seed, count=count: draw(where, count, seed))  # type: ignore[misc]


def outcome(op: Op, sample: Sample, result: Any) -> tuple[torch.Tensor, ...]:
    """What a call gave: its outputs and the arguments that it mutates."""
    named = _named(op, sample)
    return (*testing.outputs(result), *(named[name] for name in op.mutates))


def _named(op: Op, sample: Sample) -> dict[str, Any]:
    return dict(zip((a.name for a in op.overload._schema.arguments), sample.args, strict=False)) | sample.kwargs


# Draws of a model's size.


def _topk(op: Op, device: str, seed: int, rows: int, columns: int, k: int) -> Sample:
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator, device=device)
    lengths = torch.full((rows,), columns, dtype=torch.int32, device=device)
    if op.name != "topk_slots":
        return Sample(f"full rows of {columns}", (logits, lengths, k))
    pages = -(-columns // PAGE)
    table = (torch.randperm(rows * pages, generator=generator, device=device).to(torch.int32) + 1).view(rows, pages)
    return Sample(f"full rows of {columns}, pages of {PAGE}", (logits, lengths, torch.arange(rows, dtype=torch.int32, device=device), torch.ones(rows, dtype=torch.bool, device=device), table, k, PAGE))


def _widened(name: str, places: Sequence[int], width: int, dtype: torch.dtype, what: str) -> Callable[[str, int, int], Sample]:
    """The op's own typical call with rows of another width: random numbers in the arguments at ``places``."""
    (op,) = (op for op in testing.ops() if op.name == name)

    def draw(device: str, rows: int, seed: int) -> Sample:
        small, generator = op.sized(device, rows, seed), torch.Generator(device).manual_seed(seed)
        args = list(small.args)
        for place in places:
            args[place] = torch.randn(*args[place].shape[:-1], width, generator=generator, device=device).to(dtype)
        return Sample(f"{small.label} of {width} {what}", tuple(args), small.kwargs)

    return draw


def _decode(device: str, tokens: int, seed: int) -> Sample:
    """64 heads over FP8 pages: a window of 128 tokens and 512 records, scattered over a cache several times as large."""
    generator = torch.Generator(device).manual_seed(seed)
    pages = max(64, min(2048, 4 * tokens))
    arguments: list[torch.Tensor | None] = [torch.randn(tokens, HEADS, HEAD_DIM, generator=generator, device=device).bfloat16()]
    for width in (WINDOW, RECORDS):
        cache = new_kv_cache(pages, PAGE, page_stride=PAGE_STRIDE, device=device)
        slots = torch.arange(PAGE, pages * PAGE, device=device)
        for part in slots.split(1 << 15):
            kv_cache_insert(torch.randn(len(part), HEAD_DIM, generator=generator, device=device).bfloat16(), cache, part)
        indices = torch.randint(PAGE, pages * PAGE, (tokens, width), generator=generator, device=device, dtype=torch.int32)
        arguments += [cache, indices, torch.full((tokens,), width, dtype=torch.int32, device=device)]
    arguments.append(torch.randn(HEADS, generator=generator, device=device))
    return Sample(f"{tokens} tokens, {HEADS} heads, {WINDOW} + {RECORDS} FP8 keys", tuple(arguments), {"scale": HEAD_DIM**-0.5})


DRAWN: dict[str, Callable[[str, int, int], Sample]] = {
    "gumbel_sample": _widened("gumbel_sample", (0,), VOCABULARY, torch.float32, "logits"),
    "rejection_sample": _widened("rejection_sample", (0, 2), VOCABULARY, torch.float32, "logits"),
    "swiglu": _widened("swiglu", (0,), 4096, torch.bfloat16, "bfloat16"),
    "swiglu_per_expert": _widened("swiglu_per_expert", (0,), 4096, torch.bfloat16, "bfloat16"),
    "sparse_mla_decode": _decode,
}


# Bytes.

LOOKED_UP = ("block_table", "compressed_block_table", "block_tables", "last_sampled", "next_prefill_tokens", "cache", "swa_cache", "extra_cache")
"""Arguments that a call reads single entries of."""
TOKEN_BYTES = 584


def least_bytes(op: Op, sample: Sample, outputs: Sequence[torch.Tensor]) -> int:
    """Bytes that any implementation has to move: arguments read once, outputs written once.

    Tables that entries are looked up in are left out, KV caches count by the tokens read or written: a lower bound, so GB/s is one too.
    (But rejection sampling counts the logits of every draft, also of those after a rejection.)
    """
    named = _named(op, sample)
    total = sum(_bytes(t) for name, value in named.items() if name not in LOOKED_UP for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor))
    total += sum(_bytes(t) for t in outputs[: len(outputs) - len(op.mutates)])
    if op.family == "kv_cache":
        total += TOKEN_BYTES * int(named["slots" if "slots" in named else "slot_mapping"].numel())
    if op.name == "sparse_mla_decode":
        for part in ("swa", "extra"):
            if (lens := named.get(f"{part}_lens")) is not None:
                keys = int(lens.clamp(0, named[f"{part}_indices"].shape[-1]).sum())
                cache = named[f"{part}_cache"]
                total += keys * int(cache.shape[-1]) * cache.element_size()
    if op.name == "expand_block_table":  # its rows are copied whole
        total += _bytes(outputs[0])
    return total


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
