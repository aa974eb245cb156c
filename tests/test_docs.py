"""The pages' Python blocks run as they stand, and what a page names (files, anchors, functions, tests) exists."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import dsv4_ops
import dsv4_ops.passes
from benchmarks import results
from dsv4_ops import _registry, doctor, graphs, reference
from dsv4_ops.__main__ import main
from dsv4_ops.testing import replay
from dsv4_ops.workspace import workspace_manager

ROOT = Path(__file__).resolve().parent.parent
README, FAULTS = ROOT / "README.md", ROOT / "docs" / "faults.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTES = [ROOT / "CHANGELOG.md", *sorted(path for folder in ("benchmarks", "dsv4_ops", "passes", "csrc", "tests") for path in (ROOT / folder).rglob("README.md"))]
"""Not part of the documentation that README leads to; links, paths and tables hold in them too."""
BLOCKS = [(page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]


def run(page: Path, code: str) -> None:
    exec(compile(code, str(page), "exec"), {"__name__": "__snippet__"})


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(BLOCKS)])
def test_snippet_runs(page: Path, code: str) -> None:
    run(page, code)


POOLED = [(page, code) for page, code in BLOCKS if "GraphPool(" in code]


@pytest.mark.parametrize(("page", "code"), POOLED, ids=[page.name for page, _ in POOLED])
def test_snippet_with_graphs_holds_when_they_are_replayed(page: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU ``GraphPool`` calls functions; here it records them and replays, so that a snippet that a graph would break shows."""
    recorder = replay.TapeRecorder()
    monkeypatch.setattr(graphs, "GraphPool", functools.partial(graphs.GraphPool, recorder=recorder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.compiler.set_stance("force_eager"):  # compiled code runs past the recorder
        run(page, code)
    assert recorder.log.count("capture") >= 2
    monkeypatch.undo()
    gc.collect()  # pools hold the workspace locked as long as they live
    assert not workspace_manager("cpu").is_locked


# Links


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def missing_paths(text: str) -> list[str]:
    named = set(re.findall(r"`((?:dsv4_ops|passes|tests|csrc|benchmarks|docs)/[\w./-]*)`", text))
    return [path for path in sorted(named) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES + NOTES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text())


@pytest.mark.parametrize("page", PAGES + NOTES, ids=shown)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    assert not missing_paths(page.read_text())


def broken_tables(text: str) -> list[str]:
    """Rows with other than their head's number of cells, and lines in a table that are no row."""
    broken = []
    for head, rows in re.findall(r"^(\|.*)\n\|[-|]+\n((?:(?!<!--).+\n)*)", prose(text), re.M):
        broken += [row for row in rows.splitlines() if not row.startswith("|") or len(re.findall(r"(?<!\\)\|", row)) != len(re.findall(r"(?<!\\)\|", head))]
    return broken


@pytest.mark.parametrize("page", PAGES + NOTES, ids=shown)
def test_tables_are_whole(page: Path) -> None:
    text = page.read_text()
    assert not broken_tables(text)
    tables = re.findall(r"(?:^\|.*\n)+", prose(text), re.M)
    assert len(tables) == len(re.findall(r"^\|[-|]+$", prose(text), re.M)), "a table without its line of dashes, or two in one"


def test_a_broken_table_is_seen() -> None:
    assert broken_tables("| a | b |\n|---|---|\n| 1 | `x \\| y` |\n| 2 |\ntext\n\n| c |\n") == ["| 2 |", "text"]


def test_a_broken_link_and_a_stale_path_are_seen() -> None:
    text = "[a](docs/faults.md#no-such-fault) [b](docs/no-such.md) [c](#ops) [d](docs/lanes.md#which-door) `tests/test_no_such.py`"
    assert broken_links(README, text) == ["docs/faults.md#no-such-fault", "docs/no-such.md"]
    assert missing_paths(text) == ["tests/test_no_such.py"]


def test_every_page_is_reached_from_readme() -> None:
    seen, queue = set(), [README]
    while queue:
        page = queue.pop()
        if page in seen:
            continue
        seen.add(page)
        text = page.read_text()
        named = [(page.parent / link.partition("#")[0]).resolve() for link in re.findall(r"\]\((?!https?:)([^)\s#]+\.md[^)\s]*)\)", text)]
        named += [ROOT / path for path in re.findall(r"`([\w/]+\.md)`", text)]
        queue += [p for p in named if p in PAGES]
    assert seen == set(PAGES)


# Names

PUBLIC: dict[str, Any] = {name: getattr(dsv4_ops, name) for name in dsv4_ops.__all__}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_functions_that_a_page_names_exist(page: Path) -> None:
    text = prose(page.read_text())
    dotted = set(re.findall(r"`(dsv4_ops(?:\.\w+)+)", text))
    for name in sorted(dotted):
        pkgutil.resolve_name(name)
    called = set(re.findall(r"`(\w+)\(", text))
    places = (dsv4_ops.passes, graphs, graphs.GraphPool, dsv4_ops.WorkspaceManager, dsv4_ops.testing)
    if page.name in ("faults.md", "integrate.md"):
        known = set(PUBLIC).union(*map(dir, places))
        assert called <= known, called - known


def parameters() -> set[str]:
    return {name for value in PUBLIC.values() if callable(value) for name in inspect.signature(value).parameters}


# Faults

SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", FAULTS.read_text(), re.M | re.S))


@pytest.mark.parametrize("title", SECTIONS)
def test_fault_leads_from_symptom_to_check(title: str) -> None:
    section = SECTIONS[title]
    places = [section.find(f"\n**{part}") for part in ("You see**", "Cause.**", "Here**", "Check.**")] + [section.find("\nReports: ")]
    assert -1 not in places and places == sorted(places), f"{title}: want You see, Cause, Here, Check, Reports, in this order"
    here = section[places[2] : places[3]]
    names = set(re.findall(r"`(\w+)`", here))
    known = {*PUBLIC, *parameters(), "up", "alpha", "beta", "seed", "pad", "lse"}
    assert names & set(PUBLIC) or re.search(r"`dsv4_ops\.\w+", here), f"{title}: names nothing of this package"
    assert names <= known, names - known
    assert re.search(r"```python\n.*assert.*```", section[places[3] :], re.S), f"{title}: the check asserts nothing"


def spoiled(function: Any) -> Any:
    """``function`` with another result: numbers too high (in each row by another amount), or nothing done where it returns nothing."""

    def spoil(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            by_row = torch.arange(1, 1 + value.shape[0]).view(-1, *[1] * (value.dim() - 1)) if value.dim() else 1
            return ~value if value.dtype == torch.bool else (value + by_row).to(value.dtype)
        return not value if isinstance(value, bool) else value + 1

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if inspect.signature(function).return_annotation == "None":
            return None
        return _pytree.tree_map_only((torch.Tensor, int, bool), spoil, function(*args, **kwargs))

    return wrapper


CHECKED = [
    pytest.param(title, name, id=f"{title}-{name}")
    for title, section in SECTIONS.items()
    for name in sorted(set(re.findall(r"\b(\w+)\(", "".join(re.findall(r"```python\n(.*?)```", section, re.S)))))
    if inspect.isfunction(PUBLIC.get(name)) and name not in ("explain", "new_kv_cache")
]


@pytest.mark.parametrize(("title", "name"), CHECKED)
def test_check_of_a_fault_notices_a_wrong_result(title: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.S)
    monkeypatch.setattr(dsv4_ops, name, spoiled(PUBLIC[name]))
    with pytest.raises(Exception):  # noqa: B017
        run(FAULTS, code)


def test_every_report_with_a_test_is_on_the_page() -> None:
    named = re.findall(r"\b([A-J]\d\d)\b", "".join(section[section.find("\nReports: ") :] for section in SECTIONS.values()))
    tested = {case for path in (ROOT / "tests").glob("test_*.py") for case in re.findall(r"def test_case_([A-J]\d\d)_", path.read_text())}
    assert set(named) == tested
    assert len(named) == len(set(named))


def test_every_section_is_in_the_table_at_the_top() -> None:
    assert re.findall(r"^\| .* \| \[(.*)\]\(#.*\) \|$", FAULTS.read_text(), re.M) == list(SECTIONS)


# Reference

OP_FUNCTIONS = [op.name for op in _registry.ops()]


@pytest.mark.parametrize("name", OP_FUNCTIONS)
def test_ops_docstring_is_a_reference(name: str) -> None:
    function = PUBLIC[name]
    text = inspect.getdoc(function) or ""
    assert "Raises " in text, "says no errors"
    assert f"Arguments: ``python -m dsv4_ops ops {name}``" in text, "does not say where its argument table is"
    assert re.search(r"\[[\w*+., ]+\]|shape of", text), "gives no shape"
    assert re.search(r"\b(int32|int64|dtype|Returns nothing)\b", text), "gives no dtype"
    table = inspect.getmodule(function).__doc__ or ""  # type: ignore[union-attr]
    for other in re.findall(r"as for ``(\w+)``", table):
        table += inspect.getmodule(PUBLIC[other]).__doc__ or ""  # type: ignore[union-attr]
    absent = [p for p in inspect.signature(function).parameters if not re.search(rf"\b{p}\b", table)]
    assert not absent, f"the argument table of {function.__module__} lacks {absent}"
    assert "Graph-safe: " in table and "Replaces " in table
    shown = doctor.op_text(name)
    assert "Raises " in shown and text.splitlines()[0] in shown, "python -m dsv4_ops ops does not show it"


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isfunction(value) or inspect.isclass(value)])
def test_public_name_has_a_docstring_and_types(name: str) -> None:
    value = PUBLIC[name]
    assert len(inspect.getdoc(value) or "") > 40
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
        assert not untyped and signature.return_annotation is not inspect.Signature.empty


def methods() -> dict[str, Any]:
    classes = [*(value for value in PUBLIC.values() if inspect.isclass(value)), *(getattr(graphs, name) for name in graphs.__all__)]
    return {f"{c.__name__}.{name}": f for c in classes for name, f in vars(c).items() if inspect.isfunction(f) and not name.startswith("_")}


CALLABLE = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)} | methods()


