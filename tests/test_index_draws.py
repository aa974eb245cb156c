"""The index kernels give the references' bits on random calls: a few hundred interpreted, 5,000 of each op on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.testing import Sample
from tests.index_draws import DRAWS, drawn
from tests.interpreter import Interpreter
from tests.test_triton import BY_NAME, compare, needs_triton

INTERPRETED, COMPILED = 40, 5000


def compare_draws(name: str, count: int) -> None:
    op = BY_NAME[name]
    for number in range(count):
        fill = ("largest", "plausible", "smallest")[number % 3]
        compare(op.triton, op.reference, drawn(name, number), lambda call: [], fill=fill)  # type: ignore[arg-type]


def on_cuda(sample: Sample) -> Sample:
    """The same views of the same buffers, on the GPU."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        base = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).cuda()
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    return Sample(sample.label, tuple(map(moved, sample.args)), {k: moved(v) for k, v in sample.kwargs.items()})


@needs_triton
@pytest.mark.parametrize("name", DRAWS)
def test_random_draws_interpreted(name: str, interpreter: Interpreter) -> None:
    interpreter(compare_draws, name, INTERPRETED)


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", DRAWS)
def test_random_draws_on_cuda(name: str) -> None:
    op = BY_NAME[name]
    assert op.backends["cuda"] == "triton"
    for number in range(COMPILED):
        sample = drawn(name, number)
        mine = on_cuda(sample)
        got = tuple(t.cpu() for t in testing.outputs(op.overload(*mine.args, **mine.kwargs)))
        testing.assert_same(got, op.reference(*sample.args, **sample.kwargs), sample.label)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_valid_calls_that_differ(name: str) -> None:
    """What is compared is not one kind of call over and over: sizes, strides, static sizes and results vary, and most draws give something."""
    op, samples = BY_NAME[name], [drawn(name, number) for number in range(60)]
    kinds = {tuple((tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a for a in testing.leaves(s)) for s in samples}
    assert len(kinds) > 40
    results = [testing.outputs(op(*s.args, **s.kwargs)) for s in samples]
    filled = [any(bool((t != -1).any() and (t != 0).any()) for t in result if t.numel()) for result in results]
    assert sum(filled) > 20, f"only {sum(filled)} of 60 draws list anything"
