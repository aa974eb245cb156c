"""A pytest plugin for runs on a GPU machine, and the question which tests need its GPU, so that the others can be left out.

Nobody keeps a list: where no GPU is visible a test that needs one is not collected (the ``device`` fixture has no ``cuda``) or is skipped by a mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LEFT_OUT = "DSV4_OPS_TESTS_LEFT_OUT"
"""Names a file with the ids of tests to leave out, a line each."""
WRITTEN = "DSV4_OPS_TESTS_WRITTEN"
"""Names a file to write the ids of those to that no mark skips."""


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if path := os.environ.get(WRITTEN):
        Path(path).write_text(
            "\n".join(item.nodeid for item in items if not any(mark.args and mark.args[0] for mark in item.iter_markers("skipif")))
        )
    if path := os.environ.get(LEFT_OUT):
        known = set(Path(path).read_text().split("\n"))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
        items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """A worker whose CUDA context is broken ends, and another goes on: else every later test would fail for the sake of this one."""
    import torch

    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def run_without_gpu(arguments: Sequence[str]) -> list[str]:
    """Ids of the tests that these arguments of pytest run on a machine without a GPU. Raises RuntimeError where they cannot be collected."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "ids"
        env = {**os.environ, WRITTEN: str(written), "CUDA_VISIBLE_DEVICES": ""}
        env.pop(LEFT_OUT, None)
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", __name__, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if not written.exists():
            raise RuntimeError(f"the tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return written.read_text().split("\n")
