"""Random calls of the index builders: shapes, views and values that nobody chose, static sizes from a short list.

Static sizes are compiled for, so that a list of them keeps thousands of draws to a few compilations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from dsv4_ops.testing import Sample

INT32_MAX = 2**31 - 1
EXTREMES = [0, 1, -1, INT32_MAX, -(2**31)]
EXTREMES_64 = [*EXTREMES, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]


class Draw:
    def __init__(self, number: int) -> None:
        self.random, self.generator = random.Random(number), torch.Generator().manual_seed(number)

    def size(self, largest: int) -> int:
        """From 0 on; small sizes are likelier."""
        return min(self.random.randint(0, largest), self.random.randint(0, largest))

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32, extremes: float = 0.0) -> torch.Tensor:
        values = torch.randint(low, max(high, low + 1), shape, generator=self.generator, dtype=torch.int64)
        if extremes and self.random.random() < 0.5:
            pool = torch.tensor(EXTREMES_64 if dtype == torch.int64 else EXTREMES)
            chosen = pool[torch.randint(0, len(pool), shape, generator=self.generator)]
            values = torch.where(torch.rand(shape, generator=self.generator) < extremes, chosen, values)
        return self.placed(values.to(dtype))

    def flags(self, n: int) -> torch.Tensor:
        return self.placed(torch.rand(n, generator=self.generator) < self.random.choice([0.0, 0.5, 0.8, 1.0, 1.0]))

    def table(self, requests: int, blocks: int, column_step: int = 1) -> torch.Tensor:
        high = self.random.choice([500, 500, INT32_MAX, 2**27])
        table = torch.randint(1, high, (requests, blocks), generator=self.generator)
        kind = torch.rand((requests, blocks), generator=self.generator)
        return self.placed(torch.where(kind < 0.1, 0, torch.where(kind < 0.2, -1, table)).to(torch.int32), column_step)

    def requests(self, tokens: int, requests: int) -> torch.Tensor:
        return self.integers(0, requests, tokens, extremes=0.2)

    def placed(self, value: torch.Tensor, column_step: int = 1) -> torch.Tensor:
        """The same values somewhere inside a larger buffer; columns ``column_step`` apart, rows as far as it comes."""
        steps = [self.random.choice([1, 1, 2, 3])] + [column_step] * (value.dim() - 1)
        before, after = ([self.random.randint(0, 2) for _ in range(value.dim())] for _ in range(2))
        base = torch.full([b + s * n + a for b, s, n, a in zip(before, steps, value.shape, after, strict=True)], 77, dtype=torch.int64).to(value.dtype)
        view = base[tuple(slice(b, b + s * n, s) for b, s, n in zip(before, steps, value.shape, strict=True))]
        return view.copy_(value) if value.numel() else base.new_empty(value.shape)


def global_topk(d: Draw) -> Sample:
    topk, block_size, step = d.random.choice([(8, 4, 1), (33, 64, 1), (1, 7, 2), (130, 1, 1)])
    tokens, requests, blocks = d.size(12), d.size(5), d.size(9)
    records = d.integers(-2, blocks * block_size + 3, tokens, topk, extremes=0.1)
    return Sample("", (records, d.requests(tokens, requests), d.flags(tokens), d.table(requests, blocks, step)), {"block_size": block_size})


def causal_swa(d: Draw) -> Sample:
    block_size, window, width = d.random.choice([(4, 8, 8), (64, 128, 192), (7, 20, 20), (1, 5, 9)])
    tokens, requests, blocks = d.size(12), d.size(5), d.size(9)
    positions = d.integers(-1, blocks * block_size + 3, tokens, dtype=torch.int64, extremes=0.2)
    args = (positions, d.requests(tokens, requests), d.flags(tokens), d.table(requests, blocks))
    return Sample("", args, {"block_size": block_size, "window": window, "width": width})


def draft_swa(d: Draw) -> Sample:
    block_size, window, queries, width = d.random.choice([(4, 8, 3, 11), (64, 128, 5, 192), (7, 20, 1, 30), (1, 5, 8, 13)])
    requests, blocks = d.size(7), d.size(9)
    sizes: dict[str, Any] = {"block_size": block_size, "window": window, "block_queries": queries, "width": width}
    if d.random.random() < 0.5:
        sizes["draft_start"] = d.integers(-2, blocks * block_size + 3, requests, extremes=0.2)
    sizes["max_model_len"] = d.random.choice([None, 1 + d.size(blocks * block_size), 2**40])
    return Sample("", (d.integers(-1, blocks * block_size + 3, requests, extremes=0.2), d.table(requests, blocks), d.flags(requests)), sizes)


def mixed(d: Draw) -> Sample:
    block_size, records_a_page, window, swa_width, topk, span, records_span, slots, given, local = d.random.choice(
        [
            (4, 2, 7, 12, 6, None, None, False, False, True),
            (64, 64, 128, 192, 40, 65, None, False, True, True),
            (3, 5, 5, 5, 9, None, 6, True, True, False),
            (4, 1, 8, 20, 0, 9, 3, True, False, True),
            (1, 4, 3, 6, 33, None, None, False, False, False),
        ]
    )
    decodes, prefills, requests, blocks = d.size(8), d.size(6), d.size(5), d.size(9)
    tokens, records = decodes + prefills, blocks * records_a_page + 3
    swa, swa_lens = d.integers(-1, 300, decodes, swa_width, extremes=0.05), d.integers(-1, swa_width + 2, decodes, extremes=0.1)
    prefill = d.integers(-2, records, prefills, topk, extremes=0.05) if local else None
    positions = d.integers(-1, blocks * block_size + 3, tokens, dtype=torch.int64, extremes=0.2)
    args = (swa, swa_lens, d.integers(-2, records, decodes, topk, extremes=0.05), prefill, positions, d.requests(tokens, requests), d.flags(tokens))
    sizes = {"block_size": block_size, "compressed_block_size": records_a_page, "window": window, "compress_ratio": 3, "decode_indices_are_global": slots}
    if given:
        sizes["decode_topk_lens"] = d.integers(-1, topk + 2, decodes, extremes=0.1)
    return Sample("", (*args, d.table(requests, blocks), d.table(requests, d.size(9))), {**sizes, "block_span": span, "compressed_block_span": records_span})


def csr(d: Draw) -> Sample:
    width, drop_holes = d.random.choice([(6, False), (6, True), (192, False), (192, True), (1, True)])
    rows = d.size(40)
    return Sample("", (d.integers(-2, 9, rows, width), d.integers(-2, width + 3, rows, extremes=0.1)), {"drop_holes": drop_holes})


def packed(d: Draw) -> Sample:
    block_size, span, dtype = d.random.choice([(64, 65, torch.int32), (64, 65, torch.int64), (4, 4, torch.int32), (7, 300, torch.int64)])
    shape = [d.size(9) for _ in range(d.random.randint(1, 3))]
    return Sample("", (d.integers(-2, 10**5, *shape, dtype=dtype, extremes=0.2), block_size, span))


def lens_dtype(d: Draw) -> torch.dtype:
    return d.random.choice([torch.int32, torch.int64])


def limit(d: Draw) -> dict[str, Any]:
    return {"max_seq_len": d.random.choice([None, 0, 1000, 2**40])}


def mtp_lens(d: Draw) -> Sample:
    next_n, ratio = d.random.choice([(1, 1), (4, 4), (6, 128), (3, 5)])
    return Sample("", (d.integers(-1, 5000, d.size(40), dtype=lens_dtype(d), extremes=0.2), next_n, ratio), limit(d))


def ragged_lens(d: Draw) -> Sample:
    requests, most = d.size(d.random.choice([6, 40, 300])), d.random.choice([1, 2, 9])
    starts = torch.zeros(requests + 1, dtype=torch.int64)
    starts[1:] = torch.randint(0, most, (requests,), generator=d.generator).cumsum(0)
    starts += d.random.choice([0, 0, 3, -2])
    if d.random.random() < 0.3:  # a tail of zeros, or anything
        starts[d.size(requests) :] = d.random.choice([0, -1, INT32_MAX])
    if d.random.random() < 0.1:
        starts = starts[torch.randperm(requests + 1, generator=d.generator)]
    lens = d.integers(-1, 5000, requests, dtype=lens_dtype(d), extremes=0.2)
    return Sample("", (lens, d.placed(starts.to(torch.int32)), d.size(60), d.random.choice([1, 4])), limit(d))


def expand(d: Draw) -> Sample:
    tokens, requests = d.size(12), d.size(5)
    return Sample("", (d.table(requests, d.size(300), d.random.choice([1, 1, 2])), d.requests(tokens, requests), d.flags(tokens)))


def local_lens(d: Draw) -> Sample:
    rank, size, interleave = d.random.choice([(0, 1, 1), (1, 2, 1), (2, 4, 16), (1, 3, 5)])
    shape = [d.size(30) for _ in range(d.random.randint(1, 2))]
    return Sample("", (d.integers(-2, 5000, *shape, dtype=lens_dtype(d), extremes=0.2), rank, size, interleave))


DRAWS: dict[str, Callable[[Draw], Sample]] = {
    "global_topk_indices": global_topk,
    "causal_swa_indices": causal_swa,
    "draft_swa_indices": draft_swa,
    "build_mixed_sparse_indices": mixed,
    "swa_indices_to_csr": csr,
    "packed_page_slots": packed,
    "mtp_context_lens": mtp_lens,
    "ragged_context_lens": ragged_lens,
    "expand_block_table": expand,
    "local_context_lens": local_lens,
}


def drawn(name: str, number: int) -> Sample:
    sample = DRAWS[name](Draw(number))
    return Sample(f"{name}, draw {number}", sample.args, sample.kwargs)
