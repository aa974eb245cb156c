"""FlashInfer's table of DSV4 decode kernels, read from its files or from the module when somebody else imported it.

FlashInfer touches CUDA when it is imported, so nothing here imports it. What the table is has changed: a frozenset of
pairs without and with the widths 192 and 256, then an object that answers only ``in`` for tuples of plain ints.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._module_slice import PackageSlice, SliceError, find_package

__all__ = ["DispatchTable", "build_for", "build_tools", "checked_table", "installed_dispatch_table", "missing_parameters"]

PROJECT = "flashinfer-python"
_PACKAGE = "flashinfer"
_TABLE = ("mla._sparse_mla_sm120", "_DECODE_DSV4_DISPATCH")
_HEADS, _OLD_WIDTHS, _WIDTHS = (8, 16, 32, 64, 128), (128, 512, 1024), (128, 192, 256, 512, 1024)


@dataclass(frozen=True)
class DispatchTable:
    """What is known of FlashInfer's table of decode kernels. ``table`` is None when ``problem`` says why."""

    version: str | None
    table: Container[Any] | None = field(repr=False, compare=False)
    problem: str = ""


def installed_dispatch_table() -> DispatchTable:
    """The table of the FlashInfer that an import would find, read once for each installed version."""
    live = sys.modules.get(f"{_PACKAGE}.{_TABLE[0]}")
    file = getattr(sys.modules.get(_PACKAGE), "__file__", None)
    root = Path(file).parent if live is not None and file else find_package(_PACKAGE)
    if root is None and live is None:
        return DispatchTable(None, None, f"{PROJECT} is not installed")
    version = _version(root)
    if live is None:
        assert root is not None
        return _read_table(root, version)
    return checked_table(version, getattr(live, _TABLE[1], None), f"{_PACKAGE}.{_TABLE[0]} has no {_TABLE[1]}")


@functools.lru_cache(maxsize=16)
def _read_table(root: Path, version: str) -> DispatchTable:
    try:
        table = PackageSlice(_PACKAGE, root).value(*_TABLE)
    except SliceError as error:
        return DispatchTable(version, None, str(error))
    return checked_table(version, table, "it is None")


def _version(root: Path | None) -> str:
    """Version of the distribution that lies beside the package, which need not be the first of that name on the path."""
    for distribution in importlib.metadata.distributions(name=PROJECT, path=[str(root.parent)] if root else []):
        return distribution.version
    try:
        return importlib.metadata.version(PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def missing_parameters(module: str, function: str, needed: frozenset[str]) -> tuple[str | None, tuple[str, ...]]:
    """Version of the FlashInfer that an import would find, None without one, and the arguments of ``needed`` that its function does not take.

    All of them where there is no such function. Read from the files, once for each installed version.
    """
    root = find_package(_PACKAGE)
    return (None, tuple(sorted(needed))) if root is None else (_version(root), _missing_parameters(root, module, function, needed))


@functools.lru_cache(maxsize=16)
def _missing_parameters(root: Path, module: str, function: str, needed: frozenset[str]) -> tuple[str, ...]:
    try:
        names, anything = PackageSlice(_PACKAGE, root).parameters(module, function)
    except SliceError:
        return tuple(sorted(needed))
    return () if anything else tuple(sorted(needed - names))


def checked_table(version: str, table: Any, absent: str) -> DispatchTable:
    """A table whose answers make sense: it knows a pair that every build has had, and refuses an impossible one."""
    name = _TABLE[1]
    if table is None:
        return DispatchTable(version, None, absent)
    try:
        known = any((heads, width) in table for heads in _HEADS for width in _WIDTHS)
        absurd = (0, 0) in table or (-1, -1) in table
    except Exception as error:
        return DispatchTable(version, None, f"{name} is a {type(table).__name__} that does not answer `(heads, top_k) in table`: {type(error).__name__}: {error}")
    if absurd or not known:
        what = "holds the pair (0, 0) or (-1, -1)" if absurd else f"holds none of the pairs of heads {_HEADS} and top-k {_WIDTHS}"
        return DispatchTable(version, None, f"{name} is a {type(table).__name__} that {what}, so its entries are no longer (heads, top-k)")
    return DispatchTable(version, table)


def build_for(heads: int, width: int) -> str:
    """What to install for a pair, from the tables of the published wheels."""
    if heads in _HEADS and width in _OLD_WIDTHS:
        first = "0.6.14"
    elif heads in _HEADS and width in _WIDTHS:
        first = "0.6.18"
    elif heads <= 128:
        first = "0.7.0.post1"
    else:
        return ""
    return f"Install a build that has it: pip install '{PROJECT}>={first}'."


def build_tools() -> tuple[str, bool]:
    """What is there to have FlashInfer's kernels with (it compiles at the first call unless they came prebuilt), and whether it is enough."""
    if _is_installed("flashinfer-jit-cache"):
        return "flashinfer-jit-cache", True
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin"))
    absent = [name for name, there in (("nvcc", nvcc), ("ninja", shutil.which("ninja"))) if not there]
    return ("no " + ", no ".join(absent), False) if absent else ("nvcc and ninja", True)


def _is_installed(project: str) -> bool:
    try:
        importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