@pytest.mark.parametrize("name", CALLABLE)
def test_what_raises_says_so(name: str) -> None:
    text = inspect.getdoc(CALLABLE[name]) or ""
    body = inspect.getsource(CALLABLE[name]).split('"""')[-1]
    if re.search(r"\braise \w+Error|\b_checks\.(integer|tensor|one_of|shape)\(|\b_positive\(", body):
        assert re.search(r"\bRaises? |\w+Error", text), "raises, and its docstring names no error"


def test_api_reference_is_current() -> None:
    pytest.importorskip("transformers", reason="the engine's part of the page needs transformers")
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == reference.reference_text(), f"run: {reference.COMMAND}"


def test_api_reference_is_written_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "reference_text", lambda: "all of it\n")
    page = tmp_path / "api.md"
    for _ in range(2):
        assert main(["ops", "--reference", "--write", str(page)]) == 0
    assert page.read_text() == "all of it\n" and capsys.readouterr().out.splitlines() == [f"{page}: written", f"{page}: up to date"]
    assert main(["ops", "--reference"]) == 0 and capsys.readouterr().out == "all of it\n"
    assert main(["ops", "--reference", "--write", str(tmp_path / "no" / "api.md")]) == 4


def test_api_reference_has_everything_public() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    absent = [name for name, value in PUBLIC.items() if callable(value) and not re.search(rf"^###+ {name}$", text, re.M)]
    assert not absent


