"""Drafters on a DeepSeek-V4 target: the MTP module and the DSpark / DFlash block drafter.

Blocks, experts, hyper-connections, norms, rotary embedding and projections are transformers' own modules; attention
reads and writes paged draft KV through the ops of this package. A draft step is a function of tensors (flat tokens,
positions, slots, index rows): nothing is read back to the host, so it runs under ``torch.compile(fullgraph=True)``.

``MTPDrafter``     one block, run once over the target's tokens and then once for each further draft token:
                   ``h_proj(hnorm(streams)) + e_proj(enorm(embed(next id)))`` -> block -> ``hc_head`` -> ``norm`` -> the
                   target's head. Its own output streams are the input of the next draft step.
``BlockDrafter``   several blocks, run once for a whole block of tokens. Context KV comes from the target:
                   ``main_norm(main_proj(concat of the mean streams after each target layer of target_layer_ids))`` goes
                   through ``kv_proj``, ``kv_norm`` and rotary of *every* draft layer into the context slots. The queries
                   are the anchor and mask tokens, they see the window of the context and the whole block (both ways),
                   and a low-rank Markov head adds a bias from the previous draft token: only this is sequential.

Where the tensors of a published checkpoint go (``i`` is the draft block; ``L`` the last one). Embedding and head are the
target's, no ``mtp.*`` copy exists; no draft block has a compressor or an indexer.

==========================================  =====================================================================
published name                              here
==========================================  =====================================================================
mtp.0.enorm, hnorm, e_proj, h_proj          same names (MTP only)
mtp.0.main_proj, main_norm                  same names (DSpark only; main_proj ``[D, D * len(target_layer_ids)]``)
mtp.i.attn_norm, ffn_norm                   layers.i.input_layernorm, post_attention_layernorm
mtp.i.attn.wq_a, q_norm, wq_b               layers.i.self_attn.q_a_proj, q_a_norm, q_b_proj
mtp.i.attn.wkv, kv_norm, attn_sink          layers.i.self_attn.kv_proj, kv_norm, sinks
mtp.i.attn.wo_a, wo_b                       layers.i.self_attn.o_a_proj, o_b_proj
mtp.i.ffn.gate.weight, gate.bias            layers.i.mlp.gate.weight, gate.e_score_correction_bias
mtp.i.ffn.experts.j.w1, w3, w2              layers.i.mlp.experts.gate_up_proj[j] (w1 then w3), down_proj[j]
mtp.i.ffn.shared_experts.w1, w2, w3         layers.i.mlp.shared_experts.gate_proj, down_proj, up_proj
mtp.i.hc_attn_fn/base/scale, hc_ffn_...     layers.i.attn_hc.fn/base/scale, ffn_hc....
mtp.L.hc_head_fn/base/scale, mtp.L.norm     hc_head.hc_fn/hc_base/hc_scale, norm
mtp.L.markov_head.markov_w1, markov_w2      same names (newer checkpoints say markov_head.embed, markov_head.head)
mtp.L.confidence_head.proj                  not loaded: this engine always verifies the whole block
==========================================  =====================================================================

Fields of config.json: ``num_nextn_predict_layers`` (MTP: 1), and for block drafters ``dspark_block_size`` (N),
``dspark_target_layer_ids``, ``dspark_noise_token_id`` (the mask token), ``dspark_markov_rank`` (0 or absent: no Markov
head), ``n_mtp_layers`` (draft blocks; else as many ``mtp.i`` as the file holds), optionally ``dspark_n_routed_experts``
and ``dspark_n_activated_experts``. A folder holds one drafter under ``mtp.*``; more of them lie in folders ``mtp``,
``dspark`` and ``dflash`` inside it, each with its own config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4PreTrainedModel,
    DeepseekV4RMSNorm,
    apply_rotary_pos_emb,
)

from ..errors import ArgumentError, UnsupportedError
from ..kv_cache import kv_cache_insert
from ..sampling import STREAM_DRAFT, gumbel_sample
from ..sparse_decode import sparse_mla_decode
from ..swa_indices import causal_swa_indices, decode_swa_width, draft_swa_indices, swa_index_width
from .norms import keep_type

__all__ = [
    "BlockDrafter",
    "BlockInputs",
    "DraftRows",
    "Drafter",
    "MTPDrafter",
    "MTPInputs",
    "Proposal",
    "load_drafter",
    "mean_streams",
    "next_token_ids",
    "published_block_name",
    "published_tensors",
    "split_experts",
]

KINDS = ("mtp", "dspark", "dflash")


class DraftRows(NamedTuple):
    """What the attention of one draft forward of T rows reads and writes."""

    caches: tuple[torch.Tensor, ...]
    """KV cache of each draft layer."""
    slots: torch.Tensor
    """int64 ``[T]``: where each row's KV goes, -1 for nowhere."""
    indices: torch.Tensor
    """int32 ``[T, width]`` slots that each row sees, and their lengths int32 ``[T]``."""
    lens: torch.Tensor


