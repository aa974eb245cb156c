"""Two ranks against one: collectives, the indexer's top-k, attention over a context or over heads that are split, and the engine's steps.

Starts its ranks itself, one GPU each (``--ranks``, default 2), over NCCL. Everything is timed inside CUDA graphs, on rank 0, the ranks aligned before each
replay. Every result is compared first: chosen slots with those of one rank (equal), attention with the fp64 reference, or where that is slow with
one rank (LIMIT), sums with the sum of all parts (equal), the engine's tokens with those of one rank (equal). ``--device cpu`` runs it over gloo, on small sizes, to see that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

import dsv4_ops
from dsv4_ops import parallel
from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE

from . import results

sys.path.insert(0, str(results.ROOT))  # for the toys, which the tests share
from tests import parallel_toys as toys

SETS, REPLAYS, WIDE, DIM, PAGE, LIMIT = 8, 11, 64 << 20, 512, 64, 1e-2
TOKENS, HEADS, WINDOW, K, RECORDS = (1, 8, 64), 64, 128, 512, 32768
METHOD = (
    f"CUDA graph of one call for each of {SETS} input sets, us a call over {REPLAYS} replays, rank 0's clock; 256 MB read before each replay, then a small all-reduce, so that ranks "
    "start together. Engine rows: wall time of a decode step, graphs replayed"
)
Call = Callable[[], Any]


@dataclass
class Bench:
    """One rank's part. Rank 0's rows are kept."""

    rank: int
    size: int
    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        small = self.device == "cpu"
        self.generator = torch.Generator(self.device).manual_seed(0)  # the same draws on every rank
        self.flushed, self.sink = torch.ones(1 if small else WIDE, device=self.device), torch.zeros((), device=self.device)
        self.tokens, self.records, self.heads = (TOKENS, RECORDS, HEADS) if not small else ((1, 3), 1024, 4)
        self.query = torch.float32 if small else torch.bfloat16

    def uniform(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def replayed(self, calls: Sequence[Call]) -> Call:
        if self.device == "cpu":
            return lambda: [call() for call in calls]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the collectives' own threads call CUDA meanwhile
            for call in calls:
                call()
        return graph.replay

    def times(self, calls: Sequence[Call]) -> dict[str, float]:
        replay, taken = self.replayed(calls), []
        replay()
        for _ in range(REPLAYS):
            self.sink.copy_(self.flushed.sum())
            dist.all_reduce(self.sink)
            if self.device == "cpu":
                start = time.perf_counter()
                replay()
                taken.append((time.perf_counter() - start) * 1e6 / len(calls))
                continue
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            replay()
            after.record()
            after.synchronize()
            taken.append(before.elapsed_time(after) * 1000 / len(calls))
        taken.sort()
        return {f"us_p{p}": round(taken[len(taken) * p // 100], 2) for p in (20, 50, 80)}

    def row(self, op: str, case: str, provider: str, params: dict[str, Any], calls: Sequence[Call], ok: Callable[[Any], bool], **more: Any) -> None:
        """Every rank judges its own result; one that is wrong anywhere has no time."""
        wrong = torch.tensor(0.0 if ok(calls[0]()) else 1.0, device=self.device)
        dist.all_reduce(wrong)
        right = wrong.item() == 0
        self.rows.append({"op": op, "case": case, "params": params, "provider": provider, "ok": right, **more, **(self.times(calls) if right else {})})

    # What is measured

    def messages(self) -> None:
        for nbytes in (4 << 10, 64 << 10, 512 << 10, 4 << 20):
            sets = [self.normal(self.size, nbytes // 2).bfloat16() for _ in range(SETS)]  # what every rank sends
            total = [sum((part.float() for part in s[1:]), s[0].float()).bfloat16() for s in sets]
            mine = [s[self.rank].clone() for s in sets]
            params = {"bytes": nbytes, "ranks": self.size}
            self.row("all_gather", "message", "torch", params, [lambda x=x: parallel._gathered(x, None) for x in mine], lambda got: torch.equal(got, sets[0]))
            self.row("ordered_sum", "message", "dsv4_ops", params, [lambda x=x: parallel.ordered_sum(x) for x in mine], lambda got: torch.equal(got, total[0]))
            reduced = [lambda x=x: collectives.wait_tensor(collectives.all_reduce(x, "sum", dist.group.WORLD)) for x in mine]  # type: ignore[misc,arg-type]
            self.row("all_reduce", "message", "torch", params, reduced, lambda got: bool((got.float() - total[0].float()).norm() <= LIMIT * total[0].float().norm()))

    def choices(self, rows: int) -> None:
        own = self.rank, self.size
        pages = self.records // PAGE
        table = (1 + torch.arange(rows * pages, device=self.device)).int().view(rows, pages)
        requests, valid = torch.arange(rows, device=self.device).int(), torch.ones(rows, dtype=torch.bool, device=self.device)
        lens = torch.full((rows,), self.records, dtype=torch.int32, device=self.device)
        local = dsv4_ops.local_context_lens(lens, *own)
        scores = [self.normal(rows, self.records) for _ in range(SETS)]
        mine = [s[:, self.rank :: self.size].contiguous() for s in scores]
        k = min(K, self.records // 4)
        columns = dsv4_ops.topk(scores[0], lens, k)
        slots = dsv4_ops.topk_slots(scores[0], lens, requests, valid, table, k, PAGE)[0]
        share = parallel.compact_slots(parallel.local_slots(slots, PAGE // self.size, *own))
        params = {"rows": rows, "columns": self.records, "k": k}

        def same(got: Any, wanted: Any) -> bool:
            return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))

        one = [lambda s=s: dsv4_ops.topk_slots(s, lens, requests, valid, table, k, PAGE) for s in scores]
        split = [lambda s=s: parallel.context_parallel_topk_slots(s, local, requests, valid, table, k, PAGE // self.size) for s in mine]
        self.row("topk_slots", "indexer", "1 rank", params, one, lambda got: torch.equal(got[0], slots))
        self.row("context_parallel_topk_slots", "indexer", f"{self.size} ranks", params, split, lambda got: same(got, share))
        found = dsv4_ops.topk_values(mine[0], local, k)
        self.row("topk_values", "indexer, a part of it", f"{self.size} ranks", params, [lambda s=s: dsv4_ops.topk_values(s, local, k) for s in mine], lambda got: same(got, found))
        both = parallel._gathered(torch.stack([found[1] * self.size + self.rank, found[0].view(torch.int32)]), None).permute(1, 2, 0, 3).flatten(2)
        merge = [lambda: dsv4_ops.topk_merge(both[1].view(torch.float32), both[0], k)] * SETS
        self.row("topk_merge", "indexer, a part of it", f"{self.size} ranks", params, merge, lambda got: torch.equal(got[1], columns))

    def caches(self) -> None:
        """Window pages, which all ranks hold; records undivided, and this rank's share of them."""
        pages = 256 if self.device == "cpu" else 2048
        self.pages, dtype = pages, torch.float32 if self.device == "cpu" else torch.uint8
        self.window, self.whole = (dsv4_ops.new_kv_cache(pages, PAGE, dtype=dtype, device=self.device) for _ in range(2))
        self.share = dsv4_ops.new_kv_cache(pages, PAGE // self.size, dtype=dtype, device=self.device)
        for first in range(PAGE, pages * PAGE, 1 << 14):
            slots = torch.arange(first, min(first + (1 << 14), pages * PAGE), device=self.device)
            for caches in ((self.window,), (self.whole, self.share)):
                rows = self.normal(len(slots), DIM)
                for cache in caches:
                    place = parallel.local_slots(slots, PAGE // self.size, self.rank, self.size) if cache is self.share else slots
                    dsv4_ops.kv_cache_insert(rows, cache, place)

    def attention(self, tokens: int, backend: str) -> None:
        own = self.rank, self.size
        heads = parallel.own_heads(self.heads, *own)
        sink = self.normal(self.heads)
        full = [torch.full((tokens,), n, dtype=torch.int32, device=self.device) for n in (WINDOW, K)]
        sets = []
        for _ in range(SETS):
            rows = [self.uniform(PAGE, self.pages * PAGE, tokens, n).int() for n in (WINDOW, K)]
            sets.append((self.normal(tokens, self.heads, DIM).to(self.query), self.window, rows[0], full[0], self.whole, rows[1], full[1], sink))
        options: dict[str, Any] = {"scale": DIM**-0.5, "backend": backend}
        split = []
        for q, window, indices, lens, _, slots, _, _ in sets:
            records = parallel.compact_slots(parallel.local_slots(slots, PAGE // self.size, *own))
            split.append((q, window, *parallel.local_rows(indices, lens, *own), self.share, *records, sink))
        some = [(s[0][:, heads].contiguous(), *s[1:-1], sink[heads].contiguous()) for s in sets]
        exact = tokens <= 8
        wanted = (SPARSE_MLA_DECODE.reference if exact else dsv4_ops.sparse_mla_decode)(*sets[0], scale=DIM**-0.5)[0].double()
        params = {"tokens": tokens, "heads": self.heads, "window_keys": WINDOW, "records": K, "backend": backend, "against": "fp64 reference" if exact else "1 rank"}

        def close(part: slice = slice(None)) -> Callable[[Any], bool]:
            return lambda got: bool((got[0].double() - wanted[:, part]).norm() <= LIMIT * wanted[:, part].norm())

        for op, provider, arguments, part in (
            ("sparse_mla_decode", "1 rank", sets, slice(None)),
            ("context_parallel_decode", f"{self.size} ranks, context", split, slice(None)),
            ("sparse_mla_decode", f"{self.size} ranks, heads", some, heads),
        ):
            function = getattr(parallel, op, None) or getattr(dsv4_ops, op)
            self.row(op, "decode attention", provider, params, [lambda a=a, f=function: f(*a, **options) for a in arguments], close(part))

    def engines(self) -> None:
        from dsv4_ops.engine.config import EngineConfig
        from dsv4_ops.engine.engine import Engine
        from dsv4_ops.engine.requests import Request
        from tests.engine_toys import random_model, random_prompt

        steps, device = 48 if self.device != "cpu" else 4, self.device if self.device == "cpu" else f"cuda:{self.rank}"
        requests = [Request(i, random_prompt(n, n), steps) for i, n in enumerate((300, 5, 129, 260))]
        alone: list[list[int]] = []
        for name, split in (("1 rank", (1, 1)), (f"{self.size} ranks, heads", (self.size, 1)), (f"{self.size} ranks, context", (1, self.size))):
            sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 128, "capture_sizes": (4, 128)}
            engine = Engine(random_model().to(device), EngineConfig(device=device, tensor_parallel=split[0], context_parallel=split[1], **sizes))
            engine.generate([Request(0, (1, 2, 3), 3)])
            before, start = engine.stats.steps, time.perf_counter()
            tokens = [c.token_ids for c in engine.generate(requests)]
            took = (time.perf_counter() - start) / (engine.stats.steps - before)
            alone = alone or tokens
            wrong = torch.tensor(0.0 if tokens == alone else 1.0, device=self.device)
            dist.all_reduce(wrong)
            ok, params = wrong.item() == 0, {"requests": len(requests), "tokens": sum(map(len, tokens)), "layers": 4, "kv_bytes": engine.stats.kv_bytes}
            self.rows.append({"op": "engine step", "case": "greedy, random weights, tiny sizes", "params": params, "provider": name, "ok": ok, **({"us_p50": round(took * 1e6, 1)} if ok else {})})


def rank_main(rank: int, size: int, device: str) -> list[dict[str, Any]]:
    torch.set_grad_enabled(False)
    bench = Bench(rank, size, device)
    # By name: the same kernel on any machine that has it, whatever "auto" takes there.
    backend = "triton" if device == "cuda" else "auto"
    bench.caches()
    parts: list[tuple[str, Call]] = [("messages", bench.messages)]
    parts += [(f"indexer, {n} rows", lambda n=n: bench.choices(n)) for n in bench.tokens]  # type: ignore[misc]
    parts += [(f"attention, {n} tokens", lambda n=n: bench.attention(n, backend)) for n in bench.tokens]  # type: ignore[misc]
    for name, part in (*parts, ("engine", bench.engines)):
        try:
            part()
        except Exception as failure:  # the others are still worth having; where only one rank fails, the group's timeout ends all
            bench.rows.append({"op": name, "case": "failed", "params": {}, "provider": "", "ok": False, "skipped": f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:300]}"})
    return bench.rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.parallel", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    found = torch.cuda.device_count()
    if options.device == "cuda" and found < options.ranks:
        print(f"{options.ranks} CUDA devices are needed, {found} found")
        return 1
    start = time.perf_counter()
    rows = toys.launch(rank_main, options.ranks, options.device, backend="nccl" if options.device == "cuda" else "gloo", limit_s=600)[0]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if options.device == "cuda" else None
    env = {"ranks": options.ranks, "backend": "nccl" if options.device == "cuda" else "gloo", "nccl": nccl}
    results.write("parallel", env, method=METHOD, wall_s=round(time.perf_counter() - start, 1), rows=rows)
    for row in rows:
        shown = ", ".join(f"{key} {value}" for key, value in row["params"].items() if key in ("bytes", "rows", "tokens", "kv_bytes"))
        print(f"{row['op']:28} {shown:34} {row['provider']:18} {row.get('us_p50', row.get('skipped', 'WRONG'))!s:>9} us")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
