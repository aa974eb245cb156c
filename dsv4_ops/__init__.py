"""Custom ops and graph passes that make DeepSeek-V4 sparse MLA decode right under torch.compile and CUDA graphs.

Importing registers ``torch.ops.dsv4_ops.*`` and does nothing else: no CUDA context, no Triton, no FlashInfer.
"""

from __future__ import annotations

import os as _os

from . import _registry
from ._checks import NULL_BLOCK, PAD_SLOT_ID
from ._version import __version__

_registry.load_compiled()

from .attention_backends import SparseMLADecode  # noqa: E402
from .batch import BatchKind, classify_batch, is_uniform_decode, unpadded_token_rows  # noqa: E402
from .capability import (  # noqa: E402
    explain,
    has_sparse_mla_decode_config,
    require_sparse_mla_decode,
    required_sparse_topk,
    select_sparse_width,
)
from .context_lens import expand_block_table, local_context_lens, mtp_context_lens, ragged_context_lens  # noqa: E402
from .decode_step import DecodeStep, prepare_decode_step  # noqa: E402
from .dflash import DFlashInputs, capture_query_lens, draft_buffer_tokens, prepare_dflash_inputs, round_to_capture_size, scratch_rows  # noqa: E402
from .draft_step import DraftStep, prepare_draft_step  # noqa: E402
from .key_rows import KeyRows, sparse_key_rows  # noqa: E402
from .kv_cache import kv_cache_gather, kv_cache_insert, kv_page_bytes, kv_page_offsets, new_kv_cache  # noqa: E402
from .lane_context import current_lane, use_workspace_lane, use_workspace_ubatch  # noqa: E402
from .mixed_indices import build_mixed_sparse_indices, global_topk_indices, mixed_row_width  # noqa: E402
from .rejection import rejection_sample  # noqa: E402
from .sampling import STREAM_ACCEPTANCE, STREAM_DRAFT, STREAM_PLAIN, STREAM_RECOVERY, gumbel_sample  # noqa: E402
from .slot_layouts import packed_page_slots, page_block_span, swa_indices_to_csr  # noqa: E402
from .sparse_decode import sparse_mla_decode  # noqa: E402
from .swa_indices import causal_swa_indices, decode_swa_width, draft_swa_indices, swa_index_width  # noqa: E402
from .swiglu import SwiGLUParams, swiglu, swiglu_per_expert  # noqa: E402
from .topk import topk, topk_merge, topk_values  # noqa: E402
from .topk_slots import topk_slots  # noqa: E402
from .workspace import WorkspaceManager, num_workspace_lanes, workspace_manager  # noqa: E402

_registry.seal()


loaded = _registry.loaded
skipped = _registry.skipped

__all__ = [
    "NULL_BLOCK",
    "PAD_SLOT_ID",
    "STREAM_ACCEPTANCE",
    "STREAM_DRAFT",
    "STREAM_PLAIN",
    "STREAM_RECOVERY",
    "BatchKind",
    "DFlashInputs",
    "DecodeStep",
    "DraftStep",
    "KeyRows",
    "SparseMLADecode",
    "SwiGLUParams",
    "WorkspaceManager",
    "__version__",
    "build_mixed_sparse_indices",
    "capture_query_lens",
    "causal_swa_indices",
    "classify_batch",
    "current_lane",
    "decode_swa_width",
    "draft_buffer_tokens",
    "draft_swa_indices",
    "expand_block_table",
    "explain",
    "global_topk_indices",
    "gumbel_sample",
    "has_sparse_mla_decode_config",
    "is_uniform_decode",
    "kv_cache_gather",
    "kv_cache_insert",
    "kv_page_bytes",
    "kv_page_offsets",
    "loaded",
    "local_context_lens",
    "mixed_row_width",
    "mtp_context_lens",
    "new_kv_cache",
    "num_workspace_lanes",
    "packed_page_slots",
    "page_block_span",
    "prepare_decode_step",
    "prepare_dflash_inputs",
    "prepare_draft_step",
    "ragged_context_lens",
    "rejection_sample",
    "require_sparse_mla_decode",
    "required_sparse_topk",
    "round_to_capture_size",
    "scratch_rows",
    "select_sparse_width",
    "skipped",
    "sparse_key_rows",
    "sparse_mla_decode",
    "swa_index_width",
    "swa_indices_to_csr",
    "swiglu",
    "swiglu_per_expert",
    "topk",
    "topk_merge",
    "topk_slots",
    "topk_values",
    "unpadded_token_rows",
    "use_workspace_lane",
    "use_workspace_ubatch",
    "workspace_manager",
]

# `passes/` stands beside this package in a checkout and inside it when installed: both import as dsv4_ops.passes.
_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "passes")) and _os.path.isfile(_os.path.join(_os.path.dirname(_here), "passes", "__init__.py")):
    __path__.append(_os.path.dirname(_here))
