"""A part of the program campaign (``python -m tests.program_campaign`` runs all 200): lanes at run time equal the marks, numbers equal eager's."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest
import torch

from dsv4_ops.passes import bind_lanes, fx_utils, graph_text
from tests import lane_programs, program_campaign
from tests import lane_toys as toys
from tests.program_campaign import DYNAMO_ONLY, SETTINGS, Outcome, check, unbound

UNDER_INDUCTOR = range(200, 220)
"""Seeds that the whole campaign does not use."""
BY_DYNAMO = range(40)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with lane_programs.quiet():
        yield


@pytest.mark.parametrize("seed", UNDER_INDUCTOR)
def test_programs_under_inductor(seed: int) -> None:
    outcome = check(seed, SETTINGS[seed % len(SETTINGS)])
    assert not outcome.faults, outcome


@pytest.mark.parametrize("seed", BY_DYNAMO)
def test_programs_bound_on_dynamos_graph(seed: int) -> None:
    outcome = check(seed, DYNAMO_ONLY)
    assert not outcome.faults, outcome
    assert outcome.calls


def test_without_the_binder_the_same_programs_are_wrong() -> None:
    """Else the tests above could not fail. Numbers stay right: only the record of lanes shows it."""
    outcomes: list[Outcome] = [check(seed, unbound(DYNAMO_ONLY)) for seed in range(12)]
    assert sum(bool(outcome.wrong_lanes) for outcome in outcomes) >= 11
    assert not any(outcome.wrong_values or outcome.refused for outcome in outcomes)


def test_the_passes_cost_less_than_a_twentieth_of_the_compile() -> None:
    """Binding, verifying twice and digests, on 2000 nodes. Measured at 0.1 to 0.6 % on CPU (benchmarks/results/cpu/lanes.json)."""
    row = program_campaign.cost(2000)
    assert row["ok"] and row["nodes"] >= 2000 and 0 < row["share"] < 0.05, row
    assert {"bind_lanes", "check", "__call__", "watched"} <= set(row["parts_s"])


def test_programs_contain_what_they_are_for() -> None:
    found = collections.Counter(feature for seed in range(200) for feature in lane_programs.program(seed).features)
    assert set(found) == set(lane_programs.FEATURES)
    assert min(found.values()) >= 10, found


def test_a_second_binding_changes_nothing_and_leaves_graphs_sound() -> None:
    seeds = [seed for seed in range(40) if {"region", "cond"} & lane_programs.program(seed).features][:8]
    for seed in seeds:
        programs: list[torch.fx.GraphModule] = []
        program = lane_programs.program(seed)
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(program.load(), backend=toys.capture(programs), fullgraph=program.fullgraph)(*program_campaign.arguments(program, 4, 1.0))
        for gm in programs:
            bind_lanes(gm)
            once = graph_text(gm)
            again = bind_lanes(gm)
            assert graph_text(gm) == once and not again.bound and not again.cloned
            for _, module in fx_utils.modules(gm):
                module.graph.lint()
