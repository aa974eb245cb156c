"""Who computes ``sparse_mla_decode``: the back ends, what each needs, and a decode whose back end is checked when an engine is built.

==============  =======================  =========  =======================================================================
back end        devices                  batch      what it is
                                         invariant
==============  =======================  =========  =======================================================================
``reference``   any                      yes        plain PyTorch (on a CPU the compiled kernel, where it was built)
``triton``      sm_80 and later          yes        this package's kernels
``cuda``        sm_90 to sm_11x          yes        this package's CUDA C++ kernel: one launch, no scratch; bfloat16 query, FP8 pages or
                                                    bfloat16 rows. Run on sm_90
``flashmla``    sm_90, sm_10x            no         FlashMLA, or the copy inside vLLM, where one is installed; FP8 pages
``flashinfer``  sm_100, sm_103, sm_120,  no         FlashInfer 0.7.2 and later: bfloat16 rows on sm_100 (and no log-sum-exp:
                sm_121                              ``lse`` is NaN), FP8 pages on sm_120. Nobody here has run it on a GPU
==============  =======================  =========  =======================================================================

- ``backend="auto"``, the default, takes this package's own kernels: on sm_90 ``cuda`` where it serves and rows have up to 640 columns, else
  ``triton``. **It is batch-invariant**: a row keeps its bits whoever else is in the batch, which is what an engine needs to verify
  speculation against plain decode.
- ``backend="fastest"`` takes what was measured fastest for device, heads, segments and number of tokens, of all that can serve the call.
  A row's bits may then depend on how many tokens are in the batch. Where nothing was measured it is ``auto``.
- A name takes that back end, or raises UnsupportedError with every requirement that is not met.

Shapes, dtypes, how caches lie and what is installed decide, never values. All run inside the one op, so that ``torch.compile(fullgraph=True)`` sees one
call with one fake, and another batch size compiles nothing again. The contract is the op's with each of them: holes, lengths out of range
and slots past a cache are no keys, a row without keys is zeros and -inf, the sink stays out of ``lse``.
"""

from __future__ import annotations

import torch

from . import _checks
from ._decode_backends import BACKENDS, CHOICES, NEVER_RUN, DecodeShape, Pages, device_arch, fastest, requirements
from .capability import Requirement, require
from .kv_cache import HEAD_DIM, TOKEN_BYTES
from .sparse_decode import SparseMLADecodeOutput, sparse_mla_decode
from .swa_indices import decode_swa_width

__all__ = ["BACKENDS", "BATCH_INVARIANT", "CHOICES", "NEVER_RUN", "DecodeShape", "Pages", "SparseMLADecode", "fastest", "requirements"]

BATCH_INVARIANT = frozenset(["auto", "reference", "triton", "cuda"])
"""Choices with which a row's bits do not depend on its batch."""


class SparseMLADecode:
    """``sparse_mla_decode`` for one kind of layer. The back end is checked here, with the engine, and not by the first step.

    =====================  ==========================================================================================
    argument               meaning
    =====================  ==========================================================================================
    heads                  query heads on this device
    window                 sliding window in tokens
    block_queries,         a draft block of that many query tokens, whose rows list all of it; else plain and
    non_causal             multi-token decode
    extra_width            columns of the second segment's rows (the indexer's top-k); None: layers without one
    dtype                  of the query: bfloat16 or float32
    cache_dtype            uint8 (FP8 pages), bfloat16 or float32
    block_size,            tokens a page of the window's cache and of the second, as ``new_kv_cache`` takes them
    extra_block_size
    page_stride,           strides of their pages, in elements; None: dense pages
    extra_page_stride
    lse                    whether the caller reads ``lse`` (to merge parts of a context, say)
    device                 where the calls will run
    backend                as above
    =====================  ==========================================================================================

    ``width`` is the number of columns that its window rows must have: ``window``, or ``swa_index_width`` for a draft block (192 for 128 + 5).
    Raises UnsupportedError with all that ``backend`` needs and has not, ArgumentError, ArgumentDtypeError.
    """

    def __init__(
        self,
        heads: int,
        window: int,
        *,
        block_queries: int = 1,
        non_causal: bool = False,
        extra_width: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        cache_dtype: torch.dtype = torch.uint8,
        block_size: int = 64,
        page_stride: int | None = None,
        extra_block_size: int = 64,
        extra_page_stride: int | None = None,
        lse: bool = False,
        device: torch.device | str = "cuda",
        backend: str = "auto",
    ) -> None:
        where = "SparseMLADecode"
        _checks.integer(where, "heads", heads, 1)
        _checks.one_of(where, "dtype", dtype, _checks.FLOATS)
        _checks.one_of(where, "cache_dtype", cache_dtype, (torch.uint8, *_checks.FLOATS))
        _checks.one_of(where, "backend", backend, CHOICES)
        row = TOKEN_BYTES if cache_dtype == torch.uint8 else HEAD_DIM
        pages = []
        for name, size, stride in (("", block_size, page_stride), ("extra_", extra_block_size, extra_page_stride)):
            _checks.integer(where, f"{name}block_size", size, 1)
            if stride is not None:
                _checks.integer(where, f"{name}page_stride", stride, size * row)
            pages.append(Pages(cache_dtype, size, size * row if stride is None else stride))
        if extra_width is not None:
            _checks.integer(where, "extra_width", extra_width, 1)
        self.width = decode_swa_width(window, block_queries, non_causal)
        self.shape = DecodeShape(heads, dtype, self.width, pages[0], extra_width, None if extra_width is None else pages[1])
        self.backend, self.device, self.lse = backend, torch.device(device), lse
        what = f"SparseMLADecode with backend={backend!r} ({heads} heads, width {self.width}{'' if extra_width is None else f' + {extra_width}'})"
        require(what, self.requirements())

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits do not depend on its batch."""
        return self.backend in BATCH_INVARIANT

    def requirements(self) -> tuple[Requirement, ...]:
        """What the back end needs for these calls, met or not; nothing where this package chooses."""
        return requirements(self.backend, self.shape, device_arch(self.device), self.lse) if self.backend in BACKENDS else ()

    def __call__(
        self,
        q: torch.Tensor,
        swa_cache: torch.Tensor,
        swa_indices: torch.Tensor,
        swa_lens: torch.Tensor,
        extra_cache: torch.Tensor | None = None,
        extra_indices: torch.Tensor | None = None,
        extra_lens: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        *,
        scale: float,
        lane: int = -1,
    ) -> SparseMLADecodeOutput:
        """As ``dsv4_ops.sparse_mla_decode``, which checks each call by its own shapes again."""
        return sparse_mla_decode(
            q, swa_cache, swa_indices, swa_lens, extra_cache, extra_indices, extra_lens, attn_sink, scale=scale, lane=lane, backend=self.backend
        )

    def __repr__(self) -> str:
        return f"SparseMLADecode({self.shape.heads} heads, width {self.width}, extra {self.shape.extra_width}, backend={self.backend!r} on {self.device})"
