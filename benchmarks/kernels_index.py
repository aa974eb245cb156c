"""Index builds: what ``benchmarks.kernels`` measures of them, and how their peers are called.

Shapes of a server that decodes blocks of 8 tokens: T tokens of T / 8 requests, pages of 64 tokens or records, k = 512. The
window's rows are 128, 192 or 256 columns wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from dsv4_ops.mixed_indices import mixed_row_width
from dsv4_ops.testing import Sample

from .kernels import Case, Prepared

TOKENS = (8, 64, 256, 1024)
MERGED_TOKENS = (8, 64)
QUERIES, PAGE, PAGES, RECORDS, TOPK, WINDOW = 8, 64, 1024, 16384, 512, 128


class Draw:
    """Inputs of T tokens on one device, from a seed."""

    def __init__(self, tokens: int, seed: int, device: str) -> None:
        self.tokens, self.reqs, self.device = tokens, max(tokens // QUERIES, 1), device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.requests = torch.arange(tokens, device=device, dtype=torch.int32) // QUERIES
        self.valid = torch.ones(tokens, dtype=torch.bool, device=device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def table(self, pages: int = PAGES) -> torch.Tensor:
        return self.integers(1, 4096, self.reqs, pages)

    def window(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a decode (the window) or, where wider, of a draft block (the window and the block)."""
        length = WINDOW if width == WINDOW else WINDOW + QUERIES
        slots = self.integers(0, 1 << 18, self.tokens, width)
        slots[:, length:] = -1
        return slots, torch.full((self.tokens,), length, dtype=torch.int32, device=self.device)


def global_topk(tokens: int, seed: int, device: str) -> Sample:
    draw = Draw(tokens, seed, device)
    return Sample("", (draw.integers(0, RECORDS, tokens, TOPK), draw.requests, draw.valid, draw.table()), {"block_size": PAGE})


def mixed(tokens: int, seed: int, device: str, width: int, decodes: bool = True, slots: bool = False) -> Sample:
    draw = Draw(tokens, seed, device)
    swa, swa_lens = draw.window(width)
    topk = draw.integers(0, RECORDS, tokens, TOPK)
    count = tokens if decodes else 0
    positions = draw.integers(4 * TOPK, PAGES * PAGE, tokens, dtype=torch.int64)
    sizes: dict[str, Any] = {"block_size": PAGE, "compressed_block_size": PAGE, "window": WINDOW, "compress_ratio": 4}
    if slots:
        sizes |= {"decode_indices_are_global": True, "decode_topk_lens": torch.full((tokens,), TOPK, dtype=torch.int32, device=device)}
    args = (swa[:count], swa_lens[:count], topk[:count], topk[count:], positions, draw.requests, draw.valid, draw.table(), draw.table())
    return Sample("", args, sizes)


def causal(tokens: int, seed: int, device: str, width: int) -> Sample:
    """Each request's tokens follow one another: its peer has no positions, but lengths."""
    draw = Draw(tokens, seed, device)
    positions = draw.integers(0, PAGES * PAGE - QUERIES, draw.reqs, 1, dtype=torch.int64) + torch.arange(QUERIES, device=device)
    return Sample("", (positions.flatten(), draw.requests, draw.valid, draw.table()), {"block_size": PAGE, "window": WINDOW, "width": width})


def draft(tokens: int, seed: int, device: str, width: int) -> Sample:
    draw = Draw(tokens, seed, device)
    sizes = {"block_size": PAGE, "window": width - 64, "block_queries": QUERIES, "width": width}
    return Sample("", (draw.integers(1, PAGES * PAGE - QUERIES, draw.reqs), draw.table(), draw.valid[: draw.reqs]), sizes)


def csr(tokens: int, seed: int, device: str, drop_holes: bool) -> Sample:
    draw = Draw(tokens, seed, device)
    return Sample("", (draw.integers(-1, 60, tokens, 192), draw.integers(1, 193, tokens)), {"drop_holes": drop_holes})


def packed(tokens: int, seed: int, device: str) -> Sample:
    return Sample("", (Draw(tokens, seed, device).integers(-1, 1 << 18, tokens, 192), PAGE, 65))


