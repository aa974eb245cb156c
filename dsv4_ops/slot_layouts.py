"""Index rows in the layouts of other back ends: ragged (CSR) rows, and slots of packed pages.

======================  ========  ==============  =====================================================================
argument                dtype     shape           meaning
======================  ========  ==============  =====================================================================
indices                 int32     [T, width]      slots, any strides; -1: a hole
lens                    int32     [T]             columns of each row that count, clamped to ``[0, width]``
drop_holes              bool                      leave the holes out, order kept: for back ends that cannot mask -1
returns indptr          int32     [T+1]           row t is ``flat[indptr[t]:indptr[t+1]]``
returns flat            int32     [T*width]       the rows one after the other, -1 behind the last one
slots                   int32/64  1 to 3 dims     flat slots ``page * block_size + offset``, any strides
block_size              int                       tokens a page
block_span              int                       tokens from the start of a page to the next (:func:`page_block_span`)
returns slots           as slots  as slots        ``page * block_span + offset``; -1 where slots is negative, or where the
                                                  dtype cannot hold the result
======================  ========  ==============  =====================================================================

Rewrite a slot once, where it is written for such a back end: this package's insert, gather and attention take plain
slots and read the page stride from the tensor. Graph-safe: yes (sizes alone decide what runs, nothing is read back).
Replaces the row compaction and the packed-page remap of serving engines' attention adapters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from ._slots import INT32_MAX, packed
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = ["packed_page_slots", "page_block_span", "swa_indices_to_csr"]

# --------------------------------------------------------------------------------------------- swa_indices_to_csr

SWA_INDICES_TO_CSR = _registry.define("swa_indices_to_csr(Tensor indices, Tensor lens, *, bool drop_holes=False) -> (Tensor, Tensor)", out=("indptr", "flat"))


def swa_indices_to_csr(indices: torch.Tensor, lens: torch.Tensor, *, drop_holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged form of index rows: ``(indptr int32 [T+1], flat int32 [T*width])``; ``flat`` keeps its size whatever the rows hold.

    Raises ArgumentError (more than ``2**31 - 1`` entries), ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops swa_indices_to_csr``.
    """
    result: tuple[torch.Tensor, torch.Tensor] = SWA_INDICES_TO_CSR(indices, lens, drop_holes=drop_holes)
    return result


def _csr_check(indices: torch.Tensor, lens: torch.Tensor, *, drop_holes: bool = False) -> None:
    where = "swa_indices_to_csr"
    _checks.tensor(where, "indices", indices, _checks.INT32, 2)
    _checks.tensor(where, "lens", lens, _checks.INT32, 1)
    if lens.shape[0] != indices.shape[0]:
        raise ArgumentShapeError(where, "lens", f"one entry a row of indices ({indices.shape[0]})", f"shape {list(lens.shape)}")
    _checks.same_device(where, indices=indices, lens=lens)
    if indices.shape[0] * indices.shape[1] > INT32_MAX:
        raise ArgumentError(where, "indices", f"of at most {INT32_MAX} entries (indptr is int32)", f"shape {list(indices.shape)}", "Split the rows.")


