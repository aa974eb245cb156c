"""What is shipped: a wheel built here, looked into, and imported away from the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from dsv4_ops import loaded, testing

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
NVCC = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
GENERATED = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "_build.json", "build")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
needs_nvcc = pytest.mark.skipif(not NVCC.is_file(), reason="no nvcc")


def environment(**changes: str) -> dict[str, str]:
    own = ("DSV4_OPS_", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)} | changes


def run(*command: str | Path, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([str(c) for c in command], cwd=cwd, env=environment(**env), capture_output=True, text=True, check=False, timeout=600)
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


def python(code: str, cwd: Path, *flags: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, *flags, "-c", code, cwd=cwd, check=check, **env)


def copy_sources(target: Path) -> Path:
    """The checkout without anything built: a build of its own leaves the checkout alone."""
    target.mkdir()
    for name in ("dsv4_ops", "passes", "csrc", "tests", "docs", "benchmarks", ".ci"):
        shutil.copytree(ROOT / name, target / name, ignore=GENERATED)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "dev.py"):
        shutil.copy2(ROOT / name, target / name)
    return target


def build_wheel(sources: Path, out: Path, **env: str) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", out, sources, cwd=sources, **env)
    (wheel,) = out.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_sources(folder / "sources"), folder / "out", DSV4_OPS_BUILD="require", DSV4_OPS_CUDA="0")


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(wheel, tmp_path_factory.mktemp("site"))


@needs_compiler
def test_wheel_holds_this_package_and_nothing_else(wheel: Path, site: Path) -> None:
    assert re.fullmatch(r"dsv4_ops-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)
    (info,) = site.glob("*.dist-info")
    assert (info / "top_level.txt").read_text().split() == ["dsv4_ops"]
    assert {p.name for p in site.iterdir()} == {"dsv4_ops", info.name}
    sources = wheel.parents[1] / "sources"
    shipped = {p.relative_to(site) for p in site.rglob("*") if p.is_file()}
    modules = {p.relative_to(sources) for p in (sources / "dsv4_ops").rglob("*.py")} | {"dsv4_ops" / p.relative_to(sources) for p in (sources / "passes").rglob("*.py")}
    assert {p for p in shipped if p.suffix == ".py"} == modules
    data = {p.relative_to(sources) for p in (sources / "dsv4_ops").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert data <= shipped, f"not in tool.setuptools.package-data: {sorted(map(str, data - shipped))}"
    assert [p.name for p in site.rglob("*.so")] == ["_C.abi3.so"]
    weights = [p for p in data if p.suffix == ".safetensors"]
    assert len(weights) == 3 and sum((sources / p).stat().st_size for p in weights) <= 8e6 and wheel.stat().st_size < 10e6


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_compiled_part_uses_only_the_stable_interface(site: Path) -> None:
    library = site / "dsv4_ops" / "_C.abi3.so"
    undefined = run("nm", "-DC", "--undefined-only", library, cwd=site).stdout
    assert "aoti_torch_" in undefined
    assert not [line for line in undefined.splitlines() if re.search(r"\b(at|c10|torch)::", line)]
    defined = run("nm", "-DC", "--defined-only", library, cwd=site).stdout
    # The launch plan of the CUDA top-k is plain arithmetic; tests call it where there is no GPU.
    assert [line.split()[-1] for line in defined.splitlines() if " T " in line] == ["PyInit__C", "dsv4_ops_topk_plan"]


@needs_compiler
def test_compiled_part_names_no_folder_of_the_building_machine(wheel: Path, site: Path) -> None:
    content = (site / "dsv4_ops" / "_C.abi3.so").read_bytes()
    for folder in (ROOT, wheel.parents[1], Path(torch.__file__).parent):
        assert os.fsencode(folder) not in content


IMPORTED = """
import os, sys, torch, dsv4_ops, dsv4_ops.passes
site = sys.argv[1] if len(sys.argv) > 1 else os.environ["PYTHONPATH"]
assert dsv4_ops.__file__.startswith(site) and dsv4_ops.passes.__file__.startswith(site), (dsv4_ops.__file__, dsv4_ops.passes.__file__)
print("loaded", dsv4_ops.loaded)
print("skipped", dsv4_ops.skipped)
print(dsv4_ops.topk(torch.tensor([[1.0, 3.0, 2.0]] * 2), torch.tensor([3, 2]), 2).tolist())
print(dsv4_ops.topk(torch.tensor([[5.0]]), torch.tensor([1]), 1).tolist())
"""


@needs_compiler
def test_wheel_works_outside_the_checkout(site: Path, tmp_path: Path) -> None:
    result = python(IMPORTED, tmp_path, "-W", "error", PYTHONPATH=str(site))
    assert "loaded ['_C']" in result.stdout and "[[1, 2], [0, 1]]\n[[0]]" in result.stdout
    assert "'_C_cuda'" in result.stdout
    assert not (site / "passes").exists()
    result = python("import passes", tmp_path, check=False, PYTHONPATH=str(site))
    # The second where the checkout is installed in this environment as a path entry (editable_mode=compat, as dev.py does).
    assert "No module named 'passes'" in result.stderr or "ImportError: import dsv4_ops.passes" in result.stderr


def test_passes_are_refused_under_their_folder_name(tmp_path: Path) -> None:
    result = python("import passes", ROOT, check=False)
    assert result.returncode != 0 and "ImportError: import dsv4_ops.passes" in result.stderr
    result = python("import dsv4_ops.passes as p; print(p.__file__)", tmp_path, PYTHONPATH=str(ROOT))
    assert result.stdout.strip() == str(ROOT / "passes" / "__init__.py")


def test_wheel_without_compiled_parts_is_for_any_machine_and_says_so(tmp_path: Path) -> None:
    wheel = build_wheel(copy_sources(tmp_path / "sources"), tmp_path / "out", DSV4_OPS_BUILD="none")
    assert wheel.name.endswith("-py3-none-any.whl")
    site = unpack(wheel, tmp_path / "site")
    assert not list(site.rglob("*.so"))
    (tmp_path / "empty").mkdir()
    result = python(IMPORTED, tmp_path / "empty", PYTHONPATH=str(site))
    assert "loaded []" in result.stdout and "DSV4_OPS_BUILD=none" in result.stdout and "[[1, 2], [0, 1]]" in result.stdout
    assert result.stderr.count("UserWarning: dsv4_ops.topk runs without its compiled cpu kernel") == 1, result.stderr
    assert "DSV4_OPS_BUILD=none" in result.stderr
    quiet = python(IMPORTED, tmp_path / "empty", PYTHONPATH=str(site), DSV4_OPS_DISABLE_C="1")
    assert quiet.stderr == "", "who switches the compiled parts off is not warned"


@needs_compiler
def test_commands_of_the_wheel_run_outside_the_checkout(site: Path, tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "dsv4_ops", "bench", "topk", "--device", "cpu", "--rows", "2", "--columns", "64", "--k", "8", "--json", "b.json", cwd=tmp_path, PYTHONPATH=str(site))
    (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert row["ok"] and row["backend"] == "c++" and "say nothing about GPUs" in done.stdout
    assert "commit unknown" in done.stdout, "the sources of this wheel had no history"
    report = run(sys.executable, "-m", "dsv4_ops", "doctor", cwd=tmp_path, PYTHONPATH=str(site)).stdout
    assert "missing back ends" in report and "_C: loaded" in report


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_build_from_a_checkout_knows_its_commit(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        run(*git, *command, cwd=sources)
    head = run("git", "rev-parse", "--short", "HEAD", cwd=sources).stdout.strip()
    site = unpack(build_wheel(sources, tmp_path / "out", DSV4_OPS_BUILD="none"), tmp_path / "site")
    assert json.loads((site / "dsv4_ops" / "_build.json").read_text())["commit"] == head
    assert python("from dsv4_ops.bench import machine; print(machine.commit())", tmp_path, PYTHONPATH=str(site)).stdout.strip() == head


def test_install_without_a_compiler_works_and_doctor_says_what_is_missing(tmp_path: Path) -> None:
    """As ``pip install .`` on a machine with nothing but Python and torch: no compiler on the path or named by the environment."""
    (tmp_path / "bin").mkdir()
    bare = {"PATH": str(tmp_path / "bin"), **{name: "" for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH") if name in os.environ}}
    sources = copy_sources(tmp_path / "sources")
    site = unpack(build_wheel(sources, tmp_path / "out", DSV4_OPS_CUDA="0", **bare), tmp_path / "site")
    assert not list(site.rglob("*.so"))
    result = python(IMPORTED, tmp_path, PYTHONPATH=str(site), **bare)
    assert "loaded []" in result.stdout and "[[1, 2], [0, 1]]" in result.stdout
    report = run(sys.executable, "-m", "dsv4_ops", "doctor", cwd=tmp_path, PYTHONPATH=str(site), **bare).stdout
    missing = report[report.index("missing back ends") : report.index("compiled parts")]
    assert re.search(r"c\+\+ on cpu for .*\btopk\b", missing) and "why: _C: not built: the build failed" in missing
    assert "fix: " in missing and "(it needs a C++ compiler, g++ or clang++)" in missing


@needs_compiler
def test_library_that_does_not_load_falls_back(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site, tmp_path / "site")
    (tmp_path / "site" / "dsv4_ops" / "_C.abi3.so").write_bytes(b"\x7fELF not a library")
    (tmp_path / "empty").mkdir()
    result = python(IMPORTED, tmp_path / "empty", PYTHONPATH=str(tmp_path / "site"))
    assert "loaded []" in result.stdout and f"found but does not load with torch {torch.__version__}" in result.stdout
    assert "[[1, 2], [0, 1]]\n[[0]]" in result.stdout and result.stderr.count("UserWarning") == 1


def build_ext(sources: Path, out: Path, *, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "setup.py", "build_ext", "--build-lib", out, "--build-temp", out / "tmp", cwd=sources, check=check, **env)


def test_missing_compiler_is_written_down_or_fails_as_asked(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    nowhere = str(tmp_path / "no-compiler")
    build_ext(sources, tmp_path / "auto", CC=nowhere, CXX=nowhere)
    assert not list((tmp_path / "auto").rglob("*.so"))
    assert "the build failed" in (tmp_path / "auto" / "dsv4_ops" / "_build.json").read_text()
    stale = sources / "dsv4_ops" / "_C.abi3.so"
    stale.write_bytes(b"of an earlier build")
    run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=sources, CC=nowhere, CXX=nowhere)
    assert not stale.exists()
    failed = build_ext(sources, tmp_path / "require", check=False, CC=nowhere, CXX=nowhere, DSV4_OPS_BUILD="require")
    assert failed.returncode != 0 and "no-compiler" in failed.stderr


@pytest.mark.parametrize(("env", "message"), [
    ({"DSV4_OPS_BUILD": "yes"}, "DSV4_OPS_BUILD must be auto, require or none, got 'yes'"),
    ({"DSV4_OPS_CUDA": "2"}, "DSV4_OPS_CUDA must be auto, 1 or 0, got '2'"),
])  # fmt: skip
def test_build_settings_are_checked(env: dict[str, str], message: str, tmp_path: Path) -> None:
    failed = run(sys.executable, "setup.py", "--version", cwd=copy_sources(tmp_path / "sources"), check=False, **env)
    assert failed.returncode != 0 and message in failed.stderr


CUDA_SOURCE = """
#include <Python.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include "checks.h"

