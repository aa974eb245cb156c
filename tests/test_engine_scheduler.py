"""Scheduling and step inputs, first without a model, then with one: batches, chunks, padding and preemption never change a token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from dsv4_ops import gumbel_sample
from dsv4_ops.engine.attention import PagedAttention, build_metadata, closing_tokens
from dsv4_ops.engine.blocks import KVGroup
from dsv4_ops.engine.config import EngineConfig
from dsv4_ops.engine.engine import Engine
from dsv4_ops.engine.requests import Completion, Request
from dsv4_ops.engine.scheduler import Scheduled, Scheduler
from dsv4_ops.engine.step import StepInputs, build_step, dummy_step
from dsv4_ops.engine.target import geometry_of
from dsv4_ops.errors import ArgumentError, RequestError, UnsupportedError
from tests.engine_toys import VOCAB, make_engine, random_model, random_prompt, requests_of

LAYERS = ("compressed_sparse_attention", "heavily_compressed_attention")


@pytest.fixture(scope="module")
def model() -> DeepseekV4ForCausalLM:
    return random_model(1, LAYERS)


# Scheduling alone.


def scheduler(config: EngineConfig, window_blocks: int = 50, compressed_blocks: int = 50, draft_blocks: int = 0, lookahead: int = 0) -> Scheduler:
    groups = {"window": KVGroup("window", 64, window_blocks, 127), "compressed": KVGroup("compressed", 256, compressed_blocks)}
    if draft_blocks:
        groups["draft"] = KVGroup("draft", 64, draft_blocks, 128)
    return Scheduler(config, groups, lookahead)


def next_token(tokens: list[int]) -> int:
    """A deterministic stand-in for a model."""
    return (31 * sum(tokens[-3:]) + 7 * len(tokens)) % 97


def run(each: Scheduler, max_steps: int = 5000, seed: int = 0) -> tuple[list[Completion], list[list[Scheduled]]]:
    """Drive a scheduler to the end, with drafts that are right for a random number of tokens."""
    rng, steps = random.Random(seed), []
    done: list[Completion] = []
    drafts = each.config.tokens_per_decode - 1
    while each.has_work:
        batch = each.schedule()
        assert batch and len(steps) < max_steps
        steps.append(batch)
        for part in batch:
            emitted: list[int] = []
            tokens = part.sequence.tokens
            if part.samples:
                emitted = [next_token(tokens)]
                for draft in part.drafts:
                    if draft != emitted[-1]:
                        break
                    emitted.append(next_token([*tokens, *emitted]))
            if each.commit(part, emitted):
                done.append(part.sequence.completion)
            elif part.samples and drafts:
                future = list(part.sequence.tokens)
                for _ in range(drafts):
                    future.append(next_token(future))
                right = rng.randint(0, drafts)
                part.sequence.draft_ids = [t if i < right else (t + 1) % 97 for i, t in enumerate(future[-drafts:])]
    return done, steps


def expected(request: Request) -> list[int]:
    tokens = list(request.prompt_ids)
    for _ in range(request.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(request.prompt_ids) :]


def test_decodes_come_first_and_a_prefill_chunk_takes_the_rest() -> None:
    each = scheduler(EngineConfig(max_num_seqs=3, max_num_batched_tokens=32))
    each.add(Request(0, (1,) * 10, 5))
    assert [(p.start, p.num_known, p.samples) for p in each.schedule()] == [(0, 10, True)]
    each.commit(Scheduled(each.running[0], 0, 10, [], True), [5])
    each.add(Request(1, (2,) * 70, 5))
    each.add(Request(2, (3,) * 4, 5))
    batch = each.schedule()
    assert [(p.sequence.request.index, p.start, p.num_known, p.samples) for p in batch] == [(0, 10, 1, True), (1, 0, 31, False)]
    each.commit(batch[0], [6])
    each.commit(batch[1], [])
    batch = each.schedule()
    assert [(p.sequence.request.index, p.start, p.num_known, p.samples) for p in batch] == [(0, 11, 1, True), (1, 31, 31, False)]
    each.commit(batch[0], [7])
    each.commit(batch[1], [])
    batch = each.schedule()
    assert [(p.sequence.request.index, p.start, p.num_known, p.samples) for p in batch] == [(0, 12, 1, True), (1, 62, 8, True), (2, 0, 4, True)]


def test_draft_tokens_ride_along_and_are_never_cut_to_fit() -> None:
    each = scheduler(EngineConfig(mode="mtp", num_speculative_tokens=3, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64))
    sequence = each.add(Request(0, (1, 2, 3), 6))
    part = each.schedule()[0]
    assert not each.commit(part, [9])
    sequence.draft_ids = [10, 11, 12]
    part = each.schedule()[0]
    assert (part.start, part.token_ids, part.num_known) == (3, [9, 10, 11, 12], 1)
    # Two drafts were right: positions 3, 4, 5 have KV, and the token that replaced the third is not run yet.
    each.commit(part, [10, 11, 50])
    assert sequence.num_computed == 6 and sequence.tokens == [1, 2, 3, 9, 10, 11, 50]
    sequence.draft_ids = [60, 61, 62]
    part = each.schedule()[0]
    assert part.drafts == [60]  # two tokens are left: one draft and the one after it
    assert each.commit(part, [60, 61]) and sequence.completion.token_ids == [9, 10, 11, 50, 60, 61]
    assert sequence.completion.steps == 2 and sequence.completion.accepted_lengths == [3, 2]  # the prompt's own token is no decode step
    # Preempted while decoding: the drafts wait until the last known token runs again, with all of them.
    sequence = each.add(Request(1, (1,) * 9, 20))
    for _ in range(2):
        part = each.schedule()[0]
        each.commit(part, [4] if part.samples else [])
    sequence.draft_ids = [5, 6, 7]
    each._preempt(sequence)
    starts = []
    while sequence.draft_ids:
        part = each.schedule()[0]
        starts.append((part.start, part.num_known, part.drafts))
        each.commit(part, [8] if part.samples else [])
    assert starts == [(0, 8, []), (8, 2, [5, 6, 7])]


@pytest.mark.parametrize("mode", ["plain", "mtp"])
@pytest.mark.parametrize("seed", range(8))
def test_small_pools_finish_every_request_with_the_same_tokens(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    config = EngineConfig(mode=mode, max_num_seqs=6, max_num_batched_tokens=rng.choice([32, 100]), max_model_len=900)
    requests = [Request(i, tuple(rng.randrange(97) for _ in range(rng.randint(1, 700))), rng.randint(1, 150)) for i in range(12)]
    requests.append(Request(12, (1,) * 899, 50))
    lookahead = 3 if mode == "mtp" else 0
    window = 1 + KVGroup.blocks_for(900, 64, 127, config.max_num_batched_tokens)
    each = scheduler(config, window + 2, 5, (window + 2) if lookahead else 0, lookahead)
    for request in requests:
        each.add(request)
    done, steps = run(each, seed=seed)
    assert each.num_preemptions > 0
    assert sorted(c.index for c in done) == list(range(13))
    for completion in done:
        wanted = expected(requests[completion.index])
        assert completion.token_ids == (wanted if completion.index < 12 else wanted[:1])  # the last one meets the model's limit
    for batch in steps:
        assert sum(p.num_tokens for p in batch) <= config.max_num_batched_tokens and len(batch) <= config.max_num_seqs
        assert len({id(p.sequence) for p in batch}) == len(batch)
    # Drained: every block and row is free again.
    assert all(group.pool.num_free == group.pool.capacity for group in each.groups.values())
    assert not each.running and sorted(each._free_rows) == list(range(6))


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    each = scheduler(EngineConfig(max_model_len=2000), compressed_blocks=4)
    each.add(Request(0, (1,) * 700, 68))
    with pytest.raises(RequestError, match=r"request 1: 769 positions need 4 blocks of the compressed group, it has 3; raise num_compressed_blocks"):
        each.add(Request(1, (1,) * 700, 69))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(3, ()), "request 3: the prompt is empty"),
        (Request(3, (1, VOCAB)), "token id 512 is outside"),
        (Request(3, (1,) * 100), "has 100 tokens, the limit is 99"),
        (Request(3, (1,), 0), "max_tokens must be at least 1, got 0"),
        (Request(3, (1,), temperature=-0.5), "temperature must be 0 or more, got -0.5"),
        (Request(3, (1,), temperature=float("nan")), "temperature must be 0 or more, got nan"),
        (Request(3, (1,), seed=2**63), "seed must fit in 64 bits"),
    ],
)
def test_bad_requests_are_named(request_: Request, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        EngineConfig(max_model_len=100).validate(request_, VOCAB)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "eagle"}, "mode must be one of plain, mtp, dspark, dflash"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of float32, bfloat16, fp8"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"mode": "mtp", "num_speculative_tokens": 7, "max_num_batched_tokens": 63}, r"max_num_batched_tokens must be at least .* = 64, got 63"),
        ({"num_window_blocks": 1}, "num_window_blocks must be at least 2"),
        ({"capture_sizes": ()}, "capture_sizes must be positive token counts"),
    ],
)
def test_bad_configs_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        EngineConfig(**fields)


def test_case_D06_steps_are_padded_to_a_capture_size_or_run_exactly() -> None:
    assert [EngineConfig().padded_tokens(n) for n in (1, 2, 3, 33, 256)] == [1, 2, 4, 64, 256]
    assert [EngineConfig(capture_sizes=(24, 1, 2, 4)).padded_tokens(n) for n in (1, 3, 5, 24, 25)] == [1, 4, 24, 24, 25]
    config = EngineConfig(max_num_seqs=33, mode="dspark", num_speculative_tokens=3, capture_sizes=(8, 136))
    step = dummy_step(config, config.padded_tokens(33 * config.tokens_per_decode))
    assert step.input_ids.shape[0] == 136 and step.logits_rows.shape[0] == 132
    assert step.input_ids.tolist() == [0] * 136 == step.positions.tolist()


# Step inputs.


def test_step_inputs_write_every_entry_and_pad_as_a_graph_engine_does() -> None:
    config = EngineConfig(mode="mtp", num_speculative_tokens=2, max_num_seqs=4, max_num_batched_tokens=64, capture_sizes=(16,), max_model_len=512)
    each = scheduler(config)
    first, second = each.add(Request(0, tuple(range(10, 15)), 9)), each.add(Request(1, tuple(range(100, 170)), 9))
    for part in each.schedule():
        each.commit(part, [77] if part.samples else [])
    first.draft_ids = [78, 79]
    batch = each.schedule()
    assert [(p.sequence is first, p.num_tokens) for p in batch] == [(True, 3), (False, 11)]
    step, sample = build_step(config, each.groups, batch)
    assert step.input_ids.tolist() == [77, 78, 79, *range(159, 170), 0, 0]
    assert step.positions.tolist() == [5, 6, 7, *range(59, 70), 0, 0]
    assert step.query_start_loc.tolist() == [0, 3, 14, 14, 14] and step.seq_lens.tolist() == [8, 70, 0, 0]
    a, b = first.tables["window"].blocks, second.tables["window"].blocks
    assert step.window_table.tolist() == [a + [0] * 7, b + [0] * 6, [0] * 8, [0] * 8]
    assert step.compressed_table.shape == (4, 2) and step.compressed_table[2:].tolist() == [[0, 0]] * 2
    assert step.logits_rows.tolist() == [0, 1, 2, 13, 0, 0, 0, 0, 0, 0, 0, 0]
    assert sample.idx_mapping.tolist() == [first.row, second.row, -1, -1] == sample.state_rows.tolist()
    assert sample.positions.tolist() == [6, 70, 0, 0] and sample.draft_ids.tolist() == [[78, 79], [-1, -1], [-1, -1], [-1, -1]]
    assert sample.next_prefill_tokens.tolist() == [0, 0, 0, 0]


def test_case_D15_unfinished_chunk_names_the_next_prompt_token_and_gives_none() -> None:
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=6, max_model_len=64)
    each = scheduler(config)
    each.add(Request(0, tuple(range(1, 11)), 4))
    _, sample = build_step(config, each.groups, each.schedule())
    assert sample.next_prefill_tokens.tolist() == [7] and sample.idx_mapping.tolist() == [-1] and sample.state_rows.tolist() == [0]


@pytest.mark.parametrize("width", range(2, 13))
def test_case_H10_compressor_plan_covers_every_verify_row_at_every_start(width: int, model: DeepseekV4ForCausalLM) -> None:
    """Each row's state is written once, each window that closes is in the plan, and it reads exactly its 8 (CSA) positions."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=512)
    geometry = geometry_of(model.config, config)
    table = torch.tensor([[3, 5, 2, 7, 0, 0, 0, 0], [0] * 8], dtype=torch.int32)
    compressed = torch.tensor([[4, 0], [0, 0]], dtype=torch.int32)
    for start in [*range(16), 59, 60, 61, 62, 63, 116, 127, 128]:
        step = dummy_step(config, 16)
        positions = torch.arange(start, start + width)
        step.positions[:width] = positions
        step.query_start_loc[1:] = width
        step.seq_lens[0] = start + width
        slots = 64 * table[0, positions // 64].to(torch.int64) + positions % 64
        metadata = build_metadata(step._replace(window_table=table, compressed_table=compressed), geometry)
        assert torch.equal(metadata.window_slots, torch.cat([slots, slots.new_full((16 - width,), -1)]))
        for kind, ratio, span in (("compressed_sparse_attention", 4, 8), ("heavily_compressed_attention", 128, 128)):
            plan = metadata.plans[kind]
            closing = [p for p in positions.tolist() if (p + 1) % ratio == 0]
            n = len(closing)
            assert plan.tokens[:n].tolist() == [p - start for p in closing]
            assert plan.positions[:n].tolist() == [p + 1 - ratio for p in closing]
            assert plan.slots.tolist() == [4 * (256 // ratio) + p // ratio for p in closing] + [-1] * (len(plan.slots) - n)
            for row, p in zip(plan.state_slots[:n].tolist(), closing, strict=True):
                assert row == [64 * int(table[0, q // 64]) + q % 64 if q >= 0 else -1 for q in range(p - span + 1, p + 1)]
            assert (plan.state_slots[n:] == -1).all()
            assert plan.lens.tolist() == [(p + 1) // ratio for p in positions.tolist()] + [0] * (16 - width)


def test_compressor_plan_holds_the_worst_case_of_any_batch() -> None:
    """Every request closes a window with its first token."""
    for ratio in (1, 2, 4, 128):
        for lengths in ([1] * 8, [5, 1, 1], [ratio + 1] * 4, [3 * ratio + 1, ratio + 1]):
            positions = torch.cat([torch.arange(ratio - 1, ratio - 1 + n) for n in lengths])
            rows = closing_tokens(positions, torch.ones(len(positions), dtype=torch.bool), ratio, len(lengths))
            wanted = [i for i, p in enumerate(positions.tolist()) if (p + 1) % ratio == 0]
            assert rows[: len(wanted)].tolist() == wanted and (rows[len(wanted) :] == -1).all()


# With a model.


def kv_buffers(engine: Engine) -> dict[str, torch.Tensor]:
    """Every KV page, record and state, without the spare rows that take what has no slot."""
    found = {}
    for i, layer in enumerate(engine.target.model.model.layers):
        for name, buffer in layer.self_attn.named_buffers():
            if name.endswith(("kv_cache", "records")):
                found[f"{i}.{name}"] = buffer
            elif name.endswith(".data"):
                found[f"{i}.{name}"] = buffer[:-1]
    assert len(found) >= 8
    return found


def snapshot(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in kv_buffers(engine).items()}


PROMPTS = [random_prompt(i, n) for i, n in enumerate((1, 60, 125, 250, 33, 300))]
SIZES = {"max_model_len": 512, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def alone(model: DeepseekV4ForCausalLM) -> list[list[int]]:
    """Tokens of each prompt when it is served alone, unchunked."""
    return [make_engine(model, **SIZES, max_num_batched_tokens=512).generate(requests_of([p], 12))[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 256},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "capture_sizes": (64,)},
        {"max_num_batched_tokens": 100, "num_window_blocks": 7, "num_compressed_blocks": 4},
        {"max_num_batched_tokens": 100, "window_block_size": 16, "compressed_block_size": 128},
        {"max_num_batched_tokens": 100, "max_num_seqs": 1},
    ],
    ids=["continuous batching", "tiny chunks", "one capture size", "small pools", "other page sizes", "one at a time"],
)
def test_batches_chunks_padding_and_preemption_change_no_token(fields: dict[str, Any], model: DeepseekV4ForCausalLM, alone: list[list[int]]) -> None:
    engine = make_engine(model, **(SIZES | fields))
    # Nothing that was not written is ever used: pages start as NaN, block 0 included.
    for buffer in kv_buffers(engine).values():
        buffer.fill_(float("nan"))
    finished: list[int] = []
    completions = engine.generate(requests_of(PROMPTS, 12), on_finish=lambda c: finished.append(c.index))
    assert [c.token_ids for c in completions] == alone
    assert sorted(finished) == [c.index for c in completions] == list(range(6))
    assert (engine.stats.preemptions > 0) == ("num_window_blocks" in fields)
    assert all(group.pool.num_free == group.pool.capacity for group in engine.groups.values())
    for name, buffer in kv_buffers(engine).items():  # nobody wrote to the null block
        null = buffer[0] if buffer.dim() == 3 else buffer[: buffer.shape[0] // engine.groups["window" if "state" in name else "compressed"].pool.num_blocks]
        assert null.isnan().all(), name
    # Drained to zero, it serves again, on pages that are full of what is over.
    assert [c.token_ids for c in engine.generate(requests_of(PROMPTS, 12))] == alone


def test_a_row_is_bit_identical_whatever_shares_its_step(model: DeepseekV4ForCausalLM) -> None:
    """One capture size: the same products, so the same bits."""
    config = SIZES | {"max_num_batched_tokens": 64, "capture_sizes": (64,), "record_logits": True}
    one = make_engine(model, **config).generate(requests_of(PROMPTS[1:2], 8))[0]
    many = make_engine(model, **config).generate([*requests_of(PROMPTS[2:5], 8), Request(7, PROMPTS[1], 8)])[3]
    assert torch.equal(torch.stack(one.logits), torch.stack(many.logits)) and len(one.logits) == 8


def live_step(engine: Engine, tokens: int) -> StepInputs:
    """The inputs of a first step with two live requests (5 and 3 tokens), padded to ``tokens``."""
    for request in requests_of([PROMPTS[1][:5], PROMPTS[2][:3]], 4):
        engine.scheduler.add(request)
    step, _ = build_step(engine.config, engine.groups, engine.scheduler.schedule())
    assert step.input_ids.shape[0] == tokens and step.query_start_loc.tolist() == [0, 5, 8, 8, 8]
    return step


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_case_E15_poison_in_padding_rows_reaches_no_row_and_no_page(poison: float, model: DeepseekV4ForCausalLM) -> None:
    """Hidden states of padding rows are garbage: live rows keep their bits, and pages are written as without them."""
    results = []
    for value in (0.0, poison):
        engine = make_engine(model, **SIZES, capture_sizes=(16,))
        metadata = build_metadata(live_step(engine, 16), engine.target.geometry)
        positions = torch.zeros(1, 16, dtype=torch.int64)
        positions[0, :8] = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
        hidden = torch.randn(1, 16, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden[:, 8:] = value
        rotary = engine.target.model.model.rotary_emb
        embeddings = {kind: rotary(hidden.nan_to_num(), position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
        outs = []
        with torch.no_grad():
            for layer in engine.target.model.model.layers:
                assert isinstance(layer.self_attn, PagedAttention)
                for _ in range(2):  # the second time, what the first left in spare rows is there too
                    outs.append(layer.self_attn(hidden, embeddings, positions, metadata=metadata)[0][0, :8])
        results.append((outs, snapshot(engine)))
    (clean, clean_pages), (dirty, dirty_pages) = results
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(clean, dirty, strict=True))
    assert all(torch.equal(clean_pages[name], dirty_pages[name]) for name in clean_pages)


def test_case_D07_requests_of_padding_touch_nobodys_pages(model: DeepseekV4ForCausalLM) -> None:
    """Two live requests in a batch of four: only their blocks are written, whatever stale ids the padding tokens carry."""
    engine = make_engine(model, **SIZES, capture_sizes=(16,))
    step = live_step(engine, 16)
    step.input_ids[8:] = 99
    step.positions[8:] = torch.arange(8) + 60
    owned = {int(b) for b in step.window_table.flatten() if b}
    for buffer in kv_buffers(engine).values():
        buffer.fill_(123.0)
    with torch.no_grad():
        engine.target(step)
    assert len(owned) == 2
    for name, buffer in kv_buffers(engine).items():
        if name.endswith("kv_cache"):
            touched = {b for b in range(buffer.shape[0]) if (buffer[b] != 123.0).any()}
            assert touched == owned, name
            assert [int((buffer[b] != 123.0).any(-1).sum()) for b in (int(step.window_table[0, 0]), int(step.window_table[1, 0]))] == [5, 3]
        elif name.endswith("records"):
            touched = {b for b in range(buffer.shape[0]) if (buffer[b] != 123.0).any()}
            assert touched <= {int(step.compressed_table[0, 0])}, name


def test_case_D14_dummy_step_after_a_real_one_changes_no_page(model: DeepseekV4ForCausalLM) -> None:
    engine = make_engine(model, **SIZES, capture_sizes=(16,))
    step = live_step(engine, 16)
    with torch.no_grad():
        engine.target(step)
        before = snapshot(engine)
        out = engine.target(dummy_step(engine.config, 16))
    after = kv_buffers(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert out.logits.isfinite().all()


def test_temperature_depends_on_the_seed_and_not_on_the_batch(model: DeepseekV4ForCausalLM) -> None:
    config = SIZES | {"max_num_batched_tokens": 64, "capture_sizes": (64,), "record_logits": True}
    request = Request(0, PROMPTS[1], 12, temperature=1.0, seed=7)
    completion = make_engine(model, **config).generate([request])[0]
    alone = completion.token_ids
    # Each token is the draw of its own logits, seed and position.
    positions = len(PROMPTS[1]) + torch.arange(12)
    drawn = gumbel_sample(torch.stack(completion.logits), torch.ones(1), torch.tensor([7]), positions, torch.zeros(12, dtype=torch.int64))
    assert drawn.tolist() == alone
    mates = [Request(i, PROMPTS[i], 10, temperature=0.7 * (i % 2), seed=100 + i) for i in range(2, 5)]
    assert make_engine(model, **config).generate([*mates, request])[3].token_ids == alone
    small = make_engine(model, **config, num_window_blocks=7, num_compressed_blocks=4)
    assert small.generate([*mates, request])[3].token_ids == alone and small.stats.preemptions > 0
    assert make_engine(model, **config).generate([Request(0, PROMPTS[1], 12, temperature=1.0, seed=8)])[0].token_ids != alone


def test_stop_ids_and_limits_end_a_request(model: DeepseekV4ForCausalLM, alone: list[list[int]]) -> None:
    at = next(i for i in range(3, 12) if alone[1][i] not in alone[1][:i])
    engine = make_engine(model, max_model_len=70, record_margins=True)
    stopped, limited = engine.generate([Request(0, PROMPTS[1], 12, stop_ids=(alone[1][at],)), Request(1, PROMPTS[1], 12)])
    assert (stopped.token_ids, stopped.finish_reason) == (alone[1][: at + 1], "stop")
    assert (limited.token_ids, limited.finish_reason) == (alone[1][:10], "length")  # 60 + 10 positions
    assert len(limited.margins) == 10 and min(limited.margins) > 0
    assert limited.steps == 9 and limited.accepted_lengths == [1] * 9
    with pytest.raises(RequestError, match="request 5"):
        engine.generate([Request(4, (1,), 2), Request(5, (), 2)])
    small = make_engine(model, **SIZES, num_compressed_blocks=2)
    with pytest.raises(RequestError, match="request 5: 257 positions need 2 blocks of the compressed group"):
        small.generate([Request(4, (1,), 2), Request(5, (1,) * 250, 7)])
    assert not engine.scheduler.has_work and not small.scheduler.has_work  # nothing of a refused call is left behind


def test_models_that_do_not_fit_are_refused_with_all_reasons(model: DeepseekV4ForCausalLM) -> None:
    with pytest.raises(UnsupportedError, match=r"compressed_block_size 100 .* multiple of 128"):
        make_engine(model, compressed_block_size=100)
    with pytest.raises(ArgumentError, match="proposer"):
        make_engine(model, mode="mtp")


def test_two_engines_on_one_model_do_not_meet(model: DeepseekV4ForCausalLM, alone: list[list[int]]) -> None:
    """Each has pages of its own, also when the pages of one are fewer and their steps alternate; the model keeps its attention."""
    attention = [layer.self_attn for layer in model.model.layers]
    configs = EngineConfig(**SIZES), EngineConfig(max_model_len=260, max_num_seqs=1, num_window_blocks=8)
    engines = [Engine(model, config) for config in configs]
    served: list[dict[int, list[int]]] = [{}, {}]
    for engine, picked in zip(engines, ((1, 2, 4), (4, 2)), strict=True):
        for i in picked:
            engine.scheduler.add(Request(i, PROMPTS[i], 12))
    while any(engine.scheduler.has_work for engine in engines):
        for engine, done in zip(engines, served, strict=True):
            if engine.scheduler.has_work:
                done.update((c.index, c.token_ids) for c in engine.step())
    assert served == [{i: alone[i] for i in (1, 2, 4)}, {i: alone[i] for i in (2, 4)}]
    assert [layer.self_attn for layer in model.model.layers] == attention


@pytest.mark.parametrize("fault", ["on_finish", "step"])
def test_engine_serves_on_after_an_exception(fault: str, model: DeepseekV4ForCausalLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the failed call left is forgotten: the next one sees its own requests only, and every block is free after it."""
    engine = make_engine(model, **(SIZES | {"max_num_seqs": 2}))

    def fail(*_: Any) -> None:
        raise KeyError(fault)

    with monkeypatch.context() as patch:
        if fault == "step":
            patch.setattr(engine.executor, "_sample", fail)
        with pytest.raises(KeyError, match=fault):
            engine.generate(requests_of(PROMPTS, 12), on_finish=fail)
    assert not engine.scheduler.has_work and sorted(engine.scheduler._free_rows) == [0, 1]
    assert all(group.pool.num_free == group.pool.capacity for group in engine.groups.values())
    seen: list[Completion] = []
    assert engine.generate([Request(0, PROMPTS[2], 12)], on_finish=seen.append)[0].token_ids == alone[2]
    assert [c.token_ids for c in seen] == [alone[2]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "window_block_size") for value in (0, 2.5, "8", True, None)],
        *[("num_window_blocks", value) for value in (1, 2.5, "9")],
        *[("capture_sizes", value) for value in ((), (0,), (1.5,), ("a",), 5)],
        *[("device", value) for value in ("nope", None)],
        *[("mode", value) for value in (None, "eager")],
    ],
)
def test_wrong_config_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"EngineConfig: {name} must be "):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("prompt_ids", value) for value in ((), (1.5,), ("a",), "abc", (VOCAB,), (-1,), torch.tensor([1, 2]))],
        *[("stop_ids", value) for value in (5, None, ("a",))],
        *[("max_tokens", value) for value in (0, 2.5, None)],
        *[("temperature", value) for value in (-1, float("nan"), float("inf"), 1e39, "x", None)],
        *[("seed", value) for value in (2**63, 1.5, None)],
    ],
)
def test_wrong_request_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match="request 7: "):
        EngineConfig().validate(Request(**({"index": 7, "prompt_ids": (1, 2)} | {name: value})), VOCAB)  # type: ignore[arg-type]
