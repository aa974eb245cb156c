"""Rejection sampling of speculated tokens: what is emitted has the law of plain decoding, and is exact for greedy requests.

Weights, draws, noise and greedy requests are as in ``sampling.py``. The layout is uniform: every request has K proposals, missing ones
are placeholders.

================  =========  ===============  ====================================================================
argument          dtype      shape            meaning
================  =========  ===============  ====================================================================
target_logits     fp32/bf16  [R, 1+K, V]      raw logits of the verify step, or [R*(1+K), V]; row j judges draft j
draft_token_ids   int32/64   [R, K]           proposals; an id outside [0, V), as the placeholder -1: no proposal
draft_logits      fp32/bf16  [R, K, V]        raw logits that the proposals were drawn from by gumbel_sample with
                                              this temperature; None: the proposals are greedy (one-hot law)
temperature       fp32       [max_reqs]       by request state
seeds             int64      [max_reqs]       by request state
idx_mapping       int32/64   [R]              batch row to request state; negative or past the table: inert
positions         int64      [R] or [R, 1+K]  position of each token being predicted; [R]: of the first, then + j
greedy_draft      bool                        true: the proposals are greedy although draft_logits is given
lane              int                         workspace lane, -1: the ambient one (only the CUDA path takes scratch)
returns sampled   int64      [R, 1+K]         emitted tokens, then -1; all -1 for inert rows
num_sampled       int32      [R]              1..K+1; 0 for inert rows
================  =========  ===============  ====================================================================

Greedy request: a proposal is accepted iff it is the arg-max of the target row; the token after the last accepted one is the arg-max
of its row. Otherwise: accepted iff ``u * q(x) < p(x)`` with u of the acceptance stream; a rejected proposal is replaced by a draw from
``max(p - q, 0)`` with the recovery stream (from p where that is all zero by rounding). A placeholder is always rejected and its position is
then sampled from the full target with the *plain* stream, as is the bonus token: so a request whose K proposals are all placeholders emits exactly
what ``gumbel_sample`` gives a request that decodes plainly. Proposals are judged one by one; block verification is not offered.

The sums behind p and q run in an order that the vocabulary alone fixes, so no result depends on the row's place or its batch. Devices agree on
a request except where a decision is within ``MARGIN`` (``sampling.py``): of ``u * q(x)`` to ``p(x)``, and of the best score to the second, which in a
recovery is a margin of ``p + q``, because a difference of two near values has no relative precision. Graph-safe: yes (no host read; on CPU
only, a batch without a random request skips the random half). Replaces the rejection samplers of serving engines.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._philox import STREAM_ACCEPTANCE, STREAM_PLAIN, STREAM_RECOVERY, uniforms
from ._registry import BadInput, Sample
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError
from .sampling import (
    SMALLEST_TEMPERATURE,
    check_requests,
    clean_logits,
    draw,
    known_greedy,
    reference_draw,
    reference_law,
    reference_noise,
    request_samples,
    request_state,
    weights_of,
)

__all__ = ["rejection_sample"]

REJECTION_SAMPLE = _registry.define(
    "rejection_sample(Tensor target_logits, Tensor draft_token_ids, Tensor? draft_logits, Tensor temperature, Tensor seeds, Tensor idx_mapping, "
    "Tensor positions, bool greedy_draft=False, *, int lane=-1) -> (Tensor, Tensor)",
    out=("sampled", "num_sampled"),
)


def rejection_sample(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    greedy_draft: bool = False,
    *,
    lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emitted tokens int64 ``[R, 1+K]`` (then -1) and their number int32 ``[R]``, distributed as plain decoding.

    Raises ArgumentError (``lane`` out of range), ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops rejection_sample``.
    """
    return REJECTION_SAMPLE(target_logits, draft_token_ids, draft_logits, temperature, seeds, idx_mapping, positions, greedy_draft, lane=lane)  # type: ignore[no-any-return]