__global__ void count(int* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = i;
}

torch::stable::Tensor count_cuda(const torch::stable::Tensor& like) {
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
  torch::stable::Tensor out = torch::stable::empty_like(like);
  count<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<int*>(out.mutable_data_ptr()), static_cast<int>(out.numel()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(dsv4_ops, CUDA, m) { m.impl("count_of_the_packaging_test", TORCH_BOX(&count_cuda)); }

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "dsv4_ops._C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
"""


@needs_compiler
@needs_nvcc
def test_cuda_flags_compile_and_link_without_a_gpu(tmp_path: Path) -> None:
    """A small source of its own: the flags, not our kernels, are tested here."""
    sources = copy_sources(tmp_path / "sources")
    shutil.rmtree(sources / "csrc" / "cuda", ignore_errors=True)
    (sources / "csrc" / "cuda").mkdir()
    (sources / "csrc" / "cuda" / "count.cu").write_text(CUDA_SOURCE)
    out = tmp_path / "out"
    build_ext(sources, out, DSV4_OPS_CUDA="1", DSV4_OPS_CUDA_ARCHS="9.0+PTX", DSV4_OPS_BUILD="require")
    library = out / "dsv4_ops" / "_C_cuda.abi3.so"
    undefined = run("nm", "-DC", "--undefined-only", library, cwd=tmp_path).stdout
    assert "aoti_torch_get_current_cuda_stream" in undefined and not re.search(r"\b(at|c10)::", undefined)
    assert "cudaLaunchKernel" in undefined, "the CUDA runtime must be the shared one"
    assert os.fsencode(tmp_path) not in library.read_bytes()
    (sources / "csrc" / "cuda" / "count.cu").write_text("this is not CUDA\n")
    failed = build_ext(sources, tmp_path / "bad", check=False, DSV4_OPS_CUDA="1")
    assert failed.returncode != 0 and "count.cu" in failed.stderr + failed.stdout


def test_source_distribution_can_build_itself(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    python(f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})", sources)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    wanted = {str(p.relative_to(sources)) for part in ("csrc", "dsv4_ops", "passes") for p in (sources / part).rglob("*") if p.suffix not in (".so", ".pyc") and p.is_file()}
    wanted |= {str(p.relative_to(sources)) for part in ("tests", "docs", "benchmarks", ".ci") for p in (sources / part).rglob("*") if p.is_file()}  # its tests run, and its pages are whole
    assert wanted | {"CHANGELOG.md", "CONTRIBUTING.md", "README.md", "LICENSE", "dev.py"} <= names, sorted(wanted - names)
    assert not [name for name in names if name.endswith((".so", ".pyc", "_build.json"))]
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    site = unpack(build_wheel(unpacked, tmp_path / "out", DSV4_OPS_BUILD="none"), tmp_path / "site")
    assert {p.relative_to(site) for p in site.rglob("*.py")} == {Path("dsv4_ops") / p.relative_to(sources / "dsv4_ops") for p in (sources / "dsv4_ops").rglob("*.py")} | {
        Path("dsv4_ops") / p.relative_to(sources) for p in (sources / "passes").rglob("*.py")
    }


@pytest.mark.skipif("_C" not in loaded, reason="dsv4_ops._C is not built")
def test_every_kernel_in_the_sources_is_loaded_and_used() -> None:
    for device, path in (("cuda", "cuda/registration.cu"), ("cpu", "registration.cpp")):
        table = (ROOT / "csrc" / path).read_text()
        in_sources = set(re.findall(r'\bm\.impl\("(\w+)"', table))
        assert in_sources
        assert {op.name for op in testing.ops() if device in op.cpp_sources} == in_sources
    assert {op.name for op in testing.ops() if op.backends["cpu"] == "c++"} == in_sources, "stale build: install again"
