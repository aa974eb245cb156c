"""What workspace lanes cost, and that they are needed: bytes and microseconds of one and two lanes, poisoned replays, controls that corrupt.

A step is target and draft, each a CUDA graph, in one pool. Both lane counts are measured in turn, a batch of steps each, so that
clocks and temperature are shared. Runs on a CPU too (``--device cpu``), without graphs and with a small model, to see that it works.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from . import results

sys.path.insert(0, str(results.ROOT))  # for the toys and the campaign, which the tests share
from tests import lane_campaign

BATCHES, STEPS = 11, 20
METHOD = f"wall time of a step (inputs from the host, target and draft replayed), mean of {STEPS} steps, over {BATCHES} batches; lane counts take turns"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_turn(device: str, calls: dict[int, Callable[[], Any]]) -> dict[int, dict[str, float]]:
    """Percentiles of the microseconds of each call, by its key."""
    times: dict[int, list[float]] = {key: [] for key in calls}
    for call in calls.values():
        call()
    for _ in range(BATCHES):
        for key, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(STEPS):
                call()
            synchronize(device)
            times[key].append((time.perf_counter() - start) / STEPS * 1e6)
    return {key: {f"us_p{p}": round(sorted(each)[len(each) * p // 100], 1) for p in (20, 50, 80)} for key, each in times.items()}


def campaign_rows(device: str, replays: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for order in ("ascending", "descending"):
        start = time.perf_counter()
        outcome = lane_campaign.campaign(device, ascending=order == "ascending", replays=replays, inputs=32 if device == "cuda" else 2)
        params = {"sizes": list(lane_campaign.SIZES), "replays": outcome.replays, "retired_bytes": outcome.retired_bytes}
        rows.append({"op": "poisoned replays", "case": f"captured in {order} order", "params": params, "provider": "dsv4_ops", "ok": outcome.mismatches == 0, "mismatches": outcome.mismatches, "seconds": round(time.perf_counter() - start, 2)})
    controls: dict[str, Callable[[bool], bool]] = {
        "scratch read by a later graph, the draft between": lambda lanes: lane_campaign.pieces_with_the_draft_between(device, int(lanes)) == 0,
        "growth after capture": lambda lanes: lane_campaign.growth_after_capture(device, lanes),
    }
    if device == "cuda":
        controls["overlapping streams"] = lambda lanes: lane_campaign.overlapping_streams(int(lanes)) == 0
    for case, right in controls.items():
        rows.append({"op": "control", "case": case, "params": {}, "provider": "dsv4_ops", "ok": right(True), "wrong_without": not right(False)})
    return rows


def toy_rows(device: str) -> list[dict[str, Any]]:
    """A step whose ops work in scratch, 256 rows: what a lane costs where every op uses one."""
    from dsv4_ops.graphs import GraphPool

    size, calls, bytes_, ok = 256, {}, {}, {}
    x = torch.rand(size, lane_campaign.COLUMNS, device=device)
    for lanes in (1, 2):
        with lane_campaign.fresh_manager(device, lanes) as manager:
            pool = GraphPool(device, manager=manager)
            steps = [pool.step(side, function, {"x": lane_campaign.X_INPUT}, sizes=(size,), lane=min(i, lanes - 1)) for i, (side, function) in enumerate(lane_campaign.SIDES.items())]
            pool.capture()
            ok[lanes] = all(torch.equal(a, b) for step in steps for a, b in zip(step(x).copy(), step.eager(x), strict=True))
            bytes_[lanes] = manager.nbytes
        calls[lanes] = lambda steps=steps: [step(x) for step in steps]
    times = in_turn(device, calls)
    return [{"op": "toy step", "case": f"{size} rows, all in scratch", "params": {"lanes": n, "workspace_bytes": bytes_[n]}, "provider": "dsv4_ops", "ok": ok[n], **times[n]} for n in (1, 2)]


def staged_step(executor: Any, inputs: Sequence[torch.Tensor]) -> None:
    """A step of an engine with its draft, on inputs that the host writes, as the engine runs it."""
    staged = executor._first.stage(32)
    for mine, given in zip(staged.tensors, inputs, strict=True):
        mine.copy_(given)
    executor._draft(staged.run())


def engine_rows(device: str, size: str) -> list[dict[str, Any]]:
    """A decode step of 8 requests with 3 draft tokens each, multi-token prediction, random weights of the given size."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    from dsv4_ops.engine import executor, tiny
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.drafters import MTPDrafter
    from dsv4_ops.engine.engine import Engine
    from dsv4_ops.engine.proposers import MTPProposer
    from dsv4_ops.engine.requests import Request
    from dsv4_ops.engine.step import build_step

    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model_config = DeepseekV4Config(**tiny.SIZES[size])
        model: Any = DeepseekV4ForCausalLM(model_config).eval().requires_grad_(False)
        drafter = MTPDrafter(model_config, model).eval().requires_grad_(False)
        for module in (model, drafter):
            for name, parameter in module.named_parameters():
                parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0, 0.02)
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1024, "num_speculative_tokens": 3, "kv_dtype": "fp8", "capture_sizes": (8, 32), "device": device}
    requests = [Request(i, tuple((17 * i + 5 * j) % 250 for j in range(40)), 12) for i in range(8)]
    calls, rows, tokens = {}, [], []
    for lanes in (1, 2):
        with lane_campaign.fresh_manager(device, lanes), mock.patch.object(executor, "num_workspace_lanes", lambda config, lanes=lanes: lanes):
            config = EngineConfig(mode="mtp", **settings)
            engine = Engine(model, config, MTPProposer(drafter, config))
            seen: list[Any] = []
            run = engine.executor.run
            with mock.patch.object(engine.executor, "run", lambda groups, batch, engine=engine, run=run, seen=seen: (seen.append(build_step(engine.config, groups, batch)), run(groups, batch))[1]):
                tokens.append([c.token_ids for c in engine.generate(requests)])
            report = engine.executor.pool.report()
        step, sample = next(pair for pair in reversed(seen) if pair[0].input_ids.shape[0] == 32)
        calls[lanes] = functools.partial(staged_step, engine.executor, (*step, *sample))
        params = {"lanes": lanes, "workspace_bytes": sum(r.nbytes for r in report.workspace), "graph_pool_bytes": report.pool_bytes, "buffer_bytes": sum(s.input_bytes + s.output_bytes for s in report.steps), "kv_dtype": "fp8"}
        rows.append({"op": "engine step", "case": f"size {size}, mtp, 8 requests of 4 rows", "params": params, "provider": "dsv4_ops"})
    times = in_turn(device, calls)
    return [{**row, "ok": tokens[0] == tokens[1], **times[row["params"]["lanes"]]} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--replays", type=int, help="of the poisoned campaign, in each order (default: 10000 on a GPU, 200 on a CPU)")
    options = parser.parse_args()
    device = options.device
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []

    def record(name: str) -> None:
        if device == "cuda":
            results.write(name, method=METHOD, seconds=round(time.perf_counter() - started, 1), rows=rows)

    with results.measuring("lanes", options.replays, record):
        rows += campaign_rows(device, options.replays or (10_000 if device == "cuda" else 200))
        for measure in (lambda: toy_rows(device), lambda: engine_rows(device, "flash" if device == "cuda" else "tiny")):
            try:
                rows += measure()
            except Exception as error:
                rows.append({"op": "step", "case": "", "params": {}, "provider": "dsv4_ops", "ok": False, "skipped": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"})
    for row in rows:
        print({key: value for key, value in row.items() if key != "provider"})
    return 0 if all(row["ok"] and row.get("wrong_without", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
