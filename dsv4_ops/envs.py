"""Every environment variable that the package reads: name, default, meaning.

Read when used, never on import, so that a test or a user can set them late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["VARIABLES", "Variable", "build_mode", "commit", "debug_workspace", "disable_c", "peers_dir", "trace"]


@dataclass(frozen=True)
class Variable:
    """One environment variable, for the tables of ``doctor`` and the README."""

    name: str
    default: str
    meaning: str

    @property
    def value(self) -> str:
        return os.environ.get(self.name, self.default)


VARIABLES: tuple[Variable, ...] = (
    Variable("DSV4_OPS_TRACE", "0", "1: log op, shapes and back end before each launch (set before import: also those from compiled graphs and torch.ops)"),
    Variable("DSV4_OPS_DISABLE_C", "0", "1: do not load the compiled parts (use PyTorch and Triton paths)"),
    Variable("DSV4_OPS_DEBUG_WORKSPACE", "0", "1: record the scratch pointers of each op and check that lanes are disjoint"),
    Variable("PEERS_DIR", "", "bench: a folder that stands in for packages that are not installed"),
    Variable("COMMIT", "", "bench: the commit at the head of results, where neither history nor build knows it"),
    Variable("DSV4_OPS_BUILD", "auto", "build time: auto, require or none: what to do without a compiler"),
    Variable("DSV4_OPS_CUDA", "auto", "build time: auto, 1 or 0: compile the CUDA sources"),
    Variable("DSV4_OPS_CUDA_ARCHS", "9.0", "build time: architectures, as '8.0;9.0;10.0;12.0'"),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def _flag(name: str) -> bool:
    return _BY_NAME[name].value not in ("", "0", "false", "no", "off")


def trace() -> bool:
    return _flag("DSV4_OPS_TRACE")


def disable_c() -> bool:
    return _flag("DSV4_OPS_DISABLE_C")


def debug_workspace() -> bool:
    return _flag("DSV4_OPS_DEBUG_WORKSPACE")


def peers_dir() -> str:
    return _BY_NAME["PEERS_DIR"].value


def commit() -> str:
    return _BY_NAME["COMMIT"].value


def build_mode() -> str:
    return _BY_NAME["DSV4_OPS_BUILD"].value
