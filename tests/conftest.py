"""Fixtures and the list of skips, which CI prints and counts."""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_ops.workspace import workspace_manager


def pytest_configure(config: pytest.Config) -> None:
    # On small tensors a second thread gains little, and where the cores are busy each parallel region waits for it: tenfold times.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_lock_outlives_a_test() -> Iterator[None]:
    """Captured graphs hold the GPU's workspace locked until they are collected; engines are cycles of references."""
    yield
    if torch.cuda.is_available() and workspace_manager("cuda").is_locked:
        gc.collect()


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def room() -> Iterator[int]:
    """Bytes of GPU memory that can be allocated now. Tests that ask take turns, whatever worker of a parallel run they are on, and what they took is given back."""
    import fcntl

    with (Path(tempfile.gettempdir()) / f"dsv4_ops-tests-room-{os.getuid()}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        gc.collect()
        torch.cuda.empty_cache()
        yield torch.cuda.mem_get_info()[0]
        gc.collect()
        torch.cuda.empty_cache()


def _in_triton_process(interpret: bool) -> Iterator[Any]:
    from tests.interpreter import Interpreter

    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    worker = Interpreter(interpret=interpret)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Any]:
    """``interpreter(function, *args)``: the call in a process where Triton interprets kernels (tests/interpreter.py)."""
    yield from _in_triton_process(True)


@pytest.fixture(scope="session")
def compiler() -> Iterator[Any]:
    """The same where Triton compiles."""
    yield from _in_triton_process(False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        terminalreporter.write_line("skips by reason:")
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"  {count:4d}  {reason}")
