"""The test suite on a GPU machine, with its counts and the reasons of its skips."""

from __future__ import annotations

import collections
import sys
from typing import Any

import pytest

from . import results


class Counter:
    """A pytest plugin that keeps outcomes and skip reasons."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failed: list[str] = []
        self.on_gpu = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            self.on_gpu += report.outcome == "passed" and ("cuda" in report.nodeid or "graph_replay" in report.nodeid)
        if report.outcome == "skipped":
            self.reasons[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
        elif report.outcome == "failed":
            self.failed.append(report.nodeid)


def main() -> int:
    counter = Counter()
    code = pytest.main(["-q", *sys.argv[1:]], plugins=[counter])
    counts = {name: counter.outcomes[name] for name in ("passed", "failed", "skipped")}
    results.write("tests", counts=counts, passed_on_gpu=counter.on_gpu, skips=dict(sorted(counter.reasons.items())), failures=sorted(set(counter.failed)))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
