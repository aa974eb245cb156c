"""What the samplers should draw, in fp64, and which draws are so close that another device may decide otherwise.

Vectorized, for full vocabularies on a GPU. Only the uniforms come from the package: test_sampling.py holds them to published vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_ops import STREAM_ACCEPTANCE, STREAM_DRAFT, STREAM_PLAIN, STREAM_RECOVERY, _philox
from dsv4_ops.sampling import MARGIN

FLT_MAX = torch.finfo(torch.float32).max
Call = Callable[..., Any]


def clean(logits: torch.Tensor) -> torch.Tensor:
    x = logits.double()
    return torch.where(x.isnan(), -math.inf, x.clamp(max=FLT_MAX))


def first_of(scores: torch.Tensor) -> torch.Tensor:
    """Lowest index of the largest value of each row."""
    column = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(scores == scores.amax(-1, keepdim=True), column, scores.shape[-1]).amin(-1)


def law_of(x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities of clean logits ``[..., V]``; token 0 where nothing is above -inf."""
    top = x.amax(-1, keepdim=True)
    law = torch.softmax((x - top.clamp(min=-FLT_MAX)) / temperature.double()[..., None].clamp(max=FLT_MAX), -1)
    certain = torch.zeros_like(law)
    certain[..., 0] = 1
    return torch.where(top == -math.inf, certain, law)


