"""Measures cases: each provider's result is compared with the op's definition before it is timed, and again after.

First the op's labelled samples (edge rows included) go through ours and through its PyTorch path, on poisoned memory; one that
differs is not timed at all. Then, at each size, results on the very inputs that are timed are compared with the op's reference on the CPU, or, where that would take long,
with its vectorized PyTorch path, which the samples have just held against the reference. A wrong result has no time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import testing
from ..testing import Op, Sample
from . import peers
from .cases import Case, least_bytes, outcome
from .peers import Missing, Provider, first_line
from .timing import Call, ColdReplays, HostCalls, copy_rate, launches

__all__ = ["Bench", "method"]

SEEDS, MOST_SETS, SET_BYTES = 4, 32, 2 << 30
BY_REFERENCE = 1 << 16
"""Elements of a call up to which the reference, a plain loop, judges it."""
DRAWS = ("gumbel_sample", "rejection_sample")
"""Their reference runs on the device: the last bit of a logarithm, which differs from a CPU's, may decide a draw."""


def method(device: str) -> str:
    if device == "cpu":
        return "wall time of single calls, caches as they are; these times say nothing about GPUs"
    return f"CUDA graph of one call on each of 2 to {MOST_SETS} input sets, after 256 MB were read (cold L2); microseconds a call, of 11 replays"


class Bench:
    """Times on one device, ``"cpu"`` or ``"cuda"``. ``on_row(row)`` is called with each as it is measured."""

    def __init__(self, device: str, against: Sequence[str] = (), on_row: Callable[[dict[str, Any]], None] | None = None, timer: Any = None) -> None:
        self.device, self.against, self.on_row = device, tuple(against), on_row or (lambda row: None)
        self.timer = timer or (ColdReplays() if device == "cuda" else HostCalls())
        self.copy_GBps = copy_rate(device)
        self.floor_us, self.floor = self._floor()
        self.rows: list[dict[str, Any]] = []
        self.missing: dict[str, dict[str, str]] = {}
        """Package -> op -> why it is not measured."""
        self.faults: dict[tuple[str, str], str] = {}
        """(op, back end) -> what is wrong with it on the op's samples."""

    def _floor(self) -> tuple[float, str]:
        """What the least call costs when it is timed in the same way."""
        name = "fill_ of one element"
        call: Call = functools.partial(torch.zeros(1, device=self.device).fill_, 1)
        if self.device == "cuda":
            try:
                from . import floor

                name, call = "an empty Triton kernel", next(call for kind, programs, call in floor.calls(self.device) if (kind, programs) == ("empty", 1))
            except ImportError:
                pass
        return float(self.timer.measure([call] * MOST_SETS)[0]["us_p50"]), name

    def run(self, op: Op, cases: Sequence[Case]) -> None:
        """Measure ``cases`` of ``op`` by ours and by every package asked for."""
        self.faults |= {(op.name, backend): fault for backend, fault in faults(op, self.device).items()}
        found = list(self._providers(op))
        for case in cases:
            try:
                inputs = Inputs(case, self.device, trusted=(op.name, "torch") not in self.faults)
            except torch.OutOfMemoryError as error:
                self._add({**_head(case, ""), "provider": "dsv4_ops", "ok": False, "skipped": f"the inputs do not fit: {str(error).splitlines()[0][:120]}"})
                continue
            for provider in found:
                self._add(self._measure(case, inputs, provider))

    def _providers(self, op: Op) -> Iterator[Provider]:
        yield Provider("dsv4_ops", lambda s: lambda: op.overload(*s.args, **s.kwargs), peers.exact, lambda s: "" if op.graph_safe or self.device == "cpu" else f"not graph-safe: {op.graph_note}")
        for package in self.against:
            try:
                yield from peers.providers(package, op, self.device)
            except Missing as reason:
                self.missing.setdefault(package, {})[op.name] = str(reason)

    def _measure(self, case: Case, inputs: Inputs, provider: Provider) -> dict[str, Any]:
        op = case.op
        row = {**_head(case, inputs.label), "provider": provider.name, "ok": False}
        backend = op.backends[self.device] if provider.name == "dsv4_ops" else "torch" if provider.right is peers.exact else ""
        if provider.name == "dsv4_ops":
            row["backend"] = op.backend_of(*inputs.sets[0].args, **inputs.sets[0].kwargs)
        if fault := self.faults.get((op.name, backend)):
            return row | {"wrong": fault}
        if unable := provider.unable(inputs.sets[0]):
            return row | {"skipped": unable}
        try:
            mine = [testing.clone_args(s) for s in inputs.sets] if op.mutates else inputs.sets
            calls: list[Call] = [functools.partial(_called, op, s, provider.prepare(s)) for s in mine]
            got = calls[0]()
            provider.right(inputs.sets[0], got, inputs.expected(0))
            row["bytes"] = least_bytes(op, inputs.sets[0], inputs.expected(0))
            times, last = self.timer.measure(calls)
            provider.right(inputs.sets[-1], tuple(last), inputs.expected(len(calls) - 1))
            row.update(times, **self._shares(row["bytes"], times["us_p50"]), ok=True)
            if self.device == "cuda":
                row["launches"] = launches(calls[0])
        except AssertionError as error:
            row["wrong"] = " ".join(str(error).split())[:300] or "the result differs"
        except Exception as error:
            row["skipped"] = first_line(error)
        return row

    def _shares(self, moved: int, us: float) -> dict[str, float]:
        copy_us = moved / self.copy_GBps / 1e3
        return {"GBps": round(moved / us / 1e3, 1), "copy_share": round(copy_us / us, 4), "floor_share": round(self.floor_us / us, 4), "roof_us": round(max(copy_us, self.floor_us), 3)}

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.on_row(row)


