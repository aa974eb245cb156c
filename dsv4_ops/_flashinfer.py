"""FlashInfer's DeepSeek-V4 decode as a back end of ``sparse_mla_decode``. Nobody here has run it on a GPU.

====================  ==============================================================  ==================================================
architecture          function of FlashInfer                                          what it takes
====================  ==============================================================  ==================================================
sm_100, sm_103        ``trtllm_batch_decode_sparse_mla_dsv4``                         query and caches in bfloat16; one table: window
                                                                                      in the first 128 columns, the rest behind them
sm_120, sm_121        ``sparse_mla_sm120_decode_dsv4``                                FP8 pages of 584 bytes a token, the two segments
                                                                                      apart, at most 64 tokens a launch
====================  ==============================================================  ==================================================

Rows are those of ``sparse_key_rows`` without holes: no -1 stands before a length, no length is a width, and the slots of padded pages
are rewritten once, there. Heads are padded to 8, 16, 32, 64 or 128.

On sm_100 each token is a request of its own, with the number of its window keys as sequence length, so that just those columns are taken as
keys. Window entries past 128 (a draft block) run on behind them and are read from the second cache, which then is the same one. That
function gives no log-sum-exp: ``lse`` is NaN there. On sm_120 the sink is applied here, because FlashInfer's log-sum-exp contains it.

**Batch invariance is not promised**: FlashInfer chooses its splits by the number of tokens.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from .capability import pad_heads
from .key_rows import sparse_key_rows
from .kv_cache import HEAD_DIM
from .slot_layouts import page_block_span
from .workspace import workspace_manager

__all__ = ["HEADS", "SM100", "SM100_ARCHS", "SM120", "WINDOW", "sm100_arguments", "sm120_arguments", "sparse_mla_decode"]

Segments = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

HEADS = (8, 16, 32, 64, 128)
WINDOW = 128
SM100_ARCHS = ((10, 0), (10, 3))
SM100_SCRATCH = 128 << 20
SM120_TOKENS = 64
_SM120_ARGUMENTS = ("q", "kv_cache", "indices", "mid_out", "mid_lse", "output", "out_lse", "sm_scale", "topk_length", "extra_kv_cache", "extra_indices", "extra_topk_length", "lse_scale")
_SM100_ARGUMENTS = ("query", "swa_kv_cache", "workspace_buffer", "sparse_indices", "compressed_kv_cache", "sparse_topk_lens", "seq_lens", "out", "bmm1_scale", "sinks", "kv_layout", "backend")
SM120 = ("mla._sparse_mla_sm120", "sparse_mla_sm120_decode_dsv4", frozenset(_SM120_ARGUMENTS))
# The counters of its split kernels lie apart from the workspace since it takes this argument: before, scratch had to come zeroed.
SM100 = ("mla", "trtllm_batch_decode_sparse_mla_dsv4", frozenset([*_SM100_ARGUMENTS, "sparse_indices_are_storage_offsets", "multi_ctas_kv_counter_buffer"]))
"""Module, function, and the arguments that it is called with."""


def sparse_mla_decode(q: torch.Tensor, segments: Segments, attn_sink: torch.Tensor | None, scale: float, lane: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the op of that name. ``segments`` are one or two of (cache, indices, lens); the call has passed the gate."""
    segments = [s for s in segments if s[0].shape[0] and s[1].shape[1]]
    tokens, heads, _ = q.shape
    if not segments or 0 in (tokens, heads):
        return torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_full((tokens, heads), float("-inf"), dtype=torch.float32)
    run = _sm100 if torch.cuda.get_device_capability(q.device) in SM100_ARCHS else _sm120
    sink = None if attn_sink is None else attn_sink.to(torch.float32)
    padded = pad_heads(heads, HEADS) or heads
    with torch.cuda.device(q.device):
        out, lse = run(_padded(q, padded), segments, None if sink is None else torch.nn.functional.pad(sink, (0, padded - heads)), scale, lane)
    return out[:, :heads].contiguous(), lse[:, :heads].contiguous()


def _padded(q: torch.Tensor, heads: int) -> torch.Tensor:
    if q.shape[1] == heads:
        return q.contiguous()
    query = q.new_zeros((q.shape[0], heads, HEAD_DIM))
    query[:, : q.shape[1]] = q
    return query


def _function(spec: tuple[str, str, frozenset[str]]) -> Any:
    return getattr(importlib.import_module(f"flashinfer.{spec[0]}"), spec[1])


def _slots(cache: torch.Tensor) -> int:
    return int(cache.shape[0] * cache.shape[1])


# ---- sm_120, sm_121 --------------------------------------------------------------------------------------------------


