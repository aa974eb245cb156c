"""Top-k of vLLM and FlashInfer, called as their own dispatch calls it; the libraries lie beside this file, packed.

``TOPK_PEERS = {name: (prepare, accepts)}``: ``accepts(rows, k, width, stride)``, ``prepare(rows, k, width, max_len)`` gives
``call(logits, lengths, out)`` with logits [rows, width] (float32; bfloat16 too for ``BFLOAT16``), lengths int32 [rows], out int32 [rows, k].
``SLOT_PEERS`` alike, with the page size last: ``call(logits, lengths, requests, table, out)``. Scratch is made by ``prepare``, on the current GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import lzma
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
SCRATCH = 1 << 20  # bytes, as both projects allot


def _unpacked(packed: Path, unpack: Callable[[Path, Path], object]) -> Path:
    """Where a file is unpacked, once a user and content; processes may do so at the same time."""
    place = Path(tempfile.gettempdir()) / f"dsv4_ops-peers-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise PermissionError(f"{place} belongs to another user")
    target = place / f"{hashlib.sha256(packed.read_bytes()).hexdigest()[:16]}-{packed.stem}"
    if not target.exists():
        made = place / f"{target.name}.{os.getpid()}"
        unpack(packed, made)
        try:
            made.replace(target)
        except OSError:  # a folder that another process has put there
            if not target.exists():
                raise
    return target


def _library(name: str) -> str:
    return str(_unpacked(HERE / f"{name}.xz", lambda packed, target: target.write_bytes(lzma.decompress(packed.read_bytes()))))


@functools.cache
def _vllm() -> Any:
    torch.ops.load_library(_library("_C_stable_libtorch.abi3.so"))
    return torch.ops._C


@functools.cache
def _tvm_ffi() -> Any:
    """The installed one, else that of the wheel beside this file."""
    if importlib.util.find_spec("tvm_ffi") is None:
        (wheel,) = HERE.glob("apache_tvm_ffi-*.whl")
        sys.path.append(str(_unpacked(wheel, lambda packed, target: zipfile.ZipFile(packed).extractall(target))))
    return importlib.import_module("tvm_ffi")


@functools.cache
def _flashinfer() -> Any:
    return _tvm_ffi().load_module(_library("flashinfer_topk.so"))


def _scratch() -> torch.Tensor:
    return torch.zeros(SCRATCH, dtype=torch.uint8, device="cuda")


def _offsets(rows: int) -> torch.Tensor:
    """What FlashInfer adds to the columns of each row: nothing."""
    return torch.zeros(rows, dtype=torch.int32, device="cuda")


def vllm_coop(rows: int, k: int, width: int, max_len: int) -> Callable[..., None]:
    op, scratch = _vllm().cooperative_topk, _scratch()
    return lambda logits, lengths, out: op(logits, lengths, out, scratch, k, max_len)


def vllm_persistent(rows: int, k: int, width: int, max_len: int) -> Callable[..., None]:
    op, scratch = _vllm().persistent_topk, _scratch()
    return lambda logits, lengths, out: op(logits, lengths, out, scratch, k, max_len)


def vllm_per_row(rows: int, k: int, width: int, max_len: int) -> Callable[..., None]:
    op = _vllm().top_k_per_row_decode
    return lambda logits, lengths, out: op(logits, 1, lengths, out, logits.shape[0], logits.stride(0), logits.stride(1), k)


def fi_radix(rows: int, k: int, width: int, max_len: int) -> Callable[..., None]:
    kernel, stream, scratch, offsets = _flashinfer().radix_topk_ragged_transform, _tvm_ffi().use_torch_stream, _scratch(), _offsets(rows)

    def call(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        with stream():
            kernel(logits, out, offsets, lengths, scratch, k, False, 0, False, None)

    return call


def fi_cub(rows: int, k: int, width: int, max_len: int) -> Callable[..., None]:
    """Its scratch is made by the first call: the size depends on the logits."""
    module, stream, offsets = _flashinfer(), _tvm_ffi().use_torch_stream, _offsets(rows)
    scratch: list[torch.Tensor] = []

    def call(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        with stream():
            if not scratch:
                size = int(module.cub_topk_ragged_transform_workspace_size(logits, lengths, k, 0, False))
                scratch.append(torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"))
            module.cub_topk_ragged_transform(logits, out, offsets, lengths, scratch[0], k, 0, None)

    return call


def fi_clusters(rows: int, k: int, width: int, max_len: int) -> Callable[..., None]:
    """FlashInfer chooses this kernel on sm_100 alone; here it is forced, with the sizes that its host code gives it there."""
    kernel, stream, offsets = _flashinfer().fast_topk_clusters_exact_ragged_transform, _tvm_ffi().use_torch_stream, _offsets(rows)
    clusters = 1 if width < 8192 else next((n for most, n in ((32, 8), (127, 4), (255, 2)) if rows <= most), 1)
    overflow = torch.empty(rows, 4 * (width // clusters) * clusters, dtype=torch.int32, device="cuda")
    shared = getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 232448)
    cached = (shared // 2 - (k + 5 + 3 * 256 + 8) * 4 - 1024) // 16  # candidates in half of the shared memory, beside its histograms

    def call(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        with stream():
            kernel(logits, out, lengths, offsets, None, overflow, k, cached, clusters, False)

    return call


def fi_radix_pages(rows: int, k: int, width: int, page: int) -> Callable[..., None]:
    """The page table is looked up in the kernel: slots page * size + offset."""
    kernel, stream, scratch = _flashinfer().radix_topk_page_table_transform, _tvm_ffi().use_torch_stream, _scratch()

    def call(logits: torch.Tensor, lengths: torch.Tensor, requests: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        with stream():
            kernel(logits, out, table, requests, lengths, scratch, k, False, 0, page, False, None, None, None)

    return call


def torch_masked(rows: int, k: int, width: int, max_len: int) -> Callable[..., None]:
    """What lengths make of ``torch.topk``: columns beyond them are masked first, and -1 where a row is short."""

    def call(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        columns = torch.arange(max(width, k), device=logits.device)
        found = torch.where(columns[:width] < lengths[:, None], logits, -torch.inf).topk(min(k, width)).indices
        out[:, : found.shape[1]] = torch.where(columns[: found.shape[1]] < lengths[:, None], found, -1)
        out[:, found.shape[1] :] = -1

    return call


def empty(*sizes: int) -> Callable[..., object]:
    """No peer: an empty kernel of 132 blocks, what the timing itself adds."""
    launch = ctypes.CDLL(_library("libempty.so")).launch_empty
    launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    return lambda *arguments: launch(torch.cuda.current_stream().cuda_stream, 132, 256)


def _any(rows: int, k: int, width: int, stride: int) -> bool:
    return True


FLASHINFER = (HERE / "flashinfer_topk.so.xz").exists()
TOPK_PEERS: dict[str, tuple[Callable[..., Callable[..., object]], Callable[..., bool]]] = {
    "empty": (empty, _any),
    "vllm_coop": (vllm_coop, lambda rows, k, width, stride: rows <= 64 and stride % 4 == 0 and k in (512, 1024, 2048)),
    "vllm_persistent": (vllm_persistent, lambda rows, k, width, stride: k in (512, 1024, 2048)),
    "vllm_per_row": (vllm_per_row, _any),
    "fi_radix": (fi_radix, lambda rows, k, width, stride: stride == width),
    "fi_cub": (fi_cub, _any),
    "fi_clusters": (fi_clusters, _any),
    "torch_masked": (torch_masked, _any),
}
SLOT_PEERS = {"fi_radix_pages": (fi_radix_pages, lambda rows, k, width, page: page & (page - 1) == 0)}
BFLOAT16 = ("fi_radix",)
if not FLASHINFER:
    TOPK_PEERS, SLOT_PEERS, BFLOAT16 = {name: peer for name, peer in TOPK_PEERS.items() if not name.startswith("fi_")}, {}, ()
