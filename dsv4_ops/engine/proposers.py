"""Between a verified step and a drafter: what each drafter of drafters.py reads, from what the step left.

Both proposers are functions of tensors with fixed shapes: the batch rows of a step, padding included. The tokens that a step
ran are a drafter's context; those that verification rejected are left out of it (their draft KV is written again when their
positions are run again).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import DeepseekV4ForCausalLM

from ..context_lens import ragged_context_lens
from ..dflash import scratch_rows
from ..draft_step import prepare_draft_step
from ..errors import ArgumentError
from ..kv_cache import new_kv_cache
from ..swa_indices import swa_index_width
from .config import KV_DTYPES, EngineConfig
from .drafters import BlockDrafter, BlockInputs, Drafter, MTPDrafter, MTPInputs, Proposal, load_drafter, mean_streams, next_token_ids

if TYPE_CHECKING:
    from .executor import ProposeInputs

__all__ = ["BlockProposer", "MTPProposer", "load_proposer"]


class _Proposer(ABC):
    """Draft KV pages and sizes, shared by both kinds."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, drafter: Drafter, config: EngineConfig, lookahead: int) -> None:
        self.drafter, self.config = drafter, config
        self.num_tokens, self.lookahead, self.window = config.num_speculative_tokens, lookahead, drafter.window
        self.caches: tuple[torch.Tensor, ...] = ()

    def allocate(self, num_blocks: int) -> None:
        device = self.drafter.lm_head.weight.device
        self.caches = tuple(new_kv_cache(num_blocks, self.config.draft_block_size, dtype=KV_DTYPES[self.config.kv_dtype], device=device) for _ in range(self.drafter.num_layers))

    def kv_bytes(self) -> int:
        return sum(cache.numel() * cache.element_size() for cache in self.caches)

    def propose(self, inputs: ProposeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        proposal = self.draft(inputs)
        return proposal.token_ids, proposal.logits

    @abstractmethod
    def draft(self, inputs: ProposeInputs) -> Proposal:
        """Draft tokens and their logits, by batch row, as a function of tensors."""


class MTPProposer(_Proposer):
    """Multi-token prediction: the module runs over the step's tokens, then once for each further draft token."""

    drafter: MTPDrafter

    def __init__(self, drafter: MTPDrafter, config: EngineConfig) -> None:
        # A row at position p holds the token of p + 1: the last draft token writes no KV, the first comes from the step's rows.
        super().__init__(drafter, config, config.num_speculative_tokens - 1)

    def draft(self, inputs: ProposeInputs) -> Proposal:
        step, sample = inputs.step, inputs.sample
        tokens = step.input_ids.shape[0]
        _, requests, valid = ragged_context_lens(step.seq_lens, step.query_start_loc, tokens)
        begin, end = step.query_start_loc[:-1].to(torch.int64), step.query_start_loc[1:].to(torch.int64)
        has_tokens = end > begin
        last = (end - 1 - inputs.num_rejected).clamp(min=0)
        rows = torch.arange(tokens, device=last.device)
        kept = valid & (rows <= last[requests.clamp(min=0).to(torch.int64)])
        spare = inputs.last_sampled.shape[0] - 1
        newest = inputs.last_sampled[scratch_rows(sample.state_rows, spare)]
        anchors = torch.where(inputs.num_sampled > 0, newest, sample.next_prefill_tokens)
        return self.drafter.propose(
            MTPInputs(
                input_ids=next_token_ids(step.input_ids, last, anchors, has_tokens),
                positions=step.positions,
                streams=inputs.streams,
                token_to_req_indices=requests,
                is_valid_token=kept,
                last_index=last,
                idx_mapping=torch.where(inputs.num_sampled > 0, sample.idx_mapping, -1),
                block_table=sample.draft_table,
                temperature=sample.temperature,
                seeds=sample.seeds,
            ),
            self.caches,
            num_tokens=self.num_tokens,
            block_size=self.config.draft_block_size,
            max_model_len=self.config.max_model_len,
        )


class BlockProposer(_Proposer):
    """DSpark and DFlash: a block of queries behind the last kept token, drafted in one pass."""

    drafter: BlockDrafter

    def __init__(self, drafter: BlockDrafter, config: EngineConfig) -> None:
        if config.num_speculative_tokens > drafter.num_tokens:
            raise ArgumentError("EngineConfig", "num_speculative_tokens", f"at most {drafter.num_tokens}, the block of this {drafter.kind} drafter", config.num_speculative_tokens)
        self.queries = config.num_speculative_tokens + (0 if drafter.sample_from_anchor else 1)
        super().__init__(drafter, config, self.queries)
        self.aux_layers = drafter.target_layer_ids

    def draft(self, inputs: ProposeInputs) -> Proposal:
        step, sample, config = inputs.step, inputs.sample, self.config
        states = inputs.last_sampled.shape[0]
        rows = scratch_rows(sample.state_rows, states - 1)
        prepared = prepare_draft_step(
            step.positions,
            step.query_start_loc,
            sample.state_rows,
            inputs.num_sampled,
            inputs.num_rejected,
            inputs.last_sampled,
            torch.zeros_like(inputs.last_sampled).scatter(0, rows, sample.next_prefill_tokens),
            sample.temperature,
            sample.seeds,
            [sample.draft_table],
            [config.draft_block_size],
            mask_token_id=self.drafter.mask_token_id,
            num_speculative_tokens=self.num_tokens,
            max_reqs=sample.draft_table.shape[0],
            max_tokens=sample.draft_table.shape[0] * self.queries,
            max_model_len=config.max_model_len,
            window=self.window,
            width=swa_index_width(self.window, self.queries),
            sample_from_anchor=self.drafter.sample_from_anchor,
        )
        return self.drafter.propose(
            BlockInputs(
                aux_hidden=mean_streams(inputs.layer_streams),
                context_positions=prepared.context_positions,
                context_slots=prepared.context_slots[0],
                input_ids=prepared.input_ids,
                positions=prepared.positions,
                is_padding=prepared.is_padding,
                query_slots=prepared.query_slots[0],
                sample_indices=prepared.sample_indices,
                sample_pos=prepared.sample_pos,
                sample_idx_mapping=prepared.sample_idx_mapping,
                block_table=sample.draft_table,
                temperature=prepared.temperature,
                seeds=prepared.seeds,
                swa_indices=prepared.swa_indices[0],
                swa_lens=prepared.swa_lens,
            ),
            self.caches,
            num_tokens=self.num_tokens,
            block_size=config.draft_block_size,
            max_model_len=config.max_model_len,
        )


def load_proposer(model_dir: str | Path, target: DeepseekV4ForCausalLM, config: EngineConfig) -> MTPProposer | BlockProposer | None:
    """The proposer of ``config.mode`` with the drafter that the checkpoint folder holds; None for plain decode.

    Raises what ``load_drafter`` raises, and ArgumentError when more draft tokens are asked for than a block drafter gives.
    """
    if config.mode == "plain":
        return None
    drafter = load_drafter(model_dir, target, config.mode)
    if isinstance(drafter, MTPDrafter):
        return MTPProposer(drafter, config)
    assert isinstance(drafter, BlockDrafter)
    return BlockProposer(drafter, config)
