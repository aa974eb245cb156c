"""What each op runs on here, what is missing and how to get it; and the table of ops.

``report()`` is plain data (``doctor --json``), ``render`` makes text of it, ``selftest`` runs every back end of every op
against the op's reference on the devices of this machine. Nothing is changed on the machine, and every probe that can
fail says so in its place instead of ending the report.

Back ends: *torch* is vectorized PyTorch (any device), *c++* a compiled kernel, *triton* a Triton kernel.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import inspect
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import _registry, attention_backends, capability, envs, testing
from ._decode_backends import OURS_BY_CUDA
from ._registry import Op, Sample
from ._version import __version__
from .kv_cache import kv_page_bytes

__all__ = ["Outcome", "op_text", "ops_markdown", "ops_table", "ops_text", "render", "report", "selftest", "write_ops_table"]

DEVICES = ("cpu", "cuda")
PROJECTS = ("torch", "triton", "flashinfer-python", "flashinfer-jit-cache", "transformers", "safetensors", "numpy")
REINSTALL = "pip install --force-reinstall --no-deps . (in the source folder)"
BEGIN, END = "<!-- ops:begin -->", "<!-- ops:end -->"


# The table of ops: the same on every machine.


def _declared(op: Op, device: str) -> list[str]:
    """Back ends that the sources have for an op, fastest first, whether or not they are there."""
    kernels = ["c++"] if device in op.cpp | op.cpp_sources | op.kernels.keys() else []
    triton = ["triton"] if op.triton is not None and op.triton_serves and device == "cuda" else []
    return [*kernels, *triton, "torch"]


def _in_use(op: Op, device: str) -> str:
    return op.backends[device].replace("reference", "torch")


def ops_table() -> list[dict[str, Any]]:
    """One row an op: name, family, schema, declared back ends by device, out form, graph-safe and why not."""
    return [
        {
            "op": op.name,
            "family": op.family,
            "schema": op.schema,
            "backends": {device: _declared(op, device) for device in DEVICES},
            "out_form": bool(op.out_names),
            "mutates": list(op.mutates),
            "graph_safe": op.graph_safe,
            "graph_note": op.graph_note,
        }
        for op in _registry.ops()
    ]


def ops_markdown() -> str:
    """The table of README: what each op gives, in the first line of its docstring, and where it runs."""
    lines = ["| op | gives | CPU | CUDA | graph-safe | out form |", "|---|---|---|---|---|---|"]
    for row in ops_table():
        gives = (inspect.getdoc(getattr(sys.modules[str(__package__)], row["op"], None)) or "").split("\n")[0].replace("``", "`").replace("|", "\\|")
        safe = "yes" if row["graph_safe"] else f"no: {row['graph_note']}"
        out = "yes" if row["out_form"] else ("writes " + ", ".join(f"`{m}`" for m in row["mutates"]) if row["mutates"] else "no")
        cpu, cuda = (", ".join(row["backends"][d]) for d in DEVICES)
        lines.append(f"| [`{row['op']}`](docs/api.md#{row['op']}) | {gives} | {cpu} | {cuda} | {safe} | {out} |")
    return "\n".join(lines) + "\n"


def ops_text() -> str:
    rows = ops_table()
    table = [(r["op"], r["family"], ", ".join(r["backends"]["cpu"]), ", ".join(r["backends"]["cuda"]), "yes" if r["graph_safe"] else "no", "yes" if r["out_form"] else "no") for r in rows]
    schemas = [f"  {r['schema']}" + ("" if r["graph_safe"] else f"\n    not graph-safe: {r['graph_note']}") for r in rows]
    return "\n".join([_grid(("op", "file", "cpu", "cuda", "graph-safe", "out form"), table), "", *schemas]) + "\n"


def write_ops_table(path: str | Path) -> bool:
    """Replace what stands between the markers of a page; returns whether the page changed. Raises ValueError without markers."""
    path = Path(path)
    before = path.read_text(encoding="utf-8")
    after = replaced_ops_table(before, str(path))
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def replaced_ops_table(text: str, name: str = "the page") -> str:
    """``text`` with the current table between its markers. Raises ValueError when it does not have both, once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{name} must have the lines {BEGIN} and {END}, each once and in this order.")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{ops_markdown()}{END}{rest.split(END)[1]}"


