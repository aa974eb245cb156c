"""Cuts functions out of an unpacked vLLM, so that they import beside torch and Triton alone.

What it writes is vLLM's code: it belongs into a folder for PEERS_DIR, never into the repository.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Function:
    """``path`` is a function of a file, or ``Class.method``; ``name`` is what it is called here."""

    file: str
    path: str
    name: str


_CACHE, _METADATA = "models/deepseek_v4/common/ops/cache_utils.py", "v1/attention/ops/metadata.py"
_WINDOW = "v1/attention/backends/mla/sparse_swa.py"
KERNELS = (
    Function("v1/worker/gpu/cp_utils.py", "cp_local_slot", "cp_local_slot"),
    Function("v1/worker/gpu/spec_decode/dflash/speculator.py", "_prepare_dflash_inputs_kernel", "_prepare_dflash_inputs_kernel"),
    Function(_CACHE, "_remap_flashinfer_index", "_remap_flashinfer_index"),
    Function(_CACHE, "BuildFlashinferMixedSparseIndicesKernel.kernel", "build_mixed_kernel"),
    Function(_CACHE, "ComputeGlobalTopkIndicesAndLensKernel.kernel", "global_topk_kernel"),
    Function(_CACHE, "quantize_and_insert_k_kernel", "quantize_and_insert_k_kernel"),
    Function(_METADATA, "_token_request", "_token_request"),
    Function(_METADATA, "_token_request_mapping_kernel", "_token_request_mapping_kernel"),
    Function(_METADATA, "_indexer_decode_metadata_kernel", "_indexer_decode_metadata_kernel"),
    Function(_WINDOW, "_compute_swa_indices_and_lens_kernel", "causal_swa_kernel"),
    Function(_WINDOW, "ComputeDSparkNoncausalSWAIndicesKernel.kernel", "dspark_swa_kernel"),
)
SAMPLING = ("v1/worker/gpu/sample/gumbel.py", "v1/worker/gpu/spec_decode/rejection_sampler_utils.py")
FILES = (*dict.fromkeys(f.file for f in KERNELS), *SAMPLING)

_IMPORTS = "import triton\nimport triton.language as tl\n"
# The last two names are imported by the samplers for watermarks and FLY, which no benchmark asks for.
_SAMPLING_IMPORTS = "import torch\nimport triton.language.extra.libdevice as tldevice\n\nphilox_gumbel_block_argmax = compute_fly_entropy = None\n"


def _code(source: str, node: ast.stmt, name: str | None = None) -> str:
    """The text of a statement: dedented, decorators first (a method becomes a function), renamed."""
    assert node.end_lineno is not None
    decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    text = textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
    if isinstance(node, ast.FunctionDef) and name:
        text = text.replace(f"def {node.name}(", f"def {name}(", 1)
    return "\n".join([*(f"@{d}" for d in decorators if d != "staticmethod"), text, "", ""])


def _find(tree: ast.Module, path: str) -> ast.stmt | None:
    body, node = tree.body, None
    for part in path.split("."):
        node = next((n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part), None)
        body = getattr(node, "body", [])
    return node


def kernels(root: Path, wanted: tuple[Function, ...] = KERNELS) -> str:
    """``triton_extracted.py``: the functions of ``wanted``, of an unpacked vLLM at ``root``."""
    parts = [_IMPORTS]
    for function in wanted:
        source = (root / function.file).read_text()
        node = _find(ast.parse(source), function.path)
        if node is None:
            raise LookupError(f"{function.file} has no {function.path}: is this the vLLM of requirements.txt?")
        parts.append(_code(source, node, function.name))
    return "\n".join(parts)


def sampling(root: Path, files: tuple[str, ...] = SAMPLING) -> str:
    """``sampling_extracted.py``: all functions and assignments of the sampler's files."""
    parts = [_IMPORTS + _SAMPLING_IMPORTS]
    for file in files:
        source = (root / file).read_text()
        parts += [_code(source, node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.Assign)]
    return "\n".join(parts)