def mtp_lens(tokens: int, seed: int, device: str) -> Sample:
    draw = Draw(tokens, seed, device)
    return Sample("", (draw.integers(0, PAGES * PAGE, draw.reqs), QUERIES, 4))


def ragged_lens(tokens: int, seed: int, device: str) -> Sample:
    draw = Draw(tokens, seed, device)
    starts = torch.arange(0, tokens + 1, QUERIES, dtype=torch.int32, device=device)
    starts[1:-1] -= draw.integers(0, QUERIES, draw.reqs - 1)
    return Sample("", (draw.integers(0, PAGES * PAGE, draw.reqs), starts, tokens, 4))


def expand(tokens: int, seed: int, device: str) -> Sample:
    draw = Draw(tokens, seed, device)
    return Sample("", (draw.table(256), draw.requests, draw.valid))


def local_lens(tokens: int, seed: int, device: str) -> Sample:
    return Sample("", (Draw(tokens, seed, device).integers(0, PAGES * PAGE, tokens), 1, 4, 16))


def merge(tokens: int, seed: int, device: str, ranks: int, k: int) -> Sample:
    """What the ranks of a split context found: of each the k best of its own columns, ascending."""
    draw = Draw(tokens, seed, device)
    columns = torch.rand(tokens, ranks, 2 * k, generator=draw.generator, device=device).argsort(2)[:, :, :k].sort(2).values
    columns = columns * ranks + torch.arange(ranks, device=device)[:, None]
    values = torch.randn(tokens, ranks * k, generator=draw.generator, device=device)
    return Sample("", (values, columns.flatten(1).to(torch.int32), k))


def global_topk_peer(kernels: ModuleType, sample: Sample) -> Prepared:
    topk, requests, valid, table = sample.args
    slots, lens = torch.empty_like(topk), torch.empty_like(requests)

    def call() -> None:
        kernels.global_topk_kernel[(topk.shape[0],)](
            slots, slots.stride(0), lens, topk, topk.stride(0), topk.shape[1], requests, table, table.stride(0), sample.kwargs["block_size"], valid, TRITON_BLOCK_SIZE=1024
        )

    return call, (slots, lens)


def mixed_peer(kernels: ModuleType, sample: Sample) -> Prepared:
    """Decode rows with record numbers: the peer's kernel finds a draft block's row from the lengths of its requests."""
    swa, _, topk, _, _, requests, valid, table, compressed = sample.args
    (tokens, width), page, window = swa.shape, sample.kwargs["block_size"], sample.kwargs["window"]
    indices = torch.empty(tokens, mixed_row_width(width, topk.shape[1]), dtype=torch.int32, device=swa.device)
    lens = torch.empty(tokens, dtype=torch.int32, device=swa.device)
    starts = torch.arange(0, tokens + 1, QUERIES, dtype=torch.int32, device=swa.device)
    seq_lens = torch.full((table.shape[0],), PAGES * PAGE, dtype=torch.int32, device=swa.device)
    window_block, topk_block = (1 << (n - 1).bit_length() for n in (width, topk.shape[1]))

    def call() -> None:
        kernels.build_mixed_kernel[(tokens,)](
            indices, indices.stride(0), lens, swa, swa.stride(0), topk, topk.stride(0), requests, valid, topk, topk.shape[1], requests, requests, starts, seq_lens, requests,
            table, table.stride(0), page, page, compressed, compressed.stride(0), page, page, tokens, WINDOW_SIZE=window, SWA_INDEX_WIDTH=width, IMAGE_WIDTH=0, COMPRESS_RATIO=4,
            TOP_K=0, PADDED_TOP_K=topk.shape[1], PREFILL_TOPK_STRIDE=topk.shape[1], DECODE_COMPRESSED_TOPK=topk.shape[1], DECODE_COMPRESSED_INDICES_ARE_LOCAL=True,
            HAS_DECODE_COMPRESSED_LENS=False, WINDOW_BLOCK_SIZE=window_block, TOPK_BLOCK_SIZE=topk_block, num_warps=4 if max(window_block, topk_block) >= 256 else 1,
        )  # fmt: skip

    return call, (indices, lens)


