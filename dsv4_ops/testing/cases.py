"""Cases: a call, its right answer, how a result is judged, and the Python that repeats it anywhere.

A case is made from a sample of an op, whose arguments are spelled out as literals, or from *source*: a few lines of Python that make
the arguments (for inputs too large to spell out). What judges a result is one line of Python too. So what a failing case prints is
what has run: paste it, define ``fn``, and it fails again.
"""

from __future__ import annotations

import functools
import linecache
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree

from .basics import Op, Sample, check_function, clone_args, leaves, ops, outputs, poisoned, storage_bytes
from .topk_rows import assert_topk

__all__ = ["Case", "ConformanceError", "Report", "literal", "run_cases"]

_PASTED = 1000
"""Numbers that a case spells out at most; larger arguments and answers are named by what makes them."""
EXACT = "torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)"
_LIBRARIES = frozenset({"dsv4_ops", "torch", "triton", "numpy", *sys.stdlib_module_names})
"""Whose lines say little about a function that raises."""


class ConformanceError(AssertionError):
    """A function does not do what the contract says; the text shows which cases, and how to repeat them."""

    reproduction: str = ""
    """Python that repeats the (one) failing case."""
    difference: str = ""
    """What is wrong, without that Python."""
    rows: tuple[int, ...] = ()
    """Of a top-k case: the rows that are wrong."""


