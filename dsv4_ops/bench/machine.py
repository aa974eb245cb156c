"""What stands at the head of results: machine, versions, commit; and how a document of results is written as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .. import envs

PACKAGE = Path(__file__).resolve().parent.parent
MEASURED = ("csrc", "dsv4_ops", "passes", "benchmarks/*.py")
"""The paths of a checkout that a result depends on."""


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def commit() -> str:
    """What COMMIT says, where the history did not come along; else the checkout's, with ``-changed`` when sources differ from it.

    An installed package has it from its build; ``unknown`` where that had no history either.
    """
    if named := envs.commit():
        return named
    # A package that is installed below a checkout of something else is not that checkout's.
    head = _output("git", "rev-parse", "--short", "HEAD") if (PACKAGE.parent / "csrc").is_dir() else None
    if head is not None:
        return head + ("-changed" if _output("git", "status", "--porcelain", "--", *MEASURED) else "")
    report = PACKAGE / "_build.json"
    return str((json.loads(report.read_text()).get("commit") if report.is_file() else None) or "unknown")


def _output(*command: str) -> str | None:
    """First line of what a program prints, run beside the package; None where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else None


def environment() -> dict[str, Any]:
    """GPU, driver, CPU, and the versions of what a result depends on; None for what is not there."""
    env: dict[str, Any] = {"gpu": gpu_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    env["cpu"] = names[0] if names else None
    try:
        import triton

        env["triton"] = triton.__version__
    except ImportError:
        env["triton"] = None
    env["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if torch.cuda.is_available() else None
    return env


def text(document: dict[str, Any]) -> str:
    """JSON, each of ``rows`` in a line of its own."""
    rows = document.get("rows", [])
    body = json.dumps({**document, "rows": ["rows"]}, indent=1)
    return body.replace('"rows"\n ]', ",\n  ".join(map(json.dumps, rows)) + "\n ]") + "\n" if rows else json.dumps(document, indent=1) + "\n"
