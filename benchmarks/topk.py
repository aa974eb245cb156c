"""Row-wise top-k: ours, ``torch.topk``, and the peers of a folder named by PEERS_DIR, in one process.

Each row is checked in the same run before it is timed: indices against the PyTorch path of this package (exact), peers
as sets of values. Times are medians of replays of a CUDA graph that holds one call for each of several input sets; 256
MB are read before each replay, so that nothing of the inputs is in L2. ``torch`` is ``torch.topk(sorted=False)``, which
knows no lengths: it stands beside full rows only.

PEERS_DIR holds a Python file ``peers.py`` with ``TOPK_PEERS = {name: (prepare, accepts)}``, where ``accepts(rows, k,
width, stride)`` tells what a peer takes and ``prepare(rows, k, width, max_len)`` gives ``call(logits, lengths, out)``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dsv4_ops
from dsv4_ops.topk import _topk_torch

from . import results

ROWS = (1, 4, 8, 16, 32, 48, 64, 128, 133, 256)
COLUMNS = (2048, 8192, 16384, 32768, 65536, 131072, 262144)
VALUES = ("normal", "all equal", "16 values", "sigma 1e-5", "2048 finite", "ascending", "descending")
FLOATS = 560 << 20  # of the pool that inputs are cut from
REPLAYS = 11
METHOD = "cold L2 (256 MB read before each replay), CUDA graph of one call for each of 4 to 32 input sets, us a call over 11 replays"

Call = Callable[[torch.Tensor, torch.Tensor], Any]


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


def cases() -> Iterator[dict[str, Any]]:
    for columns in COLUMNS:
        for rows in ROWS:
            yield {"case": "full", "rows": rows, "columns": columns, "k": 512}
    for k in (1024, 2048):
        for rows in (1, 8, 64):
            for columns in (8192, 32768, 131072):
                yield {"case": "full", "rows": rows, "columns": columns, "k": k}
    for kind in VALUES:
        for rows, columns in ((8, 8192), (8, 65536), (64, 65536), (128, 131072)):
            yield {"case": f"values: {kind}", "rows": rows, "columns": columns, "k": 512}
    for rows in (1, 8, 32, 64, 128, 256):
        yield {"case": "ragged: lengths uniform in [0, columns]", "rows": rows, "columns": 131072, "k": 512}
    for rows, length in ((1, 600), (8, 2048), (64, 8192), (256, 32768)):
        yield {"case": f"short: length {length}", "rows": rows, "columns": 262144, "k": 512}
    for rows, columns in ((8, 8192), (8, 65536), (64, 32768), (128, 131072)):
        yield {"case": "full", "rows": rows, "columns": columns, "k": 512, "dtype": "bfloat16"}
        yield {"case": "full", "rows": rows, "columns": columns, "k": 512, "op": "topk_values"}


class Bench:
    def __init__(self) -> None:
        self.generator = torch.Generator(device="cuda").manual_seed(7)
        self.pool = torch.empty(FLOATS, device="cuda")
        for part in self.pool.split(1 << 26):
            part.normal_(generator=self.generator)
        self.flushed, self.sink = torch.ones(64 << 20, device="cuda"), torch.zeros((), device="cuda")
        self.peers = self.load_peers()
        self.rows: list[dict[str, Any]] = []

    def load_peers(self) -> dict[str, Any]:
        folder = os.environ.get("PEERS_DIR")
        if not folder:
            return {}
        sys.path.insert(0, folder)
        import peers  # type: ignore[import-not-found]

        skipped = ("empty", "torch_bare", "torch_compiled", "torch_masked")
        return {name: peer for name, peer in peers.TOPK_PEERS.items() if name not in skipped}

    def measure(self, calls: list[Callable[[], Any]]) -> dict[str, float]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
        for before, after in events:
            self.sink.copy_(self.flushed.sum())
            before.record()
            graph.replay()
            after.record()
        torch.cuda.synchronize()
        times = sorted(before.elapsed_time(after) * 1000 / len(calls) for before, after in events)
        return {f"us_p{p}": round(times[len(times) * p // 100], 3) for p in (20, 50, 80)}

    def record(self, case: dict[str, Any], provider: str, ok: Callable[[], bool], calls: list[Callable[[], Any]]) -> None:
        params = {"rows": case["rows"], "columns": case["columns"], "k": case["k"], "dtype": case.get("dtype", "float32")}
        row = {"op": case.get("op", "topk"), "case": case["case"], "params": params, "provider": provider}
        try:
            row["ok"] = bool(ok())
            if row["ok"]:
                row.update(self.measure(calls))
        except Exception as error:
            row.update(ok=False, skipped=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        self.rows.append(row)

    def run(self, case: dict[str, Any]) -> None:
        rows, columns, k, kind = case["rows"], case["columns"], case["k"], case["case"]
        dtype = getattr(torch, case.get("dtype", "float32"))
        size = rows * columns
        count = min(max(min((2 << 30) // (size * 4), 32), 4), FLOATS // size)
        sets = [self.pool[i * size : (i + 1) * size].view(rows, columns) for i in range(count)]
        if kind.startswith("values: ") and kind != "values: normal":
            sets = [values(kind[len("values: ") :], x) for x in sets]
        sets = [x.to(dtype) for x in sets]
        if kind.startswith("ragged"):
            lengths = torch.randint(0, columns + 1, (rows,), generator=self.generator, device="cuda", dtype=torch.int32)
        else:
            length = int(kind.split()[-1]) if kind.startswith("short") else columns
            lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
        expected = _topk_torch(sets[0], lengths, k)

        op = getattr(torch.ops.dsv4_ops, case.get("op", "topk"))

        def right() -> bool:
            got = op(sets[0], lengths, k)
            if not isinstance(got, tuple):
                return torch.equal(got, expected)
            return torch.equal(got[1], expected) and torch.equal(got[0], sets[0].gather(1, expected.long()))

        self.record(case, "dsv4_ops", right, [lambda x=x: op(x, lengths, k) for x in sets])
        full = int(lengths.min()) == columns
        chosen = sets[0].gather(1, expected.clamp(min=0).long()).masked_fill(expected < 0, -torch.inf).sort(1).values
        if full:
            self.record(case, "torch", lambda: torch.equal(sets[0].topk(k, 1).values.sort(1).values, chosen), [lambda x=x: torch.topk(x, k, dim=1, sorted=False) for x in sets])
        if dtype != torch.float32 or "op" in case:
            return
        for name, (prepare, accepts) in self.peers.items():
            if not accepts(rows, k, columns, columns):
                continue
            call, out = prepare(rows, k, columns, columns), torch.empty((rows, k), device="cuda", dtype=torch.int32)

            def agrees(call: Call = call, out: torch.Tensor = out) -> bool:
                out.fill_(-7)
                call(sets[0], lengths, out)
                got = sets[0].gather(1, out.clamp(min=0).long()).masked_fill(out < 0, -torch.inf).sort(1).values
                return torch.equal(got, chosen)

            self.record(case, name, agrees, [lambda x=x, call=call, out=out: call(x, lengths, out) for x in sets])

    def host_cost(self) -> dict[str, float]:
        """Microseconds from the Python call to its return, the GPU kept behind: what a call costs outside graphs."""
        x, lengths = self.pool[: 8 * 2048].view(8, 2048), torch.full((8,), 2048, device="cuda", dtype=torch.int32)
        calls = {"dsv4_ops.topk": lambda: dsv4_ops.topk(x, lengths, 512), "torch.ops.dsv4_ops.topk": lambda: torch.ops.dsv4_ops.topk(x, lengths, 512), "torch.topk": lambda: torch.topk(x, 512)}
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

    def copy_rate(self) -> float:
        source, target = self.pool[: 256 << 20], torch.empty(256 << 20, device="cuda")
        times = []
        for _ in range(12):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            target.copy_(source)
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after))
        return round(2 * source.numel() * 4 / (sorted(times)[6] / 1e3) / 1e9, 1)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    if "_C_cuda" not in dsv4_ops.loaded:
        print(f"dsv4_ops._C_cuda is not loaded ({dsv4_ops.skipped.get('_C_cuda')}): the PyTorch path would be measured")
        return 1
    start = time.perf_counter()
    bench = Bench()
    for case in cases():
        bench.run(case)
    results.write("topk", method=METHOD, host_us_a_call=bench.host_cost(), copy_GBps=bench.copy_rate(), wall_s=round(time.perf_counter() - start, 1), rows=bench.rows)
    for row in bench.rows:
        params = row["params"]
        print(f"{row['op']:12} {row['case']:40} {params['rows']:4} x {params['columns']:7} k {params['k']:5} {params['dtype']:9} {row['provider']:16} {row.get('us_p50', row.get('skipped', 'WRONG'))}")
    return 0 if all(row["ok"] for row in bench.rows if row["provider"] == "dsv4_ops") else 1


if __name__ == "__main__":
    sys.exit(main())
