"""Samples, comparison, poison and canaries.

``samples(op)`` yields the labelled calls that the project's own tests use; ``poisoned()`` makes every uninitialized
byte a sentinel, so that an output that was not written shows on CPU too; ``canaries()`` surrounds a caller's buffer
with guard bytes; ``assert_same`` compares results (integers exactly, floats by dtype) and prints the worst place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import _registry
from .._registry import BadInput, Op, Sample
from ..errors import ArgumentDtypeError

__all__ = ["TOLERANCES", "BadInput", "Canary", "Op", "Sample", "assert_same", "canaries", "check_bad_input", "check_fake", "clone_args", "fake_call", "incomplete_ops", "leaves", "ops", "outputs", "poisoned", "reference", "samples", "storage_bytes"]

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2**-7, 2**-7),  # 8 bits of mantissa: one unit in the last place is 2**-8 relative
}
"""(rtol, atol) of outputs computed in another order. Integer, bool and byte outputs are compared exactly."""


def ops() -> list[Op]:
    """All registered ops."""
    return _registry.ops()


def samples(name: str, device: torch.device | str = "cpu", seed: int = 0) -> list[Sample]:
    """The labelled valid calls of the op called ``name``."""
    return list({op.name: op for op in ops()}[name].samples(device, seed))


def reference(name: str) -> Callable[..., Any]:
    """The plain definition of the op called ``name``: a tensor, or a tuple of tensors."""
    function: Callable[..., Any] = {op.name: op for op in ops()}[name].reference
    return function


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    """An op's result as a tuple (ops return nothing, a tensor, or a tuple of tensors)."""
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def leaves(sample: Sample) -> list[Any]:
    """The arguments of a call in order, lists (``Tensor[]``) opened."""
    return [leaf for value in (*sample.args, *sample.kwargs.values()) for leaf in (value if isinstance(value, list) else [value])]


def clone_args(sample: Sample) -> Sample:
    """The same call on copies of its tensors, strides and storage layout kept."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return [copy(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        base = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage().clone())
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    return Sample(sample.label, tuple(copy(a) for a in sample.args), {k: copy(v) for k, v in sample.kwargs.items()})


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes of a tensor's storage, those between its rows included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every uninitialized tensor with NaN (floats) or the largest value (integers) while active."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


class Canary:
    """A tensor inside a larger buffer whose other elements must not change."""

    def __init__(self, like: torch.Tensor, pad: int = 64, row_pad: int = 0) -> None:
        shape = (*like.shape[:-1], like.shape[-1] + row_pad) if like.dim() else like.shape
        count = 1
        for size in shape:
            count *= size
        info = torch.finfo(like.dtype) if like.dtype.is_floating_point else None
        sentinel: float | int | bool = info.max if info else (True if like.dtype == torch.bool else torch.iinfo(like.dtype).max - 7)
        self.base = torch.full((count + 2 * pad,), sentinel, dtype=like.dtype, device=like.device)
        inner = self.base[pad : pad + count].view(shape)
        self.view = inner[..., : like.shape[-1]] if like.dim() else inner
        mask = torch.ones_like(self.base, dtype=torch.bool)
        (mask[pad : pad + count].view(shape)[..., : like.shape[-1]] if like.dim() else mask[pad : pad + count]).fill_(False)
        self._outside, self._sentinel = mask, self.base.clone()

    def check(self) -> None:
        """Raise AssertionError when anything outside the view was written."""
        changed = (self.base.view(torch.uint8) != self._sentinel.view(torch.uint8)).view(self.base.numel(), -1).any(1) & self._outside
        if changed.any():
            raise AssertionError(f"{int(changed.sum())} elements outside the output were written, first at flat offset {int(changed.nonzero()[0])}")


def canaries(like: Sequence[torch.Tensor], row_pad: int = 0) -> list[Canary]:
    """One guarded output buffer for each tensor of ``like``; ``row_pad`` extra columns make rows strided."""
    return [Canary(t, row_pad=row_pad) for t in like]


def assert_same(actual: Any, expected: Any, label: str = "", tolerances: dict[torch.dtype, tuple[float, float]] | None = None) -> None:
    """Same number of outputs, same shape, stride, dtype, device and values."""
    got, want = outputs(actual), outputs(expected)
    assert len(got) == len(want), f"{label}: {len(got)} outputs, expected {len(want)}"
    for i, (a, e) in enumerate(zip(got, want, strict=True)):
        where = f"{label}: output {i}"
        assert a.dtype == e.dtype and a.shape == e.shape and a.device == e.device, f"{where}: {a.dtype} {list(a.shape)} on {a.device}, expected {e.dtype} {list(e.shape)} on {e.device}"
        assert a.stride() == e.stride() or a.numel() <= 1, f"{where}: strides {a.stride()}, expected {e.stride()}"
        rtol, atol = (tolerances or TOLERANCES).get(e.dtype, (0.0, 0.0))
        text = where
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, text=text: f"{text}: {m}")  # type: ignore[misc]


def check_options(where: str, **options: tuple[str, str]) -> None:
    """Each option, given as (value, strict value), is its strict value or "any"."""
    for name, (value, strict) in options.items():
        if value not in (strict, "any"):
            raise ValueError(f"{where}: {name} must be {strict!r} or 'any', got {value!r}.")


def check_function(where: str, name: str, value: object, expected: str) -> None:
    """``value`` can be called: a check of anything else would report every case."""
    if not callable(value):
        raise ArgumentDtypeError(where, name, expected, type(value).__name__)


def fake_call(sample: Sample) -> Callable[[Callable[..., Any]], Any]:
    """``fake_call(sample)(overload)`` runs the op's fake on fake copies of the sample, strides and offsets kept."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run(overload: Callable[..., Any]) -> Any:
        with FakeTensorMode() as mode:

            def convert(value: Any) -> Any:
                if isinstance(value, list):
                    return [convert(item) for item in value]
                return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

            return overload(*map(convert, sample.args), **{k: convert(v) for k, v in sample.kwargs.items()})

    return run


