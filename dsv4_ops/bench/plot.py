"""Time against size, with the roof: what the copy rate and an empty kernel allow at best. Needs matplotlib, for nothing else."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["SUFFIXES", "draw", "missing"]

SUFFIXES = (".png", ".svg", ".pdf")
OURS = "#0b5394"
ROOF = "#777777"
OTHERS = ("#c1272d", "#e08214", "#1a9850", "#7b3294", "#8c6d31", "#d6609a", "#4d4d4d", "#17a2b8", "#99a800", "#5c6bc0")
"""One a provider, the same in every panel; ours is thicker and dark blue."""


def missing() -> str:
    """Why nothing can be drawn here; empty where it can."""
    return "" if importlib.util.find_spec("matplotlib") is not None else "--plot needs matplotlib: pip install matplotlib (this package's extra `bench`)"


def draw(facts: dict[str, Any], path: Path) -> None:
    """Write the picture of ``facts`` (a document of results) in the format that ``path`` ends in."""
    figure(facts).savefig(path, dpi=150)


def figure(facts: dict[str, Any]) -> Any:
    """One panel for each op (for each number of rows where columns are swept), a line for each provider."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(facts["rows"])
    names = list(dict.fromkeys(row["provider"] for row in facts["rows"] if row["ok"] and row["provider"] != "dsv4_ops"))
    colors = {"dsv4_ops": OURS} | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(names)}
    across = min(2 if len(panels) <= 6 else 3, len(panels)) or 1
    down = math.ceil(len(panels) / across) or 1
    drawn = Figure(figsize=(6.6 * across, 1.25 + 3.7 * down), layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.get_layout_engine().set(w_pad=0.12, h_pad=0.1, rect=(0, 0, 1, 1 - 0.85 / drawn.get_figheight()))  # type: ignore[union-attr, call-arg]
    title, conditions = _titles(facts)
    top = 1 - 0.12 / drawn.get_figheight()
    drawn.text(0.012, top, title, size=14, weight="bold", va="top")
    drawn.text(0.012, top - 0.33 / drawn.get_figheight(), conditions, size=9, color="#444444", va="top")
    grid = drawn.subplots(down, across, squeeze=False)
    for axes, (heading, rows) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, heading, rows, colors, facts["env"])
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    return drawn


