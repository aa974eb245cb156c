"""Two ranks against one: collectives, the indexer's top-k, attention over a context or over heads that are split, and the engine's steps.

Starts its ranks itself, one GPU each (``--ranks``, default 2), over NCCL. Everything is timed inside CUDA graphs, on rank 0, the ranks aligned before each
replay. Every result is compared first: chosen slots with those of one rank (equal), attention with the fp64 reference, or where that is slow with
one rank (LIMIT), sums with the sum of all parts (equal), the engine's tokens with those of one rank (equal). ``--device cpu`` runs it over gloo, on small sizes, to see that it works.
"""

from __future__ import annotations

import argparse
import functools
import signal
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
BYTES = (4 << 10, 64 << 10, 512 << 10, 4 << 20)
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
    began: float = field(default_factory=time.perf_counter)

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

    def row(self, op: str, case: str, provider: str, params: dict[str, Any], calls: Sequence[Call], ok: Callable[[Any], bool]) -> None:
        """Every rank judges its own result; one that is wrong anywhere has no time."""
        right = not self.anyone(not ok(calls[0]()))
        self.add({"op": op, "case": case, "params": params, "provider": provider, "ok": right, **(self.times(calls) if right else {})})

    def add(self, row: dict[str, Any]) -> None:
        """Shown at once: a run that is cut off has said how far it came."""
        self.rows.append(row)
        if self.rank == 0:
            shown = ", ".join(f"{key} {value}" for key, value in row["params"].items() if key in ("bytes", "rows", "tokens", "kv_bytes"))
            print(f"{time.perf_counter() - self.began:5.1f} s  {row['op']:28} {shown:32} {row['provider']:18} {row.get('us_p50', row.get('skipped', 'WRONG'))!s:>9}", flush=True)

    def anyone(self, flag: bool) -> bool:
        """Whether it holds on any rank: the same answer on all."""
        found = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(found)
        return found.item() > 0

    # What is measured

    def message(self, nbytes: int) -> None:
        sets = [self.normal(self.size, nbytes // 2).bfloat16() for _ in range(SETS)]  # what every rank sends
        total = sum((part.float() for part in sets[0][1:]), sets[0][0].float())
        mine = [s[self.rank].clone() for s in sets]
        params = {"bytes": nbytes, "ranks": self.size}
        gathered = [lambda x=x: parallel._gathered(x, None) for x in mine]  # type: ignore[misc]
        self.row("all_gather", "message", "torch", params, gathered, lambda got: torch.equal(got, sets[0]))
        summed = [lambda x=x: parallel.ordered_sum(x) for x in mine]  # type: ignore[misc]
        self.row("ordered_sum", "message", "dsv4_ops", params, summed, lambda got: torch.equal(got, total.bfloat16()))
        reduced = [lambda x=x: collectives.wait_tensor(collectives.all_reduce(x, "sum", dist.group.WORLD)) for x in mine]  # type: ignore[misc,arg-type]
        self.row("all_reduce", "message", "torch", params, reduced, lambda got: bool((got.float() - total).norm() <= LIMIT * total.norm()))

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
            engine.executor.pool.reset()  # its graphs hold collectives: the group could not be destroyed
            alone = alone or tokens
            ok, params = not self.anyone(tokens != alone), {"requests": len(requests), "tokens": sum(map(len, tokens)), "layers": 4, "kv_bytes": engine.stats.kv_bytes}
            self.add({"op": "engine step", "case": "greedy, random weights, tiny sizes", "params": params, "provider": name, "ok": ok, **({"us_p50": round(took * 1e6, 1)} if ok else {})})


def rank_main(rank: int, size: int, device: str, limit_s: float) -> list[dict[str, Any]]:
    torch.set_grad_enabled(False)
    bench = Bench(rank, size, device)
    # By name: the same kernel on any machine that has it, whatever "auto" takes there.
    backend = "triton" if device == "cuda" else "auto"
    parts: list[tuple[str, Call]] = [(f"messages of {n} bytes", functools.partial(bench.message, n)) for n in BYTES]
    parts += [(f"indexer, {n} rows", functools.partial(bench.choices, n)) for n in bench.tokens]
    parts += [("engine", bench.engines), ("caches", bench.caches)]
    parts += [(f"attention, {n} tokens", functools.partial(bench.attention, n, backend)) for n in bench.tokens]
    def record(topic: str, quiet: bool) -> None:
        if rank == 0:
            cuda = device == "cuda"
            env = {"ranks": size, "backend": dist.get_backend(), "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None}
            results.write(topic, env, quiet, method=METHOD if cuda else "wall time of a call: a trial on a CPU", wall_s=round(time.perf_counter() - bench.began, 1), rows=bench.rows)

    for name, part in parts:
        why = "time limit" if bench.anyone(time.perf_counter() - bench.began > limit_s) else ""
        try:
            if not why:
                part()
        except Exception as failure:  # the others are still worth having; where one rank alone fails, the group's timeout ends all
            why = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:300]}"
        if why:
            bench.add({"op": name, "case": "not measured", "params": {}, "provider": "", "ok": False, "skipped": why})
        record("parallel-part", quiet=True)  # what is measured stays, should a later part take the ranks down
    record("parallel", quiet=False)
    return bench.rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.parallel", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=results.allowed_s(600.0), help="nothing new is begun after so many seconds; what is left out is written as skipped")
    options = parser.parse_args()
    found = torch.cuda.device_count()
    if options.device == "cuda" and found < options.ranks:
        print(f"{options.ranks} CUDA devices are needed, {found} found")
        return 1
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and launch() ends the ranks
    rows = toys.launch(rank_main, options.ranks, options.device, options.limit_s, backend="nccl" if options.device == "cuda" else "gloo", limit_s=options.limit_s + 120)[0]
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
