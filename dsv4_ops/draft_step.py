"""All that a DSpark or DFlash draft needs between the target's sampling and the draft's attention, as one op and one launch.

``prepare_draft_step`` is ``prepare_dflash_inputs`` and ``draft_swa_indices`` for every KV group. Everything follows from the step's
positions and from what verification rejected, so no part has to wait for another part's result: one launch does it.

========================  ========  =======================  ===========================================================
argument                  dtype     shape                    meaning (see ``dflash`` for the others)
========================  ========  =======================  ===========================================================
target_positions, ...,                                       as for ``prepare_dflash_inputs``, which has context
seeds, block_tables,                                         parallelism too: a group that is split over ranks has no
block_sizes, scalars                                         window rows, so this op has none
window                    int                                W: how many positions before the block a query sees
width                     int                                columns of a window row, at least W + Q
draft_start               int32     [R]                      optional: first position that the drafter has KV for
lane                      int                                workspace lane, as every fused op has it; no scratch is used
returns                   as there  as there                 the outputs of ``prepare_dflash_inputs``, in order, then:
swa_indices               int32     [G, max_tokens, width]   slots that each query row sees in each group, as
                                                             ``draft_swa_indices`` has them with S the first query position
swa_lens                  int32     [max_tokens]             how many columns of a row count, holes of unmapped pages included
========================  ========  =======================  ===========================================================

Rows of inert requests, of requests without a committed token (S = 0) and past the batch: -1, length 0. Rows stand at ``i * Q + j``
like all query rows, so they feed the attention of the captured draft as they are. A drafter has no compressed entries: for a
back end that takes one mixed row a token (``mixed_indices``), these are the mixed rows, with length ``max(W, swa_lens)`` where
``swa_lens`` is not 0.

Graph-safe: yes (no host reads). Replaces the draft-input kernels and the window metadata of serving engines' speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import _checks, _registry, dflash
from ._registry import BadInput, Sample
from .dflash import PREPARE_DFLASH_INPUTS, DFlashInputs
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError
from .swa_indices import DRAFT_SWA_INDICES

__all__ = ["DraftStep", "prepare_draft_step"]


class DraftStep(NamedTuple):
    """What a draft forward and its attention read: the fields of :class:`DFlashInputs`, and window rows."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    is_padding: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    query_slots: torch.Tensor
    context_positions: torch.Tensor
    context_slots: torch.Tensor
    sample_indices: torch.Tensor
    sample_pos: torch.Tensor
    sample_idx_mapping: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    swa_indices: torch.Tensor
    swa_lens: torch.Tensor

    @property
    def inputs(self) -> DFlashInputs:
        return DFlashInputs(*self[: len(DFlashInputs._fields)])


PREPARE_DRAFT_STEP = _registry.define(
    "prepare_draft_step(Tensor target_positions, Tensor query_start_loc, Tensor idx_mapping, Tensor num_sampled, Tensor num_rejected, "
    "Tensor last_sampled, Tensor next_prefill_tokens, Tensor temperature, Tensor seeds, Tensor[] block_tables, int[] block_sizes, *, "
    "int mask_token_id, int num_speculative_tokens, SymInt max_reqs, SymInt max_tokens, int max_model_len, int window, int width, "
    "bool sample_from_anchor=False, Tensor? draft_start=None, int lane=-1) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # The prefix keeps the outputs apart from the inputs of the same name.
    out=tuple(f"out_{name}" for name in DraftStep._fields),
)


