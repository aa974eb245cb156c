"""The pinned wheels: found in a folder, or downloaded into it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17))


def pinned() -> dict[str, str]:
    """Project -> version."""
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def wheel(folder: Path, project: str, version: str, python: str) -> Path | None:
    """The wheel of a project for that Python; tags are judged by name: py3, abi3, or cpXY itself."""
    tag = f"cp{python.replace('.', '')}"
    fits = [path for path in sorted(folder.glob(f"{project.replace('-', '_')}-{version}-*.whl")) if {"py3", "abi3", tag} & set(path.stem.split("-")[2:4])]
    return fits[0] if fits else None


def found(folder: Path, python: str) -> dict[str, Path]:
    """Project -> wheel, for all pinned projects."""
    missing = [f"{project}=={version}" for project, version in pinned().items() if wheel(folder, project, version, python) is None]
    if missing:
        print("download", *missing, flush=True)
        options = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *(f"--platform={name}" for name in PLATFORMS)]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), *missing], check=True)
    paths = {project: wheel(folder, project, version, python) for project, version in pinned().items()}
    lost = [project for project, path in paths.items() if path is None]
    if lost:
        raise LookupError(f"no wheel of {', '.join(lost)} for Python {python} in {folder}")
    return {project: path for project, path in paths.items() if path is not None}
