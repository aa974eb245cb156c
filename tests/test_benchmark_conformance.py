"""The kit run on functions of others, on the CPU with peers of a test: right ones, wrong ones, one that hangs and one that takes the process down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import conformance

PEERS = '''
import os
import time

import torch

from dsv4_ops import topk


def right(rows, k, width, max_len):
    return lambda logits, lengths, out: out.copy_(topk(logits, lengths, k))


def best_first(rows, k, width, max_len):
    def call(logits, lengths, out):
        found = topk(logits, lengths, k)
        for i, row in enumerate(found):
            columns = row[row >= 0].long()
            out[i].fill_(-1)[: len(columns)] = columns[logits[i, columns].argsort(descending=True)].int()
    return call


def unsigned(rows, k, width, max_len):
    return lambda logits, lengths, out: out.copy_(topk(logits, torch.where(lengths < 0, width, lengths), k))


def waits(rows, k, width, max_len):
    def call(logits, lengths, out):
        if bool((lengths < 0).any()):
            time.sleep(60)
        out.copy_(topk(logits, lengths, k))
    return call


def crashes(rows, k, width, max_len):
    def call(logits, lengths, out):
        if bool((lengths > width).any()):
            os._exit(7)
        out.copy_(topk(logits, lengths, k))
    return call


def always(rows, k, width, stride):
    return True


TOPK_PEERS = {"right": (right, lambda rows, k, width, stride: stride == width), "best first": (best_first, always), "unsigned": (unsigned, always), "waits": (waits, always), "crashes": (crashes, always)}
'''


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "peers.py").write_text(PEERS)
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    monkeypatch.setenv("CONFORMANCE_DEVICE", "cpu")
    monkeypatch.setattr(conformance, "DEVICE", "cpu")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "peers", raising=False)
    return tmp_path


def verdicts(name: str) -> dict[str, dict[str, Any]]:
    provider = conformance.providers()[name]()
    return {case.id: conformance.verdict(provider, case, ladder) for case, _, ladder in conformance.judged(provider)}


def test_verdicts_tell_contract_relaxation_and_fault_apart(peers: Path) -> None:
    assert list(conformance.providers()) == [n for name in ("right", "best first", "unsigned", "waits", "crashes") for n in (name, f"{name}, k of each case")]
    right = verdicts("right, k of each case")
    assert {row["verdict"] for row in right.values()} == {"contract", "not called"}
    assert right["A11 length above the width"]["why"] == "rows 2, k 512, width 1000, stride 1024" and right["special values in bfloat16"]["why"] == "bfloat16"
    sorted_ = verdicts("best first, k of each case")
    assert sorted_["A07 scores of one coarse bin, 8000"]["verdict"] == "order any" and "the same columns in another order" in sorted_["A07 scores of one coarse bin, 8000"]["message"]
    assert "wrong" not in {row["verdict"] for row in sorted_.values()}
    unsigned = verdicts("unsigned")
    wrong = unsigned["A01 negative length beside long rows"]
    assert wrong["verdict"] == "wrong" and "got = fn(logits, lengths, k)" in wrong["reproduction"]
    assert [case for case, row in unsigned.items() if row["verdict"] == "wrong"] == ["negative, huge and int32 extremes", "A01 negative length beside long rows"]


def test_a_case_that_hangs_or_crashes_is_a_result_and_the_others_run(peers: Path) -> None:
    rows = {row["case"]: row for row in conformance.run_provider("waits", case_s=12.0)}
    assert rows["A01 negative length beside long rows"]["verdict"] == "hangs" and rows["negative, huge and int32 extremes"]["verdict"] == "hangs"
    assert rows["A11 length above the width"]["verdict"] == "contract", "later cases run in a new process"
    assert set(rows) == {case.id for case, _, _ in conformance.judged(conformance.providers()["waits"]())}
    rows = {row["case"]: row for row in conformance.run_provider("crashes", case_s=30.0)}
    assert rows["A11 length above the width"]["verdict"] == "crashes" and rows["A11 length above the width"]["message"] == "exit status 7"
    assert rows["plain"]["verdict"] == "contract" and rows["A01 negative length beside long rows"]["verdict"] == "contract"


def test_a_peer_that_cannot_be_made_is_said(peers: Path) -> None:
    (peers / "triton_extracted.py").write_text("raise ImportError('no such library')\n")
    (row,) = conformance.run_provider("vllm build_flashinfer_mixed_sparse_indices")
    assert row["verdict"] == "not loaded" and "no such library" in row["message"]


def test_the_command_writes_what_differs(peers: Path, tmp_path: Path) -> None:
    env = {**os.environ, "RESULTS_DIR": str(tmp_path / "results"), "CONFORMANCE_PROVIDERS": "right; unsigned", "COMMIT": "abc"}
    done = subprocess.run([sys.executable, "-m", "benchmarks.conformance"], cwd=conformance.results.ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "unsigned: " in done.stdout and "wrong (out of range): A01 negative length beside long rows" in done.stdout
    (path,) = (tmp_path / "results").glob("*/conformance.json")
    content = json.loads(path.read_text())
    assert set(content["summary"]) == {"right", "unsigned"} and content["summary"]["unsigned"]["wrong"] == 2


def test_without_peers_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("PEERS_DIR", raising=False)
    monkeypatch.setattr(conformance, "DEVICE", "cpu")
    monkeypatch.setattr(sys, "argv", ["conformance"])
    assert conformance.main() == 1
    assert "PEERS_DIR is not set" in capsys.readouterr().out
