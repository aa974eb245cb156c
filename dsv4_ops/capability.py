"""Gates: what the installed back ends can serve, asked at construction, never found out by the first decode.

Nothing here imports a library that touches CUDA. FlashInfer's dispatch table is read from its files
(``_flashinfer_table``), or from the module when somebody else has imported it, and it is only ever asked ``(heads, top_k) in
table`` with plain integers: what that object is has changed, and may again.

=======================================  ==========================================================================
``required_sparse_topk``                 index width that a decode needs
``select_sparse_width``                  smallest width of a back end that holds so many entries
``has_sparse_mla_decode_config``         yes, no or unknown for (heads, top-k, architecture)
``require_sparse_mla_decode``            raises with *everything* unmet and what to install
``accepts_keyword``                      whether a function takes a keyword argument
``packed_page_arguments``                slots and flag for a back end, so that packed pages are remapped exactly once
``cooperative_topk_supported``           whether thread-block clusters of a size may be launched
``pad_heads``, ``pad_indexer_heads``     zero heads up to a count that a kernel has
``paged_logits_states``, ``..supported`` compressed records a page, and whether a paged logits kernel takes them
``explain``                              the table of requirements that an error also prints
=======================================  ==========================================================================
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ._flashinfer_table import PROJECT, DispatchTable, build_for, build_tools, checked_table, installed_dispatch_table
from .errors import ArgumentDtypeError, ArgumentError, UnsupportedError
from .slot_layouts import packed_page_slots
from .swa_indices import swa_index_width

__all__ = [
    "DispatchTable",
    "Requirement",
    "Support",
    "accepts_keyword",
    "cooperative_topk_supported",
    "explain",
    "has_sparse_mla_decode_config",
    "installed_dispatch_table",
    "packed_page_arguments",
    "pad_heads",
    "pad_indexer_heads",
    "paged_logits_states",
    "paged_logits_supported",
    "require",
    "require_sparse_mla_decode",
    "required_sparse_topk",
    "select_sparse_width",
]

SPARSE_MLA_ARCHS = ((12, 0), (12, 1))
"""Compute capabilities that FlashInfer's DSV4 decode kernels with a dispatch table are built for."""
PAGED_LOGITS_STATES = (32, 64)
INDEXER_HEADS = (32, 64)
_WIDTH_STEP, _MAX_WIDTH = 64, 4096


