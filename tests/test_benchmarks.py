"""What benchmarks report, on the CPU: missed cells and wrong results are named, whoever they belong to."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results, sanitizer, topk, topk_summary
from dsv4_ops import testing

PEERS = '''
"""Peers of a test: one that is right, one that repeats a tied column, one that raises, one that writes nothing when it is replayed."""
import torch

calls = 0


def right(rows, k, width, max_len):
    def call(logits, lengths, out):
        columns = torch.arange(logits.shape[1])
        scores = torch.where(columns < lengths[:, None], logits.float(), -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :k]
        out.copy_(torch.where(torch.arange(k) < lengths[:, None], scores, -1))
    return call


def repeats(rows, k, width, max_len):
    def call(logits, lengths, out):
        right(rows, k, width, max_len)(logits, lengths, out)
        out[:, 0] = out[:, 1]
    return call


def raises(rows, k, width, max_len):
    def call(logits, lengths, out):
        raise RuntimeError("no such kernel\\nand a long trace")
    return call


def sleeps(rows, k, width, max_len):
    def call(logits, lengths, out):
        global calls
        calls += 1
        if calls % 2:
            right(rows, k, width, max_len)(logits, lengths, out)
    return call


def pages(rows, k, width, block_size):
    def call(logits, lengths, requests, table, out):
        right(rows, k, width, width)(logits, lengths, out)
        out.copy_(table[requests.long()].gather(1, out.long() // block_size) * block_size + out % block_size)
    return call


def pages_of_the_first_request(rows, k, width, block_size):
    def call(logits, lengths, requests, table, out):
        pages(rows, k, width, block_size)(logits, lengths, requests * 0, table, out)
    return call


always = lambda *sizes: True
TOPK_PEERS = {"right": (right, always), "repeats": (repeats, always), "raises": (raises, always), "sleeps": (sleeps, always), "refuses": (right, lambda *sizes: False), "empty": (None, always)}
BFLOAT16 = {"right"}
SLOT_PEERS = {"pages": (pages, always), "first": (pages_of_the_first_request, always)}
'''


class Once:
    """Stands for the timer: runs each call once."""

    def measure(self, calls: list[Callable[[], Any]]) -> tuple[dict[str, float], list[torch.Tensor]]:
        for call in calls:
            result = call()
        return {"us_p20": 1.0, "us_p50": 2.0, "us_p80": 3.0}, list(result) if isinstance(result, tuple) else [result]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> topk.Bench:
    (tmp_path / "peers.py").write_text(PEERS)
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "peers", raising=False)
    monkeypatch.setattr(topk, "DEVICE", "cpu")
    monkeypatch.setattr(topk, "FLOATS", 1 << 14)
    return topk.Bench(Once())


def judged(bench: topk.Bench) -> dict[str, Any]:
    return {row["provider"]: row.get("skipped", row["ok"]) for row in bench.rows}


def test_every_provider_is_checked_before_and_after_it_is_timed(bench: topk.Bench) -> None:
    bench.run(topk.Case("full", "full", 3, 256, k=16))
    assert judged(bench) == {"dsv4_ops": True, "torch": True, "right": True, "repeats": False, "raises": "RuntimeError: no such kernel", "sleeps": False}
    assert all(("us_p50" in row) == (row["ok"] is True) for row in bench.rows)


@pytest.mark.parametrize("case", [
    topk.Case("values", "values: all equal", 2, 256, k=16),
    topk.Case("values", "values: 2048 finite", 1, 2304, k=16),
    topk.Case("values", "values: descending", 2, 256, k=16),
    topk.Case("ragged", "ragged: lengths uniform in [0, columns]", 4, 256, k=16),
    topk.Case("short", "short: length 10", 2, 256, k=16),
    topk.Case("bfloat16", "full", 2, 256, k=16, dtype="bfloat16"),
    topk.Case("topk_values", "full", 2, 256, k=16, op="topk_values"),
])  # fmt: skip
def test_cases_of_every_table_run(bench: topk.Bench, case: topk.Case) -> None:
    bench.run(case)
    seen = judged(bench)
    assert seen["dsv4_ops"] is True and seen.get("right", True) is True and seen.get("repeats", False) is False
    assert ("torch" in seen) == (case.op == "topk" and case.table not in ("ragged", "short"))
    assert ("repeats" in seen) == (case.op == "topk" and case.dtype == "float32")


def test_slots_are_checked_page_by_page(bench: topk.Bench) -> None:
    bench.run(topk.Case("topk_slots", "full, pages of 64", 3, 256, k=16, op="topk_slots"))
    assert judged(bench) == {"dsv4_ops": True, "dsv4_ops: topk, then global_topk_indices": True, "pages": True, "first": False}


def test_the_cases_are_those_that_the_project_promises() -> None:
    cases = list(topk.cases())
    rows, columns = {1, 4, 8, 16, 32, 48, 64, 128, 133, 256}, {2048, 8192, 16384, 32768, 65536, 131072, 262144}
    assert {(c.rows, c.columns) for c in cases if c.table == "full" and c.k == 512} == {(r, c) for r in rows for c in columns}
    for k in (1024, 2048):
        assert {(c.rows, c.columns) for c in cases if c.table == "k" and c.k == k} == {(r, c) for r in rows for c in (8192, 32768, 131072)}
    assert len(set(cases)) == len(cases)
    full = {dataclasses.replace(c, table="full") for c in cases}
    for case in cases:
        if case.table == "ragged":
            assert topk.Case("full", "full", case.rows, case.columns) in full, "nothing to compare it with"


# ---- summary ---------------------------------------------------------------------------------------------------------


def row(provider: str, us: float | None, rows: int = 8, columns: int = 2048, k: int = 512, case: str = "full", op: str = "topk", dtype: str = "float32") -> dict[str, Any]:
    head = {"op": op, "case": case, "params": {"rows": rows, "columns": columns, "k": k, "dtype": dtype}, "provider": provider, "ok": us is not None}
    return head if us is None else head | {"us_p20": us - 0.1, "us_p50": us, "us_p80": us + 0.1}


def test_the_median_of_three_runs_is_recorded_and_a_failure_in_one_counts() -> None:
    merged = topk_summary.median_of_runs([row("dsv4_ops", us) for us in (5.0, 9.0, 6.0)] + [row("peer", 4.0), row("peer", None), row("peer", 4.0)])
    assert merged == [row("dsv4_ops", 6.0) | {"us_runs": [5.0, 9.0, 6.0]}, row("peer", None)]


def test_missed_cells_are_named_and_the_best_peer_is_the_fastest_right_one() -> None:
    rows = [row("dsv4_ops", 10.0), row("slow", 30.0), row("fast", 20.0), row("wrong", None)]
    rows += [row("dsv4_ops", 10.0, rows=4), row("slow", 10.2, rows=4), row("dsv4_ops: two ops", 1.0, rows=4)]
    rows += [row("dsv4_ops", 5.0, rows=64), row("dsv4_ops", 10.0, k=1024), row("slow", 9.6, k=1024)]
    found = topk_summary.summary(rows)
    first = found["k 512, full rows: best peer over ours"]
    assert (first["cells"], first["met"], first["geomean"]) == (2, 1, 1.428)
    assert first["missed"] == [{"case": "full", "rows": 4, "columns": 2048, "k": 512, "dtype": "float32", "us": 10.0, "best_peer": "slow", "peer_us": 10.2, "ratio": 1.02}]
    assert found["k 1024 and 2048, full rows: best peer over ours"]["missed"] == []
    assert [r["provider"] for r in found["wrong or not run"]] == ["wrong"]
    text = topk_summary.text(found, rows)
    assert "geometric mean 1.428 (asked 1.5: missed)" in text
    assert "missed: full, 4 x 2048, k 512: 10.0 us, slow 10.2 us, ratio 1.02" in text and "wrong or not run: wrong" in text and "20.00 (2.00)" not in text and "10.00 (2.00)" in text


def test_a_cell_where_ours_is_wrong_is_missed_and_spoils_the_mean() -> None:
    found = topk_summary.summary([row("dsv4_ops", None), row("peer", 9.0), row("dsv4_ops", 1.0, rows=4), row("peer", 9.0, rows=4)])
    part = found["k 512, full rows: best peer over ours"]
    assert part["met"] == 1 and part["geomean"] == 0 and part["missed"][0]["ratio"] == 0
    assert "-" in topk_summary.text(found, [row("dsv4_ops", None)])


def test_own_ratios_of_values_and_ragged_rows() -> None:
    rows = [row("dsv4_ops", 10.0, case="values: normal"), row("dsv4_ops", 12.0, case="values: ascending"), row("dsv4_ops", 13.0, case="values: all equal")]
    rows += [row("dsv4_ops", us, rows=256, case=case) for us, case in ((100.0, "full"), (71.0, "ragged: x"))] + [row("dsv4_ops", us, case=case) for us, case in ((9.0, "full"), (8.0, "ragged: x"))]
    found = topk_summary.summary(rows)
    part = found["values: ours over ours of normal values"]
    assert part["largest"] == 1.3 and [cell["case"] for cell in part["missed"]] == ["values: all equal"]
    assert found["ragged, 256 rows: ours over ours of full rows"]["missed"][0]["ratio"] == 0.71
    assert found["ragged, fewer rows: ours over ours of full rows"]["missed"] == []
    assert "k 512, full rows: best peer over ours" not in found, "no peer was measured"
    assert "topk_values: ours over ours of topk" not in found
    part = topk_summary.summary([*rows, row("dsv4_ops", 13.5, op="topk_values")])["topk_values: ours over ours of topk"]
    assert (part["largest"], part["limit"], part["missed"]) == (1.5, None, [])


@pytest.mark.parametrize("how", ["to its end", "narrowed", "an error", "SIGTERM"])
def test_what_is_measured_is_kept_however_a_run_ends(how: str) -> None:
    kept: list[str] = []
    before = signal.getsignal(signal.SIGTERM)

    def measure() -> None:
        with results.measuring("kernels", how == "narrowed", kept.append):
            if how == "an error":
                raise ValueError(how)
            if how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)

    if how in ("an error", "SIGTERM"):
        with pytest.raises((ValueError, SystemExit)):
            measure()
    else:
        measure()
    assert kept == ["kernels" if how == "to its end" else "kernels-part"] and signal.getsignal(signal.SIGTERM) is before


# ---- sanitizer -------------------------------------------------------------------------------------------------------


def test_sanitizer_calls_stay_within_what_was_promised() -> None:
    """At most 200 calls of at most 16384 columns for top-k, beside the stress of barriers between blocks; every width class is there."""
    calls = [(kind, sample) for op in testing.ops() if op.name in ("topk", "topk_values", "topk_slots") for kind, sample in sanitizer.calls_of(op) if kind != "stress"]
    assert len(calls) <= 200 and max(sample.args[0].shape[1] for _, sample in calls) <= 16384
    cases = [sample for kind, sample in calls if kind == "cases"]
    assert {sample.label.split(",")[0] for sample in cases} == set(sanitizer.KINDS)
    assert {next(a for a in sample.args if isinstance(a, int)) for sample in cases} == {1, 512, 2048}
    assert {sample.args[0].dtype for sample in cases} == {torch.float32, torch.bfloat16}
    assert any(sample.args[0].data_ptr() % 16 for sample in cases) and {sample.args[1].dtype for sample in cases} == {torch.int32, torch.int64}
    assert max(sample.args[0].shape[1] for sample in sanitizer.topk_stress("topk")) > 262144


def test_sanitizer_compares_results_and_written_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    share = ["mtp_context_lens", "kv_cache_insert"]
    assert sanitizer.run_cases("cpu", share) == 0
    count = sum(len(testing.samples(name)) for name in ("mtp_context_lens", "kv_cache_insert"))
    assert f"CALLS {count} WRONG 0 IN" in capsys.readouterr().out
    right, turn = sanitizer.observed, [0]

    def every_other_wrong(op: testing.Op, sample: testing.Sample, device: str) -> list[torch.Tensor]:
        turn[0] += 1
        return [t.view(torch.uint8) ^ 1 if turn[0] % 2 and t.dim() else t for t in right(op, sample, device)]

    monkeypatch.setattr(sanitizer, "observed", every_other_wrong)
    assert sanitizer.run_cases("cpu", share) == 1
    assert "WRONG kv_cache_insert: " in capsys.readouterr().out, "an op that returns nothing is judged by what it writes"


CLEAN = "=" * 9 + " COMPUTE-SANITIZER\nCALLS 7 WRONG 0 IN 1.0 s: samples 7\n" + "=" * 9 + " ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(("code", "output", "ok", "skipped"), [
    (0, CLEAN, True, None),
    (99, CLEAN.replace("0 errors", "2 errors"), False, None),
    (1, CLEAN.replace("WRONG 0", "WRONG 3"), False, None),
    (0, CLEAN.replace("WRONG 0", "WRONG 3"), False, None),
    (0, "CALLS 7 WRONG 0 IN 1.0 s\n", False, None),
    (0, "=" * 9 + " ERROR SUMMARY: 0 errors\n", False, None),
    (1, "=" * 9 + " Error: Device not supported. Please refer to the manual\n", False, "Error: Device not supported. Please refer to the manual"),
    (None, CLEAN, False, "not finished after 3 s"),
])  # fmt: skip
def test_sanitizer_outcomes(code: int | None, output: str, ok: bool, skipped: str | None) -> None:
    found = sanitizer.outcome("memcheck", code, output, 3.0)
    assert found["ok"] is ok and found.get("skipped") == skipped
    assert ("first_lines" in found) == (not ok and skipped is None)


def test_sanitizer_tools_run_with_defaults_where_an_option_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\nfor word in \"$@\"; do [ \"$word\" = --padding ] && {{ echo unrecognised option: --padding; exit 1; }}; done\nprintf '{CLEAN}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("SANITIZER_LOGS", str(tmp_path / "logs"))
    rows = sanitizer.run_tools(str(tool), {name: [["topk 0/2"], ["swiglu", "topk_values"]] for name in ("memcheck", "initcheck")})
    clean = (True, ["ERROR SUMMARY: 0 errors"])
    assert [(row["case"], row["op"], row["ok"], row["summary"]) for row in rows] == [(tool, op, *clean) for tool in ("memcheck", "initcheck") for op in ("topk 0/2", "swiglu, topk_values")]


def test_sanitizer_shares_hold_every_call_once() -> None:
    ops = [op for op in testing.ops() if op.name.startswith(("topk", "swiglu", "kv_"))]
    found = sanitizer.shares(ops, 25)
    dealt = [(op.name, sample.label) for share in found for item in share for op, calls in [sanitizer.calls_of_share(item)] for _, sample in calls]
    assert sorted(dealt) == sorted((op.name, sample.label) for op in ops for _, sample in sanitizer.calls_of(op))
    assert any("/" in item for share in found for item in share) and any(len(share) > 1 for share in found)
    assert all(sum(len(sanitizer.calls_of_share(item)[1]) for item in share) <= 26 for share in found)


def test_sanitizer_says_what_it_had_no_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nsleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("SANITIZER_SECONDS", "0.2")
    rows = sanitizer.run_tools(str(tool), {"memcheck": [["topk"]] * 5})
    assert [row["ok"] for row in rows] == [False] * 5 and all("not finished" in row["skipped"] for row in rows)
