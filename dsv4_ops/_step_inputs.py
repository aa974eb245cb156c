"""The inputs of a captured step: what each is, and the memory that holds them, on the device and on the host.

All inputs of a step lie in one piece, so that one copy carries what the host has written of all of them. The piece has the same order on both
sides and at every size: inputs of one shape first, then those with rows, each with room for the largest size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _checks
from .errors import ArgumentDtypeError

if TYPE_CHECKING:
    from .graphs import StepOutputs

__all__ = ["BlockPart", "InputBlock", "StagedInputs", "Staging", "StepInput"]

ALIGNMENT = 256
"""Bytes; of each input, for kernels and for ``torch.compile``, which takes inputs to be aligned."""
_WORD = torch.int64


@dataclass(frozen=True)
class StepInput:
    """One input of a step.

    ``rows``: rows of the first dimension for each unit of the step's size, 0 for a tensor of the same shape at every size. ``shape``: of one
    row, or with ``rows=0`` of the whole. ``pad``: value of rows that a call does not give, and of everything during warm-up.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    rows: int = 1
    pad: int | float | bool = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise ArgumentDtypeError("StepInput", "dtype", "a dtype, as torch.int64", repr(self.dtype))
        if not isinstance(self.shape, tuple | list):
            raise ArgumentDtypeError("StepInput", "shape", "a tuple of sizes, as (64,)", repr(self.shape))
        _checks.integer("StepInput", "rows", self.rows, 0)
        torch.tensor(self.pad, dtype=self.dtype)  # a value that the dtype does not hold fails here

    def full_shape(self, size: int) -> tuple[int, ...]:
        return (size * self.rows, *self.shape) if self.rows else self.shape

    def nbytes(self, size: int) -> int:
        count = self.dtype.itemsize
        for extent in self.full_shape(size):
            count *= extent
        return count


class InputBlock:
    """Memory for the inputs ``specs`` of a call of up to ``size`` units, filled with padding."""

    def __init__(self, specs: Sequence[StepInput], size: int, device: torch.device | str, *, pinned: bool = False) -> None:
        self.specs, self._offsets, end = tuple(specs), [0] * len(specs), 0
        for i in sorted(range(len(specs)), key=lambda i: bool(specs[i].rows)):
            self._offsets[i] = end
            end += -(-specs[i].nbytes(size) // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):
            self.data = torch.empty(end // _WORD.itemsize, dtype=_WORD, device=device, pin_memory=pinned)
            self.whole = self._tensors(size)
            for tensor, spec in zip(self.whole, self.specs, strict=True):
                tensor.fill_(spec.pad)

    @torch.inference_mode(False)
    def _tensors(self, size: int) -> tuple[torch.Tensor, ...]:
        """For a call of ``size`` units. They are no views: a compiled step would guard the size of what they view, and compile the largest size by itself."""
        storage, device = self.data.untyped_storage(), self.data.device
        return tuple(
            torch.empty(0, dtype=spec.dtype, device=device).set_(storage, offset // spec.dtype.itemsize, spec.full_shape(size))  # type: ignore[call-overload]  # dense; the stub asks for strides
            for spec, offset in zip(self.specs, self._offsets, strict=True)
        )

    def part(self, size: int) -> BlockPart:
        """What a call of ``size`` units uses."""
        end = max((offset + spec.nbytes(size) for offset, spec in zip(self._offsets, self.specs, strict=True)), default=0)
        return BlockPart(self._tensors(size), self.data[: -(-end // _WORD.itemsize)])


class BlockPart(NamedTuple):
    """The inputs of a call of one size, in the order of the specification, and the front of the block, which holds them."""

    tensors: tuple[torch.Tensor, ...]
    data: torch.Tensor


class StagedInputs:
    """The inputs of a step's next call, in host memory of the step. Made by ``GraphStep.stage``, which fills them with padding.

    ``tensors``: on the CPU (pinned beside a GPU), padded to ``size``, in the order of the step's inputs; ``rows`` of them were asked for. Write
    them, then :meth:`run`.
    """

    def __init__(self, part: BlockPart, size: int, run: Callable[[StagedInputs], StepOutputs]) -> None:
        self.size, self.rows, self.tensors = size, 0, part.tensors
        self._data, self._run = part.data, run

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """``tensors`` as NumPy arrays on the same memory: many small writes take less time there. (NumPy has no bfloat16.)"""
        return tuple(tensor.numpy() for tensor in self.tensors)

    def run(self) -> StepOutputs:
        """Run the step on what was written, once. One copy takes it to the device; the next ``GraphStep.stage`` waits for that copy.

        GraphError when it has run, or when other inputs were staged since.
        """
        return self._run(self)


class Staging:
    """Host memory of a step for the inputs that the host writes, used again for every call.

    The device reads pinned memory when it comes to the copy, so it may be written again only after that: :meth:`begin` waits for it.
    """

    def __init__(self, specs: Sequence[StepInput], sizes: Sequence[int], device: torch.device, run: Callable[[StagedInputs], StepOutputs]) -> None:
        self.specs, self.pinned, self._run = specs, device.type == "cuda", run
        block, padding = InputBlock(specs, sizes[-1], "cpu", pinned=self.pinned), InputBlock(specs, sizes[-1], "cpu")
        self._calls = {size: (StagedInputs(block.part(size), size, run), padding.part(size).data) for size in sizes}
        self._copied = torch.cuda.Event() if self.pinned else None
        self._open: StagedInputs | None = None

    def begin(self, size: int, rows: int) -> StagedInputs:
        """Padding, to be written over."""
        if size in self._calls:
            staged, padding = self._calls[size]
            if self._copied is not None:
                self._copied.synchronize()
            staged._data.copy_(padding)
        else:  # past the largest size: memory of its own
            staged = StagedInputs(InputBlock(self.specs, size, "cpu", pinned=self.pinned).part(size), size, self._run)
        staged.rows, self._open = rows, staged
        return staged

    def take(self, staged: StagedInputs) -> bool:
        """Whether ``staged`` is what was staged last and has not run; it counts as run from here on."""
        is_open, self._open = self._open is staged, None
        return is_open

    def copy(self, staged: StagedInputs, data: torch.Tensor) -> None:
        """What was written, into the same part of a block on the device."""
        data.copy_(staged._data, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(data.device))
