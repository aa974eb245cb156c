"""What the ``run`` command does: read, serve in each mode, write, verify, sum up.

Transformers is imported only when the request file is there and the results file can be written. Results go to ``--out`` (one
JSON object a finished request, as it finishes), everything else that is asked for to standard output, and problems to
standard error, one line each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ..errors import RequestError
from .requests import Completion, Request, ResultWriter, Source, read_requests, result_record
from .tokenizer import load_tokenizer
from .verify import ERROR_LIMITS, Finding, verify_greedy, verify_sampled

__all__ = ["Interrupted", "ModeSummary", "Run", "default_model", "make_engine", "summary_table"]

MODES = ("plain", "mtp", "dspark", "dflash")
DONE, CHECK_FAILED, REFUSED, NOTHING_DONE = 0, 1, 3, 4
MAX_MODEL_LEN = 4352
"""Longest prompt and answer together, unless ``--max-model-len`` says otherwise. Sizes follow the longest that is asked for."""
QUIET_SECONDS = 5.0
"""How long a command may say nothing while it has something to say."""
VERIFY_TOKENS = 40
"""Tokens a step that ``--verify`` pads every step to, unless ``--max-batched-tokens`` says otherwise: large enough for eight
requests with four draft tokens each, small because decoding one request alone pays for the padding."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM: not an Exception, so that nothing on the way takes it for an error to handle."""

    def __init__(self, number: int) -> None:
        self.number = number


def default_model() -> Path:
    """The trained checkpoint that is shipped (``data/trained/README.md`` says how it was made)."""
    _forget_old_checkpoints()
    return Path(__file__).with_name("data") / "trained"