DOCSTRING = """Sum of ``a`` and :class:`B`.

=====  =====  =======================
name   dtype  meaning
=====  =====  =======================
a      int    first ``x | y``, goes
              on here
b, cc  int
b,     int    two
c             names
-----  -----  -----------------------
.      int    second
=====  =====  =======================

Another:

=====  =====  =======================
name   dtype  meaning
=====  =====  =======================
d      int    third
=====  =====  =======================

=====  ======================
no     head
=====  ======================

As in::

    call(a)

    more
Then text.
"""

MARKDOWN = """Sum of `a` and `B`.

| name | dtype | meaning |
|---|---|---|
| a | int | first `x \\| y`, goes on here |
| b, cc | int |  |
| b, c | int | two names |
|  | int | second |


Another:

| name | dtype | meaning |
|---|---|---|
| d | int | third |


|  |  |
|---|---|
| no | head |


As in:

```text
call(a)

more
```

Then text."""


def test_docstring_becomes_markdown() -> None:
    assert reference.markdown(DOCSTRING) == MARKDOWN


def test_signature_is_that_of_the_source() -> None:
    def function(a: torch.Tensor, *rest: int, b: float | None = None, **more: Any) -> tuple[int, ...]:
        return ()

    assert reference._signature(function) == "(a: torch.Tensor, *rest: int, b: float | None = None, **more: Any) -> tuple[int, ...]"
    assert reference._signature(dsv4_ops.BatchKind).startswith("(num_decodes: int, num_decode_tokens: int, ")