def check_fake(overload: Callable[..., Any], sample: Sample) -> None:
    """The fake of ``overload`` has the shapes, strides, dtypes, devices and storage offsets of the real op on ``sample``.

    ``torch.library.opcheck`` has compared strides on CUDA only in some versions of PyTorch; this always does.
    """
    mine = clone_args(sample)
    real, fake = outputs(overload(*mine.args, **mine.kwargs)), outputs(fake_call(sample)(overload))
    assert len(fake) == len(real), f"{sample.label}: the fake gives {len(fake)} outputs, the op {len(real)}"
    for i, (f, r) in enumerate(zip(fake, real, strict=True)):
        for what, a, b in (
            ("shape", tuple(f.shape), tuple(r.shape)),
            ("strides", f.stride(), r.stride()),
            ("dtype", f.dtype, r.dtype),
            ("device", f.device.type, r.device.type),
            ("storage offset", f.storage_offset(), r.storage_offset()),
        ):
            assert a == b, f"{sample.label}: output {i} of the fake has {what} {a}, the op's has {b}"


def incomplete_ops() -> dict[str, list[str]]:
    """What ops of the namespace lack of kernel, fake, reference and samples, by name; empty when all are whole."""
    known = {op.name: op for op in ops()}
    result: dict[str, list[str]] = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        if namespace != _registry.NAMESPACE:
            continue
        full = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        kernels = any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in ("CPU", "CompositeExplicitAutograd"))
        fake = torch._library.simple_registry.singleton.find(full).fake_impl.kernel is not None
        missing = [what for what, there in (("CPU kernel", kernels), ("fake", fake), ("entry in the registry", name in known)) if not there]
        if name in known and not any(True for _ in known[name].samples("cpu")):
            missing.append("samples")
        if missing:
            result[full] = missing
    return result


def check_bad_input(call: Callable[..., Any], bad: BadInput) -> None:
    """``call`` refuses ``bad`` with its error class and text."""
    try:
        call(*bad.args, **bad.kwargs)
    except bad.error as error:
        message = str(error)
    else:
        raise AssertionError(f"{bad.label}: accepted, expected {bad.error.__name__}")
    if bad.match not in message:
        raise AssertionError(f"{bad.label}: message {message!r} does not contain {bad.match!r}")
