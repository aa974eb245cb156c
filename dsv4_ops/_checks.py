"""Named argument checks, shared by eager calls and fake implementations.

A check looks at shapes, dtypes, strides and devices only; values that live on a device are never read (that would
synchronize): each op clamps or masks them by contract. So the same check runs on real and on fake tensors and a bad
shape fails at trace time with the text that it has in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import (
    ArgumentDeviceError,
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
)
from .lane_context import AMBIENT, MAX_LANES

FLOATS = (torch.float32, torch.bfloat16)
INDEX = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
BOOL = (torch.bool,)

PAD_SLOT_ID = -1
"""Slot id of a token that has no place in the cache: nothing is written or read for it."""

NULL_BLOCK = 0
"""Physical block id that block tables use for "not allocated". Never the target of a write."""


def names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensor(where: str, name: str, value: torch.Tensor, dtypes: Sequence[torch.dtype], ndim: int | Sequence[int]) -> None:
    """``value`` is a tensor of one of ``dtypes`` with ``ndim`` dimensions (or one of several)."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentDtypeError(where, name, "a tensor", type(value).__name__)
    if value.dtype not in dtypes:
        raise ArgumentDtypeError(where, name, names(dtypes), str(value.dtype).removeprefix("torch."), f"Convert it with {name}.to(torch.{names(dtypes[:1])}).")
    allowed = (ndim,) if isinstance(ndim, int) else tuple(ndim)
    if value.dim() not in allowed:
        expected = " or ".join(f"{n}-dimensional" for n in allowed)
        raise ArgumentShapeError(where, name, expected, f"shape {list(value.shape)}")


def shape(where: str, name: str, value: torch.Tensor, expected: Sequence[int | None], text: str) -> None:
    """``value`` has exactly the sizes of ``expected`` (None: any); ``text`` names them, as ``[tokens, 512]``."""
    ok = value.dim() == len(expected) and all(want is None or have == want for have, want in zip(value.shape, expected, strict=True))
    if not ok:
        raise ArgumentShapeError(where, name, f"of shape {text}", f"shape {list(value.shape)}")


def last_stride_one(where: str, name: str, value: torch.Tensor) -> None:
    """The last dimension is dense. Any other stride is free."""
    if value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentShapeError(where, name, "dense in its last dimension (stride 1)", f"strides {list(value.stride())}", f"Pass {name}.contiguous().")


def index_rows(where: str, name: str, indices: torch.Tensor, lens: torch.Tensor, tokens: int, like: str) -> None:
    """``{name}_indices`` [tokens, any width], dense rows, and ``{name}_lens`` [tokens]; ``like`` names the argument that has so many tokens."""
    tensor(where, f"{name}_indices", indices, INDEX, 2)
    shape(where, f"{name}_indices", indices, (tokens, None), f"[tokens, width] with {tokens} tokens as in {like}")
    last_stride_one(where, f"{name}_indices", indices)
    tensor(where, f"{name}_lens", lens, INDEX, 1)
    shape(where, f"{name}_lens", lens, (tokens,), f"[tokens] with {tokens} tokens as in {like}")


def same_device(where: str, **tensors: torch.Tensor | None) -> None:
    """All given tensors live on one device."""
    first: tuple[str, torch.device] | None = None
    for name, value in tensors.items():
        if value is None:
            continue
        if first is None:
            first = (name, value.device)
        elif value.device != first[1]:
            raise ArgumentDeviceError(where, name, f"on {first[1]} like {first[0]}", f"device {value.device}", f"Move it with {name}.to('{first[1]}').")


def integer(where: str, name: str, value: int, low: int, high: int | None = None, fix: str = "") -> None:
    """``low <= value <= high``."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise ArgumentDtypeError(where, name, "an integer", type(value).__name__)
    if value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ArgumentError(where, name, expected, value, fix)


def lane(where: str, value: int) -> None:
    """``value`` is a workspace lane, or -1 for the ambient one."""
    integer(where, "lane", value, AMBIENT, MAX_LANES - 1, "Leave it at -1 and enter use_workspace_lane, or pass the lane of the region.")


def one_of(where: str, name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ArgumentError(where, name, "one of " + ", ".join(repr(a) for a in allowed), repr(value))
