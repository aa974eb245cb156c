"""Speculative modes on a small checkpoint: the tokens of plain decode, and the drafts of drafters that were fed right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4_ops import passes
from dsv4_ops.engine import executor, tiny
from dsv4_ops.engine.config import EngineConfig
from dsv4_ops.engine.drafters import load_drafter
from dsv4_ops.engine.engine import Engine
from dsv4_ops.engine.requests import Request
from dsv4_ops.engine.scheduler import Scheduled
from dsv4_ops.engine.target import load_model
from dsv4_ops.errors import ArgumentError
from dsv4_ops.graphs import GraphPool
from dsv4_ops.testing import TapeRecorder

MODES = ("mtp", "dspark", "dflash")
TEXT = "The old lighthouse keeper climbed the stairs each night, counting them aloud, and the sea answered in its own time. " * 5
PROMPTS = [tuple(TEXT.encode()[7 * i : 7 * i + n]) for i, n in enumerate((58, 57, 56, 127, 250, 1))]
SIZES = {"max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 64, "num_speculative_tokens": 4}
# One capture size: all products have the same shape in every mode, so plain and speculative decode agree to the bit.
FIXED = SIZES | {"capture_sizes": (64,)}
# Blocks for one of the requests, and not much more.
SMALL = {"num_window_blocks": 6, "num_compressed_blocks": 4, "num_draft_blocks": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.make_tiny(path)
    return path


def serve(checkpoint: Path, requests: list[Request], **config: Any) -> tuple[list[list[int]], Engine]:
    engine = Engine(checkpoint, EngineConfig(**(SIZES | config)))
    tokens = [c.token_ids for c in engine.generate(requests)]
    assert all(group.pool.num_free == group.pool.capacity for group in engine.groups.values())
    return tokens, engine


GREEDY = [Request(i, prompt, 20) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[list[int]]:
    """Each prompt decoded plainly, alone."""
    engine = Engine(checkpoint, EngineConfig(**FIXED, mode="plain"))
    return [engine.generate([request])[0].token_ids for request in GREEDY]


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_plain_decode(mode: str, checkpoint: Path, plain: list[list[int]]) -> None:
    """Batched, chunked, padded to different sizes; drafts are accepted, in part and not at all."""
    tokens, engine = serve(checkpoint, GREEDY, mode=mode)
    assert tokens == plain
    assert engine.stats.accepted[1] and engine.stats.accepted[2] and sum(engine.stats.accepted.values()) < sum(map(len, tokens)) - len(tokens)
    assert engine.stats.tokens == sum(map(len, tokens))


@pytest.mark.parametrize("mode", MODES)
def test_small_pools_change_no_token(mode: str, checkpoint: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted requests are computed anew, draft KV included, with the drafts they had."""
    with_drafts = []
    save = Engine._save_state
    monkeypatch.setattr(Engine, "_save_state", lambda self, sequence: (with_drafts.append(list(sequence.draft_ids)), save(self, sequence)))
    tokens, engine = serve(checkpoint, GREEDY, mode=mode, **SMALL)
    assert tokens == plain and engine.stats.preemptions == len(with_drafts) and any(with_drafts)


@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_those_of_a_drafter_fed_by_transformers(mode: str, checkpoint: Path) -> None:
    """Accepted lengths, step by step, equal those of the drafter when it reads the states of transformers' own forward.

    A wrong context row, slot, window row or position of a drafter changes no token of the output: only this sees it.
    """
    drafts = SIZES["num_speculative_tokens"]
    requests = [Request(i, tuple(prompt.encode()), 48) for i, prompt in enumerate(tiny.PROMPTS)]
    completions = Engine(checkpoint, EngineConfig(mode=mode, **SIZES)).generate(requests)
    target = load_model(checkpoint)
    drafter = load_drafter(checkpoint, target, mode)
    kinds = set()
    for request, completion in zip(requests, completions, strict=True):
        ids, start, streams = tiny._greedy(target, list(request.prompt_ids), 48 + drafts)
        with torch.no_grad():
            wanted = tiny._accepted_lengths(drafter, ids, start, start + 48, streams, drafts)
        got = [length - 1 for length in completion.accepted_lengths]
        # Near the end fewer drafts fit: compare the steps that had room for all of them.
        whole = [i for i in range(len(got)) if 1 + sum(completion.accepted_lengths[:i]) + drafts + 1 <= 48]
        assert got[: len(whole)] == wanted[: len(whole)] and len(whole) > 8
        kinds |= set(got)
    assert {0, 1, 2} <= kinds