class Inputs:
    """Input sets of a case, and what is right for each."""

    def __init__(self, case: Case, device: str, trusted: bool = True) -> None:
        """``trusted``: the PyTorch path has held against the reference, and may judge where that would take long."""
        self.op, self.trusted, self._expected = case.op, trusted, dict[int, tuple[torch.Tensor, ...]]()
        first = case.draw(device, 0)
        self.label = first.label
        size = sum(t.untyped_storage().nbytes() for t in testing.leaves(first) if isinstance(t, torch.Tensor))
        count = 2 if device == "cpu" else max(2, min(MOST_SETS, SET_BYTES // max(size, 1)))
        drawn = [first, *(case.draw(device, seed) for seed in range(1, min(SEEDS, count)))]
        self.sets = drawn + [testing.clone_args(drawn[i % len(drawn)]) for i in range(len(drawn), count)]

    def expected(self, i: int) -> tuple[torch.Tensor, ...]:
        if i not in self._expected:
            op, sample = self.op, self.sets[i]
            elements = sum(t.numel() for t in testing.leaves(sample) if isinstance(t, torch.Tensor))
            mine, function = testing.clone_args(sample) if op.mutates else sample, op.torch_impl
            if function is None or elements <= BY_REFERENCE or not self.trusted:
                function = op.reference
                mine = mine if op.name in DRAWS else on_cpu(mine)
            self._expected[i] = outcome(op, mine, function(*mine.args, **mine.kwargs))
        return self._expected[i]


def faults(op: Op, device: str) -> dict[str, str]:
    """Back end (that in use, and ``torch``) -> what is wrong with it on one of the op's samples."""
    backends: dict[str, Callable[..., Any]] = {op.backends[device]: op.overload}
    if op.torch_impl is not None:
        backends.setdefault("torch", op.torch_impl)
    found: dict[str, str] = {}
    for sample in op.samples(device):
        right = testing.clone_args(sample) if op.name in DRAWS else on_cpu(testing.clone_args(sample))
        expected = outcome(op, right, op.reference(*right.args, **right.kwargs))
        for backend, function in backends.items():
            mine = testing.clone_args(sample)
            try:
                with testing.poisoned():
                    got = outcome(op, mine, function(*mine.args, **mine.kwargs))
                peers.exact(sample, got, expected)
            except Exception as error:
                found.setdefault(backend, f"on the sample {sample.label!r}: {first_line(error)}")
    return found


def on_cpu(value: Any) -> Any:
    """A value or a sample, its tensors on the CPU, their strides kept where they are not dense (pages)."""
    if isinstance(value, Sample):
        return Sample(value.label, tuple(map(on_cpu, value.args)), {name: on_cpu(item) for name, item in value.kwargs.items()})
    if isinstance(value, list):
        return [on_cpu(item) for item in value]
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    base = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage().cpu())  # type: ignore[call-overload]
    return base.as_strided(value.shape, value.stride(), value.storage_offset())


def _called(op: Op, sample: Sample, call: Call) -> tuple[torch.Tensor, ...]:
    return outcome(op, sample, call())


def _head(case: Case, label: str) -> dict[str, Any]:
    return {"op": case.op.name, "case": label, "params": case.params}
