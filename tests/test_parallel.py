"""Context and heads over several ranks: gloo, 2 and 4 processes, against one rank."""

from __future__ import annotations

import datetime
import math
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.multiprocessing

import dsv4_ops
from dsv4_ops import parallel
from dsv4_ops._slots import slot_of
from dsv4_ops.errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError
from tests import parallel_toys as toys
from tests.common import i32, i64
from tests.parallel_toys import Sizes, launch

TOKENS = 9

# ------------------------------------------------------------------------------------------------ without other ranks


def test_local_slots_by_hand() -> None:
    """Two ranks, pages of 2 entries each: page 3 of the whole holds slots 12..15, of which rank 0 has 12 and 14."""
    slots = i32([12, 13, 14, 15, -1, 4, -7, -(2**31)])
    assert parallel.local_slots(slots, 2, 0, 2).tolist() == [6, -1, 7, -1, -1, 2, -1, -1]
    assert parallel.local_slots(slots, 2, 1, 2).tolist() == [-1, 6, -1, 7, -1, -1, -1, -1]
    assert parallel.local_slots(slots, 2, 1, 2, 2).tolist() == [-1, -1, 6, 7, -1, -1, -1, -1]  # two in a row on one rank
    assert parallel.local_slots(i32([2**31 - 1]), 2**20, 1, 2).tolist() == [2**30 - 1]


