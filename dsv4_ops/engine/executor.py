"""The device part of a step: target, sampling and drafting, as captured steps.

Two steps (target with sampling, then drafting), or with ``EngineConfig.fused`` one step with both. On a GPU each is a CUDA graph for every
capture size; on a CPU, with ``enforce_eager``, and past the largest capture size the same functions are called. With
``EngineConfig.compile`` each function is one ``fullgraph`` program whose ops have the lane of their side bound: 0 for the target, the
last lane for the draft.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..graphs import FollowingStep, GraphPool, StepInput
from ..rejection import rejection_sample
from ..sampling import gumbel_sample
from ..workspace import num_workspace_lanes, use_workspace_lane
from .config import EngineConfig
from .scheduler import Scheduled
from .step import SampleInputs, StepInputs, dummy_sample, dummy_step, write_step
from .target import Target, TargetOutput

__all__ = ["Executor", "ProposeInputs", "Proposer", "StepResult"]

_MAX_GRAPHS = 256
"""Dynamo's own limit for all graphs of one function in a process (``accumulated_recompile_limit``)."""
_STEP_FIELDS = len(StepInputs._fields)
_PER_TOKEN = ("input_ids", "positions")


class ProposeInputs(NamedTuple):
    """What a proposer may read after a step was sampled. Batch rows are those of the step, padding included."""

    step: StepInputs
    sample: SampleInputs
    streams: torch.Tensor
    """``[T, hc_mult, D]``: the target's residual streams after its last layer."""
    layer_streams: tuple[torch.Tensor, ...]
    """The same after each of ``Proposer.aux_layers``."""
    num_sampled: torch.Tensor
    """int32 ``[R]``: tokens that each request got (0: an unfinished prefill chunk, or padding)."""
    num_rejected: torch.Tensor
    """int32 ``[R]``: its last rows in the step that were draft tokens and were not accepted."""
    last_sampled: torch.Tensor
    """int64 ``[R + 1]`` by state row: the newest token of each request."""


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
        """Draft ids int64 ``[R, K]`` (-1: none) and the logits ``[R, K, V]`` that they were drawn from, by batch row.

        A function of tensors with fixed shapes: it is compiled and captured.
        """


class StepResult(NamedTuple):
    """What a step gave, by batch row, on the device. Valid until the next step."""

    logits: torch.Tensor
    ids: torch.Tensor
    """int64 ``[R, 1 + 2 K]``: new tokens, then -1, in the first ``1 + K`` columns; then draft tokens, -1 where there is none. One tensor,
    because each that the host reads costs it a wait and a copy."""


