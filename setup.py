"""Builds the two optional compiled parts, ``dsv4_ops._C`` (CPU) and ``dsv4_ops._C_cuda``; the rest is in pyproject.toml.

Both use PyTorch's stable ABI and Python's limited API, so one wheel serves torch 2.11 and later on Python 3.10 and
later. Torch is only looked at on disk, never imported: its build helpers refuse to compile CUDA beside a CPU torch and
would have to be installed in pip's isolated build environment.

=======================  =======  =================================================================================
variable                 default  meaning
=======================  =======  =================================================================================
``DSV4_OPS_BUILD``       auto     auto: a part that cannot be built is left out, and ``dsv4_ops.skipped`` says why;
                                  require: the build fails instead; none: build nothing
``DSV4_OPS_CUDA``        auto     auto: compile the CUDA sources when torch is a CUDA build and nvcc is found;
                                  1: compile them or fail (a CPU torch will do: a compile check); 0: leave them out
``DSV4_OPS_CUDA_ARCHS``  9.0      as ``8.0;9.0;10.0+PTX``
``CUDA_HOME``                     toolkit to use; else ``/usr/local/cuda``, the ``nvcc`` on the path, or pip's
=======================  =======  =================================================================================
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")
OLDEST_TORCH = (2, 11)
DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x030A0000"]
REPORT = "_build.json"
"""Beside the libraries: what was left out and why, for ``dsv4_ops.skipped`` (pip hides the build's output), and the commit, for ``bench``."""


class CannotBuildError(BaseError):
    """A compiled part cannot be built here."""


def setting(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name) or default
    if value not in allowed:
        sys.exit(f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}.")
    return value


def site_folders() -> list[Path]:
    """Where torch may be installed. In pip's build isolation it is not importable, but its folder is still there."""
    paths = sysconfig.get_paths()
    folders = [*sys.path, paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()]
    return [Path(p) for p in dict.fromkeys(folders) if p]


def find_torch() -> Path:
    spec = importlib.util.find_spec("torch")  # does not import a top-level package
    found = list(spec.submodule_search_locations or ()) if spec else []
    for folder in [*map(Path, found), *(p / "torch" for p in site_folders())]:
        if (folder / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
            return folder
    raise CannotBuildError("torch with its C++ headers was not found; install torch>=2.11 first")


def torch_version(folder: Path) -> tuple[str, str | None]:
    """(version, CUDA version or None) from torch's own version file."""
    text = (folder / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.M)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", text, re.M)
    if version is None:
        raise CannotBuildError(f"no version in {folder / 'version.py'}")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version[1])[:2])
    if numbers < OLDEST_TORCH:
        raise CannotBuildError(f"torch {version[1]} is too old, 2.11 is the oldest that the compiled parts run with")
    return version[1], cuda[1] if cuda else None


def find_cuda() -> Path:
    """A toolkit folder with both ``bin/nvcc`` and headers: the ``nvcc`` on the path may be a wrapper script."""
    on_path = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates += [str(Path(on_path).resolve().parents[1])] if on_path else []
    candidates += [str(p / "nvidia" / name) for p in site_folders() for name in ("cu13", "cu12")]
    for home in (Path(c) for c in candidates if c):
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return home
    raise CannotBuildError("no CUDA toolkit was found (bin/nvcc beside include/cuda_runtime.h); set CUDA_HOME")


def nvcc_version(home: Path) -> str:
    text = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+\.\d+)", text)
    if release is None:
        raise CannotBuildError(f"{home / 'bin' / 'nvcc'} does not tell its release")
    return release[1]


def arch_flags(text: str) -> list[str]:
    flags = []
    for arch in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", arch)
        if match is None:
            sys.exit(f"DSV4_OPS_CUDA_ARCHS must look like '9.0;10.0+PTX', got {text!r}.")
        number = match[1] + match[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def path_flags(torch: Path) -> list[str]:
    """Messages and debug sections name ``csrc/...`` and ``torch/...``, not folders of the machine that built them."""
    return [f"-ffile-prefix-map={ROOT}/=", f"-ffile-prefix-map={torch / 'include'}/="]


def link_flags(torch: Path) -> list[str]:
    """In this order: the linker drops libraries that stand before ``--no-as-needed`` (so not ``libraries=``)."""
    keep = [] if sys.platform == "darwin" else ["-Wl,--no-as-needed"]
    return [f"-L{torch / 'lib'}", *keep, "-ltorch", "-ltorch_cpu", "-lc10"]


def cpu_part(torch: Path) -> Extension:
    return Extension(
        "dsv4_ops._C",
        [str(CSRC / "registration.cpp"), *sorted(str(p.relative_to(ROOT)) for p in (ROOT / CSRC / "cpu").glob("*.cpp"))],
        depends=sorted(str(p.relative_to(ROOT)) for p in (ROOT / CSRC).rglob("*.h")),
        language="c++",
        py_limited_api=True,
        extra_compile_args=[*DEFINES, "-std=c++17", "-O3", "-g0", "-fvisibility=hidden", f"-I{CSRC}", "-isystem", str(torch / "include"), *path_flags(torch)],
        extra_link_args=link_flags(torch),
    )


def cuda_part(torch: Path, torch_cuda: str | None, forced: bool) -> Extension:
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / CSRC / "cuda").glob("*.cu"))
    if not sources:
        raise CannotBuildError("this version has no CUDA sources (csrc/cuda/*.cu)")
    if torch_cuda is None and not forced:
        raise CannotBuildError("torch was a CPU build when this was built; DSV4_OPS_CUDA=1 compiles the CUDA sources all the same")
    home = find_cuda()
    release = nvcc_version(home)
    if torch_cuda is not None and release.split(".")[0] != torch_cuda.split(".")[0]:
        raise CannotBuildError(f"nvcc is of CUDA {release} and torch of CUDA {torch_cuda}; set CUDA_HOME to a toolkit of the same major version")
    libraries = [p for p in (home / "lib64", home / "lib", home / "targets" / "x86_64-linux" / "lib") if list(p.glob("libcudart.so*"))]
    if not libraries:
        raise CannotBuildError(f"no libcudart.so under {home}")
    extension = Extension(
        "dsv4_ops._C_cuda",
        sources,
        depends=sorted(str(p.relative_to(ROOT)) for pattern in ("*.h", "*.cuh") for p in (ROOT / CSRC).rglob(pattern)),
        language="c++",
        py_limited_api=True,
        extra_compile_args=[
            *DEFINES, "-DUSE_CUDA", "-std=c++17", "-O3", f"-I{CSRC}", "-isystem", str(torch / "include"), "-isystem", sysconfig.get_paths()["include"],
            "-Xcompiler", ",".join(["-fPIC", "-fvisibility=hidden", *path_flags(torch)]),
            *arch_flags(os.environ.get("DSV4_OPS_CUDA_ARCHS") or "9.0"),
        ],
        # The shared runtime: a static one would keep a failed launch's error to itself and raise it at the next good call.
        extra_link_args=[*link_flags(torch), f"-L{libraries[0]}", "-l:" + sorted(p.name for p in libraries[0].glob("libcudart.so*"))[0]],
    )  # fmt: skip
    extension.nvcc = str(home / "bin" / "nvcc")
    return extension


