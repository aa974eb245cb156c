"""Every Triton launcher against its op's reference, interpreted on CPU and compiled on CUDA, and what makes it compile.

By construction, as in test_every_op.py: an op with ``triton=`` is tested the moment it is registered.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import importlib
import importlib.util
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
EXP = "every machine has an exponential of its own: a bf16 result may be its neighbour. What fp32 results keep is in test_swiglu_cuda.py"
TOLERANT: dict[str, tuple[float, float, str]] = dict.fromkeys(("swiglu", "swiglu_per_expert"), (2**-7, 1e-36, EXP))
BF16_WEIGHTS = "weights of keys are rounded to bf16 for their product (2**-8 of keys up to 5), as are outputs. What fp32 calls keep is in test_sparse_decode.py"
TOLERANT["sparse_mla_decode"] = (2**-7, 2**-6, BF16_WEIGHTS)
"""Ops whose kernel rounds otherwise than the reference: (rtol, atol) of its floating-point results, and why. Others give the same bits."""

QUADS = "logits whose rows start on 16 bytes are loaded four at a time: it follows from the vocabulary and the allocation, not from a count"
SPECIALIZED: dict[str, str] = dict.fromkeys(("race_kernel.DENSE", "judge_kernel.DENSE", "draw_kernel.DENSE"), QUADS)
WIDE = "rows that start on 16 or 8 bytes are loaded as widely: it follows from how cache and query are allocated, not from a count"
SPECIALIZED |= dict.fromkeys(("attend_kernel.SWA_ALIGNMENT", "attend_kernel.EXTRA_ALIGNMENT", "attend_kernel.Q_ALIGNMENT"), WIDE)
"""Parameters that may specialize, as ``kernel.parameter``, each with its reason. Other counts, strides and pointers must not.

Elements of a tuple always do: ``do_not_specialize`` does not reach them.
"""


SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory that a block may have, by compute capability."""


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


@dataclass(frozen=True)
class Compiled:
    """What Triton compiles for a launch, each distinct one once: the key of its cache."""

    module: str
    kernel: str
    signature: dict[str, Any]
    """Type of each parameter, of each element where it is a tuple; "constexpr" for constants."""
    special: dict[str, Any]
    """What the compiler may know of a value: "D" is divisible by 16; constants have their value."""
    constants: dict[tuple[int, ...], Any]
    options: dict[str, Any]