def op_text(name: str) -> str:
    """All about one op: its file's docstring with the argument table, what it returns and raises, schema, both ways to call it, one call that runs.

    Raises ValueError, naming near matches, when there is no such op.
    """
    known = {op.name: op for op in _registry.ops()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(n for n in known if name and name in n)
        raise ValueError(f"there is no op {name!r}." + (f" Near: {', '.join(near)}." if near else " `python -m dsv4_ops ops` lists all."))
    op = known[name]
    doc = (sys.modules[f"{__package__}.{op.family}"].__doc__ or "").strip()
    public = f"dsv4_ops.{op.name}(...)" if hasattr(sys.modules[str(__package__)], op.name) else ""
    calls = [*filter(None, [public]), f"torch.ops.dsv4_ops.{op.name}(...)"]
    if op.out_names:
        calls.append(f"torch.ops.dsv4_ops.{op.name}.out(..., {', '.join(f'{o}=buffer' for o in op.out_names)})   # writes your buffers, returns nothing")
    safe = "yes" if op.graph_safe else f"no: {op.graph_note}"
    function = getattr(sys.modules[str(__package__)], op.name, None)
    about = [line for line in (inspect.getdoc(function) or "").splitlines() if function is not None and not line.startswith("Arguments: ``")]
    if about:
        doc += f"\n\n{op.name}\n\n" + "\n".join(about).strip()
    return f"{doc}\n\nschema      {op.schema}\nfile        dsv4_ops/{op.family}.py\nCUDA graph  {safe}\n\ncalls\n" + "".join(f"  {c}\n" for c in calls) + f"\nexample (values are placeholders, shapes are right)\n{op_example(op)}"


def op_example(op: Op) -> str:
    """A script that calls the op once, on tensors of the shapes and dtypes of its typical call."""
    sample = op.sized("cpu", 4)
    names = [a.name for a in op.overload._schema.arguments]
    given = {**dict(zip(names, sample.args, strict=False)), **sample.kwargs}
    keyword = {a.name for a in op.overload._schema.arguments if a.kwarg_only}
    lines = ["import torch", "import dsv4_ops"]
    for name, value in given.items():
        lines.append(f"{name} = {_literal(value)}")
    arguments = ", ".join(f"{name}={name}" if name in keyword else name for name in given)
    lines.append(f"result = torch.ops.dsv4_ops.{op.name}({arguments})")
    return "".join(f"  {line}\n" for line in lines)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.dtype == torch.bool:
        return f"torch.ones({list(value.shape)}, dtype=torch.bool)"
    if value.dtype.is_floating_point:
        return f"torch.randn({list(value.shape)}).to({value.dtype})"
    if value.numel() <= 16 and value.dtype != torch.uint8:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    return f"torch.zeros({list(value.shape)}, dtype={value.dtype})"


# What is there.


def report(system: bool = True) -> dict[str, Any]:
    """Everything about this machine, as plain data. ``system`` adds PyTorch's own report (seconds)."""
    gpus, no_gpu = _gpus()
    facts: dict[str, Any] = {
        "versions": {"dsv4_ops": __version__, "python": platform.python_version(), **{name: _version(name) for name in PROJECTS}},
        "gpus": gpus,
        "no_gpu": no_gpu,
        "no_gpu_fix": _no_gpu_fix() if no_gpu else "",
        "compiled": {"loaded": list(_registry.loaded), "skipped": dict(_registry.skipped)},
        "ops": [_op_row(op, bool(gpus)) for op in _registry.ops()],
        "flashinfer": _flashinfer(gpus),
        "attention": _attention(gpus),
        "environment": [{"name": v.name, "value": v.value, "default": v.default, "meaning": v.meaning} for v in envs.VARIABLES],
    }
    if system:
        facts["system"] = _system()
    return facts


def _op_row(op: Op, has_gpu: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"op": op.name, "family": op.family, "graph_safe": op.graph_safe, "backends": {}}
    for device in DEVICES:
        there = device == "cpu" or has_gpu
        row["backends"][device] = {"in_use": _in_use(op, device) if there else None, "declared": _declared(op, device), "gaps": _gaps(op, device) if there else []}
    return row


def _gaps(op: Op, device: str) -> list[dict[str, str]]:
    """Declared back ends that are not there, each with reason and fix. One that a faster one stands in for is no gap."""
    used, gaps = _in_use(op, device), []
    for backend in _declared(op, device):
        if backend == used:
            break
        if backend == "c++" and op.has_kernel(device):  # which its launcher takes where it is faster
            continue
        reason, fix = _why_missing(backend, device)
        gaps.append({"backend": backend, "reason": reason, "fix": fix})
    return gaps


def _why_missing(backend: str, device: str) -> tuple[str, str]:
    if backend == "triton":
        return "triton is not installed", "pip install triton"
    part = "_C" if device == "cpu" else "_C_cuda"
    reason = _registry.skipped.get(part, "it was built from other sources and lacks this op")
    return f"{part}: {reason}", _fix(reason, device)


def _fix(reason: str, device: str) -> str:
    """What to do about a compiled part that is missing for this reason. The reasons are those of setup.py and _registry.py."""
    fixes = {
        "DSV4_OPS_DISABLE_C": "unset DSV4_OPS_DISABLE_C",
        "DSV4_OPS_BUILD=none": f"unset DSV4_OPS_BUILD, then {REINSTALL}",
        "DSV4_OPS_CUDA=0": f"unset DSV4_OPS_CUDA, then {REINSTALL}",
        # What this runs with was not there when the package was built: `pip install .` builds before it installs what is needed.
        "headers was not found": f"torch {torch.__version__} is installed now: {REINSTALL}",
        "is too old": f"install torch 2.11 or later, then {REINSTALL}",
        "is a CPU build": f"install a CUDA build of torch, then {REINSTALL}",
        "the build failed": f"see the compiler's output: DSV4_OPS_BUILD=require {REINSTALL.replace(' . ', ' -v . ')}" + (" (it needs a C++ compiler, g++ or clang++)" if device == "cpu" else ""),
        "CUDA toolkit": f"install a CUDA toolkit (nvcc) or set CUDA_HOME to one, then {REINSTALL}",
        "source folder": "pip install -e . in that folder",
        "does not load": REINSTALL,
        "install again": REINSTALL,
        "other sources": REINSTALL,
    }
    known = (fix for words, fix in fixes.items() if words in reason)
    return next(known, f"install a {'C++ compiler' if device == 'cpu' else 'CUDA toolkit (nvcc)'}, then {REINSTALL}")


def _no_gpu_fix() -> str:
    if torch.version.cuda is None:
        return f"nothing, where only the CPU is wanted; else install a CUDA build of torch (https://pytorch.org/get-started), then {REINSTALL}"
    return "nothing, where only the CPU is wanted; else check that nvidia-smi lists a GPU, that its driver is new enough for this torch, and CUDA_VISIBLE_DEVICES"


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """GPUs that torch can use; else the reason why there are none."""
    if torch.version.cuda is None:
        return [], f"torch {torch.__version__} is a build without CUDA"
    try:
        if not torch.cuda.is_available():
            return [], "torch finds no usable CUDA device (no GPU, no driver, or CUDA_VISIBLE_DEVICES hides it)"
        gpus = []
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            gpus.append({"name": p.name, "capability": [p.major, p.minor], "memory_bytes": p.total_memory, "multiprocessors": p.multi_processor_count})
        return gpus, ""
    except (RuntimeError, AssertionError) as error:
        return [], f"CUDA does not start: {error}"


def _flashinfer(gpus: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = capability.installed_dispatch_table()
    facts: dict[str, Any] = {"version": known.version, "table": type(known.table).__name__ if known.table is not None else None, "problem": known.problem}
    archs = sorted({tuple(g["capability"]) for g in gpus})
    # 64 query heads are DeepSeek-V4-Flash on one GPU; 128 is the window, 192 that of a draft block, 512 the indexer's top-k.
    facts["sparse_mla_decode"] = [
        {"arch": list(arch), "heads": 64, "top_k": top_k, "answer": str(capability.has_sparse_mla_decode_config(64, top_k, arch))} for arch in archs for top_k in (128, 192, 512)
    ]
    return facts


def _attention(gpus: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each back end of sparse_mla_decode on each kind of GPU here: whether it can serve, all that is unmet, what nobody has run."""
    archs: list[tuple[int, int] | None] = [*sorted({tuple(g["capability"]) for g in gpus})] or [None]  # type: ignore[list-item]
    rows = []
    for arch in archs:
        for backend in attention_backends.BACKENDS:
            unmet = [str(r) for r in attention_backends.requirements(backend, _attention_shape(backend, arch), arch) if not r.ok]
            row = {"backend": backend, "arch": None if arch is None else list(arch), "serves": not unmet, "unmet": unmet}
            rows.append(row | {"batch_invariant": backend in attention_backends.BATCH_INVARIANT, "never_run": attention_backends.NEVER_RUN.get(backend, "")})
    return rows


def _attention_shape(backend: str, arch: tuple[int, int] | None) -> attention_backends.DecodeShape:
    """Plain decode of DeepSeek-V4-Flash on one GPU, in pages that every engine pads so; in bfloat16 where a back end takes nothing else."""
    pages = attention_backends.Pages(stride=kv_page_bytes(64, align=576))
    if backend == "flashinfer" and arch is not None and arch[0] == 10:
        pages = attention_backends.Pages(torch.bfloat16, 64, 64 * 512)
    return attention_backends.DecodeShape(64, torch.bfloat16, 128, pages, 512, pages)


def _version(project: str) -> str | None:
    try:
        return importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> dict[str, Any]:
    """PyTorch's own report. It runs other programs, any of which may be missing or hang up."""
    try:
        from torch.utils import collect_env

        return {"text": str(collect_env.get_pretty_env_info())}  # type: ignore[no-untyped-call]
    except Exception as error:
        return {"text": f"torch.utils.collect_env failed: {type(error).__name__}: {error}"}


def render(facts: dict[str, Any]) -> str:
    """The report as text: ops first, then what is missing and how to get it, then the machine."""
    table = [(r["op"], *(r["backends"][d]["in_use"] or "-" for d in DEVICES), "yes" if r["graph_safe"] else "no") for r in facts["ops"]]
    lines = [_grid(("op", *DEVICES, "graph-safe"), table), ""]
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for row in facts["ops"]:
        for device in DEVICES:
            for gap in row["backends"][device]["gaps"]:
                grouped.setdefault((device, gap["backend"], gap["reason"], gap["fix"]), []).append(row["op"])
    lines.append("missing back ends" if grouped or facts["no_gpu"] else "missing back ends: none")
    for (device, backend, reason, fix), names in grouped.items():
        lines += [f"  {backend} on {device} for {', '.join(names)}", f"    why: {reason}", f"    fix: {fix}"]
    if facts["no_gpu"]:
        lines += [f"  everything on cuda\n    why: {facts['no_gpu']}", f"    fix: {facts['no_gpu_fix']}"]
    for device in DEVICES[1:] if facts["gpus"] else ():
        bare = [r["op"] for r in facts["ops"] if r["backends"][device]["declared"] == ["torch"]]
        lines += [f"  on {device}, this version has no kernel, only PyTorch, for {', '.join(bare)}"] if bare else []
    lines += ["", "compiled parts", *(f"  {name}: loaded" for name in facts["compiled"]["loaded"]), *(f"  {name}: {why}" for name, why in facts["compiled"]["skipped"].items())]
    lines += ["", "versions", *(f"  {name}: {version or 'not installed'}" for name, version in facts["versions"].items())]
    lines += ["", "GPUs"] if facts["gpus"] else []
    for i, gpu in enumerate(facts["gpus"]):
        lines += [f"  {i}: {gpu['name']}, sm_{gpu['capability'][0]}{gpu['capability'][1]}, {gpu['memory_bytes'] / 2**30:.1f} GiB, {gpu['multiprocessors']} SMs"]
    flashinfer = facts["flashinfer"]
    known = flashinfer["problem"] or f"version {flashinfer['version']}, dispatch table: {flashinfer['table']}"
    lines += ["", "FlashInfer sparse MLA decode", f"  {known}"]
    lines += [f"  sm_{a['arch'][0]}{a['arch'][1]}, {a['heads']} heads, top-k {a['top_k']}: {a['answer']}" for a in flashinfer["sparse_mla_decode"]]
    lines += ["", "attention: back ends of sparse_mla_decode (64 heads, window 128 and 512 records)", *_attention_lines(facts)]
    lines += ["", "environment", _grid(("variable", "value", "meaning"), [(v["name"], v["value"], v["meaning"]) for v in facts["environment"]])]
    if "system" in facts:
        lines += ["", "torch.utils.collect_env", facts["system"]["text"].strip()]
    lines += ["", verdict(facts)]
    return "\n".join(lines) + "\n"


def _attention_lines(facts: dict[str, Any]) -> Iterator[str]:
    own = next(r["backends"]["cuda" if facts["gpus"] else "cpu"]["in_use"] for r in facts["ops"] if r["op"] == "sparse_mla_decode")
    clusters = own == "triton" and any(row["backend"] == "cuda" and row["serves"] and row["arch"] == [9, 0] for row in facts["attention"])
    yield f"  auto: {f'on sm_90 cuda for up to {OURS_BY_CUDA.stop - 1} columns, else ' * clusters}{own}, by this package; a row's bits never depend on its batch"
    for row in facts["attention"]:
        where = "" if row["arch"] is None else f" on sm_{row['arch'][0]}{row['arch'][1]}"
        yield f"  {row['backend']}{where}: {'can serve' if row['serves'] else 'cannot serve'}{'' if row['batch_invariant'] else '; bits depend on the batch'}"
        yield from (f"    why: {reason}" for reason in row["unmet"])
        if row["never_run"]:
            yield f"    never run: {row['never_run']}"


def verdict(facts: dict[str, Any]) -> str:
    """One line: whether every op runs here, and at what speed."""
    devices = [d for d in DEVICES if d == "cpu" or facts["gpus"]]
    count = len(facts["ops"])
    slow = {d: sum(bool(r["backends"][d]["gaps"]) for r in facts["ops"]) for d in devices}
    parts = [f"{d} all by the fastest back end there is" if not slow[d] else f"{d} {slow[d]} by a slower back end (see missing back ends)" for d in devices]
    return f"verdict: all {count} ops run on {' and '.join(devices)}: {'; '.join(parts)}" + ("" if facts["gpus"] else "; no GPU")


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [tuple(head), *(tuple(r) for r in rows)]
    widths = [max(len(r[i]) for r in table) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


# Self-test.


@dataclass(frozen=True)
class Outcome:
    """One back end of one op on one device, against the op's reference."""

    op: str
    device: str
    backend: str
    samples: int
    failures: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.failures


def selftest(ops: Sequence[Op] | None = None, devices: Sequence[str] | None = None, on_outcome: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Run the samples of every op through each of its back ends and compare with the reference, on poisoned memory."""
    if devices is None:
        devices = DEVICES if _gpus()[0] else DEVICES[:1]
    outcomes = []
    for device in devices:
        for op in _registry.ops() if ops is None else ops:
            for backend, function in _implementations(op, device):
                outcomes.append(_compare(op, device, backend, function))
                if on_outcome is not None:
                    on_outcome(outcomes[-1])
    return outcomes


def _implementations(op: Op, device: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What the dispatcher uses, then the slower ones that it would fall back to."""
    yield op.backends[device], op
    if op.torch_impl is not None and op.backends[device] != "torch":
        yield "torch", op.torch_impl
    if op.triton is not None and device == "cuda" and op.backends[device] == "c++" and importlib.util.find_spec("triton") is not None:
        yield "triton", op.triton


def _compare(op: Op, device: str, backend: str, function: Callable[..., Any]) -> Outcome:
    failures, count, started = [], 0, time.perf_counter()
    for sample in op.samples(device, 0):
        count += 1
        try:
            expected, expected_args = _run(op.reference, sample)
            with testing.poisoned():
                actual, actual_args = _run(function, sample)
            testing.assert_same(actual, expected, sample.label)
            testing.assert_same(_written(op, actual_args), _written(op, expected_args), f"{sample.label} (mutated arguments)")
        except Exception as error:
            text = str(error).strip().splitlines()
            failures.append(f"{sample.label}: {type(error).__name__}: {text[0] if text else 'no message'}")
    return Outcome(op.name, device, backend, count, tuple(failures), time.perf_counter() - started)


def _run(function: Callable[..., Any], sample: Sample) -> tuple[tuple[torch.Tensor, ...], Sample]:
    mine = testing.clone_args(sample)
    with torch.no_grad():
        return testing.outputs(function(*mine.args, **mine.kwargs)), mine


def _written(op: Op, sample: Sample) -> list[torch.Tensor]:
    named = dict(zip((a.name for a in op.overload._schema.arguments), sample.args, strict=False)) | sample.kwargs
    return [named[name] for name in op.mutates]


def outcome_line(outcome: Outcome) -> str:
    verdict = "pass" if outcome.ok else "FAIL"
    lines = [f"{verdict}  {outcome.op} on {outcome.device} by {outcome.backend}: {outcome.samples - len(outcome.failures)} of {outcome.samples} samples, {outcome.seconds:.2f} s"]
    return "\n".join(lines + [f"      {f}" for f in outcome.failures])


def outcomes_as_data(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(o) | {"ok": o.ok} for o in outcomes]


def main(as_json: bool, run_selftest: bool, verbose: bool = False) -> int:
    """The ``doctor`` command. Returns 1 when the self-test found a wrong result, else 0."""
    import json

    facts = report(system=as_json or verbose)
    if not as_json:
        sys.stdout.write(render(facts))
    outcomes: list[Outcome] = []
    if run_selftest:
        if not as_json:
            print("\nself-test: every op's samples against its reference", flush=True)
        outcomes = selftest(on_outcome=None if as_json else lambda o: print(outcome_line(o), flush=True))
        facts["selftest"] = outcomes_as_data(outcomes)
        if not as_json:
            bad = sum(not o.ok for o in outcomes)
            print(f"self-test: {len(outcomes) - bad} of {len(outcomes)} passed" + ("" if facts["gpus"] else f" (CPU only: {facts['no_gpu']})"))
    if as_json:
        print(json.dumps(facts, indent=2))
    return int(any(not o.ok for o in outcomes))
