"""The engine end to end: the shipped requests in all decode modes with every check on, a soak, steps a second with CUDA graphs and
without, and where the time of a step goes, with our kernels and with PyTorch alone.

Parts (``--parts``): ``shipped`` (the main job, on the shipped checkpoint) and ``soak``; on a GPU between them ``like-cpu``, with the attention of
DeepSeek-V4-Flash ``flash`` (the shipped requests), ``profile`` and ``flash-rates``, and ``rates``. Each is checked before it is believed: by ``--verify``, by
serving the soak's requests alone, and by equal tokens of all variants that are timed. What is there is written after each part, as ``engine-part.json`` until all are done.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import pkgutil
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import results

Row = dict[str, Any]
REQUESTS = results.ROOT / "dsv4_ops" / "engine" / "data" / "requests.jsonl"
MODES = ("plain", "mtp", "dspark", "dflash")
SOAK_SHARE = 0.6
"""Of its time; in the rest the requests are served alone, to compare."""
METHOD = (
    f"wall time of serving; {os.cpu_count()} cores. shipped requests: each mode serves all of them, padded to one size for --verify, whose time is not in seconds. soak: see soak(). "
    "decode step: wall time of steps in which eight requests decode; kernels (copies and fills included) and gpu_us by torch.profiler; replay_us: its graphs replayed back to back, so all of it that is no work of the host. profile: an eager engine, whose kernels a graph holds as they are"
)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# The main job


def served(case: str, device: str, *options: str) -> tuple[list[Row], dict[str, Any]]:
    """``run --mode all --verify`` on the shipped requests: a row a mode, and what was checked."""
    from dsv4_ops.__main__ import parser
    from dsv4_ops.engine.runner import DONE, Run

    command = ["run", str(REQUESTS.relative_to(results.ROOT)), "--mode", "all", "--verify", "--device", device, *options]
    started, processor = time.perf_counter(), time.process_time()
    with chdir(results.ROOT):
        run = Run(parser().parse_args(command))
        code = run.run()
    seconds, processor, ok = time.perf_counter() - started, time.process_time() - processor, code == DONE
    rows = []
    for s in run.summaries:
        found = {"seconds": round(s.seconds, 2), "steps": s.steps, "mean_accepted": round(s.mean_accepted, 2), "accepted": {str(n): c for n, c in sorted(s.accepted.items())}}
        rows.append({"op": "engine", "case": case, "params": {"mode": s.mode, "requests": s.requests, "tokens": s.tokens, "kv_dtype": "float32"}, "provider": "dsv4_ops", "ok": ok, **(found if ok else {})})
    return rows, {"command": "python -m dsv4_ops " + " ".join(command), "all_seconds": round(seconds, 1), "processor_seconds": round(processor, 1), "checked": dict(run.checked), "findings": [str(f) for f in run.findings]}


def like_cpu(folder: Path, device: str, max_tokens: int = 64) -> Row:
    """The greedy shipped requests by plain decode on ``device`` against plain decode on the CPU, by the rule of ``--verify``: differences and close rows."""
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.engine import Engine
    from dsv4_ops.engine.requests import read_requests
    from dsv4_ops.engine.tokenizer import load_tokenizer
    from dsv4_ops.engine.verify import ERROR_LIMITS, verify_greedy

    requests = [r for r in read_requests(REQUESTS, load_tokenizer(folder), max_model_len=2048, max_tokens=max_tokens).requests if r.temperature == 0]
    engines = {where: Engine(folder, EngineConfig(device=where, record_logits=True, max_model_len=2048)) for where in ("cpu", device)}

    def serve(where: str) -> Callable[[Any], Any]:
        return lambda request: engines[where].generate([replace(request, index=0)])[0]

    findings, tokens, threads = [], 0, torch.get_num_threads()
    torch.set_num_threads(1)  # faster for so small a model, wherever cores are shared
    for request in requests:
        got = serve(device)(request).token_ids
        tokens += len(got)
        findings += verify_greedy(request, "plain", got, plain_alone=serve("cpu"), mode_alone=serve(device), error_limit=ERROR_LIMITS["float32"])
    torch.set_num_threads(threads)
    params = {"mode": "plain", "requests": len(requests), "tokens": tokens}
    return {"op": "tokens like the CPU's", "case": "shipped requests, greedy", "params": params, "provider": "dsv4_ops", "ok": all(f.close for f in findings), "findings": [str(f) for f in findings]}


@contextmanager
def chdir(path: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


# Soak


def draw_requests(count: int, seed: int, text: bytes, longest: int, answer: int) -> list[Any]:
    """Different prompts, lengths, answers; a third of them sampled."""
    from dsv4_ops.engine.requests import Request

    rng = random.Random(seed)
    found = []
    for i in range(count):
        start, length = rng.randrange(len(text) - longest), rng.choice((1, 5, 30, rng.randint(40, longest), longest))
        found.append(Request(i, tuple(text[start : start + length]), rng.randint(1, answer), temperature=0.8 if i % 3 == 2 else 0.0, seed=i))
    return found


def soak(model: Path, mode: str, device: str, steps: int, *, until: float = math.inf, kinds: int = 24, answer: int = 60, seqs: int = 8, seed: int = 0) -> Row:
    """At least ``steps`` steps of one engine under random arrivals, on pools so small that requests are preempted; it drains to nothing now and then.

    Arrivals are of ``kinds`` different requests with up to ``answer`` tokens. What each got is compared with what it gets alone: from a plain
    engine (greedy; a difference must be one that rounding explains, by the rule of ``--verify``) or from an engine of the mode (sampled; no
    tolerance). All engines pad to one size, so that every product has one shape. Nothing arrives after ``until`` (of ``time.perf_counter``).
    """
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.engine import Engine
    from dsv4_ops.engine.verify import ERROR_LIMITS, verify_greedy, verify_sampled

    tokens = 8 * seqs
    sizes: dict[str, Any] = {"max_num_seqs": seqs, "max_model_len": 320, "max_num_batched_tokens": tokens, "capture_sizes": (tokens,), "num_speculative_tokens": 4, "device": device}
    small = {"num_window_blocks": seqs + 2, "num_compressed_blocks": seqs, "num_draft_blocks": seqs + 3}
    engine = Engine(model, EngineConfig(mode=mode, **sizes, **small))
    pool, rng = draw_requests(kinds, seed, REQUESTS.read_bytes(), 200, answer), random.Random(seed)
    got: list[tuple[Any, list[int]]] = []
    waiting: dict[int, Any] = {}
    arrived, quiet_from, drains, most, started = 0, 2 * seqs, 0, 0, time.perf_counter()
    while (going := engine.stats.steps < steps and time.perf_counter() < until) or engine.scheduler.has_work:
        # Bursts and single arrivals; then, now and then, none until the batch has drained to one and to nothing.
        arrivals = rng.choice((0, 0, 0, 0, 0, 1, 1, 2, 2 * seqs)) if going and arrived < quiet_from else 0
        if not engine.scheduler.has_work and not arrivals:
            drains, quiet_from, arrivals = drains + (arrived > 0), arrived + rng.randint(2, 8) * seqs, 1
        for _ in range(min(arrivals, 3 * seqs - len(waiting))):
            request = waiting[arrived] = replace(rng.choice(pool), index=arrived)
            engine.scheduler.add(request)
            arrived += 1
        done = engine.step()
        most = max(most, len(engine.scheduler.running) + len(done))
        got += [(waiting.pop(completion.index), completion.token_ids) for completion in done]
    drains, seconds = drains + 1, time.perf_counter() - started
    alone = {m: Engine(model, EngineConfig(mode=m, record_logits=True, **sizes)) for m in {mode, "plain"}}

    def serve(by: str) -> Callable[[Any], Any]:
        return lambda request: alone[by].generate([replace(request, index=0)])[0]

    known: dict[Any, list[Any]] = {}
    for request, ids in got:
        if (key := (request.seed, tuple(ids))) in known:  # the same answer to the same request needs no second look
            continue
        if request.temperature:
            known[key] = verify_sampled(request, mode, ids, mode_alone=serve(mode))
        else:
            known[key] = verify_greedy(request, mode, ids, plain_alone=serve("plain"), mode_alone=serve(mode), error_limit=ERROR_LIMITS["float32"])
    findings = [finding for each in known.values() for finding in each]
    different = [str(f) for f in findings if not f.close]
    stats = engine.stats
    params = {"mode": mode, "steps": stats.steps, "requests": len(got), "tokens": stats.tokens, "preemptions": stats.preemptions, "drains": drains, "most_running": most, "graphs": len(engine.config.cudagraph_capture_sizes)}
    forced = stats.preemptions > 0 and most > seqs // 2  # else it shows little
    ok = forced and not different and len(got) == arrived and all(group.pool.num_free == group.pool.capacity for group in engine.groups.values())
    return {"op": "soak", "case": "random arrivals", "params": params, "provider": "dsv4_ops", "ok": ok, "different": different[:8], "close": len(findings) - len(different), "seconds": round(seconds, 2)}


# Steps


@contextmanager
def torch_paths() -> Iterator[None]:
    """Every op by its PyTorch implementation, on any device."""
    from dsv4_ops._registry import Op

    with mock.patch.object(Op, "__call__", lambda self, *args, **kwargs: (self.torch_impl or self.reference)(*args, **kwargs)):
        yield


def decoding_engine(folder: Path, model: Any, mode: str, device: str, prompt_tokens: int, **options: Any) -> Any:
    """An engine in whose steps eight requests decode, after prompts of this length (which run in chunks, without graphs)."""
    from dsv4_ops.engine.config import EngineConfig
    from dsv4_ops.engine.engine import Engine
    from dsv4_ops.engine.proposers import load_proposer
    from dsv4_ops.engine.requests import Request

    text = REQUESTS.read_bytes() * (2 + prompt_tokens // 100)
    sizes = {"max_num_seqs": 8, "max_model_len": prompt_tokens + 512, "max_num_batched_tokens": 512, "capture_sizes": (8, 40), "num_speculative_tokens": 4, "device": device}
    config = EngineConfig(mode=mode, **(sizes | options))
    engine = Engine(model, config, load_proposer(folder, model, config))
    for i in range(8):
        engine.scheduler.add(Request(i, tuple(text[400 * i : 400 * i + prompt_tokens]), 500))
    while not engine.scheduler.running or engine.scheduler.waiting or not all(s.decoding for s in engine.scheduler.running):
        engine.step()
    for _ in range(3):
        engine.step()
    return engine


def rate(engine: Any, device: str, steps: int) -> dict[str, Any]:
    synchronize(device)
    started, tokens = time.perf_counter(), engine.stats.tokens
    for _ in range(steps):
        engine.step()
    synchronize(device)
    seconds = time.perf_counter() - started
    return {"steps_per_s": round(steps / seconds, 1), "ms_per_step": round(1000 * seconds / steps, 3), "tokens_per_s": round((engine.stats.tokens - tokens) / seconds, 1)}


def step_rows(name: str, folder: Path, device: str, modes: Sequence[str], prompt_tokens: int, steps: int, kv_dtype: str = "float32") -> Iterator[Row]:
    """Steps a second: our kernels with graphs and without, and PyTorch's paths with graphs (without, on a CPU).

    With graphs and without, the requests must have got the same tokens; PyTorch's paths must give the logits of our kernels for the same step.
    """
    from dsv4_ops.engine.target import load_model

    model = load_model(folder, device)
    variants: dict[str, tuple[dict[str, Any], bool]] = {"graphs": ({}, False), "eager": ({"enforce_eager": True}, False), "graphs, PyTorch paths": ({}, True)}
    for mode in modes:
        first: list[list[int]] | None = None
        for variant, (options, by_torch) in variants.items():
            with torch_paths() if by_torch else contextlib.nullcontext():
                engine = decoding_engine(folder, model, mode, device, prompt_tokens, kv_dtype=kv_dtype, **options)
                found = rate(engine, device, steps) | kernels_of(engine, device)
            tokens = [s.tokens for s in sorted(engine.scheduler.running, key=lambda s: s.request.index)]
            first = first or tokens
            error = logits_error(engine) if by_torch else 0.0
            found |= replays_of(engine)
            ok = error <= (2.0**-12 if model.dtype == torch.float32 else 2.0**-4) and (by_torch or tokens == first)
            del engine
            free(device)
            params = {"mode": mode, "variant": variant, "requests": 8, "context": prompt_tokens, "dtype": str(model.dtype).removeprefix("torch."), "kv_dtype": kv_dtype}
            yield {"op": "decode step", "case": name, "params": params, "provider": "torch" if by_torch else "dsv4_ops", "ok": ok, "logits_error": error, **(found if ok else {})}


@torch.no_grad()
def logits_error(engine: Any) -> float:
    """Difference of the next step's logits, by our kernels and by PyTorch's paths: the largest in a row, over the largest logit, of the row at nine tenths.

    Not of the worst row: where rounding tips the choice of an expert, a row moves. The engine is of no use after it.
    """
    from dsv4_ops.engine.step import build_step

    batch = engine.scheduler.schedule()
    inputs = [part for parts in build_step(engine.config, engine.groups, batch) for part in parts]
    ours = engine.executor._first.eager(*inputs)[0]
    with torch_paths():
        theirs = engine.executor._first.eager(*inputs)[0]
    return float((ours - theirs).abs().amax(1).quantile(0.9) / theirs.abs().max())


def free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def kernels_of(engine: Any, device: str, steps: int = 4) -> dict[str, Any]:
    """Kernels, copies and fills of a step, and the microseconds that they take on the GPU."""
    if device == "cpu":
        return {}
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return {"kernels": round(len(events) / steps, 1), "gpu_us": round(sum(e.time_range.elapsed_us() for e in events) / steps, 1)}


def replays_of(engine: Any, times: int = 50) -> dict[str, Any]:
    """Microseconds of a decode step's graphs alone, one after another on the GPU: what of a step is no work of the host, the gaps between kernels
    included, which ``gpu_us`` is not. The engine is of no use after it."""
    size = engine.config.padded_tokens(len(engine.scheduler.running) * engine.config.tokens_per_decode)
    if size not in engine.config.cudagraph_capture_sizes:
        return {}
    graphs = [step._graphs.get(size) for step in engine.executor.pool.steps.values()]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(times + 3):
        if i == 3:
            start.record()
        for graph in graphs:
            graph.replay()
    end.record()
    end.synchronize()
    return {"replay_us": round(1000 * start.elapsed_time(end) / times, 1)}


# Where the time goes

PARTS = {
    "DeepseekV4HyperConnection": "hyper-connections: weights (Sinkhorn)",
    "DeepseekV4HyperHead": "hyper-connections: head",
    "DeepseekV4DecoderLayer": "hyper-connections: mixing of the streams",
    "DeepseekV4Experts": "experts",
    "DeepseekV4SparseMoeBlock": "experts: router and sum",
    "DeepseekV4TopKRouter": "experts: router and sum",
    "DeepseekV4HashRouter": "experts: router and sum",
    "DeepseekV4MLP": "experts: the shared one",
    "DeepseekV4RMSNorm": "norms",
    "DeepseekV4UnweightedRMSNorm": "norms",
    "DeepseekV4RotaryEmbedding": "rotary tables",
    "PagedAttention": "attention: rotary and layout",
    "_DraftAttention": "attention: rotary and layout",
    "_Compressor": "compressor",
    "_Indexer": "indexer: queries and keys",
    "DeepseekV4IndexerScorer": "indexer: scores",
    "Linear": "projections",
    "DeepseekV4GroupedLinear": "projections",
    "Embedding": "embeddings",
    "Target": "target: streams, rows of the logits",
    "MTPDrafter": "draft: streams",
    "BlockDrafter": "draft: streams",
}
"""Class of a module -> what its own kernels are for; those of modules inside it have their own line."""
FUNCTIONS = {
    ("dsv4_ops.engine.target", "build_metadata"): "step metadata: compressor plans",
    ("dsv4_ops.engine.executor.Executor", "_sample"): "sampling: gathers",
    ("dsv4_ops.engine.executor.Executor", "_propose"): "draft: gathers, Markov head",
    ("dsv4_ops.engine.engine.Engine", "_commit"): "results to the host",
    ("dsv4_ops._step_inputs.Staging", "copy"): "inputs: the copy",
    ("dsv4_ops.graphs.GraphStep", "_keep"): "outputs: copies",
}


@contextmanager
def named_parts(engine: Any) -> Iterator[None]:
    """Modules of target and drafter, and functions around them, as ranges of the profiler."""
    from torch.autograd.profiler import record_function

    open_ranges: list[Any] = []

    def enter(label: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            open_ranges.append(record_function("part: " + label))
            open_ranges[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    def ranged(function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function("part: " + label):
                return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for (owner, name), label in FUNCTIONS.items():
            place = pkgutil.resolve_name(owner)
            stack.enter_context(mock.patch.object(place, name, ranged(getattr(place, name), label)))
        modules = [*engine.target.modules(), *(engine.proposer.drafter.modules() if engine.proposer is not None else ())]
        for module in dict.fromkeys(modules):
            if (label := PARTS.get(type(module).__name__)) is not None:
                stack.callback(module.register_forward_pre_hook(enter(label)).remove)
                stack.callback(module.register_forward_hook(leave).remove)
        yield


def part_of(event: Any) -> str:
    """The innermost op of this package, or part, around an event of the profiler."""
    while event is not None:
        if event.name.startswith(("part: ", "dsv4_ops::")):
            return str(event.name.removeprefix("part: "))
        event = event.cpu_parent
    return "other"


def profile_row(name: str, folder: Path, device: str, mode: str, prompt_tokens: int, steps: int = 4, kv_dtype: str = "float32") -> Row:
    """GPU time of a step by part and by kernel, from an eager engine whose kernels are those that its graphs hold. (On a CPU: time of its ops.)"""
    from torch.profiler import ProfilerActivity, profile

    from dsv4_ops.engine.target import load_model

    engine = decoding_engine(folder, load_model(folder, device), mode, device, prompt_tokens, enforce_eager=True, kv_dtype=kv_dtype)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    with named_parts(engine), profile(activities=activities) as profiled:
        for _ in range(steps):
            engine.step()
        synchronize(device)
    parts, kernels, counts = Counter[str](), Counter[str](), Counter[str]()
    for event in profiled.events():
        # Ranges are drawn on the GPU's time line too: those are no kernels.
        own = [(k.name, k.duration) for k in event.kernels if not k.name.startswith("part: ")] if device != "cpu" else [(event.name, event.self_cpu_time_total)] if event.name.startswith("aten::") else []
        for kernel, microseconds in own:
            part = part_of(event)
            parts[part] += microseconds / steps
            counts[part] += 1
            kernels[kernel.split("<")[0][:80]] += microseconds / steps
    total = sum(parts.values()) or math.inf
    by_part = {part: {"us": round(us, 1), "share": round(us / total, 3), "kernels": round(counts[part] / steps, 1)} for part, us in parts.most_common()}
    by_kernel = {kernel: {"us": round(us, 1), "share": round(us / total, 3)} for kernel, us in kernels.most_common(12)}
    params = {"mode": mode, "requests": 8, "context": prompt_tokens, "kv_dtype": kv_dtype}
    ok = 0 < total < math.inf and parts["other"] <= 0.05 * total
    return {"op": "profile", "case": name, "params": params, "provider": "dsv4_ops", "ok": ok, "gpu_us": round(total, 1), "kernels": round(sum(counts.values()) / steps, 1), "parts": by_part, "by_kernel": by_kernel}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", help="comma-separated (default: shipped,soak; on a GPU all)")
    parser.add_argument("--steps", type=int, help="of the soak, all modes together (default: 10000 on a GPU, else 400)")
    parser.add_argument("--seconds", type=float, default=results.allowed_s(math.inf), help="begin no part after so many, and end the soak early (default: no limit, or what benchmarks.record allows)")
    options = parser.parse_args(arguments)
    device, gpu = options.device, options.device != "cpu"
    from dsv4_ops.engine.runner import default_model
    from dsv4_ops.engine.tiny import make_tiny

    if not gpu:
        torch.set_num_threads(1)  # a second one gains a small model little, and waits where cores are shared
    started, rows, checks, seconds = time.perf_counter(), [], {}, {}
    model, folder = default_model(), Path(tempfile.mkdtemp())
    flash = folder / "flash"
    soaked = {} if gpu else {"kinds": 6, "answer": 24, "seqs": 4}
    soak_steps = (options.steps or (10_000 if gpu else 400)) // len(MODES)

    def shipped(case: str, *run_options: str) -> Iterator[Row]:
        found, checks[case] = served(case, device, *run_options)
        yield from found

    def soaks() -> Iterator[Row]:
        for i, mode in enumerate(MODES):
            now = time.perf_counter()
            share = (started + options.seconds - now) / (len(MODES) - i)
            yield soak(model, mode, device, soak_steps, until=now + SOAK_SHARE * share, **soaked)

    work: dict[str, Callable[[], Iterator[Row]]] = {
        "shipped": lambda: shipped("shipped requests, shipped checkpoint"),
        "like-cpu": lambda: iter([like_cpu(model, device)]),
        "flash": lambda: shipped("shipped requests, flash", "--model", str(flash), "--max-tokens", "6"),
        "profile": lambda: iter([profile_row("flash", flash, device, "dspark", 2100, kv_dtype="fp8")]),
        "flash-rates": lambda: step_rows("flash", flash, device, ("plain", "dspark"), 2100, 20, "fp8"),
        "rates": lambda: step_rows("shipped checkpoint", model, device, ("plain", "dspark"), 300, 40),
        "soak": soaks,
    }
    parts = options.parts.split(",") if options.parts else list(work) if gpu else ["shipped", "soak"]
    if unknown := set(parts) - set(work):
        parser.error(f"--parts: choose from {', '.join(work)}, got {', '.join(sorted(unknown))}")

    def record(name: str) -> None:
        results.write(name, command=f"python -m benchmarks.engine {' '.join(sys.argv[1:] if arguments is None else arguments)}".strip(), method=f"{METHOD}; load {os.getloadavg()[0]:.1f} when this was written", quiet=True, seconds=seconds, checks=checks, rows=rows)

    with results.measuring("engine", None, record), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for part in parts:
            begun = time.perf_counter()
            if begun > started + options.seconds:
                rows.append({"op": part, "case": "all of it", "params": {}, "provider": "dsv4_ops", "ok": True, "skipped": f"the {options.seconds:.0f} s of --seconds were over"})
                continue
            try:
                if part in ("flash", "flash-rates", "profile") and not flash.exists():
                    make_tiny(flash, size="flash", device=device)
                for row in work[part]():
                    rows.append(row)
                    print({k: v for k, v in row.items() if k not in ("provider", "op")}, flush=True)
            except Exception as error:  # a part that cannot run is a row of its own, and no reason to lose the others
                traceback.print_exc()
                rows.append({"op": part, "case": "did not finish", "params": {}, "provider": "dsv4_ops", "ok": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
            seconds[part] = round(time.perf_counter() - begun, 1)
            print(f"{part}: {seconds[part]} s", flush=True)
            free(device)
            record("engine-part")  # what was measured is kept, whatever the next part does
    print(f"all parts: {time.perf_counter() - started:.1f} s")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
