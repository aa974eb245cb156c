"""Draft inputs, KV rows, activation, and whole steps: what ``benchmarks.kernels`` measures of them, and how their peers are called.

``prepare_dflash_inputs`` has the sizes of a server's buffers (8192 rows, 1024 requests) and few or many live requests. The step ops
are measured beside the single ops that they are made of (``dsv4_ops, single ops``) and beside the peer's sequence of calls for
the same metadata: draft inputs, validity, request of each token, window rows; for a decode step also lengths and pages a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from dsv4_ops import causal_swa_indices, draft_swa_indices, expand_block_table, new_kv_cache, prepare_dflash_inputs, ragged_context_lens
from dsv4_ops.testing import Sample

from .kernels import Case, Peer, Prepared

PAGE, PAGES, WINDOW, MAX_MODEL_LEN = 64, 1024, 128, 65536
DRAFTS = 5
REQUESTS = (1, 8, 64, 256)
SINGLE = "dsv4_ops, single ops"


def _integers(generator: torch.Generator, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator, device=generator.device, dtype=dtype)


def _draft(requests: int, tokens_each: int, samples: int, max_reqs: int, max_tokens: int, seed: int, device: str, anchor: bool) -> Sample:
    """Every request has verified ``tokens_each`` tokens, some of which were rejected; states of all ``max_reqs``."""
    g = torch.Generator(device).manual_seed(seed)
    base = _integers(g, 4 * WINDOW, MAX_MODEL_LEN - 2 * WINDOW, requests, dtype=torch.int64)
    positions = (base[:, None] + torch.arange(tokens_each, device=device)).flatten()
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens_each
    states = (_integers(g, 0, 129280, max_reqs, dtype=torch.int64), _integers(g, 0, 129280, max_reqs, dtype=torch.int64), torch.rand(max_reqs, generator=g, device=device))
    args = (
        positions, starts, torch.randperm(max_reqs, generator=g, device=device)[:requests].to(torch.int32), _integers(g, 1, tokens_each + 1, requests),
        _integers(g, 0, tokens_each, requests), *states, _integers(g, 0, 2**40, max_reqs, dtype=torch.int64), [_integers(g, 1, 4096, max_reqs, PAGES)], [PAGE],
    )  # fmt: skip
    sizes = {"mask_token_id": 128799, "num_speculative_tokens": samples, "max_reqs": max_reqs, "max_tokens": max_tokens, "max_model_len": MAX_MODEL_LEN}
    return Sample("", args, sizes | {"sample_from_anchor": anchor})


def dflash(live: int, max_reqs: int, max_tokens: int, seed: int, device: str, groups: int = 1) -> Sample:
    sample = _draft(live // 8, 8, 7, max_reqs, max_tokens, seed, device, anchor=False)
    *args, tables, sizes = sample.args
    g = torch.Generator(device).manual_seed(seed + 1)
    return Sample("", (*args, tables + [_integers(g, 1, 4096, max_reqs, PAGES) for _ in range(groups - 1)], sizes * groups), sample.kwargs)


def draft_step(requests: int, seed: int, device: str) -> Sample:
    """DSpark, K = 5: 6 tokens verified a request, blocks of 5 queries, rows of 192 columns."""
    sample = _draft(requests, 1 + DRAFTS, DRAFTS, requests, requests * DRAFTS, seed, device, anchor=True)
    return Sample("", sample.args, sample.kwargs | {"window": WINDOW, "width": 192})


def decode_step(requests: int, tokens_each: int, seed: int, device: str) -> Sample:
    """A plain decode step (1 token a request) or the verification of drafts; compressed layers of ratio 4 and 128."""
    g = torch.Generator(device).manual_seed(seed)
    base = _integers(g, 4 * WINDOW, MAX_MODEL_LEN - 2 * WINDOW, requests, dtype=torch.int64)
    positions = (base[:, None] + torch.arange(tokens_each, device=device)).flatten()
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens_each
    args = (positions, (base + tokens_each).to(torch.int32), starts, _integers(g, 1, 4096, requests, PAGES), _integers(g, 1, 4096, requests, 256))
    return Sample("", args, {"block_size": PAGE, "window": WINDOW, "width": WINDOW, "compress_ratios": [4, 128]})


def insert(tokens: int, seed: int, device: str) -> Sample:
    g = torch.Generator(device).manual_seed(seed)
    blocks = max(8, tokens // 16)
    cache = new_kv_cache(blocks, PAGE, page_stride=37440, device=device)
    slots = PAGE + torch.randperm((blocks - 1) * PAGE, generator=g, device=device)[:tokens]
    return Sample("", (torch.randn(tokens, 512, generator=g, device=device).bfloat16(), cache, slots), {})


def gather(tokens: int, seed: int, device: str) -> Sample:
    kv, cache, slots = insert(tokens, seed, device).args
    torch.ops.dsv4_ops.kv_cache_insert(kv, cache, slots)
    return Sample("", (cache, slots), {})


def activation(tokens: int, seed: int, device: str) -> Sample:
    g = torch.Generator(device).manual_seed(seed)
    return Sample("", (torch.randn(tokens, 4096, generator=g, device=device).bfloat16(), 1.0, 0.0, 10.0), {})


# ---- the same by single ops ------------------------------------------------------------------------------------------


def single_draft_ops(sample: Sample) -> Callable[[], tuple[torch.Tensor, ...]]:
    sizes = dict(sample.kwargs)
    window, width, tables, queries = sizes.pop("window"), sizes.pop("width"), sample.args[9], sizes["num_speculative_tokens"]

    def call() -> tuple[torch.Tensor, ...]:
        prepared = prepare_dflash_inputs(*sample.args, **sizes)
        first, valid = prepared.positions[::queries].to(torch.int32), ~prepared.is_padding[::queries]
        indices, lens = draft_swa_indices(
            first, tables[0], valid, block_size=PAGE, window=window, block_queries=queries, width=width, max_model_len=sizes["max_model_len"]
        )
        return (*prepared, indices[None], lens)

    return call


def single_decode_ops(sample: Sample) -> Callable[[], tuple[torch.Tensor | None, ...]]:
    positions, seq_lens, starts, table, pages = sample.args
    tokens, ratios = positions.shape[0], sample.kwargs["compress_ratios"]

    def call() -> tuple[torch.Tensor | None, ...]:
        _, requests, valid = zip(*(ragged_context_lens(seq_lens, starts, tokens, ratio) for ratio in ratios), strict=True)
        indices, swa_lens = causal_swa_indices(positions, requests[0], valid[0], table, block_size=PAGE, window=WINDOW, width=WINDOW)
        # Slots and one tensor of all lengths are left out: engines have the first from the host and read the others apart.
        return requests[0], valid[0], None, indices, swa_lens, None, expand_block_table(pages, requests[0], valid[0])

    return call


# ---- peers -----------------------------------------------------------------------------------------------------------


def _dflash_call(kernels: ModuleType, sample: Sample, group: int, outs: list[torch.Tensor]) -> Callable[[], None]:
    positions, starts, mapping, sampled, rejected, last, prefill, temperature, seeds, tables, sizes = sample.args
    k = sample.kwargs
    anchor, samples = k["sample_from_anchor"], k["num_speculative_tokens"]
    queries, requests = samples + (not anchor), mapping.shape[0]
    span = positions.shape[0] // requests + queries
    block = min(256, 1 << (span - 1).bit_length())
    *first, query_slots, context_positions, context_slots = outs[:8]

    def call() -> None:
        kernels._prepare_dflash_inputs_kernel[(requests, -(-span // block))](
            *first, query_slots[group], context_positions, context_slots[group], *outs[8:13], positions, starts, mapping, last, prefill, sampled, rejected, temperature, seeds,
            tables[group], tables[group].stride(0), k["mask_token_id"], sizes[group], queries, samples, k["max_reqs"], k["max_tokens"], k["max_model_len"], 0,
            SAMPLE_FROM_ANCHOR=anchor, PAD_SLOT_ID=-1, CP_SIZE=1, CP_INTERLEAVE=1, BLOCK_SIZE=block,
        )  # fmt: skip

    return call


def _dflash_outs(sample: Sample) -> list[torch.Tensor]:
    """Buffers as an engine has them: those of the request states are already filled."""
    k, (positions, *_, temperature, seeds, tables, _) = sample.kwargs, sample.args
    samples, groups, tokens = k["max_reqs"] * k["num_speculative_tokens"], len(tables), positions.shape[0]

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=positions.device)

    return [
        new(k["max_tokens"], dtype=torch.int32), new(k["max_tokens"]), new(k["max_tokens"], dtype=torch.bool), new(k["max_reqs"] + 1, dtype=torch.int32),
        new(k["max_reqs"], dtype=torch.int32), new(groups, k["max_tokens"]), new(tokens), new(groups, tokens), new(samples), new(samples), new(samples, dtype=torch.int32),
        temperature.clone(), seeds.clone(),
    ]  # fmt: skip


def dflash_peer(kernels: ModuleType, sample: Sample) -> Prepared:
    """One launch for each KV group, as the peer does it."""
    outs = _dflash_outs(sample)
    calls = [_dflash_call(kernels, sample, group, outs) for group in range(len(sample.args[9]))]

    def call() -> None:
        for one in calls:
            one()

    return call, outs


def draft_step_peer(kernels: ModuleType, sample: Sample) -> Prepared:
    """Draft inputs, then the metadata update of the draft's captured graph: validity, requests, window rows."""
    outs, k, table = _dflash_outs(sample), sample.kwargs, sample.args[9][0]
    rows, device = k["max_tokens"], table.device
    valid, requests = torch.zeros(rows, dtype=torch.bool, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
    indices, lens = torch.zeros(rows, k["width"], dtype=torch.int32, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
    first, starts, seq_lens, slots = _dflash_call(kernels, sample, 0, outs), outs[3], outs[4], outs[5][0]

    def call() -> None:
        first()
        torch.ge(slots, 0, out=valid)
        kernels._token_request_mapping_kernel[(-(-rows // 256),)](starts, requests, starts.shape[0] - 1, rows, rows, num_warps=4)
        kernels.dspark_swa_kernel[(rows,)](
            indices, indices.stride(0), lens, k["window"], k["width"], starts, seq_lens, requests, valid, table, table.stride(0), PAGE, 0, TRITON_BLOCK_SIZE=1024
        )

    return call, (*outs, indices[None], lens)


def decode_step_peer(kernels: ModuleType, sample: Sample) -> Prepared:
    """The metadata of window layers and of the indexer, given the slots of the step's tokens."""
    positions, seq_lens, starts, table, pages = sample.args
    tokens, reqs, device = positions.shape[0], seq_lens.shape[0], positions.device

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    slots, valid, requests, none = new(tokens, dtype=torch.int64), new(tokens, dtype=torch.bool), new(tokens), new(reqs + 1)
    indices, swa_lens, lens, expanded, ones, rows, each = new(tokens, WINDOW), new(tokens), new(tokens), new(tokens, pages.shape[1]), new(tokens), new(tokens), new(reqs)

    def call() -> None:
        torch.ge(slots, 0, out=valid)
        kernels._token_request_mapping_kernel[(-(-tokens // 256),)](starts, requests, reqs, tokens, tokens, num_warps=4)
        kernels.causal_swa_kernel[(tokens,)](
            indices, indices.stride(0), swa_lens, WINDOW, WINDOW, swa_lens, swa_lens, starts, seq_lens, requests, valid, table, table.stride(0), PAGE, none, 0,
            HAS_IMAGE=False, TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip
        kernels._indexer_decode_metadata_kernel[(max(tokens, reqs),)](
            starts, seq_lens, pages, lens, expanded, ones, rows, each, reqs, tokens, tokens, pages.stride(0), expanded.stride(0), BLOCK_COLS=pages.shape[1]
        )

    return call, (requests, valid, None, indices, swa_lens, None, expanded)


def insert_peer(kernels: ModuleType, sample: Sample) -> Prepared:
    kv, original, slots = sample.args
    cache = torch.zeros_like(original.as_strided((original.shape[0], original.stride(0)), (original.stride(0), 1)))
    view = cache.as_strided(original.shape, original.stride())

    def call() -> None:
        kernels.quantize_and_insert_k_kernel[(kv.shape[0],)](
            kv, slots, cache, kv.shape[0], input_dim=512, fp8_dim=448, bf16_dim=64, scale_dim=8, quant_block=64, cache_block_size=PAGE, token_data_size=576,
            block_stride=cache.stride(0), fp8_max=448.0, n_quant_blocks=8,
        )  # fmt: skip

    return call, (view,)


def cases() -> Iterator[Case]:
    for live in (8, 256, 1024):
        peers: dict[str, Peer] = {"prepare_dflash_inputs": dflash_peer}
        yield Case("prepare_dflash_inputs", "8192 rows, 1024 requests", {"live": live, "max_reqs": 1024, "max_tokens": 8192}, dflash, peers, sets=16, at_most_us=2.5)
        yield Case("prepare_dflash_inputs", "two groups", {"live": live, "max_reqs": 1024, "max_tokens": 8192, "groups": 2}, dflash, peers, sets=8)
    yield Case("prepare_dflash_inputs", "2048 rows, 256 requests", {"live": 64, "max_reqs": 256, "max_tokens": 2048}, dflash, {"prepare_dflash_inputs": dflash_peer}, sets=32)
    for tokens in (8, 64, 256, 1024):
        yield Case("kv_cache_insert", "fp8 pages of 37440 bytes", {"tokens": tokens}, insert, {"quantize_and_insert_k_cache": insert_peer}, ahead=2.0, sets=32)
        yield Case("kv_cache_gather", "fp8 pages of 37440 bytes", {"tokens": tokens}, gather, sets=32)
        yield Case("swiglu", "bf16, 2048 columns, limit 10", {"tokens": tokens}, activation, sets=16)
    for requests in REQUESTS:
        yield Case("prepare_draft_step", "DSpark, 5 drafts", {"requests": requests}, draft_step, {"peer's calls": draft_step_peer}, sets=16, ours={SINGLE: single_draft_ops})
        for tokens_each in (1, 1 + DRAFTS):
            case = "plain decode" if tokens_each == 1 else "verification of 5 drafts"
            params = {"requests": requests, "tokens_each": tokens_each}
            yield Case("prepare_decode_step", case, params, decode_step, {"peer's calls": decode_step_peer}, sets=16, ours={SINGLE: single_decode_ops})