def _check(
    target_logits: torch.Tensor, draft_token_ids: torch.Tensor, draft_logits: torch.Tensor | None, temperature: torch.Tensor, seeds: torch.Tensor,
    idx_mapping: torch.Tensor, positions: torch.Tensor, greedy_draft: bool = False, lane: int = -1,
) -> None:  # fmt: skip
    where = "rejection_sample"
    _checks.tensor(where, "draft_token_ids", draft_token_ids, _checks.INDEX, 2)
    requests, drafts = draft_token_ids.shape
    _checks.tensor(where, "target_logits", target_logits, _checks.FLOATS, (2, 3))
    width = target_logits.shape[-1]
    lead = (requests, 1 + drafts) if target_logits.dim() == 3 else (requests * (1 + drafts),)
    _checks.shape(where, "target_logits", target_logits, (*lead, None), "[R, 1+K, V] or [R*(1+K), V] for draft_token_ids [R, K]")
    if width < 1:
        raise ArgumentShapeError(where, "target_logits", "of at least one column", f"shape {list(target_logits.shape)}")
    if draft_logits is not None:
        _checks.tensor(where, "draft_logits", draft_logits, _checks.FLOATS, 3)
        _checks.shape(where, "draft_logits", draft_logits, (requests, drafts, width), "[R, K, V] with the target's R, K and V")
    check_requests(where, temperature, seeds)
    _checks.tensor(where, "idx_mapping", idx_mapping, _checks.INDEX, 1)
    _checks.shape(where, "idx_mapping", idx_mapping, (requests,), "[R]")
    _checks.tensor(where, "positions", positions, _checks.INT64, (1, 2))
    _checks.shape(where, "positions", positions, (requests, 1 + drafts)[: positions.dim()], "[R] or [R, 1+K]")
    _checks.lane(where, lane)
    _checks.same_device(
        where, target_logits=target_logits, draft_token_ids=draft_token_ids, draft_logits=draft_logits, temperature=temperature, seeds=seeds,
        idx_mapping=idx_mapping, positions=positions,
    )  # fmt: skip