def prepare_draft_step(
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    *,
    mask_token_id: int,
    num_speculative_tokens: int,
    max_reqs: int,
    max_tokens: int,
    max_model_len: int,
    window: int,
    width: int,
    sample_from_anchor: bool = False,
    draft_start: torch.Tensor | None = None,
    lane: int = -1,
) -> DraftStep:
    """Inputs of a draft forward and the window rows of its queries, written up to ``max_tokens`` query rows and ``max_reqs`` requests.

    Shapes and dtypes as :func:`prepare_dflash_inputs`; window rows int32 ``[G, max_tokens, width]``, their lengths int32 ``[max_tokens]``.

    Raises ArgumentError (more requests or query rows than the capture size holds, ``width`` below ``window`` + Q), ArgumentShapeError,
    ArgumentDtypeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops prepare_draft_step``.
    """
    return DraftStep(
        *PREPARE_DRAFT_STEP(
            target_positions, query_start_loc, idx_mapping, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
            list(block_tables), list(block_sizes), mask_token_id=mask_token_id, num_speculative_tokens=num_speculative_tokens, max_reqs=max_reqs,
            max_tokens=max_tokens, max_model_len=max_model_len, window=window, width=width, sample_from_anchor=sample_from_anchor,
            draft_start=draft_start, lane=lane,
        )
    )  # fmt: skip


class _Arguments(NamedTuple):
    """The arguments of the op: every block below takes them as one value."""

    target_positions: torch.Tensor
    query_start_loc: torch.Tensor
    idx_mapping: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    block_sizes: Sequence[int]
    mask_token_id: int
    num_speculative_tokens: int
    max_reqs: int
    max_tokens: int
    max_model_len: int
    window: int
    width: int
    sample_from_anchor: bool = False
    draft_start: torch.Tensor | None = None
    lane: int = -1

    @property
    def inputs(self) -> dflash._Arguments:
        """The part that ``prepare_dflash_inputs`` takes."""
        return dflash._Arguments(*self[:16], sample_from_anchor=self.sample_from_anchor)  # type: ignore[arg-type]


_unpacked = _registry.unpacked(_Arguments)


@_unpacked
def _check(a: _Arguments) -> None:
    where = "prepare_draft_step"
    dflash.check_arguments(where, a.inputs)
    requests, queries = a.inputs.requests, a.inputs.queries
    _checks.integer(where, "window", a.window, 1, dflash.INT32_MAX)
    _checks.integer(where, "width", a.width, 1, dflash.INT32_MAX)
    if a.width < a.window + queries:
        raise ArgumentError(where, "width", f"at least window + {queries} query rows ({a.window + queries})", a.width, "Use swa_index_width(window, block_queries).")
    if a.draft_start is not None:
        _checks.tensor(where, "draft_start", a.draft_start, _checks.INT32, 1)
        _checks.shape(where, "draft_start", a.draft_start, (requests,), f"[requests] with {requests} requests as in query_start_loc")
        _checks.same_device(where, target_positions=a.target_positions, draft_start=a.draft_start)
    _checks.lane(where, a.lane)