def _panels(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    panels: dict[str, list[dict[str, Any]]] = {}
    several = len({row["op"] for row in rows}) > 1
    for row in rows:
        count = row["params"]["rows"]
        heading = row["op"] if "columns" not in row["params"] else (f"{row['op']}, " if several else "") + f"{count} row{'s' * (count > 1)}"
        panels.setdefault(heading, []).append(row)
    return {heading: found for heading, found in panels.items() if any(row["ok"] for row in found)}


def _titles(facts: dict[str, Any]) -> tuple[str, str]:
    rows, env = facts["rows"], facts["env"]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    what = ops[0] if len(ops) == 1 else f"{len(ops)} ops"
    shared = {name: rows[0]["params"][name] for name in ("k", "dtype") if rows and len({row["params"].get(name) for row in rows}) == 1 and name in rows[0]["params"]}
    what += "".join(f", {value}" if name == "dtype" else f", {name} = {value}" for name, value in shared.items())
    versions = f"torch {env['torch']}" + (f", triton {env['triton']}" if env.get("triton") else "") + f", dsv4_ops {facts['version']} at {facts['commit']}, {facts['date']}"
    if facts["device"] == "cpu":
        return f"{what}: time of a call on a CPU (says nothing about GPUs)", f"{env['cpu']}, {versions}\nmedian of single calls, caches as they are; band: 20th to 80th percentile"
    return (
        f"{what}: time of a call in a CUDA graph, cold L2",
        f"{env['gpu']}, driver {env['driver']}, {versions}\nmedian of 11 replays, lower is better; every result checked before and after; roof: {env['copy_GBps']:.0f} GB/s (measured copy), "
        f"at least {env['empty_kernel_us']:.2f} us (an empty kernel)",
    )


def _panel(axes: Any, heading: str, rows: Sequence[dict[str, Any]], colors: dict[str, str], env: dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    swept = "columns" in rows[0]["params"]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["ok"]:
            lines.setdefault(row["provider"], []).append(row)
    ends = []
    for name, found in lines.items():
        found = sorted(found, key=_size)
        sizes, times = [_size(row) for row in found], [row["us_p50"] for row in found]
        ours = name == "dsv4_ops"
        axes.fill_between(sizes, [row["us_p20"] for row in found], [row["us_p80"] for row in found], color=colors[name], alpha=0.15, linewidth=0)
        axes.plot(sizes, times, color=colors[name], linewidth=2.6 if ours else 1.3, marker="o", markersize=5 if ours else 3, zorder=4 if ours else 3)
        ends.append((times[-1], sizes[-1], name, colors[name], ours))
    floor_us = env["empty_kernel_us"]
    roof = _roof(rows, floor_us, env["copy_GBps"])
    axes.plot(*zip(*roof, strict=True), color=ROOF, linestyle=(0, (4, 2)), linewidth=1.2, zorder=2, marker="_" if len(roof) == 1 else "")
    ends.append((roof[-1][1], round(roof[-1][0]), "roof: copy" if roof[-1][1] > floor_us else "roof: launch", ROOF, False))
    sizes = sorted({_size(row) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [_thousands(size) for size in sizes])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(heading, loc="left", size=11, weight="bold")
    axes.set_xlabel("columns" if swept else "rows, tokens or requests", size=9)
    axes.set_ylabel("microseconds a call", size=9)
    low, high = sizes[0], sizes[-1]
    span = max(math.log2(high / low), 1)
    axes.spines["bottom"].set_bounds(low, high)
    axes.set_xlim(low / 2 ** (0.04 * span), high * 2 ** (0.7 * span))  # room for the labels
    _labels(axes, ends)


def _roof(rows: Sequence[dict[str, Any]], floor_us: float, copy_GBps: float) -> list[tuple[float, float]]:
    """The longer of a copy of as many bytes and an empty call; between the sizes that were measured, on the line between their bytes."""
    copy_us = sorted({(math.log(_size(row)), math.log(row["bytes"] / copy_GBps / 1e3)) for row in rows if row["ok"]})
    points: list[tuple[float, float]] = []
    last = 0.0, 0.0
    for size, us in copy_us:
        steps = range(1, 33) if points else (32,)
        points += [(last[0] + (size - last[0]) * i / 32, last[1] + (us - last[1]) * i / 32) if i < 32 else (size, us) for i in steps]
        last = size, us
    return [(math.exp(size), max(math.exp(us), floor_us)) for size, us in points]


def _size(row: dict[str, Any]) -> int:
    return int(row["params"].get("columns", row["params"]["rows"]))


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _thousands(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else str(size)


def _labels(axes: Any, ends: Sequence[tuple[float, int, str, str, bool]]) -> None:
    """The name of each line at its end, moved apart where two would meet, with a thin line to what it names."""
    low, high = (math.log(v) for v in axes.get_ylim())
    gap = (high - low) * 0.062
    ordered = sorted(ends)
    places = [math.log(end[0]) for end in ordered]
    for _ in range(100):
        for i in range(1, len(places)):
            short = gap - (places[i] - places[i - 1])
            if short > 1e-9:
                places[i - 1] -= short / 2
                places[i] += short / 2
    lowest = low + gap / 2
    if places and places[0] < lowest:
        places = [place + lowest - places[0] for place in places]
    right = max(size for _, size, *_ in ends)
    for place, (value, size, name, color, ours) in zip(places, ordered, strict=True):
        at = right * 2 ** (0.05 * max(math.log2(axes.get_xlim()[1] / axes.get_xlim()[0]), 1))
        axes.plot([size, at * 0.985], [value, math.exp(place)], color=color, linewidth=0.6, alpha=0.6, zorder=1)
        axes.text(at, math.exp(place), f"{name}  {_three_digits(value)}", color=color, size=8.5, va="center", weight="bold" if ours else "normal")