def _reference(
    target_logits: torch.Tensor, draft_token_ids: torch.Tensor, draft_logits: torch.Tensor | None, temperature: torch.Tensor, seeds: torch.Tensor,
    idx_mapping: torch.Tensor, positions: torch.Tensor, greedy_draft: bool = False, lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    requests, drafts = draft_token_ids.shape
    width = target_logits.shape[-1]
    target = target_logits.reshape(requests, 1 + drafts, width)
    sampled = torch.full((requests, 1 + drafts), -1, dtype=torch.int64)
    num_sampled = torch.zeros(requests, dtype=torch.int32)
    for i, request in enumerate(idx_mapping.tolist()):
        if not 0 <= request < temperature.shape[0]:
            continue
        t, seed = float(temperature[request]), int(seeds[request])
        for j in range(1 + drafts):
            position = int(positions[i, j]) if positions.dim() == 2 else int(positions[i]) + j
            draft = int(draft_token_ids[i, j]) if j < drafts else -1
            accepted = False
            if t < SMALLEST_TEMPERATURE or t != t:
                token = int(torch.argmax(clean_logits(target[i, j])))
                accepted = draft == token
            elif not 0 <= draft < width:
                token = reference_draw(reference_law(target[i, j], t), seed, position, STREAM_PLAIN)
            else:
                p = reference_law(target[i, j], t)
                one_hot = draft_logits is None or greedy_draft
                q = torch.nn.functional.one_hot(torch.tensor(draft), width).double() if one_hot else reference_law(draft_logits[i, j], t)  # type: ignore[index]
                accepted = bool(reference_noise(seed, position, STREAM_ACCEPTANCE, 1)[0].double() * q[draft] < p[draft])
                residual = (p - q).clamp(min=0)
                token = draft if accepted else reference_draw(residual if residual.max() > 0 else p, seed, position, STREAM_RECOVERY)
            sampled[i, j] = token
            num_sampled[i] += 1
            if not accepted:
                break
    return sampled.to(target.device), num_sampled.to(target.device)


def _tree_sum(weights: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, upper half onto lower half: in an order that depends on the width alone."""
    width = weights.shape[-1]
    half = (width + 1) // 2
    total = weights[..., :half].clone()
    total[..., : width - half] += weights[..., half:]
    while half > 1:
        width, half = half, (half + 1) // 2
        total[..., : width - half] += total[..., half:width]
    return total[..., 0]


def _torch(
    target_logits: torch.Tensor, draft_token_ids: torch.Tensor, draft_logits: torch.Tensor | None, temperature: torch.Tensor, seeds: torch.Tensor,
    idx_mapping: torch.Tensor, positions: torch.Tensor, greedy_draft: bool = False, lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    requests, drafts = draft_token_ids.shape
    width, device = target_logits.shape[-1], target_logits.device
    live, random, t, seed = request_state(idx_mapping, temperature, seeds)
    step = torch.arange(1 + drafts, device=device)
    clean = clean_logits(target_logits.reshape(requests, 1 + drafts, width))
    best = torch.argmax(clean, -1)
    proposed = (draft_token_ids >= 0) & (draft_token_ids < width)
    draft = draft_token_ids.clamp(0, width - 1).to(torch.int64)
    accepted = proposed & (draft == best[:, :drafts])
    if known_greedy(random):
        count = accepted.to(torch.int64).cumprod(1).sum(1)
        return _emit(draft, count, best.gather(1, count[:, None]), step, live)

    place = positions if positions.dim() == 2 else positions[:, None] + step
    weights = weights_of(clean, t[:, None].expand(-1, 1 + drafts))
    total = _tree_sum(weights)
    proposal = None if draft_logits is None or greedy_draft or drafts == 0 else weights_of(clean_logits(draft_logits), t[:, None].expand(-1, drafts))
    proposal_total = None if proposal is None else _tree_sum(proposal)
    p = weights[:, :drafts].gather(2, draft[..., None])[..., 0] / total[:, :drafts]
    q = torch.ones_like(p) if proposal is None or proposal_total is None else proposal.gather(2, draft[..., None])[..., 0] / proposal_total
    chance = uniforms(seed[:, None].expand(-1, drafts).reshape(-1), place[:, :drafts].reshape(-1), STREAM_ACCEPTANCE, 1).view(requests, drafts)
    accepted = torch.where(random[:, None], proposed & (chance * q < p), accepted)
    count = accepted.to(torch.int64).cumprod(1).sum(1)

    row = torch.arange(requests, device=device)
    last = weights[row, count]
    stream: int | torch.Tensor = STREAM_PLAIN
    if drafts:
        judged = count.clamp(max=drafts - 1)
        rejected = (count < drafts) & proposed[row, judged]
        law = last / total[row, count][:, None]
        if proposal is None or proposal_total is None:
            residual = law.scatter(1, draft[row, judged][:, None], 0.0)
        else:
            residual = (law - proposal[row, judged] / proposal_total[row, judged][:, None]).clamp_(min=0)
        residual = torch.where(residual.amax(1, keepdim=True) > 0, residual, law)
        last = torch.where(rejected[:, None], residual, last)
        stream = torch.where(rejected, STREAM_RECOVERY, STREAM_PLAIN)
    drawn = draw(last, seed, place[row, count], stream)
    return _emit(draft, count, torch.where(random, drawn, best[row, count])[:, None], step, live)


def _emit(draft: torch.Tensor, count: torch.Tensor, token: torch.Tensor, step: torch.Tensor, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` proposals, then ``token``, then -1."""
    proposals = torch.nn.functional.pad(draft, (0, 1))
    sampled = torch.where(step < count[:, None], proposals, torch.where(step == count[:, None], token, -1))
    return torch.where(live[:, None], sampled, -1), torch.where(live, count + 1, 0).to(torch.int32)


def _triton(
    target_logits: torch.Tensor, draft_token_ids: torch.Tensor, draft_logits: torch.Tensor | None, temperature: torch.Tensor, seeds: torch.Tensor,
    idx_mapping: torch.Tensor, positions: torch.Tensor, greedy_draft: bool = False, lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from ._triton import rejection as kernels

    proposal = None if greedy_draft else draft_logits
    return kernels.rejection_sample(target_logits, draft_token_ids, proposal, temperature, seeds, idx_mapping, positions, lane)


def _fake(
    target_logits: torch.Tensor, draft_token_ids: torch.Tensor, draft_logits: torch.Tensor | None, temperature: torch.Tensor, seeds: torch.Tensor,
    idx_mapping: torch.Tensor, positions: torch.Tensor, greedy_draft: bool = False, lane: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    requests, drafts = draft_token_ids.shape
    return target_logits.new_empty((requests, 1 + drafts), dtype=torch.int64), target_logits.new_empty((requests,), dtype=torch.int32)


def _args(device: torch.device | str, requests: int, drafts: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Drafts drawn from logits near the target's (every third request's are the target's own arg-max)."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(requests, 1 + drafts, width, generator=generator) * 2
    proposal = target[:, :drafts] + torch.randn(requests, drafts, width, generator=generator)
    draft = torch.argmax(proposal - torch.empty_like(proposal).exponential_(generator=generator).log(), -1)
    draft[::3] = torch.argmax(target[::3, :drafts], -1)
    mapping = torch.randperm(requests, generator=generator).to(torch.int32)
    positions = torch.randint(0, 2**40, (requests,), generator=generator)
    moved = [x.to(device) for x in (target.to(dtype), draft.to(torch.int32), proposal.to(dtype))]
    return [*moved, *request_samples(device, requests, seed), mapping.to(device), positions.to(device)]


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    target, draft, proposal, temperature, seeds, mapping, positions = _args(device, 8, 3, 24, seed)
    yield Sample("mixed batch", (target, draft, proposal, temperature, seeds, mapping, positions))
    yield Sample("greedy drafts, flat target", (target.view(32, 24), draft.long(), None, temperature, seeds, mapping, positions))
    yield Sample("greedy drafts with logits", (target, draft, proposal, temperature, seeds, mapping, positions, True), {"lane": 1})
    yield Sample("bf16", (*_args(device, 5, 4, 16, seed, torch.bfloat16),))
    yield Sample("no requests", (*_args(device, 0, 2, 8, seed),))
    yield Sample("no drafts", (*_args(device, 4, 0, 16, seed),))
    yield Sample("no request states: all inert", (target, draft, proposal, temperature[:0], seeds[:0], mapping, positions))
    holes = draft.clone()
    holes[0], holes[1, 1], holes[2, 2], holes[3, 0], holes[4, 1] = -1, -1, 24, 2**31 - 1, -(2**31)
    yield Sample("placeholders and ids outside the vocabulary", (target, holes, proposal, temperature, seeds, mapping, positions))
    inert = torch.tensor([0, -1, 2, 8, 2**31 - 1, -(2**31), 6, 7], dtype=torch.int32, device=device)
    each = positions[:, None] + torch.arange(4, device=device)
    yield Sample("inert rows, a position each, strided", (target.repeat(1, 1, 2)[..., ::2], draft.repeat(1, 2)[:, ::2], proposal, temperature, seeds, inert, each))
    masked, absent = target.clone(), proposal.clone()
    masked[0], masked[1, 0], masked[2, :, ::2], masked[3, 1, 4], absent[4], absent[5, 0] = -torch.inf, torch.nan, -torch.inf, torch.inf, -torch.inf, torch.nan
    yield Sample("degenerate rows", (masked, draft, absent, temperature, seeds, mapping, positions))


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    return Sample(f"{n} requests", (*_args(device, n, 5, 96, seed),))


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    target, draft, proposal, temperature, seeds, mapping, positions = _args(device, 3, 2, 8, 0)
    rest = (temperature, seeds, mapping, positions)
    yield BadInput("float drafts", (target, draft.float(), proposal, *rest), ArgumentDtypeError, "draft_token_ids must be int32 or int64")
    yield BadInput("no bonus row", (target[:, :2], draft, proposal, *rest), ArgumentShapeError, "target_logits must be of shape [R, 1+K, V]")
    yield BadInput("other vocabulary", (target, draft, proposal[..., :7], *rest), ArgumentShapeError, "draft_logits must be of shape [R, K, V]")
    yield BadInput("fp16 target", (target.half(), draft, None, *rest), ArgumentDtypeError, "target_logits must be float32 or bfloat16")
    yield BadInput("no columns", (target[..., :0], draft, None, *rest), ArgumentShapeError, "at least one column")
    yield BadInput("mapping by token", (target, draft, None, temperature, seeds, mapping.repeat(3), positions), ArgumentShapeError, "idx_mapping must be of shape [R]")
    yield BadInput("int32 positions", (target, draft, None, temperature, seeds, mapping, positions.int()), ArgumentDtypeError, "positions must be int64")
    yield BadInput("positions of drafts only", (target, draft, None, temperature, seeds, mapping, positions[:, None].repeat(1, 2)), ArgumentShapeError, "[R] or [R, 1+K]")
    yield BadInput("lane -2", (target, draft, None, *rest), ArgumentError, "lane must be between -1 and 15, got -2", {"lane": -2})
    yield BadInput("lane 99", (target, draft, None, *rest), ArgumentError, "lane must be between -1 and 15, got 99", {"lane": 99})


REJECTION_SAMPLE.implement(
    check=_check, reference=_reference, torch_impl=_torch, triton=_triton, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs
)  # fmt: skip
