"""For testing these ops, and functions written to their contracts; docs/conformance.md shows how.

* ``check_topk``, ``check_mixed_indices``, ``check_dflash_inputs``, ``check_sparse_decode`` and ``check_workspace`` run our cases against
  someone's function; what a failing case prints is the Python that repeats it. ``topk_cases`` and its like give the cases one by one.
* ``assert_graph_replay``: a function captured once is right on every replay, on a CPU too (``TapeRecorder`` stands in for CUDA graphs).
* ``samples(op)`` are the labelled calls of the project's own tests, ``reference(op)`` the plain definition; ``poisoned()`` makes every
  uninitialized byte a sentinel, so that an output that was not written shows on CPU too; ``canaries()`` surrounds a caller's buffer with
  guard bytes; ``assert_same`` compares results (integers exactly, floats by dtype), ``assert_topk`` judges top-k without a reference.
"""

from __future__ import annotations

from .attention import assert_attention, check_sparse_decode, sparse_decode_cases
from .basics import (
    TOLERANCES,
    BadInput,
    Canary,
    Op,
    Sample,
    assert_same,
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
    reference,
    samples,
    storage_bytes,
)
from .cases import Case, ConformanceError, Report, run_cases
from .dflash import assert_draft_inputs, check_dflash_inputs, dflash_inputs_cases
from .mixed_indices import assert_index_rows, check_mixed_indices, mixed_indices_cases
from .replay import PYTHON_KERNELS, TapeGraph, TapeRecorder, assert_graph_replay
from .topk import check_topk, topk_cases
from .topk_rows import assert_topk
from .workspace import WorkspaceCase, check_workspace, workspace_cases

__all__ = [
    "PYTHON_KERNELS",
    "TOLERANCES",
    "BadInput",
    "Canary",
    "Case",
    "ConformanceError",
    "Op",
    "Report",
    "Sample",
    "TapeGraph",
    "TapeRecorder",
    "WorkspaceCase",
    "assert_attention",
    "assert_draft_inputs",
    "assert_graph_replay",
    "assert_index_rows",
    "assert_same",
    "assert_topk",
    "canaries",
    "check_bad_input",
    "check_dflash_inputs",
    "check_fake",
    "check_mixed_indices",
    "check_sparse_decode",
    "check_topk",
    "check_workspace",
    "clone_args",
    "dflash_inputs_cases",
    "fake_call",
    "incomplete_ops",
    "leaves",
    "mixed_indices_cases",
    "ops",
    "outputs",
    "poisoned",
    "reference",
    "run_cases",
    "samples",
    "sparse_decode_cases",
    "storage_bytes",
    "topk_cases",
    "workspace_cases",
]
