"""``python3 -m benchmarks.peers``, on toys: no network, no nvcc. What the benchmarks ask of PEERS_DIR is what it gives."""

from __future__ import annotations

import ast
import importlib.util
import lzma
import re
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.peers import __main__ as command
from benchmarks.peers import build, extract, trim, wheels

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "peers"
ASKING = [*sorted((ROOT / "benchmarks").glob("*.py")), ROOT / "dsv4_ops" / "bench" / "peers.py"]

TOY = '''
import somewhere

LIMIT = 3


@somewhere.jit(fast=True)
def helper(x):
    # kept
    return x + LIMIT


class Kernel:
    @staticmethod
    @somewhere.jit
    def kernel(x):
        return helper(x)

    def launch(self): ...
'''


def test_functions_are_cut_out_whole(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    text = extract.kernels(tmp_path, (extract.Function("toy.py", "helper", "helper"), extract.Function("toy.py", "Kernel.kernel", "toy_kernel")))
    assert text.removeprefix(extract._IMPORTS).split("\n\n") == [
        "\n@somewhere.jit(fast=True)\ndef helper(x):\n    # kept\n    return x + LIMIT", "\n@somewhere.jit\ndef toy_kernel(x):\n    return helper(x)", "",
    ]  # fmt: skip
    text = extract.sampling(tmp_path, ("toy.py",))
    assert [ast.unparse(n) for n in ast.parse(text).body[5:]] == ["LIMIT = 3", "@somewhere.jit(fast=True)\ndef helper(x):\n    return x + LIMIT"]
    for path in ("Kernel.other", "other.kernel", "other"):
        with pytest.raises(LookupError, match=rf"toy.py has no {path}: is this the vLLM of requirements.txt"):
            extract.kernels(tmp_path, (extract.Function("toy.py", path, "x"),))


def library(*codes: tuple[int, int, bytes]) -> bytes:
    """An ELF file of nothing but a fat binary with entries (kind, architecture, payload)."""
    entries = b"".join(struct.pack("<HHIQ12xI", kind, 1, 32, len(code), architecture) + code for kind, architecture, code in codes)
    fatbin = bytes(8) + struct.pack("<IHHQ", trim.FATBIN, 1, 16, len(entries)) + entries
    names = b"\0.shstrtab\0.nv_fatbin\0"
    heads = [(0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(fatbin))]
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, 0, 0, 0, at, size, 0, 0, 0, 0) for name, at, size in heads)
    head = struct.pack("<4s36xQ10xHHH", b"\x7fELF", 64 + len(names) + len(fatbin), 64, len(heads), 1)
    return head.ljust(64, b"\0") + names + fatbin + table


def test_only_code_for_hopper_is_kept() -> None:
    whole = library((2, 80, b"ampere" * 8), (2, 90, b"hopper" * 8), (1, 90, b"as PTX" * 8), (2, 100, b"newer " * 8))
    trimmed = trim.hopper_only(whole)
    assert trimmed == library((2, 80, bytes(48)), (2, 90, b"hopper" * 8), (1, 90, bytes(48)), (2, 100, bytes(48)))
    with pytest.raises(LookupError, match="no machine code for sm_90"):
        trim.hopper_only(library((2, 80, b"ampere")))
    with pytest.raises(LookupError, match=r"no section \.nv_fatbin"):
        trim.hopper_only(whole.replace(b".nv_fatbin", b".of_others"))


CUB = """#include "a.h"

namespace {
int ordered(int tie_break) {
  if (tie_break == 1) {
    return f(int{1});
  } else if (tie_break == 2) {
    return f(2);
  } else {
    return f(0);
  }
}
int rows() {
  if (row_starts != nullptr) {
    auto at = int{0};
    return g(at);
  }
  return h();
}
}  // namespace

void cub_topk_page_table_transform(int x) {
  run(x);
}
void cub_topk_ragged_transform(int x) {
  run(x);
}
int64_t cub_topk_ragged_transform_workspace_size(int x) {
  return size(x);
}
"""


