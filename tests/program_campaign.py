"""Random programs through ``torch.compile``, with the lane passes and without: the lane of every call at run time, and the numbers.

    python -m tests.program_campaign --programs 200   a quarter of the programs in each setting of Inductor (all, with --every-setting), the control
                                                      without the binder, and the cost of the passes; writes benchmarks/results/<gpu>/lanes.json,
                                                      rows for each PyTorch
    python -m tests.program_campaign --seed 17        one program: its text, and what is wrong with it in each setting

A program is called three times: two inputs (so that ``cond`` takes both branches), and once inside ``use_workspace_lane(2)``, which
unmarked ops must follow. Dynamic programs are called with another size as well.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.config as config
from torch._inductor.compile_fx import compile_fx

from dsv4_ops import passes
from dsv4_ops.passes import BindLanes, LanePass, VerifyLanes, lanes
from dsv4_ops.workspace import use_workspace_lane
from tests import lane_programs
from tests import lane_toys as toys
from tests.lane_programs import Program

AMBIENT_LANE = 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a program is compiled."""

    name: str
    inner: str = "inductor"
    door: str = "backend"
    """"backend", "slot" (BindLanes and VerifyLanes in Inductor's post-grad slot) or "unbound" (the control)."""
    patches: dict[str, Any] = dataclasses.field(default_factory=dict)


SETTINGS = (
    Setting("default"),  # in 2.11, 2.13 and 2.14 this includes both reorderings
    Setting("reordering", patches={"reorder_for_peak_memory": True, "reorder_for_locality": True}),
    Setting("no reordering, first functionalization", patches={"reorder_for_peak_memory": False, "reorder_for_locality": False, "enable_auto_functionalized_v2": False}),
    Setting("slot", door="slot"),
)
DYNAMO_ONLY = Setting("aot_eager", inner="aot_eager")


def unbound(setting: Setting) -> Setting:
    return dataclasses.replace(setting, name=f"{setting.name}, unbound", door="unbound")


class Counted:
    """The backend of a setting, which also counts what was bound and how many graphs there were."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.bound, self.cloned, self.graphs = setting, 0, 0, 0
        self.handles_lanes = setting.door != "unbound"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.graphs += 1
        if self.setting.door == "unbound":
            return torch._dynamo.lookup_backend(self.setting.inner)(gm, example_inputs)
        if self.setting.door == "slot":
            return passes.with_marks(compile_fx)(gm, example_inputs)
        backend = passes.backend(self.setting.inner)
        compiled = backend(gm, example_inputs)
        assert backend.last is not None
        self.bound += sum(backend.last.bound.values())
        self.cloned += len(backend.last.cloned)
        return compiled


class CountingPass(BindLanes):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        assert self.last is not None
        self.counted.bound += sum(self.last.bound.values())


@dataclasses.dataclass
class Outcome:
    seed: int
    setting: Setting
    features: frozenset[str]
    bound: int = 0
    cloned: int = 0
    graphs: int = 0
    calls: int = 0
    """Runs of ops whose lane was compared."""
    seconds: float = 0.0
    refused: str = ""
    wrong_lanes: list[str] = dataclasses.field(default_factory=list)
    wrong_values: list[str] = dataclasses.field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return self.wrong_lanes + self.wrong_values + ([self.refused] if self.refused else [])


def arguments(program: Program, size: int, scale: float) -> tuple[torch.Tensor, torch.Tensor | list[torch.Tensor]]:
    """``x`` and the cache: rows of a tensor, or a list where shapes are dynamic (Inductor writes a row at a symbolic offset to the wrong place)."""
    generator = torch.Generator().manual_seed(program.seed)
    x = torch.rand(size, generator=generator) * scale - 0.5
    cache = torch.zeros(lane_programs.ROWS, size)
    return x.requires_grad_(program.training), [row.clone() for row in cache] if program.dynamic else cache


@dataclasses.dataclass
class Run:
    forward: list[tuple[int, int]]
    backward: list[tuple[int, int]]
    values: list[torch.Tensor]


def run(program: Program, step: Any, size: int, scale: float, oracle: Any = None) -> Run:
    """One call, and in a training program its backward. ``step`` is ``oracle``'s text or that compiled."""
    x, cache = arguments(program, size, scale)
    modules = (oracle or step).__globals__["modules"]
    values: list[torch.Tensor] = []
    with torch.set_grad_enabled(program.training):
        with toys.logged() as forward:
            results = step(x, cache)
        with toys.logged() as backward:
            if program.training:
                leaves = [x, *(p for module in modules for p in module.parameters())]
                values += torch.autograd.grad(sum(r.sum() for r in results), leaves)
    return Run(sorted(forward), backward, [*(r.detach() for r in results), *cache, *values])


