"""Decode engine: DeepSeek-V4 served with the ops of this package, speculative decoding included.

Names are loaded when first used, so that importing this package needs neither transformers nor safetensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .requests import Completion, Request
    from .tokenizer import ByteTokenizer

_HOME = {
    "ByteTokenizer": "tokenizer",
    "Completion": "requests",
    "Engine": "engine",
    "EngineConfig": "config",
    "Request": "requests",
    "make_tiny": "tiny",
}

__all__ = ["ByteTokenizer", "Completion", "Engine", "EngineConfig", "Request", "make_tiny"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
