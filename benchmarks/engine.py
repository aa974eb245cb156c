"""The main job: the shipped requests in all decode modes with every check on, as ``python3 dev.py run`` does it."""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

from . import results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    from dsv4_ops.__main__ import parser as command_line
    from dsv4_ops.engine.runner import DONE, Run

    requests = results.ROOT / "dsv4_ops" / "engine" / "data" / "requests.jsonl"
    command = ["run", str(requests.relative_to(results.ROOT)), "--mode", "all", "--verify", "--device", device]
    started = time.perf_counter()
    run = Run(command_line().parse_args(command))
    code = run.run()
    seconds = time.perf_counter() - started
    rows = [
        {
            "op": "engine",
            "case": "shipped requests, tiny checkpoint",
            "params": {"mode": s.mode, "requests": s.requests, "tokens": s.tokens, "kv_dtype": "float32"},
            "provider": "dsv4_ops",
            "ok": code == DONE,
            **({"seconds": round(s.seconds, 2), "steps": s.steps, "mean_accepted": round(s.mean_accepted, 2), "accepted": {str(n): c for n, c in sorted(s.accepted.items())}} if code == DONE else {}),
        }
        for s in run.summaries
    ]
    method = f"wall time of each mode serving all requests; all_seconds also holds loading and --verify; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
    results.write("engine", command="python -m dsv4_ops " + " ".join(command), method=method, all_seconds=round(seconds, 1), checked=dict(run.checked), findings=[str(f) for f in run.findings], rows=rows)
    return code


if __name__ == "__main__":
    sys.exit(main())
