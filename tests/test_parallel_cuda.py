"""Context and heads over two GPUs: NCCL, eager, captured, compiled, compiled and captured; and the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing

from dsv4_ops import parallel
from dsv4_ops.graphs import GraphPool, StepInput
from tests import parallel_toys as toys
from tests.parallel_toys import Sizes, launch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")

SIZES = Sizes(heads=16, records=1024, k=128, page=64, window=64, interleave=2, query=torch.bfloat16, cache=torch.uint8)
CAPTURED, TOKENS = (8, 24), (24, 5, 17, 8, 1, 24)
LIMIT = 1e-2
"""Of the norm of a difference over the norm: queries and outputs are bfloat16."""


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def own(step: toys.Step, rank: int, size: int) -> toys.Step:
    return step._replace(scores=toys.own_scores(step.scores, rank, size, SIZES.interleave))


def steps_rank(rank: int, size: int) -> dict[str, Any]:
    """Differences of each way to run a step from one rank and from the eager one, over several sizes."""
    torch.set_grad_enabled(False)
    device = f"cuda:{rank}"
    whole, caches = toys.draw_caches(SIZES, 0, 1, device), toys.draw_caches(SIZES, rank, size, device)
    programs = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        columns, out, lse = toys.split_step(toys.Step(*tensors), caches, SIZES, rank, size)
        return columns, out, lse, parallel.ordered_sum(out)

    program = torch.compile(function, fullgraph=True, backend=programs)

    def compiled(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        result: tuple[torch.Tensor, ...] = program(*tensors)
        return result

    step = own(toys.draw_step(SIZES, 3, device), rank, size)
    inputs = {name: StepInput(t.dtype, tuple(t.shape[1:])) for name, t in step._asdict().items()}
    pool = GraphPool(device)
    captured = {name: pool.step(name, f, inputs, sizes=CAPTURED) for name, f in (("eager", function), ("compiled", compiled))}
    report = pool.capture()
    made = programs.frame_count
    ways = {"eager": function, "compiled": compiled, **{f"{name}, captured": lambda *t, s=s: s(*t).read() for name, s in captured.items()}}
    results: dict[str, Any] = {name: {"columns": True, "error": 0.0, "same as eager": True, "again": True} for name in ways}
    for tokens in TOKENS:
        drawn = toys.draw_step(SIZES, tokens, device, seed=tokens)
        columns, out, lse = toys.one_rank(drawn, whole, SIZES)
        step = own(drawn, rank, size)
        first = [t.clone() for t in function(*step)]
        for name, way in ways.items():
            got, again = ([t[:tokens].clone() for t in way(*step)] for _ in range(2))
            found = results[name]
            found["columns"] &= torch.equal(got[0], columns) and bool((got[2].isneginf() == lse.isneginf()).all())
            keyed = ~lse.isneginf()
            found["error"] = max(found["error"], relative_error(got[1], out), relative_error(got[2][keyed], lse[keyed]) if keyed.any() else 0.0, relative_error(got[3], size * out))
            found["same as eager"] &= all(torch.equal(a, b) for a, b in zip(got, first, strict=True))
            found["again"] &= all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    pool.reset()
    return {"ways": results, "retained": report.retained_bytes, "programs": (made, programs.frame_count)}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    return launch(steps_rank, 2, backend="nccl", limit_s=300.0)


@pytest.mark.parametrize("way", ["eager", "eager, captured", "compiled", "compiled, captured"])
def test_split_steps_equal_one_rank_on_changed_inputs(steps: list[dict[str, Any]], way: str) -> None:
    for rank in steps:
        found = rank["ways"][way]
        assert found["columns"], "chosen columns, and rows without keys"
        assert 0 < found["error"] < LIMIT
        assert found["again"], "the same input, the same bits"
        assert found["same as eager"] or "compiled" in way, "a replay is the eager call to the bit"


def test_captures_keep_nothing_and_one_program_serves_all_sizes(steps: list[dict[str, Any]]) -> None:
    """The captures share one program. Calls beside them make two more: of a single row, and of inputs that have their own memory and do not begin inside the pool's."""
    assert all(rank["retained"] == 0 and rank["programs"][0] == 1 and rank["programs"][1] <= 3 for rank in steps)


def engine_rank(rank: int, size: int) -> dict[str, Any]:
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.engine import Engine
    from tests.engine_toys import random_model, random_prompt, requests_of

    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 512, "max_num_batched_tokens": 64, "capture_sizes": (4, 64), "device": f"cuda:{rank}"}
    # Two layers: what is compiled is compiled on every rank.
    kinds = {"all layers": None, "two layers": ["compressed_sparse_attention", "heavily_compressed_attention"]}
    tokens: dict[str, Any] = {}
    for model, options in (
        ("all layers", {}), ("all layers", {"tensor_parallel": size}), ("all layers", {"context_parallel": size}), ("all layers", {"context_parallel": size, "enforce_eager": True}),
        ("two layers", {}), ("two layers", {"context_parallel": size, "compile": True}),
    ):  # fmt: skip
        layers = kinds[model]
        engine = Engine((random_model() if layers is None else random_model(layer_types=layers)).to(f"cuda:{rank}"), EngineConfig(**sizes, **options))
        prompts = [random_prompt(n, n) for n in (300, 5, 129)]
        tokens[f"{model} {sorted(options)}"] = [c.token_ids for c in engine.generate(requests_of(prompts, 12))]
        engine.executor.pool.reset()
    return tokens


def test_the_engine_gives_the_tokens_of_one_rank() -> None:
    pytest.importorskip("transformers")
    for tokens in launch(engine_rank, 2, backend="nccl", limit_s=300.0):
        assert len(tokens) == 6
        for name, got in tokens.items():
            assert got == tokens[f"{name[:10]} []"], name
            assert len({t for row in got for t in row}) > 10
