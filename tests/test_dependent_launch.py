"""Programmatic dependent launch: every kernel waits for the grid before it, in all threads, before it touches device memory.

By reading sources, so for every kernel and variant. What the compiler makes of it: ``compile_for`` in test_triton.py, on each kernel that a sample launches.
On a GPU: test_kernels_cuda.py, with kernels before and after that let the next one begin at once.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.interpreter import Interpreter
from tests.test_triton import Machine

ROOT = Path(__file__).parents[1]
TRITON = sorted((ROOT / "dsv4_ops" / "_triton").glob("*.py"))
CUDA = sorted((ROOT / "csrc" / "cuda").glob("*.cu*"))
WAIT = "ptx::wait_for_previous_grid();"


def triton_kernels(source: str) -> dict[str, str]:
    """Every kernel that is launched, and the first thing it does."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("compile_once" in ast.unparse(d) for d in node.decorator_list):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            found[node.name] = ast.unparse(body[0])
    return found


def launched(source: str) -> set[str]:
    """Names that ``launch(name, ...)`` starts."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("launch", "start")]
    return {ast.unparse(call.args[0]) for call in calls} - {"kernel"}


def test_every_triton_kernel_begins_by_waiting() -> None:
    kernels = {name: first for path in TRITON for name, first in triton_kernels(path.read_text()).items()}
    assert {name for path in TRITON for name in launched(path.read_text())} == set(kernels)
    assert len(kernels) > 20 and set(kernels.values()) == {"wait_for_inputs()"}, kernels


def options_on(capability: int) -> dict[str, bool]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from dsv4_ops._triton import launching

    driver.set_active(Machine(GPUTarget("cuda", capability, 32)))
    return launching._launch_options.__wrapped__(0)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_launches_are_dependent_where_kernels_wait(capability: int, compiler: Interpreter) -> None:
    """That they wait there and nowhere else: ``compile_for``."""
    assert compiler(options_on, capability) == ({"launch_pdl": True} if capability >= 90 else {})


def test_every_triton_launch_goes_through_launching() -> None:
    """A grid in brackets is a launch of its own, without the wait's other half."""
    for path in TRITON:
        direct = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
        assert not direct or path.name == "launching.py", f"{path.name}: {direct}"


def hasty_cuda_kernels(source: str) -> list[str]:
    """Kernels in which some thread leaves before it waits, waits twice or never."""
    source = re.sub(r"//[^\n]*", "", source)
    hasty = []
    for start in re.finditer(r"__global__[^;{]*?\b(\w+)\(const __grid_constant__ Args args\) \{", source):
        depth, waits, before = 1, 0, ""
        for piece in re.split(rf"([{{}}]|{re.escape(WAIT)})", source[start.end() :]):
            depth += {"{": 1, "}": -1}.get(piece, 0)
            if depth == 0:
                break
            if piece == WAIT:
                waits += 1 if depth == 1 and re.search(r"[;}]\s*$", before) else 100  # 100: under a condition
            if waits == 0:
                before += piece
        if waits != 1 or re.search(r"\breturn\b", before):
            hasty.append(start[1])
    return hasty


def test_every_cuda_kernel_waits_once_in_all_threads() -> None:
    sources = {path.name: path.read_text() for path in CUDA}
    kernels = sum(len(re.findall(r"__global__", re.sub(r"//[^\n]*", "", text))) for text in sources.values())
    assert kernels == sum(len(re.findall(r"\(const __grid_constant__ Args args\) \{", text)) for text in sources.values()) >= 3, "a kernel that this test does not know"
    assert {name: hasty_cuda_kernels(text) for name, text in sources.items() if hasty_cuda_kernels(text)} == {}


def test_no_cuda_load_is_promised_that_nobody_writes() -> None:
    """``__ldg`` and what the compiler makes of ``const __restrict__``: such loads may go before the wait. Triton's: ``compile_for``."""
    sources = {path.name: re.sub(r"//[^\n]*", "", path.read_text()) for path in CUDA}
    assert {name: found for name, text in sources.items() if (found := re.findall(r"__ldg|__restrict__|\bld\.global\S*\.nc\b", text))} == {}


@pytest.mark.parametrize(("body", "hasty"), [
    (f"int x = 1; {WAIT} if (x) return; while (x) {{ }}", []),
    (f"for (;;) {{ }}\n  {WAIT}", []),
    ("int x = 1;", ["k"]),
    (f"if (x) return; {WAIT}", ["k"]),
    (f"if (x) {WAIT} y();", ["k"]),
    (f"if (x) {{ {WAIT} }} y();", ["k"]),
    (f"// {WAIT}\n int x;", ["k"]),
    (f"int x; {WAIT} {WAIT}", ["k"]),
])  # fmt: skip
def test_a_hasty_cuda_kernel_is_noticed(body: str, hasty: list[str]) -> None:
    assert hasty_cuda_kernels(f"__global__ void __launch_bounds__(32) k(const __grid_constant__ Args args) {{ {body} }} void other() {{ {WAIT} }}") == hasty


def test_a_hasty_triton_kernel_is_noticed() -> None:
    source = '@compile_once(aligned=())\ndef a_kernel(x_ptr):\n    """Text."""\n    x = tl.load(x_ptr)\n    wait_for_inputs()\n\n\n@compile_once(aligned=())\ndef b_kernel(x_ptr):\n    if x_ptr:\n        wait_for_inputs()\n'
    assert triton_kernels(source) == {"a_kernel": "x = tl.load(x_ptr)", "b_kernel": "if x_ptr:\n    wait_for_inputs()"}
