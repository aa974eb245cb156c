"""compute-sanitizer over the kernels: memcheck, racecheck, initcheck and synccheck on a fixed adversarial set.

Every op that has a kernel for CUDA (C++ or Triton) runs its own samples; ``CASES`` adds what samples are too small for, by
op family, and ``STRESS`` calls that share a row among blocks. Inputs are made on the CPU and results compared there, so the
tools see the kernels and nothing else; each tensor has an allocation of its own (PyTorch's caching would hide neighbours).
A tool passes when it reports nothing *and* every result is right.

Each tool's calls are shared out to processes (``shares``), as many at once as the machine has cores: they start Python and compile
kernels far longer than they compute. SANITIZER_OPS and SANITIZER_TOOLS (comma-separated) narrow the run; SANITIZER_SECONDS (170) or SIGTERM ends it, and what
was not finished by then is said (a run that is narrowed or not finished is written as ``sanitizer-part.json``); SANITIZER_LOGS names a folder for the tools' output. Without a tool, or on a machine that it
refuses, the outcome is ``skipped`` with the reason.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dsv4_ops import _decode_backends, rejection, sampling, sparse_decode, testing
from dsv4_ops.testing import Op, Sample

from . import results

TOOLS: dict[str, tuple[str, ...]] = {
    # Padding: an access just past an allocation must not fall into the next one. API errors: PyTorch probes by calls that fail.
    "memcheck": ("--padding", "256", "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}
ERRORS = 99  # exit code when a tool found something
KINDS = ("normal", "ties", "special", "any bits", "one value", "narrow", "ascending", "descending", "few finite", "few above a sea", "mostly NaN")
INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38])


def scores(kind: str, rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of one of ``KINDS``, on the generator's device."""
    device = generator.device
    normal = torch.randn(rows, width, generator=generator, device=device)
    if kind == "ties":
        return (normal * 2).round()
    if kind == "special":
        pick = torch.randint(0, 3 * len(SPECIAL), (rows, width), generator=generator, device=device)
        return torch.where(pick < len(SPECIAL), SPECIAL.to(device)[pick % len(SPECIAL)], normal)
    if kind == "any bits":
        return torch.randint(-(2**31), 2**31, (rows, width), generator=generator, device=device).to(torch.int32).view(torch.float32)
    if kind == "one value":
        return torch.full_like(normal, 1.25)
    if kind == "narrow":
        return 1 + normal * 1e-6
    if kind in ("ascending", "descending"):
        return normal.sort(dim=1, descending=kind == "descending").values
    if kind == "few finite":
        return torch.where(normal > 2.5, normal, -INF)
    if kind == "few above a sea":
        return (normal > 2.5).float()
    if kind == "mostly NaN":
        return torch.where(normal > 2, normal, NAN)
    assert kind == "normal"
    return normal


