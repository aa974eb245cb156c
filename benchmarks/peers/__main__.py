"""One command from wheels to a folder for PEERS_DIR: download, unpack, trim, extract, compile, pack."""

from __future__ import annotations

import argparse
import lzma
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

from . import build, extract, trim, wheels

HERE = Path(__file__).resolve().parent
INTERFACE = "vllm/third_party/flashmla/flash_mla_interface.py"
LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_flashmla_C.abi3.so")


def unpack(wheel: Path, folder: Path, wanted: Iterable[str]) -> None:
    """The files of a wheel whose names start with one of ``wanted``; each has to be there."""
    with ZipFile(wheel) as archive:
        for start in wanted:
            names = [name for name in archive.namelist() if name.startswith(start)]
            if not names:
                raise LookupError(f"{wheel.name} has no {start}")
            archive.extractall(folder, names)


def pack(library: Path, target: Path) -> None:
    (target / f"{library.name}.xz").write_bytes(lzma.compress(library.read_bytes()))


def vllm(wheel: Path, work: Path, target: Path) -> None:
    """Its two libraries with the machine code of Hopper alone, FlashMLA's interface, and its Triton functions."""
    unpack(wheel, work, [*LIBRARIES, INTERFACE, *(f"vllm/{file}" for file in extract.FILES)])
    for name in LIBRARIES:
        library = work / name
        library.write_bytes(trim.hopper_only(library.read_bytes()))
        pack(library, target)
    shutil.copy(work / INTERFACE, target)
    (target / "triton_extracted.py").write_text(extract.kernels(work / "vllm"))
    (target / "sampling_extracted.py").write_text(extract.sampling(work / "vllm"))


def flashinfer(found: dict[str, Path], work: Path, target: Path) -> None:
    """Its top-k kernels as one library, and the wheel that loads them."""
    data = "flashinfer/data"
    unpack(found["flashinfer-python"], work, [f"{data}/{part}/" for part in ("include", "csrc", "cccl", "spdlog/include")])
    unpack(found["apache-tvm-ffi"], work, ["tvm_ffi/"])
    unpack(found["nvidia-curand"], work, ["nvidia/"])
    pack(build.flashinfer(work / data, work / "tvm_ffi", next((work / "nvidia").rglob("curand.h")).parent, work), target)
    for old in target.glob("apache_tvm_ffi-*.whl"):
        old.unlink()
    shutil.copy(found["apache-tvm-ffi"], target)


def prepare(target: Path, ready: Path | None, python: str, with_flashinfer: bool = True) -> None:
    """Fill ``target``. Wheels that ``ready`` lacks are downloaded into it, or into a folder that is removed at the end."""
    build.check()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found = wheels.found(ready or work / "wheels", python)
        target.mkdir(parents=True, exist_ok=True)
        for loader in (HERE / "loaders").glob("*.py"):
            shutil.copy(loader, target)
        print("vLLM and FlashMLA: trim, extract, pack", flush=True)
        vllm(found["vllm"], work, target)
        pack(build.empty(work), target)
        if with_flashinfer:
            print("FlashInfer: compile (minutes)", flush=True)
            flashinfer(found, work, target)
    print(f"{target}: {sum(p.stat().st_size for p in target.iterdir()) / 1e6:.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.peers", description=__doc__)
    parser.add_argument("dir", type=Path, help="the folder to fill, for PEERS_DIR; keep it out of the repository's history")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels are taken from here; those that it lacks are downloaded into it (460 MB)")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the Python of the GPU machine (default: 3.12)")
    parser.add_argument("--without-flashinfer", action="store_true", help="leave out what takes minutes to compile, and the peers fi_*")
    args = parser.parse_args()
    prepare(args.dir.resolve(), args.wheels and args.wheels.resolve(), args.python, not args.without_flashinfer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