@pytest.mark.parametrize("mode", MODES)
def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(mode: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among others, and preempted with drafts whose logits are needed again: the same tokens."""
    requests = [replace(r, temperature=1.0 - 0.2 * (r.index % 2), seed=50 + r.index) for r in GREEDY]
    config = FIXED | {"mode": mode}
    engine = Engine(checkpoint, EngineConfig(**config))
    alone = [engine.generate([request])[0].token_ids for request in requests]
    assert engine.generate([replace(requests[0], seed=12)])[0].token_ids != alone[0]
    assert [c.token_ids for c in engine.generate(requests)] == alone
    moved = []
    load = Engine._load_state

    def watch(self: Engine, batch: Sequence[Scheduled]) -> None:
        for sequence in (part.sequence for part in batch if part.start == 0 and part.sequence.draft_state is not None):
            moved.append(not torch.equal(self.executor.draft_logits[sequence.row], sequence.draft_state))
        load(self, batch)

    monkeypatch.setattr(Engine, "_load_state", watch)
    assert serve(checkpoint, requests, **config, **SMALL)[0] == alone
    assert any(moved)


@pytest.mark.parametrize("mode", MODES)
def test_requests_end_at_the_models_limit_and_at_stop_ids(mode: str, checkpoint: Path, plain: list[list[int]]) -> None:
    """Near the limit fewer drafts fit; a stop id among accepted drafts cuts what follows it."""
    limit = len(PROMPTS[0]) + 17
    stop = next(token for i, token in enumerate(plain[1]) if i > 5 and token not in plain[1][:i])
    requests = [GREEDY[0], replace(GREEDY[1], stop_ids=(stop,))]
    tokens, _ = serve(checkpoint, requests, mode=mode, max_model_len=limit)
    assert tokens == [plain[0][:17], plain[1][: plain[1].index(stop) + 1]]


@pytest.mark.parametrize(("mode", "fused"), [("plain", False), ("mtp", False), ("dspark", False), ("dflash", True)])
def test_compiled_steps_are_one_graph_and_change_no_token(mode: str, fused: bool, checkpoint: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph=True; all token counts above 1 share a graph, and serving compiles nothing (Dynamo alone: no code generation here).

    Every op that takes scratch has the lane of its side: the draft's in the fused graph too, where both sides are one program.
    """
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    make = passes.backend
    monkeypatch.setattr(passes, "backend", lambda **options: make(count, **options))
    engine = Engine(checkpoint, EngineConfig(**(SIZES | {"mode": mode, "compile": True, "fused": fused, "capture_sizes": (2, 16, 64)})))
    compiled = len(graphs)
    assert compiled == (1 if fused or mode == "plain" else 2)
    assert [c.token_ids for c in engine.generate(GREEDY[:3])] == plain[:3]
    assert len(graphs) == compiled
    lanes = {name: {int(call.split("@")[1]) for call in backend.last.bound} for name, backend in engine.executor.compiled.items() if backend.last is not None}
    assert lanes == {"fused": {0, 1}} if fused else lanes == {"target": {0}} if mode == "plain" else lanes == {"target": {0}, "draft": {1}}


@pytest.mark.parametrize("mode", ["mtp", "dflash"])
def test_fused_steps_change_no_token(mode: str, checkpoint: Path, plain: list[list[int]]) -> None:
    tokens, engine = serve(checkpoint, GREEDY, mode=mode, fused=True)
    assert tokens == plain and list(engine.executor.pool.steps) == ["fused"]


@pytest.mark.parametrize(("mode", "fused"), [("plain", False), ("mtp", False), ("dspark", True)])
def test_steps_as_graphs_that_replay_what_they_recorded(mode: str, fused: bool, checkpoint: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """On tapes, which replay on the memory they were recorded with and run no Python: nothing in a step depends on its inputs' values."""
    monkeypatch.setattr(executor, "GraphPool", lambda device, graphs: GraphPool(device, recorder=TapeRecorder()))
    tokens, engine = serve(checkpoint, GREEDY, mode=mode, fused=fused, capture_sizes=(8, 64))
    assert tokens == plain
    report = engine.executor.pool.report()
    assert {step.name: sorted(step.pool_growth) for step in report.steps} == {name: [8, 64] for name in (["fused"] if fused else ["target"] if mode == "plain" else ["target", "draft"])}
    assert not any(step.recaptures for step in report.steps)
    engine.executor.pool.reset()


@pytest.mark.parametrize("fault", ["missing", "shape", "other model"])
def test_checkpoint_that_does_not_fit_its_config_is_refused(fault: str, checkpoint: Path, tmp_path: Path) -> None:
    """Never random weights in the place of those that are not there."""
    tensors, config = load_file(checkpoint / "model.safetensors"), json.loads((checkpoint / "config.json").read_text())
    name = "model.layers.1.self_attn.compressor.kv_norm.weight"
    stored = next(stored for stored in tensors if stored.startswith("layers.1.") and stored.endswith("compressor.norm.weight"))
    words = {"missing": f"no tensor {name}", "shape": rf"{name} has shape \[3\], not \[512\]", "other model": "model_type deepseek_v4, got .* with llama"}[fault]
    if fault == "missing":
        del tensors[stored]
    elif fault == "shape":
        tensors[stored] = tensors[stored][:3].clone()
    else:
        config["model_type"] = "llama"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=words):
        Engine(tmp_path)


def test_any_number_of_compiled_engines_fits_into_a_process(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's limit of graphs a function, meant for one that recompiles without end, does not count engines."""
    make = passes.backend
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "backend", lambda **options: make("eager", **options))
    with torch._dynamo.config.patch(recompile_limit=1):
        for kv_dtype in ("float32", "bfloat16"):
            Engine(checkpoint, EngineConfig(compile=True, capture_sizes=(2,), kv_dtype=kv_dtype, max_num_seqs=2))
