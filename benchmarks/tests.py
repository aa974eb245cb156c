"""The test suite on a GPU machine: its counts, what passed by file, the reasons of its skips, the slowest tests.

    python3 -m benchmarks.tests [--gpu-only] [--record NAME] [arguments of pytest]

Where pytest-xdist is installed it runs on all cores but two (``-n`` says otherwise). ``--gpu-only`` leaves out the tests that a machine without a GPU runs as well: those that are
collected, and by no mark skipped, where no GPU is visible (``benchmarks/gpu_tests.py`` asks). A run that is stopped or breaks off is recorded as ``<NAME>-part.json``, with the tests
that it did not come to; NAME is ``tests`` unless ``--record`` gives another.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from . import gpu_tests, results

KEPT_EVERY_S, SLOWEST = 15.0, 25


class Counter:
    """A pytest plugin that keeps outcomes, skip reasons and durations; ``keep()`` is called now and then."""

    def __init__(self, keep: Callable[[], object] = lambda: None) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.passed: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.seconds: collections.Counter[str] = collections.Counter()
        self.collected: list[str] = []
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self._keep, self._kept = keep, time.monotonic()

    def pytest_collection_finish(self, session: Any) -> None:
        self.collected = self.collected or [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self.collected = list(ids)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.outcome == "skipped":
            self.reasons[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
        elif report.outcome == "failed":
            self.failed.add(report.nodeid)
        elif report.when == "call":
            file, _, test = report.nodeid.partition("::")
            self.passed[file][test.partition("[")[0]] += 1
        if report.when == "teardown":
            self.finished.add(report.nodeid)
        if time.monotonic() - self._kept > KEPT_EVERY_S:
            self._keep()
            self._kept = time.monotonic()

    def facts(self, gpu_only: set[str]) -> dict[str, Any]:
        """``gpu_only``: tests that a machine without a GPU leaves out."""
        counts = {name: self.outcomes[name] for name in ("passed", "failed", "skipped")}
        missing = [name for name in self.collected if name not in self.finished]
        return {
            "counts": {**counts, "collected": len(self.collected), "not_run": len(missing)},
            "need_a_gpu": sum(name in gpu_only for name in self.finished),
            "skips": dict(sorted(self.reasons.items())),
            "failures": sorted(self.failed),
            "passed": {file: dict(sorted(tests.items())) for file, tests in sorted(self.passed.items())},
            "slowest_s": {name: round(s, 1) for name, s in self.seconds.most_common(SLOWEST)},
            **({"not_run": missing} if missing else {}),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-only", action="store_true")
    parser.add_argument("--record", default="tests", metavar="NAME")
    options, rest = parser.parse_known_args()
    start, chosen = time.perf_counter(), rest or ["tests"]
    everywhere = gpu_tests.run_without_gpu(chosen)
    with tempfile.TemporaryDirectory() as folder:
        plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark", "-p", gpu_tests.__name__, "-W", "ignore::pytest.PytestAssertRewriteWarning")
        arguments = ["-q", *plugins, f"--durations={SLOWEST}"]
        if options.gpu_only:
            listed = Path(folder) / "everywhere"
            listed.write_text("\n".join(everywhere))
            os.environ[gpu_tests.LEFT_OUT] = str(listed)
        if importlib.util.find_spec("xdist") and options.record == "tests" and not any(a.startswith(("-n", "--numprocesses")) for a in rest):
            arguments += ["-n", str(max(1, (os.cpu_count() or 1) - 2)), "--dist", "worksteal"]
        counter = Counter(lambda: keep("-part"))
        # Taken away, so that no test of the benchmarks finds them.
        os.environ.pop("TOPIC_SECONDS", None)
        command = os.environ.pop("RECORD_COMMAND", None) or shlex.join(["python3", "-m", "benchmarks.tests", *sys.argv[1:]])

        def keep(suffix: str, quiet: bool = True) -> None:
            facts = counter.facts(set(counter.collected) - set(everywhere))
            results.write(f"{options.record}{suffix}", quiet=quiet, command=command, arguments=[*arguments, *chosen], wall_s=round(time.perf_counter() - start, 1), **facts)

        def stop(number: int, _: Any) -> None:
            keep("-part")  # at once: workers may take long to end
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, stop)
        code = int(pytest.main([*arguments, *chosen], plugins=[counter]))
    whole = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    keep("" if whole else "-part", quiet=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
