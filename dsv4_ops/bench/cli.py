"""The ``bench`` command: its options and errors."""

from __future__ import annotations

import argparse
import difflib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import testing
from ..testing import Op
from ..topk import MAX_K
from . import cases, machine, plot, report
from .peers import PACKAGES
from .run import Bench

__all__ = ["add_command", "main"]

DESCRIPTION = """\
Times of the ops on this machine. Every result is compared with the op's reference before it is timed and after;
a wrong one has no time, and the exit code is 1 where it is one of ours.

On a GPU a time is that of a call inside a CUDA graph with a cold L2: what it costs in a captured step. GB/s count the
bytes that the call has to move at least; "of copy" is the share of p50 that a copy of as many bytes would take on
this machine, "of floor" the share that an empty kernel takes. On a CPU the times are wall times of single calls, good
for comparing CPU paths; they say nothing about GPUs.
"""
EPILOG = """\
examples:
  python -m dsv4_ops bench topk --against vllm,flashinfer,torch --plot topk.png --json topk.json
  python -m dsv4_ops bench swiglu kv_cache_insert --rows 1,64,1024
  python -m dsv4_ops bench --from topk.json --plot topk.svg    # table and picture again, nothing measured

Packages are used as they are installed; PEERS_DIR may name a folder of stand-ins (dsv4_ops/bench/peers.py says of
what). COMMIT names the commit where neither the checkout's history nor the build knows it.

exit codes: 0 done, 1 a result of ours is wrong or did not run, 2 the command line is wrong, 4 nothing could be done,
130 interrupted (what was measured is shown and written)
"""


class UsageError(Exception):
    """The command line asks for something that is not there."""


def add_command(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="times of the ops here, beside those of other packages", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_argument("ops", nargs="*", metavar="OP", help="ops to measure (default: all)")
    bench.add_argument("--against", metavar="LIST", type=_words, default=(), help=f"also what these packages have for the op: {','.join(PACKAGES)}")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda when there is one")
    bench.add_argument("--rows", metavar="LIST", type=_sizes, default=(), help="rows, tokens or requests, as 1,8,64")
    bench.add_argument("--columns", metavar="LIST", type=_sizes, default=(), help=f"columns, for {', '.join(cases.SWEPT)}")
    bench.add_argument("--k", metavar="N", type=_k, help=f"entries taken of a row, for the same ops (default: {cases.TOPK})")
    bench.add_argument("--json", metavar="FILE", type=Path, help="write the results")
    bench.add_argument("--plot", metavar="FILE", type=Path, help="draw time against size, with the roof; .png, .svg or .pdf (needs matplotlib, the extra `bench`)")
    bench.add_argument("--from", metavar="FILE", type=Path, dest="source", help="measure nothing: show and draw the results of an earlier --json FILE")


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _size(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 expected, got {text!r}")
    return int(text)


def _k(text: str) -> int:
    if _size(text) > MAX_K:
        raise argparse.ArgumentTypeError(f"at most {MAX_K} entries are taken of a row, got {text}")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_size, text.split(","))))


def main(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    try:
        wanted = _known("op", options.ops, [op.name for op in testing.ops()])
        _known("package", options.against, list(PACKAGES))
        if options.plot is not None and options.plot.suffix not in plot.SUFFIXES:
            raise UsageError(f"--plot: the name must end in {', '.join(plot.SUFFIXES)}, got {str(options.plot)!r}")
        if options.source is not None:
            return _shown(options, wanted)
        ops = [op for op in testing.ops() if op.name in wanted or not wanted]
        sizes = _sized(ops, options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if reason := _cannot(options):
        print(f"error: {reason}", file=sys.stderr)
        return 4
    return _measured(options, ops, sizes)


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            raise UsageError(f"there is no {what} {name!r}. {'Near' if near else 'There are'}: {', '.join(near or known)}.")
    return list(names)


def _device(options: argparse.Namespace) -> str:
    return str(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _sized(ops: Sequence[Op], options: argparse.Namespace) -> dict[str, list[cases.Case]]:
    if (options.columns or options.k is not None) and not any(op.name in cases.SWEPT for op in ops):
        raise UsageError(f"--columns and --k are for {', '.join(cases.SWEPT)}")
    sizes = {op.name: list(cases.cases(op, _device(options), options.rows, options.columns, options.k)) for op in ops}
    if empty := [name for name, found in sizes.items() if not found]:
        raise UsageError(f"no size is left for {', '.join(empty)}: every row is narrower than k")
    return sizes


def _cannot(options: argparse.Namespace) -> str:
    """Why nothing can be done: found before minutes are spent on measuring."""
    if options.plot is not None and (reason := plot.missing()):
        return reason
    for path in (options.json, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            return f"there is no folder {path.absolute().parent} to write {path.name} to"
    if options.source is None and _device(options) == "cuda" and not torch.cuda.is_available():
        return "no CUDA device: `python -m dsv4_ops doctor` says why"
    return ""


def _measured(options: argparse.Namespace, ops: Sequence[Op], sizes: dict[str, list[cases.Case]]) -> int:
    command = "python -m dsv4_ops " + shlex.join(_arguments(options))
    bench = Bench(_device(options), options.against, _printer())
    print(report.head_text(report.document(bench, command)), end="", flush=True)
    stopped = False
    try:
        for op in ops:
            bench.run(op, sizes[op.name])
    except KeyboardInterrupt:
        stopped = True
    finally:  # what is measured stays, should a kernel take the context down
        facts = report.document(bench, command)
        if options.json is not None:
            options.json.write_text(machine.text(facts))
    _finish(options, facts)
    if stopped:
        print("interrupted: not all that was asked for is measured", file=sys.stderr)
        return 130
    return 0 if all(row["ok"] for row in facts["rows"] if row["provider"] == "dsv4_ops") else 1


def _shown(options: argparse.Namespace, wanted: Sequence[str]) -> int:
    try:
        facts = json.loads(options.source.read_text())
        facts["rows"] = [row for row in facts["rows"] if row["op"] in wanted or not wanted]
        head = report.head_text(facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {options.source} holds no results of this command: {type(error).__name__}: {error}", file=sys.stderr)
        return 4
    if reason := _cannot(options):
        print(f"error: {reason}", file=sys.stderr)
        return 4
    print(head, end="")
    show = _printer()
    for row in facts["rows"]:
        show(row)
    _finish(options, facts)
    return 0


def _finish(options: argparse.Namespace, facts: dict[str, Any]) -> None:
    print(report.notes_text(facts) + "\n" + report.verdict(facts))
    if options.plot is not None:
        plot.draw(facts, options.plot)
    for path in (options.json if options.source is None else None, options.plot):
        if path is not None:
            print(f"wrote {path}")


def _printer() -> Callable[[dict[str, Any]], None]:
    before: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        print("\n".join(report.row_lines(row, before[-1] if before else None)), flush=True)
        before[:] = [row]

    return show


def _arguments(options: argparse.Namespace) -> list[str]:
    """The command line again, for the record; files by their names, which is what another machine may know of them."""
    lists = {"--against": options.against, "--rows": options.rows, "--columns": options.columns}
    found = ["bench", *options.ops]
    for name, values in lists.items():
        found += [name, ",".join(map(str, values))] if values else []
    for name in ("k", "device", "json", "plot"):
        value = getattr(options, name)
        found += [f"--{name}", value.name if isinstance(value, Path) else str(value)] if value is not None else []
    return found
