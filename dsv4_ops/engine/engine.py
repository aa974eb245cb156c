"""The decode engine: requests in, tokens out, with or without a drafter.

A step: the scheduler chooses requests and allocates their blocks; the target runs all their tokens at once; each request that has
reached the end of its tokens gets new ones (sampled, or its draft tokens verified); the proposer drafts the next ones. What runs on
the device is in executor.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import DeepseekV4ForCausalLM

from ..batch import classify_batch
from ..errors import ArgumentError
from .blocks import KVGroup
from .config import EngineConfig
from .executor import Executor, ProposeInputs, Proposer
from .proposers import load_proposer
from .requests import Completion, Request
from .scheduler import Scheduled, Scheduler, Sequence_
from .target import Target, geometry_of, load_model, target_groups

__all__ = ["Engine", "EngineStats", "ProposeInputs", "Proposer"]


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
        self.scheduler = Scheduler(config, self.groups, proposer.lookahead if proposer is not None else 0)
        self.scheduler.on_preempt = self._save_state
        self.executor = Executor(config, self.target, proposer, self.device)
        kv_bytes = self.target.kv_bytes() + (proposer.kv_bytes() if proposer is not None else 0)
        self.stats = EngineStats(kv_bytes=kv_bytes, workspace_lanes=self.executor.num_lanes)

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
        result = self.executor.run(self.groups, batch)
        self._count(batch)  # while the device is busy
        return self._commit(batch, result.ids, result.logits)

    def _load_state(self, batch: Sequence[Scheduled]) -> None:
        """Fill the rows of requests that start again after a preemption."""
        for sequence in (part.sequence for part in batch if part.start == 0):
            if sequence.draft_state is not None:
                self.executor.draft_logits[sequence.row] = sequence.draft_state
                sequence.draft_state = None

    def _save_state(self, sequence: Sequence_) -> None:
        """Keep what a preempted request will need again. One that has not run since the last time has it still."""
        if sequence.draft_ids and sequence.draft_state is None:
            sequence.draft_state = self.executor.draft_logits[sequence.row].clone()

    def _commit(self, batch: Sequence[Scheduled], ids: torch.Tensor, logits: torch.Tensor) -> list[Completion]:
        """Give the requests what the step gave them. Reading ``ids`` is the one time in a step that the host waits for the device."""
        finished, width = [], self.config.tokens_per_decode
        rows = ids.tolist()
        kept = logits.to("cpu", copy=True) if self.config.record_logits or self.config.record_margins else None
        for i, (part, row) in enumerate(zip(batch, rows, strict=False)):
            sequence, completion = part.sequence, part.sequence.completion
            before, decode_steps = len(sequence.tokens), completion.steps
            if self.scheduler.commit(part, _until_pad(row[:width]), _until_pad(row[width:])):
                finished.append(completion)
            given = len(sequence.tokens) - before
            self.stats.tokens += given
            if completion.steps > decode_steps:
                self.stats.accepted[given] += 1
            if kept is not None:
                self._record(completion, kept[i * width : i * width + given])
        return finished

    def _record(self, completion: Completion, logits: torch.Tensor) -> None:
        """What was asked for of the rows that tokens were chosen from."""
        if self.config.record_logits:
            completion.logits += logits.clone().unbind()  # not the whole step's, which a view would keep
        if self.config.record_margins and logits.shape[0]:
            best = logits.topk(2).values
            completion.margins += (best[:, 0] - best[:, 1]).tolist()

    def _count(self, batch: Sequence[Scheduled]) -> None:
        stats = self.stats
        tokens = [part.num_tokens for part in batch]
        stats.steps += 1
        stats.step_tokens += sum(tokens)
        stats.padded_tokens += self.config.padded_tokens(sum(tokens))
        kind = classify_batch(tokens, [part.start for part in batch], [part.sequence.num_prefill for part in batch])
        stats.decode_only_steps += kind.is_pure_decode
        stats.preemptions = self.scheduler.num_preemptions
        stats.workspace_bytes = self.executor.pool.manager.nbytes


def _until_pad(ids: list[int]) -> list[int]:
    return list(itertools.takewhile(lambda token: token >= 0, ids))
