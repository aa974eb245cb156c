"""Where results go, what stands at their head (machine, versions, commit, command), and which cases were asked for."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def folder() -> Path:
    """``benchmarks/results/<gpu>``, the GPU's name shortened: ``NVIDIA H200`` is ``h200``."""
    short = re.sub(r"[^a-z0-9]+", "-", gpu_name().lower().replace("nvidia", "")).strip("-")
    path = Path(os.environ.get("RESULTS_DIR", ROOT / "benchmarks" / "results")) / short
    path.mkdir(parents=True, exist_ok=True)
    return path


def commit() -> str:
    """What COMMIT says, where the history did not come along; else the checkout's, with ``-changed`` when sources differ from it."""
    if named := os.environ.get("COMMIT"):
        return named

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    return head + ("-changed" if git("status", "--porcelain", "--", "csrc", "dsv4_ops", "passes", "benchmarks/*.py") else "")


def environment() -> dict[str, Any]:
    env: dict[str, Any] = {"gpu": gpu_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    env["cpu"] = names[0] if names else None
    try:
        import triton

        env["triton"] = triton.__version__
    except ImportError:
        env["triton"] = None
    done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False) if torch.cuda.is_available() else None
    env["driver"] = done.stdout.strip().splitlines()[0] if done is not None and done.returncode == 0 else None
    return env


def chosen_by(variable: str) -> Callable[[object], bool]:
    """Whether a value is among the comma-separated ones of an environment variable; all are when it is not set."""
    allowed = {part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()}
    return lambda value: not allowed or str(value) in allowed


def text(document: dict[str, Any]) -> str:
    """JSON, each of ``rows`` in a line of its own."""
    rows = document.get("rows", [])
    body = json.dumps({**document, "rows": ["rows"]}, indent=1)
    return body.replace('"rows"\n ]', ",\n  ".join(map(json.dumps, rows)) + "\n ]") + "\n" if rows else json.dumps(document, indent=1) + "\n"


def write(topic: str, env: dict[str, Any] | None = None, quiet: bool = False, **content: Any) -> Path:
    """Write ``<folder>/<topic>.json``; ``env`` is added to what is known of the machine."""
    path = folder() / f"{topic}.json"
    head = {"topic": topic, "command": f"bash benchmarks/gpu.sh {topic}", "commit": commit(), "date": datetime.date.today().isoformat(), "env": environment() | (env or {})}
    path.write_text(text({**head, **content}))
    if not quiet:
        print(f"wrote {path}")
        if head["commit"] == "unknown":
            print("the commit is not recorded: set COMMIT where the checkout has no history")
    return path
