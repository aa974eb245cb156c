"""How functions of others are called with the arguments of our ops, and why some of them cannot be.

A package is used as it is installed. PEERS_DIR names a folder that stands in for packages that are not: vLLM's library
``_C_stable_libtorch.abi3.so``, FlashMLA's ``_flashmla_C.abi3.so`` with ``flash_mla_interface.py`` (libraries plain or as ``.xz``), and
``peers.py`` with FlashInfer's kernels: ``TOPK_PEERS = {"fi_...": (prepare, accepts)}``, ``accepts(rows, k, columns, stride)``,
``prepare(rows, k, columns, longest)(logits, lengths, out)``, and ``SLOT_PEERS`` alike, page size last.
``benchmarks/peers`` of the repository fills such a folder.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import lzma
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import envs, testing
from ..testing import Op, Sample

__all__ = ["PACKAGES", "Judge", "Missing", "Provider", "first_line", "providers"]

Call = Callable[[], Any]
Judge = Callable[[Sample, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], None]
"""``judge(sample, got, expected)`` raises AssertionError where a result is wrong."""


class Missing(Exception):
    """Why a package is not measured beside an op."""


@dataclass(frozen=True)
class Provider:
    """Something that computes an op: ``prepare(sample)`` gives the call, which returns its outputs."""

    name: str
    prepare: Callable[[Sample], Call]
    right: Judge
    unable: Callable[[Sample], str] = lambda sample: ""
    """Why it does not take this call."""


def providers(package: str, op: Op, device: str) -> list[Provider]:
    """What ``package`` has for ``op``. Raises :class:`Missing` with the reason where it has nothing, or is not there."""
    if package == "torch":
        if op.backends[device] in ("torch", "reference") and op.name not in TORCH_TOPK:
            raise Missing(f"dsv4_ops runs {op.name} by PyTorch here itself")
    else:
        if op.name not in COVERED[package]:
            raise Missing(f"this command knows no function of {package} for {op.name} (it does for {', '.join(COVERED[package])})")
        if device != "cuda":
            raise Missing(f"{package} has kernels for GPUs only")
    return list(PACKAGES[package](op))


# Judges.


def exact(sample: Sample, got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """The op's contract: integers equal, floats within the tolerances of ``testing``."""
    testing.assert_same(tuple(t.cpu().contiguous() for t in got), tuple(t.cpu().contiguous() for t in expected))


