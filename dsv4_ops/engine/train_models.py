"""The target and its drafters over whole windows of text, with gradients: what ``train.py`` minimizes.

**Target.** transformers' own layers with its dense attention. The indexers' scores learn the attention that the records get (the loss of
the DeepSeek-V3.2 report), apart from the rest: their inputs are detached.

**Drafters.** Their blocks with attention written out (:class:`_DenseAttention`), fed by the target's states of the same text. Each draft
token learns the target's distribution at its place, and its best token. MTP is unrolled: the second draft token reads the streams of the
first, as it will. Block drafters see blocks at the places given, the Markov head the token before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from .drafters import BlockDrafter, Drafter, MTPDrafter, _DraftAttention, mean_streams

__all__ = ["BlockTrainer", "DraftTrainer", "MTPTrainer", "TargetTrainer"]

DRAFT_TOKENS = 4
"""How far MTP is unrolled."""


def _all_experts(experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen: fixed shapes, and for eight small ones no dearer."""
    weights = torch.zeros(len(hidden_states), experts.num_experts, device=hidden_states.device).scatter(1, top_k_index, top_k_weights)
    inner = experts._apply_gate(torch.einsum("td,eod->teo", hidden_states, experts.gate_up_proj)) * weights[..., None]
    return torch.einsum("tei,edi->td", inner, experts.down_proj)


