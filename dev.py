#!/usr/bin/env python3
"""Set up and run, from a clean clone, with nothing but Python 3.10 or later and pip.

    python3 dev.py run    make a virtual environment, install, serve the shipped requests in all decode modes
    python3 dev.py test   the same environment, then the test suite (arguments after it go to pytest)
    python3 dev.py lint   ruff and mypy, as CI runs them
    python3 dev.py setup  only the environment

The environment is ``.venv`` beside this file (``DSV4_OPS_VENV`` names another). ``--here`` as the first argument
installs nothing and uses the interpreter that runs this file, for machines that have torch but no network.
Without an NVIDIA GPU torch 2.13.0 is taken, with one any release from 2.11 on; what is installed already stays.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("DSV4_OPS_VENV", ROOT / ".venv"))
REQUESTS = ROOT / "dsv4_ops" / "engine" / "data" / "requests.jsonl"
# Triton is that of this torch's CUDA builds: the tests interpret its kernels on CPU.
CPU_TORCH = ("torch==2.13.0", "triton==3.7.1; platform_system == 'Linux' and platform_machine == 'x86_64'")


def call(*command: str | Path, **env: str) -> int:
    print("+", *command, flush=True)
    return subprocess.run([str(c) for c in command], cwd=ROOT, env={**os.environ, **env}, check=False).returncode


def must(*command: str | Path, **env: str) -> None:
    if code := call(*command, **env):
        sys.exit(code)


def setup() -> Path:
    """The environment's Python, everything installed; done once for each state of the project's metadata."""
    python = VENV / "bin" / "python"
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*.*"))]
    stamp, state = VENV / "installed", "\n".join(f"{p.relative_to(ROOT)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in sources)
    if stamp.exists() and stamp.read_text() == state:
        return python
    if not python.exists():
        venv.create(VENV, with_pip=True)
    has_gpu = shutil.which("nvidia-smi") is not None
    if call(python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)") != 0:
        print("installing torch: a minute or more, without output", flush=True)
        must(python, "-m", "pip", "install", "--quiet", *(["torch>=2.11"] if has_gpu else CPU_TORCH))
    extras = "engine,test,cuda" if has_gpu else "engine,test"
    print("installing the project and what it needs", flush=True)
    must(python, "-m", "pip", "install", "--quiet", "-e", f".[{extras}]")
    stamp.write_text(state)
    return python


def main() -> int:
    arguments = sys.argv[1:]
    here = arguments[:1] == ["--here"]
    arguments = arguments[1:] if here else arguments
    job, rest = (arguments or [""])[0], arguments[1:]
    if job not in ("run", "test", "lint", "setup"):
        print(__doc__)
        return 0 if job in ("-h", "--help") else 2
    python = Path(sys.executable) if here else setup()
    bin_dir = python.parent
    if job == "run":
        return call(python, "-m", "dsv4_ops", "run", *(rest or [str(REQUESTS), "--mode", "all", "--verify"]))
    if job == "test":
        return call(python, "-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", *rest)
    if job == "lint":
        return call(bin_dir / "ruff", "check", ".") or call(bin_dir / "mypy", "-p", "dsv4_ops")
    return 0


if __name__ == "__main__":
    sys.exit(main())