def _csr_reference(indices: torch.Tensor, lens: torch.Tensor, *, drop_holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    indptr: list[int] = [0]
    flat: list[int] = []
    for row, length in zip(indices.tolist(), lens.tolist(), strict=True):
        flat += [slot for slot in row[: max(0, length)] if slot >= 0 or not drop_holes]
        indptr.append(len(flat))
    flat += [_checks.PAD_SLOT_ID] * (indices.numel() - len(flat))
    return torch.tensor(indptr, dtype=torch.int32, device=indices.device), torch.tensor(flat, dtype=torch.int32, device=indices.device)


def _csr_torch(indices: torch.Tensor, lens: torch.Tensor, *, drop_holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = indices.shape
    kept = torch.arange(width, device=indices.device) < lens[:, None]
    if drop_holes:
        kept = kept & (indices >= 0)
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=indices.device)
    torch.cumsum(kept.sum(1), 0, dtype=torch.int32, out=indptr[1:])
    # Entries that do not belong to a row go behind all that do: every place of `flat` is written exactly once.
    kept = kept.flatten()
    kept_before = torch.cumsum(kept, 0) - kept.to(torch.int64)
    place = torch.where(kept, kept_before, indptr[-1] + torch.arange(kept.shape[0], device=indices.device) - kept_before)
    values = indices.flatten().masked_fill(~kept, _checks.PAD_SLOT_ID)
    return indptr, torch.empty_like(values).scatter_(0, place, values)


def _csr_triton(indices: torch.Tensor, lens: torch.Tensor, *, drop_holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    from ._triton import slot_layouts as kernels

    return kernels.swa_indices_to_csr(indices, lens, drop_holes)


def _csr_fake(indices: torch.Tensor, lens: torch.Tensor, *, drop_holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return indices.new_empty((indices.shape[0] + 1,)), indices.new_empty((indices.shape[0] * indices.shape[1],))


def _csr_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def drawn(label: str, tokens: int, width: int, drop_holes: bool = False) -> Sample:
        indices = torch.randint(-3, 9, (tokens, width), generator=g, dtype=torch.int32).clamp(min=-1)
        lens = torch.randint(-2, width + 3, (tokens,), generator=g, dtype=torch.int32)
        return Sample(label, (indices.to(device), lens.to(device)), {"drop_holes": drop_holes})

    yield drawn("rows with holes", 7, 6)
    yield drawn("holes dropped", 7, 6, drop_holes=True)
    yield drawn("no rows", 0, 6)
    yield drawn("no columns", 3, 0, drop_holes=True)
    yield drawn("one row, one column", 1, 1)
    indices = torch.randint(0, 9, (5, 4), generator=g, dtype=torch.int32).to(device)
    yield Sample("length extremes", (indices, torch.tensor([2**31 - 1, -(2**31), 4, 0, 5], dtype=torch.int32, device=device)))
    yield Sample("all holes, all dropped", (torch.full_like(indices, -1), torch.full((5,), 4, dtype=torch.int32, device=device)), {"drop_holes": True})
    wide = drawn("strided rows", 8, 9)
    yield Sample(wide.label, (wide.args[0][::2, 1:8:2], wide.args[1][::2]), {"drop_holes": True})
    wide = drawn("transposed rows", 6, 6)
    yield Sample(wide.label, (wide.args[0].t(), wide.args[1]), wide.kwargs)


def _csr_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 129, (n,), generator=g, dtype=torch.int32)
    return Sample(f"{n} rows", (torch.randint(0, 100000, (n, 192), generator=g, dtype=torch.int32).to(device), lens.to(device)))


def _csr_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    indices, lens = torch.zeros(3, 4, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    yield BadInput("int64 indices", (indices.long(), lens), ArgumentDtypeError, "indices must be int32, got int64")
    yield BadInput("flat indices", (indices[0], lens), ArgumentShapeError, "indices must be 2-dimensional")
    yield BadInput("lengths of fewer rows", (indices, lens[:2]), ArgumentShapeError, "lens must be one entry a row of indices (3)")
    yield BadInput("more entries than int32 counts", (indices[:1, :1].expand(2**16, 2**15), lens[:1].expand(2**16)), ArgumentError, "of at most 2147483647 entries")


SWA_INDICES_TO_CSR.implement(
    check=_csr_check,
    reference=_csr_reference,
    torch_impl=_csr_torch,
    triton=_csr_triton,
    fake=_csr_fake,
    samples=_csr_samples,
    sized=_csr_sized,
    bad_inputs=_csr_bad_inputs,
)

# ----------------------------------------------------------------------------------------------- packed_page_slots


PACKED_PAGE_SLOTS = _registry.define("packed_page_slots(Tensor slots, int block_size, int block_span) -> Tensor", out=("out",))


def packed_page_slots(slots: torch.Tensor, block_size: int, block_span: int) -> torch.Tensor:
    """Slots for a back end that multiplies a flat slot by the token stride: ``slot // block_size * block_span + slot % block_size``.

    In the shape of ``slots`` and its dtype; -1 stays -1. Raises ArgumentError (``block_span`` below ``block_size``: pages would overlap), ArgumentDtypeError, ArgumentShapeError.
    Arguments: ``python -m dsv4_ops ops packed_page_slots``.
    """
    result: torch.Tensor = PACKED_PAGE_SLOTS(slots, block_size, block_span)
    return result


def page_block_span(page_stride: int, token_stride: int) -> int:
    """How many tokens a page's stride holds, the ``block_span`` of :func:`packed_page_slots`. Both strides in one unit, usually bytes.

    Raises ArgumentError when a page is not a whole number of tokens: a flat slot id then cannot reach its rows.
    """
    _checks.integer("page_block_span", "token_stride", token_stride, 1)
    _checks.integer("page_block_span", "page_stride", page_stride, token_stride)
    if page_stride % token_stride:
        padded = -(-page_stride // token_stride) * token_stride
        fix = f"Pad the page to {padded}, or use a back end that takes the page stride from the tensor (this package's insert, gather and attention do)."
        raise ArgumentError("page_block_span", "page_stride", f"a multiple of token_stride {token_stride}", page_stride, fix)
    return page_stride // token_stride


def _packed_check(slots: torch.Tensor, block_size: int, block_span: int) -> None:
    where = "packed_page_slots"
    _checks.tensor(where, "slots", slots, _checks.INDEX, (1, 2, 3))
    _checks.integer(where, "block_size", block_size, 1, INT32_MAX)
    _checks.integer(where, "block_span", block_span, 1, INT32_MAX)
    if block_span < block_size:
        raise ArgumentError(where, "block_span", f"at least block_size ({block_size})", block_span, "Use page_block_span(page_stride, token_stride).")


def _packed_reference(slots: torch.Tensor, block_size: int, block_span: int) -> torch.Tensor:
    def moved(slot: int) -> int:
        result = slot // block_size * block_span + slot % block_size
        return result if slot >= 0 and result <= torch.iinfo(slots.dtype).max else _checks.PAD_SLOT_ID

    return torch.tensor([moved(slot) for slot in slots.flatten().tolist()], dtype=slots.dtype, device=slots.device).reshape(slots.shape)


def _packed_torch(slots: torch.Tensor, block_size: int, block_span: int) -> torch.Tensor:
    return packed(slots, block_size, block_span)


def _packed_triton(slots: torch.Tensor, block_size: int, block_span: int) -> torch.Tensor:
    from ._triton import slot_layouts as kernels

    return kernels.packed_page_slots(slots, block_size, block_span)


def _packed_fake(slots: torch.Tensor, block_size: int, block_span: int) -> torch.Tensor:
    return slots.new_empty(slots.shape)


def _packed_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    g = torch.Generator().manual_seed(seed)

    def slots(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(-2, 100000, shape, generator=g).to(dtype).to(device)

    yield Sample("rows of padded pages", (slots(5, 6), 64, 256))
    yield Sample("tight pages", (slots(9), 64, 64))
    yield Sample("int64, three dimensions", (slots(2, 3, 4, dtype=torch.int64), 64, 257))
    yield Sample("nothing", (slots(0), 64, 65))
    edge = [2**31 - 1, 2**31 // 65 * 64, 2**31 // 65 * 64 + 63, 2**31 // 65 * 64 - 1, -(2**31), -1, 0]
    yield Sample("int32 limits", (torch.tensor(edge, dtype=torch.int32, device=device), 64, 65))
    limit = (2**63 - 1) // 65 * 64
    yield Sample("int64 limits", (torch.tensor([2**63 - 1, limit, limit + 7, limit + 8, limit - 1, -(2**63), 2**40], device=device), 64, 65))
    yield Sample("transposed and strided", (slots(6, 8)[::2, ::2].t(), 4, 5))
    yield Sample("transposed int64", (slots(6, 8, dtype=torch.int64).t(), 4, 5))


def _packed_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    return Sample(f"{n} rows", (torch.randint(-1, 100000, (n, 192), generator=g, dtype=torch.int32).to(device), 64, 256))


def _packed_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    yield BadInput("float slots", (slots.float(), 64, 64), ArgumentDtypeError, "slots must be int32 or int64, got float32")
    yield BadInput("no dimensions", (slots[0], 64, 64), ArgumentShapeError, "slots must be 1-dimensional")
    yield BadInput("block size 0", (slots, 0, 64), ArgumentError, "block_size must be between 1")
    yield BadInput("overlapping pages", (slots, 64, 63), ArgumentError, "block_span must be at least block_size (64), got 63")


PACKED_PAGE_SLOTS.implement(
    check=_packed_check,
    reference=_packed_reference,
    torch_impl=_packed_torch,
    triton=_packed_triton,
    fake=_packed_fake,
    samples=_packed_samples,
    sized=_packed_sized,
    bad_inputs=_packed_bad_inputs,
)
