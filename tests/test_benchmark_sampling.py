"""The benchmark of the samplers, on the CPU with a small vocabulary: a provider that is wrong has no times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sampling

PEERS = '''
"""Peers of a test: ours under another name, one whose greedy token is the second best, one that leaves the vocabulary, one that raises."""
import torch

from dsv4_ops import gumbel_sample, rejection_sample


def right(*args):
    return lambda: gumbel_sample(*args)


def second_best(logits, *args):
    return lambda: gumbel_sample(logits.scatter(1, logits.argmax(1, keepdim=True), -torch.inf), *args)


def outside(logits, *args):
    return lambda: torch.full((logits.shape[0],), logits.shape[1])


def raises(*args):
    def call():
        raise RuntimeError("no such kernel")
    return call


def garbage_after_the_emitted(*args):
    def call():
        sampled, count = rejection_sample(*args)
        return torch.where(sampled < 0, 12345, sampled), count
    return call


def accepts_all(target, draft, *args):
    def call():
        sampled, count = rejection_sample(target, draft, *args)
        return torch.cat([draft, sampled[:, :1]], 1), torch.full_like(count, draft.shape[1] + 1)
    return call


GUMBEL = {"right": right, "second best": second_best, "outside": outside, "raises": raises}
REJECTION = {"garbage after the emitted": garbage_after_the_emitted, "accepts all": accepts_all}
'''


class Once:
    def measure(self, calls: list[Any]) -> tuple[dict[str, float], list[torch.Tensor]]:
        results = [call() for call in calls][-1]
        return {"us_p50": 1.0}, list(results) if isinstance(results, tuple) else [results]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> sampling.Bench:
    (tmp_path / "peers_sampling.py").write_text(PEERS)
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "peers_sampling", raising=False)
    for name, value in (("DEVICE", "cpu"), ("WIDTH", 200), ("SET_BYTES", 0)):
        monkeypatch.setattr(sampling, name, value)
    return sampling.Bench(Once(), 4000.0)


def test_every_case_runs_and_wrong_providers_have_no_times(bench: sampling.Bench) -> None:
    for seed, case in enumerate(case for case in sampling.cases() if case.requests == 8):
        bench.run(case, seed)
    assert {row["op"] for row in bench.rows} == {"gumbel_sample", "rejection_sample"} and len({row["case"] for row in bench.rows}) == 8
    good = {"dsv4_ops", "torch: softmax, exponential_, argmax", "right", "garbage after the emitted"}
    for row in bench.rows:
        assert row["ok"] == (row["provider"] in good) and ("us_p50" in row) == row["ok"], row
    assert any(row["provider"] == "raises" and row["skipped"] == "RuntimeError: no such kernel" for row in bench.rows)


def test_floor_is_every_logit_once(bench: sampling.Bench) -> None:
    bench.copy_GBps = 2.0
    bench.run(sampling.Case("rejection_sample", "sampled proposals", 2, 5), 0)
    bench.run(sampling.Case("rejection_sample", "greedy proposals", 2, 5), 0)
    sampled, greedy = (next(row["floor_us"] for row in bench.rows if row["case"] == name) for name in ("sampled proposals", "greedy proposals"))
    assert (sampled, greedy) == (2 * 11 * 200 * 4 / 2000, 2 * 6 * 200 * 4 / 2000)
