"""What the host does in a decode step outside of captured steps: counted, so that it stays little. On a GPU every one of these costs 5 to 10 us."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from dsv4_ops.engine import executor
from dsv4_ops.engine.config import EngineConfig
from dsv4_ops.engine.engine import Engine
from dsv4_ops.engine.requests import Request
from dsv4_ops.engine.runner import default_model
from dsv4_ops.graphs import GraphPool
from dsv4_ops.testing import TapeGraph, TapeRecorder
from tests.lane_campaign import fresh_manager

TEXT = b"The ferry left at seven, and nobody on the quay thought that it would be back before the spring came round again."
HOST_READS = {"tolist", "item", "cpu", "numpy", "to", "__array__", "__bool__", "__float__", "__index__", "__int__"}
"""Methods of tensors that give the host values, and wait for the device that has them."""


class Dispatched(TorchDispatchMode):
    """Counts ops, those of replays excepted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops, self.replaying = Counter[str](), False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.replaying:
            self.ops[str(op)] += 1
        return op(*args, **(kwargs or {}))


class Read(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads = Counter[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in HOST_READS:
            self.reads[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(executor, "GraphPool", lambda device, graphs: GraphPool(device, recorder=TapeRecorder()))
    with fresh_manager("cpu"):
        yield


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counter[str], Counter[str], list[int]]]:
    """Ops and host reads of what runs inside, and the operations that its replays held."""
    dispatched, read, replays = Dispatched(), Read(), []
    replay = TapeGraph.replay

    def quiet(self: TapeGraph) -> None:
        replays.append(len(self.tape))
        dispatched.replaying = True
        with torch._C.DisableTorchFunction():
            replay(self)
        dispatched.replaying = False

    with monkeypatch.context() as patch, dispatched, read:
        patch.setattr(TapeGraph, "replay", quiet)
        yield dispatched.ops, read.reads, replays


def decoding(mode: str, requests: int, fused: bool = False) -> Engine:
    """An engine whose requests have all got past their prompts."""
    engine = Engine(default_model(), EngineConfig(mode=mode, max_num_seqs=8, max_model_len=512, max_num_batched_tokens=64, capture_sizes=(8, 40, 64), num_speculative_tokens=4, fused=fused))
    for i in range(requests):
        engine.scheduler.add(Request(i, tuple(TEXT[i : i + 20 + 3 * i]), 100, temperature=0.7 * (i % 2), seed=i))
    while engine.scheduler.waiting or not engine.scheduler.running or not all(s.decoding for s in engine.scheduler.running):
        engine.step()
    engine.step()
    return engine


@pytest.mark.parametrize("requests", [1, 7])
@pytest.mark.parametrize(("mode", "fused"), [("plain", False), ("mtp", False), ("dspark", False), ("dflash", False), ("dspark", True)])
def test_a_decode_step_is_two_copies_its_replays_and_one_read(mode: str, fused: bool, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of requests: padding into host memory, that to the device, and the new tokens back."""
    engine = decoding(mode, requests, fused)
    steps, tokens = 3, engine.stats.tokens
    with counted(monkeypatch) as (ops, reads, replays):
        for _ in range(steps):
            assert engine.step() == []
    assert engine.stats.tokens >= tokens + steps * requests
    assert ops == {"aten.copy_.default": 2 * steps}, ops
    assert reads == {"tolist": steps}, reads
    apart = mode != "plain" and not fused
    assert len(replays) == steps * (2 if apart else 1) and min(replays) > 100, "the rest is in the graphs"
    engine.executor.pool.reset()


def test_what_costs_the_host_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the bounds above would show nothing."""
    engine = decoding("plain", 2)
    write = executor.write_step

    def costly(groups: Any, batch: Any, step: Any, sample: Any) -> None:
        lens = torch.tensor([part.num_tokens for part in batch])
        assert int(lens.sum()) == 2
        write(groups, batch, step, sample)

    monkeypatch.setattr(executor, "write_step", costly)
    with counted(monkeypatch) as (ops, reads, _):
        engine.step()
    assert ops["aten.sum.default"] == 1 and ops["aten.copy_.default"] >= 2 and sum(ops.values()) > 4
    assert reads == {"tolist": 1, "__int__": 1}
    engine.executor.pool.reset()
