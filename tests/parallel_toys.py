"""What the tests and the benchmark of several ranks share: starting them, and a decode step whose context is split."""

from __future__ import annotations

import datetime
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dsv4_ops
from dsv4_ops import parallel

DIM, SCALE = 512, 512**-0.5


def _rank(rank: int, function: Callable[..., Any], size: int, folder: str, backend: str, wait_s: float, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=wait_s), **options)
    torch.save(function(rank, size, *arguments), Path(folder) / f"{rank}.pt")
    # NCCL's destroy waits until no graph holds the group's collectives any more, and pools of graphs are cycles of references.
    gc.collect()
    if backend == "nccl":
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def launch(function: Callable[..., Any], size: int, *arguments: Any, backend: str = "gloo", wait_s: float = 180.0, limit_s: float = 480.0) -> list[Any]:
    """What ``function(rank, size, *arguments)`` returns in each of ``size`` processes that form one group (met over a file: no port is taken).

    A rank that raises ends all, with its error; so does the time limit. ``wait_s``: how long a rank waits for the others in a collective.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = mp.spawn(_rank, (function, size, folder, backend, wait_s, arguments), nprocs=size, join=False)
        end = time.monotonic() + limit_s
        try:
            while not running.join(timeout=max(0.1, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise TimeoutError(f"{size} ranks of {function.__name__} were not done after {limit_s:.0f} s")
        finally:
            for process in running.processes:
                if process.is_alive():
                    process.kill()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


class Sizes(NamedTuple):
    """Of a step: records are in pages of ``page`` over all ranks; ``interleave`` of them in a row are on one rank."""

    heads: int = 4
    records: int = 96
    k: int = 24
    page: int = 16
    window: int = 16
    interleave: int = 1
    query: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32


class Step(NamedTuple):
    """Inputs of a step, undivided; every rank draws the same."""

    q: torch.Tensor
    scores: torch.Tensor
    lens: torch.Tensor
    """Records that each token sees."""
    requests: torch.Tensor
    valid: torch.Tensor
    swa_indices: torch.Tensor
    swa_lens: torch.Tensor


class Caches(NamedTuple):
    """Window pages, records and their table, and the sink, as one rank holds them (or all: rank 0 of 1)."""

    window: torch.Tensor
    records: torch.Tensor
    table: torch.Tensor
    sink: torch.Tensor
    slots: torch.Tensor
    """Where each record of each request was written, -1 where another rank has it: ``[requests, records]``."""


def draw_caches(sizes: Sizes, rank: int, size: int, device: str = "cpu", requests: int = 3, seed: int = 0) -> Caches:
    """The same contents whatever the split: each rank writes what is its own."""
    g = torch.Generator().manual_seed(seed)
    pages = -(-sizes.records // sizes.page)
    table = (1 + torch.randperm(requests * pages, generator=g)).to(torch.int32).view(requests, pages)
    rows, window_rows = torch.randn(requests, sizes.records, DIM, generator=g), torch.randn(8 * sizes.window, DIM, generator=g)
    record = torch.arange(sizes.records, dtype=torch.int32).expand(requests, -1)
    slots, _ = dsv4_ops.global_topk_indices(record, torch.arange(requests, dtype=torch.int32), torch.ones(requests, dtype=torch.bool), table, block_size=sizes.page)
    slots = parallel.local_slots(slots, sizes.page // size, rank, size, sizes.interleave)
    records = dsv4_ops.new_kv_cache(1 + requests * pages, sizes.page // size, dtype=sizes.cache)
    dsv4_ops.kv_cache_insert(rows.flatten(0, 1), records, slots.flatten().long())
    window = dsv4_ops.new_kv_cache(9, sizes.window, dtype=sizes.cache)
    dsv4_ops.kv_cache_insert(window_rows, window, sizes.window + torch.arange(8 * sizes.window))
    return Caches(*(t.to(device) for t in (window, records, table, torch.randn(sizes.heads, generator=g), slots)))


def draw_step(sizes: Sizes, tokens: int, device: str = "cpu", requests: int = 3, seed: int = 0) -> Step:
    """Scores with many ties, NaN and infinities; lengths that are 0, negative, 1 and beyond; the last token is padding."""
    g = torch.Generator().manual_seed(1000 + seed)
    scores = (2 * torch.randn(tokens, sizes.records, generator=g)).round()
    some = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    pick = torch.randint(0, 12, scores.shape, generator=g)
    scores = torch.where(pick < 4, some[pick % 4], scores)
    lens = torch.randint(0, sizes.records + 1, (tokens,), generator=g, dtype=torch.int32)
    swa_lens = torch.randint(0, sizes.window + 1, (tokens,), generator=g, dtype=torch.int32)
    # No key at all; one key, which only one rank has; a record only; lengths that are out of range.
    for i, (records, window) in enumerate(((0, 0), (0, 1), (1, 0), (2**31 - 1, 2**31 - 1), (-5, -1))[: max(0, tokens - 2)]):
        lens[i], swa_lens[i] = records, window
    swa_indices = torch.randint(sizes.window, 9 * sizes.window, (tokens, sizes.window), generator=g, dtype=torch.int32)
    swa_indices[torch.rand(swa_indices.shape, generator=g) < 0.1] = -1
    valid = torch.ones(tokens, dtype=torch.bool)
    valid[tokens - 1 :] = tokens == 1
    owners = torch.randint(0, requests, (tokens,), generator=g, dtype=torch.int32)
    q = torch.randn(tokens, sizes.heads, DIM, generator=g).to(sizes.query)
    return Step(*(t.to(device) for t in (q, scores, lens, owners, valid, swa_indices, swa_lens)))


def one_rank(step: Step, caches: Caches, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """Columns, output and lse of the undivided step."""
    columns = dsv4_ops.topk(step.scores, step.lens, sizes.k)
    slots, lens = dsv4_ops.topk_slots(step.scores, step.lens, step.requests, step.valid, caches.table, sizes.k, sizes.page)
    out, lse = dsv4_ops.sparse_mla_decode(step.q, caches.window, step.swa_indices, step.swa_lens, caches.records, slots, lens, caches.sink, scale=SCALE)
    return columns, out, lse


def own_scores(scores: torch.Tensor, rank: int, size: int, interleave: int) -> torch.Tensor:
    column = torch.arange(scores.shape[1], device=scores.device)
    return scores[:, column // interleave % size == rank].contiguous()


def split_step(step: Step, caches: Caches, sizes: Sizes, rank: int, size: int, group: Any = None) -> tuple[torch.Tensor, ...]:
    """The same by one of ``size`` ranks, which has the scores of its own records only: ``step.scores`` is ``own_scores`` of all."""
    local = dsv4_ops.local_context_lens(step.lens.clamp(max=sizes.records), rank, size, sizes.interleave)
    split: dict[str, Any] = {"cp_interleave": sizes.interleave, "group": group}
    columns = parallel.context_parallel_topk(step.scores, local, sizes.k, **split)
    slots, lens = parallel.context_parallel_topk_slots(step.scores, local, step.requests, step.valid, caches.table, sizes.k, sizes.page // size, **split)
    rows = parallel.local_rows(step.swa_indices, step.swa_lens, rank, size)
    out, lse = parallel.context_parallel_decode(step.q, caches.window, *rows, caches.records, slots, lens, caches.sink, scale=SCALE, group=group)
    return columns, out, lse


