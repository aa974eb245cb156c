"""vLLM's samplers, its Triton kernels and their launches from ``sampling_extracted.py`` beside this file, for ``benchmarks.sampling``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sampling_extracted as vllm
import torch


def gumbel(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor) -> Callable[[], Any]:
    """As its sampler calls it: temperature is applied already; ids int64 [rows]."""
    return lambda: vllm.gumbel_sample(logits, idx_mapping, temperature, seeds, positions, apply_temperature=False, is_drafting=False)


def rejection(
    target: torch.Tensor, draft_token_ids: torch.Tensor, draft_logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor
) -> Callable[[], Any]:
    """Its flat layout of 1 + K rows a request is made here, outside of the call, as its engine has it from the batch.

    Proposals are looked up by request state: raises ValueError where ``idx_mapping`` is not 0 .. n - 1.
    """
    n, k = draft_token_ids.shape
    device = target.device
    if not torch.equal(idx_mapping.long(), torch.arange(n, device=device)):
        raise ValueError("proposals are looked up by request state: idx_mapping has to be 0 .. n - 1")
    steps = torch.arange(k + 1, device=device)
    # Row i of a request holds the token that was its input; the first is never read.
    inputs = torch.cat([torch.zeros_like(draft_token_ids[:, :1]), draft_token_ids], 1).flatten().contiguous()
    starts = torch.arange(n + 1, device=device, dtype=torch.int32) * (k + 1)
    rows, places = idx_mapping.repeat_interleave(k + 1), steps.to(torch.int32).repeat(n)
    pos, flat = (positions[:, None] + steps).flatten(), target.reshape(n * (k + 1), -1)
    return lambda: vllm.rejection_sample(flat, draft_logits, inputs, starts, pos, idx_mapping, rows, places, temperature, seeds, k)


GUMBEL = {"vllm": gumbel}
REJECTION = {"vllm": rejection}
