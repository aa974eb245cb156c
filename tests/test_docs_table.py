"""README's table of ops is the registry's."""

from __future__ import annotations

from pathlib import Path

from dsv4_ops import doctor

README = Path(__file__).resolve().parent.parent / "README.md"


def test_readme_has_the_table_of_ops() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == doctor.replaced_ops_table(text, "README.md"), "run: python -m dsv4_ops ops --write README.md"