def _rounded(sample: Sample, got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """A result that others round once more than we do."""
    torch.testing.assert_close(got[0].float().cpu(), expected[0].float().cpu(), rtol=2**-6, atol=2**-6)


def _near(sample: Sample, got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Attention in another order of sums, on tensor cores: the norm of the difference within 1 % of the norm."""
    right = expected[0].double().cpu()
    error = float((got[0].double().cpu() - right).norm() / right.norm())
    assert error < 1e-2, f"the output differs by {error:.2%} of its norm"


def _same_scores(sample: Sample, got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Distinct columns of the row, as many as there are, with the scores of the right ones: any order, ties free."""
    logits, lengths = sample.args[:2]
    columns, right = got[-1].long(), expected[-1].to(got[-1].device).long()
    ordered = columns.sort(1).values
    assert not bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()), "a column is listed twice"
    assert bool((columns < lengths[:, None]).all()), "a column is past its row's length"
    assert torch.equal((columns >= 0).sum(1), (right >= 0).sum(1)), "rows have too few or too many columns"

    def scores(chosen: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = logits.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -torch.inf).sort(1).values
        return found

    assert torch.equal(scores(columns), scores(right)), "a column is left out for one with a lower score"


def _same_slots(sample: Sample, got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """The right slots in any order (scores are distinct but for rare ties)."""
    assert torch.equal(got[0].sort(1).values.cpu(), expected[0].sort(1).values.cpu().to(got[0].dtype)), "other slots"


# PyTorch.


TORCH_TOPK = ("topk", "topk_values")


def _torch(op: Op) -> Iterator[Provider]:
    if op.name in TORCH_TOPK:

        def whole(sample: Sample) -> str:
            logits, lengths, k = sample.args[:3]
            return "" if bool((lengths == logits.shape[1]).all()) and k <= logits.shape[1] else "it knows no lengths: full rows only"

        yield Provider("torch.topk", lambda s: lambda: torch.topk(s.args[0], s.args[2], dim=1, sorted=False), _same_scores, whole)
        return
    plain = op.torch_impl or op.reference
    yield Provider("torch (without this op's kernel)", lambda s: lambda: plain(*s.args, **s.kwargs), exact)


# vLLM.

VLLM_TOPK = ("cooperative_topk", "persistent_topk", "top_k_per_row_decode")


def _vllm(op: Op) -> Iterator[Provider]:
    ops = _vllm_ops()
    if op.name == "swiglu":
        if not hasattr(ops, "silu_and_mul_with_clamp"):
            raise Missing("this vLLM has no silu_and_mul_with_clamp")
        function = ops.silu_and_mul_with_clamp
        newer = len(function.default._schema.arguments) > 3

        def prepare(sample: Sample) -> Call:
            x, alpha, beta, limit = sample.args[:4]
            out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
            arguments = (out, x, limit, alpha, beta) if newer else (out, x, limit)
            return lambda: (function(*arguments), out)[1]

        yield Provider("vllm silu_and_mul_with_clamp", prepare, _rounded, lambda s: "" if newer or s.args[1:3] == (1.0, 0.0) else "its alpha is 1 and its beta 0")
        return
    there = [name for name in VLLM_TOPK if hasattr(ops, name)]
    if not there:
        raise Missing(f"this vLLM has none of {', '.join(VLLM_TOPK)}")
    for name in there:
        yield Provider(f"vllm {name}", functools.partial(_vllm_topk, name, getattr(ops, name)), _same_scores, functools.partial(_vllm_topk_unable, name))


def _vllm_topk(name: str, function: Any, sample: Sample) -> Call:
    logits, lengths, k = sample.args[:3]
    out = torch.full((logits.shape[0], k), -7, dtype=torch.int32, device=logits.device)
    if name == "top_k_per_row_decode":
        return lambda: (function(logits, 1, lengths, out, logits.shape[0], logits.stride(0), logits.stride(1), k), out)[1]
    scratch = torch.zeros(1 << 20, dtype=torch.uint8, device=logits.device)
    return lambda: (function(logits, lengths, out, scratch, k, logits.shape[1]), out)[1]


def _vllm_topk_unable(name: str, sample: Sample) -> str:
    logits, _, k = sample.args[:3]
    if name != "top_k_per_row_decode" and k not in (512, 1024, 2048):
        return "it takes k = 512, 1024 or 2048"
    if name == "cooperative_topk" and (logits.shape[0] > 64 or logits.stride(0) % 4):
        return "it takes up to 64 rows on 16-byte boundaries"
    return ""


@functools.cache
def _vllm_ops() -> Any:
    """``torch.ops._C`` with vLLM's kernels."""
    if (library := _library("_C_stable_libtorch.abi3.so")) is not None:
        torch.ops.load_library(str(library))
        return torch.ops._C
    modules = [name for name in ("vllm._C_stable_libtorch", "vllm._C") if _installed("vllm") and _installed(name)]
    if not modules:
        raise Missing(_absent("vllm", "vllm"))
    for module in modules:
        _imported(module)
    return torch.ops._C


# FlashInfer.


def _flashinfer(op: Op) -> Iterator[Provider]:
    if (folder := _folder()) is not None and (folder / "peers.py").is_file():
        yield from _flashinfer_kernels(op, folder)
        return
    if not _installed("flashinfer"):
        raise Missing(_absent("flashinfer", "flashinfer-python"))
    flashinfer = _imported("flashinfer")
    if op.name == "topk":

        def columns(sample: Sample) -> Call:
            logits, lengths, k = sample.args[:3]
            offsets = torch.zeros_like(lengths)
            return lambda: flashinfer.top_k_ragged_transform(logits, offsets, lengths, k)

        yield Provider("flashinfer top_k_ragged_transform", columns, _same_scores)
        return

    def slots(sample: Sample) -> Call:
        logits, lengths, requests, _, table, k, page = sample.args[:7]
        return lambda: flashinfer.top_k_page_table_transform(logits, table, lengths, k, row_to_batch=requests, page_size=page)

    yield Provider("flashinfer top_k_page_table_transform", slots, _same_slots)


def _flashinfer_kernels(op: Op, folder: Path) -> Iterator[Provider]:
    """Its kernels one by one, by the loaders of ``peers.py``."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    loaded = _imported("peers")
    table = {name: peer for name, peer in getattr(loaded, "TOPK_PEERS" if op.name == "topk" else "SLOT_PEERS", {}).items() if name.startswith("fi_")}
    if not table:
        raise Missing(f"peers.py of PEERS_DIR has no kernel of FlashInfer for {op.name}")
    for name, (prepare, accepts) in table.items():

        made: dict[tuple[int, int, int, int], Any] = {}

        def prepared(sample: Sample, prepare: Any = prepare, made: Any = made) -> Call:
            rows, columns, k, last = sizes = _topk_sizes(sample)
            if sizes not in made:  # one scratch for all input sets, as a server has it; gigabytes for the largest
                made.clear()
                made[sizes] = prepare(rows, k, columns, last), torch.full((rows, k), -7, dtype=torch.int32, device=sample.args[0].device)
            call, out = made[sizes]
            logits, lengths = sample.args[:2]
            arguments = (logits, lengths, out) if op.name == "topk" else (logits, lengths, sample.args[2], sample.args[4], out)
            return lambda: (call(*arguments), out)[1]

        def unable(sample: Sample, accepts: Any = accepts) -> str:
            rows, columns, k, last = _topk_sizes(sample)
            return "" if accepts(rows, k, columns, last) else "it does not take these sizes"

        yield Provider("flashinfer " + name.removeprefix("fi_"), prepared, _same_scores if op.name == "topk" else _same_slots, unable)


def _topk_sizes(sample: Sample) -> tuple[int, int, int, int]:
    """Rows, columns, k, and what comes last: the longest row, or the page size."""
    (rows, columns), slots = sample.args[0].shape, len(sample.args) > 3
    return rows, columns, sample.args[5 if slots else 2], sample.args[6] if slots else columns


# FlashMLA.


def _flashmla(op: Op) -> Iterator[Provider]:
    interface = _flashmla_interface()

    def prepare(sample: Sample) -> Call:
        q, cache, indices, lens, extra_cache, extra_indices, extra_lens, sink = sample.args
        plan = interface.get_mla_metadata()[0]  # made by the first call, kept for those of the same lengths

        def call() -> Any:
            found = interface.flash_mla_with_kvcache(
                q=q[:, None], k_cache=cache.unsqueeze(2), block_table=None, head_dim_v=q.shape[-1], cache_seqlens=None, is_fp8_kvcache=True,
                tile_scheduler_metadata=plan, indices=indices[:, None], topk_length=lens, softmax_scale=sample.kwargs["scale"], attn_sink=sink,
                extra_k_cache=None if extra_cache is None else extra_cache.unsqueeze(2),
                extra_indices_in_kvcache=None if extra_indices is None else extra_indices[:, None], extra_topk_length=extra_lens,
            )  # fmt: skip
            return found[0][:, 0], found[1]

        return call

    yield Provider("flashmla flash_mla_with_kvcache", prepare, _near, lambda s: "" if s.args[0].shape[1] in (64, 128) else "it takes 64 or 128 heads")


@functools.cache
def _flashmla_interface() -> Any:
    folder, library = _folder(), _library("_flashmla_C.abi3.so")
    if folder is not None and library is not None and (folder / "flash_mla_interface.py").is_file():
        torch.ops.load_library(str(library))
        for name in ("vllm", "vllm.third_party", "vllm.third_party.flashmla", "vllm._flashmla_C"):  # what the interface imports and does not use
            sys.modules.setdefault(name, types.ModuleType(name))
        sys.modules["vllm"]._flashmla_C = sys.modules["vllm._flashmla_C"]  # type: ignore[attr-defined]
        spec = importlib.util.spec_from_file_location("flash_mla_interface", folder / "flash_mla_interface.py")
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded
    if _installed("flash_mla"):
        return _imported("flash_mla")
    if _installed("vllm"):
        return _imported("vllm.third_party.flashmla.flash_mla_interface")
    raise Missing(_absent("flash_mla", "FlashMLA, or vllm, which brings it"))


# Finding them.

COVERED = {"vllm": ("topk", "swiglu"), "flashinfer": ("topk", "topk_slots"), "flashmla": ("sparse_mla_decode",)}
PACKAGES: dict[str, Callable[[Op], Iterator[Provider]]] = {"vllm": _vllm, "flashinfer": _flashinfer, "flashmla": _flashmla, "torch": _torch}


def _folder() -> Path | None:
    named = envs.peers_dir()
    return Path(named).resolve() if named else None


def _library(name: str) -> Path | None:
    """A library of PEERS_DIR, unpacked where it is packed; None where there is none."""
    folder = _folder()
    if folder is None or (folder / name).is_file():
        return folder / name if folder is not None else None
    packed = folder / f"{name}.xz"
    if not packed.is_file():
        return None
    unpacked = Path(tempfile.mkdtemp()) / name
    unpacked.write_bytes(lzma.decompress(packed.read_bytes()))
    return unpacked


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Missing(f"{module} is there but does not import: {first_line(error)}") from error


def _absent(module: str, project: str) -> str:
    return f"not installed (no module named {module}: pip install {project})" + ("" if _folder() is None else ", and PEERS_DIR has no stand-in")


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"