class Proposal(NamedTuple):
    """Draft tokens of R requests. An id is -1 (always rejected) where no token may be drafted."""

    token_ids: torch.Tensor
    """int64 ``[R, N]``"""
    logits: torch.Tensor
    """float32 ``[R, N, V]``, before the temperature: the q of rejection sampling."""


class MTPInputs(NamedTuple):
    """What the target's step left for the MTP drafter: T rows, R requests, both padded as the engine likes."""

    input_ids: torch.Tensor
    """int64 ``[T]``: the token *after* each row (:func:`next_token_ids`)."""
    positions: torch.Tensor
    """int64 ``[T]``"""
    streams: torch.Tensor
    """``[T, hc_mult, D]``: the target's residual streams after its last layer, before its ``hc_head``."""
    token_to_req_indices: torch.Tensor
    """int32 ``[T]``"""
    is_valid_token: torch.Tensor
    """bool ``[T]``: false for padding rows and for rows of rejected tokens."""
    last_index: torch.Tensor
    """int64 ``[R]``: row of each request's last kept token."""
    idx_mapping: torch.Tensor
    """int32 ``[R]``: row of ``temperature`` and ``seeds`` of each request; -1 where nothing is drafted (padding, unfinished prefill)."""
    block_table: torch.Tensor
    """int32 ``[R, blocks]`` of the draft's pages."""
    temperature: torch.Tensor
    """float32 ``[max_reqs]``"""
    seeds: torch.Tensor
    """int64 ``[max_reqs]``"""


class BlockInputs(NamedTuple):
    """Inputs of a block draft step: the target's hidden states and what ``prepare_dflash_inputs`` wrote.

    M is ``max_reqs`` there, so there are M * Q query rows (rows past them are not looked at).
    """

    aux_hidden: torch.Tensor
    """``[T, D * len(target_layer_ids)]``: :func:`mean_streams` of the target's step."""
    context_positions: torch.Tensor
    """int64 ``[T]``"""
    context_slots: torch.Tensor
    """int64 ``[T]`` of the draft's KV group; -1 for rejected and padding rows."""
    input_ids: torch.Tensor
    positions: torch.Tensor
    is_padding: torch.Tensor
    query_slots: torch.Tensor
    """``[>= M * Q]`` each: ids, positions int64, bool, int64 slots of the draft's KV group."""
    sample_indices: torch.Tensor
    sample_pos: torch.Tensor
    sample_idx_mapping: torch.Tensor
    """``[M * N]`` each: query row, position of the predicted token, request state (-1: none)."""
    block_table: torch.Tensor
    """int32 ``[M, blocks]`` of the draft's pages."""
    temperature: torch.Tensor
    seeds: torch.Tensor
    """By request state."""
    draft_start: torch.Tensor | None = None
    """int32 ``[M]``: first position that has draft KV, where that is not 0."""
    swa_indices: torch.Tensor | None = None
    swa_lens: torch.Tensor | None = None
    """int32 ``[>= M * Q, width]`` and ``[>= M * Q]``: window rows of the queries (``prepare_draft_step``); made from the others where None."""


