"""Faults forced on purpose, on a CPU (captured steps as tapes) and on a GPU (CUDA graphs): no token changes, and logits by rounding only.

Before every step all that the step must not read is filled with garbage: its static inputs, scratch of both lanes, the null block, and
every page that no request holds, evicted ones included.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dsv4_ops.engine import executor, tiny
from dsv4_ops.engine.config import EngineConfig
from dsv4_ops.engine.engine import Engine
from dsv4_ops.engine.requests import Completion, Request
from dsv4_ops.engine.verify import ERROR_LIMITS
from dsv4_ops.errors import WorkspaceError
from dsv4_ops.graphs import GraphPool
from dsv4_ops.testing import TapeRecorder
from tests.lane_campaign import fresh_manager, poison

TEXT = ("The ferry left at seven, and nobody on the quay thought that it would be back before the spring. " * 4).encode()
REQUESTS = [Request(i, tuple(TEXT[5 * i : 5 * i + n]), tokens) for i, (n, tokens) in enumerate(((1, 28), (60, 12), (200, 10), (120, 14)))]
SIZES: dict[str, Any] = {"record_logits": True, "max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64, "capture_sizes": (16, 64), "num_speculative_tokens": 3}
GROWING = [Request(i, tuple(TEXT[5 * i : 5 * i + 14]), 12) for i in range(4)]
"""All are admitted at once, and need another page of 16 tokens soon."""
SMALL = {"window_block_size": 16, "num_window_blocks": 6}
DRAFTING = pytest.mark.parametrize("mode", ["mtp", "dspark"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.make_tiny(path)
    return path


@pytest.fixture(autouse=True)
def manager(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if device == "cpu":
        monkeypatch.setattr(executor, "GraphPool", lambda device, graphs: GraphPool(device, recorder=TapeRecorder()))
    with fresh_manager(device) as mine:
        yield mine


_truth: dict[Any, list[Completion]] = {}


def truth(checkpoint: Path, device: str, requests: list[Request]) -> list[Completion]:
    """Plain decode of each request alone, without graphs."""
    key = (device, tuple(requests))
    if key not in _truth:
        engine = Engine(checkpoint, EngineConfig(device=device, enforce_eager=True, **(SIZES | {"capture_sizes": (64,)})))
        engine.executor.pool.recorder = None
        _truth[key] = [engine.generate([request])[0] for request in requests]
    return _truth[key]


def assert_right(got: list[Completion], expected: list[Completion]) -> None:
    """The tokens, as far as each got, and the logits that they were chosen from: a lost or foreign key moves these long before a token."""
    for mine, other in zip(got, expected, strict=True):
        count = len(mine.token_ids)
        assert count and mine.token_ids == other.token_ids[:count], f"request {mine.index}"
        logits, wanted = torch.stack(mine.logits), torch.stack(other.logits[:count])
        error = float((logits - wanted).abs().max() / wanted.abs().max())
        assert error <= ERROR_LIMITS["float32"] / 8, f"request {mine.index}: logits off by {error:.1e}"


def make(checkpoint: Path, device: str, mode: str, **config: Any) -> Engine:
    return Engine(checkpoint, EngineConfig(mode=mode, device=device, **(SIZES | config)))


def pages(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Group and tensor ``[blocks, ...]`` of everything that lies in pages."""
    for layer in engine.target.model.model.layers:
        attention: Any = layer.self_attn
        yield "window", attention.kv_cache
        if attention.compressor is not None:
            yield "compressed", attention.records
        rows = [("window", attention.compressor)] if attention.compressor is not None else []
        if attention.indexer is not None:
            rows.append(("window", attention.indexer.compressor))
            keys = attention.indexer.keys
            yield "compressed", keys.data[:-1].view(-1, keys.block_size, keys.width)
        for group, compressor in rows:
            state = compressor.state
            yield group, state.data[:-1].view(-1, state.block_size, state.width)
    for cache in getattr(engine.proposer, "caches", ()):
        yield "draft", cache


def poisoned(engine: Engine) -> dict[str, int]:
    """Make every step of ``engine`` start in garbage; counts of what was seen on the way."""
    run, seen = engine.executor.run, {"steps": 0, "evicted": 0, "padding": 0}

    def garbage(groups: Any, batch: Any) -> Any:
        for graph_step in engine.executor.pool.steps.values():
            graph_step._block.data.fill_(-0x7B7B7B7B)
        poison(engine.executor.pool.manager)
        for group, tensor in pages(engine):
            pool = engine.groups[group].pool
            tensor[[b for b in range(pool.num_blocks) if b not in pool._used]] = float("nan")
        seen["steps"] += 1
        seen["evicted"] += sum(s.tables["window"].evicted for s in engine.scheduler.running)
        tokens = sum(part.num_tokens for part in batch)
        seen["padding"] += engine.config.padded_tokens(tokens) - tokens
        return run(groups, batch)

    engine.executor.run = garbage  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("mode", ["plain", "mtp", "dspark", "dflash"])