def _composed(a: _Arguments, inputs: Callable[..., Any], window_rows: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """The op by the two ops that it is made of."""
    prepared = DFlashInputs(*inputs(*a.inputs))
    requests, queries = a.inputs.requests, a.inputs.queries
    live = requests * queries
    first = prepared.positions[:live].view(requests, queries)[:, 0].to(torch.int32)
    is_valid_req = ~prepared.is_padding[:live].view(requests, queries)[:, 0]
    indices = first.new_full((len(a.block_tables), a.max_tokens, a.width), _checks.PAD_SLOT_ID)
    lens = first.new_zeros(a.max_tokens)
    # The lengths are those of any group, and without one those of a table that maps nothing.
    groups = list(zip(a.block_tables, a.block_sizes, strict=True)) or [(first.new_zeros(requests, 0), 1)]
    for g, (table, block_size) in enumerate(groups):
        rows, lens[:live] = window_rows(
            first, table[:requests], is_valid_req, block_size=block_size, window=a.window, block_queries=queries, width=a.width,
            draft_start=a.draft_start, max_model_len=a.max_model_len,
        )  # fmt: skip
        if a.block_tables:
            indices[g, :live] = rows
    return (*prepared, indices, lens)


@_unpacked
def _reference(a: _Arguments) -> tuple[torch.Tensor, ...]:
    return _composed(a, PREPARE_DFLASH_INPUTS.reference, DRAFT_SWA_INDICES.reference)


@_unpacked
def _torch(a: _Arguments) -> tuple[torch.Tensor, ...]:
    assert PREPARE_DFLASH_INPUTS.torch_impl is not None and DRAFT_SWA_INDICES.torch_impl is not None
    return _composed(a, PREPARE_DFLASH_INPUTS.torch_impl, DRAFT_SWA_INDICES.torch_impl)


def _outputs(a: _Arguments) -> tuple[torch.Tensor, ...]:
    new = a.num_sampled.new_empty
    return (*dflash.new_outputs(a.inputs), new((len(a.block_tables), a.max_tokens, a.width)), new((a.max_tokens,)))


_fake = _unpacked(_outputs)


@_unpacked
def _triton(a: _Arguments) -> tuple[torch.Tensor, ...]:
    from ._triton import dflash as kernels

    outputs = _outputs(a)
    kernels.draft_inputs(a.inputs, outputs, a.window, a.width, a.draft_start)
    return outputs


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    """The calls of ``prepare_dflash_inputs`` that are not context-parallel, each with a window and some with a start."""
    for i, sample in enumerate(PREPARE_DFLASH_INPUTS.samples(device, seed)):
        if sample.kwargs["cp_size"] > 1:
            continue
        generator = torch.Generator().manual_seed(seed)
        kwargs = {name: value for name, value in sample.kwargs.items() if not name.startswith("cp_")}
        requests, queries = sample.args[2].shape[0], kwargs["num_speculative_tokens"] + (0 if kwargs["sample_from_anchor"] else 1)
        window = (6, 3, 1, 17)[i % 4]
        kwargs |= {"window": window, "width": window + queries + (0, 1, 7)[i % 3], "lane": i % 3 - 1}
        if i % 2:
            start = torch.randint(-3, 30, (requests,), generator=generator, dtype=torch.int32)
            start[::5] = torch.tensor([2**31 - 1, -(2**31), 0])[i % 3]
            kwargs["draft_start"] = start.to(device)
        yield Sample(sample.label, sample.args, kwargs)
    args, kwargs = dflash._make(device, torch.Generator().manual_seed(seed), [3] * 4, anchor=True, max_model_len=2**31 - 1, cp=(0, 1, 1))
    args[9][0].fill_(2**31 - 1)
    args[0].remainder_(40)
    limits = {name: value for name, value in kwargs.items() if not name.startswith("cp_")}
    yield Sample("ids past the int32 limit of slots", args, limits | {"window": 9, "width": 12})
    wide = torch.arange(8, dtype=torch.int32, device=device)[::2]
    yield Sample("strided start, no columns to spare", args, limits | {"window": 4, "width": 7, "draft_start": wide})


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    sample = PREPARE_DFLASH_INPUTS.sized(device, n, seed)
    kwargs = {name: value for name, value in sample.kwargs.items() if not name.startswith("cp_")}
    return Sample(sample.label, sample.args, kwargs | {"window": 128, "width": 192})


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    sample = _sized(device, 2)
    args, kwargs = sample.args, sample.kwargs
    start = torch.zeros(2, dtype=torch.int32, device=device)

    def wrong(label: str, match: str, error: type[Exception] = ArgumentError, **changed: object) -> BadInput:
        return BadInput(label, args, error, match, kwargs | changed)

    yield BadInput("int32 positions", (args[0].int(), *args[1:]), ArgumentDtypeError, "prepare_draft_step: target_positions must be int64, got int32", kwargs)
    yield wrong("too many query rows", "prepare_draft_step: max_tokens must be at least", max_tokens=1)
    yield wrong("width of the window alone", "width must be at least window + 3 query rows (131), got 128", width=128)
    yield wrong("window 0", "window must be between 1", window=0)
    yield wrong("int64 starts", "draft_start must be int32, got int64", ArgumentDtypeError, draft_start=start.long())
    yield wrong("starts of other requests", "draft_start must be of shape [requests] with 2 requests", ArgumentShapeError, draft_start=start[:1])
    yield wrong("lane -2", "lane must be between -1 and 15, got -2", lane=-2)
    yield wrong("lane 99", "lane must be between -1 and 15, got 99", lane=99)


PREPARE_DRAFT_STEP.implement(check=_check, reference=_reference, torch_impl=_torch, triton=_triton, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs)