def causal_peer(kernels: ModuleType, sample: Sample) -> Prepared:
    positions, requests, valid, table = sample.args
    window, width = sample.kwargs["window"], sample.kwargs["width"]
    seq_lens = (positions[QUERIES - 1 :: QUERIES] + 1).to(torch.int32)
    starts = torch.arange(0, len(positions) + 1, QUERIES, dtype=torch.int32, device=positions.device)
    indices, lens, none = torch.empty(len(positions), width, dtype=torch.int32, device=positions.device), torch.empty_like(requests), torch.zeros_like(starts)

    def call() -> None:
        kernels.causal_swa_kernel[(len(positions),)](
            indices, indices.stride(0), lens, window, width, lens, lens, starts, seq_lens, requests, valid, table, table.stride(0), PAGE, none, 0,
            HAS_IMAGE=False, TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip

    return call, (indices, lens)


def draft_peer(kernels: ModuleType, sample: Sample) -> Prepared:
    """A program a token: it is given the request of each."""
    committed, table, valid = sample.args
    window, width, tokens = sample.kwargs["window"], sample.kwargs["width"], len(committed) * QUERIES
    seq_lens, starts = committed + QUERIES, torch.arange(0, tokens + 1, QUERIES, dtype=torch.int32, device=table.device)
    requests, valid = torch.arange(tokens, dtype=torch.int32, device=table.device) // QUERIES, valid.repeat_interleave(QUERIES)
    indices, lens = torch.empty(tokens, width, dtype=torch.int32, device=table.device), torch.empty_like(requests)

    def call() -> None:
        kernels.dspark_swa_kernel[(tokens,)](
            indices, indices.stride(0), lens, window, width, starts, seq_lens, requests, valid, table, table.stride(0), PAGE, 0, TRITON_BLOCK_SIZE=1024
        )

    return call, (indices, lens)


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield Case("global_topk_indices", "k 512", {"tokens": tokens}, global_topk, {"compute_global_topk_indices_and_lens": global_topk_peer})
        for width in (128, 192, 256):
            yield Case("build_mixed_sparse_indices", "decode", {"tokens": tokens, "width": width}, mixed, {"build_flashinfer_mixed_sparse_indices": mixed_peer})
        yield Case("build_mixed_sparse_indices", "decode, slots with lengths", {"tokens": tokens, "width": 128, "slots": True}, mixed)
        yield Case("build_mixed_sparse_indices", "prefill", {"tokens": tokens, "width": 128, "decodes": False}, mixed)
        for width in (128, 192, 256):
            yield Case("causal_swa_indices", "window 128", {"tokens": tokens, "width": width}, causal, {"_compute_swa_indices_and_lens_kernel": causal_peer})
        for width in (192, 256):
            yield Case("draft_swa_indices", "blocks of 8", {"tokens": tokens, "width": width}, draft, {"ComputeDSparkNoncausalSWAIndicesKernel": draft_peer})
        for drop_holes in (False, True):
            yield Case("swa_indices_to_csr", "width 192", {"tokens": tokens, "drop_holes": drop_holes}, csr)
        yield Case("packed_page_slots", "width 192", {"tokens": tokens}, packed)
        yield Case("mtp_context_lens", "8 tokens a request", {"tokens": tokens}, mtp_lens)
        yield Case("ragged_context_lens", "1 to 15 tokens a request", {"tokens": tokens}, ragged_lens)
        yield Case("expand_block_table", "256 pages", {"tokens": tokens}, expand)
        yield Case("local_context_lens", "rank 1 of 4", {"tokens": tokens}, local_lens)
    for tokens in MERGED_TOKENS:
        for ranks, k in ((2, 512), (8, 512), (8, 2048)):
            yield Case("topk_merge", "lists of a split context", {"tokens": tokens, "ranks": ranks, "k": k}, merge, sets=16 if ranks * k > 4096 else 64)