class Support(str, Enum):
    """Answer of a gate. Only ``YES`` is true, so that ``if has_...(...)`` never takes an unknown for a yes."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        return self is Support.YES

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Requirement:
    """One thing that a back end needs: what, what is there, and what to do when it is not met."""

    name: str
    need: str
    found: str
    ok: bool
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.name}: needs {self.need}, found {self.found}." + (f" {self.fix}" if self.fix and not self.ok else "")


# Widths.


def required_sparse_topk(window: int, block_queries: int = 1, non_causal: bool = False) -> int:
    """Index width that a decode needs: ``window`` for plain and MTP decode, ``swa_index_width`` for a non-causal draft block.

    Raises ArgumentError (out of range), ArgumentDtypeError (not an integer).
    """
    where = "required_sparse_topk"
    window, block_queries = _positive(where, "window", window), _positive(where, "block_queries", block_queries)
    return swa_index_width(window, block_queries) if non_causal else window


def select_sparse_width(entries: int, table: Container[Any], num_q_heads: int | None = None) -> int | None:
    """Smallest width in ``table`` that holds ``entries`` columns, or None when there is none: then the back end cannot serve it.

    ``table`` holds widths, or with ``num_q_heads`` pairs ``(heads, width)``; it is asked by membership. Widths are multiples of 64.
    Raises ArgumentError (out of range), ArgumentDtypeError (not an integer).
    """
    entries = _positive("select_sparse_width", "entries", entries)
    for width in range(-(-entries // _WIDTH_STEP) * _WIDTH_STEP, _MAX_WIDTH + 1, _WIDTH_STEP):
        if (width if num_q_heads is None else (operator.index(num_q_heads), width)) in table:
            return width
    return None


# Sparse MLA decode of FlashInfer.


def has_sparse_mla_decode_config(num_q_heads: int, top_k: int, arch: tuple[int, int], *, table: Container[Any] | None = None) -> Support:
    """Whether FlashInfer has a DSV4 decode kernel for ``num_q_heads`` (padded heads included) and index width ``top_k``.

    ``arch`` is the compute capability, as ``(12, 0)``. ``table`` replaces that of the installed FlashInfer. Answers are
    cached for each installed version and arguments. Raises ArgumentError, ArgumentDtypeError.
    """
    heads, width, arch = _decode_arguments("has_sparse_mla_decode_config", num_q_heads, top_k, arch)
    known = installed_dispatch_table() if table is None else checked_table("given", table, "it is None")
    return _ask(known, heads, width, arch)


def _ask(known: DispatchTable, heads: int, width: int, arch: tuple[int, int]) -> Support:
    if arch not in SPARSE_MLA_ARCHS:
        return Support.NO
    if known.table is None:
        return Support.UNKNOWN if known.version is not None else Support.NO
    try:
        return Support.YES if (heads, width) in known.table else Support.NO
    except Exception:
        return Support.UNKNOWN


def require_sparse_mla_decode(num_q_heads: int, top_k: int, arch: tuple[int, int], *, table: Container[Any] | None = None) -> None:
    """Raise UnsupportedError unless FlashInfer can decode this; lists every unmet requirement and what to install.

    Call it when the engine is built. Arguments as :func:`has_sparse_mla_decode_config`.
    """
    heads, width, arch = _decode_arguments("require_sparse_mla_decode", num_q_heads, top_k, arch)
    require(f"FlashInfer sparse MLA decode ({heads} heads, top-k {width}, {_sm(arch)})", _decode_requirements(heads, width, arch, table))


def require(what: str, requirements: Sequence[Requirement]) -> None:
    """Raise UnsupportedError with all unmet ones of ``requirements``, if any."""
    unmet = [str(r) for r in requirements if not r.ok]
    if unmet:
        raise UnsupportedError(what, unmet)


def _decode_requirements(num_q_heads: int, top_k: int, arch: tuple[int, int], table: Container[Any] | None = None) -> list[Requirement]:
    heads, width, arch = _decode_arguments("sparse_mla_decode", num_q_heads, top_k, arch)
    build, fallback = build_for(heads, width), "dsv4_ops.sparse_mla_decode runs on any device."
    rows = [Requirement("architecture", " or ".join(map(_sm, SPARSE_MLA_ARCHS)), _sm(arch), arch in SPARSE_MLA_ARCHS, f"These kernels exist for no other; {fallback}")]
    pair = f"a decode kernel for {heads} query heads and top-k {width}"
    if table is None:
        known = installed_dispatch_table()
        if known.version is None:
            rows.append(Requirement("library", f"{PROJECT} with {pair}", "none installed", False, build or f"No known build has it; {fallback}"))
            return rows
        rows.append(Requirement("library", PROJECT, known.version, True))
    else:
        known = checked_table("given", table, "it is None")
    if known.table is None:
        rows.append(Requirement("dispatch table", f"one that says whether there is {pair}", f"{PROJECT} {known.version}: {known.problem}", False, build or fallback))
    else:
        answer = _ask(known, heads, width, SPARSE_MLA_ARCHS[0])
        rows.append(Requirement("heads and top-k", pair, f"{PROJECT} {known.version}, which answers {answer}", bool(answer), _nearest(known.table, heads, width, build, fallback)))
    if table is None:
        found, ok = build_tools()
        rows.append(Requirement("build tools", "flashinfer-jit-cache, or nvcc and ninja", found, ok, "pip install flashinfer-jit-cache, or put a CUDA toolkit and ninja on PATH."))
    return rows


def _nearest(table: Container[Any], heads: int, width: int, build: str, fallback: str) -> str:
    ways = []
    wider = select_sparse_width(width, table, heads)
    if wider is not None:
        ways.append(f"use the nearest width it has, {wider}")
    padded = next((h for h in range(heads + 1, 129) if (h, width) in table), None)
    if padded is not None:
        ways.append(f"pad the heads to {padded}")
    both = next(((h, w) for h in range(heads + 1, 129) if (w := select_sparse_width(width, table, h)) is not None), None)
    if not ways and both is not None:
        ways.append(f"pad the heads to {both[0]} and use width {both[1]}")
    if build:
        ways.append(build[0].lower() + build[1:].rstrip("."))
    text = ", or ".join(ways) or f"no known build has it; {fallback.rstrip('.')}"
    return text[0].upper() + text[1:] + "."


# Signatures and packed pages.

_keywords: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` can be called with ``name=...``; False when its signature is hidden. Cached for each function object."""
    try:
        cached = _keywords.setdefault(function, {})
    except TypeError:  # no weak reference, or no hash: asked each time
        cached = {}
    if name not in cached:
        cached[name] = _takes(function, name)
    return cached[name]


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind is inspect.Parameter.VAR_KEYWORD or (p.name == name and p.kind in by_keyword) for p in parameters)


