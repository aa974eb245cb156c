"""Every Triton launcher against its op's reference, interpreted on CPU and compiled on CUDA, and what makes it compile.

By construction, as in test_every_op.py: an op with ``triton=`` is tested the moment it is registered.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_ops import testing
from dsv4_ops.testing import Canary, Op, Sample
from tests.interpreter import Interpreter
from tests.test_every_op import LABELLED, NO_GPU, OPS, mutated, nth

BY_NAME = {op.name: op for op in OPS}
LAUNCHED = [p for p in LABELLED if p.values[0].triton is not None]  # type: ignore[union-attr]
EACH = [pytest.param(op, id=op.name) for op in OPS if op.triton is not None]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ON_CUDA = LAUNCHED if torch.cuda.is_available() else NO_GPU

SEEDS = 3
TOLERANT: dict[str, tuple[float, float, str]] = {}
"""Ops whose kernel rounds otherwise than the reference: (rtol, atol) of its floating-point results, and why. Others give the same bits."""

SPECIALIZED: dict[str, str] = {}
"""Parameters that may specialize, as ``kernel.parameter``, each with its reason. Other counts, strides and pointers must not."""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    worker = Interpreter()
    yield worker
    worker.close()


# ---- the comparison: runs in the interpreter's process ---------------------------------------------------------------


class Guarded:
    """A copy of a tensor, strides kept, whose memory outside the view holds ``fill`` and must not change.

    Its address lies as the tensor's does, ``shift`` bytes further.
    """

    def __init__(self, value: torch.Tensor, fill: str, shift: int = 0) -> None:
        pad, storage = (1024 + shift) // value.element_size(), torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        self.base = torch.empty(storage.numel() + 2 * pad, dtype=value.dtype).fill_(sentinel(value.dtype, fill))
        covered = torch.arange(storage.numel()).as_strided(value.shape, value.stride(), value.storage_offset()).flatten()
        self.base[covered + pad] = storage[covered]
        self.view = self.base.as_strided(value.shape, value.stride(), value.storage_offset() + pad)
        self._outside = torch.ones(self.base.numel(), dtype=torch.bool)
        self._outside[covered + pad] = False
        self._before = self.base.clone()

    def check(self, label: str, whole: bool) -> None:
        """Nothing outside the view changed, nor inside where ``whole``."""
        changed = (self.base.view(torch.uint8) != self._before.view(torch.uint8)).view(self.base.numel(), -1).any(1)
        assert not bool((changed & self._outside).any()), f"{label}: memory around an argument was written"
        assert not whole or not bool(changed.any()), f"{label}: an input was written"


def sentinel(dtype: torch.dtype, fill: str) -> Any:
    """What a read out of bounds finds: a value that is never right, or one that looks like any other."""
    if fill == "plausible":
        return 1
    if dtype == torch.bool:
        return True
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.max if fill == "largest" else info.min


class GuardedAllocations(TorchDispatchMode):
    """New tensors stand between guard bytes. Those that are made without values hold the guard's."""

    FACTORIES = ("empty", "new_empty", "empty_like", "full", "new_full", "full_like", "zeros", "new_zeros", "zeros_like")

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Canary] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in self.FACTORIES or not result.is_contiguous() or result.device.type != "cpu":
            return result
        self.made.append(Canary(result, pad=64))
        view = self.made[-1].view
        return view if "empty" in name else view.copy_(result)

    def check(self, label: str) -> None:
        for i, canary in enumerate(self.made):
            try:
                canary.check()
            except AssertionError as error:
                raise AssertionError(f"{label}: allocation {i}: {error}") from None


def guarded_call(sample: Sample, fill: str, shift: int = 0) -> tuple[Sample, list[Guarded]]:
    guards: list[Guarded] = []

    def guard(value: Any) -> Any:
        if isinstance(value, list):
            return [guard(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        guards.append(Guarded(value, fill, shift))
        return guards[-1].view

    return Sample(sample.label, tuple(map(guard, sample.args)), {k: guard(v) for k, v in sample.kwargs.items()}), guards


def same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], label: str, tolerance: tuple[float, float] | None) -> None:
    """The same bits, any NaN for a NaN; floats within ``tolerance`` where there is one."""
    testing.assert_same(tuple(actual), tuple(expected), label, dict.fromkeys(testing.TOLERANCES, tolerance or (0.0, 0.0)))
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if tolerance is None and e.is_floating_point():
            different = (a.signbit() != e.signbit()) & ~e.isnan()
            assert not bool(different.any()), f"{label}: output {i} has zeros of another sign"


