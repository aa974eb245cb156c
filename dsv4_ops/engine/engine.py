"""The decode engine: requests in, tokens out, with or without a drafter.

A step: the scheduler chooses requests and allocates their blocks; the target runs all their tokens at once; each request that has
reached the end of its tokens gets new ones (sampled, or its draft tokens verified); the proposer drafts the next ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from transformers import DeepseekV4ForCausalLM

from ..batch import classify_batch
from ..errors import ArgumentError
from ..rejection import rejection_sample
from ..sampling import gumbel_sample
from ..workspace import num_workspace_lanes, use_workspace_lane, workspace_manager
from .blocks import KVGroup
from .config import EngineConfig
from .proposers import load_proposer
from .requests import Completion, Request
from .scheduler import Scheduled, Scheduler, Sequence_
from .step import SampleInputs, StepInputs, build_step, dummy_sample, dummy_step
from .target import Target, TargetOutput, geometry_of, load_model, target_groups

__all__ = ["Engine", "EngineStats", "ProposeInputs", "Proposer"]

_MAX_GRAPHS = 256
"""Dynamo's own limit for all graphs of one function in a process (``accumulated_recompile_limit``)."""


class ProposeInputs(NamedTuple):
    """What a proposer may read after a step was sampled. Batch rows are those of the step, padding included."""

    step: StepInputs
    sample: SampleInputs
    output: TargetOutput
    num_sampled: torch.Tensor
    """int32 ``[R]``: tokens that each request got (0: an unfinished prefill chunk, or padding)."""
    num_rejected: torch.Tensor
    """int32 ``[R]``: its last rows in the step that were draft tokens and were not accepted."""
    last_sampled: torch.Tensor
    """int64 ``[max_num_seqs]`` by state row: the newest token of each request."""
    temperature: torch.Tensor
    """float32 ``[max_num_seqs]`` and int64 ``[max_num_seqs]`` by state row."""
    seeds: torch.Tensor


