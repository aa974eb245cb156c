"""Where results go, what stands at their head (machine, versions, commit, command), and which cases were asked for."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsv4_ops.bench.machine import commit, environment, gpu_name, text

ROOT = Path(__file__).resolve().parent.parent
KEPT_EVERY_S = 20.0


def folder() -> Path:
    """``benchmarks/results/<gpu>``, the GPU's name shortened: ``NVIDIA H200`` is ``h200``."""
    short = re.sub(r"[^a-z0-9]+", "-", gpu_name().lower().replace("nvidia", "")).strip("-")
    path = Path(os.environ.get("RESULTS_DIR", ROOT / "benchmarks" / "results")) / short
    path.mkdir(parents=True, exist_ok=True)
    return path


def chosen_by(variable: str) -> Callable[[object], bool]:
    """Whether a value is among the comma-separated ones of an environment variable; all are when it is not set."""
    allowed = {part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()}
    return lambda value: not allowed or str(value) in allowed


def newest(kept: Path, topic: str) -> Path:
    """The file in the folder ``kept`` that has the newest run of a topic: a part, until a whole run takes its place."""
    part = kept / f"{topic}-part.json"
    return part if part.exists() else kept / f"{topic}.json"


def allowed_s(otherwise: float) -> float:
    """Seconds after which a topic should begin nothing new: four fifths of what ``benchmarks.record`` lets it take, so that it ends by itself; ``otherwise`` by hand."""
    return 0.8 * float(os.environ["TOPIC_SECONDS"]) if "TOPIC_SECONDS" in os.environ else otherwise


@contextlib.contextmanager
def measuring(topic: str, narrowed: object, record: Callable[[str], object]) -> Iterator[None]:
    """A block that measures; ``record(name)`` keeps what it has, however the block ends (SIGTERM, which ``timeout`` sends, included).

    The name is the topic's, with ``-part`` behind it when the run was ``narrowed`` or did not come to its end. A part is also kept every KEPT_EVERY_S
    seconds, by a thread: a kernel that hangs, or takes the process down, leaves what was measured before it.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    finished, over = False, threading.Event()

    def keep() -> None:
        while not over.wait(KEPT_EVERY_S):
            with contextlib.suppress(Exception):  # a row may be changing just now; the next time is soon
                record(f"{topic}-part")

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
        finished = True
    finally:
        over.set()
        keeper.join()
        signal.signal(signal.SIGTERM, before)
        record(topic if finished and not narrowed else f"{topic}-part")


@functools.cache
def _asked(named: str | None) -> tuple[str, dict[str, Any]]:
    """Commit and machine. Once a process: the programs that are asked would disturb what is measured."""
    return commit(), environment()


def write(topic: str, env: dict[str, Any] | None = None, quiet: bool = False, **content: Any) -> Path:
    """Write ``<folder>/<topic>.json``; ``env`` is added to what is known of the machine. A whole result takes the place of a part."""
    path, whole = folder() / f"{topic}.json", topic.removesuffix("-part")
    command = os.environ.get("RECORD_COMMAND") or f"bash benchmarks/gpu.sh {whole}"
    made_of, known = _asked(os.environ.get("COMMIT"))
    head = {"topic": topic, "command": command, "commit": made_of, "date": datetime.date.today().isoformat(), "env": known | (env or {})}
    fresh = path.with_suffix(".new")
    fresh.write_text(text({**head, **content}))
    fresh.replace(path)
    if topic == whole:
        path.with_name(f"{topic}-part.json").unlink(missing_ok=True)
    if not quiet and threading.current_thread() is threading.main_thread():
        print(f"wrote {path}")
        if head["commit"] == "unknown":
            print("the commit is not recorded: set COMMIT where the checkout has no history")
    return path