def sm120_arguments(q: torch.Tensor, segments: Segments, scale: float, scratch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Keyword arguments of FlashInfer's function for at most 64 tokens, ``output`` and ``out_lse`` among them. ``scratch``: of ``sm120_scratch``."""
    (cache, indices, lens), *more = segments
    width, extra = indices.shape[1], [tensor for _, i, n in more for tensor in (i, n)]
    extra_width = sum(i.shape[1] for _, i, _ in more)
    rows, counts, extra_counts = sparse_key_rows(
        indices, lens, *extra, swa_slots=_slots(cache), extra_slots=sum(_slots(c) for c, _, _ in more), swa_columns=width, extra_columns=extra_width, drop_holes=True
    )
    arguments = {
        "q": q, "kv_cache": cache.flatten(1, -2), "indices": rows[:, :width], "mid_out": scratch[0], "mid_lse": scratch[1], "output": torch.empty_like(q),
        "out_lse": q.new_empty(q.shape[:2], dtype=torch.float32), "sm_scale": scale, "topk_length": counts, "lse_scale": math.log(2),
    }  # fmt: skip
    if more:
        arguments |= {"extra_kv_cache": more[0][0].flatten(1, -2), "extra_indices": rows[:, width:], "extra_topk_length": extra_counts}
    return arguments


def sm120_scratch(tokens: int, heads: int, widths: Sequence[int]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes of FlashInfer's partial results: one for each 64 columns of a segment; heads in sixteens but for 8."""
    parts = (tokens, 8 if heads == 8 else -(-heads // 16) * 16, sum(-(-width // 64) for width in widths))
    return ((*parts, HEAD_DIM), torch.bfloat16), (parts, torch.float32)


def _sm120(q: torch.Tensor, segments: Segments, sink: torch.Tensor | None, scale: float, lane: int) -> tuple[torch.Tensor, torch.Tensor]:
    function, outs, lses = _function(SM120), [], []
    for first in range(0, q.shape[0], SM120_TOKENS):
        part = slice(first, first + SM120_TOKENS)
        query, sliced = q[part], [(cache, indices[part], lens[part]) for cache, indices, lens in segments]
        mid_out, mid_lse = workspace_manager(q.device).get(*sm120_scratch(query.shape[0], q.shape[1], [i.shape[1] for _, i, _ in segments]), lane=lane, op="sparse_mla_decode")
        arguments = sm120_arguments(query, sliced, scale, (mid_out, mid_lse))
        function(**arguments)
        outs.append(arguments["output"])
        lses.append(arguments["out_lse"])
    out, lse = torch.cat(outs), torch.cat(lses)
    if sink is not None:
        out = (out.float() * torch.sigmoid(lse - sink)[..., None]).to(q.dtype)
    return out, lse


# ---- sm_100, sm_103 --------------------------------------------------------------------------------------------------


def sm100_arguments(q: torch.Tensor, segments: Segments, sink: torch.Tensor | None, scale: float, scratch: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of FlashInfer's function, ``out`` among them: [T, 1, heads, 512]."""
    (cache, indices, lens), *more = segments
    extra = [tensor for _, i, n in more for tensor in (i, n)]
    behind = max(0, indices.shape[1] - WINDOW) + sum(i.shape[1] for _, i, _ in more)
    second = more[0][0] if more else cache
    rows, counts, extra_counts = sparse_key_rows(
        indices, lens, *extra, swa_slots=_slots(cache), extra_slots=_slots(second), swa_columns=WINDOW, extra_columns=-(-behind // 4) * 4, drop_holes=True,
        swa_block_size=cache.shape[1], swa_block_span=_span(cache), extra_block_size=second.shape[1], extra_block_span=_span(second),
    )  # fmt: skip
    query = q[:, None]
    return {
        "query": query, "swa_kv_cache": cache.flatten(1, -2), "compressed_kv_cache": second.flatten(1, -2), "workspace_buffer": scratch, "sparse_indices": rows,
        "sparse_topk_lens": counts.clamp(min=WINDOW) + extra_counts, "seq_lens": counts.clamp(max=WINDOW), "out": torch.empty_like(query), "bmm1_scale": scale,
        "sinks": sink, "kv_layout": "HND", "backend": "trtllm-gen", "sparse_indices_are_storage_offsets": True,
    }  # fmt: skip


def _span(cache: torch.Tensor) -> int:
    """Rows from one page of a bfloat16 cache to the next."""
    return page_block_span(int(cache.stride(0)), HEAD_DIM) if cache.shape[0] > 1 else int(cache.shape[1])


def _sm100(q: torch.Tensor, segments: Segments, sink: torch.Tensor | None, scale: float, lane: int) -> tuple[torch.Tensor, torch.Tensor]:
    (scratch,) = workspace_manager(q.device).get(((SM100_SCRATCH,), torch.uint8), lane=lane, op="sparse_mla_decode")
    arguments = sm100_arguments(q, segments, sink, scale, scratch)
    _function(SM100)(**arguments)
    keyless = (arguments["seq_lens"] == 0) & (arguments["sparse_topk_lens"] == WINDOW)
    return arguments["out"][:, 0].masked_fill(keyless[:, None, None], 0.0), q.new_full(q.shape[:2], float("nan"), dtype=torch.float32)
