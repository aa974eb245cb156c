"""Draft sampling, and rejection with recovery, over the vocabulary of the model: ours, PyTorch's usual way, and peers.

Each provider's result is checked before it is timed. Ours against the PyTorch path of this package (a close draw may come out
otherwise, one a call at most); peers, whose random numbers are others, on the same batch with all requests greedy (exact) and, when random,
for ids in range. ``floor_us`` is the time that the copy rate of this run takes to read every logit once: all 1 + 2K rows of a
request where the proposals are sampled, although a rejected tail need not be read; ours reads the row that it draws from twice.

PEERS_DIR may hold ``peers_sampling.py`` (``benchmarks/peers``) with ``GUMBEL = {name: prepare}``, where ``prepare(logits, temperature, seeds, positions,
idx_mapping)`` gives a call that returns ids, and ``REJECTION = {name: prepare}``, where ``prepare(target, draft_token_ids, draft_logits,
temperature, seeds, idx_mapping, positions)`` gives one that returns (sampled, num_sampled), and in it only what was emitted counts.
Both take logits at temperature 1. SAMPLING_REQUESTS (comma-separated) narrows the run; what is narrowed is written as ``sampling-part.json``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4_ops import STREAM_DRAFT, STREAM_PLAIN, gumbel_sample, rejection_sample, testing
from dsv4_ops.bench.timing import ColdReplays, copy_rate
from dsv4_ops.rejection import _torch as rejection_torch
from dsv4_ops.sampling import _torch as gumbel_torch

from . import results

WIDTH, DRAFTS, REQUESTS = 129280, 5, (1, 8, 64, 256)
DEVICE = "cuda"
METHOD = (
    "cold L2 (256 MB read before each replay), CUDA graph of one call for each of 2 to 16 input sets, us a call over 11 replays; temperature 1 in random rows. "
    "A kernel of dsv4_ops starts while the one before it ends (programmatic dependent launch); peers are launched as their authors do"
)
SET_BYTES = 3 << 30  # of one case's input sets together, where it has more than two


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    requests: int
    drafts: int
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0

    @property
    def rows(self) -> int:
        """Rows of logits that the call is given."""
        if self.op == "gumbel_sample":
            return self.requests * max(self.drafts, 1)
        return self.requests * (1 + (2 if "sampled" in self.name else 1) * self.drafts)


def cases() -> Iterator[Case]:
    for requests in REQUESTS:
        yield Case("gumbel_sample", "plain", requests, 0)
        yield Case("gumbel_sample", "plain, bfloat16", requests, 0, torch.bfloat16)
        yield Case("gumbel_sample", "plain, greedy requests", requests, 0, temperature=0.0)
        yield Case("gumbel_sample", "drafts", requests, DRAFTS)
        yield Case("rejection_sample", "sampled proposals", requests, DRAFTS)
        yield Case("rejection_sample", "sampled proposals, bfloat16", requests, DRAFTS, torch.bfloat16)
        yield Case("rejection_sample", "greedy proposals", requests, DRAFTS)
        yield Case("rejection_sample", "greedy proposals, greedy requests", requests, DRAFTS, temperature=0.0)


class Inputs:
    """One input set of a case, as the ops take it."""

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        n = case.requests

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE)

        def whole(*shape: int) -> torch.Tensor:
            return torch.randint(0, 2**40, shape, generator=generator, device=DEVICE)

        self.case = case
        self.temperature = torch.full((n,), case.temperature, device=DEVICE)
        self.seeds, self.positions = whole(n), whole(n)
        self.mapping = torch.arange(n, device=DEVICE, dtype=torch.int32)
        if case.op == "gumbel_sample":
            self.logits = (normal(case.rows, WIDTH) * 2).to(case.dtype)
            self.rows = self.mapping.repeat_interleave(case.rows // n)
            self.row_positions = self.positions.repeat_interleave(case.rows // n) + torch.arange(case.rows, device=DEVICE) % (case.rows // n)
            return
        target = normal(n, 1 + case.drafts, WIDTH) * 2
        proposal = target[:, :-1] + 0.5 * normal(n, case.drafts, WIDTH)
        self.target, self.proposal = target.to(case.dtype), proposal.to(case.dtype) if "sampled" in case.name else None
        flat, place = proposal.to(case.dtype).flatten(0, 1), (self.positions[:, None] + torch.arange(case.drafts, device=DEVICE)).flatten()
        self.draft = (
            proposal.argmax(-1)
            if self.proposal is None
            else gumbel_sample(flat, self.temperature, self.seeds, place, self.mapping.repeat_interleave(case.drafts), STREAM_DRAFT).view(n, case.drafts)
        )

    def call_args(self, temperature: torch.Tensor | None = None) -> tuple[Any, ...]:
        t = self.temperature if temperature is None else temperature
        if self.case.op == "gumbel_sample":
            return self.logits, t, self.seeds, self.row_positions, self.rows
        return self.target, self.draft, self.proposal, t, self.seeds, self.mapping, self.positions


def same(got: Any, expected: Any, flips: int = 0) -> bool:
    """Whether what was emitted is the same but for ``flips`` requests; what stands after it does not count."""
    ours, theirs = testing.outputs(got), testing.outputs(expected)
    if len(ours) == 1:
        return int((ours[0] != theirs[0]).sum()) <= flips
    kept = torch.arange(theirs[0].shape[1], device=theirs[0].device) < theirs[1][:, None]
    return int(((ours[1] != theirs[1]) | ((ours[0] != theirs[0]) & kept).any(1)).sum()) <= flips


def in_range(got: Any) -> bool:
    results_ = testing.outputs(got)
    if len(results_) == 1:
        return bool(((results_[0] >= 0) & (results_[0] < WIDTH)).all())
    ids, count = results_
    kept = torch.arange(ids.shape[1], device=ids.device) < count[:, None]
    return bool(((count >= 1) & (count <= ids.shape[1])).all()) and bool(((ids >= 0) & (ids < WIDTH))[kept].all())


def usual(logits: torch.Tensor) -> torch.Tensor:
    """As samplers without seeds of their own draw."""
    probabilities = torch.softmax(logits, -1, dtype=torch.float32)
    return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1)


class Bench:
    def __init__(self, replays: Any, copy_GBps: float) -> None:
        self.replays, self.copy_GBps, self.rows = replays, copy_GBps, list[dict[str, Any]]()
        self.peers, folder = None, os.environ.get("PEERS_DIR")
        if folder and (Path(folder) / "peers_sampling.py").exists():
            sys.path.insert(0, str(Path(folder).resolve()))
            import peers_sampling  # type: ignore[import-not-found]

            self.peers = peers_sampling

    def providers(self, case: Case, sets: list[Inputs]) -> Iterator[tuple[str, list[Callable[[], Any]], Callable[[], bool]]]:
        """Name, a call for each input set, and whether the first one is right."""
        first, stream = sets[0], STREAM_DRAFT if case.drafts else STREAM_PLAIN
        if case.op == "gumbel_sample":
            calls: list[Callable[[], Any]] = [lambda s=s: gumbel_sample(*s.call_args(), stream=stream) for s in sets]  # type: ignore[misc]
            yield "dsv4_ops", calls, lambda: same(calls[0](), gumbel_torch(*first.call_args(), stream), flips=1)  # type: ignore[call-arg]
            if case.temperature == 1.0:
                others: list[Callable[[], Any]] = [lambda s=s: usual(s.logits) for s in sets]  # type: ignore[misc]
                yield "torch: softmax, exponential_, argmax", others, lambda: in_range(others[0]())
            peers: dict[str, Any] = getattr(self.peers, "GUMBEL", {})
            greedy: Callable[..., Any] = gumbel_sample
        else:
            calls = [lambda s=s: rejection_sample(*s.call_args()) for s in sets]  # type: ignore[misc]
            yield "dsv4_ops", calls, lambda: same(calls[0](), rejection_torch(*first.call_args()), flips=1)
            peers, greedy = getattr(self.peers, "REJECTION", {}), rejection_sample
        cold = torch.zeros_like(first.temperature)
        for name, prepare in peers.items():
            prepared = [prepare(*s.call_args()) for s in sets]
            yield name, prepared, lambda prepare=prepare, one=prepared[0]: in_range(one()) and same(prepare(*first.call_args(cold))(), greedy(*first.call_args(cold)))  # type: ignore[misc]

    def run(self, case: Case, seed: int) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        size = case.rows * WIDTH * case.dtype.itemsize
        sets = [Inputs(case, generator) for _ in range(min(max(SET_BYTES // size, 2), 16))]
        params = {"requests": case.requests, "drafts": case.drafts, "width": WIDTH, "dtype": str(case.dtype).removeprefix("torch.")}
        floor = round(size / self.copy_GBps / 1e3, 2)
        for name, calls, right in self.providers(case, sets):
            row: dict[str, Any] = {"op": case.op, "case": case.name, "params": params, "provider": name, "floor_us": floor}
            try:
                row["ok"] = right()
                if row["ok"]:
                    times, last = self.replays.measure(calls)
                    row["ok"] = in_range(tuple(last) if len(last) > 1 else last[0])
                    row.update(times if row["ok"] else {})
            except Exception as error:
                row.update(ok=False, skipped=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
            self.rows.append(row)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    start, chosen = time.perf_counter(), results.chosen_by("SAMPLING_REQUESTS")
    wanted = [case for case in cases() if chosen(case.requests)]
    bench = Bench(ColdReplays(), copy_rate())
    backends = {op.name: op.backends["cuda"] for op in testing.ops() if op.name in ("gumbel_sample", "rejection_sample")}

    def record(name: str) -> None:
        results.write(name, {"copy_GBps": bench.copy_GBps, "backends": backends}, method=METHOD, wall_s=round(time.perf_counter() - start, 1), rows=bench.rows)

    with results.measuring("sampling", os.environ.get("SAMPLING_REQUESTS"), record):
        for seed, case in enumerate(wanted):
            bench.run(case, seed)
    for row in bench.rows:
        print(f"{row['op']:17} {row['case']:34} {row['params']['requests']:4} x {row['params']['drafts']} {row['provider']:38} {row.get('us_p50', row.get('skipped', 'WRONG'))!s:>9} floor {row['floor_us']}")
    return 0 if all(row["ok"] for row in bench.rows if row["provider"] == "dsv4_ops") else 1


if __name__ == "__main__":
    sys.exit(main())