def compare(launcher: Callable[..., Any], reference: Callable[..., Any], sample: Sample, written: Callable[[Sample], list[torch.Tensor]],
            tolerance: tuple[float, float] | None = None, fill: str = "largest") -> None:  # fmt: skip
    """The launcher's results and mutations are the reference's; nothing else is read or written."""
    theirs = testing.clone_args(sample)
    expected = testing.outputs(reference(*theirs.args, **theirs.kwargs))
    mine, guards = guarded_call(sample, fill)
    with testing.poisoned(), GuardedAllocations() as allocations:
        actual = testing.outputs(launcher(*mine.args, **mine.kwargs))
    allocations.check(sample.label)
    mutable = written(mine)
    for guard in guards:
        guard.check(sample.label, whole=not any(guard.view is m for m in mutable))
    same(actual, expected, sample.label, tolerance)
    same(mutable, written(theirs), f"{sample.label} (mutated arguments)", tolerance)


def compare_op(name: str, index: int) -> None:
    op = BY_NAME[name]
    tolerance = TOLERANT[name][:2] if name in TOLERANT else None
    for seed, fill in zip(range(SEEDS), ("largest", "plausible", "smallest"), strict=True):
        compare(op.triton, op.reference, nth(op, index, "cpu", seed), lambda call: mutated(op, call), tolerance, fill)  # type: ignore[arg-type]


def compare_toy(name: str) -> None:
    from tests import triton_toys

    x = torch.ones(50)[4:37]
    compare(getattr(triton_toys, name), lambda x: x * 2, Sample(name, (x,)), lambda call: [])


# ---- what a launch is compiled for: runs in the interpreter's process ------------------------------------------------


@contextlib.contextmanager
def launches() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Notes, for each launch, its kernel and what Triton would compile for: see ``compiled_for``."""
    from triton.runtime.interpreter import InterpretedFunction

    seen: list[tuple[str, dict[str, Any]]] = []
    run = InterpretedFunction.run

    def noting(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        seen.append((self.__name__, compiled_for(self, args, kwargs)))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = noting
    try:
        yield seen
    finally:
        InterpretedFunction.run = run


def unspecialized(kernel: Any, option: str) -> set[str]:
    """Parameters named by ``option`` of ``@triton.jit``, of a kernel compiled or interpreted."""
    options = kernel.kwargs if hasattr(kernel, "kwargs") else {option: getattr(kernel, option)}
    return {kernel.arg_names[p] if isinstance(p, int) else p for p in options.get(option) or ()}


def is_constexpr(kernel: Any, parameter: str) -> bool:
    return "constexpr" in str(kernel.fn.__annotations__.get(parameter, ""))


def compiled_for(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The part of each argument that goes into the key of Triton's compile cache."""
    plain, unaligned = unspecialized(kernel, "do_not_specialize"), unspecialized(kernel, "do_not_specialize_on_alignment")
    key: dict[str, Any] = {}
    for name, value in (dict(zip(kernel.arg_names, args, strict=False)) | kwargs).items():
        if name not in kernel.arg_names or is_constexpr(kernel, name) or value is None:
            key[name] = value
        elif isinstance(value, torch.Tensor):
            assert name.endswith("_ptr"), f"{kernel.__name__}: a pointer's name ends with _ptr, {name} is one"
            key[name] = (value.dtype, None if name in plain | unaligned else value.data_ptr() % 16 == 0)
        elif isinstance(value, bool | float):
            key[name] = type(value)
        else:
            special = None if name in plain else (value == 1, None if name in unaligned else value % 16 == 0)
            key[name] = ("i32" if -(2**31) <= value < 2**31 else "i64", special)
    return key


def keys_by_kernel(call: Callable[..., Any], samples: Sequence[Sample]) -> dict[str, list[dict[str, Any]]]:
    """The distinct keys that these calls launch each kernel with."""
    keys: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        for shift in (0, 8):
            mine, _ = guarded_call(sample, "plausible", shift)
            with launches() as seen:
                call(*mine.args, **mine.kwargs)
            for kernel, key in seen:
                if key not in keys.setdefault(kernel, []):
                    keys[kernel].append(key)
    return keys


def one_compilation(call: Callable[..., Any], samples: Sequence[Sample]) -> list[str]:
    """What varies in the keys of one kernel; empty when each kernel compiles once. ``kernel.parameter: values``."""
    varying = []
    for kernel, keys in keys_by_kernel(call, samples).items():
        for parameter in sorted({p for key in keys for p in key}):
            values = [key.get(parameter) for key in keys]
            if any(v != values[0] for v in values) and f"{kernel}.{parameter}" not in SPECIALIZED:
                varying.append(f"{kernel}.{parameter}: {values}")
    return varying


def compilations(name: str) -> list[str]:
    op = BY_NAME[name]
    return one_compilation(op.triton, [op.sized("cpu", n) for n in (1, 2, 3, 16, 17, 32)])  # type: ignore[arg-type]


