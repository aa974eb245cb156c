"""Drafters on paged KV against a dense computation of the same modules: no pages, no index rows, no ops of this package."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer

from dsv4_ops import STREAM_DRAFT, gumbel_sample, new_kv_cache, prepare_dflash_inputs
from dsv4_ops.engine import tiny
from dsv4_ops.engine.drafters import (
    BlockDrafter,
    BlockInputs,
    Drafter,
    MTPDrafter,
    MTPInputs,
    Proposal,
    load_drafter,
    mean_streams,
    next_token_ids,
    published_tensors,
)
from dsv4_ops.engine.norms import keep_type
from dsv4_ops.errors import ArgumentError, UnsupportedError

LIMIT = 4096
CLOSE = {"rtol": 1e-5, "atol": 2e-4}
"""Logits are sums of 128 products of size 10 or so: 2e-4 is a relative 1e-5 of the largest."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.make_tiny(path, seed=3)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM.from_pretrained(folder).requires_grad_(False).eval()


def drafter_of(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> Any:
    drafter = load_drafter(folder, target, kind)
    for attention in drafter.attention[1:]:
        # Later blocks are nearly silent in the tiny checkpoint: loud here, so that what they read shows.
        attention.inner.o_b_proj.weight.mul_(10.0)
    return drafter


# The dense oracle.


def rotate(x: torch.Tensor, positions: torch.Tensor, sign: float = 1.0, theta: float = 10000.0) -> torch.Tensor:
    """Interleaved rotary on the last 64 channels of ``[tokens, ..., 512]``, by complex numbers in float64."""
    angles = positions.double()[:, None] / theta ** (torch.arange(0, 64, 2).double() / 64)
    turn = torch.polar(torch.ones_like(angles), sign * angles).view(len(positions), *[1] * (x.dim() - 2), 32)
    tail = torch.view_as_real(torch.view_as_complex(x[..., -64:].double().unflatten(-1, (32, 2)).contiguous()) * turn).flatten(-2)
    return torch.cat([x[..., :-64].double(), tail], -1)


class DenseAttention(torch.nn.Module):
    """Naive attention of one block: ``context`` gives the KV before the rows, ``visible`` says which keys each row sees."""

    def __init__(self, inner: Any, context: Callable[[Any], torch.Tensor], visible: torch.Tensor, positions: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.context, self.visible, self.positions = inner, context, visible, positions

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        inner, x = self.inner, hidden_states[0]
        q = inner.q_b_proj(inner.q_a_norm(inner.q_a_proj(x))).view(len(x), inner.num_heads, 512)
        q = rotate(q / q.double().square().mean(-1, keepdim=True).add(1e-6).sqrt(), self.positions)
        keys = torch.cat([self.context(inner), rotate(inner.kv_norm(inner.kv_proj(x)), self.positions)])
        out = torch.zeros_like(q)
        for row in range(len(x)):
            seen = keys[self.visible[row]]
            for head in range(inner.num_heads):
                scores = torch.cat([seen @ q[row, head] / 512**0.5, inner.sinks[head : head + 1].double()])
                out[row, head] = scores.softmax(0)[:-1] @ seen
        out = rotate(out, self.positions, -1.0).float()
        return inner.o_b_proj(inner.o_a_proj(out.reshape(1, len(x), inner.config.o_groups, -1)).flatten(2)), None


def dense_blocks(drafter: Drafter, streams: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, context: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """All draft blocks with naive attention, on copies of transformers' decoder layer."""
    streams = streams[None]
    for i, attention in enumerate(drafter.attention):
        layer = DeepseekV4DecoderLayer(drafter.config, i).eval()
        state = {name.replace(".inner.", "."): tensor for name, tensor in drafter.layers[i].state_dict().items()}
        layer.load_state_dict(state)
        layer.add_module("self_attn", DenseAttention(attention.inner, context, visible, positions))
        streams = layer(streams)
    return streams[0]


def dense_mtp(drafter: MTPDrafter, next_ids: list[int], streams: torch.Tensor, num_tokens: int, window: int) -> torch.Tensor:
    """Logits ``[N, V]`` of one request: ``next_ids[p]`` is the token after position p, greedy drafting, everything recomputed."""
    result = []
    for _ in range(num_tokens):
        ids, positions = torch.tensor(next_ids), torch.arange(len(next_ids))
        visible = (positions[None] <= positions[:, None]) & (positions[None] > positions[:, None] - window)
        merged = drafter.h_proj(drafter.hnorm(streams)) + drafter.e_proj(drafter.enorm(drafter.embed_tokens(ids)))[:, None]
        out = dense_blocks(drafter, merged, positions, visible, lambda inner: torch.zeros(0, 512, dtype=torch.float64))
        result.append(drafter.logits(out[-1:])[0])
        next_ids = [*next_ids, int(result[-1].argmax())]
        streams = torch.cat([streams, out[-1:]])
    return torch.stack(result)


def dense_block(drafter: BlockDrafter, aux: torch.Tensor, anchor: int, num_tokens: int, window: int, start: int = 0) -> torch.Tensor:
    """Logits ``[N, V]`` of one request with ``len(aux)`` committed tokens, greedy."""
    committed = len(aux)
    queries = num_tokens if drafter.sample_from_anchor else 1 + num_tokens
    positions = committed + torch.arange(queries)
    first = max(0, committed - window, start)
    main = drafter.main_norm(drafter.main_proj(aux))

    def context(inner: Any) -> torch.Tensor:
        return rotate(inner.kv_norm(inner.kv_proj(main)), torch.arange(committed))

    visible = (torch.arange(committed + queries) >= first).expand(queries, -1)
    ids = torch.tensor([anchor] + [drafter.mask_token_id] * (queries - 1))
    streams = drafter.embed_tokens(ids)[:, None].expand(-1, drafter.config.hc_mult, -1).contiguous()
    base = drafter.logits(dense_blocks(drafter, streams, positions, visible, context))[queries - num_tokens :]
    result, previous = [], anchor
    for j in range(num_tokens):
        w1, w2 = drafter.markov_head["markov_w1"].weight, drafter.markov_head["markov_w2"].weight
        result.append(base[j] + w2 @ w1[previous])
        previous = int(result[-1].argmax())
    return torch.stack(result)


# A small engine's worth of bookkeeping: requests on shuffled pages, run in steps.


@dataclass
class Req:
    """One request: tokens so far (the last one is newly sampled, not yet run), and the target's states of the tokens that ran."""

    tokens: list[int]
    streams: torch.Tensor
    """``[len(tokens) - 1, hc, D]``: made up, any values do."""
    aux: torch.Tensor
    pages: list[int] = field(default_factory=list)


def requests_of(drafter: Drafter, lengths: list[int], page: int, seed: int = 0) -> list[Req]:
    g = torch.Generator().manual_seed(seed)
    width = int(drafter.config.hidden_size)
    aux_width = width * len(getattr(drafter, "target_layer_ids", (0,)))
    pages = (1 + torch.randperm(sum(n // page + 2 for n in lengths), generator=g)).tolist()
    reqs = []
    for n in lengths:
        count = n // page + 2
        reqs.append(Req(torch.randint(97, 123, (n + 1,), generator=g).tolist(), torch.randn(n, 4, width, generator=g), torch.randn(n, aux_width, generator=g), [pages.pop() for _ in range(count)]))
    return reqs


def caches_of(drafter: Drafter, reqs: list[Req], page: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    caches = tuple(new_kv_cache(1 + sum(len(r.pages) for r in reqs), page, dtype=dtype) for _ in range(drafter.num_layers))
    if dtype == torch.float32:
        for cache in caches:
            cache.fill_(50.0)  # A row that is read without having been written spoils everything.
    return caches


def table_of(reqs: list[Req], rows: int) -> torch.Tensor:
    table = torch.zeros(rows, max(len(r.pages) for r in reqs), dtype=torch.int32)
    for i, r in enumerate(reqs):
        table[i, : len(r.pages)] = torch.tensor(r.pages, dtype=torch.int32)
    return table


def step(
    drafter: Any, reqs: list[Req], spans: list[tuple[int, int]], caches: tuple[torch.Tensor, ...], page: int, num_tokens: int = 3, rejected: int = 0,
    temperature: float = 0.0, limit: int = LIMIT, draft_start: torch.Tensor | None = None, propose: Any = None, spare: int = 2,
) -> Proposal:  # fmt: skip
    """Run tokens ``spans[i]`` of each request and ``rejected`` made-up ones behind them; ``spare`` padding requests and tokens follow.

    Request states are the batch rows in reverse, so that a mapping that is not applied shows.
    """
    rows, ids, positions, owner, streams, aux, starts = len(reqs) + spare, [], [], [], [], [], [0]
    for i, (r, (a, b)) in enumerate(zip(reqs, spans, strict=True)):
        ids += r.tokens[a:b] + [65] * rejected
        positions += range(a, b + rejected)
        owner += [i] * (b - a + rejected)
        streams += [r.streams[a:b], r.streams.new_full((rejected, *r.streams.shape[1:]), 7.0)]
        aux += [r.aux[a:b], r.aux.new_full((rejected, r.aux.shape[1]), 7.0)]
        starts.append(len(ids))
    padding = 3
    total = len(ids) + padding
    starts += [len(ids)] * spare
    pad_ids = torch.tensor(ids + [0] * padding)
    begins = torch.tensor(starts)
    live = torch.arange(rows) < len(reqs)
    states = torch.where(live, rows - 1 - torch.arange(rows), -1).to(torch.int32)
    anchors = torch.tensor([r.tokens[b] for r, (_, b) in zip(reqs, spans, strict=True)] + [0] * spare)
    temperatures, seeds = torch.full((rows,), temperature), 100 + torch.arange(rows)
    table = table_of(reqs, rows)
    propose = propose or drafter.propose
    options = {"num_tokens": num_tokens, "block_size": page, "max_model_len": limit}
    if isinstance(drafter, MTPDrafter):
        last = torch.where(live, begins[1:] - 1 - rejected, 0)
        owner_of = torch.tensor(owner + [0] * padding, dtype=torch.int32)
        valid = torch.arange(total) <= last[owner_of.long()]
        valid[len(ids) :] = False
        inputs: Any = MTPInputs(
            next_token_ids(pad_ids, last, anchors, live), torch.tensor(positions + [0] * padding), torch.cat([*streams, streams[0].new_full((padding, 4, streams[0].shape[-1]), 7.0)]),
            owner_of, valid, last, states, table, temperatures, seeds,
        )  # fmt: skip
        return propose(inputs, caches, **options)
    by_state = torch.zeros(rows, dtype=torch.int64)
    by_state[states[live].long()] = anchors[live]
    prepared = prepare_dflash_inputs(
        torch.tensor(positions + [0] * padding), begins.to(torch.int32), states, live.to(torch.int32), live.to(torch.int32) * rejected, by_state, torch.zeros_like(by_state),
        temperatures, seeds, [table], [page], mask_token_id=drafter.mask_token_id, num_speculative_tokens=num_tokens, max_reqs=rows, max_tokens=rows * (1 + num_tokens) + 5,
        max_model_len=limit, sample_from_anchor=drafter.sample_from_anchor,
    )  # fmt: skip
    inputs = BlockInputs(
        torch.cat([*aux, aux[0].new_full((padding, aux[0].shape[1]), 7.0)]), prepared.context_positions, prepared.context_slots[0], prepared.input_ids, prepared.positions, prepared.is_padding,
        prepared.query_slots[0], prepared.sample_indices, prepared.sample_pos, prepared.sample_idx_mapping, table, prepared.temperature, prepared.seeds, draft_start,
    )  # fmt: skip
    return propose(inputs, caches, **options)


def oracle(drafter: Any, r: Req, end: int, num_tokens: int = 3, start: int = 0) -> torch.Tensor:
    window = int(drafter.config.sliding_window)
    if isinstance(drafter, MTPDrafter):
        return dense_mtp(drafter, r.tokens[1 : end + 1], r.streams[:end], num_tokens, window)
    return dense_block(drafter, r.aux[:end], r.tokens[end], num_tokens, window, start)


KINDS = pytest.mark.parametrize("kind", ["mtp", "dspark", "dflash"])


@KINDS
@pytest.mark.parametrize("page", [16, 64])
def test_paged_drafts_equal_dense_drafts(folder: Path, target: DeepseekV4ForCausalLM, kind: str, page: int) -> None:
    """Contexts below, at and above the window, prefill in chunks, rejected rows, padding requests and tokens, shuffled pages."""
    drafter, lengths = drafter_of(folder, target, kind), [3, 128, 215]
    reqs = requests_of(drafter, lengths, page)
    caches = caches_of(drafter, reqs, page)
    with torch.no_grad():
        step(drafter, reqs, [(0, 1), (0, 100), (0, 150)], caches, page)
        # Two rejected rows: what the drafter wrote for drafts and what the target left for them must not matter.
        step(drafter, reqs, [(1, 2), (100, 126), (150, 213)], caches, page, rejected=2)
        proposal = step(drafter, reqs, [(2, 3), (126, 128), (213, 215)], caches, page, rejected=1)
        for i, (r, n) in enumerate(zip(reqs, lengths, strict=True)):
            expected = oracle(drafter, r, n)
            torch.testing.assert_close(proposal.logits[i], expected, **CLOSE)
            assert proposal.token_ids[i].tolist() == expected.argmax(-1).tolist()
    assert proposal.token_ids[len(reqs) :].eq(-1).all()
    assert proposal.token_ids.dtype == torch.int64 and proposal.logits.dtype == torch.float32 and proposal.logits.isfinite().all()


@KINDS
def test_keys_beyond_the_window_do_not_matter_and_those_inside_do(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> None:
    drafter, page, n = drafter_of(folder, target, kind), 16, 200
    window = int(drafter.config.sliding_window)
    # The first draft row of MTP stands at n - 1 and sees n - window..n - 1; a block sees n - window..n - 1 and itself.
    for position, changes in ((n - window - 1, False), (n - window, True)):
        results = []
        for disturb in (False, True):
            reqs = requests_of(drafter, [n], page)
            caches = caches_of(drafter, reqs, page)
            step(drafter, reqs, [(0, n - 1)], caches, page)
            if disturb:
                for cache in caches:
                    cache[reqs[0].pages[position // page], position % page] = 30.0
            results.append(step(drafter, reqs, [(n - 1, n)], caches, page, num_tokens=1).logits[0])
        assert torch.equal(results[0], results[1]) is not changes


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_draft_start_hides_positions_without_draft_kv(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> None:
    drafter, page, start, n = drafter_of(folder, target, kind), 16, 96, 150
    reqs = requests_of(drafter, [n], page)
    caches = caches_of(drafter, reqs, page)
    # Positions below 96 were never run by the drafter: their rows hold 50s.
    starts = torch.tensor([start, 0, 0], dtype=torch.int32)
    proposal = step(drafter, reqs, [(start, n)], caches, page, draft_start=starts)
    with torch.no_grad():
        torch.testing.assert_close(proposal.logits[0], oracle(drafter, reqs[0], n, start=start), **CLOSE)
    assert not torch.allclose(step(drafter, reqs, [(start, n)], caches, page).logits[0], proposal.logits[0], atol=0.1)


@KINDS
def test_rejected_and_padding_rows_write_nothing(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> None:
    drafter, page, n = drafter_of(folder, target, kind), 16, 40
    reqs = requests_of(drafter, [n], page)
    caches = caches_of(drafter, reqs, page)
    drafts = step(drafter, reqs, [(0, n)], caches, page, num_tokens=1, rejected=4)
    queries = {"mtp": 0, "dspark": 1, "dflash": 2}[kind]
    written = {reqs[0].pages[p // page] * page + p % page for p in range(n + queries)}
    for cache in caches:
        touched = (cache.flatten(0, 1) != 50.0).any(-1).nonzero().flatten().tolist()
        assert set(touched) == written
    assert drafts.token_ids.shape == (3, 1)


@KINDS
def test_no_token_is_drafted_past_the_model_limit(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> None:
    drafter, page = drafter_of(folder, target, kind), 16
    lengths = [30, 9]
    reqs = requests_of(drafter, lengths, page)
    free = step(drafter, reqs, [(0, 30), (0, 9)], caches_of(drafter, reqs, page), page)
    # The anchor stands at position 30; with limit 32 only position 31 can still hold a drafted token.
    caches = caches_of(drafter, reqs, page)
    bound = step(drafter, reqs, [(0, 30), (0, 9)], caches, page, limit=32)
    assert bound.token_ids[0, 1:].tolist() == [-1, -1] and bound.token_ids[0, 0] >= 0
    assert torch.equal(bound.token_ids[1], free.token_ids[1]) and torch.equal(bound.logits[1], free.logits[1])
    for cache in caches:
        beyond = [reqs[0].pages[p // page] * page + p % page for p in range(32, 36)]
        assert cache.flatten(0, 1)[beyond].eq(50.0).all()


@KINDS
def test_random_drafts_use_the_draft_stream_of_their_own_request(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> None:
    drafter, page, lengths = drafter_of(folder, target, kind), 16, [20, 31]
    reqs = requests_of(drafter, lengths, page)
    proposal = step(drafter, reqs, [(0, 20), (0, 31)], caches_of(drafter, reqs, page), page, temperature=3.0)
    for i, n in enumerate(lengths):
        seed = torch.tensor([100 + 3 - i])  # Request state of row i of 4.
        positions = n + 1 + torch.arange(3)
        drawn = gumbel_sample(proposal.logits[i], torch.tensor([3.0]), seed, positions, torch.zeros(3, dtype=torch.int32), STREAM_DRAFT)
        assert proposal.token_ids[i].tolist() == drawn.tolist()
    assert proposal.token_ids[0].tolist() != proposal.logits[0].argmax(-1).tolist() or proposal.token_ids[1].tolist() != proposal.logits[1].argmax(-1).tolist()


@KINDS
def test_drafts_do_not_depend_on_batch_mates(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> None:
    drafter, page = drafter_of(folder, target, kind), 16
    reqs = requests_of(drafter, [50, 140], page)
    together = step(drafter, reqs, [(0, 50), (0, 140)], caches_of(drafter, reqs, page), page)
    alone = step(drafter, reqs[1:], [(0, 140)], caches_of(drafter, reqs, page), page)
    torch.testing.assert_close(together.logits[1], alone.logits[0], **CLOSE)
    assert torch.equal(together.token_ids[1], alone.token_ids[0])


@KINDS
def test_fp8_rows_change_logits_a_little(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> None:
    drafter, page = drafter_of(folder, target, kind), 64
    reqs = requests_of(drafter, [100], page)
    exact = step(drafter, reqs, [(0, 100)], caches_of(drafter, reqs, page), page, num_tokens=1).logits[0]
    coded = step(drafter, reqs, [(0, 100)], caches_of(drafter, reqs, page, torch.uint8), page, num_tokens=1).logits[0]
    error = (exact - coded).abs().max().item()
    assert 0 < error < 1.5


@KINDS
def test_propose_compiles_as_one_graph_and_once(folder: Path, target: DeepseekV4ForCausalLM, kind: str) -> None:
    drafter, page = drafter_of(folder, target, kind), 16
    for layer in drafter.layers:
        layer.attn_hc.hc_sinkhorn_iters = layer.ffn_hc.hc_sinkhorn_iters = 2  # Twenty unrolled rounds are most of the tracing time.
    torch._dynamo.reset()
    compiled = torch.compile(drafter.propose, fullgraph=True, dynamic=True, backend="aot_eager")
    counter = torch._dynamo.utils.counters
    with torch.inference_mode():
        for turn, lengths in enumerate(([20, 31], [40, 45, 12], [7, 130, 3, 60])):
            reqs = requests_of(drafter, lengths, page)
            spans = [(0, n) for n in lengths]
            expected_caches, caches = caches_of(drafter, reqs, page), caches_of(drafter, reqs, page)
            # Five rows at first, not four: sizes that are equal when traced share a symbol, and hc_mult (4) is a constant.
            expected = step(drafter, reqs, spans, expected_caches, page, num_tokens=2, spare=3)
            actual = step(drafter, reqs, spans, caches, page, num_tokens=2, spare=3, propose=compiled)
            torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)
            assert torch.equal(actual.token_ids, expected.token_ids)
            for one, other in zip(expected_caches, caches, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            if turn == 0:
                graphs = counter["stats"]["unique_graphs"]
    assert counter["stats"]["unique_graphs"] == graphs


def test_next_token_ids_by_hand() -> None:
    ids = torch.tensor([10, 11, 12, 20, 21, 22, 23, 0, 0], dtype=torch.int32)
    # Request 0 keeps two of three rows and sampled 77; request 1 keeps all four and sampled 88; request 2 is padding.
    got = next_token_ids(ids, torch.tensor([1, 6, 0]), torch.tensor([77, 88, 99]), torch.tensor([True, True, False]))
    assert got.dtype == torch.int64
    assert got[[0, 1]].tolist() == [11, 77] and got[[3, 4, 5, 6]].tolist() == [21, 22, 23, 88]


def test_mean_streams_concatenates_layer_means_in_order() -> None:
    a, b = torch.arange(12.0).view(1, 4, 3), torch.full((1, 4, 3), 2.0)
    assert mean_streams([a, b]).tolist() == [[4.5, 5.5, 6.5, 2.0, 2.0, 2.0]]


# Checkpoints.

BLOCK = [
    "attn.attn_sink",
    "attn.kv_norm.weight",
    "attn.q_norm.weight",
    "attn.wkv.weight",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "attn.wq_a.weight",
    "attn.wq_b.weight",
    "attn_norm.weight",
    "ffn.gate.bias",
    "ffn.gate.weight",
    "ffn.shared_experts.w1.weight",
    "ffn.shared_experts.w2.weight",
    "ffn.shared_experts.w3.weight",
    "ffn_norm.weight",
    "hc_attn_base",
    "hc_attn_fn",
    "hc_attn_scale",
    "hc_ffn_base",
    "hc_ffn_fn",
    "hc_ffn_scale",
]
EXPERTS = [f"ffn.experts.{j}.w{w}.weight" for j in range(8) for w in "123"]
HEAD = ["norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"]


def test_files_hold_exactly_the_published_names(folder: Path) -> None:
    mtp = {f"mtp.0.{name}" for name in [*BLOCK, *EXPERTS, *HEAD, "enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight"]}
    assert {name for name in load_file(folder / "model.safetensors") if name.startswith("mtp.")} == mtp
    block = {f"mtp.{i}.{name}" for i in range(2) for name in [*BLOCK, *EXPERTS]} | {"mtp.0.main_proj.weight", "mtp.0.main_norm.weight"}
    block |= {f"mtp.1.{name}" for name in [*HEAD, "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]}
    assert set(load_file(folder / "dspark" / "model.safetensors")) == block


@KINDS
def test_loading_puts_every_tensor_in_its_place(folder: Path, target: DeepseekV4ForCausalLM, kind: str, tmp_path: Path) -> None:
    """Every tensor of the file is given its own values; the drafter must hold each of them, experts in order."""
    source = folder if kind == "mtp" else folder / kind
    config = json.loads((source / "config.json").read_text())
    g = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(t.shape, generator=g) for name, t in load_file(source / "model.safetensors").items() if name.startswith("mtp.")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    drafter = load_drafter(tmp_path, target, kind)
    assert drafter.kind == kind and not any(p.requires_grad for p in drafter.parameters())
    last = drafter.num_layers - 1
    experts = drafter.layers[last].mlp.experts
    assert torch.equal(experts.gate_up_proj[5], torch.cat([tensors[f"mtp.{last}.ffn.experts.5.w1.weight"], tensors[f"mtp.{last}.ffn.experts.5.w3.weight"]]))
    assert torch.equal(experts.down_proj[7], tensors[f"mtp.{last}.ffn.experts.7.w2.weight"])
    assert torch.equal(drafter.attention[0].inner.q_b_proj.weight, tensors["mtp.0.attn.wq_b.weight"])
    assert torch.equal(drafter.attention[last].inner.o_a_proj.weight, tensors[f"mtp.{last}.attn.wo_a.weight"])
    assert torch.equal(drafter.layers[0].post_attention_layernorm.weight, tensors["mtp.0.ffn_norm.weight"])
    assert torch.equal(drafter.layers[0].ffn_hc.base, tensors["mtp.0.hc_ffn_base"])
    assert torch.equal(drafter.hc_head.hc_fn, tensors[f"mtp.{last}.hc_head_fn"])
    assert torch.equal(drafter.layers[last].mlp.shared_experts.up_proj.weight, tensors[f"mtp.{last}.ffn.shared_experts.w3.weight"])
    again = published_tensors(drafter)
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert drafter.embed_tokens is target.model.embed_tokens and drafter.lm_head is target.lm_head


def copy_checkpoint(source: Path, to: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return to


def test_newer_names_of_the_markov_head_and_a_confidence_head_load(folder: Path, target: DeepseekV4ForCausalLM, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["mtp.1.markov_head.embed.weight"] = tensors.pop("mtp.1.markov_head.markov_w1.weight")
        tensors["mtp.1.markov_head.head.weight"] = tensors.pop("mtp.1.markov_head.markov_w2.weight")
        tensors["mtp.1.confidence_head.proj.weight"] = torch.zeros(1, 156)
        del config["n_mtp_layers"]

    drafter = load_drafter(copy_checkpoint(folder / "dspark", tmp_path, change), target, "dspark")
    original = load_drafter(folder, target, "dspark")
    assert isinstance(drafter, BlockDrafter) and isinstance(original, BlockDrafter)
    ids = torch.tensor([97, 120])
    bias, expected = drafter.markov_bias(ids), original.markov_bias(ids)
    assert bias is not None and expected is not None and torch.equal(bias, expected) and bias.abs().max() > 1


def test_a_drafter_without_markov_head_drafts_each_token_from_the_block_alone(folder: Path, target: DeepseekV4ForCausalLM, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del tensors["mtp.1.markov_head.markov_w1.weight"], tensors["mtp.1.markov_head.markov_w2.weight"]
        config["dspark_markov_rank"] = 0

    drafter = load_drafter(copy_checkpoint(folder / "dflash", tmp_path, change), target, "dflash")
    original = load_drafter(folder, target, "dflash")
    reqs = requests_of(drafter, [20], 16)
    assert isinstance(original, BlockDrafter)
    plain = step(drafter, reqs, [(0, 20)], caches_of(drafter, reqs, 16), 16)
    biased = step(original, reqs, [(0, 20)], caches_of(drafter, reqs, 16), 16)
    previous = torch.tensor([reqs[0].tokens[20], *biased.token_ids[0, :2].tolist()])
    bias = original.markov_bias(previous)
    assert bias is not None
    torch.testing.assert_close(plain.logits[0] + bias, biased.logits[0], **CLOSE)


def test_sharded_checkpoints_load_by_their_index(folder: Path, target: DeepseekV4ForCausalLM, tmp_path: Path) -> None:
    tensors = load_file(folder / "dspark" / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**weight_map, "embed.weight": "model-00000.safetensors"}}))
    (tmp_path / "config.json").write_text((folder / "dspark" / "config.json").read_text())
    loaded = published_tensors(load_drafter(tmp_path, target, "dspark"))
    assert all(torch.equal(loaded[name], tensors[name]) for name in names)


def test_bfloat16_targets_get_bfloat16_drafters_with_float32_norms(folder: Path) -> None:
    half = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False).eval()
    keep_type(half)
    for kind in ("mtp", "dspark"):
        drafter = load_drafter(folder, half, kind)
        types = {name: p.dtype for name, p in drafter.named_parameters()}
        assert types["layers.0.self_attn.inner.q_b_proj.weight"] == types["layers.0.mlp.experts.down_proj"] == torch.bfloat16
        assert types["layers.0.attn_hc.fn"] == types["norm.weight"] == types["layers.0.self_attn.inner.sinks"] == types["hc_head.hc_base"] == torch.float32
        reqs = requests_of(drafter, [20], 16)
        reqs[0].streams, reqs[0].aux = reqs[0].streams.bfloat16(), reqs[0].aux.bfloat16()
        proposal = step(drafter, reqs, [(0, 20)], caches_of(drafter, reqs, 16, torch.bfloat16), 16)
        assert proposal.logits.isfinite().all() and proposal.token_ids[0].ge(0).all()


def bad(name: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        if name == "missing":
            del tensors["mtp.0.attn.wq_b.weight"], tensors["mtp.0.ffn.experts.3.w2.weight"]
        elif name == "unexpected":
            tensors["mtp.0.attn.compressor.ape"] = torch.zeros(4, 4)
        elif name == "shape":
            tensors["mtp.0.attn.wkv.weight"] = torch.zeros(512, 64)
        elif name == "quantized":
            tensors["mtp.0.attn.wq_a.scale"] = torch.zeros(1, 1)
        elif name == "two modules":
            tensors["mtp.1.e_proj.weight"] = torch.zeros(1)

    return change


@pytest.mark.parametrize(
    "name, error, text",
    [
        ("missing", ArgumentError, "no tensor mtp.0.attn.wq_b.weight; no tensor mtp.0.ffn.experts.3.w2.weight"),
        ("unexpected", ArgumentError, "no place for mtp.0.attn.compressor.ape"),
        ("shape", ArgumentError, r"mtp.0.attn.wkv.weight has shape \[512, 64\], not \[512, 128\]"),
        ("quantized", UnsupportedError, "mtp.0.attn.wq_a.scale"),
        ("two modules", UnsupportedError, "2 MTP modules"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_by_name(folder: Path, target: DeepseekV4ForCausalLM, tmp_path: Path, name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        load_drafter(copy_checkpoint(folder, tmp_path, bad(name)), target, "mtp")


@pytest.mark.parametrize(
    "field, value",
    [("dspark_block_size", 0), ("dspark_block_size", "4"), ("dspark_noise_token_id", 99999), ("dspark_noise_token_id", -1), ("dspark_target_layer_ids", [0, 99]), ("dspark_target_layer_ids", [0, -1])],
)
def test_fields_that_no_block_drafter_has_are_named(folder: Path, target: DeepseekV4ForCausalLM, tmp_path: Path, field: str, value: object) -> None:
    copy_checkpoint(folder / "dspark", tmp_path, lambda tensors, config: config.update({field: value}))
    with pytest.raises(ArgumentError, match=f"load_drafter: {field} must be "):
        load_drafter(tmp_path, target, "dspark")


@pytest.mark.parametrize("text", ["{", "[1]", "{}"])
def test_broken_index_of_tensors_is_named(folder: Path, target: DeepseekV4ForCausalLM, tmp_path: Path, text: str) -> None:
    copy_checkpoint(folder, tmp_path, lambda tensors, config: None)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ArgumentError, match="weight_map"):
        load_drafter(tmp_path, target, "mtp")


def test_folders_without_the_drafter_say_what_is_missing(folder: Path, target: DeepseekV4ForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="kind must be one of 'mtp', 'dspark', 'dflash', got 'eagle'"):
        load_drafter(folder, target, "eagle")
    copy_checkpoint(folder, tmp_path, lambda tensors, config: None)
    with pytest.raises(ArgumentError, match=r"without tensor mtp.0.main_proj.weight, config field dspark_block_size, config field dspark_target_layer_ids"):
        load_drafter(tmp_path, target, "dspark")
    with pytest.raises(ArgumentError, match=r"without tensor mtp.0.e_proj.weight"):
        load_drafter(folder / "dspark", target, "mtp")