def check(seed: int, setting: Setting) -> Outcome:
    """Compile and call the program of ``seed``, and compare with the oracle and with the marks in its text."""
    program = lane_programs.program(seed)
    outcome = Outcome(seed, setting, program.features)
    oracle, step = program.load(plain=True), program.load()
    backend = Counted(setting)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=program.fullgraph, dynamic=program.dynamic)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(setting.patches))
        if setting.door == "slot":  # backward graphs are compiled when they first run: the slot is filled until then
            stack.enter_context(passes.install(CountingPass(backend), VerifyLanes()))
        for number, (size, scale, ambient) in enumerate([(4, 0.5, 0), (4, 9.0, 0), (7 if program.dynamic else 4, 0.5, AMBIENT_LANE)]):
            with use_workspace_lane(ambient):
                expected = run(program, oracle, size, scale)
                assert not misplaced(program, expected.forward, ambient), "the oracle contradicts the text"
                try:
                    actual = run(program, compiled, size, scale, oracle=step)
                except Exception as error:
                    outcome.refused = f"{type(error).__name__}: {error}".split("\n\nSet TORCHDYNAMO")[0]
                    break
            compare(program, outcome, number, ambient, expected, actual)
    outcome.seconds = time.perf_counter() - start
    outcome.bound, outcome.cloned, outcome.graphs = backend.bound, backend.cloned, backend.graphs
    return outcome


def compare(program: Program, outcome: Outcome, number: int, ambient: int, expected: Run, actual: Run) -> None:
    if actual.forward != expected.forward:
        missing, extra = (collections.Counter(a) - collections.Counter(b) for a, b in ((expected.forward, actual.forward), (actual.forward, expected.forward)))
        outcome.wrong_lanes.append(f"call {number}: (tag, lane) expected {sorted(missing.elements())}, ran {sorted(extra.elements())}")
    recomputed = [entry for entry in actual.backward if entry not in set(expected.forward)]
    for where, entries in (("forward", misplaced(program, actual.forward, ambient)), ("backward", misplaced(program, actual.backward, ambient) + recomputed)):
        if entries:
            outcome.wrong_lanes.append(f"call {number}: {where}, (tag, lane) that the text contradicts: {sorted(set(entries))}")
    outcome.calls += len(actual.forward) + len(actual.backward)
    for index, (mine, theirs) in enumerate(zip(actual.values, expected.values, strict=True)):
        if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4):
            outcome.wrong_values.append(f"call {number}: value {index} is {mine.tolist()}, expected {theirs.tolist()}")


def misplaced(program: Program, entries: list[tuple[int, int]], ambient: int) -> list[tuple[int, int]]:
    """Calls whose lane is not the one that the program's text gives them."""
    return [(tag, lane) for tag, lane in entries if tag in program.marks and lane != (ambient if program.marks[tag] is None else program.marks[tag])]


# Cost of the passes


