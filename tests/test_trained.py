"""The shipped checkpoint: what it is, that its text is readable, and that its drafters were taught something."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file
from transformers import DeepseekV4ForCausalLM

from dsv4_ops.engine import tiny
from dsv4_ops.engine.config import EngineConfig
from dsv4_ops.engine.engine import Engine
from dsv4_ops.engine.requests import Request
from dsv4_ops.engine.runner import default_model
from dsv4_ops.engine.tokenizer import BOS_ID

PROMPTS = ["def close(self):\n    Close the", "This module provides", "class Template:\n", "def read(self, size=-1):\n    Read"]


def test_files_are_small_and_say_where_they_come_from() -> None:
    files = [p for p in default_model().rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 8e6
    note = (default_model() / "README.md").read_text()
    assert "python -m dsv4_ops.engine.train" in note and "PSF License" in note
    assert not [p for p in files if p.suffix == ".json" and re.search(r'"/|_name_or_path', p.read_text())], "no folder of the machine that made it"
    tensors = load_file(default_model() / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point() and t.dim() > 1} == {torch.bfloat16}


def test_target_loads_whole_and_is_computed_in_float32() -> None:
    model, info = DeepseekV4ForCausalLM.from_pretrained(default_model(), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.lm_head.weight.dtype == torch.float32
    assert set(model.config.layer_types) == {"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"}
    assert set(model.config.mlp_layer_types) == {"moe", "hash_moe"}


def test_it_expects_documentation_and_not_other_bytes() -> None:
    """Bits a byte of text that is written here, and of the same bytes shuffled: it knows order, not frequencies alone."""
    model = DeepseekV4ForCausalLM.from_pretrained(default_model(), attn_implementation="eager").eval()
    text = b"def find(self, name):\n    Return the object with the given name, or None if there is no such object.\n\n    If name is not a string, a TypeError is raised.\n"
    shuffled = bytes(text[i] for i in torch.randperm(len(text), generator=torch.Generator().manual_seed(0)))

    def bits(data: bytes) -> float:
        ids = torch.tensor([[BOS_ID, *data]])
        with torch.no_grad():
            loss: Any = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
        return float(loss) / 0.6931

    assert bits(text) < 2.2 < 4 < bits(shuffled), (bits(text), bits(shuffled))


def test_text_is_words_that_python_uses() -> None:
    """Sampled: four words in five are words of the documentation of modules that are at hand."""
    import argparse
    import collections
    import json
    import logging
    import os
    import string
    import threading

    known = set(re.findall(r"[a-z]+", " ".join(Path(str(m.__file__)).read_text() for m in (argparse, collections, json, logging, os, string, threading)).lower()))
    engine = Engine(default_model(), EngineConfig(max_num_seqs=4, max_model_len=256, capture_sizes=(4, 64), max_num_batched_tokens=64))
    requests = [Request(i, (BOS_ID, *prompt.encode()), 120, temperature=0.5, seed=i) for i, prompt in enumerate(PROMPTS)]
    text = " ".join(bytes(t for t in c.token_ids if t < 256).decode(errors="replace") for c in engine.generate(requests)).lower()
    words = re.findall(r"[a-z]{2,}", text)[1:-1]
    assert len(words) > 60
    assert sum(word in known for word in words) > 0.8 * len(words), text


def test_drafts_are_accepted() -> None:
    """Greedy, measured without an engine: more than one draft token in each step, of up to four."""
    for kind, counts in tiny.measure_acceptance(default_model(), prompts=PROMPTS[:2], max_tokens=64).items():
        mean = sum(n * count for n, count in enumerate(counts)) / sum(counts)
        assert mean > 0.8 and counts[0] > 0, (kind, counts)