def toy_compilations(name: str) -> list[str]:
    from tests import triton_toys

    return one_compilation(getattr(triton_toys, name), [Sample(str(n), (torch.ones(n),)) for n in (1, 2, 16, 32)])


def kernels() -> dict[str, list[str]]:
    """Parameters of every kernel in the package that would specialize on a count, stride or scalar, by module."""
    import pkgutil

    from triton.runtime.jit import KernelInterface

    import dsv4_ops._triton

    found: dict[str, list[str]] = {}
    for module in pkgutil.iter_modules(dsv4_ops._triton.__path__):
        values = vars(importlib.import_module(f"dsv4_ops._triton.{module.name}"))
        found[module.name] = [
            f"{kernel.__name__}.{parameter}"
            for kernel in values.values()
            if isinstance(kernel, KernelInterface) and kernel.__name__.endswith("_kernel")
            for parameter in kernel.arg_names
            if not is_constexpr(kernel, parameter) and not parameter.endswith("_ptr") and parameter not in unspecialized(kernel, "do_not_specialize")
        ]
    return found


def kernel_names(name: str) -> list[str]:
    op = BY_NAME[name]
    sample = op.sized("cpu", 2)
    with launches() as seen:
        op.triton(*sample.args, **sample.kwargs)  # type: ignore[misc]
    return [kernel for kernel, _ in seen]


# ---- every launcher --------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(("op", "index"), LAUNCHED)
def test_launcher_matches_the_reference_interpreted(op: Op, index: int, interpreter: Interpreter) -> None:
    interpreter(compare_op, op.name, index)


@needs_triton
@pytest.mark.parametrize(("op", "index"), ON_CUDA)
def test_launcher_matches_the_reference_on_cuda(op: Op, index: int) -> None:
    """Also where the dispatcher prefers C++."""
    tolerance = TOLERANT[op.name][:2] if op.name in TOLERANT else None
    for seed in range(SEEDS):
        theirs, mine = (testing.clone_args(nth(op, index, "cuda", seed)) for _ in range(2))
        expected = testing.outputs(op.reference(*theirs.args, **theirs.kwargs))
        with testing.poisoned():
            actual = testing.outputs(op.triton(*mine.args, **mine.kwargs))  # type: ignore[misc]
        same(actual, expected, theirs.label, tolerance)
        same(mutated(op, mine), mutated(op, theirs), f"{theirs.label} (mutated arguments)", tolerance)


@needs_triton
@pytest.mark.parametrize("op", EACH)
def test_one_compilation_for_all_batch_sizes_and_addresses(op: Op, interpreter: Interpreter) -> None:
    """Rows 1, 16 and a view at an odd address compile nothing new: a compilation during serving stalls every request."""
    assert interpreter(compilations, op.name) == []


@needs_triton
@pytest.mark.parametrize("op", EACH)
def test_launched_kernels_are_named_so(op: Op, interpreter: Interpreter) -> None:
    names = interpreter(kernel_names, op.name)
    assert names and all(name.endswith("_kernel") for name in names), names


@needs_triton
def test_counts_do_not_specialize(interpreter: Interpreter) -> None:
    """Every parameter of a kernel that is neither a constant nor a pointer is in ``do_not_specialize``."""
    found = interpreter(kernels)
    left = [f"{module}: {parameter}" for module, parameters in found.items() for parameter in parameters if parameter not in SPECIALIZED]
    assert left == []


def test_exceptions_name_what_exists() -> None:
    assert set(TOLERANT) <= {op.name for op in OPS if op.triton is not None}
    assert all(len(reason) > 20 for *_, reason in TOLERANT.values()) and all(len(reason) > 20 for reason in SPECIALIZED.values())
    assert all(math.isfinite(x) for rtol, atol, _ in TOLERANT.values() for x in (rtol, atol))


# ---- these tests notice faults ---------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(("toy", "complaint"), [
    ("reads_past_the_end", "Mismatched elements: 1 / 33"),
    ("leaves_one_unwritten", "Mismatched elements: 1 / 33"),
    ("writes_past_the_end", "elements outside the output were written"),
    ("writes_its_input", "an input was written"),
    ("writes_before_its_input", "memory around an argument was written"),
    ("dies", "the interpreter's process ended with code -"),
])  # fmt: skip
def test_a_faulty_launcher_is_noticed(toy: str, complaint: str, interpreter: Interpreter) -> None:
    interpreter(compare_toy, "right")
    with pytest.raises(pytest.fail.Exception, match=complaint):
        interpreter(compare_toy, toy)


@needs_triton
def test_a_specializing_launcher_is_noticed(interpreter: Interpreter) -> None:
    assert interpreter(toy_compilations, "right") == []
    (varying,) = interpreter(toy_compilations, "block_by_count")
    assert varying.startswith("_double_kernel.BLOCK: [16, 32]")
