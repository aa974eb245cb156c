"""Results as a table, printed as they come, and as a document."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from .._version import __version__
from . import machine
from .run import Bench, method

__all__ = ["document", "head_text", "notes_text", "row_lines", "verdict"]

COLUMNS = f"  {'':44} {'p20':>9} {'p50':>9} {'p80':>9} us {'GB/s':>8} {'of copy':>8} {'of floor':>9}"


def document(bench: Bench, command: str) -> dict[str, Any]:
    """As the files of ``benchmarks/results`` are kept: a row with ``ok`` false has no times but ``wrong`` or ``skipped``."""
    env = machine.environment() | {"copy_GBps": bench.copy_GBps, "empty_kernel_us": bench.floor_us, "empty_kernel": bench.floor}
    if bench.device == "cpu":
        env["gpu"] = "cpu"
    head = {"topic": "bench", "command": command, "version": __version__, "commit": machine.commit(), "date": datetime.date.today().isoformat(), "env": env}
    return {**head, "method": method(bench.device), "device": bench.device, "against": list(bench.against), "missing": bench.missing, "rows": bench.rows}


def head_text(facts: dict[str, Any]) -> str:
    """What the numbers hold for."""
    env = facts["env"]
    gpu = "" if facts["device"] == "cpu" else f"GPU      {env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}\n"
    triton = f", triton {env['triton']}" if env["triton"] else ""
    return (
        f"dsv4_ops {facts['version']}, commit {facts['commit']}, {facts['date']}\n{gpu}CPU      {env['cpu']}\n"
        f"torch    {env['torch']}{triton}, Python {env['python']}\n"
        f"method   {facts['method']}\n"
        f"copy     {env['copy_GBps']:.0f} GB/s, bytes read and written; GB/s of a call: the bytes it has to move at least\n"
        f"floor    {env['empty_kernel_us']:.2f} us, {env['empty_kernel']} timed in the same way; shares are of p50\n"
    )


def row_lines(row: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """Lines of one row; a heading where another case starts."""
    lines = []
    if before is None or (before["op"], before["params"]) != (row["op"], row["params"]):
        moved = f": {_bytes(row['bytes'])} to move" if "bytes" in row else ""
        size = ", ".join(f"{name} {value}" for name, value in row["params"].items())
        new_op = before is None or before["op"] != row["op"]
        lines += ["", *([COLUMNS] if new_op else []), f"{row['op']}  {size}  ({row['case']}){moved}"]
    name = row["provider"] + (f" ({row['backend']})" if "backend" in row else "")
    if row["ok"]:
        times = " ".join(f"{row[f'us_p{p}']:9.2f}" for p in (20, 50, 80))
        lines.append(f"  {name:44} {times}    {row['GBps']:8.1f} {row['copy_share']:8.1%} {row['floor_share']:9.1%}")
    else:
        lines.append(f"  {name:44} " + (f"WRONG, not timed: {row['wrong']}" if "wrong" in row else f"not run: {row['skipped']}"))
    return lines


def notes_text(facts: dict[str, Any]) -> str:
    """Packages that were asked for and have no rows, with the reason."""
    lines = []
    for package, ops in facts["missing"].items():
        grouped: dict[str, list[str]] = {}
        for op, reason in ops.items():
            grouped.setdefault(reason.replace(f" {op} ", " it "), []).append(op)
        lines += [f"  {package} ({', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}): {reason}" for reason, names in grouped.items()]
    return "\n".join(["", "not measured", *lines]) + "\n" if lines else ""


def verdict(facts: dict[str, Any]) -> str:
    rows: Sequence[dict[str, Any]] = facts["rows"]
    timed, wrong = sum(row["ok"] for row in rows), [row for row in rows if "wrong" in row]
    text = f"{len(rows)} rows: {timed} timed, {len(wrong)} wrong and not timed, {len(rows) - timed - len(wrong)} not run"
    return text + ("; times of a CPU say nothing about GPUs" if facts["device"] == "cpu" else "")


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
