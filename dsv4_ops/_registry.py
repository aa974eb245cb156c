"""The only place that defines ops: schema, fake, reference, back ends, samples.

A contract file calls :func:`define` once an op, above its public function, and :meth:`Op.implement` once, at its end.
``define`` without ``implement`` makes ``import dsv4_ops`` fail (:func:`seal`), and ``implement`` refuses an op
without fake, reference, samples, sized inputs or bad inputs. So every op has its opcheck, reference, capture/replay
and bad-input tests by construction: ``tests/`` iterates over :func:`ops`.

Where a kernel comes from, for one dispatch key, first match wins:

====  ==========================================================================================
CPU   C++ of ``dsv4_ops._C`` when loaded and it has this op; else ``torch_impl``, else ``reference``
CUDA  C++ of ``dsv4_ops._C_cuda``; else ``triton`` when Triton is there; else as on CPU
====  ==========================================================================================

An op names the devices that it has C++ kernels for (``cpp=``): where one is missing, the first call that would have
used it warns, with the reason.

``torch_impl`` is vectorized PyTorch that runs on any device and never synchronizes; ``reference`` is the plain
definition that everything is compared with. Python back ends check their arguments inside the kernel; for C++ ones
the check runs in :meth:`Op.__call__`, after C++ has refused a call, for the sake of its words (and inputs that require grad
are refused on any way in).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from . import _checks, envs
from .errors import ArgumentError, ArgumentShapeError, BuildError, GradientError

__all__ = ["BadInput", "Op", "Sample", "define", "define_kernel", "loaded", "ops", "seal", "skipped", "unpacked"]

NAMESPACE = "dsv4_ops"
logger = logging.getLogger(NAMESPACE)
KERNELS = f"{NAMESPACE}_kernels"
_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_kernels = torch.library.Library(KERNELS, "DEF")  # type: ignore[no-untyped-call]
_ops: dict[str, Op] = {}

loaded: list[str] = []
"""Compiled parts that are in use."""
skipped: dict[str, str] = {}
"""Compiled parts that are not, each with its reason."""


@dataclass(frozen=True)
class Sample:
    """One valid call of an op. ``label`` says what is special about it."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadInput:
    """One call that must be refused with ``error``, whose text contains ``match``."""

    label: str
    args: tuple[Any, ...]
    error: type[Exception]
    match: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Op:
    """One op of ``torch.ops.dsv4_ops``: what tests, doctor, bench and docs need to know of it."""

    name: str
    schema: str
    family: str
    graph_safe: bool
    graph_note: str
    out_names: tuple[str, ...]
    check: Callable[..., None] = None  # type: ignore[assignment]
    reference: Callable[..., Any] = None  # type: ignore[assignment]
    fake: Callable[..., Any] = None  # type: ignore[assignment]
    samples: Callable[..., Iterator[Sample]] = None  # type: ignore[assignment]
    sized: Callable[..., Sample] = None  # type: ignore[assignment]
    bad_inputs: Callable[..., Iterator[BadInput]] = None  # type: ignore[assignment]
    backends: dict[str, str] = field(default_factory=dict)
    """Device type -> which implementation serves it ("reference", "torch", "c++", "triton", ...)."""
    torch_impl: Callable[..., Any] | None = None
    triton: Callable[..., Any] | None = None
    triton_serves: bool = True
    """Whether CUDA calls come to it. Off for a kernel that is tested but that no GPU has run yet."""
    cpp: frozenset[str] = frozenset()
    """Device types whose kernel is C++ (those check their arguments themselves)."""
    cpp_sources: frozenset[str] = frozenset()
    """Device types that csrc/ has a kernel for, loaded or not."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Device type -> the kernel of csrc/ that a launcher may also take there (``define_kernel``)."""
    chosen: Callable[..., str] | None = None
    """Arguments -> which of several back ends a CUDA call takes."""
    traced: bool = False
    """Whether every call is logged, whichever way it came in: DSV4_OPS_TRACE was set on import."""

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.dsv4_ops, self.name).default

    @property
    def out_overload(self) -> Any:
        """The out form, or None where the op has none."""
        return getattr(torch.ops.dsv4_ops, self.name).out if self.out_names else None

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the functional op writes."""
        return tuple(a.name for a in self.overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*args, **kwargs)
        if envs.trace() and not self.traced:
            _log_call(self, args, kwargs)
        try:
            return self.overload(*args, **kwargs)
        except Exception:
            if not (self.cpp and _device_of(args, kwargs) in self.cpp):
                raise
        self._guard(*args, **kwargs)  # C++ refuses the same arguments, in fewer words
        return self.overload(*args, **kwargs)

    def backend_of(self, *args: Any, **kwargs: Any) -> str:
        """Which implementation serves this call."""
        device = _device_of(args, kwargs)
        if self.chosen is not None and device == "cuda":
            with contextlib.suppress(Exception):  # of arguments that the op refuses, which it says in better words
                return self.chosen(*args, **kwargs)
        return self.backends.get(device, "reference")

    def has_kernel(self, device: str) -> bool:
        """Whether the kernel that a launcher may take on devices of this type is loaded."""
        return device in self.kernels and _has_kernel(self.kernels[device], device.upper())

    def _guard(self, *args: Any, **kwargs: Any) -> None:
        _refuse_grad(self.name, args, kwargs)
        self.check(*args, **kwargs)

    def implement(
        self,
        *,
        check: Callable[..., None],
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        samples: Callable[..., Iterator[Sample]],
        sized: Callable[..., Sample],
        bad_inputs: Callable[..., Iterator[BadInput]],
        torch_impl: Callable[..., Any] | None = None,
        triton: Callable[..., Any] | None = None,
        triton_serves: bool = True,
        cpp: Sequence[str] = (),
        kernels: Mapping[str, str] | None = None,
        chosen: Callable[..., str] | None = None,
    ) -> None:
        """Register everything the op needs. Call once, at the end of its contract file.

        ``check``, ``reference``, ``fake``, ``torch_impl`` and ``triton`` take the arguments of the schema, by the
        same names and defaults. ``samples(device, seed=0)`` yields valid calls, edge rows included; another seed
        changes values, never shapes or labels. ``sized(device, n, seed=0)`` is a typical call with ``n`` rows (tokens
        or requests), for dynamic shapes and benchmarks. ``bad_inputs(device)`` yields refused calls. ``triton_serves=False``
        keeps CUDA calls from a launcher that no GPU has run yet; its tests run all the same. ``cpp`` names the device
        types ("cpu", "cuda") that csrc/ has a kernel of this op for; ``kernels`` maps those where a launcher may choose one to its name, by
        ``define_kernel``, and ``chosen(*args, **kwargs)`` says which back end a CUDA call takes, for logs.
        """
        if self.reference is not None:
            raise RuntimeError(f"{self.name} is implemented twice.")
        given = {"check": check, "reference": reference, "fake": fake, "samples": samples, "sized": sized, "bad_inputs": bad_inputs}
        missing = [name for name, value in given.items() if not callable(value)]
        if missing:
            raise RuntimeError(f"op {self.name} cannot be registered without {', '.join(missing)}: see CONTRIBUTING.md, 'add an op in eight blocks'.")
        for role, function in (("check", check), ("reference", reference), ("fake", fake), ("torch_impl", torch_impl), ("triton", triton), ("chosen", chosen)):
            if function is not None:
                _same_signature(self, role, function)
        self.check, self.reference, self.fake = check, reference, fake
        self.samples, self.sized, self.bad_inputs = samples, sized, bad_inputs
        self.torch_impl, self.triton, self.triton_serves = torch_impl, triton, triton_serves
        self.kernels, self.chosen = dict(kernels or {}), chosen

        def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                self._guard(*args, **kwargs)
                return function(*args, **kwargs)

            return kernel

        def fallback(function: Callable[..., Any]) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                if self.cpp_sources and (device := _device_of(args, kwargs)) in self.cpp_sources - self.cpp:
                    _warn_fallback(self.name, device)
                return function(*args, **kwargs)

            return guarded(kernel)

        qualified = f"{NAMESPACE}::{self.name}"
        general, source = (torch_impl, "torch") if torch_impl is not None else (reference, "reference")
        _library.impl(self.name, fallback(general), "CompositeExplicitAutograd")
        self.backends = {"cpu": source, "cuda": source}
        if triton is not None and triton_serves and importlib.util.find_spec("triton") is not None and not _has_kernel(qualified, "CUDA"):
            _library.impl(self.name, guarded(triton), "CUDA")
            self.backends["cuda"] = "triton"
        compiled = {device for device, key in (("cpu", "CPU"), ("cuda", "CUDA")) if self.backends[device] != "triton" and _has_kernel(qualified, key)}
        self.backends.update(dict.fromkeys(compiled, "c++"))
        self.cpp = frozenset(compiled)
        if compiled:
            self._refuse_grad_before_cpp()
        self.cpp_sources = frozenset(cpp)
        torch.library.register_fake(qualified, guarded(fake), lib=_library)
        if self.out_names:
            self._implement_out()
        if envs.trace():
            self._trace_every_call()

    def _trace_every_call(self) -> None:
        """Calls from compiled graphs and of ``torch.ops`` do not pass :meth:`__call__`, but all pass this key on their way to a back end."""
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def logged(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            from torch._subclasses.fake_tensor import FakeTensor

            if not any(isinstance(t, FakeTensor) for t in _tensors(args, kwargs)):  # a compiler that asks for shapes launches nothing
                _log_call(self, args, kwargs)
            return self.overload.redispatch(keyset & below, *args, **kwargs)

        self.traced = True
        _library.impl(self.name, logged, "BackendSelect", with_keyset=True)

    def _refuse_grad_before_cpp(self) -> None:
        """C++ kernels cannot tell (the stable ABI has no ``requires_grad``), and autograd would return zeros for gradients."""

        def autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_grad(self.name, args, kwargs)
            return self.overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

        _library.impl(self.name, autograd, "Autograd", with_keyset=True)

    def _implement_out(self) -> None:
        """The out form: computes by the functional op, then copies into the caller's buffers (any strides)."""
        name, out_names = f"{self.name}.out", self.out_names

        def outputs(kwargs: dict[str, Any]) -> list[torch.Tensor]:
            return [kwargs.pop(n) for n in out_names]

        def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
            return (result,) if isinstance(result, torch.Tensor) else tuple(result)

        def checked(outs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
            for n, out, result in zip(out_names, outs, results, strict=True):
                where = f"{self.name} (out form)"
                _checks.tensor(where, n, out, (result.dtype,), result.dim())
                if out.shape != result.shape:
                    raise ArgumentShapeError(where, n, f"of shape {list(result.shape)}", f"shape {list(out.shape)}")
                _checks.same_device(where, **{"the inputs": result, n: out})

        def fake(*args: Any, **kwargs: Any) -> None:
            outs = outputs(kwargs)
            checked(outs, as_tuple(self.fake(*args, **kwargs)))

        def kernel(*args: Any, **kwargs: Any) -> None:
            outs = outputs(kwargs)
            inputs = _tensors(args, kwargs)
            for i, out in enumerate(outs):
                if any(_overlap(out, other) for other in (*inputs, *outs[:i])):
                    raise ArgumentError(f"{self.name} (out form)", out_names[i], "a buffer of its own", "memory that overlaps another argument")
            results = as_tuple(self(*args, **kwargs))
            checked(outs, results)
            for out, result in zip(outs, results, strict=True):
                out.copy_(result)

        _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def define(schema: str, *, out: Sequence[str] = (), graph_safe: bool = True, graph_note: str = "", tags: Sequence[torch.Tag] = ()) -> Op:
    """Define an op of this package from its schema, e.g. ``"f(Tensor x, int k, *, int lane=-1) -> Tensor"``.

    ``out`` names the outputs that get an out form (overload ``out``), which returns nothing and writes these keyword
    arguments. ``graph_safe`` tells whether the CUDA path may be captured in a CUDA graph; ``graph_note`` says why not.
    """
    name = schema.split("(", 1)[0].strip()
    if name in _ops:
        raise RuntimeError(f"{name} is defined twice.")
    caller = inspect.currentframe()
    module = caller.f_back.f_globals.get("__name__", "") if caller is not None and caller.f_back is not None else ""
    _library.define(schema, tags=tuple(tags))  # type: ignore[no-untyped-call]
    if out:
        _library.define(_out_schema(schema, out), tags=tuple(tags))  # type: ignore[no-untyped-call]
    op = Op(name, schema, module.rsplit(".", 1)[-1], graph_safe, graph_note, tuple(out))
    _ops[name] = op
    return op


def define_kernel(schema: str) -> str:
    """Define what a launcher calls of csrc/ where an op has several back ends on one device; returns its qualified name.

    It stands in a namespace of its own, because it is no op: fake, reference, checks and tests are those of the op whose back end it is.
    """
    _kernels.define(schema)  # type: ignore[no-untyped-call]
    return f"{KERNELS}::{schema.split('(', 1)[0].strip()}"


def ops() -> list[Op]:
    """All ops, by family then by name."""
    return sorted(_ops.values(), key=lambda op: (op.family, op.name))


def seal() -> None:
    """Fail when an op was defined but never implemented. Runs at the end of ``import dsv4_ops``."""
    unfinished = [op.name for op in _ops.values() if op.reference is None]
    if unfinished:
        raise RuntimeError(f"defined but not implemented (Op.implement was not called): {', '.join(sorted(unfinished))}")


def load_compiled() -> None:
    """Load the compiled parts, if they are there. They register kernels only, never schemas."""
    for name, wanted in (("_C", True), ("_C_cuda", torch.version.cuda is not None)):
        if envs.disable_c():
            skipped[name] = "DSV4_OPS_DISABLE_C is set"
        elif not wanted:
            skipped[name] = f"torch {torch.__version__} is a CPU build"
        elif not _stands_here(name):
            skipped[name] = _why_not_built(name)
        else:
            try:
                importlib.import_module(f"{NAMESPACE}.{name}")
                loaded.append(name)
            except (ImportError, OSError) as error:
                skipped[name] = str(BuildError(f"found but does not load with torch {torch.__version__}: {error}"))


def _stands_here(name: str) -> bool:
    """Whether the library is in this very package: an editable install elsewhere offers its own for any ``dsv4_ops``."""
    spec = importlib.util.find_spec(f"{NAMESPACE}.{name}")
    return spec is not None and spec.origin is not None and pathlib.Path(spec.origin).parent == pathlib.Path(__file__).parent


def _why_not_built(name: str) -> str:
    """The reason that setup.py wrote down, because pip hides what a build prints."""
    report = pathlib.Path(__file__).with_name("_build.json")
    if not report.is_file():
        return "not built: this is a source folder that was not installed (`pip install -e .` builds in place)"
    reason = json.loads(report.read_text())["missing"].get(name)
    return f"not built: {reason}" if reason else "built, but the library is gone: install again"


_warned: set[str] = set()


def _warn_fallback(name: str, device: str) -> None:
    """Once for each compiled part that is missed, at the first call that would have used it."""
    part = "_C" if device == "cpu" else "_C_cuda"
    if part in _warned or envs.disable_c():
        return
    _warned.add(part)
    reason = skipped.get(part, "it was built from other sources and lacks this op: install again")
    warnings.warn(f"dsv4_ops.{name} runs without its compiled {device} kernel, slower with the same results: {NAMESPACE}.{part}: {reason}", stacklevel=7)


def _out_schema(schema: str, outs: Sequence[str]) -> str:
    head, _ = schema.rsplit("->", 1)
    name, arguments = head.strip().split("(", 1)
    arguments = arguments.rstrip().removesuffix(")")
    star = "" if re.search(r"(^|,)\s*\*\s*,", arguments) else "*, "
    extra = ", ".join(f"Tensor({chr(ord('b') + i)}!) {n}" for i, n in enumerate(outs))
    return f"{name.strip()}.out({arguments}, {star}{extra}) -> ()"


Arguments = TypeVar("Arguments")
Result = TypeVar("Result")


def unpacked(arguments: Callable[..., Arguments]) -> Callable[[Callable[[Arguments], Result]], Callable[..., Result]]:
    """For ops of many arguments: blocks that take them as one value, a named tuple, get the signature of its fields."""

    def decorate(function: Callable[[Arguments], Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            return function(arguments(*args, **kwargs))

        call.__signature__ = inspect.signature(arguments)  # type: ignore[attr-defined]
        return call

    return decorate


def _same_signature(op: Op, role: str, function: Callable[..., Any]) -> None:
    expected = [(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in op.overload._schema.arguments]
    actual = [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
    if expected != actual:
        raise RuntimeError(f"{role} of op {op.name} must take the arguments of its schema with the same defaults.\n  schema: {expected}\n  {role}: {actual}")


def _has_kernel(qualified: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key))


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensor arguments, those inside lists included."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    first = next(iter(_tensors(args, kwargs)), None)
    return "cpu" if first is None else first.device.type


def _refuse_grad(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args, kwargs)):
        raise GradientError(name)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False

    def extent(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (a0, a1), (b0, b1) = extent(a), extent(b)
    if a0 >= b1 or b0 >= a1:
        return False
    # Interleaved views of one buffer (two column ranges of the same rows) meet in extent but share no element.
    return not (a.stride() == b.stride() and a.dim() == 2 and _disjoint_columns(a, b))


def _disjoint_columns(a: torch.Tensor, b: torch.Tensor) -> bool:
    pitch = a.stride(0) * a.element_size()
    width_a, width_b = (t.shape[1] * t.stride(1) * t.element_size() for t in (a, b))
    offset = (b.data_ptr() - a.data_ptr()) % pitch if pitch else 0
    return pitch > 0 and offset >= width_a and offset + width_b <= pitch


def _log_call(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Handlers write a record out before they return, so the last line names the call that took the process down."""

    def show(value: Any) -> str:
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(show, value)) + "]"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)

    shown = [show(a) for a in args] + [f"{k}={show(v)}" for k, v in kwargs.items()]
    logger.warning("%s.%s(%s) on %s by %s", NAMESPACE, op.name, ", ".join(shown), _device_of(args, kwargs), op.backend_of(*args, **kwargs))
