"""What the rows of the top-k benchmark say: medians of runs, and each cell's best peer over ours, missed cells named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
OURS = "dsv4_ops"


def _key(row: Row) -> tuple[Any, ...]:
    return row["op"], row["case"], *row["params"].values(), row["provider"]


def median_of_runs(rows: Sequence[Row]) -> list[Row]:
    """One row for each op, case, parameters and provider: the run with the median time, with the times of all runs.

    A row that failed in one run is a row that failed: it keeps no times.
    """
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(_key(row), []).append(row)
    merged = []
    for same in runs.values():
        bad = [row for row in same if not row["ok"]]
        if bad:
            merged.append({name: value for name, value in bad[0].items() if not name.startswith("us_")})
            continue
        ordered = sorted(same, key=lambda row: row["us_p50"])
        times = {"us_runs": [row["us_p50"] for row in same]} if len(same) > 1 else {}
        merged.append({**ordered[(len(ordered) - 1) // 2], **times})
    return merged


def cells(rows: Sequence[Row], wanted: Callable[[Row], bool]) -> list[dict[str, Any]]:
    """Our time and the best peer's, for each op, case and parameters that ``wanted`` takes."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if wanted(row):
            groups.setdefault(_key(row)[:-1], []).append(row)
    found = []
    for group in groups.values():
        mine = next((row for row in group if row["provider"] == OURS), None)
        peers = [row for row in group if not row["provider"].startswith(OURS) and "us_p50" in row]
        best = min(peers, key=lambda row: row["us_p50"]) if peers else None
        cell = {"case": group[0]["case"], **group[0]["params"], "us": mine.get("us_p50") if mine else None}
        if best is not None:
            cell |= {"best_peer": best["provider"], "peer_us": best["us_p50"]}
            cell["ratio"] = round(best["us_p50"] / mine["us_p50"], 3) if mine and "us_p50" in mine else 0.0
        found.append(cell)
    return found


def _against_peers(rows: Sequence[Row], target: float, wanted: Callable[[Row], bool], mean: float | None = None) -> dict[str, Any] | None:
    """``mean``: what the geometric mean of all cells should be, where that is asked too."""
    compared = [cell for cell in cells(rows, wanted) if "ratio" in cell]
    if not compared:
        return None
    ratios = [cell["ratio"] for cell in compared]  # 0 where ours was wrong
    missed = [cell for cell in compared if cell["ratio"] < target]
    geomean = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3) if min(ratios) > 0 else 0.0
    asked = {} if mean is None else {"geomean_target": mean, "geomean_met": geomean >= mean}
    return {"target": target, "cells": len(compared), "met": len(compared) - len(missed), "geomean": geomean, **asked, "missed": missed}


