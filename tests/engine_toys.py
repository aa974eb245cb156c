"""A small random DeepSeek-V4 for engine tests, transformers' own decode of it, and engines on copies of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, GenerationConfig

from dsv4_ops.engine.config import EngineConfig
from dsv4_ops.engine.engine import Engine
from dsv4_ops.engine.requests import Completion, Request
from dsv4_ops.engine.scheduler import Scheduled

VOCAB = 512
LAYER_TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"]


def random_model(seed: int = 0, layer_types: Sequence[str] = LAYER_TYPES) -> DeepseekV4ForCausalLM:
    """Weights large enough that greedy output does not repeat; 16 indexer heads, so that no two scores are exactly 0."""
    config = DeepseekV4Config(
        vocab_size=VOCAB, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=len(layer_types), layer_types=list(layer_types),
        num_attention_heads=4, q_lora_rank=64, n_routed_experts=8, num_experts_per_tok=2, num_hash_layers=1, o_groups=2, o_lora_rank=32,
        index_n_heads=16, index_head_dim=64, index_topk=64, max_position_embeddings=8192, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: Any = DeepseekV4ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("position_bias", "sinks", "hc_base", "hc.base")):
            parameter.normal_(0, 0.5)
        elif name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(buffer.shape[0], config.n_routed_experts).topk(buffer.shape[1]).indices)
        elif name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    result: DeepseekV4ForCausalLM = model
    return result


def random_prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def oracle(model: DeepseekV4ForCausalLM, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and logits ``[max_tokens, V]`` of transformers' ``generate``."""
    ids = torch.tensor([prompt])
    options = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    # The mask is given: left to itself, generate masks prompt tokens that happen to equal pad_token_id.
    out: Any = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


class ForcedEngine(Engine):
    """Plain decode that emits the tokens it is told, whatever the logits say: ``forced`` by request index."""

    forced: dict[int, list[int]] | None = None

    def _commit(self, batch: Sequence[Scheduled], ids: torch.Tensor, logits: torch.Tensor) -> list[Completion]:
        for i, part in enumerate(batch):
            if part.samples and self.forced is not None:
                request = part.sequence.request
                ids[i, 0] = self.forced[request.index][len(part.sequence.tokens) - len(request.prompt_ids)]
        return super()._commit(batch, ids, logits)


def make_engine(model: DeepseekV4ForCausalLM, forced: dict[int, list[int]] | None = None, **config: Any) -> Engine:
    """An engine on a copy of ``model`` (an engine replaces the attention modules)."""
    engine = ForcedEngine(copy.deepcopy(model), EngineConfig(**config))
    engine.forced = forced
    return engine


def requests_of(prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], **fields: Any) -> list[Request]:
    counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    return [replace(Request(i, tuple(p), n), **fields) for i, (p, n) in enumerate(zip(prompts, counts, strict=True))]