def test_ragged_topk_is_what_is_left_of_cub() -> None:
    text = trim.ragged_cub(CUB)
    left = " ".join(text.replace(trim._FLOAT32_ONLY, "").split())
    assert text.index(trim._FLOAT32_ONLY) < text.index("namespace {")
    assert left == (
        '#include "a.h" namespace { int ordered(int tie_break) { { return f(0); } } int rows() { return h(); } } // namespace '
        "void cub_topk_ragged_transform(int x) { run(x); } TVM_FFI_DLL_EXPORT_TYPED_FUNC(cub_topk_ragged_transform, cub_topk_ragged_transform); "
        "int64_t cub_topk_ragged_transform_workspace_size(int x) { return size(x); } "
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(cub_topk_ragged_transform_workspace_size, cub_topk_ragged_transform_workspace_size);"
    )
    for lost in ("tie_break == 1", "row_starts", "void cub_topk_ragged_transform", "}  // namespace"):
        with pytest.raises(LookupError):
            trim.ragged_cub(CUB.replace(lost, "another release"))


def archive(path: Path, files: dict[str, str | bytes]) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)


def toy_vllm() -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {f"vllm/{file}": "" for file in extract.FILES}
    for f in extract.KERNELS:
        owner, _, name = f.path.rpartition(".")
        text = f"@jit\ndef {name}(x):\n    return x\n"
        files[f"vllm/{f.file}"] = str(files[f"vllm/{f.file}"]) + (f"class {owner}:\n    @staticmethod\n    " + text.replace("\n", "\n    ").rstrip(" ") if owner else text)
    code = library((2, 90, b"code"), (2, 100, b"more"))
    return files | {command.INTERFACE: "'FlashMLA'\n"} | dict.fromkeys(command.LIBRARIES, code)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    data = "flashinfer/data"
    tags = {"vllm": "cp38-abi3-manylinux_2_28_x86_64", "flashinfer-python": "py3-none-any", "apache-tvm-ffi": "cp312-cp312-manylinux_2_28_x86_64", "nvidia-curand": "py3-none-manylinux_2_27_x86_64"}
    contents: dict[str, dict[str, str | bytes]] = {
        "vllm": toy_vllm(),
        "flashinfer-python": {f"{data}/{part}/x": "" for part in ("include", "cccl", "spdlog/include")} | {f"{data}/csrc/cub_topk.cu": CUB},
        "apache-tvm-ffi": {"tvm_ffi/__init__.py": ""},
        "nvidia-curand": {"nvidia/cu13/include/curand.h": ""},
    }
    for project, version in wheels.pinned().items():
        archive(folder / f"{project.replace('-', '_')}-{version}-{tags[project]}.whl", contents[project])
    return folder