@contextlib.contextmanager
def launches() -> Iterator[list[Compiled]]:
    """Notes the launches while active, and runs none: no launcher looks at results."""
    from triton.runtime.interpreter import InterpretedFunction

    seen: list[Compiled] = []
    run = InterpretedFunction.run

    def noting(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.append(compiled(self, args, kwargs))

    InterpretedFunction.run = noting
    try:
        yield seen
    finally:
        InterpretedFunction.run = run


def jit_function(kernel: Any) -> Any:
    """The kernel as it is where it is not interpreted."""
    from triton.runtime.jit import JITFunction

    return JITFunction(kernel.fn, **kernel.kwargs) if hasattr(kernel, "kwargs") else kernel


def compiled(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Compiled:
    """By Triton's own rules for an NVIDIA GPU."""
    from triton._utils import find_paths_if, get_iterable_path
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    function = jit_function(kernel)
    bind = create_function_from_signature(function.signature, function.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    values, specialization, options = bind(*args, **kwargs)
    for name, value in values.items():
        assert isinstance(value, tuple) or value is None or isinstance(value, torch.Tensor) == name.endswith("_ptr"), f"{kernel.__name__}: pointers, and only those, end with _ptr: {name}"
    types = [kind for kind, _ in specialization]
    constants = {path: get_iterable_path(list(values.values()), path) for path in find_paths_if(types, lambda _, kind: kind == "constexpr")}
    special = {name: values[name] if kind == "constexpr" else known for name, (kind, known) in zip(values, specialization, strict=True)}
    return Compiled(kernel.fn.__module__, kernel.__name__, dict(zip(values, types, strict=True)), special, constants, options)


def one_compilation(call: Callable[..., Any], samples: Sequence[Sample]) -> list[str]:
    """What varies in what these calls compile; empty when each kernel is compiled once. ``kernel.parameter: what it was``."""
    seen: dict[str, list[Compiled]] = {}
    for sample in samples:
        for shift in (0, 8):
            mine, _ = guarded_call(sample, "plausible", shift)
            with launches() as made:
                call(*mine.args, **mine.kwargs)
            for one in made:
                if one not in seen.setdefault(one.kernel, []):
                    seen[one.kernel].append(one)
    varying = []
    for kernel, ways in seen.items():
        varying += [f"{kernel}: options {one.options}" for one in ways[1:] if one.options != ways[0].options]
        for parameter in ways[0].signature:
            kinds = [(one.signature[parameter], one.special[parameter]) for one in ways]
            if any(kind != kinds[0] for kind in kinds) and f"{kernel}.{parameter}" not in SPECIALIZED:
                varying.append(f"{kernel}.{parameter}: {kinds}")
    return varying


def compilations(name: str) -> list[str]:
    op = BY_NAME[name]
    return one_compilation(op.triton, [op.sized("cpu", n) for n in (1, 2, 3, 16, 17, 32)])  # type: ignore[arg-type]


def toy_compilations(name: str) -> list[str]:
    from tests import triton_toys

    return one_compilation(getattr(triton_toys, name), [Sample(str(n), (torch.ones(n),)) for n in (1, 2, 16, 32)])


def specializing() -> list[str]:
    """Parameters of the package's kernels that are neither constants nor pointers and yet specialize, as ``kernel.parameter``."""
    import pkgutil

    from triton.runtime.jit import KernelInterface

    import dsv4_ops._triton

    modules = [importlib.import_module(f"dsv4_ops._triton.{m.name}") for m in pkgutil.iter_modules(dsv4_ops._triton.__path__)]
    launched = {v.__name__: v for module in modules for v in vars(module).values() if isinstance(v, KernelInterface) and v.__name__.endswith("_kernel")}
    return [
        f"{name}.{p.name}"
        for name, kernel in launched.items()
        for p in jit_function(kernel).params
        if not (p.is_constexpr or p.name.endswith("_ptr") or p.do_not_specialize)
    ]


def launched_by(name: str) -> list[Compiled]:
    """What the samples of an op compile."""
    op, found = BY_NAME[name], []
    for sample in (*op.samples("cpu"), op.sized("cpu", 3)):
        mine = testing.clone_args(sample)
        with launches() as seen:
            op.triton(*mine.args, **mine.kwargs)  # type: ignore[misc]
        found += [one for i, one in enumerate(seen) if one not in found + seen[:i]]
    return found


@dataclass(frozen=True)
class Machine:
    """Stands for a driver: kernels ask it what they are compiled for."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target


STEP = re.compile(r"""^ \s* (?: (?P<if> @\S+ \s+)? (?P<step> griddepcontrol\.\w+ | (?: bra | ret | exit | call | bar | barrier)\b\S* | (?: ld | st | atom | red | cp | prefetch)\.\S*global\S*)
                      | (?P<label> \$L__BB\w+) : )""", re.MULTILINE | re.VERBOSE)  # fmt: skip


def before_the_wait(ptx: str) -> str | None:
    """What a kernel does before all its threads have waited: an access to global memory, or a step that some may take another way. None: nothing."""
    first = STEP.search(ptx, ptx.index(".entry"))
    if first is None:
        return "the end"
    if first["step"] == "griddepcontrol.wait" and not first["if"]:
        return None
    return "".join(part or "" for part in first.group("if", "step", "label")).strip()


def compile_for(found: Sequence[Compiled], capability: int) -> None:
    from triton._utils import find_paths_if, get_iterable_path
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile
    from triton.runtime import driver

    machine = Machine(GPUTarget("cuda", capability, 32))
    driver.set_active(machine)
    for one in found:
        kernel = getattr(importlib.import_module(one.module), one.kernel)
        special = [None if one.signature[p] == "constexpr" else one.special[p] for p in one.signature]
        divisible = find_paths_if(special, lambda _, known: known == "D")
        attributes = {path: [["tt.divisibility", 16]] for path in divisible if "D" in get_iterable_path(special, path)}
        dependent = {"launch_pdl": True} if capability >= 90 else {}  # as launching.launch has it
        made = triton_compile(ASTSource(kernel, one.signature, one.constants, attributes), target=machine.target, options={**one.options, **dependent})
        hasty = before_the_wait(made.asm["ptx"])
        assert capability < 90 or hasty is None, f"{one.kernel}: {hasty} before it waits for the kernel that writes its inputs"
        assert capability >= 90 or "griddepcontrol" not in made.asm["ptx"], f"{one.kernel}: waits where the chip has no such instruction"
        assert not re.search(r"ld\.global\S*\.nc\b", made.asm["ptx"]), f"{one.kernel}: a load that need not stay behind the wait"
        assert "trap;" not in made.asm["ptx"], f"{one.kernel}: the compiler made a trap of it"
        assert made.metadata.shared <= SHARED_BYTES[capability], f"{one.kernel}: {made.metadata.shared} bytes of shared memory"


# ---- every launcher --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("op", EACH)
def test_one_compilation_for_all_batch_sizes_and_addresses(op: Op, interpreter: Interpreter) -> None:
    """Rows 1, 16 and a view at an odd address compile nothing new: a compilation during serving stalls every request."""
    assert interpreter(compilations, op.name) == []


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("op", EACH)
def test_kernels_compile_for_every_architecture(op: Op, capability: int, interpreter: Interpreter, compiler: Interpreter) -> None:
    """The interpreter takes what the compiler may refuse. On Hopper all that the samples need, elsewhere the first of each kernel."""
    found = interpreter(launched_by, op.name)
    first = list({one.kernel: one for one in reversed(found)}.values())
    assert found
    compiler(compile_for, found if capability == 90 else first, capability)


@pytest.mark.parametrize("op", EACH)
def test_launched_kernels_are_named_so(op: Op, interpreter: Interpreter) -> None:
    """The name is how the next test finds them."""
    names = {one.kernel for one in interpreter(launched_by, op.name)}
    assert names and all(name.endswith("_kernel") for name in names), names


def test_counts_do_not_specialize(interpreter: Interpreter) -> None:
    """Every parameter of a kernel that is neither a constant nor a pointer is in ``do_not_specialize``."""
    assert [parameter for parameter in interpreter(specializing) if parameter not in SPECIALIZED] == []


def test_exceptions_name_what_exists() -> None:
    assert set(TOLERANT) <= {op.name for op in OPS if op.triton is not None}
    assert all(len(reason) > 20 for *_, reason in TOLERANT.values()) and all(len(reason) > 20 for reason in SPECIALIZED.values())
    assert all(math.isfinite(x) for rtol, atol, _ in TOLERANT.values() for x in (rtol, atol))


# ---- these tests notice faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("toy", "complaint"), [
    ("reads_past_the_end", "Mismatched elements: 1 / 33"),
    ("leaves_one_unwritten", "Mismatched elements: 1 / 33"),
    ("writes_past_the_end", "elements outside the output were written"),
    ("writes_its_input", "an input was written"),
    ("writes_before_its_input", "memory around an argument was written"),
    ("dies", "Triton's process ended with code -"),
])  # fmt: skip
def test_a_faulty_launcher_is_noticed(toy: str, complaint: str, interpreter: Interpreter) -> None:
    interpreter(compare_toy, "right")
    with pytest.raises(pytest.fail.Exception, match=complaint):
        interpreter(compare_toy, toy)


def test_a_specializing_launcher_is_noticed(interpreter: Interpreter) -> None:
    assert interpreter(toy_compilations, "right") == []
    (varying,) = interpreter(toy_compilations, "block_by_count")
    assert varying.startswith("_double_kernel.BLOCK: [('constexpr', 16), ('constexpr', 32)]")


def test_a_kernel_that_does_not_compile_is_noticed(compiler: Interpreter) -> None:
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "shift_in": "constexpr", "shift_out": "i64", "BLOCK": "constexpr"}
    special = {"x_ptr": "", "y_ptr": "D", "n": None, "shift_in": 1, "shift_out": "D", "BLOCK": 16}
    good = Compiled("tests.triton_toys", "_double_kernel", signature, special, {(3,): 1, (5,): 16}, {"num_warps": 2})
    compiler(compile_for, [good], 90)
    with pytest.raises(pytest.fail.Exception, match="power of 2"):
        compiler(compile_for, [replace(good, constants={(3,): 1, (5,): 17})], 90)
    hasty = {
        "_hasty_kernel": r"(@%p\d+ )?ld\.global\S*", "_restless_kernel": r"(@%p\d+ )?st\.global\S*", "_sometimes_kernel": r"@%p\d+ bra",
        "_leaving_kernel": r"@%p\d+ (bra|ret)", "_eager_kernel": r"griddepcontrol\.launch_dependents",
    }  # fmt: skip
    for kernel, step in hasty.items():
        with pytest.raises(pytest.fail.Exception, match=rf"{kernel}: {step} before it waits"):
            compiler(compile_for, [replace(good, kernel=kernel)], 90)


# ---- under torch.compile ---------------------------------------------------------------------------------------------


def undefined_when_copied() -> set[str]:
    """Names that Inductor's copy of a kernel of ours uses and does not have."""
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as copied

    from dsv4_ops._triton.topk import topk_kernel

    def names(code: types.CodeType, *operations: str) -> set[str]:
        inner = [names(const, *operations) for const in code.co_consts if isinstance(const, types.CodeType)]
        return {i.argval for i in dis.get_instructions(code) if i.opname in operations}.union(*inner)

    head = "from __future__ import annotations\nimport triton\nimport triton.language as tl\n"
    code = compile(head + copied(topk_kernel), "copy", "exec")
    return names(code, "LOAD_NAME", "LOAD_GLOBAL") - names(code, "STORE_NAME") - set(dir(builtins))


def test_a_kernel_that_the_compiler_copies_is_whole(compiler: Interpreter) -> None:
    """It takes functions and constants along, and imports from Triton alone."""
    assert compiler(undefined_when_copied) == set()


def fill_compiled(k: int) -> tuple[list[list[int]], int]:
    """What a compiled function leaves in a buffer by a Triton launch that is all it does, and how often its code launches."""
    from torch._inductor.utils import run_and_get_code

    from dsv4_ops._triton import topk as kernels

    @torch.library.custom_op(f"dsv4_ops_tests::topk_into_{k}", mutates_args=("indices",))
    def into(logits: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor) -> None:
        kernels.launch(logits, lengths, indices.shape[1], None, None, indices)

    def step(logits: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor) -> None:
        into(logits, lengths, indices)

    logits, indices = torch.arange(20.0).repeat(3, 1), torch.full((3, k), 77, dtype=torch.int32)
    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), logits, torch.tensor([20, 5, 0]), indices)
    return indices.tolist(), code.count(f"topk_into_{k}.default(")


@pytest.mark.parametrize("k", [1, 16])
def test_case_I08_a_launch_whose_only_effect_is_a_buffer_is_kept(k: int, interpreter: Interpreter) -> None:
    """By an op of its own; test_topk_triton.py has the kernel that the compiler sees. 1 and 16 are what Triton specializes on."""
    rows = [list(range(20)), list(range(5)), []]
    assert interpreter(fill_compiled, k) == ([row[-k:] + [-1] * (k - len(row[-k:])) for row in rows], 1)