def test_version_table_is_what_ci_and_the_recorded_results_have() -> None:
    rows = re.findall(r"^\| (2\.\d+) \| ([^|]*) \| ([^|]*) \|", README.read_text(), re.M)
    dev, ci = (ROOT / "dev.py").read_text(), (ROOT / ".ci" / "run").read_text()
    recorded = json.loads(results.newest(ROOT / "benchmarks" / "results" / "h200", "tests").read_text())["env"]
    newest, oldest, gpu = rows
    assert (newest[1], oldest[1]) == ("CPU", "CPU")
    assert f'CPU_TORCH = ("torch=={newest[0]}.' in dev
    assert "python3 dev.py test " in ci
    assert f'OLD_TORCH = "torch=={oldest[0]}.' in dev
    assert "python3 dev.py test-old" in ci
    steps = {"all tests": 'step "tests"', "lint": 'step "lint and types"', "types": 'step "lint and types"', "wheel": 'step "wheel', "CUDA sources compiled": 'step "CUDA sources compile"', "`python3 dev.py run`": "python3 dev.py run"}
    assert newest[2].split(", ") == list(steps) and all(step in ci for step in steps.values())
    old_tests = re.search(r"OLD_TESTS = \((.*)\)", dev)
    assert old_tests is not None
    what = {"every op": "test_every_op", "compile": "test_compile_integration", "workspace": "test_workspace", "graphs": "test_graphs", "lanes": "test_lane_warnings", "passes": "test_passes_*", "the code of the pages": "test_docs"}
    assert oldest[2].removesuffix(": `python3 dev.py test-old`").split(", ") == list(what) and all(f'"{name}"' in old_tests[1] for name in what.values())
    assert recorded["torch"].startswith(gpu[0] + ".")
    assert gpu[1] == f"{recorded['gpu']}, CUDA {recorded['cuda']}, Triton {recorded['triton'].rpartition('.')[0]}"
    # Only a version whose faults were looked at may be named without CI: the tests of it record what they saw.
    seen = (ROOT / "tests" / "test_compile_integration.py").read_text()
    for version in re.findall(r"^\| (2\.\d+)\.\d+ \| CPU \| [^|]* \| by hand, not in CI \|$", README.read_text(), re.M):
        assert f'"{version}": ' in seen, version


def test_readme_says_what_dev_py_does() -> None:
    assert BLOCKS, "README has no example"
    help_text = (ROOT / "dev.py").read_text()
    for command in re.findall(r"^python3 dev.py (\w+)", README.read_text(), re.M):
        assert f"dev.py {command}" in help_text