class Proposer(Protocol):
    """Drafts the next tokens of every request. See proposers.py.

    The engine allocates the blocks of the KV group ``draft`` for all tokens of a step and ``lookahead`` positions after them,
    evicts them behind ``window``, and hands the table over in ``inputs.sample.draft_table``.
    """

    num_tokens: int
    """K: draft tokens a request."""
    lookahead: int
    """Positions after the step's tokens that drafting writes KV for."""
    window: int
    aux_layers: tuple[int, ...]
    """Target layers whose streams it reads."""

    def allocate(self, num_blocks: int) -> None:
        """Make the KV pages of the draft group."""

    def kv_bytes(self) -> int:
        """Their size."""

    def propose(self, inputs: ProposeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft ids int64 ``[R, K]`` (-1: none) and the logits ``[R, K, V]`` that they were drawn from, by batch row."""


@dataclass
class EngineStats:
    """Counts since the engine was made."""

    steps: int = 0
    tokens: int = 0
    """Tokens given to requests."""
    step_tokens: int = 0
    """Tokens run by the target, without padding."""
    padded_tokens: int = 0
    decode_only_steps: int = 0
    preemptions: int = 0
    kv_bytes: int = 0
    workspace_lanes: int = 1
    workspace_bytes: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    """Tokens that a decode step gave one request -> how often."""


class Engine:
    """Serves requests with one model.

    ``model``: a checkpoint folder, which also holds the drafter of ``config.mode``; or a loaded target, with ``proposer`` where the
    mode has one. Raises UnsupportedError when the model does not fit, ArgumentError when config and proposer do not.
    """

    def __init__(self, model: str | Path | DeepseekV4ForCausalLM, config: EngineConfig | None = None, proposer: Proposer | None = None) -> None:
        self.config = config = config or EngineConfig()
        hf = model if isinstance(model, DeepseekV4ForCausalLM) else load_model(model, config.device)
        self.vocab_size = int(hf.config.vocab_size)
        self.device = torch.device(config.device)
        geometry = geometry_of(hf.config, config)
        self.groups = target_groups(geometry, config)
        self.proposer = proposer = self._proposer(model, hf, proposer)
        if proposer is not None:
            each = KVGroup.blocks_for(config.max_model_len, config.draft_block_size, proposer.window, config.max_num_batched_tokens + proposer.lookahead)
            blocks = config.num_draft_blocks or 1 + config.max_num_seqs * each
            self.groups["draft"] = KVGroup("draft", config.draft_block_size, blocks, proposer.window)
            proposer.allocate(blocks)
        self.target = Target(hf, geometry, config, self.groups, proposer.aux_layers if proposer is not None else ())
        self._forward: Callable[[StepInputs], TargetOutput] = torch.compile(self.target, fullgraph=True) if config.compile else self.target
        self.scheduler = Scheduler(config, self.groups, proposer.lookahead if proposer is not None else 0)
        self.scheduler.on_preempt = self._save_state
        # By state row; one spare row takes what has no request.
        rows = config.max_num_seqs + 1
        self.temperature = torch.zeros(rows, device=self.device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.last_sampled = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.draft_logits = torch.zeros(rows, config.tokens_per_decode - 1, self.vocab_size, device=self.device)
        kv_bytes = self.target.kv_bytes() + (proposer.kv_bytes() if proposer is not None else 0)
        self.stats = EngineStats(kv_bytes=kv_bytes, workspace_lanes=num_workspace_lanes(config))
        self._workspace = workspace_manager(self.device, num_lanes=self.stats.workspace_lanes)
        if config.compile:
            self.warm_up()

    def _proposer(self, model: str | Path | DeepseekV4ForCausalLM, hf: DeepseekV4ForCausalLM, proposer: Proposer | None) -> Proposer | None:
        config = self.config
        if proposer is None and not isinstance(model, DeepseekV4ForCausalLM):
            proposer = load_proposer(model, hf, config)
        if (proposer is None) != (config.mode == "plain"):
            raise ArgumentError("Engine", "proposer", "given exactly when the mode is not plain and the model is not a folder", f"{proposer!r} in mode {config.mode}")
        if proposer is not None and proposer.num_tokens != config.num_speculative_tokens:
            raise ArgumentError("Engine", "proposer", f"one of {config.num_speculative_tokens} draft tokens (num_speculative_tokens)", proposer.num_tokens)
        return proposer

    def generate(self, requests: Iterable[Request], on_finish: Callable[[Completion], None] | None = None) -> list[Completion]:
        """Serve all requests; completions in the order of ``requests``. ``on_finish`` sees each as soon as it is done.

        Raises RequestError for a request that can never be served, before any is run. Whatever else is raised on the way, by
        ``on_finish`` for example, ends the call: its unfinished requests are forgotten, and the engine can be used again.
        """
        requests = list(requests)
        for request in requests:
            self.config.validate(request, self.vocab_size)
            self.scheduler.check(request)
        sequences = [self.scheduler.add(request) for request in requests]
        try:
            while self.scheduler.has_work:
                for completion in self.step():
                    if on_finish is not None:
                        on_finish(completion)
        except BaseException:
            self.scheduler.drop(sequences)
            raise
        return [sequence.completion for sequence in sequences]

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Run one step; the requests that it finished."""
        batch = self.scheduler.schedule()
        self._load_state(batch)
        step, sample = build_step(self.config, self.groups, batch)
        logits, sampled, num_sampled, drafts = self._run(step, sample)
        finished = self._commit(batch, sampled, num_sampled, logits)
        for part, ids in zip(batch, drafts, strict=False):
            if part.samples:
                part.sequence.draft_ids = ids
        self._count(batch, step)
        return finished

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run a step of padding at every capture size: whatever is compiled or allocated once is so before the first request."""
        # Dynamo counts the graphs of all engines of a process together, and its limit (8) is that of a few. Nothing else compiles them.
        limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
        with torch._dynamo.config.patch(recompile_limit=limit):
            for tokens in self.config.step_sizes:
                self._run(dummy_step(self.config, tokens), dummy_sample(self.config))

    def _run(self, host_step: StepInputs, host_sample: SampleInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[int]]]:
        """Target, sampling and drafting for one step: logits, new tokens, their number, and draft tokens, by batch row."""
        step, sample = StepInputs(*(t.to(self.device) for t in host_step)), SampleInputs(*(t.to(self.device) for t in host_sample))
        if self.config.compile:
            _mark_dynamic((step.input_ids, step.positions, step.window_slots))
        output = self._forward(step)
        if self.config.compile:
            _mark_dynamic((output.streams, *output.layer_streams))
        sampled, num_sampled = self._sample(output.logits, sample)
        return output.logits, sampled, num_sampled, self._propose(step, sample, output, sampled, num_sampled)

    def _load_state(self, batch: Sequence[Scheduled]) -> None:
        """Fill the rows of requests that start, or start again after a preemption."""
        for sequence in (part.sequence for part in batch if part.start == 0):
            self.temperature[sequence.row] = sequence.request.temperature
            self.seeds[sequence.row] = sequence.request.seed
            if sequence.draft_state is not None:
                self.draft_logits[sequence.row] = sequence.draft_state
                sequence.draft_state = None

    def _save_state(self, sequence: Sequence_) -> None:
        """Keep what a preempted request will need again. One that has not run since the last time has it still."""
        if sequence.draft_ids and sequence.draft_state is None:
            sequence.draft_state = self.draft_logits[sequence.row].clone()

    def _sample(self, logits: torch.Tensor, sample: SampleInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens int64 ``[R, 1 + K]`` (then -1) and their number int32 ``[R]``, by batch row."""
        reqs, num_drafts = sample.draft_ids.shape
        if num_drafts == 0:
            ids = gumbel_sample(logits, self.temperature, self.seeds, sample.positions, sample.idx_mapping)
            live = sample.idx_mapping >= 0
            return torch.where(live, ids, -1)[:, None], live.to(torch.int32)
        proposed_from = self.draft_logits[sample.idx_mapping.clamp(min=0).to(torch.int64)]
        return rejection_sample(
            logits.view(reqs, 1 + num_drafts, -1), sample.draft_ids, proposed_from, self.temperature, self.seeds, sample.idx_mapping, sample.positions
        )

    def _propose(self, step: StepInputs, sample: SampleInputs, output: TargetOutput, sampled: torch.Tensor, num_sampled: torch.Tensor) -> list[list[int]]:
        """Draft tokens of each batch row; their logits are kept by state row, for the verification."""
        if self.proposer is None:
            return []
        reqs = num_sampled.shape[0]
        live = num_sampled > 0
        # Rows without a request write to the spare last row.
        rows = torch.where(live, sample.state_rows, reqs).to(torch.int64)
        newest = sampled.gather(1, (num_sampled.to(torch.int64) - 1).clamp(min=0)[:, None])[:, 0]
        self.last_sampled[rows] = newest
        num_rejected = torch.where(live, (sample.draft_ids >= 0).sum(1) + 1 - num_sampled, 0).to(torch.int32)
        inputs = ProposeInputs(step, sample, output, num_sampled, num_rejected, self.last_sampled, self.temperature, self.seeds)
        with use_workspace_lane(self.stats.workspace_lanes - 1):
            ids, logits = self.proposer.propose(inputs)
        self.draft_logits[rows] = logits
        drafts: list[list[int]] = ids.tolist()
        return [list(itertools.takewhile(lambda token: token >= 0, row)) for row in drafts]

    def _commit(self, batch: Sequence[Scheduled], sampled: torch.Tensor, num_sampled: torch.Tensor, logits: torch.Tensor) -> list[Completion]:
        finished = []
        for i, (part, ids, count) in enumerate(zip(batch, sampled.tolist(), num_sampled.tolist(), strict=False)):
            sequence, completion = part.sequence, part.sequence.completion
            before, decode_steps = len(sequence.tokens), completion.steps
            if self.scheduler.commit(part, ids[:count]):
                finished.append(completion)
            given = len(sequence.tokens) - before
            self.stats.tokens += given
            if completion.steps > decode_steps:
                self.stats.accepted[given] += 1
            first = i * self.config.tokens_per_decode
            if self.config.record_logits:
                completion.logits += logits[first : first + given].to("cpu", copy=True).unbind()
            if self.config.record_margins and given:
                best = logits[first : first + given].topk(2).values
                completion.margins += (best[:, 0] - best[:, 1]).tolist()
        return finished

    def _count(self, batch: Sequence[Scheduled], step: StepInputs) -> None:
        stats = self.stats
        stats.steps += 1
        stats.step_tokens += sum(part.num_tokens for part in batch)
        stats.padded_tokens += step.input_ids.shape[0]
        kind = classify_batch([part.num_tokens for part in batch], [part.start for part in batch], [part.sequence.num_prefill for part in batch])
        stats.decode_only_steps += kind.is_pure_decode
        stats.preemptions = self.scheduler.num_preemptions
        stats.workspace_bytes = self._workspace.nbytes


def _mark_dynamic(per_token: Iterable[torch.Tensor]) -> None:
    """The number of tokens changes from step to step, and nothing else: one graph for all counts above 1, which is always its own."""
    for tensor in per_token:
        if tensor.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
