"""What each back end of ``sparse_mla_decode`` needs, which one a call takes, and the door to each.

Everything here follows from shapes, dtypes, strides, where caches begin, the device and what is installed; never from values. Gates read the files of
other packages (``_module_slice``) and import none; the launchers of ``_flashmla`` and ``_flashinfer`` import theirs when they first run.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import _checks, _flashinfer, _flashmla, _registry, capability
from ._flashinfer_table import PROJECT, build_tools, missing_parameters
from .capability import Requirement
from .errors import ArgumentError
from .kv_cache import HEAD_DIM, TOKEN_BYTES

__all__ = ["BACKENDS", "CHOICES", "NEVER_RUN", "DecodeShape", "Pages", "check", "chosen", "device_arch", "fastest", "requirements"]

BACKENDS = ("reference", "triton", "cuda", "flashmla", "flashinfer")
CHOICES = ("auto", "fastest", *BACKENDS)
NEVER_RUN = {
    "triton": "on any GPU but sm_90 (it compiles for sm_80, sm_100 and sm_120)",
    "cuda": "on any GPU but sm_90 (it compiles for sm_100; tests also run its kernels on a CPU, by an emulator of the instructions that they use)",
    "flashmla": "on any GPU but sm_90",
    "flashinfer": "on any GPU (its table, its argument checks and the rows it is given are tested without one)",
}
"""Where nobody has seen a back end run under the tests of this package."""


class Faster(NamedTuple):
    """A region in which FlashMLA was measured faster than what ``auto`` takes: heads, padded to ``MEASURED_HEADS``, columns of both segments, and
    from how many tokens on."""

    heads: int
    columns: range
    tokens: int


MEASURED_HEADS = (16, 64, 128)

FASTER_FLASHMLA: tuple[Faster, ...] = (
    Faster(64, range(1, 129), 128),
    Faster(64, range(129, 193), 64),
    Faster(64, range(193, 257), 32),
    Faster(64, range(257, 641), 16),
    Faster(128, range(1, 129), 64),
    Faster(128, range(129, 193), 32),
    Faster(128, range(193, 257), 16),
    Faster(128, range(257, 641), 8),
)
"""On sm_90; with up to 16 heads, which FlashMLA pads to 64, nowhere. The attention benchmark prints what it should be, and
tests/test_attention_backends.py holds it against the recorded run. What attention-part.json did not come to follows from attention.json (257 to 640
columns, whose kernels are the same) and from a trial of clusters of that size."""


OURS_BY_CUDA = range(1, 641)
"""Columns of both segments with which the CUDA kernels serve ``auto`` on sm_90, in place of Triton's. There they were measured: up to twice as
fast for few tokens, and nowhere much slower (benchmarks/results/h200, topic attention; tests/test_attention_backends.py holds this against it)."""

CLUSTER_KERNEL = _registry.define_kernel(
    "sparse_mla_decode_cluster(Tensor q, Tensor swa_cache, Tensor swa_indices, Tensor swa_lens, Tensor? extra_cache, Tensor? extra_indices, "
    "Tensor? extra_lens, Tensor? attn_sink, float scale) -> (Tensor, Tensor)"
)
"""Of csrc/cuda/sparse_decode.cu."""


class Pages(NamedTuple):
    """How a cache is laid out. ``stride`` is that of a page, in elements."""

    dtype: torch.dtype = torch.uint8
    block_size: int = 64
    stride: int = 64 * TOKEN_BYTES

    @property
    def row(self) -> int:
        """Elements of a row."""
        return TOKEN_BYTES if self.dtype == torch.uint8 else HEAD_DIM


class DecodeShape(NamedTuple):
    """Everything that decides who can serve a call."""

    heads: int
    dtype: torch.dtype
    width: int
    pages: Pages
    extra_width: int | None = None
    extra_pages: Pages | None = None

    @property
    def caches(self) -> dict[str, Pages]:
        return {"swa_cache": self.pages} | ({} if self.extra_pages is None else {"extra_cache": self.extra_pages})


def shape_of(q: torch.Tensor, swa_cache: torch.Tensor, swa_indices: torch.Tensor, extra_cache: torch.Tensor | None, extra_indices: torch.Tensor | None) -> DecodeShape:
    extra = (None, None) if extra_cache is None or extra_indices is None else (int(extra_indices.shape[1]), _pages(extra_cache))
    return DecodeShape(int(q.shape[1]), q.dtype, int(swa_indices.shape[1]), _pages(swa_cache), *extra)


def _pages(cache: torch.Tensor) -> Pages:
    block_size, row = int(cache.shape[1]), int(cache.shape[-1])
    return Pages(cache.dtype, block_size, int(cache.stride(0)) if cache.shape[0] > 1 else block_size * row)


def device_arch(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None for a device that is no CUDA device, or where there is none."""
    if device.type != "cuda" or torch.version.cuda is None or not (torch.cuda.is_initialized() or torch.cuda.is_available()):
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    """Asked once: each eager call comes by here."""
    return torch.cuda.get_device_capability(index)


