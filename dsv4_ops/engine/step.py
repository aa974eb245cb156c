"""The tensors of one target step, padded the way a graph engine pads them.

A step is flat: T tokens of up to R requests, padded to a capture size. Padding tokens have id 0 and position 0, and belong to no request;
padding requests have length 0, a null block table and no tokens (``query_start_loc`` stays flat); padding logits rows are row 0. A batch is
written over padding each time, so nothing of an earlier step survives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._checks import NULL_BLOCK
from .config import EngineConfig
from .scheduler import Scheduled

__all__ = ["SampleInputs", "StepInputs", "build_step", "dummy_sample", "dummy_step", "write_step"]


class StepInputs(NamedTuple):
    """What the target's forward reads: T tokens, R requests, L rows that need logits."""

    input_ids: torch.Tensor
    """int64 ``[T]``"""
    positions: torch.Tensor
    """int64 ``[T]``"""
    query_start_loc: torch.Tensor
    """int32 ``[R+1]``"""
    seq_lens: torch.Tensor
    """int32 ``[R]``: tokens of each request, those of this step included."""
    window_table: torch.Tensor
    """int32 ``[R, blocks]``"""
    compressed_table: torch.Tensor
    """int32 ``[R, blocks]``"""
    logits_rows: torch.Tensor
    """int64 ``[L]``: the ``1 + K`` rows of each request that give tokens (L = R * (1 + K))."""


class SampleInputs(NamedTuple):
    """What sampling and drafting read beside the logits, by batch row."""

    idx_mapping: torch.Tensor
    """int32 ``[R]``: state row of each request that gives tokens in this step, else -1."""
    state_rows: torch.Tensor
    """int32 ``[R]``: state row of each request in the step, -1 for padding."""
    positions: torch.Tensor
    """int64 ``[R]``: position of the first token that each request gives."""
    draft_ids: torch.Tensor
    """int64 ``[R, K]``, -1 where there is no draft token."""
    next_prefill_tokens: torch.Tensor
    """int64 ``[R]``: the prompt token after an unfinished prefill chunk, else 0."""
    draft_table: torch.Tensor
    """int32 ``[R, blocks]`` of the draft group (no columns without a drafter)."""
    temperature: torch.Tensor
    """float32 ``[R + 1]`` and int64 ``[R + 1]`` by state row; the last row is nobody's."""
    seeds: torch.Tensor


def dummy_step(config: EngineConfig, tokens: int) -> StepInputs:
    """A step of ``tokens`` padding tokens and nothing else: it writes no KV and gives no logits of use."""
    reqs = config.max_num_seqs

    def table(block_size: int) -> torch.Tensor:
        return torch.full((reqs, -(-config.max_model_len // block_size)), NULL_BLOCK, dtype=torch.int32)

    return StepInputs(
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.zeros(tokens, dtype=torch.int64),
        query_start_loc=torch.zeros(reqs + 1, dtype=torch.int32),
        seq_lens=torch.zeros(reqs, dtype=torch.int32),
        window_table=table(config.window_block_size),
        compressed_table=table(config.compressed_block_size),
        logits_rows=torch.zeros(reqs * config.tokens_per_decode, dtype=torch.int64),
    )


def dummy_sample(config: EngineConfig) -> SampleInputs:
    """What goes with a dummy step: no request gives tokens."""
    reqs = config.max_num_seqs
    draft_blocks = 0 if config.mode == "plain" else -(-config.max_model_len // config.draft_block_size)
    return SampleInputs(
        idx_mapping=torch.full((reqs,), -1, dtype=torch.int32),
        state_rows=torch.full((reqs,), -1, dtype=torch.int32),
        positions=torch.zeros(reqs, dtype=torch.int64),
        draft_ids=torch.full((reqs, config.tokens_per_decode - 1), -1, dtype=torch.int64),
        next_prefill_tokens=torch.zeros(reqs, dtype=torch.int64),
        draft_table=torch.full((reqs, draft_blocks), NULL_BLOCK, dtype=torch.int32),
        temperature=torch.zeros(reqs + 1),
        seeds=torch.zeros(reqs + 1, dtype=torch.int64),
    )


def build_step(config: EngineConfig, groups: Iterable[str], batch: Sequence[Scheduled]) -> tuple[StepInputs, SampleInputs]:
    """The inputs of a scheduled batch (decodes first), on the CPU. ``groups``: names of the KV groups."""
    step, sample = dummy_step(config, config.padded_tokens(sum(part.num_tokens for part in batch))), dummy_sample(config)
    write_step(groups, batch, _as_arrays(step), _as_arrays(sample))
    return step, sample


def write_step(groups: Iterable[str], batch: Sequence[Scheduled], step: Any, sample: Any) -> None:
    """Write a scheduled batch over padding. ``step`` (a StepInputs) and ``sample`` (a SampleInputs) hold NumPy arrays.

    The device waits for this in every step, and a small write through PyTorch takes ten times as long; some of its calls even wake
    threads for eight numbers.
    """
    width = 1 + sample.draft_ids.shape[1]
    tables = {"window": step.window_table, "compressed": step.compressed_table, "draft": sample.draft_table}
    begin = 0
    for i, part in enumerate(batch):
        sequence, row, end = part.sequence, part.sequence.row, begin + part.num_tokens
        step.input_ids[begin:end] = part.token_ids
        step.positions[begin:end] = np.arange(part.start, part.start + part.num_tokens)
        step.query_start_loc[i + 1 :] = end
        step.seq_lens[i] = part.start + part.num_tokens
        for name in groups:
            held = sequence.tables[name]
            tables[name][i, held.evicted : len(held.blocks)] = held.blocks[held.evicted :]
        sample.state_rows[i] = row
        sample.temperature[row], sample.seeds[row] = sequence.request.temperature, sequence.request.seed
        known_end = part.start + part.num_known
        if part.samples:
            sample.idx_mapping[i] = row
            sample.positions[i] = known_end
            drafts = len(part.drafts)
            sample.draft_ids[i, :drafts] = part.drafts
            step.logits_rows[i * width : i * width + drafts + 1] = np.arange(end - drafts - 1, end)
        else:
            sample.next_prefill_tokens[i] = sequence.tokens[known_end]
        begin = end


def _as_arrays(fields: Any) -> Any:
    """The same tuple of NumPy arrays, on the memory of the tensors."""
    return type(fields)(*(tensor.numpy() for tensor in fields))