def _within(limit: float | None, pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any] | None:
    """Ratios of our own rows: each against the one that it is measured by. No limit: nothing is asked."""
    compared = [{"case": row["case"], **row["params"], "us": row["us_p50"], "base_us": base["us_p50"], "ratio": round(row["us_p50"] / base["us_p50"], 3)} for row, base in pairs]
    return {"limit": limit, "cells": len(compared), "largest": max(cell["ratio"] for cell in compared), "missed": [cell for cell in compared if limit is not None and cell["ratio"] > limit]} if compared else None


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The targets of the benchmark, each with its cells that were missed; what was not measured is absent."""
    mine = {_key(row)[:-1]: row for row in rows if row["provider"] == OURS and row["op"] == "topk" and "us_p50" in row}

    def at(row: Row, case: str) -> Row | None:
        return mine.get(("topk", case, *row["params"].values()))

    def pairs(prefix: str, base: str, some: Callable[[Row], bool] = lambda row: True) -> list[tuple[Row, Row]]:
        return [(row, other) for row in mine.values() if row["case"].startswith(prefix) and some(row) and (other := at(row, base)) is not None]

    def full(row: Row, ks: Sequence[int], dtype: str = "float32", op: str = "topk") -> bool:
        return row["case"].startswith("full") and row["op"] == op and row["params"]["k"] in ks and row["params"]["dtype"] == dtype

    parts = {
        "k 512, full rows: best peer over ours": _against_peers(rows, 1.03, lambda row: full(row, (512,)), mean=1.5),
        "k 1024 and 2048, full rows: best peer over ours": _against_peers(rows, 0.95, lambda row: full(row, (1024, 2048))),
        "other values, ragged and short rows: best peer over ours": _against_peers(rows, 1.0, lambda row: not row["case"].startswith("full")),
        "bfloat16: best peer over ours": _against_peers(rows, 1.0, lambda row: full(row, (512,), "bfloat16")),
        "fused slots: best peer over ours": _against_peers(rows, 1.0, lambda row: full(row, (512,), op="topk_slots")),
        "values: ours over ours of normal values": _within(1.25, pairs("values: ", "values: normal", lambda row: row["case"] != "values: normal")),
        "ragged, 256 rows: ours over ours of full rows": _within(0.7, pairs("ragged", "full", lambda row: row["params"]["rows"] == 256)),
        "ragged, fewer rows: ours over ours of full rows": _within(1.0, pairs("ragged", "full", lambda row: row["params"]["rows"] < 256)),
        "topk_values: ours over ours of topk": _within(None, [(row, base) for row in rows if full(row, (512,), op="topk_values") and row["provider"] == OURS and "us_p50" in row and (base := at(row, "full")) is not None]),
    }
    found = {name: part for name, part in parts.items() if part is not None}
    wrong = [{"op": row["op"], "case": row["case"], **row["params"], "provider": row["provider"], "why": row.get("skipped", "wrong result")} for row in rows if not row["ok"]]
    return found | {"wrong or not run": wrong}


def text(found: dict[str, Any], rows: Sequence[Row]) -> str:
    lines = []
    for k in sorted({row["params"]["k"] for row in rows}):
        table = {(c["rows"], c["columns"]): c for c in cells(rows, lambda row, k=k: row["case"] == "full" and row["op"] == "topk" and row["params"]["k"] == k and row["params"]["dtype"] == "float32")}  # type: ignore[misc]
        columns = sorted({c for _, c in table})
        if not table:
            continue
        lines += [f"k {k}, full rows, float32: our us (best peer over ours)", f"{'rows':>5}" + "".join(f"{c:>17}" for c in columns)]
        for r in sorted({r for r, _ in table}):
            shown = [table.get((r, c)) for c in columns]
            lines.append(f"{r:>5}" + "".join(f"{'-' if c is None or c['us'] is None else format(c['us'], '.2f') + ' (' + format(c.get('ratio', math.nan), '.2f') + ')':>17}" for c in shown))
    for name, part in found.items():
        if name == "wrong or not run":
            continue
        figures = f"{part['met']} of {part['cells']} at {part['target']} or more, geometric mean {part['geomean']}" if "target" in part else f"largest {part['largest']} of {part['cells']}, limit {part['limit'] or 'none'}"
        if "geomean_target" in part:
            figures += f" (asked {part['geomean_target']}: {'met' if part['geomean_met'] else 'missed'})"
        lines.append(f"{name}: {figures}")
        for cell in part["missed"]:
            other = f"{cell['best_peer']} {cell['peer_us']}" if "best_peer" in cell else f"base {cell['base_us']}"
            lines.append(f"  missed: {cell['case']}, {cell['rows']} x {cell['columns']}, k {cell['k']}: {cell['us']} us, {other} us, ratio {cell['ratio']}")
    lines += [f"wrong or not run: {r['provider']}, {r['op']}, {r['case']}, {r['rows']} x {r['columns']}, k {r['k']}, {r['dtype']}: {r['why']}" for r in found["wrong or not run"]]
    return "\n".join(lines)
