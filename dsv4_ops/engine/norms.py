"""Norms of a bfloat16 model keep its type, whatever the release of transformers.

The weights of DeepSeek-V4's norms stay in float32. Up to 5.17 (seen; 5.24 rounds) transformers multiplies by them last, so that the
norms of a bfloat16 model give float32, which the next projection refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

__all__ = ["keep_type"]


def keep_type(model: nn.Module) -> None:
    """Let every norm of ``model`` round to the type of its input, where it does not already."""
    for norm in model.modules():
        if isinstance(norm, DeepseekV4RMSNorm) and norm(torch.zeros_like(norm.weight, dtype=torch.bfloat16)).dtype != torch.bfloat16:
            norm.register_forward_hook(_round)


def _round(_: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.to(inputs[0].dtype)
