"""Which requests run in a step, and with how many tokens.

Decoding requests come first, each with its last token and its draft tokens; what is left of the step's token budget goes to
prefill chunks, in order of admission. Blocks are allocated before a step for every position that it writes. When a pool runs
out, the request admitted last gives all its blocks back and is computed anew later (its tokens, and the draft tokens that were
proposed for it, are kept, so that its output does not depend on having been preempted).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import RequestError
from .blocks import BlockTable, KVGroup
from .config import EngineConfig
from .requests import Completion, Request

__all__ = ["Scheduled", "Scheduler", "Sequence_"]


@dataclass(eq=False)
class Sequence_:
    """A request on its way. ``tokens[:num_computed]`` have KV; the tokens after them are run next."""

    request: Request
    tokens: list[int]
    completion: Completion
    tables: dict[str, BlockTable]
    limit: int
    """Length at which it finishes, whatever is sampled."""
    num_computed: int = 0
    num_prefill: int = 0
    """Tokens known when it was admitted: up to there it prefills, from there on it decodes."""
    row: int = -1
    """Its place in tensors that are kept by request state, while it runs."""
    draft_ids: list[int] = field(default_factory=list)
    draft_state: Any = None
    """What the proposer keeps of a preempted request."""

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.num_prefill

    @property
    def drafts(self) -> list[int]:
        """The draft tokens that may still be emitted: the token after the last one must fit as well."""
        return self.draft_ids[: max(0, self.limit - len(self.tokens) - 1)]


class Scheduled(NamedTuple):
    """The part of one request in a step: ``num_known`` of its tokens, then ``drafts``."""

    sequence: Sequence_
    start: int
    num_known: int
    drafts: list[int]
    samples: bool
    """Whether it gives tokens: false for a prefill chunk that is not the last."""

    @property
    def num_tokens(self) -> int:
        return self.num_known + len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.num_known] + self.drafts


class Scheduler:
    """Waiting and running requests, and the blocks they hold."""

    def __init__(self, config: EngineConfig, groups: dict[str, KVGroup], draft_lookahead: int = 0) -> None:
        self.config, self.groups, self.draft_lookahead = config, groups, draft_lookahead
        self.waiting: deque[Sequence_] = deque()
        self.running: list[Sequence_] = []
        self.num_preemptions = 0
        self.on_preempt: Callable[[Sequence_], None] = lambda sequence: None
        """Called before a preempted request loses its row; the engine saves what it keeps by row."""
        self._free_rows = deque(range(config.max_num_seqs))

    def check(self, request: Request) -> None:
        """Raise RequestError when the pools could not hold ``request`` even alone."""
        limit = self._limit(request)
        for name, group in self.groups.items():
            step = self.config.max_num_batched_tokens + (self.draft_lookahead if name == "draft" else 0)
            need = KVGroup.blocks_for(self._end(name, limit), group.block_size, group.keep, step)
            if need > group.pool.capacity:
                raise RequestError(f"request {request.index}: {limit} positions need {need} blocks of the {name} group, it has {group.pool.capacity}; raise num_{name}_blocks.")

    def add(self, request: Request) -> Sequence_:
        """Queue a request. Raises RequestError as :meth:`check` does."""
        self.check(request)
        tables = {name: BlockTable() for name in self.groups}
        sequence = Sequence_(request, list(request.prompt_ids), Completion(request.index), tables, self._limit(request))
        self.waiting.append(sequence)
        return sequence

    def drop(self, sequences: Sequence[Sequence_]) -> None:
        """Forget these requests, finished or not, and take back what they hold."""
        for sequence in sequences:
            if sequence.row >= 0:
                self._leave(sequence)
            elif sequence in self.waiting:
                self.waiting.remove(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Scheduled]:
        """The next step: decoding requests, then prefill chunks. Empty only when nothing is left to do."""
        batch: list[Scheduled] = []
        budget, preemptions = self.config.max_num_batched_tokens, self.num_preemptions
        running = list(self.running)
        for sequence in [s for s in running if s.decoding] + [s for s in running if not s.decoding]:
            if sequence.row >= 0:  # else it was preempted for one before it
                budget -= self._schedule(sequence, budget, batch)
        # Whoever was preempted waits at the front: nobody is admitted into the room that it made.
        while self.waiting and self._free_rows and self.num_preemptions == preemptions:
            sequence = self.waiting[0]
            sequence.num_prefill = len(sequence.tokens)
            part = self._part(sequence, budget)
            if part is None or not self._fits(sequence, part.start + part.num_tokens):
                break
            self.waiting.popleft()
            sequence.row = self._free_rows.popleft()
            self.running.append(sequence)
            budget -= self._schedule(sequence, budget, batch)
        return batch

    def commit(self, scheduled: Scheduled, emitted: Sequence[int], drafts: Sequence[int] = ()) -> bool:
        """Take over what a step gave to one request, and ``drafts`` proposed for after it; True when the request is finished (its blocks are free again)."""
        sequence = scheduled.sequence
        completion, request = sequence.completion, sequence.request
        sequence.num_computed = scheduled.start + scheduled.num_known
        if not scheduled.samples:
            return False
        # Each emitted token but the last one confirms a draft token whose KV this step has written.
        sequence.num_computed += len(emitted) - 1
        sequence.draft_ids = list(drafts)
        first, taken = len(sequence.tokens), 0
        for token in emitted:
            sequence.tokens.append(token)
            taken += 1
            if token in request.stop_ids:
                completion.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.limit:
                completion.finish_reason = "length"
            if completion.finish_reason:
                break
        if first > len(request.prompt_ids):  # the prompt's own token is no decode step
            completion.steps += 1
            completion.accepted_lengths.append(taken)
        if completion.finish_reason:
            completion.token_ids = sequence.tokens[len(request.prompt_ids) :]
            self._leave(sequence)
        return bool(completion.finish_reason)

    def _part(self, sequence: Sequence_, budget: int) -> Scheduled | None:
        """What of ``sequence`` the rest of the token budget takes, or None."""
        known, drafts = len(sequence.tokens) - sequence.num_computed, sequence.drafts
        if known + len(drafts) <= budget:
            return Scheduled(sequence, sequence.num_computed, known, drafts, True)
        # Draft tokens are never cut to fit: they go with the last token, when there is room for all of them.
        chunk = min(budget, known - 1) if drafts else budget
        return Scheduled(sequence, sequence.num_computed, chunk, [], False) if chunk > 0 else None

    def _schedule(self, sequence: Sequence_, budget: int, batch: list[Scheduled]) -> int:
        """Give ``sequence`` its blocks and a place in ``batch``, where it can have them; the tokens that it takes of ``budget``."""
        part = self._part(sequence, budget)
        if part is None:
            return 0
        end = part.start + part.num_tokens
        for name, group in self.groups.items():
            group.evict(sequence.tables[name], sequence.num_computed)
        while not self._fits(sequence, end):
            victim = next(s for s in reversed(self.running) if all(s is not other.sequence for other in batch))
            self._preempt(victim)
            if victim is sequence:
                return 0
        for name, group in self.groups.items():
            group.grow(sequence.tables[name], self._end(name, end))
        batch.append(part)
        return part.num_tokens

    def _limit(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.max_tokens, self.config.max_model_len)

    def _end(self, group: str, end: int) -> int:
        return min(end + self.draft_lookahead, self.config.max_model_len) if group == "draft" else end

    def _fits(self, sequence: Sequence_, end: int) -> bool:
        return all(group.missing(sequence.tables[name], self._end(name, end)) <= group.pool.num_free for name, group in self.groups.items())

    def _preempt(self, sequence: Sequence_) -> None:
        self.num_preemptions += 1
        self.on_preempt(sequence)
        self._leave(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence_) -> None:
        for name, group in self.groups.items():
            group.release(sequence.tables[name])
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