def test_padding_evicted_windows_and_scratch_are_never_read(mode: str, checkpoint: Path, device: str) -> None:
    engine = make(checkpoint, device, mode)
    seen = poisoned(engine)
    assert_right(engine.generate(REQUESTS), truth(checkpoint, device, REQUESTS))
    assert seen["steps"] > 8 and seen["evicted"] > 0 and seen["padding"] > 0
    assert not any(step.recaptures for step in engine.executor.pool.report().steps)


@DRAFTING
def test_small_pools_and_preemption(mode: str, checkpoint: Path, device: str) -> None:
    engine = make(checkpoint, device, mode, **SMALL)
    poisoned(engine)
    assert_right(engine.generate(GROWING), truth(checkpoint, device, GROWING))
    assert engine.stats.preemptions > 0 and all(group.pool.num_free == group.pool.capacity for group in engine.groups.values())


@pytest.mark.parametrize("mode", ["plain", "mtp"])
def test_drain_from_64_requests_to_1_to_0_and_again(mode: str, checkpoint: Path, device: str) -> None:
    """Their answers have 1 to 4 tokens, one of them 8: the batch shrinks to it, to nothing, and fills again."""
    lengths = [1 + i % 4 for i in range(63)] + [8]
    longest = [Request(i, tuple(TEXT[3 * i : 3 * i + 1]), 8) for i in range(8)]
    requests = [Request(i, longest[i % 8].prompt_ids, length) for i, length in enumerate(lengths)]
    expected = truth(checkpoint, device, longest)
    tokens = 64 if mode == "plain" else 128
    engine = make(checkpoint, device, mode, max_num_seqs=64, max_num_batched_tokens=tokens, capture_sizes=(8, tokens), num_speculative_tokens=1, max_model_len=32)
    running: list[int] = []
    run = engine.executor.run
    engine.executor.run = lambda groups, batch: (running.append(len(batch)), run(groups, batch))[1]  # type: ignore[method-assign]
    for _ in range(2):
        running.clear()
        got = engine.generate(requests)
        assert [len(c.token_ids) for c in got] == lengths
        assert_right(got, [expected[i % 8] for i in range(64)])
        assert max(running) == 64 and running[-1] == 1 and not engine.scheduler.has_work
    assert engine.step() == [], "a step of nothing but padding"


@DRAFTING
def test_draft_graphs_that_were_captured_larger_than_the_batch(mode: str, checkpoint: Path, device: str) -> None:
    """One request in graphs of 16 requests and 64 tokens drafts what it drafts in graphs of its own size."""
    request = REQUESTS[1]
    large = make(checkpoint, device, mode, max_num_seqs=16, capture_sizes=(64,))
    exact = make(checkpoint, device, mode, max_num_seqs=1, capture_sizes=(1, 4), max_num_batched_tokens=64)
    seen = poisoned(large)
    (a,), (b,) = large.generate([request]), exact.generate([request])
    for each in (a, b):
        assert_right([each], truth(checkpoint, device, REQUESTS)[1:2])
    assert a.accepted_lengths == b.accepted_lengths and max(a.accepted_lengths) > 1
    assert seen["padding"] > 59 * (seen["steps"] - 2), "all but the prompt's steps have 4 tokens or fewer"


@DRAFTING
def test_growth_of_scratch_after_capture(mode: str, checkpoint: Path, device: str, manager: Any) -> None:
    """Refused by name while graphs hold scratch, and nothing has changed. Allowed by whoever unlocks: then graphs are captured again."""
    engine = make(checkpoint, device, mode)
    expected = truth(checkpoint, device, REQUESTS)
    assert manager.is_locked and engine.executor.pool.manager is manager
    before = manager.nbytes
    for lane in range(engine.executor.num_lanes):
        with pytest.raises(WorkspaceError, match=f"late_op.*lane {lane}|lane {lane}.*late_op"):
            manager.get(((before + (1 << 20),), torch.uint8), lane=lane, op="late_op")
    assert manager.nbytes == before
    poisoned(engine)
    assert_right(engine.generate(REQUESTS), expected)
    assert not any(step.recaptures for step in engine.executor.pool.report().steps)
    with manager.unlocked():
        for lane in range(engine.executor.num_lanes):
            manager.get(((before + (1 << 20),), torch.uint8), lane=lane, op="late_op")
    assert_right(engine.generate(REQUESTS), expected)
    assert any(step.recaptures for step in engine.executor.pool.report().steps) == (before > 0)
