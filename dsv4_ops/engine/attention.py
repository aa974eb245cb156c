"""The attention of the target on paged KV, around transformers' own projections, norms and rotary embeddings.

For each token of a step, in each layer: its KV row goes into a window page, it attends to the window behind it, and in layers
with a compressor also to compressed records of the older past (all of them in HCA layers, the indexer's choice in CSA layers).

**Compressor state.** A compressor turns each window of ``ratio`` tokens into one record (a CSA record also reads the window
before it), so a record can be written when the last token of its window is run. The raw kv and gate of every token are stored
by position, in the pages of the window group; the token that closes a window reads the ``span`` positions up to its own. Nothing is
accumulated, so a rejected draft token leaves nothing behind: its position is simply written again, and a record that it
closed is seen by no token before the position that closes it has been run anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, apply_rotary_pos_emb

from .._checks import PAD_SLOT_ID
from ..decode_step import prepare_decode_step
from ..global_indices import global_topk_indices
from ..kv_cache import kv_cache_insert, new_kv_cache
from ..sparse_decode import sparse_mla_decode
from ..swa_indices import decode_swa_width
from ..topk_slots import topk_slots
from .step import StepInputs

__all__ = ["AttentionMetadata", "CompressorPlan", "Geometry", "PagedAttention", "build_metadata", "closing_tokens"]


class Geometry(NamedTuple):
    """What is the same in every step."""

    window: int
    ratios: dict[str, int]
    """Layer type -> tokens a record."""
    spans: dict[str, int]
    """Layer type -> positions that closing a record reads."""
    window_block_size: int
    compressed_block_size: int


class CompressorPlan(NamedTuple):
    """The records that the layers of one type write in a step, and those that each token may see. C rows, padded."""

    tokens: torch.Tensor
    """int64 ``[C]``: row of the token that closes the window; 0 for padding."""
    state_slots: torch.Tensor
    """int64 ``[C, span]``: where the kv and gate of the positions up to it are; -1 before position 0."""
    positions: torch.Tensor
    """int64 ``[C]``: first position of the window, the record's own position."""
    slots: torch.Tensor
    """int64 ``[C]``: where the record goes; -1 for padding."""
    lens: torch.Tensor
    """int32 ``[T]``: records before or at each token."""
    block_size: int
    """Records a page of the compressed group."""


class AttentionMetadata(NamedTuple):
    """Index rows of one step, shared by all layers."""

    window_slots: torch.Tensor
    token_to_req_indices: torch.Tensor
    is_valid_token: torch.Tensor
    swa_indices: torch.Tensor
    swa_lens: torch.Tensor
    plans: dict[str, CompressorPlan]
    compressed_table: torch.Tensor
    token_pages: torch.Tensor
    """int32 ``[T, blocks]``: the compressed pages of each token's request; null for padding."""


def closing_tokens(positions: torch.Tensor, is_valid_token: torch.Tensor, ratio: int, max_reqs: int) -> torch.Tensor:
    """Rows of the tokens that close a window of ``ratio``, in order, then -1: int64 ``[(T + max_reqs * (ratio - 1)) // ratio]``.

    That many rows hold the windows of any step, wherever its requests start: q tokens in a row close at most
    ``(q + ratio - 1) // ratio`` windows.
    """
    tokens = positions.shape[0]
    capacity = (tokens + max_reqs * (ratio - 1)) // ratio
    closes = is_valid_token & ((positions + 1) % ratio == 0)
    # Tokens that close nothing all write to one spare row behind the plan.
    place = torch.where(closes, closes.cumsum(0) - 1, capacity).clamp(max=capacity)
    rows = torch.arange(tokens, device=positions.device)
    return positions.new_full((capacity + 1,), -1).scatter(0, place, rows)[:capacity]


def build_metadata(step: StepInputs, geometry: Geometry) -> AttentionMetadata:
    """Everything the layers read beside hidden states. Fixed shapes, no host reads."""
    max_reqs = step.seq_lens.shape[0]
    prepared = prepare_decode_step(
        step.positions, step.seq_lens, step.query_start_loc, step.window_table, step.compressed_table, block_size=geometry.window_block_size,
        window=geometry.window, width=decode_swa_width(geometry.window), compress_ratios=tuple(geometry.ratios.values()),
    )  # fmt: skip
    requests, valid = prepared.token_to_req_indices, prepared.is_valid_token
    plans = {}
    for (layer_type, ratio), lens in zip(geometry.ratios.items(), prepared.context_lens, strict=True):
        span, block_size = geometry.spans[layer_type], geometry.compressed_block_size // ratio
        plan = closing_tokens(step.positions, valid, ratio, max_reqs)
        closing, rows = plan >= 0, plan.clamp(min=0)
        last, owner = step.positions[rows], requests[rows]
        reads = last[:, None] + torch.arange(1 - span, 1, device=last.device)
        state_slots, _ = global_topk_indices(reads.to(torch.int32), owner, closing, step.window_table, block_size=geometry.window_block_size)
        slots, _ = global_topk_indices((last // ratio).to(torch.int32)[:, None], owner, closing, step.compressed_table, block_size=block_size)
        plans[layer_type] = CompressorPlan(rows, state_slots.to(torch.int64), last + 1 - ratio, slots[:, 0].to(torch.int64), lens, block_size)
    return AttentionMetadata(
        prepared.slot_mapping, requests, valid, prepared.swa_indices, prepared.swa_lens, plans, step.compressed_table, prepared.expanded_block_table
    )


class _Rows(nn.Module):
    """Plain rows in pages: ``[blocks, block_size, width]``, and one spare row that takes what has no slot."""

    data: torch.Tensor

    def __init__(self, num_blocks: int, block_size: int, width: int, like: torch.Tensor) -> None:
        super().__init__()
        self.block_size, self.width = block_size, width
        self.register_buffer("data", like.new_zeros(num_blocks * block_size + 1, width), persistent=False)

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        spare = self.data.shape[0] - 1
        self.data[torch.where(slots >= self.block_size, slots, spare)] = rows.to(self.data.dtype)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """``[*slots.shape, width]``; zeros for slot -1."""
        return self.data[slots.clamp(min=0)].masked_fill((slots < 0)[..., None], 0)

    def pages(self, blocks: torch.Tensor) -> torch.Tensor:
        """``[n, blocks a row * block_size, width]`` of block ids ``[n, blocks a row]``."""
        pages = self.data[:-1].view(-1, self.block_size, self.width)
        return pages[blocks.to(torch.int64)].flatten(1, 2)


class _Compressor(nn.Module):
    """Raw kv and gate of each token into the state pages; the records of the windows that close, out."""

    def __init__(self, inner: Any, num_blocks: int, block_size: int) -> None:
        super().__init__()
        self.inner = inner
        self.ratio, self.head_dim = int(inner.compress_rate), int(inner.head_dim)
        self.overlaps = inner.kv_proj.out_features == 2 * self.head_dim
        self.state = _Rows(num_blocks, block_size, 2 * inner.kv_proj.out_features, inner.kv_proj.weight.detach())

    def forward(self, hidden_states: torch.Tensor, metadata: AttentionMetadata, plan: CompressorPlan) -> torch.Tensor:
        """``[C, head_dim]``; rows of padding are of no meaning."""
        inner = self.inner
        self.state.write(torch.cat([inner.kv_proj(hidden_states), inner.gate_proj(hidden_states)], -1), metadata.window_slots)
        kv, gate = self.state.read(plan.state_slots).chunk(2, dim=-1)
        bias = inner.position_bias
        if self.overlaps:
            # The window before gives the first half of its features, the closing window the second half.
            kv, gate, bias = (torch.cat([a[..., : self.head_dim], b[..., self.head_dim :]], -2) for a, b in (self._halves(kv), self._halves(gate), (bias, bias)))
        gate = gate + bias
        gate = gate.masked_fill((plan.state_slots < 0)[..., None], torch.finfo(gate.dtype).min)
        records = inner.kv_norm((kv * gate.softmax(1, dtype=torch.float32).to(kv.dtype)).sum(1))
        cos, sin = inner.rotary_emb(records, position_ids=plan.positions[None], layer_type=inner.rope_layer_type)
        return apply_rotary_pos_emb(records[None, None], cos, sin)[0, 0]

    def _halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, : self.ratio], x[:, self.ratio :]


class _Indexer(nn.Module):
    """Scores every record of a token's request by the indexer's own, smaller records, and keeps the best."""

    def __init__(self, inner: Any, num_window_blocks: int, num_compressed_blocks: int, geometry: Geometry, choose: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.choose = inner, choose
        self.compressor = _Compressor(inner, num_window_blocks, geometry.window_block_size)
        self.keys = _Rows(num_compressed_blocks, geometry.compressed_block_size // self.compressor.ratio, int(inner.head_dim), inner.kv_proj.weight.detach())

    def forward(self, hidden_states: torch.Tensor, q_residual: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, plan: CompressorPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 ``[T, index_topk]`` and ``[T]``: slots of the records kept, by ascending record, and their number."""
        inner, tokens = self.inner, hidden_states.shape[0]
        self.keys.write(self.compressor(hidden_states, metadata, plan), plan.slots)
        cos, sin = inner.rotary_emb(hidden_states, position_ids=positions[None], layer_type=inner.rope_layer_type)
        q = inner.q_b_proj(q_residual).view(1, tokens, inner.num_heads, inner.head_dim)
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)[0]
        scores = inner.scorer(q[:, None], self.keys.pages(metadata.token_pages), hidden_states[:, None])[:, 0]
        slots, lens = self.choose(scores, plan.lens, metadata.token_to_req_indices, metadata.is_valid_token, metadata.compressed_table, inner.index_topk, plan.block_size)
        return slots, lens


class PagedAttention(nn.Module):
    """Stands where a ``DeepseekV4Attention`` stood, with its signature; reads and writes paged KV as ``metadata`` says.

    ``attend`` and ``choose`` are called as ``sparse_mla_decode`` and ``topk_slots`` are: over several ranks, others take their place.
    """

    kv_cache: torch.Tensor
    records: torch.Tensor

    def __init__(
        self, inner: DeepseekV4Attention, geometry: Geometry, num_window_blocks: int, num_compressed_blocks: int, kv_dtype: torch.dtype,
        attend: Callable[..., Any] = sparse_mla_decode, choose: Callable[..., Any] = topk_slots,
    ) -> None:  # fmt: skip
        super().__init__()
        self.inner, self.attend = inner, attend
        self.layer_type: str = inner.layer_type
        device = inner.kv_proj.weight.device
        self.register_buffer("kv_cache", new_kv_cache(num_window_blocks, geometry.window_block_size, dtype=kv_dtype, device=device), persistent=False)
        self.compressor: _Compressor | None = None
        self.indexer: _Indexer | None = None
        if inner.compressor is not None:
            self.compressor = _Compressor(inner.compressor, num_window_blocks, geometry.window_block_size)
            records = new_kv_cache(num_compressed_blocks, geometry.compressed_block_size // self.compressor.ratio, dtype=kv_dtype, device=device)
            self.register_buffer("records", records, persistent=False)
            if hasattr(inner.compressor, "indexer"):
                self.indexer = _Indexer(inner.compressor.indexer, num_window_blocks, num_compressed_blocks, geometry, choose)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        *,
        metadata: AttentionMetadata,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        inner, tokens = self.inner, hidden_states.shape[1]
        cos, sin = position_embeddings[inner.rope_layer_type]
        q_residual = inner.q_a_norm(inner.q_a_proj(hidden_states))
        q = inner.q_b_norm(inner.q_b_proj(q_residual).view(1, tokens, inner.num_heads, inner.head_dim))
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)[0]
        kv = inner.kv_norm(inner.kv_proj(hidden_states))
        kv_cache_insert(apply_rotary_pos_emb(kv[:, None], cos, sin)[0, 0], self.kv_cache, metadata.window_slots)
        extra = self._compressed(hidden_states[0], q_residual[0], position_ids[0], metadata)
        out, _lse = self.attend(q, self.kv_cache, metadata.swa_indices, metadata.swa_lens, *extra, attn_sink=inner.sinks.detach(), scale=inner.scaling)
        # Keys are the values, so the values carry rotary too: turn it back at the query's position.
        out = apply_rotary_pos_emb(out[None], cos, -sin, unsqueeze_dim=2)
        grouped = inner.o_a_proj(out.reshape(1, tokens, inner.o_a_proj.n_groups, -1)).flatten(2)
        return inner.o_b_proj(grouped), None

    def _compressed(self, hidden_states: torch.Tensor, q_residual: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> tuple[Any, Any, Any]:
        """Write the records that close in this step; the records' cache, and the slots and lengths that each token sees."""
        if self.compressor is None:
            return None, None, None
        plan = metadata.plans[self.layer_type]
        kv_cache_insert(self.compressor(hidden_states, metadata, plan), self.records, plan.slots)
        if self.indexer is not None:
            return self.records, *self.indexer(hidden_states, q_residual, positions, metadata, plan)
        every = torch.arange(metadata.compressed_table.shape[1] * plan.block_size, dtype=torch.int32, device=plan.lens.device)
        seen = torch.where(every < plan.lens[:, None], every, PAD_SLOT_ID)
        indices, lens = global_topk_indices(seen, metadata.token_to_req_indices, metadata.is_valid_token, metadata.compressed_table, block_size=plan.block_size)
        return self.records, indices, lens
