"""The engine's benchmark on a CPU: a short soak holds, a wrong token in it is found, parts of a step are named, a part that fails is a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import engine as benchmark
from dsv4_ops.engine.engine import Engine
from dsv4_ops.engine.runner import default_model

SHORT: dict[str, Any] = {"steps": 45, "kinds": 4, "answer": 16, "seqs": 4}


@pytest.mark.parametrize("mode", ["plain", "dspark"])
def test_short_soak(mode: str) -> None:
    row = benchmark.soak(default_model(), mode, "cpu", **SHORT)
    assert row["ok"], row
    assert row["params"]["steps"] >= 45 and row["params"]["preemptions"] and row["params"]["drains"] and row["params"]["requests"] > 5


def test_soak_finds_one_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, done = Engine._commit, []

    def wrong(self: Engine, batch: Any, sampled: Any, *rest: Any) -> Any:
        if len(batch) > 1 and batch[1].samples and not done and self.stats.steps > 10:
            done.append(batch[1].sequence.request)
            sampled = sampled.clone()
            sampled[1, 0] = (sampled[1, 0] + 1) % 256
        return commit(self, batch, sampled, *rest)

    monkeypatch.setattr(Engine, "_commit", wrong)
    row = benchmark.soak(default_model(), "plain", "cpu", **SHORT)
    assert done and not row["ok"] and len(row["different"]) == 1, row


def test_parts_of_a_step_are_named() -> None:
    row = benchmark.profile_row("shipped", default_model(), "cpu", "dspark", 20, 1)
    assert row["ok"] and sum(part["share"] for part in row["parts"].values()) == pytest.approx(1, abs=0.03)
    assert {"experts", "compressor", "projections", "dsv4_ops::prepare_decode_step", "dsv4_ops::prepare_draft_step", "dsv4_ops::topk_slots", "dsv4_ops::rejection_sample"} <= set(row["parts"])


def test_variants_of_a_step_agree_and_a_wrong_path_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE

    rows = list(benchmark.step_rows("shipped", default_model(), "cpu", ("plain",), 20, 1))
    assert [(row["params"]["variant"], row["ok"]) for row in rows] == [("graphs", True), ("eager", True), ("graphs, PyTorch paths", True)] and all(row["steps_per_s"] > 0 for row in rows)
    right = SPARSE_MLA_DECODE.torch_impl
    assert right is not None
    monkeypatch.setattr(SPARSE_MLA_DECODE, "torch_impl", lambda *args, **kwargs: tuple(part * 1.1 for part in right(*args, **kwargs)))
    wrong = list(benchmark.step_rows("shipped", default_model(), "cpu", ("plain",), 20, 1))[-1]
    assert not wrong["ok"] and "steps_per_s" not in wrong


def test_a_part_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Iterator[Any]:
        raise RuntimeError("no such kernel\nand a long trace")

    monkeypatch.setenv("RESULTS_DIR", str(tmp_path))
    monkeypatch.setattr(benchmark, "soak", fails)
    monkeypatch.setattr(benchmark, "served", lambda case, *_: ([{"op": "engine", "case": case, "params": {}, "provider": "dsv4_ops", "ok": True}], {"findings": []}))
    assert benchmark.main(["--device", "cpu", "--parts", "soak,shipped"]) == 1
    (written,) = tmp_path.rglob("engine.json")
    document = json.loads(written.read_text())
    assert [(row["op"], row["ok"]) for row in document["rows"]] == [("soak", False), ("engine", True)]
    assert document["rows"][0]["error"] == "RuntimeError: no such kernel" and set(document["seconds"]) == {"soak", "shipped"}
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu", "--parts", "shiped"])
    assert benchmark.main(["--device", "cpu", "--parts", "soak,shipped", "--seconds", "-1"]) == 0
    assert all("--seconds were over" in row["skipped"] for row in json.loads(written.read_text())["rows"])


def test_tokens_are_compared_with_the_cpus() -> None:
    row = benchmark.like_cpu(default_model(), "cpu", max_tokens=2)
    assert row["ok"] and row["params"] == {"mode": "plain", "requests": 4, "tokens": 8} and row["findings"] == []


def test_lanes_measures_the_engines_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers of lanes give the same tokens, and the timed call is a whole step: it writes the outputs of target and draft again."""
    from benchmarks import lanes

    monkeypatch.setattr(lanes, "BATCHES", 1)
    monkeypatch.setattr(lanes, "STEPS", 1)
    steps: list[tuple[int, int]] = []
    in_turn = lanes.in_turn

    def counted(device: str, calls: dict[int, Any]) -> dict[int, dict[str, float]]:
        for call in calls.values():
            executor = call.args[0]
            before = executor._first.calls, executor._draft.calls
            call()
            steps.append((executor._first.calls - before[0], executor._draft.calls - before[1]))
        return in_turn(device, calls)

    monkeypatch.setattr(lanes, "in_turn", counted)
    rows = lanes.engine_rows("cpu", "tiny")
    assert [(row["params"]["lanes"], row["ok"]) for row in rows] == [(1, True), (2, True)] and all(row["us_p50"] > 0 for row in rows)
    assert steps == [(1, 1), (1, 1)]