@dataclass(frozen=True)
class Case:
    """One call of a function that stands in for the op ``op``.

    ``run(fn)`` calls and judges; ``check(got)`` judges a result. Both raise ConformanceError.
    """

    id: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    """Python that defines a variable for each argument; without it, arguments are spelled out."""
    comparison: str = EXACT
    """Python that raises AssertionError when ``got`` is wrong; it sees ``expected``, ``torch``, ``testing`` and the arguments."""
    device: str = "cpu"

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(zip(_argument_names(self.op), self.args, strict=False)) | self.kwargs

    @functools.cached_property
    def expected(self) -> Any:
        """The right answer: a tensor, or a tuple of tensors."""
        mine = clone_args(Sample(self.id, self.args, self.kwargs))
        small = sum(leaf.numel() for leaf in leaves(mine) if isinstance(leaf, torch.Tensor)) < 50_000
        found = outputs((_op(self.op).reference if small else _op(self.op).torch_impl or _op(self.op))(*mine.args, **mine.kwargs))
        return found[0] if len(found) == 1 else found

    def call(self, fn: Callable[..., Any]) -> Any:
        """What ``fn`` returns for copies of the arguments, uninitialized memory poisoned; ConformanceError when it writes to one of them."""
        mine = clone_args(Sample(self.id, self.args, self.kwargs))
        with poisoned(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            got = fn(*mine.args, **mine.kwargs)
        for name, before, after in self._pairs(mine):
            if not torch.equal(storage_bytes(before), storage_bytes(after)):
                raise self._failure(f"the function wrote to its argument {name}", got, written=name)
        return got

    def check(self, got: Any) -> None:
        """Judge a result of this case's call."""
        self._check(got, None)

    def run(self, fn: Callable[..., Any]) -> None:
        """Call ``fn`` and judge what it returns; an exception of its own is a failure as well."""
        try:
            got = self.call(fn)
        except ConformanceError:
            raise
        except Exception as error:
            raise self._failure(f"{type(error).__name__}: {error}{own_frame(error)}", None) from error
        self._check(got, fn)

    def reproduction(self, written: str = "", poison: bool = False) -> str:
        """Python that calls ``fn``, which it expects to be defined, and raises AssertionError when the answer is wrong.

        With ``written``, when the function writes to the argument of that name. With ``poison``, uninitialized memory is a sentinel.
        """
        lines = [f"# {self.op}: {self.id}", "import torch"]
        names = dict(zip(_argument_names(self.op), self.args, strict=False))
        source, expected = self._input_lines(names), self._expected_line()
        body = "\n".join([source, expected, self.comparison])
        if "testing." in body.replace("torch.testing.", "") or "dsv4_ops" in body or written or poison:
            lines.append("from dsv4_ops import testing")
        lines.append('inf, nan = float("inf"), float("nan")')
        call = ", ".join([*names, *(f"{name}={name if isinstance(v, torch.Tensor) else literal(v)}" for name, v in self.kwargs.items())])
        lines += [source, expected]
        call = f"with testing.poisoned():\n    got = fn({call})" if poison else f"got = fn({call})"
        if written:
            content = f"torch.cat([testing.storage_bytes(t) for t in {written}])" if isinstance(self.inputs[written], list) else f"testing.storage_bytes({written})"
            lines += [f"before = {content}", call, f"assert torch.equal({content}, before)"]
        else:
            lines += [call, self.comparison]
        return "\n".join(line for line in lines if line) + "\n"

    # Inside

    def _check(self, got: Any, fn: Callable[..., Any] | None) -> None:
        if isinstance(got, list | tuple) and not hasattr(got, "_fields"):
            got = got[0] if len(got) == 1 else tuple(got)
        try:
            self._judge(got)
        except Exception as error:  # an odd result may break the comparison itself
            message = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise self._failure(message, got, poison=fn is not None and self._depends_on_poison(fn, got), rows=getattr(error, "rows", ())) from None

    def _depends_on_poison(self, fn: Callable[..., Any], got: Any) -> bool:
        """Whether the result differs without poison: then some of it was never written."""
        mine = clone_args(Sample(self.id, self.args, self.kwargs))
        try:
            plain = fn(*mine.args, **mine.kwargs)
        except Exception:
            return True
        pairs = zip(_tensors(got), _tensors(plain), strict=False)
        return any(a.shape != b.shape or not torch.equal(storage_bytes(a.contiguous()), storage_bytes(b.contiguous())) for a, b in pairs)

    def _judge(self, got: Any) -> None:
        from .. import testing

        if got is None or got == ():
            raise AssertionError("the function returned nothing; wrap an out form so that it returns its outputs")
        # The line of the reproduction itself: what is printed is what judges.
        try:
            exec(compile(self.comparison, f"<case {self.id}>", "exec"), {"torch": torch, "testing": testing, "got": got, "expected": self.expected, **self.inputs})
        except Exception:
            if self.op == "topk" and self.comparison == EXACT:
                assert_topk(got, **self.inputs)  # refuses the same results, and says which columns and rules
            raise

    def _pairs(self, mine: Sample) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        named = dict(zip(_argument_names(self.op), mine.args, strict=False)) | mine.kwargs
        for name, value in self.inputs.items():
            for before, after in zip(*((v if isinstance(v, list) else [v]) for v in (value, named[name])), strict=True):
                if isinstance(before, torch.Tensor):
                    yield name, before, after

    def _input_lines(self, names: dict[str, Any]) -> str:
        if self.source:
            device = f"device = {self.device!r}\n" if "device" in self.source else ""
            return device + self.source.strip()
        return "\n".join(f"{name} = {literal(value)}" for name, value in {**names, **{k: v for k, v in self.kwargs.items() if isinstance(v, torch.Tensor)}}.items())

    def _expected_line(self) -> str:
        if "expected" not in self.comparison:
            return ""
        if sum(t.numel() for t in outputs(self.expected)) <= 4 * _PASTED and len(literal(self.expected)) <= 4 * _PASTED:
            return f"expected = {literal(self.expected)}"
        call = ", ".join([*dict(zip(_argument_names(self.op), self.args, strict=False)), *(f"{k}={k if isinstance(v, torch.Tensor) else literal(v)}" for k, v in self.kwargs.items())])
        return f"expected = testing.reference({self.op!r})({call})"

    def _failure(self, message: str, got: Any, written: str = "", poison: bool = False, rows: tuple[int, ...] = ()) -> ConformanceError:
        def shown(value: Any) -> str:
            text = literal(value) if sum(t.numel() for t in _tensors(value)) <= _PASTED else repr(value)
            return text if len(text) <= 4 * _PASTED else text[: 4 * _PASTED] + " ..."

        answer = "" if got is None else f"\n\nexpected {shown(self.expected)}\n\ngot      {shown(got)}"
        code = self.reproduction(written, poison)
        error = ConformanceError(f"{self.op}: case {self.id!r}: {message}\n\nTo repeat it, define fn and run:\n\n{code}{answer}\n")
        error.reproduction, error.difference, error.rows = code, message, rows
        return error


def from_source(op: str, label: str, source: str, device: torch.device | str, comparison: str = EXACT, *, keywords: Sequence[str] = (), **constants: Any) -> Case:
    """A case whose tensors are made by ``source``; arguments that are plain numbers may be given as ``constants`` (by name)."""
    names = _argument_names(op)
    space: dict[str, Any] = {"device": str(device)}
    exec(compile("import torch\nfrom dsv4_ops import testing\ninf, nan = float('inf'), float('nan')\n" + source, f"<case {label}>", "exec"), space)
    positional = [name for name in names if name in space and name not in keywords]
    tail = {name: space[name] for name in names if name in space and name in keywords}
    if positional != names[: len(positional)]:
        raise ValueError(f"{op}: {label}: the source defines {positional}, which are not the first arguments {names[: len(positional)]}")
    return Case(label, op, tuple(space[name] for name in positional), {**tail, **constants}, source, comparison, str(device))


def from_sample(op: str, index: int, sample: Sample, device: torch.device | str, seed: int, comparison: str = EXACT) -> Case:
    """The case of one of an op's own samples, without its lane."""
    kwargs = {name: value for name, value in sample.kwargs.items() if name != "lane"}
    case = Case(sample.label, op, sample.args, kwargs, "", comparison, str(device))
    if sum(_spelled(leaf) for leaf in leaves(sample) if isinstance(leaf, torch.Tensor)) <= _PASTED:
        return case
    names = [*_argument_names(op)[: len(sample.args)], *(k for k, v in kwargs.items() if isinstance(v, torch.Tensor))]
    values = ", ".join([*(f"sample.args[{i}]" for i in range(len(sample.args))), *(f"sample.kwargs[{k!r}]" for k, v in kwargs.items() if isinstance(v, torch.Tensor))])
    return replace(case, source=f"sample = testing.samples({op!r}, {str(device)!r}, {seed})[{index}]\n{', '.join(names)} = {values}")


@dataclass
class Report:
    """What became of the cases of one function."""

    op: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, ConformanceError] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Cases that a relaxation excludes, each with its name."""

    def raise_for_failures(self) -> None:
        """ConformanceError with the whole text of the first failing cases, and the ids of the others.

        It is raised from the first exception of the function's own, where there is one.
        """
        if not self.failed:
            return
        count = len(self.failed) + len(self.passed)
        shown = [str(error) for error in self.failed.values()][:3]
        rest = list(self.failed)[3:]
        text = f"{self.op}: {len(self.failed)} of {count} cases fail: {', '.join(map(repr, self.failed))}\n\n" + "\n".join(shown)
        cause = next((error.__cause__ for error in self.failed.values() if error.__cause__ is not None), None)
        raise ConformanceError(text + (f"\nalso: {', '.join(map(repr, rest))}\n" if rest else "")) from cause

    def __str__(self) -> str:
        return f"{self.op}: {len(self.passed)} cases pass, {len(self.failed)} fail, {len(self.left_out)} left out"


def run_cases(fn: Callable[..., Any], cases: Iterable[Case], *, left_out: dict[str, str] | None = None) -> Report:
    """Run all cases, whatever fails. Raises ValueError when there is none (a check of nothing would pass), and when ``fn`` cannot be called."""
    check_function("run_cases", "fn", fn, "a function that is called as the op is")
    cases = list(cases)
    if not cases:
        raise ValueError(f"no case is left to run; these are left out: {left_out}.")
    report = Report(cases[0].op, left_out=dict(left_out or {}))
    for case in cases:
        try:
            case.run(fn)
        except ConformanceError as error:
            report.failed[case.id] = _smaller(case, fn, error)
        else:
            report.passed.append(case.id)
    return report


def kept(cases: Iterable[Case], rules: dict[str, Callable[[Case], bool] | None]) -> tuple[list[Case], dict[str, str]]:
    """The cases that all rules allow, and the others with the name of the first that does not."""
    inside, outside = [], {}
    for case in cases:
        reason = next((name for name, allows in rules.items() if allows is not None and not allows(case)), None)
        if reason is None:
            inside.append(case)
        else:
            outside[case.id] = reason
    return inside, outside


def own_frame(error: BaseException) -> str:
    """The last line that is no library's of those that ``error`` went through, as tracebacks show it; nothing where there is none."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES]
    if not frames:
        return ""
    code, line = frames[-1][0].f_code, frames[-1][1]
    text = linecache.getline(code.co_filename, line).strip()
    return f'\n  File "{code.co_filename}", line {line}, in {code.co_name}' + (f"\n    {text}" if text else "")


