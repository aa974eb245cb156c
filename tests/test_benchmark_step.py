"""What the benchmark of index builds, steps, draft inputs and KV rows measures is right, on the CPU: ours, single ops, and a peer that is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import kernels, kernels_step
from benchmarks.kernels import Case
from dsv4_ops import testing
from dsv4_ops.testing import Sample

FIRST = list({(case.op, case.case): case for case in reversed(list(kernels.cases()))}.values())


class Untimed:
    def measure(self, calls: Sequence[Callable[[], Any]], cold: bool = True) -> tuple[dict[str, float], Any]:
        return {"us_p50": 1.0}, calls[0]()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> kernels.Bench:
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    return kernels.Bench(Untimed(), ModuleType("no peers"))


@pytest.mark.parametrize("case", FIRST, ids=lambda case: f"{case.op}-{case.case}".replace(" ", "_"))
def test_ours_and_single_ops_are_right(case: Case, bench: kernels.Bench) -> None:
    bench.run(dataclasses.replace(case, sets=2, peers={}))
    assert {row["provider"] for row in bench.rows} == {"dsv4_ops", *case.ours}
    for row in bench.rows:
        assert row["ok"], row


def test_wrong_and_idle_peers_have_no_time(bench: kernels.Bench) -> None:
    """Of an op that writes a cache, too: a peer does not find there what another wrote."""

    def idle(_: ModuleType, sample: Sample) -> kernels.Prepared:
        return (lambda: None), (sample.args[1],)

    def wrong(_: ModuleType, sample: Sample) -> kernels.Prepared:
        cache = testing.clone_args(sample).args[1]
        return (lambda: cache.fill_(7)), (cache,)

    (case,) = (case for case in FIRST if case.op == "kv_cache_insert")
    bench.run(dataclasses.replace(case, sets=2, peers={"idle": idle, "wrong": wrong}))
    assert {row["provider"]: row["ok"] for row in bench.rows} == {"dsv4_ops": True, "idle": False, "wrong": False}
    assert all("wrong" in row for row in bench.rows if not row["ok"])


def test_a_result_that_a_peer_lacks_is_not_compared(bench: kernels.Bench) -> None:
    def partial(_: ModuleType, sample: Sample) -> kernels.Prepared:
        lens = torch.full((1,), kernels_step.WINDOW, dtype=torch.int32)
        return (lambda: None), (None, None, None, None, lens, None, None)

    (case,) = (case for case in FIRST if case.case == "plain decode")
    bench.run(dataclasses.replace(case, sets=1, peers={"partial": partial}, ours={}))
    assert all(row["ok"] for row in bench.rows), bench.rows


@pytest.mark.parametrize(("us", "peer", "target", "met"), [
    (2.4, None, {"at_most_us": 2.5}, True), (2.6, 25.0, {"at_most_us": 2.5}, False), (2.0, 4.1, {"ahead": 2.0}, True), (2.2, 4.1, {"ahead": 2.0}, False), (1.1, 1.0, {"ahead": 2.0}, True),
])  # fmt: skip
def test_targets(us: float, peer: float | None, target: dict[str, float], met: bool) -> None:
    head = {"op": "x", "case": "y", "params": {"cache": "hot"}, "ok": True}
    rows: list[dict[str, Any]] = [{"op": "floor", "case": "one_store", "params": {"programs": 1, "cache": "hot"}, "provider": "triton", "ok": True, "us_p50": 0.9}]
    rows += [{**head, "provider": "dsv4_ops", "target": target, "us_p50": us}, {**head, "provider": "dsv4_ops, single ops", "us_p50": 0.1}]
    rows += [{**head, "provider": "peer", "us_p50": peer}] if peer is not None else []
    (verdict,) = kernels.verdicts(rows)
    assert verdict["met"] is met and verdict["peer_us"] == peer
