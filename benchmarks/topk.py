"""Row-wise top-k: ours, ``torch.topk``, and the peers of a folder named by PEERS_DIR, in one process.

Each provider's result is checked in the same run before it is timed, and again after: ours against the PyTorch path of this
package (exact), peers as sets of distinct columns with the right scores. ``torch`` is ``torch.topk(sorted=False)``, which
knows no lengths: it stands beside full rows only. The table of k = 512 is measured RUNS times (3), with the peers, in
alternating order; the run with the median time is recorded. Cells that miss their target are listed, none is left out.

PEERS_DIR holds a Python file ``peers.py`` with ``TOPK_PEERS = {name: (prepare, accepts)}``, where ``accepts(rows, k, width,
stride)`` tells what a peer takes and ``prepare(rows, k, width, max_len)`` gives ``call(logits, lengths, out)``; and, where it
has them, ``BFLOAT16`` (names of peers that take bfloat16 too) and ``SLOT_PEERS`` (fused translation, page size last).
``benchmarks/peers`` fills such a folder.

TOPK_TABLES (full, k, values, ragged, short, bfloat16, topk_values, topk_slots), TOPK_ROWS, TOPK_COLUMNS and TOPK_PROVIDERS
narrow the run, comma-separated; what is narrowed is written as ``topk-part.json``.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dsv4_ops
from dsv4_ops import testing
from dsv4_ops.bench.timing import Call, ColdReplays, copy_rate
from dsv4_ops.global_indices import _global_torch
from dsv4_ops.topk import _topk_torch

from . import results, topk_summary

ROWS = (1, 4, 8, 16, 32, 48, 64, 128, 133, 256)
COLUMNS = (2048, 8192, 16384, 32768, 65536, 131072, 262144)
VALUES = ("normal", "all equal", "16 values", "sigma 1e-5", "2048 finite", "ascending", "descending")
DEVICE = "cuda"
FLOATS = 560 << 20  # of the pool that inputs are cut from
PAGE = 64  # records a page, of the fused translation
METHOD = "cold L2 (256 MB read before each replay), CUDA graph of one call for each of 4 to 32 input sets, us a call over 11 replays; k = 512, full: the median of {runs} runs, each with the peers"


@dataclass(frozen=True)
class Case:
    table: str
    name: str
    rows: int
    columns: int
    k: int = 512
    dtype: str = "float32"
    op: str = "topk"


def cases() -> Iterator[Case]:
    for columns in COLUMNS:
        for rows in ROWS:
            yield Case("full", "full", rows, columns)
    for k in (1024, 2048):
        for columns in (8192, 32768, 131072):
            for rows in ROWS:
                yield Case("k", "full", rows, columns, k)
    for kind in VALUES:
        for rows, columns in ((8, 8192), (8, 65536), (64, 65536), (128, 131072)):
            yield Case("values", f"values: {kind}", rows, columns)
    for rows in (1, 4, 8, 32, 64, 128, 256):
        yield Case("ragged", "ragged: lengths uniform in [0, columns]", rows, 131072)
    for rows, length in ((1, 600), (8, 2048), (64, 8192), (256, 32768)):
        yield Case("short", f"short: length {length}", rows, 262144)
    for columns in (2048, 8192, 65536, 131072):
        for rows in (1, 8, 64, 256):
            yield Case("bfloat16", "full", rows, columns, dtype="bfloat16")
            yield Case("topk_values", "full", rows, columns, op="topk_values")
            yield Case("topk_slots", f"full, pages of {PAGE}", rows, columns, op="topk_slots")


def values(kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "all equal":
        return torch.full_like(x, 1.25)
    if kind == "16 values":
        return (x * 2).round().clamp(-8, 7)
    if kind == "sigma 1e-5":
        return 1 + x * 1e-5
    if kind == "2048 finite":
        keep = torch.rand_like(x).topk(min(2048, x.shape[1]), 1).indices
        return torch.full_like(x, -torch.inf).scatter_(1, keep, x.gather(1, keep))
    if kind == "ascending":
        return x.sort(1).values
    if kind == "descending":
        return x.sort(1, descending=True).values
    return x


class Inputs:
    """Input sets of a case, cut from the pool, and what is right for each."""

    def __init__(self, case: Case, pool: torch.Tensor, seed: int) -> None:
        self.case, size = case, case.rows * case.columns
        self._expected: dict[int, torch.Tensor] = {}
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        self.count = min(max(min((2 << 30) // (size * 4), 32), 4), FLOATS // size)
        sets = [pool[i * size : (i + 1) * size].view(case.rows, case.columns) for i in range(self.count)]
        self.logits = [values(case.name.removeprefix("values: "), x).to(getattr(torch, case.dtype)) for x in sets]
        full = torch.full((case.rows,), case.columns, device=DEVICE, dtype=torch.int32)
        self.lengths = [full] * self.count
        if case.table == "ragged":
            self.lengths = [torch.randint(0, case.columns + 1, (case.rows,), generator=generator, device=DEVICE, dtype=torch.int32) for _ in sets]
        elif case.table == "short":
            self.lengths = [torch.full_like(full, int(case.name.split()[-1]))] * self.count
        self.requests, self.valid = torch.arange(case.rows, device=DEVICE, dtype=torch.int32), torch.ones(case.rows, device=DEVICE, dtype=torch.bool)
        pages = case.columns // PAGE
        self.table = (torch.randperm(case.rows * pages, generator=generator, device=DEVICE).to(torch.int32) + 1).view(case.rows, pages)

    def expected(self, i: int) -> torch.Tensor:
        if i not in self._expected:
            self._expected[i] = _topk_torch(self.logits[i], self.lengths[i], self.case.k)
        return self._expected[i]

    def _scores(self, i: int, columns: torch.Tensor) -> torch.Tensor:
        return self.logits[i].gather(1, columns.long().clamp(0, self.case.columns - 1)).masked_fill(columns < 0, -torch.inf).sort(1).values

    def same_scores(self, i: int, columns: torch.Tensor) -> bool:
        """Distinct columns of the row, as many as there are, with the scores of the right ones: any order, ties free."""
        ordered = columns.sort(1).values
        distinct = not bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())
        inside = bool((columns < self.lengths[i][:, None]).all())
        right = self.expected(i)
        return distinct and inside and torch.equal((columns >= 0).sum(1), (right >= 0).sum(1)) and torch.equal(self._scores(i, columns), self._scores(i, right))

    def columns_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The columns that slots stand for (pages are distinct), -1 where a slot is none of the row's."""
        page_of = torch.full((self.table.numel() + 1,), -1, device=DEVICE, dtype=torch.int64)
        page_of[self.table.flatten().long()] = torch.arange(self.table.numel(), device=DEVICE)
        at = page_of[slots.clamp(min=0).long() // PAGE]
        mine = (slots >= PAGE) & (at // self.table.shape[1] == torch.arange(self.case.rows, device=DEVICE)[:, None])
        return torch.where(mine, at % self.table.shape[1] * PAGE + slots % PAGE, -1)


@dataclass(frozen=True)
class Provider:
    """``call(i)`` runs input set i; ``right(i, tensors)`` judges what a call returned."""

    name: str
    call: Callable[[int], Any]
    right: Callable[[int, list[torch.Tensor]], bool]


class Bench:
    def __init__(self, replays: Any) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(7)
        self.pool = torch.empty(FLOATS, device=DEVICE)
        for part in self.pool.split(1 << 26):
            part.normal_(generator=generator)
        self.replays, self.peers = replays, self._load_peers()
        self.rows: list[dict[str, Any]] = []
        self.wanted = results.chosen_by("TOPK_PROVIDERS")

    def _load_peers(self) -> Any:
        folder = os.environ.get("PEERS_DIR")
        if not folder:
            return None
        sys.path.insert(0, str(Path(folder).resolve()))
        import peers  # type: ignore[import-not-found]

        return peers

    def providers(self, inputs: Inputs) -> list[Provider]:
        case = inputs.case
        logits, lengths, k = inputs.logits, inputs.lengths, case.k
        found = list(self._ours(inputs))
        if case.op == "topk" and case.table not in ("ragged", "short"):
            found.append(Provider("torch", lambda i: torch.topk(logits[i], k, dim=1, sorted=False), lambda i, got: inputs.same_scores(i, got[1])))
        if self.peers is None:
            return found
        if case.op == "topk":
            skipped = ("empty", "torch_bare", "torch_compiled", "torch_masked")
            for name, (prepare, accepts) in self.peers.TOPK_PEERS.items():
                if name not in skipped and accepts(case.rows, k, case.columns, case.columns) and (case.dtype == "float32" or name in getattr(self.peers, "BFLOAT16", ())):
                    call, out = prepare(case.rows, k, case.columns, case.columns), torch.full((case.rows, k), -7, device=DEVICE, dtype=torch.int32)
                    found.append(Provider(name, lambda i, call=call, out=out: (call(logits[i], lengths[i], out), out)[1:], lambda i, got: inputs.same_scores(i, got[0])))  # type: ignore[misc]
        elif case.op == "topk_slots":
            for name, (prepare, accepts) in getattr(self.peers, "SLOT_PEERS", {}).items():
                if accepts(case.rows, k, case.columns, PAGE):
                    call, out = prepare(case.rows, k, case.columns, PAGE), torch.full((case.rows, k), -7, device=DEVICE, dtype=torch.int32)
                    found.append(
                        Provider(
                            name,
                            lambda i, call=call, out=out: (call(logits[i], lengths[i], inputs.requests, inputs.table, out), out)[1:],  # type: ignore[misc]
                            lambda i, got: inputs.same_scores(i, inputs.columns_of(got[0])),
                        )
                    )
        return found

    def _ours(self, inputs: Inputs) -> Iterator[Provider]:
        case, ops = inputs.case, torch.ops.dsv4_ops
        logits, lengths, k = inputs.logits, inputs.lengths, case.k
        if case.op == "topk":
            yield Provider("dsv4_ops", lambda i: ops.topk(logits[i], lengths[i], k), lambda i, got: torch.equal(got[0], inputs.expected(i)))
        elif case.op == "topk_values":

            def both(i: int, got: list[torch.Tensor]) -> bool:
                return torch.equal(got[1], inputs.expected(i)) and torch.equal(got[0], logits[i].gather(1, inputs.expected(i).long()))

            yield Provider("dsv4_ops", lambda i: ops.topk_values(logits[i], lengths[i], k), both)
        else:
            where = (inputs.requests, inputs.valid, inputs.table)

            def slots(i: int, got: list[torch.Tensor]) -> bool:
                right = _global_torch(inputs.expected(i), *where, block_size=PAGE)
                return torch.equal(got[0], right[0]) and torch.equal(got[1], right[1])

            yield Provider("dsv4_ops", lambda i: ops.topk_slots(logits[i], lengths[i], *where, k, PAGE), slots)
            yield Provider("dsv4_ops: topk, then global_topk_indices", lambda i: ops.global_topk_indices(ops.topk(logits[i], lengths[i], k), *where, block_size=PAGE), slots)

    def run(self, case: Case, turn: int = 0) -> None:
        inputs = Inputs(case, self.pool, turn)
        params = {"rows": case.rows, "columns": case.columns, "k": case.k, "dtype": case.dtype}
        providers = [p for p in self.providers(inputs) if self.wanted(p.name)]
        for provider in reversed(providers) if turn % 2 else providers:
            row: dict[str, Any] = {"op": case.op, "case": case.name, "params": params, "provider": provider.name}
            calls: list[Call] = [functools.partial(provider.call, i) for i in range(inputs.count)]
            try:
                row["ok"] = provider.right(0, as_list(calls[0]()))
                if row["ok"]:
                    times, last = self.replays.measure(calls)
                    row["ok"] = provider.right(inputs.count - 1, last)
                    row.update(times if row["ok"] else {})
            except Exception as error:
                row.update(ok=False, skipped=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            self.rows.append(row)

    def empty_kernel(self) -> tuple[str, float]:
        """What the timing itself adds: an empty kernel where the peers bring one, else the smallest of PyTorch's."""
        name, call = "fill_ of one element", functools.partial(torch.zeros(1, device=DEVICE).fill_, 1)
        if self.peers is not None and "empty" in self.peers.TOPK_PEERS:
            name, call = "empty kernel of 132 blocks", functools.partial(self.peers.TOPK_PEERS["empty"][0](1, 1, 1, 1), None, None, None)
        return name, self.replays.measure([call] * 32)[0]["us_p50"]

    def host_cost(self) -> dict[str, float]:
        """Microseconds from the Python call to its return, the GPU kept behind: what a call costs outside graphs."""
        x, lengths = self.pool[: 8 * 2048].view(8, 2048), torch.full((8,), 2048, device=DEVICE, dtype=torch.int32)
        table = torch.ones(8, 32, device=DEVICE, dtype=torch.int32)
        where = (torch.zeros(8, device=DEVICE, dtype=torch.int32), torch.ones(8, device=DEVICE, dtype=torch.bool), table)
        calls: dict[str, Call] = {
            "dsv4_ops.topk": lambda: dsv4_ops.topk(x, lengths, 512),
            "torch.ops.dsv4_ops.topk": lambda: torch.ops.dsv4_ops.topk(x, lengths, 512),
            "dsv4_ops.topk_slots": lambda: dsv4_ops.topk_slots(x, lengths, *where, 512, 64),
            "torch.ops.dsv4_ops.topk_slots": lambda: torch.ops.dsv4_ops.topk_slots(x, lengths, *where, 512, 64),
            "torch.topk": lambda: torch.topk(x, 512),
        }
        costs = {}
        for name, call in calls.items():
            times = []
            for _ in range(30):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(50):
                    call()
                times.append((time.perf_counter() - start) / 50 * 1e6)
            costs[name] = round(sorted(times)[15], 2)
        return costs


def as_list(result: Any) -> list[torch.Tensor]:
    return list(testing.outputs(result))


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    if "_C_cuda" not in dsv4_ops.loaded:
        print(f"dsv4_ops._C_cuda is not loaded ({dsv4_ops.skipped.get('_C_cuda')}): the PyTorch path would be measured")
        return 1
    start, runs = time.perf_counter(), int(os.environ.get("RUNS", "3"))
    filters = {name: os.environ[name] for name in ("TOPK_TABLES", "TOPK_ROWS", "TOPK_COLUMNS", "TOPK_PROVIDERS") if os.environ.get(name)}
    in_table, in_rows, in_columns = (results.chosen_by(name) for name in ("TOPK_TABLES", "TOPK_ROWS", "TOPK_COLUMNS"))
    wanted = [case for case in cases() if in_table(case.table) and in_rows(case.rows) and in_columns(case.columns)]
    if not wanted:
        print(f"no case is left of {filters}")
        return 1
    bench = Bench(ColdReplays())
    kernel, floor = bench.empty_kernel()
    env = {"copy_GBps": copy_rate(), "empty_kernel_us": floor, "empty_kernel": kernel, "backends": {op.name: op.backends["cuda"] for op in testing.ops() if op.family in ("topk", "topk_slots", "global_indices")}}
    host = bench.host_cost()

    def keep(name: str, done: int, quiet: bool) -> dict[str, Any]:
        rows = topk_summary.median_of_runs(bench.rows)
        content = {"method": METHOD.format(runs=done), "runs": done, **({"narrowed": filters} if filters else {}), "host_us_a_call": host, "summary": topk_summary.summary(rows), "wall_s": round(time.perf_counter() - start, 1), "rows": rows}
        results.write(name, env, quiet, **content)
        return content

    done = 0
    content: dict[str, Any] = {}

    def record(name: str) -> None:
        content.update(keep(name, done, quiet=False))

    with results.measuring("topk", filters, record):
        for turn in range(runs):
            for case in wanted:
                if turn == 0 or case.table == "full":
                    bench.run(case, turn)
            done = turn + 1
            keep("topk-part", done, quiet=True)  # what is measured stays, should a later provider take the process down
    print(topk_summary.text(content["summary"], content["rows"]))
    print(f"host cost of a call, us: {host}; empty kernel {floor} us; copy {env['copy_GBps']} GB/s; {content['wall_s']} s")
    return 0 if all(row["ok"] for row in content["rows"] if row["provider"].startswith("dsv4_ops")) else 1


if __name__ == "__main__":
    sys.exit(main())