def _forget_old_checkpoints() -> None:
    """Remove the constructed ones that this command kept in the user's cache before it had a trained one to ship: 19 MB for each version."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4_ops"
    for path in cache.glob("tiny-0-" + "[0-9a-f]" * 12 + "*"):
        shutil.rmtree(path, ignore_errors=True)


@dataclass
class ModeSummary:
    """What one mode did."""

    mode: str
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    """Tokens that a decode step gave one request -> how often."""
    lanes: int = 0
    workspace_bytes: int = 0
    kv_bytes: int = 0
    preemptions: int = 0

    @property
    def mean_accepted(self) -> float:
        return sum(n * count for n, count in self.accepted.items()) / max(1, sum(self.accepted.values()))


def summary_table(summaries: Sequence[ModeSummary], padded: bool = False) -> str:
    """One line a mode. ``padded``: all steps were padded to one size, which is no speed to compare with."""
    head = ("mode", "requests", "tokens", "seconds", "tokens/s, padded" if padded else "tokens/s", "steps", "mean accepted", "accepted lengths", "lanes", "workspace", "KV cache", "preempted")
    rows = [
        (
            s.mode, str(s.requests), str(s.tokens), f"{s.seconds:.2f}", f"{s.tokens / s.seconds:.1f}" if s.seconds else "-", str(s.steps), f"{s.mean_accepted:.2f}",
            " ".join(f"{n}:{c}" for n, c in sorted(s.accepted.items())) or "-", str(s.lanes), _bytes(s.workspace_bytes), _bytes(s.kv_bytes), str(s.preemptions),
        )
        for s in summaries
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in (head, *rows))


def _bytes(count: int) -> str:
    return f"{count} B" if count < 2**10 else f"{count / 2**10:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


class Run:
    """One ``run`` command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.modes = MODES if options.mode == "all" else (options.mode,)
        # Standard output is for results when they go there; the rest moves to standard error.
        self.out: TextIO = sys.stderr if options.out == "-" else sys.stdout
        if (options.resume or options.overwrite) and options.out in (None, "-"):
            raise RequestError("--resume and --overwrite need --out FILE.")
        self.summaries: list[ModeSummary] = []
        self.findings: list[Finding] = []
        self.checked = Counter[str]()
        self._alone: dict[tuple[tuple[int, ...], int], Completion] = {}
        self._plain: Any = None  # the engine for plain decode of requests alone, once it is needed

    def run(self) -> int:
        options = self.options
        if not options.requests.is_file():
            raise RequestError(f"{options.requests}: {'is a folder, not a' if options.requests.is_dir() else 'there is no such'} file of requests.")
        if options.out not in (None, "-") and Path(options.out).exists() and options.requests.samefile(options.out):
            raise RequestError(f"--out {options.out}: is the file of requests. Name another.")
        writer = ResultWriter(options.out, "overwrite" if options.overwrite else "resume" if options.resume else "refuse") if options.out else None
        with writer or contextlib.nullcontext():
            quiet_transformers()
            self.device = self._device()
            self.model = options.model or default_model()
            limits = _model_limits(self.model)
            # What rounds more decides: the KV cache, or the model's own arithmetic.
            self.error_limit = max(ERROR_LIMITS[options.kv_dtype], ERROR_LIMITS.get(str(_json(self.model / "config.json").get("dtype")), 0.0))
            self.tokenizer = load_tokenizer(self.model)
            self.max_model_len = min(options.max_model_len or MAX_MODEL_LEN, limits["max_position_embeddings"])
            self.file = read_requests(options.requests, self.tokenizer, max_model_len=self.max_model_len, max_tokens=options.max_tokens, vocab_size=limits["vocab_size"])
            for problem in self.file.problems:
                print(f"refused: {problem}", file=sys.stderr)
            if not self.file.requests:
                raise RequestError(f"{options.requests}: {'no request in it can be served' if self.file.problems else 'holds no requests: one JSON object a line'}.")
            if options.max_model_len is None:  # block tables, and what the indexer scores, are as wide as this
                longest = max(len(request.prompt_ids) + request.max_tokens for request in self.file.requests)
                self.max_model_len = min(self.max_model_len, -(-longest // 256) * 256)
            todo = {mode: self._missing(mode, writer) for mode in self.modes}
            try:
                with self._threads(limits["hidden_size"]):
                    for mode in self.modes:
                        if todo[mode]:
                            self._serve(mode, todo[mode], writer)
            except Interrupted:
                self._say_what_is_done(writer)
                raise
        return self._conclude()

    def _device(self) -> str:
        import torch

        name = self.options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            if torch.empty(0, device=name).is_meta:
                raise RuntimeError("meta tensors hold no values")
        except (RuntimeError, AssertionError) as error:
            raise RequestError(f"--device {name}: torch {torch.__version__} cannot use it: {str(error).splitlines()[0]}") from None
        return str(name)

    @contextlib.contextmanager
    def _threads(self, hidden_size: int) -> Iterator[None]:
        """Small models gain nothing from more threads, and lose a factor of ten where the cores are busy (measured: 45 ms
        a step with one thread, 600 with two, for the small checkpoint on two cores with a load of 6)."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.options.threads or (1 if self.device == "cpu" and hidden_size < 1024 else before))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _config(self, mode: str, **changes: Any) -> Any:
        from .config import EngineConfig

        options = self.options
        drafts = {m: 0 if m == "plain" else options.draft_tokens or _draft_tokens(self.model, m) for m in {*self.modes, mode}}
        # One size for all modes, so that they differ in nothing but the way of decoding.
        tokens = max(options.max_batched_tokens or (VERIFY_TOKENS if options.verify else 256), options.max_seqs * (1 + max(drafts.values())))
        config = EngineConfig(
            mode=mode,
            num_speculative_tokens=max(1, drafts[mode]),
            max_num_seqs=options.max_seqs,
            max_num_batched_tokens=tokens,
            max_model_len=self.max_model_len,
            kv_dtype=options.kv_dtype,
            capture_sizes=(tokens,) if options.verify else None,
            compile=options.compile,
            fused=options.fused,
            device=self.device,
        )
        return replace(config, **changes)

    def _missing(self, mode: str, writer: ResultWriter | None) -> list[int]:
        """Requests whose result a resumed file does not have yet."""
        pairs = list(zip(self.file.requests, self.file.sources, strict=True))
        todo = [i for i, (request, source) in enumerate(pairs) if writer is None or not writer.finished(request, source, mode)]
        if len(todo) < len(pairs):
            print(f"{mode}: {len(pairs) - len(todo)} of {len(pairs)} results are there already", file=sys.stderr)
        return todo

    def _serve(self, mode: str, todo: Sequence[int], writer: ResultWriter | None) -> None:
        file = self.file
        engine = make_engine(self.model, self._config(mode, record_logits=self.options.verify))
        requests = [replace(file.requests[i], index=n) for n, i in enumerate(todo)]
        sources = [file.sources[i] for i in todo]
        summary = ModeSummary(mode)
        self.summaries.append(summary)
        completions: dict[int, Completion] = {}
        with _progress(f"{mode:>6}", len(requests), "request") as advance:

            def on_finish(completion: Completion) -> None:
                summary.requests += 1
                completions[completion.index] = completion
                text = self.tokenizer.decode(completion.token_ids)
                if writer is not None:
                    writer.write(result_record(requests[completion.index], sources[completion.index], completion, text, mode))
                advance()

            started = time.perf_counter()
            try:
                engine.generate(requests, on_finish)
            finally:
                summary.seconds = time.perf_counter() - started
                _take_stats(summary, engine.stats)
        if writer is None and mode == self.modes[0]:
            self._show(requests, sources, completions)
        if self.options.verify:
            self._verify(mode, engine, requests, completions)

    def _show(self, requests: Sequence[Request], sources: Sequence[Source], completions: dict[int, Completion]) -> None:
        for request, source in zip(requests, sources, strict=True):
            name = f"line {source.line}" + (f" ({source.id})" if source.id is not None else "")
            text = json.dumps(self.tokenizer.decode(completions[request.index].token_ids), ensure_ascii=False)
            print(f"{name}: {text if len(text) <= 100 else text[:97] + '...'}", file=self.out)

    def _verify(self, mode: str, engine: Any, requests: Sequence[Request], completions: dict[int, Completion]) -> None:
        plain = engine if mode == "plain" else self._plain_engine()

        def alone(served_by: Any) -> Callable[[Request], Completion]:
            def serve(request: Request) -> Completion:
                (completion,) = served_by.generate([replace(request, index=0)])
                assert isinstance(completion, Completion)
                return completion

            return serve

        if mode == "plain":
            self._plain = plain
        with _progress(f"verify {mode}", len(requests), "request") as advance:
            for request in requests:
                got = completions[request.index].token_ids
                if request.temperature == 0:
                    self.findings += verify_greedy(request, mode, got, plain_alone=self._remembered(alone(plain)), mode_alone=alone(engine), error_limit=self.error_limit)
                    self.checked["greedy"] += 1
                else:
                    self.findings += verify_sampled(request, mode, got, mode_alone=alone(engine))
                    self.checked["sampled"] += 1
                advance()

    def _plain_engine(self) -> Any:
        if self._plain is None:
            self._plain = make_engine(self.model, self._config("plain", record_logits=True))
        return self._plain

    def _remembered(self, serve: Callable[[Request], Completion]) -> Callable[[Request], Completion]:
        """Plain decode of a request alone is the same for every mode: kept for this run."""

        def remembering(request: Request) -> Completion:
            key = (request.prompt_ids, request.max_tokens)
            if key not in self._alone:
                self._alone[key] = serve(request)
            return self._alone[key]

        return remembering

    def _say_what_is_done(self, writer: ResultWriter | None) -> None:
        for summary in self.summaries:
            print(f"{summary.mode}: {summary.requests} of {len(self.file.requests)} requests finished", file=sys.stderr)
        if writer is not None and self.options.out != "-":
            print(f"{self.options.out}: holds the finished ones; the same command with --resume serves the rest", file=sys.stderr)

    def _conclude(self) -> int:
        if self.summaries:
            print(summary_table(self.summaries, padded=self.options.verify), file=self.out)
        different = [f for f in self.findings if not f.close]
        if self.options.verify:
            for finding in self.findings:
                print(finding, file=self.out)
            checked = ", ".join(f"{n} {kind}" for kind, n in sorted(self.checked.items()))
            close = len(self.findings) - len(different)
            verdict = f"{'FAILED' if different else 'passed'}: {checked} checked, {len(different)} different, {close} rows closer than their logit error"
            print(f"verify: {verdict if checked else 'nothing to check, all results were there already'}", file=self.out)
        if different:
            return CHECK_FAILED
        if self.file.problems:
            print(f"{len(self.file.problems)} of {len(self.file.problems) + len(self.file.requests)} requests were refused", file=sys.stderr)
            return REFUSED
        return DONE


def make_engine(model: Path, config: Any) -> Any:
    """An engine for a checkpoint folder. Problems of the folder's files are user errors."""
    from safetensors import SafetensorError

    from .engine import Engine

    try:
        return Engine(model, config)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{model}: cannot be loaded: {str(error).splitlines()[0]}") from None


def _take_stats(summary: ModeSummary, stats: Any) -> None:
    summary.tokens, summary.steps = stats.tokens, stats.steps
    summary.accepted = Counter(stats.accepted)
    summary.lanes, summary.workspace_bytes = stats.workspace_lanes, stats.workspace_bytes
    summary.kv_bytes, summary.preemptions = stats.kv_bytes, stats.preemptions


def _model_limits(model: Path) -> dict[str, int]:
    """Sizes of a checkpoint, from its config.json. Raises RequestError for a folder that is none."""
    config = _json(model / "config.json")
    limits = {}
    for name in ("vocab_size", "max_position_embeddings", "hidden_size"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(f"{model / 'config.json'}: {name} must be a positive integer, got {value!r}.")
        limits[name] = value
    return limits


def _draft_tokens(model: Path, mode: str) -> int:
    """Draft tokens a step when none are asked for: what a block drafter was made for, else 3."""
    own = model / mode / "config.json"
    config = _json(own if own.is_file() else model / "config.json")
    size = config.get("dspark_block_size") if mode in ("dspark", "dflash") else None
    return size if isinstance(size, int) and size >= 1 else 3


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror or error}. --model takes a checkpoint folder, as make-tiny writes.") from None
    except ValueError as error:
        raise RequestError(f"{path}: not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise RequestError(f"{path}: must hold a JSON object.")
    return value


def quiet_transformers() -> None:
    """No progress bars of transformers: they are no news for small models and clutter logs."""
    try:
        from transformers.utils import logging
    except ImportError:  # whoever needs it says so
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _progress(label: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; elsewhere a line when some seconds have passed since the last one."""
    if sys.stderr.isatty():
        from tqdm import tqdm  # type: ignore[import-untyped]

        with tqdm(total=total, desc=label, unit=unit, file=sys.stderr, leave=False) as bar:
            yield lambda: bar.update() and None
        return
    done, said = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, said
        done += 1
        if time.monotonic() - said >= QUIET_SECONDS:
            print(f"{label.strip()}: {done} of {total} {unit}s", file=sys.stderr, flush=True)
            said = time.monotonic()

    yield advance
