"""Topics one after the other, each a process with a time limit, whatever becomes of the others: ``python3 -m benchmarks.record [TOPIC[=SECONDS] ...]``.

``bash benchmarks/gpu.sh`` builds and calls it. A topic (``TOPICS``) gets SIGTERM when its time is over, whereupon it keeps what it has as ``<topic>-part.json``, and SIGKILL GRACE_S
later. Its limit is FACTOR times what it usually takes, or the SECONDS given. Topics that only check results run beside each other where they follow one another; topics that time
something always run alone, and what an earlier one left running is ended first.

Environment: LIMIT_S, seconds for all topics together: one that does not fit any more is left out, and named. <TOPIC>_ARGS, its arguments (``TESTS_ARGS=--gpu-only``). ARCHIVE, a
``.tgz`` of the results, replaced as a whole whenever a topic ends. Logs are ``logs/<topic>.log`` in the folder of the results, the summary ``logs/summary.txt``. A topic finds in TOPIC_SECONDS
how long it may take, when it can end early in good order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FACTOR, GRACE_S = 1.5, 20.0


@dataclass(frozen=True)
class Topic:
    """``arguments`` go to the interpreter."""

    arguments: tuple[str, ...]
    usual_s: float
    """On a machine with an H200 and 16 cores; beside others where it may be."""
    timing: bool = True
    gpus: int = 1
    peers: bool = False
    """Whether it is about nothing else."""
    env: Mapping[str, str] = field(default_factory=dict)


def _module(name: str) -> tuple[str, ...]:
    return "-m", f"benchmarks.{name}"


STORM = (*_module("tests"), "--record", "storm", "tests/test_topk_cuda.py", "-k", "drain_storm")
TOPICS = {
    "tests": Topic(_module("tests"), 260, timing=False),
    "sanitizer": Topic(_module("sanitizer"), 270, timing=False),
    "storm": Topic(STORM, 170, timing=False, env={"DSV4_OPS_STORM": "1000000"}),
    "topk": Topic(_module("topk"), 75),
    "kernels": Topic(_module("kernels"), 65),
    "attention": Topic(_module("attention"), 150),
    "engine": Topic(_module("engine"), 200),
    "bench": Topic(_module("bench"), 20),
    "lanes": Topic(_module("lanes"), 50),
    "conformance": Topic(_module("conformance"), 60, peers=True),
    "sampling": Topic(_module("sampling"), 25),
    "parallel": Topic(_module("parallel"), 45, gpus=2),
}


@dataclass
class Run:
    """A topic and what became of it."""

    name: str
    topic: Topic
    limit_s: float
    left_out: str = ""
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float = 0.0
    code: int | None = None
    asked_to_stop: float | None = None

    def over(self, folder: Path) -> str:
        """A line of the summary."""
        if self.left_out:
            return f"{self.name:12} {'-':>4} {'-':>7}    left out: {self.left_out}"
        wrote = [path.name for path in sorted(folder.glob(f"{self.name}*")) if path.is_file() and path.stat().st_mtime >= self.began]
        stopped = f" (stopped after {self.limit_s:.0f} s)" if self.asked_to_stop is not None else ""
        return f"{self.name:12} {self.code!s:>4} {self.seconds:7.1f} s  {', '.join(wrote) or 'no result'}{stopped}"


class Recorder:
    def __init__(self, folder: Path, limit_s: float, archive: Path | None) -> None:
        self.folder, self.archive, self.logs = folder, archive, folder / "logs"
        self.start = time.monotonic()
        self.end = self.start + limit_s
        self.runs: list[Run] = []
        self.marker = f"{os.getpid()}-{time.time_ns()}"
        self.logs.mkdir(parents=True, exist_ok=True)

    def phase(self, runs: Sequence[Run]) -> None:
        """Runs of topics that share the machine, to their end."""
        running: list[Run] = []
        try:
            for run in runs:
                self.runs.append(run)
                run.left_out = run.left_out or self._too_late(run)
                if not run.left_out:
                    running.append(run)
                    self._begin(run)
            while running:
                time.sleep(0.1)
                for run in list(running):
                    if self._ended(run):
                        running.remove(run)
                        self._keep(run)
        except BaseException:  # asked to stop itself: the topics in flight get their chance to keep what they have
            for run in running:
                run.limit_s = time.time() - run.began
            while running := [run for run in running if not self._ended(run)]:
                time.sleep(0.1)
            raise
        finally:
            self._sweep()

    def _too_late(self, run: Run) -> str:
        left = self.end - time.monotonic() - GRACE_S
        least, run.limit_s = min(run.topic.usual_s, run.limit_s), min(run.limit_s, left)
        return f"{max(left, 0):.0f} s are left, it takes {least:.0f}" if left < least else ""

    def _begin(self, run: Run) -> None:
        variable = f"{run.name.upper()}_ARGS"
        more = os.environ.get(variable, "")
        command = f"{variable}={shlex.quote(more)} " * bool(more) + f"bash benchmarks/gpu.sh {run.name}"
        marks = {
            "RECORD_MARKER": self.marker,
            "RECORD_COMMAND": command,
            "TOPIC_SECONDS": str(round(run.limit_s, 1)),
            "PYTHONUNBUFFERED": "1",
        }
        env = {**os.environ, "SANITIZER_LOGS": str(self.logs / "sanitizer"), **run.topic.env, **marks}
        run.began = time.time()
        with (self.logs / f"{run.name}.log").open("wb") as log:
            run.process = subprocess.Popen(
                [sys.executable, *run.topic.arguments, *shlex.split(more)],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        print(f"{self._now()}  {run.name} begins, limit {run.limit_s:.0f} s", flush=True)

    def _ended(self, run: Run) -> bool:
        """Whether the topic's process is gone; it is asked to go, and made to, when its time is over."""
        assert run.process is not None
        run.code, run.seconds = run.process.poll(), time.time() - run.began
        if run.code is None and run.seconds > run.limit_s:
            if run.asked_to_stop is None:
                run.asked_to_stop = run.seconds
                run.process.terminate()
            elif run.seconds > run.asked_to_stop + GRACE_S:
                run.process.kill()
        return run.code is not None

    def _keep(self, run: Run) -> None:
        print(f"{self._now()}  {run.over(self.folder)}", flush=True)
        self.write()

    def _now(self) -> str:
        return f"{time.monotonic() - self.start:6.1f} s"

    def _sweep(self) -> None:
        """Ends what topics left running, in whatever session: a kernel that hangs would disturb the next one's times."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"RECORD_MARKER={self.marker}".encode() in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def summary(self) -> str:
        return "\n".join(
            [
                f"{'topic':12} {'exit':>4} {'seconds':>7}",
                *(run.over(self.folder) for run in self.runs),
                f"wall time: {time.monotonic() - self.start:.0f} s",
            ]
        )

    def write(self) -> None:
        """The summary so far, and the archive with all that is there."""
        (self.logs / "summary.txt").write_text(self.summary() + "\n")
        if self.archive is not None:
            fresh = self.archive.with_name(self.archive.name + ".new")
            with tarfile.open(fresh, "w:gz") as tar:
                tar.add(self.folder, self.folder.name)
            fresh.replace(self.archive)


def phases(runs: Sequence[Run]) -> Iterator[list[Run]]:
    for timing, group in itertools.groupby(runs, lambda run: run.topic.timing):
        together = list(group)
        yield from [[run] for run in together] if timing else [together]


def asked(arguments: Sequence[str], gpus: int) -> list[Run]:
    """Raises LookupError for a topic that there is not, ValueError for seconds that are no number."""
    runs = []
    for argument in arguments or TOPICS:
        name, _, seconds = argument.partition("=")
        if name not in TOPICS:
            raise LookupError(f"there is no topic {name!r}; topics: {', '.join(TOPICS)}")
        topic = TOPICS[name]
        run = Run(name, topic, float(seconds) if seconds else FACTOR * topic.usual_s)
        if topic.peers and not os.environ.get("PEERS_DIR"):
            run.left_out = "PEERS_DIR is not set"
        elif gpus < topic.gpus > 1:
            run.left_out = f"it needs {topic.gpus} GPUs"
        runs.append(run)
    return runs


PROBE = "import torch; from benchmarks import results; print(torch.cuda.device_count(), results.folder())"


def probe() -> tuple[int, Path]:
    """GPUs, and the folder of the results; asked in a process of its own, so that this one holds no part of the GPU."""
    said = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    gpus, folder = said.splitlines()[-1].split(" ", 1)
    return int(gpus), Path(folder)


def main(arguments: Sequence[str]) -> int:
    try:
        gpus, folder = probe()
        runs = asked(arguments, gpus)
    except (LookupError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    archive = os.environ.get("ARCHIVE")
    recorder = Recorder(folder, float(os.environ.get("LIMIT_S", "inf")), Path(archive).resolve() if archive else None)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for together in phases(runs):
            recorder.phase(together)
    finally:
        recorder.write()
        print(recorder.summary(), flush=True)
    return 0 if all(run.code == 0 for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