def long_step(calls: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Two nodes a call, target and draft in turn."""

    def step(x: torch.Tensor) -> torch.Tensor:
        t = d = x
        for tag in range(0, calls, 4):
            t = toys.scan(toys.vendor(t, tag) + 1, tag + 1) + 1
            with use_workspace_lane(1):
                d = toys.scan(toys.vendor(d, tag + 2) + 1, tag + 3) + 1
        return t + d

    return step


@contextlib.contextmanager
def timed(spent: dict[str, float], *where: tuple[Any, str]) -> Iterator[None]:
    """Adds the processor time inside the named functions (outermost calls only) to ``spent``."""
    depth = 0
    originals = [getattr(owner, name) for owner, name in where]

    def wrapper(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            start = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1
                if not depth:
                    spent[name] = spent.get(name, 0.0) + time.process_time() - start

        return measured

    for (owner, name), original in zip(where, originals, strict=True):
        setattr(owner, name, wrapper(name, original))
    try:
        yield
    finally:
        for (owner, name), original in zip(where, originals, strict=True):
            setattr(owner, name, original)


def cost(nodes: int = 2000, door: str = "backend") -> dict[str, Any]:
    """Processor seconds of one compile by Inductor of a program of ``nodes`` nodes, and of everything of ours in it.

    C++ compilers run in processes of their own and do not count: the share is of less than the whole.
    """
    install = sys.modules["dsv4_ops.passes.install"]
    spent: dict[str, float] = {}
    seen: list[int] = []

    class Look(passes.LanePass):
        def uuid(self) -> Any:
            return None

        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(sum(node.op == "call_function" for node in graph.nodes))

    torch._dynamo.reset()
    step, x = long_step(nodes // 2), torch.rand(4)
    ours = [(VerifyLanes, "__call__"), (VerifyLanes, "check"), (BindLanes, "__call__"), (LanePass, "uuid"), (BindLanes, "uuid"), (install, "bind_lanes"), (install, "watched"), (lanes, "watched"), (lanes, "marks_digest")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(force_disable_caches=True))
        if door == "slot":
            stack.enter_context(passes.install(BindLanes(), VerifyLanes()))
        stack.enter_context(passes.install(Look()))
        stack.enter_context(timed(spent, *ours))
        compiled = torch.compile(step, backend=passes.backend() if door == "backend" else passes.with_marks(compile_fx), fullgraph=True)
        start = time.process_time()
        with torch.no_grad():
            (_, log) = toys.lanes_of(compiled, x)
        total = time.process_time() - start
    wrong = [entry for entry in log if entry[1] != (entry[0] // 2) % 2]
    share = sum(spent.values()) / total
    return {"door": door, "nodes": max(seen), "ok": not wrong, "compile_s": round(total, 2), "passes_s": round(sum(spent.values()), 3), "share": round(share, 4), "parts_s": {k: round(v, 4) for k, v in spent.items()}}


# The whole campaign


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """One row of results."""
    bound = [o for o in outcomes if o.setting.door != "unbound"]
    return {
        "op": "lanes",
        "case": "random programs" if bound else "random programs, control without the binder",
        "params": {"setting": outcomes[0].setting.name, "torch": torch.__version__},
        "provider": "dsv4_ops" if bound else "torch",
        "ok": not any(o.faults for o in outcomes),
        "programs": len(outcomes),
        "with_wrong_lanes": sum(bool(o.wrong_lanes) for o in outcomes),
        "with_wrong_values": sum(bool(o.wrong_values) for o in outcomes),
        "rejected": sum(bool(o.refused) for o in outcomes),
        "op_runs_compared": sum(o.calls for o in outcomes),
        "ops_bound": sum(o.bound for o in outcomes),
        "bodies_cloned": sum(o.cloned for o in outcomes),
        "seconds": round(sum(o.seconds for o in outcomes), 1),
    }


def campaign(programs: int, every_setting: bool) -> tuple[list[dict[str, Any]], int]:
    """Rows of results, and how many programs are wrong with the passes."""
    outcomes: dict[str, list[Outcome]] = {}
    control: list[Outcome] = []
    for seed in range(programs):
        for setting in SETTINGS if every_setting else [SETTINGS[seed % len(SETTINGS)]]:
            outcome = check(seed, setting)
            outcomes.setdefault(setting.name, []).append(outcome)
            for fault in outcome.faults:
                print(f"program {seed}, {setting.name}: {fault}", flush=True)
        control.append(check(seed, unbound(DYNAMO_ONLY)))
        if seed % 20 == 19:
            print(f"{seed + 1} programs: {sum(bool(o.faults) for some in outcomes.values() for o in some)} wrong runs; without the binder {sum(bool(o.wrong_lanes) for o in control)} programs", flush=True)
    everything = [o for some in outcomes.values() for o in some]
    features = collections.Counter(feature for o in control for feature in o.features)
    rows = [summary(some) for some in outcomes.values()] + [summary(control)]
    rows += [{"op": "lanes", "case": "programs by feature", "params": {"torch": torch.__version__}, "provider": "dsv4_ops", "ok": True, **dict(sorted(features.items()))}]
    return rows, sum(bool(o.faults) for o in everything)


def write(rows: list[dict[str, Any]], arguments: str) -> None:
    """Keeps the rows of other versions of PyTorch."""
    from benchmarks import results

    path = results.folder() / "lanes.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in before if row["params"]["torch"] != torch.__version__]
    head = {"topic": "lanes", "command": f"python -m tests.program_campaign {arguments}", "commit": results.commit(), "date": datetime.date.today().isoformat(), "env": results.environment()}
    head["method"] = "each program called 3 times; lanes by the workspace's debug record, against the same text in plain Python and against the marks in it"
    path.write_text(json.dumps({**head, "rows": sorted(kept + rows, key=lambda row: row["params"]["torch"])}, indent=1) + "\n")
    print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--every-setting", action="store_true", help="each program in all settings, not in one of them in turn")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as fresh, lane_programs.quiet():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = fresh
        if options.seed is not None:
            print(lane_programs.program(options.seed).source)
            for setting in (*SETTINGS, DYNAMO_ONLY, unbound(DYNAMO_ONLY)):
                outcome = check(options.seed, setting)
                print(f"{setting.name}: bound {outcome.bound}", *(outcome.faults or ["right"]), sep="\n    ")
            return 0
        rows, wrong = campaign(options.programs, options.every_setting)
        for door in ("backend", "slot"):
            row = cost(2000, door)
            print(row)
            rows.append({"op": "lanes", "case": "cost of the passes", "params": {"torch": torch.__version__, "door": row.pop("door"), "nodes": row.pop("nodes")}, "provider": "dsv4_ops", **row})
    write(rows, f"--programs {options.programs}" + " --every-setting" * options.every_setting)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