def test_wheels_are_those_of_the_other_machine(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(wheels.subprocess, "run", lambda line, **_: asked.append(line))
    assert [path.name.split("-")[0] for path in wheels.found(ready, "3.12").values()] == ["vllm", "flashinfer_python", "apache_tvm_ffi", "nvidia_curand"] and not asked
    with pytest.raises(LookupError, match=r"no wheel of apache-tvm-ffi for Python 3\.13 in "):
        wheels.found(ready, "3.13")
    assert asked[0][-1] == f"apache-tvm-ffi=={wheels.pinned()['apache-tvm-ffi']}" and {"--python-version=3.13", "--no-deps", str(ready)} <= set(asked[0]) and "vllm" not in str(asked[0][-2:])


@pytest.fixture
def filled(ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def nvcc(*arguments: Any) -> None:
        assert all(Path(a).exists() for a in arguments if isinstance(a, Path) and a.suffix == ".cpp")
        out = Path(arguments[arguments.index("-o") + 1])
        out.write_bytes(b"compiled")

    monkeypatch.setattr(build, "nvcc", nvcc)
    monkeypatch.setattr(build, "check", lambda: None)
    monkeypatch.setattr(subprocess, "run", None)  # neither pip nor a compiler

    def fill(**options: Any) -> Path:
        command.prepare(tmp_path / "peers", ready, "3.12", **options)
        return tmp_path / "peers"

    return fill


def test_every_file_that_benchmarks_ask_for_is_there(filled: Callable[..., Path]) -> None:
    folder = filled()
    there = {path.name.removesuffix(".xz") for path in folder.iterdir()}
    sources = "".join(path.read_text() for path in ASKING)
    asked = set(re.findall(r'"(\w+(?:\.abi3\.so|_interface\.py|_extracted\.py))"', sources)) | {f"{name}.py" for name in re.findall(r"\bimport (peers\w*)\b", sources)}
    asked |= {f"{name}.py" for name in re.findall(r'import_module\("(\w+)"\)', sources)} | {f"{name}.py" for name in re.findall(r"^import (\w+_extracted)", (PEERS / "loaders" / "peers_sampling.py").read_text(), re.M)}
    asked |= set(re.findall(r'_library\("([\w.]+)"\)', (PEERS / "loaders" / "peers.py").read_text()))
    assert asked == {
        "peers.py", "peers_sampling.py", "triton_extracted.py", "sampling_extracted.py", "flash_mla_interface.py",
        "_C_stable_libtorch.abi3.so", "_flashmla_C.abi3.so", "flashinfer_topk.so", "libempty.so",
    }  # fmt: skip
    assert asked == {name for name in there if not name.endswith(".whl")}
    assert lzma.decompress((folder / "_flashmla_C.abi3.so.xz").read_bytes()) == library((2, 90, b"code"), (2, 100, bytes(4)))
    assert [path.suffix for path in folder.glob("apache_tvm_ffi-*")] == [".whl"]


def test_every_kernel_that_benchmarks_launch_is_extracted(filled: Callable[..., Path]) -> None:
    launched = set()
    for path in ASKING:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and isinstance(node.value.value, ast.Name) and node.value.value.id in ("kernels", "module"):
                launched.add(node.value.attr)
    assert len(launched) >= 8
    names = [n.name for n in ast.parse((filled() / "triton_extracted.py").read_text()).body if isinstance(n, ast.FunctionDef)]
    assert launched <= set(names) and len(names) == len(set(names))


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers_of_a_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_peers_are_those_whose_libraries_are_there(filled: Callable[..., Path]) -> None:
    some = loaded(filled(with_flashinfer=False) / "peers.py")
    assert set(some.TOPK_PEERS) == {"empty", "vllm_coop", "vllm_persistent", "vllm_per_row", "torch_masked"} and not some.SLOT_PEERS and not some.BFLOAT16
    every = loaded(filled() / "peers.py")
    assert set(every.TOPK_PEERS) - set(some.TOPK_PEERS) == {"fi_radix", "fi_cub", "fi_clusters"} and set(every.SLOT_PEERS) == {"fi_radix_pages"}
    assert set(every.BFLOAT16) <= set(every.TOPK_PEERS)


def test_libraries_are_unpacked_once_for_each_content(tmp_path: Path, filled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    peers = loaded(filled() / "peers.py")
    monkeypatch.setattr(peers.tempfile, "gettempdir", lambda: str(tmp_path))
    first = Path(peers._library("libempty.so"))
    assert first.read_bytes() == b"compiled" and peers._library("libempty.so") == str(first)
    (peers.HERE / "libempty.so.xz").write_bytes(lzma.compress(b"again"))
    assert Path(peers._library("libempty.so")).read_bytes() == b"again" and first.exists()
    assert (first.parent.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize(("width", "k"), [(9, 4), (3, 5)])
def test_masked_topk_is_right(width: int, k: int) -> None:
    peers = loaded(PEERS / "loaders" / "peers.py")
    logits, lengths = torch.randn(4, width, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, width - 1, width], dtype=torch.int32)
    out = torch.full((4, k), -7, dtype=torch.int32)
    peers.TOPK_PEERS["torch_masked"][0](4, k, width, width)(logits, lengths, out)
    for row, length in enumerate(lengths.tolist()):
        best = logits[row, :length].sort(descending=True).indices[:k].tolist()
        assert out[row].tolist() == best + [-1] * (k - len(best))


def test_nothing_of_others_is_in_the_repository() -> None:
    files = {str(path.relative_to(PEERS)) for path in PEERS.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files == {
        "README.md", "__init__.py", "__main__.py", "build.py", "empty.cu", "extract.py", "flashinfer_binding.cpp", "loaders/peers.py", "loaders/peers_sampling.py",
        "requirements.txt", "trim.py", "wheels.py",
    }  # fmt: skip
