"""README's Python blocks run as they stand, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [(page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(BLOCKS)])
def test_snippet_runs(page: Path, code: str) -> None:
    exec(compile(code, str(page), "exec"), {"__name__": "__snippet__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"`((?:dsv4_ops|passes|tests|csrc|benchmarks|docs)/[\w./-]*)`", text)) | set(re.findall(r"\]\((?!http)([^)#]+)\)", text))
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    assert not missing, f"{page.name} names {missing}"


def test_readme_says_what_dev_py_does() -> None:
    assert BLOCKS, "README has no example"
    help_text = (ROOT / "dev.py").read_text()
    for command in re.findall(r"^python3 dev.py (\w+)", (ROOT / "README.md").read_text(), re.M):
        assert f"dev.py {command}" in help_text