def topk_sample(op: str, kind: str, rows: int, width: int, k: int, dtype: torch.dtype, seed: int) -> Sample:
    """One call of a top-k op: rows at any alignment, lengths from negative to past the width."""
    generator = torch.Generator().manual_seed(seed)
    offset = seed % 5
    logits = scores(kind, rows, width + 7, generator).to(dtype)[:, offset : offset + width]
    near = torch.randint(max(-3, width // 2 - 3), width + 4, (rows,), generator=generator)
    far = torch.randint(-(2**31), 2**31, (rows,), generator=generator)
    lengths = torch.where(torch.rand(rows, generator=generator) < 0.2, far, near).to(torch.int64 if seed % 3 == 0 else torch.int32)
    label = f"{kind}, {rows} x {width}, k {k}, {str(dtype).removeprefix('torch.')}, offset {offset}"
    if op != "topk_slots":
        return Sample(label, (logits, lengths, k))
    block_size = (64, 48, 1)[seed % 3]
    table = torch.randint(-1, 5000, (3, width // block_size + 1), generator=generator, dtype=torch.int32)
    requests = torch.randint(-1, 4, (rows,), generator=generator, dtype=torch.int32)
    return Sample(label, (logits, lengths, requests, torch.rand(rows, generator=generator) < 0.8, table, k, block_size))


def topk_cases(op: str) -> Iterator[Sample]:
    """Widths and numbers of rows on both sides of every choice of csrc/topk_plan.h up to 16384 columns; kinds take turns."""
    shapes = ((1, 1), (9, 100), (133, 1500), (1, 2048), (5, 4096), (140, 4000), (17, 8192), (140, 8000), (3, 16384), (40, 16384), (133, 10000))
    turn = ("topk", "topk_values", "topk_slots").index(op)
    for i, (rows, width) in enumerate(shapes):
        for j, k in enumerate((1, 512, 2048)):
            dtype = (torch.float32, torch.bfloat16)[(i + j + turn) % 2]
            yield topk_sample(op, KINDS[(3 * i + j + turn) % len(KINDS)], rows, width, k, dtype, 100 * i + 10 * j + turn)


def topk_stress(op: str) -> Iterator[Sample]:
    """Rows that several blocks share, where the chip has clusters: long, short, empty and negative lengths side by side.

    And, fewer times, the kernels for long rows that one block ranks.
    """
    shared = ((1, 65536), (9, 60000), (4, 131072), (14, 100000), (3, 262144), (12, 300000), (30, 70000), (60, 70000))
    alone = ((2, 30000), (100, 40000), (140, 33000), (1, 2000000))
    for i in range(6):
        for j, (rows, width) in enumerate(shared + alone if i < 2 else shared):
            generator = torch.Generator().manual_seed(50 * i + j)
            dtype = (torch.float32, torch.bfloat16)[(i + j) % 2]
            sample = topk_sample(op, KINDS[(i + 2 * j) % len(KINDS)], rows, width, (512, 2048)[i % 2], dtype, 50 * i + j)
            lengths = torch.randint(-5, width + 6, (rows,), generator=generator, dtype=torch.int32)
            lengths = torch.where(torch.rand(rows, generator=generator) < 0.3, lengths % 700 - 5, lengths).to(torch.int32)
            yield Sample("stress: " + sample.label, (sample.args[0], lengths, *sample.args[2:]))


def merge_cases(_name: str) -> Iterator[Sample]:
    """Rows of one block of candidates and of several, k on both sides of their number, repeated and missing indices, no row dense."""
    for i, (count, k) in enumerate(((1024, 512), (4096, 512), (9001, 2048), (100, 4096), (4100, 1))):
        generator = torch.Generator().manual_seed(i)
        values = scores(KINDS[i + 1], 3, count + 3, generator).to((torch.float32, torch.bfloat16)[i % 2])[:, 1 : count + 1]
        indices = torch.randint(-(2**31) if i % 2 else -99, (2**31, 700)[i % 2], (3, count), generator=generator).to(torch.int32)
        yield Sample(f"{count} candidates, k {k}", (values, indices.t().contiguous().t(), k))


def sampling_cases(name: str) -> Iterator[Sample]:
    """Rows of several tiles, whose last one is not full, with and without whole quads of columns."""
    for width in (2049, 6148):
        yield Sample(f"{width} columns", tuple(sampling._args("cpu", 5, width, 3) if name == "gumbel_sample" else rejection._args("cpu", 4, 3, width, 3)))


def decode_cases(_name: str) -> Iterator[Sample]:
    """The CUDA kernels, where they can run: 16, 32 and 64 heads a block, clusters of 2 to 8, keys in one pass and in several, rows of either kind."""
    pages = _decode_backends.Pages()
    arch = _decode_backends.device_arch(torch.device("cuda"))
    if not all(r.ok for r in _decode_backends.requirements("cuda", _decode_backends.DecodeShape(64, torch.bfloat16, 128, pages, 512, pages), arch)):
        return
    for tokens, heads, widths in ((1, 16, (128,)), (3, 64, (128, 512)), (9, 40, (192, 512)), (20, 128, (133,)), (9, 64, (128, 512)), (4, 64, (256,)), (2, 8, (133, 900)), (5, 3, (7, 3))):
        dtypes = (torch.uint8, torch.bfloat16 if tokens == 9 else torch.uint8)[: len(widths)]
        args, kwargs = sparse_decode._make("cpu", torch.Generator().manual_seed(tokens), tokens, heads, widths, dtypes, (64, 32)[: len(widths)], torch.bfloat16, True)
        yield Sample(f"{tokens} tokens, {heads} heads, {widths}", args, {**kwargs, "backend": "cuda"})


CASES: dict[str, Callable[[str], Iterator[Sample]]] = dict.fromkeys(("topk", "topk_values", "topk_slots"), topk_cases) | dict.fromkeys(("gumbel_sample", "rejection_sample"), sampling_cases) | {"topk_merge": merge_cases, "sparse_mla_decode": decode_cases}
"""Op -> further calls. A kernel whose samples leave a path out gets its calls here."""
STRESS: dict[str, Callable[[str], Iterator[Sample]]] = {"topk": topk_stress, "topk_slots": topk_stress}
"""Op -> calls that are there for barriers between blocks; not bound to 16384 columns."""


def chosen_ops() -> list[Op]:
    wanted = {name.strip() for name in os.environ.get("SANITIZER_OPS", "").split(",") if name.strip()}
    return [op for op in testing.ops() if (op.name in wanted if wanted else op.backends["cuda"] in ("c++", "triton"))]


def calls_of(op: Op) -> Iterator[tuple[str, Sample]]:
    yield from (("samples", sample) for sample in op.samples("cpu"))
    for kind, more in (("cases", CASES), ("stress", STRESS)):
        if op.name in more:
            yield from ((kind, sample) for sample in more[op.name](op.name))


def moved(sample: Sample, device: str) -> Sample:
    """The call on copies of its tensors on ``device``: strides, offsets and what lies between are kept."""

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        base = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).clone().to(device)  # type: ignore[call-overload]
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    return Sample(sample.label, tuple(map(move, sample.args)), {name: move(value) for name, value in sample.kwargs.items()})


def observed(op: Op, sample: Sample, device: str) -> list[torch.Tensor]:
    """Results of a call and the arguments that it writes, on the CPU."""
    mine = moved(sample, device)
    if device == "cpu":
        mine.kwargs.pop("backend", None)  # it names one of the other device
    result = testing.outputs(op(*mine.args, **mine.kwargs))
    named = dict(zip((a.name for a in op.overload._schema.arguments), mine.args, strict=False)) | mine.kwargs
    return [tensor.cpu().contiguous() for tensor in (*result, *(named[name] for name in op.mutates))]


CALLS = {"memcheck": 40, "racecheck": 12, "initcheck": 40, "synccheck": 40}
"""Of a process. racecheck takes ten times as long over blocks that share a row as the others do."""


def shares(ops: list[Op], most: int) -> list[list[str]]:
    """What each process of a tool runs, about ``most`` calls: whole ops, or parts of one (``topk 1/3``: every third call of it, from the second on)."""
    counts = {op.name: sum(1 for _ in calls_of(op)) for op in ops}
    parts = {name: -(-count // most) for name, count in counts.items()}
    found = [[f"{name} {i}/{n}"] for name, n in parts.items() if n > 1 for i in range(n)]
    together: list[str] = []
    for name, n in parts.items():
        if n > 1:
            continue
        if together and sum(counts[other] for other in together) + counts[name] > most:
            found, together = [*found, together], []
        together.append(name)
    return [*found, together] if together else found


def calls_of_share(share: str) -> tuple[Op, list[tuple[str, Sample]]]:
    name, _, part = share.partition(" ")
    op = next(op for op in testing.ops() if op.name == name)
    first, step = map(int, part.split("/")) if part else (0, 1)
    return op, list(calls_of(op))[first::step]


def run_cases(device: str, share: list[str]) -> int:
    """Inside a tool: all calls of a share, each compared with the same op on the CPU; prints one line a wrong call and a sum."""
    counts: dict[str, int] = {}
    wrong, start = 0, time.perf_counter()
    for item in share:
        print(f"OP {item} after {time.perf_counter() - start:.1f} s", flush=True)
        op, calls = calls_of_share(item)
        for kind, sample in calls:
            counts[kind] = counts.get(kind, 0) + 1
            try:
                testing.assert_same(observed(op, sample, device), observed(op, sample, "cpu"), sample.label)
            except AssertionError as error:
                wrong += 1
                print(f"WRONG {op.name}: {str(error).splitlines()[0][:300]}", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"CALLS {sum(counts.values())} WRONG {wrong} IN {time.perf_counter() - start:.1f} s: " + ", ".join(f"{name} {count}" for name, count in counts.items()), flush=True)
    return 1 if wrong else 0


def find_tool() -> str | None:
    """compute-sanitizer on the path, or in a CUDA toolkit."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    roots = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", "/opt/cuda"]
    if nvcc := shutil.which("nvcc"):
        roots.insert(0, str(Path(nvcc).resolve().parent.parent))
    candidates = [Path(root) / part / "compute-sanitizer" for root in roots if root for part in ("bin", "compute-sanitizer")]
    return next((str(path) for path in candidates if path.is_file()), None)


def outcome(tool: str, code: int | None, output: str, seconds: float) -> dict[str, Any]:
    """What one tool's run says, as a row of the results."""
    lines = output.splitlines()
    summary = [line.strip("= ").strip() for line in lines if "SUMMARY:" in line]
    calls = next((line for line in reversed(lines) if line.startswith("CALLS ")), "")
    row: dict[str, Any] = {"op": "all", "case": tool, "provider": "dsv4_ops", "ok": code == 0 and " WRONG 0 " in calls and bool(summary), "exit_code": code, "summary": summary, "calls": calls, "wall_s": round(seconds, 1)}
    refused = next((line.strip("= ").strip() for line in lines if "not supported" in line.lower()), "")
    if code is None:
        row["skipped"] = f"not finished after {seconds:.0f} s"
    elif refused and not calls:
        row["skipped"] = refused
    elif not row["ok"]:
        row["first_lines"] = [line for line in lines if line.startswith(("=========", "WRONG"))][:30] or lines[-15:]
    return row


def run_tools(command: str, found: dict[str, list[list[str]]]) -> list[dict[str, Any]]:
    """Every share of every tool in a process of its own; a row for each, tools in their order."""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1"}
    end = time.perf_counter() + float(os.environ.get("SANITIZER_SECONDS") or results.allowed_s(170))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    folder = Path(os.environ.get("SANITIZER_LOGS") or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)

    def run(tool: str, options: tuple[str, ...], share: list[str], log: Path) -> int | None:
        """Exit code, or None when the time was over."""
        with log.open("wb") as file:
            arguments = [command, "--tool", tool, "--error-exitcode", str(ERRORS), *options, sys.executable, "-m", "benchmarks.sanitizer", "--calls", *share]
            process = subprocess.Popen(arguments, cwd=results.ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None and not over():
            time.sleep(0.2)
        if process.poll() is not None:
            return process.returncode
        os.killpg(process.pid, signal.SIGKILL)  # the tool, and the program that it runs
        process.wait()
        return None

    def over() -> bool:
        return stopped.is_set() or time.perf_counter() > end

    def row(tool: str, number: int) -> dict[str, Any]:
        share, log, began = found[tool][number], folder / f"{tool}-{number}.log", time.perf_counter()
        code = None if over() else run(tool, TOOLS[tool], share, log)
        text = log.read_text(errors="replace") if log.exists() else ""
        if "unrecognised option" in text or "unrecognized option" in text:
            code = run(tool, (), share, log)  # another version of the tool: its defaults
            text = log.read_text(errors="replace")
        return {**outcome(tool, code, text, time.perf_counter() - began), "op": ", ".join(share)}

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        # racecheck first, and of each tool the first shares, those of most calls.
        order = [(tool, number) for tool in sorted(found, key=lambda tool: CALLS[tool]) for number in range(len(found[tool]))]
        work = {(tool, number): pool.submit(row, tool, number) for tool, number in order}
        return [work[tool, number].result() for tool in found for number in range(len(found[tool]))]


def main() -> int:
    if sys.argv[1:2] == ["--calls"]:
        return run_cases("cuda", sys.argv[2:])
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    command = find_tool()
    tools = [tool for tool in os.environ.get("SANITIZER_TOOLS", ",".join(TOOLS)).split(",") if tool in TOOLS]
    start = time.perf_counter()
    reason = "compute-sanitizer is not installed"
    missing: list[dict[str, Any]] = [{"op": "all", "case": tool, "provider": "dsv4_ops", "ok": False, "skipped": reason} for tool in tools]
    rows = run_tools(command, {tool: shares(chosen_ops(), CALLS[tool]) for tool in tools}) if command else missing
    ops = {op.name: {"backend": op.backends["cuda"], "calls": sum(1 for _ in calls_of(op))} for op in chosen_ops()}
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout.strip().splitlines() if command else []
    method = "each tool over all calls of ops with a CUDA kernel; PYTORCH_NO_CUDA_MEMORY_CACHING=1; results compared with the same op on the CPU"
    part = any("exit_code" in row and row["exit_code"] is None for row in rows) or os.environ.get("SANITIZER_OPS") or os.environ.get("SANITIZER_TOOLS")
    results.write("sanitizer-part" if part else "sanitizer", {"compute_sanitizer": version[-1] if version else None}, method=method, wall_s=round(time.perf_counter() - start, 1), ops=ops, rows=rows)
    for row in rows:
        print(f"{row['case']:10} {'ok' if row['ok'] else row.get('skipped', 'FAILED')}  {'; '.join(row.get('summary', []))}  {row.get('calls', '')}")
        for line in row.get("first_lines", []):
            print("  " + line)
    return 0 if all(row["ok"] or "skipped" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
