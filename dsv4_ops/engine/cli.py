"""The ``run`` and ``make-tiny`` commands: their options, signals and errors. What ``run`` does is in runner.py."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import Dsv4OpsError, RequestError
from .runner import DONE, MAX_MODEL_LEN, MODES, NOTHING_DONE, VERIFY_TOKENS, Interrupted, Run, quiet_transformers

__all__ = ["add_commands", "main"]

KV_DTYPES = ("float32", "bfloat16", "fp8")
TINY_SIZES = ("tiny", "flash")


def add_commands(commands: Any, exit_codes: str) -> None:
    run = commands.add_parser(
        "run",
        help="serve requests from a file",
        description=(
            "Serve the requests of a JSONL file: one object a line with prompt, and optionally max_tokens,\n"
            "temperature, seed and id. A bad line is reported and the others are served.\n\n"
            "Without --model, a small trained checkpoint is served, which comes with this package:\n"
            "it continues Python's documentation strings."
        ),
        epilog=exit_codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("requests", metavar="REQUESTS.jsonl", type=Path)
    run.add_argument("--model", metavar="DIR", type=Path, help="checkpoint folder with its drafters (default: the small one of this package)")
    run.add_argument("--mode", choices=(*MODES, "all"), default="plain", help="how to decode (default: plain)")
    run.add_argument(
        "--verify",
        action="store_true",
        help="check that greedy tokens are those of plain decode of each request alone, and that sampled tokens do not depend on the batch; "
        "pads every step to one size, so that its tokens/s are not those of serving",
    )
    run.add_argument("--compile", action="store_true", help="torch.compile the model and the drafter")
    run.add_argument("--fused", action="store_true", help="target, sampling and drafter as one step: one program with --compile, one CUDA graph on a GPU")
    run.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda when there is one)")
    run.add_argument("--threads", metavar="N", type=_positive, help="CPU threads (default: 1 for models with a hidden size below 1024, else PyTorch's choice)")
    run.add_argument("--out", metavar="FILE", help="results, one JSON object a finished request; - for standard output")
    existing = run.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="keep the results that FILE has, serve what is missing")
    existing.add_argument("--overwrite", action="store_true", help="replace FILE")
    run.add_argument("--max-tokens", metavar="N", type=_positive, help="no request gets more tokens than this")
    run.add_argument("--kv-dtype", choices=KV_DTYPES, default="float32", help="KV cache (default: float32)")
    run.add_argument("--max-seqs", metavar="N", type=_positive, default=8, help="requests decoded together (default: 8)")
    run.add_argument("--max-batched-tokens", metavar="N", type=_positive, help=f"tokens a step (default: 256; with --verify {VERIFY_TOKENS})")
    run.add_argument("--max-model-len", metavar="N", type=_positive, help=f"longest prompt and answer together (default: what the requests need, at most {MAX_MODEL_LEN})")
    run.add_argument("--draft-tokens", metavar="N", type=_positive, help="draft tokens a step (default: 3 for mtp, what a block drafter was made for)")

    tiny = commands.add_parser("make-tiny", help="write a small checkpoint with drafters", description="Write a small checkpoint with its drafters, in the published format.")
    tiny.add_argument("directory", metavar="DIR", type=Path)
    tiny.add_argument("--seed", type=_seed, default=0, help="the same seed gives the same bytes (default: 0)")
    tiny.add_argument("--size", choices=TINY_SIZES, default="tiny", help="flash: the attention of DeepSeek-V4-Flash on four layers, 3 GB (default: tiny)")
    tiny.add_argument("--device", default="cpu", help="where the weights are drawn: cpu, cuda or cuda:N (default: cpu)")
    tiny.add_argument("--measure", action="store_true", help="also count how many draft tokens are accepted")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    if value >= 2**31:
        raise argparse.ArgumentTypeError(f"must be below 2147483648, got {value}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must fit into 64 bits, got {value}")
    return value


def main(options: argparse.Namespace) -> int:
    try:
        with _signals():
            return _make_tiny(options) if options.command == "make-tiny" else Run(options).run()
    except Dsv4OpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOTHING_DONE
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] not in ("transformers", "safetensors", "tqdm", "numpy"):
            raise
        print(f"error: the engine needs {error.name.split('.')[0]}, which is not installed. Do: pip install 'dsv4_ops[engine]'", file=sys.stderr)
        return NOTHING_DONE
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        print("error: there is not enough memory for this. Lower --max-seqs, --max-batched-tokens, --max-model-len or --draft-tokens.", file=sys.stderr)
        return NOTHING_DONE
    except Interrupted as stopped:
        print(f"interrupted by {signal.Signals(stopped.number).name}", file=sys.stderr)
        return 128 + stopped.number


def _out_of_memory(error: BaseException) -> bool:
    """PyTorch has a class of its own for devices alone; its CPU allocator raises RuntimeError."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error) or "not enough memory" in str(error)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into :class:`Interrupted`, wherever the main thread is."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop)
    except ValueError:  # not the main thread, which alone may set handlers
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make_tiny(options: argparse.Namespace) -> int:
    quiet_transformers()
    from .tiny import make_tiny

    folder = options.directory
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise RequestError(f"{folder}: holds other files and no checkpoint. Name a folder that is empty, absent, or has a checkpoint to replace.")
    try:
        report = make_tiny(options.directory, options.seed, options.size, measure=options.measure, device=options.device)
    except OSError as error:
        raise RequestError(f"{options.directory}: cannot be written: {error.strerror or error}.") from None
    print(f"{report.path}: {report.size} checkpoint of seed {report.seed}, {report.parameters:,} parameters, {report.seconds:.1f} s")
    if report.acceptance:
        print(report.histogram())
    return DONE