@pytest.mark.parametrize(("size", "interleave", "block_size"), [(1, 1, 4), (2, 1, 4), (2, 4, 4), (3, 2, 8), (4, 1, 1), (4, 16, 64)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_local_slots_are_those_of_the_rule(size: int, interleave: int, block_size: int, dtype: torch.dtype) -> None:
    """Entry p: page p // (B*size), owner (p // I) % size, offset p % (B*size) // (I*size) * I + p % I. Each entry is on one rank."""
    table, whole = [7, 0, 3, 900], block_size * size
    positions = range(-1, whole * len(table) + 1)
    slots = torch.tensor([slot_of(table, p, whole) if p >= 0 else -1 for p in positions], dtype=dtype)
    seen = torch.zeros(len(positions), dtype=torch.int64)
    for rank in range(size):
        local = parallel.local_slots(slots.view(1, -1), block_size, rank, size, interleave)
        assert local.dtype == dtype and local.shape == (1, len(positions))
        for p, slot in zip(positions, local[0].tolist(), strict=True):
            mapped = 0 <= p < whole * len(table) and table[p // whole] > 0
            own = mapped and p // interleave % size == rank
            assert slot == (table[p // whole] * block_size + p % whole // (interleave * size) * interleave + p % interleave if own else -1)
        seen += local[0] >= 0
    assert torch.equal(seen, (slots >= 0).long())


def test_local_slots_are_those_of_the_draft_inputs() -> None:
    """``prepare_dflash_inputs`` has the rule, too."""
    size, block_size, interleave, tokens = 2, 8, 4, 40
    table = i32([[5, 2, 9]])
    positions = torch.arange(tokens)
    one = torch.ones(1, dtype=torch.int32)

    def slots(rank: int, ranks: int, size: int) -> torch.Tensor:
        return dsv4_ops.prepare_dflash_inputs(
            positions, i32([0, tokens]), i32([0]), one, 0 * one, i64([1]), i64([0]), torch.zeros(1), i64([0]), [table], [size],
            mask_token_id=0, num_speculative_tokens=2, max_reqs=1, max_tokens=4, max_model_len=4096, cp_rank=rank, cp_size=ranks, cp_interleave=interleave,
        ).context_slots[0]  # fmt: skip

    whole = slots(0, 1, block_size * size)
    for rank in range(size):
        assert torch.equal(parallel.local_slots(whole, block_size, rank, size, interleave), slots(rank, size, block_size))


def test_compact_slots_keep_their_order() -> None:
    slots = i32([[-1, 9, -7, 3, 4], [1, 2, 3, 4, 5], [-1, -1, -1, -1, -1], [-1, -1, -1, -1, 0]])
    packed, lens = parallel.compact_slots(slots)
    assert packed.tolist() == [[9, 3, 4, -1, -1], [1, 2, 3, 4, 5], [-1] * 5, [0, -1, -1, -1, -1]]
    assert lens.tolist() == [3, 5, 0, 1] and lens.dtype == torch.int32 and packed.dtype == torch.int32
    for shape in ((0, 4), (3, 0)):
        packed, lens = parallel.compact_slots(i64([]).view(shape))
        assert packed.shape == shape and lens.shape == (shape[0],) and not lens.any()


def test_local_rows_share_every_key_out_once() -> None:
    indices, lens = i32([[10, 11, -1, 13, 14], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]), i32([5, 3, -1])
    shares = [parallel.local_rows(indices, lens, rank, 2) for rank in (0, 1)]
    assert [s[0].tolist() for s in shares] == [[[10, -1, 14], [20, 22, 24], [30, 32, 34]], [[11, 13], [21, 23], [31, 33]]]
    assert [s[1].tolist() for s in shares] == [[3, 2, 0], [2, 1, 0]]
    assert all(rows.is_contiguous() for rows, _ in shares)


def test_own_heads() -> None:
    assert [parallel.own_heads(8, rank, 4) for rank in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    with pytest.raises(ArgumentError, match=r"num_heads must be a multiple of tp_size \(4\), got 6"):
        parallel.own_heads(6, 0, 4)
    with pytest.raises(ArgumentError, match="tp_rank must be between 0 and 3, got 4"):
        parallel.own_heads(8, 4, 4)


def parts_of(keys: torch.Tensor, q: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` [T, H, D] over each part of ``keys`` [n, D], in float64."""
    outs, lses = [], []
    for part in keys.split(counts):
        logits = q @ part.t()
        lses.append(logits.logsumexp(-1))
        outs.append((logits - lses[-1].masked_fill(lses[-1] == -math.inf, 0)[..., None]).exp() @ part)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("counts", [[7], [3, 4], [0, 7], [7, 0], [0, 0, 5, 2], [1, 0, 6], [0, 0]])
@pytest.mark.parametrize("sink", [False, True])
def test_merged_states_are_attention_over_all_keys(counts: list[int], sink: bool) -> None:
    g = torch.Generator().manual_seed(len(counts))
    q, keys = (3 * torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((5, 2, 8), (sum(counts), 8)))
    sinks = torch.randn(2, generator=g) if sink else None
    outs, lses = parts_of(keys, q, counts)
    wanted, lse = parts_of(keys, q, [sum(counts)])
    if sinks is not None:
        wanted = wanted * torch.sigmoid(lse - sinks.double())[..., None]
    got = parallel.merge_states(outs.float(), lses.float(), sinks)
    torch.testing.assert_close(got.out, wanted[0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, lse[0].float(), rtol=1e-6, atol=1e-5)
    if sum(counts) == 0:
        assert (got.out == 0).all() and (got.lse == -math.inf).all()


def test_merging_one_part_changes_no_bit_and_large_lse_do_not_overflow() -> None:
    outs, lses = torch.randn(1, 3, 2, 16), 200 * torch.randn(1, 3, 2)
    got = parallel.merge_states(outs, lses)
    assert torch.equal(got.out, outs[0]) and torch.equal(got.lse, lses[0])
    got = parallel.merge_states(torch.stack([outs[0], -outs[0]]), torch.stack([lses[0] + 1e4, lses[0] - 1e4]))
    assert torch.equal(got.out, outs[0]) and torch.equal(got.lse, lses[0] + 1e4)


def test_nan_of_a_key_reaches_its_own_row_only() -> None:
    outs, lses = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2)
    clean = parallel.merge_states(outs, lses)
    outs[1, 2, 0], lses[1, 2, 0] = torch.nan, torch.nan
    got = parallel.merge_states(outs, lses)
    assert got.out[2, 0].isnan().all() and got.lse[2, 0].isnan()
    keep = torch.ones(3, 2, dtype=torch.bool)
    keep[2, 0] = False
    assert torch.equal(got.out[keep], clean.out[keep]) and torch.equal(got.lse[keep], clean.lse[keep])


def test_bad_arguments_are_named() -> None:
    slots, outs, lses = i32([[1, 2]]), torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: parallel.local_slots(slots.float(), 4, 0, 2), ArgumentDtypeError, "local_slots: slots must be int32 or int64"),
        (lambda: parallel.local_slots(slots, 4, 2, 2), ArgumentError, "cp_rank must be between 0 and 1, got 2"),
        (lambda: parallel.local_slots(slots, 4, 0, 0), ArgumentError, "cp_size must be between 1"),
        (lambda: parallel.local_slots(slots, 0, 0, 2), ArgumentError, "block_size must be between 1"),
        (lambda: parallel.local_slots(slots, 6, 0, 2, 4), ArgumentError, r"block_size must be a multiple of cp_interleave \(4\), got 6"),
        (lambda: parallel.compact_slots(slots[0]), ArgumentShapeError, "compact_slots: slots must be 2-dimensional"),
        (lambda: parallel.local_rows(slots, i32([1, 2]), 0, 2), ArgumentShapeError, r"lens must be of shape \[T\], one entry for each row of indices, got shape \[2\]"),
        (lambda: parallel.local_rows(slots, i32([1]), -1, 2), ArgumentError, "cp_rank must be between 0 and 1, got -1"),
        (lambda: parallel.merge_states(outs.half(), lses), ArgumentDtypeError, "outs must be float32 or bfloat16"),
        (lambda: parallel.merge_states(outs, lses.double()), ArgumentDtypeError, "lses must be float32"),
        (lambda: parallel.merge_states(outs, lses[:1]), ArgumentShapeError, r"lses must be of shape \[parts, T, H\], .* got shape \[1, 3, 4\]"),
        (lambda: parallel.merge_states(outs[:0], lses[:0]), ArgumentShapeError, "outs must be of at least one part"),
        (lambda: parallel.merge_states(outs, lses, torch.zeros(3)), ArgumentShapeError, r"attn_sink must be of shape \[H\], .* got shape \[3\]"),
        (lambda: parallel.ordered_sum(slots), ArgumentDtypeError, "ordered_sum: x must be float32 or bfloat16"),
        (lambda: parallel.ordered_sum(outs), ValueError, "process group has not been initialized"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


# ------------------------------------------------------------------------------------------------------ several ranks

VARIANTS = {
    "float32": Sizes(),
    "in runs of 4": Sizes(interleave=4),
    "all on one rank": Sizes(records=4, page=16, interleave=4, k=8),  # every record on rank 0: the others have an empty context
    "fp8 pages, bfloat16 queries": Sizes(query=torch.bfloat16, cache=torch.uint8),
    "k above the records": Sizes(records=16, k=40),
}


def own_step(step: toys.Step, sizes: Sizes, rank: int, size: int) -> toys.Step:
    return step._replace(scores=toys.own_scores(step.scores, rank, size, sizes.interleave))


def split_all(rank: int, size: int) -> dict[str, Any]:
    """Each variant: the step, the same again, and the first rows alone; then sums."""
    results: dict[str, Any] = {}
    for name, sizes in VARIANTS.items():
        sizes = sizes if name != "all on one rank" else sizes._replace(interleave=sizes.page // size, records=sizes.page // size)
        caches = toys.draw_caches(sizes, rank, size)
        step = own_step(toys.draw_step(sizes, TOKENS), sizes, rank, size)
        few = toys.Step(*(t[:6] for t in step))
        results[name] = [toys.split_step(s, caches, sizes, rank, size) for s in (step, step, few)]
        results[name].append((caches.slots, sizes))
    narrow = own_step(toys.draw_step(Sizes(), TOKENS), Sizes(), rank, size).scores.bfloat16()
    local = dsv4_ops.local_context_lens(toys.draw_step(Sizes(), TOKENS).lens.clamp(max=96), rank, size)
    results["bfloat16 scores"] = parallel.context_parallel_topk(narrow, local, 24)
    results["no rows"] = parallel.context_parallel_topk(narrow[:0], local[:0], 24)
    results["sum"] = parallel.ordered_sum(torch.tensor([[1e8, 1.0, -1e8, 1.0][rank]]))
    results["narrow sum"] = parallel.ordered_sum(torch.full((2, 3), [256.0, 1.0, 1.0, 1.0][rank], dtype=torch.bfloat16))
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_split_context_gives_what_one_rank_gives(size: int) -> None:
    ranks = launch(split_all, size)
    for name in VARIANTS:
        sizes = ranks[0][name][3][1]
        columns, out, lse = toys.one_rank(toys.draw_step(sizes, TOKENS), toys.draw_caches(sizes, 0, 1), sizes)
        held = torch.stack([r[name][3][0] >= 0 for r in ranks]).sum(0)
        assert (held == 1).all(), "each record is written by one rank"
        if name == "all on one rank":
            assert not (ranks[1][name][3][0] >= 0).any()
        assert (out[0] == 0).all() and lse[0].eq(-torch.inf).all() and lse[1:3].isfinite().any(), "the step must have a row without keys, and rows of one key"
        for result, again, few, _ in (r[name] for r in ranks):
            assert torch.equal(result[0], columns), f"{name}: chosen columns"
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if sizes.query == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
            torch.testing.assert_close(result[1], out, **tolerance)
            torch.testing.assert_close(result[2], lse, rtol=1e-5, atol=1e-5)
            assert result[1].dtype == out.dtype
            assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True)), f"{name}: the same input, the same bits"
            assert all(torch.equal(a[:6], b) for a, b in zip(result, few, strict=True)), f"{name}: a row depends on its batch"
            assert all(torch.equal(a, b) for a, b in zip(result, ranks[0][name][0], strict=True)), f"{name}: ranks differ"
    step = toys.draw_step(Sizes(), TOKENS)
    for r in ranks:
        assert torch.equal(r["bfloat16 scores"], dsv4_ops.topk(step.scores.bfloat16(), step.lens, 24))
        assert r["no rows"].shape == (0, 24)
        # In the order of ranks: ((1e8 + 1) - 1e8) + 1, where 1e8 + 1 is 1e8; and 259 rounded once is 260, 256 + 1 rounded each time is 256.
        assert r["sum"].tolist() == [1e8 if size == 2 else 1.0]
        assert (r["narrow sum"] == (256 if size == 2 else 260)).all()


def compiled_step(rank: int, size: int) -> tuple[list[int], int]:
    """One program for all batch sizes, in a group of the first ranks as well; how many rows were compared, and how many programs were made."""
    sizes, rows = Sizes(interleave=2), []
    group = dist.new_group(list(range(size)))
    caches = toys.draw_caches(sizes, rank, size)
    programs = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        columns, out, lse = toys.split_step(toys.Step(*tensors), caches, sizes, rank, size, group)
        return columns, parallel.ordered_sum(out, group), lse

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        compiled = torch.compile(function, fullgraph=True, backend=programs)
        for tokens in (10, 13, 11):  # no other size of the program
            step = own_step(toys.draw_step(sizes, tokens, seed=tokens), sizes, rank, size)
            for tensor in step:
                torch._dynamo.mark_dynamic(tensor, 0)
            for actual, expected in zip(compiled(*step), function(*step), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            rows.append(tokens)
    return rows, programs.frame_count


def test_split_steps_compile_as_one_program() -> None:
    assert launch(compiled_step, 2) == [([10, 13, 11], 1)] * 2


def replayed_step(rank: int, size: int) -> list[tuple[int, bool, bool, bool]]:
    """A captured step on changed inputs: as the eager one to the bit, and with the columns and rows of one rank."""
    from dsv4_ops.graphs import GraphPool, StepInput
    from dsv4_ops.testing import PYTHON_KERNELS, TapeRecorder

    PYTHON_KERNELS[torch.ops._c10d_functional._wrap_tensor_autograd.default] = torch.ops._c10d_functional.wait_tensor
    sizes = Sizes(interleave=2)
    caches, whole = toys.draw_caches(sizes, rank, size), toys.draw_caches(sizes, 0, 1)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        columns, out, lse = toys.split_step(toys.Step(*tensors), caches, sizes, rank, size)
        return columns, out, lse, parallel.ordered_sum(out)

    inputs = {name: StepInput(t.dtype, tuple(t.shape[1:])) for name, t in own_step(toys.draw_step(sizes, 3), sizes, rank, size)._asdict().items()}
    step = GraphPool("cpu", recorder=TapeRecorder()).step("split", function, inputs, sizes=(8, 16))
    step.pool.capture()
    found = []
    for tokens in (16, 5, 8, 1, 11):
        drawn = toys.draw_step(sizes, tokens, seed=tokens)
        columns, out, _ = toys.one_rank(drawn, whole, sizes)
        mine = own_step(drawn, sizes, rank, size)
        got = [t[:tokens].clone() for t in step(*mine).read()]
        same = all(torch.equal(a, b) for a, b in zip(got, function(*mine), strict=True))
        found.append((tokens, same, torch.equal(got[0], columns), torch.allclose(got[1], out, rtol=1e-5, atol=1e-5)))
    return found


def test_a_captured_step_replays_its_collectives() -> None:
    """By the stand-in for CUDA graphs: it refuses what reads on the host, and replays ops on the memory of the capture."""
    assert launch(replayed_step, 2) == [[(tokens, True, True, True) for tokens in (16, 5, 8, 1, 11)]] * 2


def rank_1_fails(rank: int, size: int, how: str, wait_s: float) -> None:
    dist.barrier()
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=wait_s))
    if rank == 0:
        began = time.monotonic()
        try:
            parallel.ordered_sum(torch.zeros(3), group)
        except RuntimeError:
            raise ZeroDivisionError(f"rank 0 gave up after {time.monotonic() - began:.0f} s") from None
    if how == "raises":
        raise ZeroDivisionError("rank 1 is broken")
    time.sleep(600)


@pytest.mark.parametrize(("how", "wait_s", "error"), [("raises", 180.0, "rank 1 is broken|rank 0 gave up"), ("is stuck", 4.0, "rank 0 gave up after ..? s")])
def test_nobody_waits_without_end_for_a_rank_that_fails(how: str, wait_s: float, error: str) -> None:
    began = time.monotonic()
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=error):
        launch(rank_1_fails, 2, how, wait_s)
    assert time.monotonic() - began < 150, "not as long as it could take"


def judged_rank(rank: int, size: int) -> list[dict[str, Any]]:
    from benchmarks.parallel import Bench

    bench = Bench(rank, size, "cpu")
    bench.row("right", "case", "all", {}, [lambda: 1], lambda got: got == 1)
    bench.row("wrong on rank 1", "case", "all", {}, [lambda: rank], lambda got: got == 0)
    return bench.rows


def test_the_benchmark_gives_no_time_to_what_is_wrong_on_any_rank() -> None:
    for right, wrong in launch(judged_rank, 2):
        assert right["ok"] and right["us_p50"] >= 0
        assert not wrong["ok"] and "us_p50" not in wrong


# --------------------------------------------------------------------------------------------------------- the engine

LENGTHS, STEPS = (300, 5, 129, 64), 8


def make_engine(**options: Any) -> Any:
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.engine import Engine
    from tests.engine_toys import random_model

    sizes = {"max_num_seqs": 3, "max_model_len": 512, "max_num_batched_tokens": 128, "compressed_block_size": 512, "record_logits": True}
    return Engine(random_model(), EngineConfig(**{**sizes, **options}))


def decode(engine: Any) -> tuple[list[list[int]], torch.Tensor]:
    from dataclasses import replace

    from tests.engine_toys import random_prompt, requests_of

    requests = requests_of([random_prompt(n, n) for n in LENGTHS], STEPS)
    requests = [replace(r, temperature=0.7, seed=r.index) if r.index == 3 else r for r in requests]
    completions = engine.generate(requests)
    return [c.token_ids for c in completions], torch.cat([torch.stack(c.logits) for c in completions])


def engine_rank(rank: int, size: int, splits: list[tuple[int, int]]) -> list[Any]:
    results = []
    for tensor, context in splits:
        engine = make_engine(tensor_parallel=tensor, context_parallel=context)
        results.append((*decode(engine), engine.stats.kv_bytes))
    if size == 2:  # another rank's own choice would be another token: its head is turned round
        engine = make_engine(tensor_parallel=size)
        if rank > 0:
            engine.target.model.lm_head.weight.neg_()
        results.append((decode(engine)[0],))
    return results


@pytest.mark.parametrize(("size", "splits"), [(2, [(2, 1), (1, 2)]), (4, [(2, 2), (1, 4)])])
def test_the_engine_gives_the_tokens_of_one_rank(size: int, splits: list[tuple[int, int]]) -> None:
    """Heads, context and both split; prompts in chunks, choices of the indexer (64 of 75 records), a sampled request, preemption not needed."""
    pytest.importorskip("transformers")
    whole = make_engine()
    tokens, logits = decode(whole)
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3 and len({t for row in tokens for t in row}) > 10, "no near-tie that rounding could decide"
    ranks = launch(engine_rank, size, splits)
    for result in ranks:
        for (tensor, context), (got, rows, kv_bytes) in zip(splits, result, strict=False):
            assert got == tokens, f"tensor_parallel {tensor}, context_parallel {context}"
            assert 0 < (rows - logits).abs().max() < 1e-4
            assert (kv_bytes < whole.stats.kv_bytes) == (context > 1), "a rank holds a part of the records"
        assert all(torch.equal(a[1], b[1]) for a, b in zip(result[:2], ranks[0][:2], strict=True)), "logits are the same to the bit on every rank"
        assert all(rest[0] == tokens for rest in result[2:]) and len(result) == (3 if size == 2 else 2), "rank 0 decides"


def drafting_rank(rank: int, size: int, checkpoint: str) -> list[Any]:
    return [drafted(checkpoint, mode, context_parallel=size) for mode in ("mtp", "dspark")]


def drafted(checkpoint: str, mode: str, **options: Any) -> tuple[list[list[int]], dict[int, int]]:
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.engine import Engine
    from dsv4_ops.engine.requests import Request

    text = b"The old lighthouse keeper climbed the stairs each night, counting them aloud, and the sea answered in its own time. " * 3
    engine = Engine(checkpoint, EngineConfig(mode=mode, max_num_seqs=2, max_model_len=512, max_num_batched_tokens=64, num_speculative_tokens=2 if mode == "mtp" else 4, **options))
    done = engine.generate([Request(i, tuple(text[i : i + n]), 16) for i, n in enumerate((300, 7))])
    return [c.token_ids for c in done], dict(engine.stats.accepted)


def test_drafters_beside_a_split_target(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from dsv4_ops.engine.tiny import make_tiny

    make_tiny(tmp_path)
    alone = [drafted(str(tmp_path), mode) for mode in ("mtp", "dspark")]
    assert all(max(accepted) > 1 for _, accepted in alone), "drafts are accepted, or this shows nothing"
    assert launch(drafting_rank, 2, str(tmp_path)) == [alone, alone]


def test_an_engine_that_cannot_be_split_says_why() -> None:
    pytest.importorskip("transformers")
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match=r"6 processes are needed, torch\.distributed is not initialized") as error:
        make_engine(tensor_parallel=2, context_parallel=3, compressed_block_size=384)
    assert "tensor_parallel 2 and context_parallel 3" in str(error.value)
    with pytest.raises(UnsupportedError, match=r"(?s)compressed_block_size 512 .* 128, the compress ratio .*, times context_parallel \(3\).*num_attention_heads 4 .*tensor_parallel \(8\).*o_groups 2"):
        make_engine(tensor_parallel=8, context_parallel=3)
    for name in ("tensor_parallel", "context_parallel"):
        with pytest.raises(ArgumentError, match=f"{name} must be at least 1"):
            EngineConfig(**{name: 0})
