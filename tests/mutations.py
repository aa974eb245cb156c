"""Takes single fixes out of the package, one at a time, and shows that a test notices.

    python tests/mutations.py [NAME ...] [--table FILE]

Each mutation replaces one piece of source text in a copy of the project (the text must occur there, so that a mutation cannot
silently become a no-op when the code moves), then runs the named tests on the copy with the compiled parts off. The
unchanged copy must pass the same tests first. Exit code 1 when a mutation survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    name: str
    what: str
    file: str
    old: str
    new: str
    tests: str
    """Arguments for pytest."""


MUTATIONS: tuple[Mutation, ...] = ()


def run_tests(copy: Path, arguments: str) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": str(copy), "DSV4_OPS_DISABLE_C": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", "-x", "-q", "-p", "no:cacheprovider", *arguments.split()]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed[0].split(" ", 1)[1].split(" - ")[0] if failed else done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.names or m.name in options.names]
    rows, survived = ["| fix taken out | change | test that fails |", "|---|---|---|"], 0
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "__pycache__", "*.egg-info"))
        for tests in sorted({m.tests for m in chosen}):
            code, line = run_tests(copy, tests)
            if code != 0:
                print(f"the unchanged project fails {tests}: {line}")
                return 1
        for mutation in chosen:
            path = copy / mutation.file
            source = path.read_text()
            if mutation.old not in source:
                print(f"{mutation.name}: {mutation.old!r} is not in {mutation.file} any more")
                return 1
            path.write_text(source.replace(mutation.old, mutation.new))
            code, line = run_tests(copy, mutation.tests)
            path.write_text(source)
            caught = code == 1
            survived += not caught
            shown = f"`{line}`" if caught else "**none**"
            rows.append(f"| {mutation.name}: {mutation.what} | `{mutation.old.strip()}` to `{mutation.new.strip()}` in `{mutation.file}` | {shown} |")
            print(("caught  " if caught else "SURVIVED"), mutation.name, line, flush=True)
    if options.table:
        options.table.write_text("# Each fix taken out, and the test that notices\n\nWritten by `python tests/mutations.py --table docs/mutations.md`.\n\n" + "\n".join(rows) + "\n")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