def plan() -> tuple[list[Extension], dict[str, str]]:
    """The parts to build, and the ones left out with their reasons."""
    build = setting("DSV4_OPS_BUILD", "auto", ("auto", "require", "none"))
    cuda = setting("DSV4_OPS_CUDA", "auto", ("auto", "1", "0"))
    if build == "none":
        return [], dict.fromkeys(("_C", "_C_cuda"), "built with DSV4_OPS_BUILD=none")
    parts: list[Extension] = []
    missing: dict[str, str] = {}
    try:
        torch = find_torch()
        _, torch_cuda = torch_version(torch)
        parts.append(cpu_part(torch))
    except CannotBuildError as error:
        missing = dict.fromkeys(("_C", "_C_cuda"), str(error))
    else:
        try:
            if cuda == "0":
                raise CannotBuildError("built with DSV4_OPS_CUDA=0")
            parts.append(cuda_part(torch, torch_cuda, forced=cuda == "1"))
        except CannotBuildError as error:
            missing["_C_cuda"] = str(error)
    if build == "require" and "_C" in missing:
        sys.exit(f"DSV4_OPS_BUILD=require, but _C cannot be built: {missing['_C']}.")
    if cuda == "1" and "_C_cuda" in missing:
        sys.exit(f"DSV4_OPS_CUDA=1, but _C_cuda cannot be built: {missing['_C_cuda']}.")
    for part in parts:
        part.optional = build != "require" and not (cuda == "1" and part.name.endswith("_cuda"))
    return parts, missing


PARTS, MISSING = plan()


def commit() -> str | None:
    """The checkout's commit, ``-changed`` where tracked files differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "describe", "--always", "--exclude=*", "--dirty=-changed"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def write_report(build_lib: str, in_source: bool) -> None:
    if in_source:
        for name in MISSING:  # what an earlier build in place left would be loaded, though it is of other sources
            (ROOT / "dsv4_ops" / f"{name}.abi3.so").unlink(missing_ok=True)
    for folder in [Path(build_lib) / "dsv4_ops", *([ROOT / "dsv4_ops"] if in_source else [])]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT).write_text(json.dumps({"missing": MISSING, "commit": commit()}, indent=1) + "\n")


class BuildPython(build_py):
    """build_py that says what was left out: without any part to build, build_ext does not run."""

    def run(self) -> None:
        super().run()
        write_report(self.build_lib, self.editable_mode)


class BuildParts(build_ext):
    """build_ext that runs nvcc for the CUDA part and says what was left out."""

    def run(self) -> None:
        super().run()
        write_report(self.build_lib, self.inplace or self.editable_mode)

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), str(Path(self.build_lib) / "dsv4_ops" / REPORT)]

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rsplit(".", 1)[-1]
        try:
            if hasattr(ext, "nvcc"):
                self.build_cuda(ext)
            else:
                super().build_extension(ext)
        except (BaseError, CCompilerError, OSError, subprocess.CalledProcessError) as error:
            if not ext.optional:
                raise
            MISSING[name] = f"the build failed ({str(error).splitlines()[0]}); DSV4_OPS_BUILD=require shows all of its output"
            self.warn(f"{name} is left out: {MISSING[name]}")

    def build_cuda(self, ext: Extension) -> None:
        objects = []
        for source in ext.sources:
            target = Path(self.build_temp) / Path(source).with_suffix(".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            newest = max(os.path.getmtime(p) for p in (source, __file__, *ext.depends))
            if self.force or not target.exists() or target.stat().st_mtime < newest:
                self.spawn([ext.nvcc, "-c", source, "-o", str(target), *ext.extra_compile_args])
            objects.append(str(target))
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), extra_postargs=ext.extra_link_args, build_temp=self.build_temp, target_lang="c++")


if not PARTS:
    print("dsv4_ops is built without compiled parts:", MISSING, file=sys.stderr)

setup(
    ext_modules=PARTS,
    cmdclass={"build_py": BuildPython, "build_ext": BuildParts},
    # A wheel without libraries is for any machine; the tag says so.
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if PARTS else {},
)
