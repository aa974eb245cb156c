"""What an engine is told once: its sizes and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..dflash import round_to_capture_size
from ..errors import ArgumentError, RequestError
from .requests import Request

__all__ = ["KV_DTYPES", "MODES", "EngineConfig"]

MODES = ("plain", "mtp", "dspark", "dflash")
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.uint8}


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and choices of one engine. Block counts that are left out are large enough for ``max_num_seqs`` requests of any length."""

    mode: str = "plain"
    num_speculative_tokens: int = 3
    """Draft tokens a step (no meaning in plain mode; block drafters use what they were trained for)."""
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    """Tokens of one step, over all its requests. Longer prompts are run in chunks."""
    max_model_len: int = 4352
    """Positions of a request: prompt and output together."""
    window_block_size: int = 64
    compressed_block_size: int = 256
    """Tokens (not records) a page of the compressed group covers; a multiple of every compress ratio."""
    draft_block_size: int = 64
    num_window_blocks: int | None = None
    num_compressed_blocks: int | None = None
    num_draft_blocks: int | None = None
    kv_dtype: str = "float32"
    capture_sizes: tuple[int, ...] | None = None
    """Token counts that a step is padded to; default 1, 2, 4, .. up to ``max_num_batched_tokens``. One single size makes every
    product of a step independent of the batch."""
    compile: bool = False
    """Run the target step and the draft step under ``torch.compile(fullgraph=True)``, compiled when the engine is made."""
    fused: bool = False
    """Target, sampling and drafting as one step: one program, one graph."""
    enforce_eager: bool = False
    """No CUDA graphs. (Without it, on a GPU, each step is captured at every capture size when the engine is made.)"""
    device: str = "cpu"
    tensor_parallel: int = 1
    """Ranks of ``torch.distributed`` that share the heads of the target's attention, and ``context_parallel``: that share its compressed KV.
    Their product is the number of processes, each of which runs an engine like this one on the same requests (parallel.py)."""
    context_parallel: int = 1
    record_margins: bool = False
    record_logits: bool = False
    """Keep the target's logits row of every generated token (``Completion.logits``): for checks, a row is as long as the vocabulary."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ArgumentError("EngineConfig", name, expected, getattr(self, name))

        require(self.mode in MODES, "mode", "one of " + ", ".join(MODES))
        require(self.kv_dtype in KV_DTYPES, "kv_dtype", "one of " + ", ".join(KV_DTYPES))
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "window_block_size", "compressed_block_size", "draft_block_size", "num_speculative_tokens", "tensor_parallel", "context_parallel"):
            require(_is_integer(getattr(self, name)), name, "an integer")
            require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("num_window_blocks", "num_compressed_blocks", "num_draft_blocks"):
            blocks = getattr(self, name)
            require(blocks is None or (_is_integer(blocks) and blocks >= 2), name, "at least 2 (block 0 is the null block)")
        # Every decoding request then runs in every step, with all its draft tokens.
        decodes = self.max_num_seqs * self.tokens_per_decode
        require(self.max_num_batched_tokens >= decodes, "max_num_batched_tokens", f"at least max_num_seqs * (1 + draft tokens) = {decodes}")
        sizes = self.capture_sizes
        if sizes is not None:
            require(isinstance(sizes, Sequence) and len(sizes) > 0 and all(_is_integer(n) and n >= 1 for n in sizes), "capture_sizes", "positive token counts")
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError):
            require(False, "device", "a device of torch, such as cpu or cuda:0")

    @property
    def tokens_per_decode(self) -> int:
        """Rows of a decoding request in a verify step: its last token and the draft tokens."""
        return 1 + (0 if self.mode == "plain" else self.num_speculative_tokens)

    @property
    def step_sizes(self) -> list[int]:
        """The token counts that steps are padded to, ascending."""
        return sorted(set(self.capture_sizes)) if self.capture_sizes is not None else _powers_of_two(self.max_num_batched_tokens)

    @property
    def cudagraph_capture_sizes(self) -> list[int]:
        """The sizes that become CUDA graphs."""
        return self.step_sizes if torch.device(self.device).type == "cuda" and not self.enforce_eager else []

    def padded_tokens(self, tokens: int) -> int:
        """The smallest capture size that holds ``tokens``; past the largest one the exact number (run without a graph)."""
        return round_to_capture_size(tokens, self.step_sizes)

    def validate(self, request: Request, vocab_size: int) -> None:
        """Raise RequestError, naming the reason, when this engine cannot serve ``request``."""
        where = f"request {request.index}"
        for name, values in (("prompt_ids", request.prompt_ids), ("stop_ids", request.stop_ids)):
            if not isinstance(values, Sequence) or not all(map(_is_integer, values)):
                raise RequestError(f"{where}: {name} must be a tuple of token ids, got {str(values)[:60]}.")
        for name in ("max_tokens", "seed"):
            if not _is_integer(getattr(request, name)):
                raise RequestError(f"{where}: {name} must be an integer, got {getattr(request, name)}.")
        if not request.prompt_ids:
            raise RequestError(f"{where}: the prompt is empty; give at least one token.")
        bad = [t for t in request.prompt_ids if not 0 <= t < vocab_size]
        if bad:
            raise RequestError(f"{where}: token id {bad[0]} is outside the vocabulary of {vocab_size}.")
        if len(request.prompt_ids) >= self.max_model_len:
            raise RequestError(f"{where}: the prompt has {len(request.prompt_ids)} tokens, the limit is {self.max_model_len - 1} (max_model_len {self.max_model_len}, one for the output).")
        if request.max_tokens < 1:
            raise RequestError(f"{where}: max_tokens must be at least 1, got {request.max_tokens}.")
        temperature = request.temperature
        if not isinstance(temperature, int | float) or not 0.0 <= temperature <= torch.finfo(torch.float32).max:
            raise RequestError(f"{where}: temperature must be 0 or more, got {temperature}.")
        if not -(2**63) <= request.seed < 2**63:
            raise RequestError(f"{where}: seed must fit in 64 bits, got {request.seed}.")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _powers_of_two(largest: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes
