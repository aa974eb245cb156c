"""Small kernels: index builds, draft inputs, KV rows, sampling; ours, plain PyTorch, and the peers of a folder named by PEERS_DIR.

What is measured stands in the modules of FAMILIES, each with a function ``cases()``. A case names an op and draws calls of
it; peers are prepared for the same call and must give the same result. Everything is checked against the op's reference in
the same run, before it is timed and after: a wrong result has no time. Hot: 64 calls on one input set. Cold: one call
on each of 64 sets, after 256 MB were read. Calls follow one another as in a captured step: a kernel of ours starts while the
one before it ends (programmatic dependent launch), one of a peer after it. ``empty`` and ``one_store`` are Triton kernels that do nothing, or store one
block: the floor of a launch. PEERS_DIR holds ``triton_extracted.py``, the peers' ``@triton.jit`` functions (``benchmarks/peers``).

Arguments narrow the run to ops (``python -m benchmarks.kernels global_topk_indices``), which is written as ``kernels-part.json``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsv4_ops import testing
from dsv4_ops.bench.cases import outcome
from dsv4_ops.bench.run import on_cpu
from dsv4_ops.bench.timing import Call, ColdReplays, copy_rate, launches
from dsv4_ops.testing import Op, Sample

from . import results

FAMILIES = ("kernels_index", "kernels_step")
CALLS = 64
DEVICE = "cuda"
METHOD = (
    f"CUDA graph of {CALLS} calls, us a call, of 11 replays; hot: all on one input set; cold: one on each of {CALLS} sets after 256 MB were read. "
    "A Triton kernel of dsv4_ops starts while the one before it ends (programmatic dependent launch), as it does after any kernel of a captured step; "
    "floors are launched plainly, peers as their authors do"
)
WITHIN_US, AHEAD = 0.3, 1.05

Prepared = tuple[Call, Sequence[torch.Tensor | None]]
"""A call without arguments, and the tensors that it writes: the op's outputs, or what it mutates, in order; None for one that a peer lacks."""

Peer = Callable[[ModuleType, Sample], Prepared]


@dataclass(frozen=True)
class Case:
    op: str
    case: str
    params: dict[str, Any]
    make: Callable[..., Sample]
    """``make(seed=, device=, **params)`` draws a call of the op."""
    peers: dict[str, Peer] = field(default_factory=dict)
    """Name -> ``prepare(triton_extracted, sample)``."""
    same: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] | None = None
    """Raises AssertionError when results differ; without it they must be equal, floats within the tolerances of ``testing``."""
    sets: int = CALLS
    """Input sets of the cold measurement, fewer where they are large."""
    ours: dict[str, Callable[[Sample], Call]] = field(default_factory=dict)
    """Name -> ``prepare(sample)``: the same result by other ops of this package."""
    at_most_us: float | None = None
    ahead: float = AHEAD
    """What the case has to reach: a time, or else so many times faster than the best peer or near a kernel with one store."""


