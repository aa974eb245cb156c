"""What nvcc compiles: FlashInfer's top-k for sm_90a, and an empty kernel. No GPU is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import trim

HERE = Path(__file__).resolve().parent
SM90A = "-gencode=arch=compute_90a,code=sm_90a"
# As FlashInfer compiles its kernels when they are first called.
FLASHINFER_FLAGS = (
    "-std=c++17", "-O3", "-use_fast_math", "-lineinfo", "-DNDEBUG", "--expt-relaxed-constexpr", "-static-global-template-stub=false", SM90A, "--compiler-options=-fPIC",
    *(f"-DFLASHINFER_ENABLE_{kind}" for kind in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")),
)  # fmt: skip


def check() -> None:
    missing = [name for name in ("nvcc", "g++") if shutil.which(name) is None]
    if missing:
        sys.exit(f"not on the path: {', '.join(missing)} (nvcc of CUDA 13 and g++ are needed)")


def nvcc(*arguments: str | Path) -> None:
    subprocess.run(["nvcc", *map(str, arguments)], check=True)


def empty(work: Path) -> Path:
    library = work / "libempty.so"
    nvcc("-O3", "-shared", "--compiler-options=-fPIC", "-gencode=arch=compute_90,code=sm_90", "-cudart=shared", "-o", library, HERE / "empty.cu")
    return library


def flashinfer(data: Path, tvm_ffi: Path, curand: Path, work: Path) -> Path:
    """The library of its three top-k kernels. ``data`` has its sources, ``curand`` the header that one of them includes."""
    cub, library = work / "cub_ragged.cu", work / "flashinfer_topk.so"
    cub.write_text(trim.ragged_cub((data / "csrc" / "cub_topk.cu").read_text()))
    own = [f"-I{data / 'cccl' / part}" for part in ("cub", "libcudacxx/include", "thrust")]  # before those of the toolkit
    system = [f"-isystem={path}" for path in (tvm_ffi / "include", data / "include", data / "csrc", data / "spdlog" / "include", curand)]
    sources = [data / "csrc" / "topk.cu", data / "csrc" / "flashinfer_fast_topk_clusters_binding.cu", cub, HERE / "flashinfer_binding.cpp"]
    _compile(sources, [*FLASHINFER_FLAGS, *own, *system], work)
    nvcc("-shared", SM90A, "-cudart=shared", "-o", library, *(work / f"{s.stem}.o" for s in sources), f"-L{tvm_ffi / 'lib'}", "-ltvm_ffi")
    return library


def _compile(sources: Sequence[Path], flags: Sequence[str], work: Path) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: nvcc(*flags, "-c", source, "-o", work / f"{source.stem}.o"), sources))