STORAGE_OFFSETS = "sparse_indices_are_storage_offsets"


def packed_page_arguments(function: Callable[..., Any], slots: torch.Tensor, block_size: int, block_span: int) -> tuple[torch.Tensor, dict[str, bool]]:
    """Slots and keyword arguments for a decode ``function`` on packed pages, so that slots are remapped exactly once.

    The slots are always remapped here; a function that would remap by itself has the flag, and is told that it is done.
    """
    flag = {STORAGE_OFFSETS: True} if accepts_keyword(function, STORAGE_OFFSETS) else {}
    return packed_page_slots(slots, block_size, block_span), flag


# Clusters, indexer heads, paged logits.


def cooperative_topk_supported(arch: tuple[int, int], cluster_size: int) -> bool:
    """Whether thread-block clusters of ``cluster_size`` may be launched: 9.0 and the 10.x family, sizes 1 to 16.

    Other chips, 12.x included, take the persistent path. Sizes above 8 also need the kernel's non-portable attribute.
    """
    major, _minor = _arch("cooperative_topk_supported", arch)
    cluster_size = _positive("cooperative_topk_supported", "cluster_size", cluster_size)
    return cluster_size == 1 or (major in (9, 10) and cluster_size <= 16 and cluster_size & (cluster_size - 1) == 0)


def pad_heads(heads: int, allowed: Sequence[int] = INDEXER_HEADS) -> int | None:
    """Smallest count of ``allowed`` that ``heads`` can be padded to with zero heads, or None."""
    heads = _positive("pad_heads", "heads", heads)
    return min((a for a in allowed if a >= heads), default=None)