class _DraftAttention(nn.Module):
    """Sliding-window attention of a draft block on paged KV, around transformers' projections and norms."""

    def __init__(self, inner: DeepseekV4Attention) -> None:
        super().__init__()
        self.inner = inner

    def context_kv(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The KV rows ``[T, 512]`` of ``hidden_states`` ``[1, T, D]``."""
        kv = self.inner.kv_norm(self.inner.kv_proj(hidden_states))
        return apply_rotary_pos_emb(kv[:, None], cos, sin)[0, 0]

    def forward(self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], draft_rows: DraftRows, **_: Any) -> tuple[torch.Tensor, None]:
        inner, (cos, sin) = self.inner, position_embeddings
        tokens = hidden_states.shape[1]
        cache = draft_rows.caches[inner.layer_idx]
        q = inner.q_b_proj(inner.q_a_norm(inner.q_a_proj(hidden_states))).view(1, tokens, inner.num_heads, inner.head_dim)
        q = apply_rotary_pos_emb(inner.q_b_norm(q), cos, sin, unsqueeze_dim=2)[0]
        kv_cache_insert(self.context_kv(hidden_states, cos, sin), cache, draft_rows.slots)
        out, _lse = sparse_mla_decode(q, cache, draft_rows.indices, draft_rows.lens, attn_sink=inner.sinks.detach(), scale=inner.scaling)
        # Keys are the values, so the values carry rotary too: turn it back at the query's position.
        out = apply_rotary_pos_emb(out[None], cos, -sin, unsqueeze_dim=2)
        grouped = inner.o_a_proj(out.reshape(1, tokens, inner.config.o_groups, -1)).flatten(2)
        return inner.o_b_proj(grouped), None


class Drafter(nn.Module):
    """What both drafters share: the target's embedding, head and rotary, draft blocks, ``hc_head`` and ``norm``."""

    kind: str
    shared = ("embed_tokens.", "lm_head.", "rotary_emb.")

    def __init__(self, config: DeepseekV4Config, target: DeepseekV4ForCausalLM, num_layers: int) -> None:
        super().__init__()
        self.config = _draft_config(config, num_layers)
        self.num_layers = num_layers
        self.window = int(config.sliding_window)
        self.vocab_size = int(config.vocab_size)
        self.embed_tokens, self.lm_head, self.rotary_emb = target.model.embed_tokens, target.lm_head, target.model.rotary_emb
        blocks = [DeepseekV4DecoderLayer(self.config, i) for i in range(num_layers)]
        self.attention = [_DraftAttention(block.self_attn) for block in blocks]
        for block, attention in zip(blocks, self.attention, strict=True):
            block.add_module("self_attn", attention)
        self.layers = nn.ModuleList(blocks)
        self.hc_head = DeepseekV4HyperHead(self.config)
        self.norm = DeepseekV4RMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary_emb(self.embed_tokens.weight, position_ids=positions[None], layer_type="main")
        return cos, sin

    def run_layers(self, streams: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor, rows: DraftRows) -> torch.Tensor:
        """All draft blocks over T rows: streams ``[T, hc_mult, D]`` in and out."""
        streams, embeddings = streams[None], self.rotary(positions)
        for layer in self.layers:
            streams = layer(streams, input_ids=input_ids[None], position_embeddings=embeddings, draft_rows=rows)
        return streams[0]

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """float32 ``[T, V]`` of streams ``[T, hc_mult, D]``."""
        logits: torch.Tensor = self.lm_head(self.norm(self.hc_head(streams[None]))[0])
        return logits.float()


class MTPDrafter(Drafter):
    """Multi-token prediction: one block, reused for each draft token."""

    kind = "mtp"

    def __init__(self, config: DeepseekV4Config, target: DeepseekV4ForCausalLM) -> None:
        super().__init__(config, target, 1)
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV4RMSNorm(hidden, eps=eps), DeepseekV4RMSNorm(hidden, eps=eps)
        self.e_proj, self.h_proj = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.width = decode_swa_width(self.window)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, streams: torch.Tensor, rows: DraftRows) -> torch.Tensor:
        """Streams ``[T, hc_mult, D]`` that predict the token after ``input_ids`` (itself the one after each row)."""
        merged = self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(self.embed_tokens(input_ids)))[:, None]
        return self.run_layers(merged, input_ids, positions, rows)

    def propose(self, inputs: MTPInputs, caches: tuple[torch.Tensor, ...], *, num_tokens: int, block_size: int, max_model_len: int) -> Proposal:
        """``num_tokens`` draft tokens of every request. Writes draft KV of the target's rows and of all but the last draft token."""
        table = inputs.block_table

        def rows(positions: torch.Tensor, requests: torch.Tensor, valid: torch.Tensor) -> DraftRows:
            indices, lens = causal_swa_indices(positions, requests, valid, table, block_size=block_size, window=self.window, width=self.width)
            own = indices.gather(1, (lens - 1).clamp(min=0).to(torch.int64)[:, None])[:, 0]  # a row ends with its own slot; it is -1 where it has none
            return DraftRows(caches, own.to(torch.int64), indices, lens)

        streams = self(inputs.input_ids, inputs.positions, inputs.streams, rows(inputs.positions, inputs.token_to_req_indices, inputs.is_valid_token))
        streams, positions = streams[inputs.last_index], inputs.positions[inputs.last_index]
        requests = torch.arange(table.shape[0], dtype=torch.int32, device=table.device)
        ids: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        for step in range(num_tokens):
            if step:
                positions = positions + 1
                drafted = ids[-1] >= 0
                streams = self(ids[-1].clamp(min=0), positions, streams, rows(positions, requests, drafted))
            scores.append(self.logits(streams))
            # A row at p holds the token of p + 1, so what it predicts stands at p + 2.
            drawn = positions + 2
            mapping = torch.where(drawn < max_model_len, inputs.idx_mapping, -1)
            ids.append(_sample(scores[-1], mapping, inputs.temperature, inputs.seeds, drawn))
        return Proposal(torch.stack(ids, 1), torch.stack(scores, 1))


