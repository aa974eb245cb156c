"""The target model: transformers' ``DeepseekV4ForCausalLM`` with paged attention in the place of its own.

Embedding, hyper-connections, norms, experts, rotary embeddings, projections and head are transformers' modules with their weights;
only ``self_attn`` of each layer is wrapped. The forward is one function of tensors with fixed shapes and no host reads.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DeepseekV4ForCausalLM

from ..errors import ArgumentError, UnsupportedError
from .attention import Geometry, PagedAttention, build_metadata
from .blocks import KVGroup
from .config import KV_DTYPES, EngineConfig
from .norms import keep_type
from .parallel import Ranks
from .step import StepInputs

__all__ = ["Target", "TargetOutput", "geometry_of", "load_model", "target_groups"]


class TargetOutput(NamedTuple):
    """What one step leaves for sampling and for drafters."""

    logits: torch.Tensor
    """float32 ``[L, V]`` of the step's ``logits_rows``."""
    streams: torch.Tensor
    """``[T, hc_mult, D]``: residual streams after the last layer, before ``hc_head``."""
    layer_streams: tuple[torch.Tensor, ...]
    """The same after each layer that was asked for."""


def load_model(model_dir: str | Path, device: str = "cpu") -> DeepseekV4ForCausalLM:
    """The checkpoint in ``model_dir``, for inference.

    Raises ArgumentError for a folder of another model, and when tensors are missing or ill-shaped: transformers would put random ones there.
    """
    kind = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind != "deepseek_v4":
        raise ArgumentError("load_model", "model_dir", "a checkpoint folder whose config.json has model_type deepseek_v4", f"{model_dir} with {kind}")
    load: Any = DeepseekV4ForCausalLM.from_pretrained
    try:
        model, report = load(model_dir, attn_implementation="eager", output_loading_info=True, ignore_mismatched_sizes=True)
    except ImportError as error:
        if error.name is not None:
            raise
        raise UnsupportedError(f"the checkpoint of {model_dir}", [str(error)]) from None  # a quantization that needs what is not here
    except (ValueError, TypeError) as error:
        raise ArgumentError("load_model", "model_dir", "a checkpoint folder that transformers reads", f"{model_dir}: {error}") from None
    problems = [f"no tensor {name}" for name in sorted(report["missing_keys"])]
    problems += [f"{name} has shape {list(got)}, not {list(wanted)}" for name, got, wanted in sorted(report["mismatched_keys"])]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ArgumentError("load_model", "model_dir", "a folder with the tensors of the model that its config.json describes", f"{model_dir}: {shown}")
    loaded: DeepseekV4ForCausalLM = model.to(device).eval().requires_grad_(False)
    keep_type(loaded)
    return loaded


def geometry_of(model_config: Any, config: EngineConfig) -> Geometry:
    """What the attention needs to know of the model. Raises UnsupportedError with everything that does not fit."""
    ratios = {kind: int(model_config.compress_rates[kind]) for kind in dict.fromkeys(model_config.layer_types) if kind != "sliding_attention"}
    unmet = [f"head_dim {model_config.head_dim}: the KV rows hold 512 values"] if model_config.head_dim != 512 else []
    for kind, ratio in ratios.items():
        if config.compressed_block_size % (ratio * config.context_parallel):
            split = f", times context_parallel ({config.context_parallel})" if config.context_parallel > 1 else ""
            unmet.append(f"compressed_block_size {config.compressed_block_size} is not a multiple of {ratio}, the compress ratio of {kind}{split}")
    for name in ("num_attention_heads", "o_groups"):
        if getattr(model_config, name) % config.tensor_parallel:
            unmet.append(f"{name} {getattr(model_config, name)} is not a multiple of tensor_parallel ({config.tensor_parallel})")
    if unmet:
        raise UnsupportedError("The decode engine", unmet)
    # A record of an overlapping (CSA) compressor also reads the window before its own.
    spans = {kind: ratio * (2 if kind == "compressed_sparse_attention" else 1) for kind, ratio in ratios.items()}
    return Geometry(int(model_config.sliding_window), ratios, spans, config.window_block_size, config.compressed_block_size)


def target_groups(geometry: Geometry, config: EngineConfig) -> dict[str, KVGroup]:
    """The window and the compressed group, large enough for ``max_num_seqs`` full requests where their size is left out."""
    keep = max([geometry.window, *geometry.spans.values()]) - 1
    sizes = {"window": (config.window_block_size, keep, config.num_window_blocks), "compressed": (config.compressed_block_size, None, config.num_compressed_blocks)}

    def group(name: str, block_size: int, keep: int | None, blocks: int | None) -> KVGroup:
        each = KVGroup.blocks_for(config.max_model_len, block_size, keep, config.max_num_batched_tokens)
        return KVGroup(name, block_size, blocks or 1 + config.max_num_seqs * each, keep)

    return {name: group(name, *size) for name, size in sizes.items()}


def _with_own_layers(model: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    """The same weights and modules in layers of their own, so that other users of ``model`` keep their attention."""

    def shallow(module: Any) -> Any:
        clone = copy.copy(module)
        clone._modules = dict(module._modules)
        return clone

    clone: Any = shallow(model)
    clone.model = shallow(model.model)
    clone.model.layers = nn.ModuleList(shallow(layer) for layer in model.model.layers)
    result: DeepseekV4ForCausalLM = clone
    return result


class Target(nn.Module):
    """The model and its KV pages. ``aux_layers``: after which layers the streams are returned for a drafter."""

    def __init__(self, model: DeepseekV4ForCausalLM, geometry: Geometry, config: EngineConfig, groups: dict[str, KVGroup], aux_layers: Sequence[int] = ()) -> None:
        super().__init__()
        self.model, self.geometry, self.aux_layers = _with_own_layers(model), geometry, tuple(aux_layers)
        # The default form of the experts loops over those that were hit, which it reads on the host; this one has fixed shapes.
        model.config._experts_implementation = "batched_mm"
        self.ranks = ranks = Ranks(config)
        for layer in self.model.model.layers:
            pools = groups["window"].pool.num_blocks, groups["compressed"].pool.num_blocks
            layer.self_attn = PagedAttention(ranks.part(layer.self_attn), ranks.local(geometry), *pools, KV_DTYPES[config.kv_dtype], ranks.attend, ranks.choose)

    def forward(self, step: StepInputs) -> TargetOutput:
        model = self.model.model
        metadata = self.ranks.share(build_metadata(step, self.geometry))
        input_ids, position_ids = step.input_ids[None], step.positions[None]
        embedded = model.embed_tokens(input_ids)
        embeddings = {kind: model.rotary_emb(embedded, position_ids=position_ids, layer_type=kind) for kind in ("main", "compress")}
        streams = embedded.unsqueeze(2).expand(-1, -1, model.config.hc_mult, -1).contiguous()
        aux = {}
        for i, layer in enumerate(model.layers):
            streams = layer(streams, input_ids=input_ids, position_embeddings=embeddings, position_ids=position_ids, attention_mask=None, metadata=metadata)
            if i in self.aux_layers:
                aux[i] = streams[0]
        hidden = model.norm(model.hc_head(streams))[0]
        logits = self.model.lm_head(hidden[step.logits_rows]).float()
        return TargetOutput(logits, streams[0], tuple(aux[i] for i in self.aux_layers))

    def kv_bytes(self) -> int:
        """Bytes of all KV pages, records and states."""
        return sum(buffer.numel() * buffer.element_size() for layer in self.model.model.layers for name, buffer in layer.self_attn.named_buffers() if not name.startswith("inner."))