def pad_indexer_heads(q: torch.Tensor, weights: torch.Tensor, allowed: Sequence[int] = INDEXER_HEADS) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries ``[.., heads, dim]`` and weights ``[.., heads]`` with zero heads up to a count of ``allowed``: logits do not change.

    Raises UnsupportedError when there are more heads than any allowed count.
    """
    heads = q.shape[-2]
    if weights.shape[-1] != heads:
        raise ArgumentError("pad_indexer_heads", "weights", f"one for each of the {heads} heads of q", f"{weights.shape[-1]}")
    require("indexer", _indexer_requirements(heads, allowed))
    more = (pad_heads(heads, allowed) or heads) - heads
    return torch.nn.functional.pad(q, (0, 0, 0, more)), torch.nn.functional.pad(weights, (0, more))


def paged_logits_states(block_size: int, compress_ratio: int) -> int:
    """Compressed records in a page of ``block_size`` tokens. Raises ArgumentError when a page is not whole records."""
    where = "paged_logits_states"
    block_size, compress_ratio = _positive(where, "block_size", block_size), _positive(where, "compress_ratio", compress_ratio)
    if block_size % compress_ratio:
        raise ArgumentError(where, "block_size", f"a multiple of compress_ratio {compress_ratio}", block_size)
    return block_size // compress_ratio


def paged_logits_supported(states: int) -> bool:
    """Whether the paged logits kernels take pages of ``states`` records."""
    return states in PAGED_LOGITS_STATES


def _indexer_requirements(heads: int, allowed: Sequence[int] = INDEXER_HEADS) -> list[Requirement]:
    target = pad_heads(heads, allowed)
    need = f"at most {max(allowed, default=0)} heads"
    return [Requirement("indexer heads", need, f"{heads}" + (f" (padded to {target})" if target else ""), target is not None, "Score heads with dsv4_ops' PyTorch path.")]


def _paged_logits_requirements(block_size: int, compress_ratio: int) -> list[Requirement]:
    states = paged_logits_states(block_size, compress_ratio)
    fitting = [s * compress_ratio for s in PAGED_LOGITS_STATES]
    fix = f"Use pages of {fitting[0]} or {fitting[1]} tokens, or score these layers with dsv4_ops' PyTorch path."
    return [Requirement("records a page", " or ".join(map(str, PAGED_LOGITS_STATES)), f"{states} ({block_size} / {compress_ratio})", paged_logits_supported(states), fix)]


def _cooperative_requirements(arch: tuple[int, int], cluster_size: int) -> list[Requirement]:
    ok = cooperative_topk_supported(arch, cluster_size)
    return [Requirement("thread-block clusters", f"clusters of {cluster_size}: {_sm((9, 0))} or sm_10x, a power of two up to 16", _sm(arch), ok, "Take the persistent top-k.")]


GATES: dict[str, Callable[..., list[Requirement]]] = {
    "sparse_mla_decode": _decode_requirements,
    "indexer_heads": _indexer_requirements,
    "paged_logits": _paged_logits_requirements,
    "cooperative_topk": _cooperative_requirements,
}


def explain(gate: str, *args: Any, **kwargs: Any) -> str:
    """The requirements of a gate of :data:`GATES` as a table, met or not: ``explain("sparse_mla_decode", 64, 192, (12, 0))``.

    Raises ArgumentError (unknown gate), and what the gate raises for its arguments.
    """
    if gate not in GATES:
        raise ArgumentError("explain", "gate", "one of " + ", ".join(map(repr, GATES)), repr(gate))
    rows = GATES[gate](*args, **kwargs)
    lines = [("", "requirement", "needs", "found"), *(("ok" if r.ok else "NO", r.name, r.need, r.found) for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, *(f"fix: {r.fix}" for r in rows if not r.ok and r.fix)])


# Arguments.


def _decode_arguments(where: str, num_q_heads: int, top_k: int, arch: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
    return _positive(where, "num_q_heads", num_q_heads), _positive(where, "top_k", top_k), _arch(where, arch)


def _positive(where: str, name: str, value: int) -> int:
    """``value`` as a plain int, at least 1: tables compare by exact type."""
    try:
        if isinstance(value, bool):
            raise TypeError
        plain = int(operator.index(value))
    except TypeError:
        raise ArgumentDtypeError(where, name, "an integer", type(value).__name__) from None
    if plain < 1:
        raise ArgumentError(where, name, "at least 1", plain)
    return plain


def _arch(where: str, arch: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(arch, tuple) or len(arch) != 2:
        raise ArgumentError(where, "arch", "a compute capability as (12, 0)", repr(arch), "torch.cuda.get_device_capability() gives it.")
    major, minor = arch
    return _positive(where, "arch", major), operator.index(minor)


def _sm(arch: tuple[int, int]) -> str:
    return f"sm_{arch[0]}{arch[1]}"