def _smaller(case: Case, fn: Callable[..., Any], error: ConformanceError) -> ConformanceError:
    """The failure of one row of a top-k case where that row alone fails too; what is said of the other rows stays."""
    if case.op != "topk" or case.args[0].shape[0] < 2 or case.args[0].numel() < 64:
        return error
    for row in [row for row in error.rows or range(64) if row < min(case.args[0].shape[0], case.args[1].numel())][:64]:
        alone = one_row(case, row)
        try:
            alone.run(fn)
        except ConformanceError as smaller:
            return _of_all_rows(case, error, row, smaller) if error.rows and smaller.rows else smaller
    return error


def _of_all_rows(case: Case, error: ConformanceError, row: int, alone: ConformanceError) -> ConformanceError:
    head = f"{case.op}: case {case.id!r}: "
    joined = ConformanceError(f"{head}{error.difference}\n\nRow {row} fails alone too; what follows is that row." + str(alone).removeprefix(head + alone.difference))
    joined.reproduction, joined.difference, joined.rows = alone.reproduction, error.difference, error.rows
    return joined


def one_row(case: Case, row: int) -> Case:
    logits, lengths = case.args[0][row : row + 1].contiguous(), case.args[1].reshape(-1)[row : row + 1].contiguous()
    source = case.source and f"{case.source.strip()}\nlogits, lengths = logits[{row} : {row + 1}].contiguous(), lengths.reshape(-1)[{row} : {row + 1}].contiguous()"
    logits = logits.clone(memory_format=torch.contiguous_format)
    return replace(case, args=(logits, lengths.clone(), *case.args[2:]), source=source)


