"""Helpers for testing these ops, and kernels written to their contracts.

``samples(op)`` yields the labelled calls that the project's own tests use; ``poisoned()`` makes every uninitialized
byte a sentinel, so that an output that was not written shows on CPU too; ``canaries()`` surrounds a caller's buffer
with guard bytes; ``assert_same`` compares results (integers exactly, floats by dtype) and prints the worst place.
"""

from __future__ import annotations

from .basics import (
    TOLERANCES,
    BadInput,
    Canary,
    Op,
    Sample,
    assert_same,
    assert_topk,
    canaries,
    check_bad_input,
    check_fake,
    clone_args,
    fake_call,
    incomplete_ops,
    leaves,
    ops,
    outputs,
    poisoned,
    samples,
)
from .replay import PYTHON_KERNELS, TapeGraph, TapeRecorder, assert_graph_replay

__all__ = [
    "PYTHON_KERNELS",
    "TOLERANCES",
    "BadInput",
    "Canary",
    "Op",
    "Sample",
    "TapeGraph",
    "TapeRecorder",
    "assert_graph_replay",
    "assert_same",
    "assert_topk",
    "canaries",
    "check_bad_input",
    "check_fake",
    "clone_args",
    "fake_call",
    "incomplete_ops",
    "leaves",
    "ops",
    "outputs",
    "poisoned",
    "samples",
]
