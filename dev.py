#!/usr/bin/env python3
"""Set up and run, from a clean clone, with nothing but Python 3.10 or later and pip.

    python3 dev.py run    make a virtual environment, install, serve the shipped requests in all decode modes
    python3 dev.py test   the same environment, then the test suite (arguments after it go to pytest)
    python3 dev.py lint   ruff and mypy, as CI runs them
    python3 dev.py setup  only the environment
    python3 dev.py test-old
                          lane, opcheck, schema and rank tests, and the pages' code, with the oldest PyTorch that is supported, in an environment of its own

The environment is ``.venv`` beside this file (``DSV4_OPS_VENV`` names another; that of ``test-old`` has ``-old`` behind its name and
takes 4.6 GB: of 2.11 only the build with CUDA can be installed by name). ``--here`` as the first argument
installs nothing and uses the interpreter that runs this file, for machines that have torch but no network.
Without an NVIDIA GPU torch 2.13.0 is taken, with one any release from 2.11 on; what is installed already stays.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("DSV4_OPS_VENV", ROOT / ".venv"))
REQUESTS = ROOT / "dsv4_ops" / "engine" / "data" / "requests.jsonl"
# Triton is that of this torch's CUDA builds: the tests interpret its kernels on CPU.
CPU_TORCH = ("torch==2.13.0", "triton==3.7.1; platform_system == 'Linux' and platform_machine == 'x86_64'")
OLD_VENV = VENV.with_name(VENV.name + "-old")
OLD_TORCH = "torch==2.11.0"
OLD_TESTS = ("test_registry", "test_every_op", "test_compile_integration", "test_workspace", "test_graphs", "test_lane_warnings", "test_passes_*", "test_program_campaign", "test_parallel", "test_docs")


def call(*command: str | Path, cwd: str | Path = ROOT) -> int:
    print("+", *command, flush=True)
    return subprocess.run([str(c) for c in command], cwd=cwd, check=False).returncode


def must(*command: str | Path) -> None:
    if code := call(*command):
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
    # compat: a path entry. The default finder would come after a folder of this name: a clone, seen from the folder that it lies in.
    must(python, "-m", "pip", "install", "--quiet", "--config-settings", "editable_mode=compat", "-e", f".[{extras}]")
    stamp.write_text(state)
    return python


def setup_old() -> Path:
    """Only what those tests import: the project is used from the checkout, with its compiled part where ``setup`` has built one."""
    python = OLD_VENV / "bin" / "python"
    if not python.exists():
        venv.create(OLD_VENV, with_pip=True)
    if call(python, "-c", f"import torch, pytest, expecttest, numpy; assert 'torch==' + torch.__version__.split('+')[0] == '{OLD_TORCH}'") != 0:
        print(f"installing {OLD_TORCH}: some minutes, without output", flush=True)
        must(python, "-m", "pip", "install", "--quiet", OLD_TORCH, "pytest>=8", "expecttest", "numpy")
    return python


def types(bin_dir: Path) -> int:
    """mypy on the package as it is installed: ``passes/`` lies inside it, not beside it."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "dsv4_ops"
        package.mkdir()
        for entry in [*(ROOT / "dsv4_ops").iterdir(), ROOT / "passes"]:
            (package / entry.name).symlink_to(entry)
        return call(bin_dir / "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache", "-p", "dsv4_ops", cwd=folder)


def main() -> int:
    arguments = sys.argv[1:]
    here = arguments[:1] == ["--here"]
    arguments = arguments[1:] if here else arguments
    job, rest = (arguments or [""])[0], arguments[1:]
    if job not in ("run", "test", "test-old", "lint", "setup"):
        print(__doc__)
        return 0 if job in ("-h", "--help") else 2
    python = Path(sys.executable) if here else setup_old() if job == "test-old" else setup()
    bin_dir = python.parent
    if job == "run":
        return call(python, "-m", "dsv4_ops", "run", *(rest or [str(REQUESTS), "--mode", "all", "--verify"]))
    if job in ("test", "test-old"):
        chosen = [str(p.relative_to(ROOT)) for name in OLD_TESTS for p in sorted(ROOT.glob(f"tests/{name}.py"))] if job == "test-old" else []
        return call(python, "-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", *chosen, *rest)
    if job == "lint":
        return call(bin_dir / "ruff", "check", ".") or types(bin_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