# ---- gates -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def requirements(backend: str, shape: DecodeShape, arch: tuple[int, int] | None, lse: bool = False) -> tuple[Requirement, ...]:
    """All that ``backend`` needs for calls of this shape, met or not. ``lse``: whether the caller reads it. Cached: installing needs a new process."""
    return tuple(_GATES[backend](shape, arch, lse))


def _architecture(arch: tuple[int, int] | None, need: str, ok: bool) -> Requirement:
    return Requirement("architecture", need, "no CUDA device" if arch is None else f"sm_{arch[0]}{arch[1]}", ok, "backend='auto' runs on any device.")


def _query(shape: DecodeShape) -> Requirement:
    return Requirement("query", "bfloat16", _checks.names((shape.dtype,)), shape.dtype == torch.bfloat16, "Convert it, or take backend='auto'.")


def _page_rows(shape: DecodeShape, dtype: torch.dtype, need: str, stride: int) -> list[Requirement]:
    """Every cache holds rows of ``dtype``, in pages whose stride is a multiple of ``stride`` bytes."""
    rows = []
    for name, pages in shape.caches.items():
        rows.append(Requirement(name, need, f"{_checks.names((pages.dtype,))} rows", pages.dtype == dtype, "Make it with new_kv_cache(dtype=...)."))
        rows.append(_page_stride(name, pages, stride))
    return rows


def _page_stride(name: str, pages: Pages, stride: int) -> Requirement:
    size = pages.stride * pages.dtype.itemsize
    fix = f"Pad it: new_kv_cache(page_stride={-(-size // stride) * stride // pages.dtype.itemsize})."
    return Requirement(f"pages of {name}", f"a page stride that is a multiple of {stride} bytes", f"{size}", size % stride == 0, fix)


def _reference_needs(shape: DecodeShape, arch: tuple[int, int] | None, lse: bool) -> list[Requirement]:
    return []


def _triton_needs(shape: DecodeShape, arch: tuple[int, int] | None, lse: bool) -> list[Requirement]:
    there = importlib.util.find_spec("triton") is not None
    return [
        _architecture(arch, "a CUDA device of sm_80 or later", arch is not None and arch >= (8, 0)),
        Requirement("library", "triton", "installed" if there else "not installed", there, "pip install triton"),
    ]