class BlockDrafter(Drafter):
    """DSpark (``sample_from_anchor``: N queries, each predicts the next position) and DFlash (1 + N, the masks sampled)."""

    def __init__(self, config: DeepseekV4Config, target: DeepseekV4ForCausalLM, kind: str, num_layers: int) -> None:
        super().__init__(config, target, num_layers)
        self.kind = kind
        self.sample_from_anchor = kind == "dspark"
        self.num_tokens = int(config.dspark_block_size)
        self.block_queries = self.num_tokens if self.sample_from_anchor else 1 + self.num_tokens
        self.mask_token_id = int(config.dspark_noise_token_id)
        self.target_layer_ids = tuple(int(i) for i in config.dspark_target_layer_ids)
        self.width = swa_index_width(self.window, self.block_queries)
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.main_proj = nn.Linear(hidden * len(self.target_layer_ids), hidden, bias=False)
        self.main_norm = DeepseekV4RMSNorm(hidden, eps=eps)
        rank = int(getattr(config, "dspark_markov_rank", 0) or 0)
        self.markov_head = nn.ModuleDict({"markov_w1": nn.Embedding(self.vocab_size, rank), "markov_w2": nn.Linear(rank, self.vocab_size, bias=False)}) if rank else None

    def insert_context(self, aux_hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, caches: tuple[torch.Tensor, ...]) -> None:
        """Write the KV of the target's rows into every draft layer's cache, at ``slots``."""
        context, (cos, sin) = self.main_norm(self.main_proj(aux_hidden))[None], self.rotary(positions)
        for attention, cache in zip(self.attention, caches, strict=True):
            kv_cache_insert(attention.context_kv(context, cos, sin), cache, slots)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, rows: DraftRows) -> torch.Tensor:
        """Streams ``[T, hc_mult, D]`` of the block's queries."""
        streams = self.embed_tokens(input_ids)[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        return self.run_layers(streams, input_ids, positions, rows)

    def markov_bias(self, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """float32 ``[R, V]``: what the previous token adds to the next one's logits."""
        if self.markov_head is None:
            return None
        bias: torch.Tensor = self.markov_head["markov_w2"](self.markov_head["markov_w1"](previous_ids))
        return bias.float()

    def propose(self, inputs: BlockInputs, caches: tuple[torch.Tensor, ...], *, num_tokens: int, block_size: int, max_model_len: int) -> Proposal:
        """``num_tokens`` (= N of the inputs) draft tokens of every request, by one pass of the draft blocks."""
        queries = num_tokens if self.sample_from_anchor else 1 + num_tokens
        requests = inputs.block_table.shape[0]
        rows = requests * queries
        self.insert_context(inputs.aux_hidden, inputs.context_positions, inputs.context_slots, caches)
        ids, positions = inputs.input_ids[:rows].to(torch.int64), inputs.positions[:rows]
        if inputs.swa_indices is None or inputs.swa_lens is None:
            first = positions.view(requests, queries)[:, 0]
            is_valid_req = ~inputs.is_padding[:rows].view(requests, queries)[:, 0]
            indices, lens = draft_swa_indices(
                first.to(torch.int32), inputs.block_table, is_valid_req, block_size=block_size, window=self.window, block_queries=queries,
                width=swa_index_width(self.window, queries), draft_start=inputs.draft_start, max_model_len=max_model_len,
            )  # fmt: skip
        else:
            indices, lens = inputs.swa_indices[:rows], inputs.swa_lens[:rows]
        streams = self(ids, positions, DraftRows(caches, inputs.query_slots[:rows], indices, lens))
        base = self.logits(streams[inputs.sample_indices]).view(requests, num_tokens, -1)
        drawn = inputs.sample_pos.view(requests, num_tokens)
        # With anchor sampling the last query inside the limit predicts a token outside it.
        mapping = torch.where(drawn < max_model_len, inputs.sample_idx_mapping.view(requests, num_tokens), -1)
        previous, tokens, scores = ids.view(requests, queries)[:, 0], [], []
        for j in range(num_tokens):
            bias = self.markov_bias(previous)
            scores.append(base[:, j] if bias is None else base[:, j] + bias)
            tokens.append(_sample(scores[-1], mapping[:, j], inputs.temperature, inputs.seeds, drawn[:, j]))
            previous = tokens[-1].clamp(min=0)
        return Proposal(torch.stack(tokens, 1), torch.stack(scores, 1))


def mean_streams(layer_outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """``aux_hidden`` ``[T, D * n]`` from the streams ``[T, hc_mult, D]`` after each of the n target layers."""
    return torch.cat([streams.mean(dim=-2) for streams in layer_outputs], dim=-1)


def next_token_ids(input_ids: torch.Tensor, last_index: torch.Tensor, anchors: torch.Tensor, is_valid_req: torch.Tensor) -> torch.Tensor:
    """The token after each of the T rows of a target step, int64 ``[T]``: the next row's, and ``anchors`` ``[R]`` (the newly
    sampled token, or the next prompt token of an unfinished prefill) at ``last_index``, the row of each request's last kept token."""
    tokens = input_ids.shape[0]
    shifted = torch.cat([input_ids[1:].to(torch.int64), input_ids.new_zeros(2, dtype=torch.int64)])
    # Requests of no interest write to the spare last element.
    return shifted.scatter(0, torch.where(is_valid_req, last_index, tokens), anchors.to(torch.int64))[:tokens]


def _sample(logits: torch.Tensor, mapping: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One draft token a row, int64, from the draft's noise stream; -1 where the mapping is -1."""
    ids = gumbel_sample(logits, temperature, seeds, positions, mapping, STREAM_DRAFT)
    return torch.where(mapping >= 0, ids, -1)


def _draft_config(config: DeepseekV4Config, num_layers: int) -> DeepseekV4Config:
    """The target's config for draft blocks: no compressor, score-routed experts, of their own number if the checkpoint says so."""
    fields = {key: value for key, value in config.to_dict().items() if not key.startswith("dspark_")}
    fields.update(num_hidden_layers=num_layers, layer_types=["sliding_attention"] * num_layers, mlp_layer_types=["moe"] * num_layers)
    for name, ours in (("dspark_n_routed_experts", "n_routed_experts"), ("dspark_n_activated_experts", "num_experts_per_tok")):
        if getattr(config, name, None):
            fields[ours] = getattr(config, name)
    draft = DeepseekV4Config.from_dict(fields)
    # The per-expert loop of the default form reads expert hits on the host; this form has fixed shapes.
    draft._experts_implementation = "batched_mm"
    return draft


# Checkpoints: names here -> published names, used both ways.

_BLOCK_NAMES = [
    ("self_attn.", "attn."),
    ("q_a_proj", "wq_a"),
    ("q_b_proj", "wq_b"),
    ("q_a_norm", "q_norm"),
    ("attn.kv_proj", "attn.wkv"),
    ("o_a_proj", "wo_a"),
    ("o_b_proj", "wo_b"),
    ("sinks", "attn_sink"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attn_norm"),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("mlp.", "ffn."),
    ("e_score_correction_bias", "bias"),
    ("shared_experts.gate_proj", "shared_experts.w1"),
    ("shared_experts.down_proj", "shared_experts.w2"),
    ("shared_experts.up_proj", "shared_experts.w3"),
]
_FIRST_STAGE = ("enorm", "hnorm", "e_proj", "h_proj", "main_proj", "main_norm")
_UNUSED = re.compile(r"mtp\.\d+\.(confidence_head\.|embed\.|head\.|emb\.tok_emb\.)")
"""Tensors without a place here: the confidence head, and copies of the target's embedding and head that some checkpoints carry."""


def published_block_name(name: str) -> str:
    """Published name of a tensor of one decoder block (without the block's prefix)."""
    for ours, published in _BLOCK_NAMES:
        name = name.replace(ours, published)
    return name


def split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A stacked experts tensor as one published tensor an expert and matrix; any other tensor as it is. ``name`` is published."""
    prefix, _, leaf = name.rpartition(".experts.")
    if leaf == "gate_up_proj":
        halves = {"1": tensor.chunk(2, dim=1)[0], "3": tensor.chunk(2, dim=1)[1]}
    elif leaf == "down_proj":
        halves = {"2": tensor}
    else:
        return {name: tensor}
    return {f"{prefix}.experts.{j}.w{w}.weight": half[j] for j in range(tensor.shape[0]) for w, half in halves.items()}


def published_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    """The drafter's own tensors (views of them) under their published ``mtp.*`` names: what :func:`load_drafter` fills."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith(drafter.shared):
            continue
        if name.startswith("layers."):
            _, stage, rest = name.split(".", 2)
            published = published_block_name(rest.replace("self_attn.inner.", "self_attn."))
        else:
            stage = "0" if name.startswith(_FIRST_STAGE) else str(drafter.num_layers - 1)
            published = name.replace("hc_head.hc_", "hc_head_")
        result.update(split_experts(f"mtp.{stage}.{published}", tensor))
    return result


def load_drafter(model_dir: str | Path, target: DeepseekV4ForCausalLM, kind: str) -> Drafter:
    """The drafter of ``kind`` ("mtp", "dspark" or "dflash") that a checkpoint folder holds, on the target's device and dtype.

    Looks in ``model_dir/kind`` when that folder exists, else in ``model_dir``. Raises ArgumentError (unknown kind, folder
    without this drafter, missing, unexpected or ill-shaped tensors, all named) and UnsupportedError (quantized tensors,
    more than one MTP module).
    """
    if kind not in KINDS:
        raise ArgumentError("load_drafter", "kind", "one of " + ", ".join(map(repr, KINDS)), repr(kind))
    folder = Path(model_dir)
    folder = folder / kind if (folder / kind / "config.json").is_file() else folder
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    published = _read_mtp(folder)
    needed: tuple[str, ...]
    if kind == "mtp":
        marker, needed = "mtp.0.e_proj.weight", ()
    else:
        marker, needed = "mtp.0.main_proj.weight", ("dspark_block_size", "dspark_target_layer_ids", "dspark_noise_token_id")
    missing = [f"tensor {marker}"] * (marker not in published) + [f"config field {name}" for name in needed if name not in fields]
    if missing:
        raise ArgumentError("load_drafter", "model_dir", f"a checkpoint folder with a {kind} drafter", f"{folder} without {', '.join(missing)}", "make-tiny writes one with all drafters.")
    if kind != "mtp":
        _check_block_fields(fields, folder, target.config)
    if quantized := [name for name in published if name.endswith((".scale", ".weight_scale", ".weight_scale_inv"))]:
        raise UnsupportedError(f"the {kind} drafter of {folder}", [f"tensor {quantized[0]} and {len(quantized) - 1} more belong to a quantized drafter: dequantize the mtp.* tensors to bfloat16 first"])
    stages: int = 1 + max(int(name.split(".")[1]) for name in published)
    config = DeepseekV4Config.from_dict(fields)
    drafter: Drafter
    if kind == "mtp":
        if stages > 1:
            raise UnsupportedError(f"the MTP drafter of {folder}", [f"{stages} MTP modules: one module that is reused for every draft token is served"])
        drafter = MTPDrafter(config, target)
    else:
        drafter = BlockDrafter(config, target, kind, int(fields.get("n_mtp_layers") or stages))
    _fill(drafter, published, str(folder))
    reference = target.lm_head.weight
    for name, parameter in [*drafter.named_parameters(), *drafter.named_buffers()]:
        if not name.startswith(drafter.shared):
            parameter.data = parameter.data.to(reference.device, torch.float32 if _keeps_fp32(name) else reference.dtype)
    keep_type(drafter)
    return drafter.requires_grad_(False).eval()


def _check_block_fields(fields: Mapping[str, Any], folder: Path, target: DeepseekV4Config) -> None:
    """Raise ArgumentError for a value of config.json that no block drafter can have."""
    vocab, layers, ids = target.vocab_size, target.num_hidden_layers, fields["dspark_target_layer_ids"]

    def fits(value: object, low: int, high: int) -> bool:
        return isinstance(value, int) and low <= value < high

    checks = {
        "dspark_block_size": (fits(fields["dspark_block_size"], 1, 2**31), "a positive integer"),
        "dspark_noise_token_id": (fits(fields["dspark_noise_token_id"], 0, vocab), f"a token id below {vocab}"),
        "dspark_target_layer_ids": (isinstance(ids, list) and bool(ids) and all(fits(i, 0, layers) for i in ids), f"a list of layers below {layers}"),
    }
    for name, (ok, expected) in checks.items():
        if not ok:
            raise ArgumentError("load_drafter", name, f"{expected} (in {folder / 'config.json'})", fields[name])


def _read_mtp(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError):
            raise ArgumentError("load_drafter", "model_dir", "a folder whose index of tensors has a weight_map", index) from None
        files = [folder / name for name in sorted({file for key, file in weight_map.items() if key.startswith("mtp.")})]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as reader:
            tensors.update({_newer_names(name): reader.get_tensor(name) for name in reader.keys() if name.startswith("mtp.")})  # noqa: SIM118
    return tensors


def _newer_names(name: str) -> str:
    return name.replace(".markov_head.embed.", ".markov_head.markov_w1.").replace(".markov_head.head.", ".markov_head.markov_w2.")


def _fill(drafter: Drafter, published: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy the tensors of a file into the drafter; every one must have its place and every place its tensor."""
    own = published_tensors(drafter)
    problems = [f"no place for {name}" for name in sorted(published.keys() - own.keys()) if not _UNUSED.match(name)]
    problems += [f"no tensor {name}" for name in sorted(own.keys() - published.keys())]
    problems += [
        f"{name} has shape {list(published[name].shape)}, not {list(own[name].shape)}" for name in sorted(own.keys() & published.keys()) if published[name].shape != own[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ArgumentError("load_drafter", "model_dir", f"a folder with the tensors of this {drafter.kind} drafter", f"{source}: {shown}")
    with torch.no_grad():
        for name, place in own.items():
            place.copy_(published[name])


def _keeps_fp32(name: str) -> bool:
    strict = set(DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict or ())
    return any(part in strict or part.endswith("norm") for part in name.split("."))