class Executor:
    """Runs steps on the device. Holds the state of sampling, by state row; one spare row takes what has no request."""

    def __init__(self, config: EngineConfig, target: Target, proposer: Proposer | None, device: torch.device) -> None:
        self.config, self.target, self.proposer = config, target, proposer
        rows, vocab_size = config.max_num_seqs + 1, int(target.model.config.vocab_size)
        self.last_sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draft_logits = torch.zeros(rows, config.tokens_per_decode - 1, vocab_size, device=device)
        self.num_lanes = num_workspace_lanes(config)
        self.compiled: dict[str, Any] = {}
        """Backend of each compiled step, which tells what lanes it bound."""
        self.pool = GraphPool(device, graphs=not config.enforce_eager)
        with self.pool.manager.unlocked():  # another engine of the process may hold its lock
            self.pool.manager.raise_counts(self.num_lanes)
        drafts_apart = proposer is not None and not config.fused
        name = "target" if proposer is None or drafts_apart else "fused"
        function = self._target_step if drafts_apart else self._plain_step if proposer is None else self._fused_step
        inputs = {**_specs(dummy_step(config, 1)), **_specs(dummy_sample(config))}
        first = self._compiled(name, function, 0, _step_per_token)
        self._first = self.pool.step(name, first, inputs, sizes=config.step_sizes, max_size=config.max_num_batched_tokens)
        self._draft: FollowingStep | None = None
        if drafts_apart:
            draft = self._compiled("draft", self._draft_step, self.draft_lane, _draft_per_token)
            self._draft = self.pool.follow(self._first, "draft", draft, lane=self.draft_lane)
        if config.compile or self.pool.recorder is not None:
            self.capture()

    @property
    def draft_lane(self) -> int:
        return self.num_lanes - 1

    @torch.no_grad()
    def capture(self) -> None:
        """Run a step of padding at every capture size, and capture it: what is compiled or allocated once is so before the first request."""
        if not self.config.compile:
            self.pool.capture()
            return
        # Dynamo counts the graphs of all engines of a process together, and its limit (8) is that of a few. Nothing else compiles them.
        limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
        with torch._dynamo.config.patch(recompile_limit=limit):
            self.pool.capture()

    @torch.no_grad()
    def run(self, groups: Iterable[str], batch: Sequence[Scheduled]) -> StepResult:
        """Start one step of a scheduled batch. Nothing is waited for: whoever reads the result waits."""
        staged = self._first.stage(sum(part.num_tokens for part in batch))
        write_step(groups, batch, *_split(staged.arrays))
        outputs = staged.run()
        if self._draft is None:
            return StepResult(*outputs.read())
        return StepResult(outputs.read()[0], self._draft(outputs).read())

    # The functions that are compiled and captured

    def _plain_step(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step, sample = _split(inputs)
        logits = self.target(step).logits
        return logits, self._sample(logits, sample)[0]

    def _target_step(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        step, sample = _split(inputs)
        output: TargetOutput = self.target(step)
        return output.logits, *self._sample(output.logits, sample), output.streams, output.layer_streams

    def _draft_step(self, inputs: tuple[torch.Tensor, ...], outputs: tuple[Any, ...]) -> torch.Tensor:
        _, sampled, num_sampled, streams, layer_streams = outputs
        return self._propose(*_split(inputs), streams, layer_streams, sampled, num_sampled)

    def _fused_step(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step, sample = _split(inputs)
        output: TargetOutput = self.target(step)
        sampled, num_sampled = self._sample(output.logits, sample)
        with use_workspace_lane(self.draft_lane):
            ids = self._propose(step, sample, output.streams, output.layer_streams, sampled, num_sampled)
        return output.logits, ids

    def _sample(self, logits: torch.Tensor, sample: SampleInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens int64 ``[R, 1 + K]`` (then -1) and their number int32 ``[R]``, by batch row."""
        reqs, num_drafts = sample.draft_ids.shape
        if num_drafts == 0:
            ids = gumbel_sample(logits, sample.temperature, sample.seeds, sample.positions, sample.idx_mapping)
            live = sample.idx_mapping >= 0
            return self.target.ranks.agree(torch.where(live, ids, -1)[:, None], live.to(torch.int32))
        proposed_from = self.draft_logits[sample.idx_mapping.clamp(min=0).to(torch.int64)]
        sampled, num_sampled = rejection_sample(
            logits.view(reqs, 1 + num_drafts, -1), sample.draft_ids, proposed_from, sample.temperature, sample.seeds, sample.idx_mapping, sample.positions
        )
        return self.target.ranks.agree(sampled, num_sampled)

    def _propose(
        self, step: StepInputs, sample: SampleInputs, streams: torch.Tensor, layer_streams: tuple[torch.Tensor, ...], sampled: torch.Tensor, num_sampled: torch.Tensor
    ) -> torch.Tensor:
        """``sampled`` and the draft tokens behind it, by batch row; logits of these are kept by state row, for the verification."""
        assert self.proposer is not None
        reqs = num_sampled.shape[0]
        live = num_sampled > 0
        # Rows without a request write to the spare last row.
        rows = torch.where(live, sample.state_rows, reqs).to(torch.int64)
        newest = sampled.gather(1, (num_sampled.to(torch.int64) - 1).clamp(min=0)[:, None])[:, 0]
        self.last_sampled[rows] = newest
        num_rejected = torch.where(live, (sample.draft_ids >= 0).sum(1) + 1 - num_sampled, 0).to(torch.int32)
        inputs = ProposeInputs(step, sample, streams, layer_streams, num_sampled, num_rejected, self.last_sampled)
        ids, logits = self.proposer.propose(inputs)
        self.draft_logits[rows] = logits
        return torch.cat([sampled, self.target.ranks.agree(ids, num_sampled)[0]], 1)

    # Compilation

    def _compiled(self, name: str, function: Callable[..., Any], lane: int, per_token: Callable[..., Iterable[torch.Tensor]]) -> Callable[..., Any]:
        """``function``, compiled where the engine compiles. ``per_token``: those of its arguments whose first dimension is the tokens of the step."""
        if not self.config.compile:
            return function
        # Imported by name: it lies beside the package in a checkout, and brings in Inductor.
        self.compiled[name] = backend = importlib.import_module("dsv4_ops.passes").backend(unmarked=lane)
        compiled = torch.compile(function, fullgraph=True, backend=backend)

        def run(*arguments: Any) -> Any:
            # The number of tokens changes from step to step, and nothing else: one graph for all counts above 1, which is always its own.
            for tensor in per_token(*arguments):
                if tensor.shape[0] > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return compiled(*arguments)

        return run


def _split(inputs: Sequence[Any]) -> tuple[StepInputs, SampleInputs]:
    return StepInputs(*inputs[:_STEP_FIELDS]), SampleInputs(*inputs[_STEP_FIELDS:])


def _step_per_token(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(_split(inputs)[0], name) for name in _PER_TOKEN)


def _draft_per_token(inputs: tuple[torch.Tensor, ...], outputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    *_, streams, layer_streams = outputs
    return *_step_per_token(*inputs), streams, *layer_streams


def _specs(padding: Any) -> dict[str, StepInput]:
    """The inputs of a captured step whose padding is ``padding``: a step of one padding token, constant in each field."""
    specs = {}
    for name, tensor in padding._asdict().items():
        pad = tensor.flatten()[0].item() if tensor.numel() else 0
        specs["sample_" + name if isinstance(padding, SampleInputs) else name] = (
            StepInput(tensor.dtype, tuple(tensor.shape[1:]), pad=pad) if name in _PER_TOKEN and isinstance(padding, StepInputs) else StepInput(tensor.dtype, tuple(tensor.shape), rows=0, pad=pad)
        )
    return specs