def _cuda_needs(shape: DecodeShape, arch: tuple[int, int] | None, lse: bool) -> list[Requirement]:
    there = _registry._has_kernel(CLUSTER_KERNEL, "CUDA")
    found = "loaded" if there else _registry.skipped.get("_C_cuda", "built from other sources, without this kernel")
    rows = [
        _architecture(arch, "sm_90 to sm_11x (clusters of blocks, 227 KB of shared memory each)", arch is not None and (9, 0) <= arch < (12, 0)),
        Requirement("library", "dsv4_ops._C_cuda", found, there, "Install this package where nvcc and a CUDA build of torch are."),
        _query(shape),
    ]
    for name, pages in shape.caches.items():
        ok = pages.dtype in (torch.uint8, torch.bfloat16)
        rows.append(Requirement(name, "FP8 pages (uint8) or bfloat16 rows", f"{_checks.names((pages.dtype,))} rows", ok, "Make it with new_kv_cache(dtype=...), or take backend='auto'."))
        rows.append(_page_stride(name, pages, 16))
        far = pages.stride * pages.dtype.itemsize
        rows.append(Requirement(f"span of {name}", "pages less than 4 GiB apart", f"{far} bytes", far < 1 << 32, "Take backend='auto'."))
    return rows


def _flashmla_needs(shape: DecodeShape, arch: tuple[int, int] | None, lse: bool) -> list[Requirement]:
    blackwell = arch is not None and arch[0] == 10
    found = _flashmla.installed()
    return [
        _architecture(arch, "sm_90 or sm_10x", blackwell or arch == (9, 0)),
        Requirement("library", "flash_mla, or the one inside vLLM, with the sparse decode of two FP8 caches", found.text, found.module is not None, "Install FlashMLA (github.com/deepseek-ai/FlashMLA) or vLLM."),
        _query(shape),
        Requirement("heads", f"at most {_flashmla.HEADS[-1]}", f"{shape.heads}", shape.heads <= _flashmla.HEADS[-1], "Split them over calls."),
        # Blackwell's kernels load rows by a tensor map over the whole cache, whose rows are 576 bytes: a page must be whole rows.
        *_page_rows(shape, torch.uint8, f"FP8 pages (uint8 rows of {TOKEN_BYTES})", 576 if blackwell else 16),
    ]


def _flashinfer_needs(shape: DecodeShape, arch: tuple[int, int] | None, lse: bool) -> list[Requirement]:
    padded = capability.pad_heads(shape.heads, _flashinfer.HEADS)
    heads = Requirement("heads", f"at most {_flashinfer.HEADS[-1]}", f"{shape.heads}", padded is not None, "Split them over calls.")
    if arch in capability.SPARSE_MLA_ARCHS:
        assert arch is not None
        gate = capability.GATES["sparse_mla_decode"](padded or shape.heads, max(shape.width, 1), arch)
        pages = _page_rows(shape, torch.uint8, f"FP8 pages (uint8 rows of {TOKEN_BYTES})", 16)
        return [*gate, heads, _interface(*_flashinfer.SM120), _query(shape), *pages]
    rows = [
        _architecture(arch, "sm_100, sm_103, sm_120 or sm_121", arch in _flashinfer.SM100_ARCHS),
        _interface(*_flashinfer.SM100),
        heads,
        _query(shape),
    ]
    if arch not in _flashinfer.SM100_ARCHS:
        return rows
    tools, ok = build_tools()
    rows.append(Requirement("build tools", "flashinfer-jit-cache, or nvcc and ninja", tools, ok, "pip install flashinfer-jit-cache, or put a CUDA toolkit and ninja on PATH."))
    # One table of slots for both caches, which the kernels multiply by the size of a row.
    rows += _page_rows(shape, torch.bfloat16, f"bfloat16 rows of {HEAD_DIM}: query and caches are of one dtype there", 2 * HEAD_DIM)
    one_cache = shape.width <= _flashinfer.WINDOW or shape.extra_width is None
    rows.append(Requirement("window", f"at most {_flashinfer.WINDOW} columns beside a second segment (what runs over would be read in its cache)", f"{shape.width}", one_cache, "Serve such layers with backend='auto'."))
    if lse:
        rows.append(Requirement("log-sum-exp", "a back end that gives it", "none: this one returns the output alone", False, "Take backend='auto', or do without."))
    return rows