def load_peers() -> ModuleType | None:
    folder = os.environ.get("PEERS_DIR")
    if not folder:
        return None
    spec = importlib.util.spec_from_file_location("triton_extracted", Path(folder) / "triton_extracted.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"no triton_extracted.py in PEERS_DIR = {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Bench:
    def __init__(self, timer: Any, peers: ModuleType | None) -> None:
        self.timer, self.peers, self.ops = timer, peers, {op.name: op for op in testing.ops()}
        self.rows: list[dict[str, Any]] = []

    def record(self, head: dict[str, Any], provider: str, prepare: Callable[[], list[Call]], right: Callable[[Any], None] | None, caches: Sequence[str] = ("hot", "cold")) -> None:
        """Add a row for each cache state. ``right(result of the first call)`` raises where the result is wrong."""
        for cache in caches:
            row = {**head, "params": {**head["params"], "cache": cache}, "provider": provider, "ok": False}
            self.rows.append(row)
            try:
                calls = prepare()
                result = calls[0]()
                if right is not None:
                    right(result)
                calls = calls[:1] * CALLS if cache == "hot" else calls
                times, _ = self.timer.measure(calls, cold=cache == "cold")
                if right is not None:
                    right(calls[0]())
                row.update(ok=True, launches=launches(calls[0]), **times)
            except AssertionError as error:
                row["wrong"] = str(error).strip()[:300]
            except Exception as error:
                row["skipped"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"

    def floors(self) -> None:
        from dsv4_ops.bench import floor

        for name, programs, call in floor.calls(DEVICE):
            self.record({"op": "floor", "case": name, "params": {"programs": programs}}, "triton", lambda call=call: [call] * CALLS, None)

    def run(self, case: Case) -> None:
        op: Op = self.ops[case.op]
        head = {"op": case.op, "case": case.case, "params": case.params}
        if case.at_most_us is not None or case.ahead != AHEAD:
            head["target"] = {"at_most_us": case.at_most_us} if case.at_most_us is not None else {"ahead": case.ahead}
        samples = [case.make(seed=seed, device=DEVICE, **case.params) for seed in range(case.sets)]
        reference = on_cpu(testing.clone_args(samples[0]) if op.mutates else samples[0])
        expected = outcome(op, reference, op.reference(*reference.args, **reference.kwargs))

        def right(result: Any) -> None:
            pairs = [(g.cpu(), e) for g, e in zip(result, expected, strict=True) if g is not None]
            got, want = tuple(g for g, _ in pairs), tuple(e for _, e in pairs)
            if op.mutates:  # pages with gaps
                got, want = tuple(g.contiguous() for g in got), tuple(w.contiguous() for w in want)
            if case.same is not None:
                case.same(got, want)
            else:
                testing.assert_same(got, want)

        def calls(function: Callable[..., Any]) -> list[Call]:
            # What is mutated belongs to one provider: another must not find its result there.
            mine = [testing.clone_args(s) for s in samples] if op.mutates else samples
            return [lambda s=s: outcome(op, s, function(*s.args, **s.kwargs)) for s in mine]

        backend = op.backends.get(DEVICE, "")
        self.record({**head, "backend": backend}, "dsv4_ops", lambda: calls(op.overload), right)
        for name, single in case.ours.items():
            self.record(head, name, lambda single=single: [single(s) for s in samples], right)
        for name, prepare in case.peers.items() if self.peers is not None else ():

            def prepared(prepare: Any = prepare) -> list[Call]:
                return [lambda c=c, outs=outs: (c(), tuple(outs))[1] for c, outs in (prepare(self.peers, s) for s in samples)]

            self.record(head, name, prepared, right)
        plain = op.torch_impl
        if plain is not None and backend != "torch":
            self.record(head, "torch", lambda: calls(plain), right, ("hot",))


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of our rows: the best peer over ours, and what is above a one-store kernel; ``met`` where one of both is enough."""
    store = {r["params"]["cache"]: r["us_p50"] for r in rows if r["op"] == "floor" and r["case"] == "one_store" and r["params"]["programs"] == 1 and r["ok"]}
    found = []
    for row in (r for r in rows if r["provider"] == "dsv4_ops"):
        same = [r for r in rows if (r["op"], r["case"], r["params"]) == (row["op"], row["case"], row["params"]) and r["ok"]]
        peers = [r["us_p50"] for r in same if r["provider"] != "torch" and not r["provider"].startswith("dsv4_ops")]
        verdict = {"op": row["op"], "case": row["case"], "params": row["params"], "us": row.get("us_p50")}
        if row["ok"]:
            cache = row["params"]["cache"]
            verdict["above_one_store_us"] = round(row["us_p50"] - store[cache], 3) if cache in store else None
            verdict["peer_us"], verdict["ahead"] = (min(peers), round(min(peers) / row["us_p50"], 3)) if peers else (None, None)
            near = verdict["above_one_store_us"]
            target = row.get("target", {"ahead": AHEAD})
            if "at_most_us" in target:
                verdict["met"] = row["us_p50"] <= target["at_most_us"]
            else:
                verdict["met"] = (near is not None and near <= WITHIN_US) or (verdict["ahead"] or 0) >= target["ahead"]
        else:
            verdict["met"] = False
        found.append(verdict)
    return found


def cases() -> Iterator[Case]:
    for name in FAMILIES:
        yield from importlib.import_module(f".{name}", __package__).cases()


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    start, wanted = time.perf_counter(), sys.argv[1:]
    bench, copied = Bench(ColdReplays(), load_peers()), copy_rate()

    def record(name: str) -> None:
        env = {"copy_GBps": copied, "empty_kernel_us": next((r["us_p50"] for r in bench.rows if r["case"] == "empty" and r["ok"]), None)}
        results.write(name, env, method=METHOD, summary=verdicts(bench.rows), wall_s=round(time.perf_counter() - start, 1), rows=bench.rows)

    with results.measuring("kernels", wanted, record):
        bench.floors()
        for case in cases():
            if not wanted or case.op in wanted:
                bench.run(case)
    summary = verdicts(bench.rows)
    for row in bench.rows:
        params = " ".join(f"{k} {v}" for k, v in row["params"].items())
        print(f"{row['op']:28} {row['case']:28} {params:44} {row['provider']:38} {row.get('us_p50', row.get('skipped', 'WRONG: ' + row.get('wrong', '')))}")
    for verdict in summary:
        if not verdict["met"]:
            print("target not met:", verdict)
    wrong = [row for row in bench.rows if row["provider"] == "dsv4_ops" and not row["ok"]]
    print(f"{len(bench.rows)} rows, {len(wrong)} of ours wrong or not run; {sum(v['met'] for v in summary)} of {len(summary)} targets met")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
