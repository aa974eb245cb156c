"""docs/conformance.md, "On functions of others", is what the record of the H200 says: counts, every difference, every reason not to call."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import wheels

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "h200" / "conformance.json").read_text())
SECTION = (ROOT / "docs" / "conformance.md").read_text().partition("\n## On functions of others\n")[2]
FAULTS = (ROOT / "docs" / "faults.md").read_text()
AGREES = {
    "topk": ("contract", "order any", "order, ties any", "order, ties, nan any"),
    "build_mixed_sparse_indices": ("contract", "beyond_length any"),
    "prepare_dflash_inputs": ("contract", "without copies of temperature and seeds"),
}
DIFFERS = ("wrong", "raises", "hangs", "crashes")
WHOSE = ("their fault", "our rule", "outside what it promises", "ours")
REASONS = {  # how the record says it -> how the page's reason starts
    r"lengths other than int32 \[rows\]": "lengths in another form",
    "no rows or columns": "no rows or no columns",
    "bfloat16": "bfloat16 scores",
    r"rows \d+, k \d+, width 1000, stride 1024": "room between rows",
    r"rows \d+, k \d+, width (1|30|1001), stride \1": "rows that do not start on 16 bytes",
    "prefill rows beside storage that is wider than the window": "prefill rows in storage wider than the window",
    "ids, positions, lengths or records out of range: read out of bounds": "ids, positions, lengths or records out of range",
    "no tokens, requests or blocks": "no tokens, requests or blocks",
    "records with lengths": "record numbers with lengths",
    "no requests, no blocks, or other than one KV group": "no requests, no blocks, or other than one KV group",
    "requests without tokens or state, or values out of range: read out of bounds": "requests without tokens or state",
}


def function(row: dict[str, Any]) -> str:
    """What the page calls a provider, the same for both ways to choose k."""
    return str(row["provider"]).removesuffix(", k of each case").removeprefix("vllm ")


def table(first: str, section: str = SECTION) -> list[list[str]]:
    """Cells of the table whose head starts with that cell."""
    found = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.M)
    assert found is not None, first
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def counted(rows: list[dict[str, Any]]) -> list[str]:
    """The cells of a function: called, passed under each judgement, differs in and out of range, not called."""
    verdicts, ladder = Counter(row["verdict"] for row in rows), AGREES[rows[0]["op"]]
    assert set(verdicts) <= {*ladder, *DIFFERS, "not called"}, "a verdict that the page has no column for"
    differs = [sum(row["verdict"] in DIFFERS and row["in_range"] is inside for row in rows) for inside in (True, False)]
    return [str(n) for n in (len(rows) - verdicts["not called"], *(verdicts[rung] for rung in ladder), *differs, verdicts["not called"])]


def providers() -> dict[str, list[dict[str, Any]]]:
    rows = defaultdict(list)
    for row in RECORD["rows"]:
        rows[row["provider"]].append(row)
    return rows


def test_counts_of_each_function() -> None:
    topk, triton = [], []
    for name, rows in providers().items():
        shown = f"`{function(rows[0])}`" + (", k of each case" if name.endswith(", k of each case") else "")
        if rows[0]["op"] == "topk":
            assert len(rows) == 28
            topk.append([shown, *counted(rows)])
        else:
            triton.append([shown, str(len(rows)), *counted(rows)])
    assert table("Top-k, 28 cases") == topk
    assert table("Triton functions of vLLM") == triton


def listed(section: str = SECTION) -> set[tuple[str, str, str]]:
    return {(name, case, result) for functions, cases, result, _, _ in table("Function", section) for name in names(functions) for case in names(cases)}


def recorded() -> set[tuple[str, str, str]]:
    """(function, case, "wrong" or how it failed) of all that differs."""

    def result(row: dict[str, Any]) -> str:
        if row["verdict"] != "raises":
            return str(row["verdict"])
        error = re.search(r"CUDA error: (?:an )?(.*?)(?: was encountered)? Search", row["message"])
        return error[1] if error else str(row["message"])

    return {(function(row), row["case"], result(row)) for row in RECORD["rows"] if row["verdict"] in DIFFERS}


def test_every_difference_is_explained_and_no_other() -> None:
    assert listed() == recorded()
    for functions, cases, _, whose, why in table("Function"):
        assert names(functions) and names(cases) and whose in WHOSE and len(why) > 40, cases


@pytest.mark.parametrize("old", ["`every score NaN`, `NaN of negative sign`", "| illegal memory access |", "`fi_cub`, "])
def test_a_difference_that_is_missing_or_of_another_kind_is_seen(old: str) -> None:
    at = SECTION.index(old, SECTION.index("### Each difference"))
    changed = SECTION[:at] + ("| wrong |" if old.startswith("|") else "`x`, ") + SECTION[at + len(old) :]
    assert listed(changed) != recorded()


def test_every_reason_not_to_call() -> None:
    said: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rows in providers().values():
        for reason, count in Counter(reason_of(row["why"]) for row in rows if row["verdict"] == "not called").items():
            said[reason][function(rows[0])].add(count)
    every = {function(row) for row in RECORD["rows"] if row["op"] == "topk"}
    shown = {}
    for why, where, n in table("Why"):
        functions = every - set(names(where)) if where.startswith("every top-k") else set(names(where))
        (reason,) = (r for r in REASONS.values() if why.startswith(r))
        shown[reason] = {name: {int(n)} for name in functions}
    assert shown == said


def reason_of(why: str) -> str:
    (reason,) = (reason for pattern, reason in REASONS.items() if re.fullmatch(pattern, why))
    return reason


NAMED_OTHERWISE = {"every score NaN": "A09", "NaN of negative sign": "A09"}  # A09's own case has more NaN than the fault can do with


def test_faults_page_says_which_faults_showed() -> None:
    showed, tried = set(), set()
    for row in RECORD["rows"]:
        fault = NAMED_OTHERWISE.get(row["case"]) or "".join(re.findall(r"^[A-J]\d\d", row["case"]))
        if fault and row["verdict"] != "not called" and not row["provider"].startswith("torch_masked"):
            tried.add(fault)
            showed |= {fault} if row["verdict"] in DIFFERS else set()
    said: dict[str, list[str]] = {"Seen": [], "Not seen": []}
    for section in re.split(r"^## ", FAULTS, flags=re.M)[1:]:
        text, _, reports = section.partition("\nReports: ")
        for result, faults in re.findall(r"\b(Seen|Not seen): ([A-J]\d\d(?:, [A-J]\d\d)*)", text):
            said[result] += faults.split(", ")
            assert {*faults.split(", ")} <= {*re.findall(r"\b[A-J]\d\d\b", reports)}, f"{faults}: of another section"
    assert (sorted(said["Seen"]), sorted(said["Not seen"])) == (sorted(showed), sorted(tried - showed))
    misaligned = {function(row) for row in RECORD["rows"] if "misaligned address" in row.get("message", "")}
    assert misaligned == {"fi_clusters"} and "the cluster back end of `top_k_ragged_transform`" in FAULTS


def test_where_it_ran_and_what_is_said_of_all() -> None:
    env, pinned = RECORD["env"], wheels.pinned()
    text = " ".join(SECTION.split())
    assert f"recorded on an {env['gpu']} with torch {env['torch']} at commit {RECORD['commit']}: vLLM {pinned['vllm']} and FlashInfer {pinned['flashinfer-python']}" in text
    assert f"of vLLM {pinned['vllm']} and FlashInfer {pinned['flashinfer-python']}, on an H200" in " ".join(FAULTS.split())
    assert f"all their cases in {RECORD['wall_s']:.0f} s" in text
    assert all("reproduction" in row for row in RECORD["rows"] if row["verdict"] == "wrong")
    verdicts = {row["verdict"] for row in RECORD["rows"]}
    assert "Nothing hung; a CUDA error was the worst." in text and not verdicts & {"hangs", "crashes", "not run", "not loaded"}