def _interface(module: str, function: str, needed: frozenset[str]) -> Requirement:
    version, missing = missing_parameters(module, function, needed)
    text = "not installed" if version is None else f"{version}, whose function lacks {', '.join(missing)}" if missing else version
    return Requirement("interface", f"{PROJECT}'s {function} as of 0.7.2", text, version is not None and not missing, f"pip install '{PROJECT}>=0.7.2'")


_GATES: dict[str, Callable[[DecodeShape, tuple[int, int] | None, bool], list[Requirement]]] = {
    "reference": _reference_needs,
    "triton": _triton_needs,
    "cuda": _cuda_needs,
    "flashmla": _flashmla_needs,
    "flashinfer": _flashinfer_needs,
}


# ---- calls -----------------------------------------------------------------------------------------------------------


def check(
    where: str, backend: str, scale: float, q: torch.Tensor, swa_cache: torch.Tensor, swa_indices: torch.Tensor, extra_cache: torch.Tensor | None, extra_indices: torch.Tensor | None
) -> None:
    """Refuse a name that there is not, and a back end that cannot serve this call, with all that it lacks."""
    _checks.one_of(where, "backend", backend, CHOICES)
    if backend in ("auto", "fastest", "reference"):
        return
    if backend == "flashmla" and not scale > 0:
        raise ArgumentError(where, "scale", "positive with backend='flashmla' (it masks by -inf times scale)", scale)
    shape = shape_of(q, swa_cache, swa_indices, extra_cache, extra_indices)
    capability.require(f"{where} with backend={backend!r}", requirements(backend, shape, device_arch(q.device)))


def chosen(
    backend: str, own: str, q: torch.Tensor, swa_cache: torch.Tensor, swa_indices: torch.Tensor, extra_cache: torch.Tensor | None, extra_indices: torch.Tensor | None
) -> str:
    """The back end of a call: ``own`` is what this package has for any call on the device."""
    if backend not in ("auto", "fastest"):
        return backend
    if q.device.type != "cuda":
        return own
    shape, arch = shape_of(q, swa_cache, swa_indices, extra_cache, extra_indices), device_arch(q.device)
    best = ours(own, shape, arch) if backend == "auto" else fastest(own, q.shape[0], shape, arch)
    return own if best != own and misplaced(swa_cache, extra_cache) else best


def misplaced(*caches: torch.Tensor | None) -> bool:
    """Whether a cache begins at no multiple of 16 bytes: ``cuda`` and ``flashmla`` load so many at a time."""
    return any(cache is not None and cache.data_ptr() % 16 != 0 for cache in caches)


def ours(own: str, shape: DecodeShape, arch: tuple[int, int] | None) -> str:
    """The kernels of this package that serve calls of this shape, however many tokens they have: ``cuda`` in place of ``triton`` where it was
    measured and serves, else ``own``."""
    return "cuda" if own == "triton" and arch == (9, 0) and _columns(shape) in OURS_BY_CUDA and _serves("cuda", shape, arch) else own


def fastest(own: str, tokens: int, shape: DecodeShape, arch: tuple[int, int] | None) -> str:
    """What was measured fastest for this shape (benchmarks/results, topic attention), or what ``auto`` takes where nothing was measured."""
    if arch != (9, 0) or not _serves("flashmla", shape, arch):
        return ours(own, shape, arch)
    if own == "reference":
        return "flashmla"  # it beats PyTorch everywhere
    heads = capability.pad_heads(shape.heads, MEASURED_HEADS)
    faster = any(heads == region.heads and _columns(shape) in region.columns and tokens >= region.tokens for region in FASTER_FLASHMLA)
    return "flashmla" if faster else ours(own, shape, arch)


def _columns(shape: DecodeShape) -> int:
    return shape.width + (shape.extra_width or 0)


def _serves(backend: str, shape: DecodeShape, arch: tuple[int, int] | None) -> bool:
    return all(r.ok for r in requirements(backend, shape, arch))