def _balance(router: Any, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Raise the bias of experts that were chosen too rarely (DeepSeek-V3's balancing without a loss)."""
    if router.training:
        counts = torch.zeros_like(router.e_score_correction_bias).scatter_add(0, output[2].flatten(), output[1].new_ones(output[2].numel()))
        router.e_score_correction_bias += 1e-3 * (counts.mean() - counts).sign()


def _prepare(layers: Any) -> None:
    for layer in layers:
        layer.mlp.experts.forward = MethodType(_all_experts, layer.mlp.experts)
        if hasattr(layer.mlp.gate, "e_score_correction_bias"):
            layer.mlp.gate.register_forward_hook(_balance)


class TargetTrainer:
    """The target over whole windows: logits, the streams after each layer, and the indexers' loss."""

    def __init__(self, model: DeepseekV4ForCausalLM, length: int) -> None:
        self.model, device = model, model.lm_head.weight.device
        self.ratio = int(cast(Any, model.config).compress_rates["compressed_sparse_attention"])
        positions = torch.arange(length, device=device)
        seen = (positions <= positions[:, None]) & (positions > positions[:, None] - int(model.config.sliding_window))
        self.positions, self.mask = positions[None], torch.zeros(length, length, device=device).masked_fill(~seen, -torch.inf)[None, None]
        _prepare(model.model.layers)
        self._scores: dict[int, torch.Tensor] = {}
        self._attention: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(model.model.layers):
            if hasattr(layer.self_attn.compressor, "indexer"):
                indexer = layer.self_attn.compressor.indexer
                indexer.register_forward_pre_hook(lambda _module, args: (args[0].detach(), args[1].detach(), *args[2:]))
                indexer.scorer.register_forward_hook(lambda _module, _args, output, i=i: self._scores.__setitem__(i, output))
                layer.self_attn.register_forward_hook(lambda _module, _args, output, i=i: self._attention.__setitem__(i, output[1]))

    def keep_records(self, count: int) -> None:
        for i in self.indexed:
            self.model.model.layers[i].self_attn.compressor.indexer.index_topk = count

    @property
    def indexed(self) -> list[int]:
        return [i for i, layer in enumerate(self.model.model.layers) if hasattr(layer.self_attn.compressor, "indexer")]

    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = self.model.model
        embedded = model.embed_tokens(ids)
        embeddings = {kind: model.rotary_emb(embedded, position_ids=self.positions, layer_type=kind) for kind in ("main", "compress")}
        streams, after = embedded.unsqueeze(2).expand(-1, -1, model.config.hc_mult, -1).contiguous(), []
        for layer in model.layers:
            streams = layer(streams, input_ids=ids, position_embeddings=embeddings, position_ids=self.positions, attention_mask=self.mask.expand(len(ids), -1, -1, -1))
            after.append(streams)
        return self.model.lm_head(model.norm(model.hc_head(streams))).float(), after

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The text's cross entropy, in nats a byte, and what to minimize."""
        logits, _ = self(ids)
        text = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return text, text + sum(self._indexer_loss(i) for i in self.indexed)

    def _indexer_loss(self, layer: int) -> torch.Tensor:
        # Taken out: kept, they would hold this step's gradients' graph into the next.
        scores = self._scores.pop(layer)
        given = self._attention.pop(layer).detach()[..., -scores.shape[-1] :].sum(1)
        closed = torch.arange(scores.shape[-1], device=scores.device) < ((self.positions + 1) // self.ratio)[..., None]
        wanted = given / given.sum(-1, keepdim=True).clamp(min=1e-6)
        return -(wanted * scores.masked_fill(~closed, -1e4).log_softmax(-1)).sum(-1).mean()


class _DenseRows(NamedTuple):
    """Keys of one draft forward over R rows a window: K shared ones, masked, and n of each row's own."""

    keys: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    """(layer, the rows' own KV ``[B, R, 512]``) -> ``[B, K, 512]`` and ``[B, R, n, 512]`` or None."""
    visible: torch.Tensor
    """bool ``[R, K]``"""


class _DenseAttention(_DraftAttention):
    """The attention of a draft block with gradients; its keys come from ``draft_rows``."""

    def batch_kv(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(self.inner.kv_norm(self.inner.kv_proj(hidden_states))[:, None], cos, sin)[:, 0]

    def forward(self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], draft_rows: Any, **_: Any) -> tuple[torch.Tensor, None]:
        inner, (cos, sin) = self.inner, position_embeddings
        batch, rows = hidden_states.shape[:2]
        q = inner.q_b_proj(inner.q_a_norm(inner.q_a_proj(hidden_states))).view(batch, rows, inner.num_heads, inner.head_dim)
        q = apply_rotary_pos_emb(inner.q_b_norm(q), cos, sin, unsqueeze_dim=2)
        shared, own = draft_rows.keys(inner.layer_idx, self.batch_kv(hidden_states, cos, sin))
        scores = [torch.einsum("brhd,bkd->bhrk", q, shared).mul(inner.scaling).masked_fill(~draft_rows.visible, -torch.inf)]
        if own is not None:
            scores.append(torch.einsum("brhd,brnd->bhrn", q, own) * inner.scaling)
        sinks = inner.sinks.view(1, -1, 1, 1).expand(batch, -1, rows, 1)
        weights = torch.cat([*scores, sinks], -1).softmax(-1)
        out = torch.einsum("bhrk,bkd->brhd", weights[..., : shared.shape[1]], shared)
        if own is not None:
            out = out + torch.einsum("bhrn,brnd->brhd", weights[..., shared.shape[1] : -1], own)
        out = apply_rotary_pos_emb(out, cos, -sin, unsqueeze_dim=2)
        return inner.o_b_proj(inner.o_a_proj(out.reshape(batch, rows, inner.config.o_groups, -1)).flatten(2)), None


class DraftTrainer(ABC):
    """What both kinds of drafter share: blocks made trainable, and the loss of a draft token."""

    def __init__(self, drafter: Drafter, target: DeepseekV4ForCausalLM, length: int) -> None:
        self.drafter, self.window, self.length = drafter, drafter.window, length
        self.positions = torch.arange(length, device=target.lm_head.weight.device)
        _prepare(drafter.layers)
        first = {name.replace("self_attn.", "self_attn.inner."): tensor for name, tensor in target.model.layers[0].state_dict().items()}
        for i, layer in enumerate(drafter.layers):
            layer.self_attn = drafter.attention[i] = _DenseAttention(drafter.attention[i].inner)
            layer.load_state_dict(first)  # a sliding layer, as theirs are
        drafter.train()
        drafter.hc_head.load_state_dict(target.model.hc_head.state_dict())
        drafter.norm.load_state_dict(target.model.norm.state_dict())

    def run(self, streams: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, rows: _DenseRows) -> torch.Tensor:
        embeddings = self.drafter.rotary_emb(streams, position_ids=positions[None], layer_type="main")
        for layer in self.drafter.layers:
            streams = layer(streams, input_ids=ids, position_embeddings=embeddings, draft_rows=rows)
        return streams

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.drafter.lm_head(self.drafter.norm(self.drafter.hc_head(streams)))
        return logits.float()

    @abstractmethod
    def draft(self, ids: torch.Tensor, after: list[torch.Tensor], anchors: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each draft token: its logits ``[B, n, V]``, and the rows int64 ``[n]`` where the target predicts the same token.

        ``after``: the target's streams after each layer. ``anchors`` int64 ``[A]``: where blocks begin, the same places in every window.
        """

    def loss(self, ids: torch.Tensor, after: list[torch.Tensor], teacher: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Later draft tokens count less: they are of use only where those before them were right."""
        losses = [0.8**j * _draft_loss(logits, teacher[:, rows]) for j, (logits, rows) in enumerate(self.draft(ids, after, anchors))]
        return torch.stack(losses).sum()

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for name, p in self.drafter.named_parameters() if not name.startswith(self.drafter.shared))


def _draft_loss(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Half the cross entropy with the target's distribution, half with its best token."""
    scores = logits.log_softmax(-1)
    best = scores.gather(-1, teacher.argmax(-1, keepdim=True))
    return -((teacher.softmax(-1) * scores).sum(-1) + best[..., 0]).mean() / 2


class MTPTrainer(DraftTrainer):
    def __init__(self, drafter: MTPDrafter, target: DeepseekV4ForCausalLM, length: int) -> None:
        super().__init__(drafter, target, length)
        nn.init.normal_(drafter.e_proj.weight, std=0.02)
        nn.init.normal_(drafter.h_proj.weight, std=0.02)
        with torch.no_grad():
            drafter.e_proj.weight.diagonal().add_(0.5)
            drafter.h_proj.weight.diagonal().add_(0.5)

    def draft(self, ids: torch.Tensor, after: list[torch.Tensor], anchors: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """From every place of a window, ``anchors`` or not."""
        drafter: Any = self.drafter
        roots = self.length - DRAFT_TOKENS - 1
        positions, streams = self.positions[:roots], after[-1][:, :roots]
        apart = positions[:, None] - positions
        first: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        for step in range(DRAFT_TOKENS):
            following = ids[:, 1 + step : 1 + step + roots]
            merged = drafter.h_proj(drafter.hnorm(streams)) + drafter.e_proj(drafter.enorm(drafter.embed_tokens(following)))[:, :, None]

            def keys(_layer: int, kv: torch.Tensor, step: int = step) -> tuple[torch.Tensor, torch.Tensor | None]:
                if step == 0:
                    first.append(kv)
                    return kv, None
                own.append(kv)
                return first[0], torch.stack(own, 2)

            visible = (apart >= 0) & (apart < self.window - step)
            streams = self.run(merged, following, positions + step, _DenseRows(keys, visible))
            yield self.logits(streams), positions + 1 + step


class BlockTrainer(DraftTrainer):
    def __init__(self, drafter: BlockDrafter, target: DeepseekV4ForCausalLM, length: int) -> None:
        super().__init__(drafter, target, length)
        if drafter.markov_head is not None:
            for parameter in drafter.markov_head.parameters():
                nn.init.normal_(parameter, std=0.1)

    def draft(self, ids: torch.Tensor, after: list[torch.Tensor], anchors: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        drafter: Any = self.drafter
        batch, queries, count = len(ids), drafter.block_queries, drafter.num_tokens
        embeddings = drafter.rotary_emb(after[0], position_ids=self.positions[None], layer_type="main")
        context = drafter.main_norm(drafter.main_proj(mean_streams([after[i] for i in drafter.target_layer_ids])))
        shared = [attention.batch_kv(context, *embeddings) for attention in drafter.attention]
        positions = (anchors[:, None] + torch.arange(queries, device=ids.device)).flatten()
        before = anchors.repeat_interleave(queries)[:, None] - self.positions
        tokens = torch.full((batch, len(anchors), queries), drafter.mask_token_id, dtype=torch.int64, device=ids.device)
        tokens[:, :, 0] = ids[:, anchors]

        def keys(layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            blocks = kv.view(batch, len(anchors), 1, queries, -1).expand(-1, -1, queries, -1, -1)
            return shared[layer], blocks.reshape(batch, len(anchors) * queries, queries, -1)

        streams = drafter.embed_tokens(tokens.flatten(1))[:, :, None].expand(-1, -1, drafter.config.hc_mult, -1).contiguous()
        streams = self.run(streams, tokens.flatten(1), positions, _DenseRows(keys, (before > 0) & (before <= self.window)))
        logits = self.logits(streams).unflatten(1, (len(anchors), queries))[:, :, queries - count :]
        for j in range(count):
            bias = drafter.markov_bias(ids[:, anchors + j])
            yield logits[:, :, j] if bias is None else logits[:, :, j] + bias, anchors + j