# Literals


def literal(value: Any) -> str:
    """Python for a value: tensors keep their dtype, device and strides; floats are the shortest that give the same bits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {literal(v)}" for k, v in value.items()) + "}"
    if hasattr(value, "_fields"):
        return f"{type(value).__name__}({', '.join(f'{n}={literal(getattr(value, n))}' for n in value._fields)})"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, torch.Tensor):
        return _tensor_literal(value)
    return _number(value, torch.float64) if isinstance(value, float) else repr(value)


def _tensor_literal(tensor: torch.Tensor) -> str:
    options = f"dtype={tensor.dtype}" + (f", device={str(tensor.device)!r}" if tensor.device.type != "cpu" else "")
    if tensor.numel() == 0:
        return f"torch.empty({list(tensor.shape)}, {options})"
    if tensor.numel() > 8 and tensor.is_contiguous() and bool((tensor == tensor.flatten()[0]).all()) and tensor.dtype != torch.bool:
        return f"torch.full({list(tensor.shape)}, {_number(tensor.flatten()[0].item(), tensor.dtype)}, {options})"
    spelled = _spelled(tensor)
    if spelled == tensor.numel() and tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
        return f"torch.tensor({_nested(tensor)}, {options})"
    base = tensor.as_strided((spelled,), (1,), 0)
    return f"torch.tensor({_nested(base)}, {options}).as_strided({list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()})"


def _spelled(tensor: torch.Tensor) -> int:
    """Elements of the storage that a literal holds: up to the last one that the tensor reaches, or all where few more follow."""
    if tensor.numel() == 0:
        return 0
    reached = int(tensor.storage_offset()) + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    return stored if stored <= reached + 64 else reached


def _nested(tensor: torch.Tensor) -> str:
    if tensor.dim() == 0:
        return _number(tensor.item(), tensor.dtype)
    if tensor.dim() > 1:
        return "[" + ", ".join(_nested(row) for row in tensor) + "]"
    values = tensor.tolist()
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        negative = torch.signbit(tensor).tolist() if tensor.dtype.is_floating_point else []
        return "[" + ", ".join("-nan" if v != v and negative[i] else _number(v, tensor.dtype) for i, v in enumerate(values)) + "]"
    return "[" + ", ".join(_runs(values)) + "]"


def _runs(values: list[int]) -> Iterator[str]:
    """Numbers; eight or more that are equal or count up are one unpacked expression."""
    i = 0
    while i < len(values):
        for step in (0, 1):
            j = i + 1
            while j < len(values) and values[j] == values[j - 1] + step:
                j += 1
            if j - i >= 8:
                yield f"*range({values[i]}, {values[j - 1] + 1})" if step else f"*[{values[i]}] * {j - i}"
                i = j
                break
        else:
            yield str(values[i])
            i += 1


def _number(value: Any, dtype: torch.dtype) -> str:
    if not isinstance(value, float):
        return repr(value)
    if value != value:
        return "nan"
    if value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    if dtype in (torch.float64, torch.complex128):
        return repr(value)
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if _rounded(float(text), dtype) == value:
            return text if any(c in text for c in ".e") else text + ".0"
    return repr(value)


def _rounded(value: float, dtype: torch.dtype) -> float:
    if dtype != torch.float32:
        return float(torch.tensor(value, dtype=dtype))
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:  # rounds up to infinity
        return float("inf")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@functools.cache
def _argument_names(op: str) -> list[str]:
    return [a.name for a in _op(op).overload._schema.arguments if a.name != "lane"]


@functools.cache
def _op(name: str) -> Op:
    return {op.name: op for op in ops()}[name]
