"""Kernels of ``csrc/cuda`` on a CPU: builds the emulator's drivers (``tests/emulator/``) with g++ and calls them with tensors.

``driver("topk")`` is ``tests/emulator/topk.cpp``, compiled once a session. ``driver("topk")("topk", [logits, lengths], [k, -1])``
gives the results as tensors; ``EmulatorError`` has what the emulator found, with the lines of the sources.
"""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "tests" / "emulator"
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="the emulator needs g++ on Linux")

# ScalarType's numbers, which PyTorch keeps for good.
CODES = {
    torch.uint8: 0, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.bool: 11, torch.bfloat16: 15, torch.float8_e4m3fn: 24,
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}

KERNELS = [
    "-O1", "-ffp-contract=off",
    "-fsanitize=thread",  # a call at each access, which memory.cpp answers: no sanitizer is linked
    "-fno-extern-tls-init",
    "-include", "cuda_runtime.h",  # before csrc/cuda/ptx.cuh, whose place ptx.h takes
]  # fmt: skip


class EmulatorError(AssertionError):
    """A fault in a kernel, or a request that the emulator cannot serve."""


@functools.cache
def folder() -> Path:
    made = tempfile.TemporaryDirectory(prefix="emulator-")
    atexit.register(made.cleanup)
    return Path(made.name)


def run_compiler(*arguments: str | Path) -> None:
    done = subprocess.run([str(COMPILER), "-std=c++17", "-g1", "-w", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"g++ failed:\n{done.stderr}")


@functools.cache
def runtime() -> list[Path]:
    """The emulator itself, compiled."""
    objects = [folder() / f"{name}.o" for name in ("memory", "threads", "together")]
    for target in objects:
        # Fortified, longjmp refuses to go to another stack.
        run_compiler("-O2", "-U_FORTIFY_SOURCE", "-c", EMULATOR / f"{target.stem}.cpp", "-o", target)
    return objects


@functools.cache
def torch_headers() -> Path:
    """A folder with every header of PyTorch that ``csrc`` includes; each is ``torch.h``."""
    into = folder() / "include"
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".cuh", ".h")]
    for name in {found for source in sources for found in re.findall(r"#include <(torch/[^>]+)>", source.read_text())}:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).write_text('#include "torch.h"\n')
    return into


def compiled(source: Path) -> Path:
    """The program of a driver's source file."""
    target = folder() / source.stem
    includes = [f"-I{path}" for path in (EMULATOR / "include", EMULATOR, torch_headers(), ROOT / "csrc")]
    run_compiler(*KERNELS, *includes, "-c", source, "-o", target.with_suffix(".o"))
    run_compiler(target.with_suffix(".o"), *runtime(), "-pthread", "-o", target)
    return target


class Driver:
    """A process that serves calls; a new one after a fault."""

    seconds = 120.0  # without an answer: a loop that neither waits nor touches memory that others see

    def __init__(self, program: Path) -> None:
        self.program, self.log = program, program.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __call__(
        self,
        op: str,
        tensors: Sequence[torch.Tensor] = (),
        integers: Sequence[int] = (),
        *,
        order: str = "forward",
        seed: int = 0,
        device: int = 0,
        steps: int = 1 << 28,
    ) -> list[torch.Tensor]:
        """``order``: ``forward`` (the first warp, then the next), ``backward`` or ``random`` by ``seed``; ``device``: of the driver's list;
        ``steps``: accesses and switches that a cluster may take, more is a hang."""
        if self.process is None:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen([self.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        watch = threading.Timer(self.seconds, self.process.kill)
        watch.start()
        try:
            return self.exchange(
                " ".join(map(str, (op, order, seed, device, *integers, f"steps={steps}", f"tensors={len(tensors)}"))), tensors
            )
        finally:
            watch.cancel()

    def exchange(self, line: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n" + b"".join(map(packed, tensors)))
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fault(line)
        (count,) = self.integers(1, line)
        if count < 0:
            (length,) = self.integers(1, line)
            raise EmulatorError(self.read(length, line).decode())
        results = []
        for _ in range(count):
            code, dims = self.integers(2, line)
            result = torch.empty(self.integers(dims, line), dtype=DTYPES[code])
            if result.numel():
                content = bytearray(self.read(result.numel() * result.element_size(), line))
                result.flatten().view(torch.uint8).copy_(torch.frombuffer(content, dtype=torch.uint8))
            results.append(result)
        return results

    def integers(self, count: int, line: str) -> tuple[int, ...]:
        return struct.unpack(f"{count}q", self.read(8 * count, line))

    def read(self, size: int, line: str) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        content = self.process.stdout.read(size)
        if len(content) < size:
            self.fault(line)
        return content

    def fault(self, line: str) -> None:
        assert self.process is not None
        code = self.process.wait()
        self.process = None
        text = (
            self.log.read_text(errors="replace")
            or f"hang: no answer in {self.seconds} s\n" * (code == -9)
            or f"the program ended with {code}\n"
        )
        raise EmulatorError(f"{re.sub('@([0-9a-f]+)', self.place, text)}in the call: {line}")

    def place(self, match: re.Match[str]) -> str:
        """``file:line``, innermost first, of an address in the program."""
        tool = shutil.which("addr2line")
        if tool is None:
            return match[0]
        lines = subprocess.run([tool, "-i", "-e", self.program, match[1]], capture_output=True, text=True, check=False).stdout.split("\n")
        lines = [line.split(" (")[0] for line in lines if not line.startswith("?")]
        known = [
            line.removeprefix(f"{ROOT}/")
            for line in lines
            if line.startswith(str(ROOT)) and not re.match(rf"{EMULATOR}/(include/|ptx)", line)
        ]
        return " < ".join(known) or match[0]


def packed(tensor: torch.Tensor) -> bytes:
    """A tensor as requests have it (``tests/emulator/driver.h``): strides and alignment stay."""
    count = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    elements = tensor.as_strided((count,), (1,)).contiguous()
    numbers = [CODES[tensor.dtype], tensor.dim(), *tensor.shape, *tensor.stride(), tensor.data_ptr() % 256, count]
    return struct.pack(f"{len(numbers)}q", *numbers) + bytes(bytearray(elements.view(torch.uint8).numpy()) if count else b"")


@functools.cache
def driver(name: str) -> Driver:
    return Driver(compiled(EMULATOR / f"{name}.cpp"))