def race(law: torch.Tensor, around: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The arg-max of ``law / noise``, and whether a margin of ``around / noise`` covers another token."""
    uniform = _philox.uniforms(seeds, positions, stream, law.shape[-1]).double()
    noise = -torch.log1p(-uniform)
    token = first_of(law / noise)
    above = (law + MARGIN * around) / noise
    below = ((law - MARGIN * around) / noise).gather(-1, token[:, None])
    return token, (above.scatter(-1, token[:, None], -math.inf) >= below).any(-1)


def gumbel(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, mapping: torch.Tensor, stream: int = STREAM_PLAIN) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, close)."""
    live = (mapping >= 0) & (mapping < temperature.shape[0])
    request = torch.where(live, mapping, 0).long()
    t = temperature[request]
    random = live & (t >= torch.finfo(torch.float32).tiny)
    x = clean(logits)
    law = law_of(x, torch.where(random, t, 1.0))
    drawn, close = race(law, law, seeds[request], positions, stream)
    return torch.where(live, torch.where(random, drawn, first_of(x)), 0), close & random


def rejection(
    target: torch.Tensor, draft: torch.Tensor, proposal: torch.Tensor | None, temperature: torch.Tensor, seeds: torch.Tensor, mapping: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sampled, num_sampled, close) of requests in ``[R, 1+K, V]``, step by step."""
    requests, drafts, width = draft.shape[0], draft.shape[1], target.shape[-1]
    live = (mapping >= 0) & (mapping < temperature.shape[0])
    request = torch.where(live, mapping, 0).long()
    t, seed = temperature[request], seeds[request]
    random = live & (t >= torch.finfo(torch.float32).tiny)
    t = torch.where(random, t, 1.0)
    going, close = live.clone(), torch.zeros_like(live)
    sampled = torch.full((requests, 1 + drafts), -1, device=target.device)
    count = torch.zeros(requests, dtype=torch.int32, device=target.device)
    for j in range(1 + drafts):
        position = positions[:, j] if positions.dim() == 2 else positions + j
        x = clean(target[:, j])
        p = law_of(x, t)
        plain, plain_close = race(p, p, seed, position, STREAM_PLAIN)
        ids = draft[:, j].long() if j < drafts else torch.full((requests,), -1, device=target.device)
        proposed = (ids >= 0) & (ids < width)
        place = torch.where(proposed, ids, 0)[:, None]
        q = torch.zeros_like(p).scatter(1, place, 1.0) if proposal is None or j == drafts else law_of(clean(proposal[:, j]), t)
        at_p, at_q = (law.gather(1, place)[:, 0] for law in (p, q))
        chance = _philox.uniforms(seed, position, STREAM_ACCEPTANCE, 1)[:, 0].double() * at_q
        undecided = (chance - at_p).abs() <= MARGIN * torch.maximum(chance, at_p)
        residual = (p - q).clamp(min=0)
        residual = torch.where(residual.amax(1, keepdim=True) > 0, residual, p)
        recovered, recovered_close = race(residual, p if proposal is None else p + q, seed, position, STREAM_RECOVERY)
        greedy = first_of(x)
        accepted = going & proposed & torch.where(random, chance < at_p, ids == greedy)
        token = torch.where(accepted, ids, torch.where(random, torch.where(proposed, recovered, plain), greedy))
        sampled[:, j] = torch.where(going, token, -1)
        count += going
        close |= going & random & torch.where(proposed, undecided | (recovered_close & ~accepted), plain_close)
        going = accepted
    return sampled, count, close


# ---- batches and comparisons, for whichever device the calls work on


@dataclass(frozen=True)
class Batch:
    target: torch.Tensor
    proposal: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    mapping: torch.Tensor
    positions: torch.Tensor

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        return self.temperature, self.seeds, self.mapping, self.positions


def batch(device: str, requests: int, drafts: int, width: int, seed: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Batch:
    """Random requests, one in eight greedy, one in sixteen inert; proposals are ``spread`` around the target."""
    generator = torch.Generator(device=device).manual_seed(seed)
    target = torch.randn(requests, 1 + drafts, width, generator=generator, device=device) * 2
    proposal = target[:, :drafts] + spread * torch.randn(requests, drafts, width, generator=generator, device=device)
    temperature = torch.rand(requests, generator=generator, device=device) + 0.3
    temperature[::8] = 0.0
    mapping = torch.randperm(requests, generator=generator, device=device).to(torch.int32)
    mapping[5::16] = -1
    seeds, positions = (torch.randint(low, high, (requests,), generator=generator, device=device) for low, high in ((-(2**63), 2**63 - 1), (0, 2**40)))
    return Batch(target.to(dtype), proposal.to(dtype), temperature, seeds, mapping, positions)


def drafts_of(b: Batch, sample: Call) -> torch.Tensor:
    """Proposals by ``sample`` (a gumbel_sample), some replaced by placeholders."""
    drafts = b.proposal.shape[1]
    ids = [sample(b.proposal[:, j], b.temperature, b.seeds, b.positions + j, b.mapping, STREAM_DRAFT) for j in range(drafts)]
    ids = torch.stack(ids, 1) if drafts else torch.zeros((b.mapping.shape[0], 0), dtype=torch.int64, device=b.mapping.device)
    ids[3::7, drafts // 2 :] = -1
    return ids


@dataclass
class Tally:
    """Draws compared, how many were close, and how many of those came out otherwise."""

    draws: int = 0
    close: int = 0
    otherwise: int = 0

    def add(self, got: torch.Tensor, expected: torch.Tensor, close: torch.Tensor) -> None:
        differs = (got != expected).reshape(len(close), -1).any(1)
        wrong = differs & ~close
        assert not bool(wrong.any()), f"row {int(wrong.nonzero()[0])}: {got[wrong][0].tolist()} instead of {expected[wrong][0].tolist()}, {int(wrong.sum())} rows in all"
        self.draws += len(close)
        self.close += int(close.sum())
        self.otherwise += int(differs.sum())


def check_gumbel(call: Call, b: Batch, tally: Tally, stream: int = STREAM_PLAIN) -> None:
    logits = b.target[:, 0]
    got = call(logits, b.temperature, b.seeds, b.positions, b.mapping, stream)
    tally.add(got, *gumbel(logits, b.temperature, b.seeds, b.positions, b.mapping, stream))


def check_rejection(call: Call, sample: Call, b: Batch, tally: Tally, greedy: bool = False) -> None:
    draft = drafts_of(b, sample)
    proposal = None if greedy else b.proposal
    sampled, count = call(b.target, draft, proposal, *b.states)
    expected, expected_count, close = rejection(b.target, draft, proposal, *b.states)
    tally.add(torch.cat([sampled, count[:, None]], 1), torch.cat([expected, expected_count[:, None]], 1), close)
