"""Triton kernels on inputs whose elements lie more than 2**31 apart, interpreted: a 32-bit product of an index and a stride wraps there.

By construction: each dimension of each input of each launcher in turn is stretched over address space that is reserved and hardly used. Outputs of that
size need a GPU: test_kernels_cuda.py.
"""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.errors import ArgumentError
from dsv4_ops.testing import Op, Sample
from tests.interpreter import Interpreter
from tests.test_every_op import mutated
from tests.test_triton import BY_NAME, EACH, TOLERANT, same

FAR = 2**31  # elements
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.12 on; the number is Linux's
ROWS = (1, 3)  # of one row, a step or a column stands that far; of three, rows do


def stretched(value: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy whose last element along ``dim`` lies past 2**31 elements; the other dimensions are dense."""
    inner, strides = 1, [0] * value.dim()
    for d in reversed(range(value.dim())):
        if d != dim:
            strides[d], inner = inner, inner * value.shape[d]
    step = FAR // (value.shape[dim] - 1) + inner
    strides[dim] = step + -step % 64  # as wide accesses want it
    size = (strides[dim] * (value.shape[dim] - 1) + inner) * value.element_size()
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=value.dtype).as_strided(value.shape, strides).copy_(value)


def with_tensor(sample: Sample, key: int | str, i: int, value: torch.Tensor) -> Sample:
    """The call with ``value`` in place of an argument, or of the i-th tensor of one that is a list."""

    def put(old: Any) -> Any:
        return [value if j == i else item for j, item in enumerate(old)] if isinstance(old, list) else value

    args = tuple(put(a) if n == key else a for n, a in enumerate(sample.args))
    return Sample(sample.label, args, {n: put(a) if n == key else a for n, a in sample.kwargs.items()})


def ways(op: Op) -> list[str]:
    """Every stretched call is right. Returns which there were: ``argument.dimension``."""
    names, found = [a.name for a in op.overload._schema.arguments], []
    for rows in ROWS:
        plain = op.sized("cpu", rows)
        theirs = testing.clone_args(plain)
        expected = testing.outputs(op.reference(*theirs.args, **theirs.kwargs)), mutated(op, theirs)
        for key, argument in (*enumerate(plain.args), *plain.kwargs.items()):
            for i, value in enumerate(argument if isinstance(argument, list) else [argument]):
                for dim in range(value.dim() if isinstance(value, torch.Tensor) and value.numel() else 0):
                    if value.shape[dim] < 2:
                        continue
                    call = with_tensor(testing.clone_args(plain), key, i, stretched(value, dim))
                    label = f"{names[key] if isinstance(key, int) else key}.{dim}"
                    try:
                        op.check(*call.args, **call.kwargs)
                    except ArgumentError:  # an input that must be dense there
                        continue
                    actual = testing.outputs(op.triton(*call.args, **call.kwargs))  # type: ignore[misc]
                    tolerance = TOLERANT[op.name][:2] if op.name in TOLERANT else None
                    same(actual, expected[0], f"{rows} rows, {label}", tolerance)
                    same([t.contiguous() for t in mutated(op, call)], expected[1], f"{rows} rows, {label} (mutated arguments)", tolerance)
                    found.append(label)
    return found


def ways_of(name: str) -> list[str]:
    return ways(BY_NAME[name])


@pytest.mark.parametrize("op", EACH)
def test_inputs_past_2_to_the_31_elements_interpreted(op: Op, interpreter: Interpreter) -> None:
    assert interpreter(ways_of, op.name)
