"""``benchmarks.record`` on toy topics: one that fails, hangs or leaves a process behind costs no other one; and ``benchmarks.tests`` when it is stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_tests, record, results

ROOT = Path(__file__).resolve().parents[1]
WRITES = "import os, pathlib; pathlib.Path(os.environ['FOLDER'], {!r}).write_text(os.environ['TOPIC_SECONDS'])"
GOOD = WRITES.format("good.json")
PART = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print('up', flush=True)\ntry: time.sleep(60)\nfinally: " + WRITES.format(
    "slow-part.json"
)
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True)); print('up', flush=True)\nwhile True: time.sleep(1)"


def topic(code: str, usual_s: float = 1.0, **more: Any) -> record.Topic:
    return record.Topic(("-c", code), usual_s, **more)


Recorded = Callable[..., tuple[int, str]]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Recorded:
    """``recorded(arguments, **topics)``: exit code and what was printed; results are in ``tmp_path / "gpu"``."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    monkeypatch.setattr(record, "probe", lambda: (1, folder))
    monkeypatch.setattr(record, "GRACE_S", 1.0)
    monkeypatch.setenv("FOLDER", str(folder))
    monkeypatch.setenv("ARCHIVE", str(tmp_path / "all.tgz"))
    monkeypatch.delenv("PEERS_DIR", raising=False)
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str, **topics: record.Topic) -> tuple[int, str]:
        monkeypatch.setattr(record, "TOPICS", topics)
        try:
            return record.main(arguments), capsys.readouterr().out
        finally:
            signal.signal(signal.SIGTERM, before)

    return run


def summary(said: str) -> dict[str, str]:
    lines = said[said.rindex("topic ") :].splitlines()[1:-1]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def test_a_topic_that_fails_or_hangs_costs_no_other_one(recorded: Recorded, tmp_path: Path) -> None:
    code, said = recorded(
        "bad",
        "slow=4",
        "stubborn=4",
        "good",
        bad=topic("print('why'); raise SystemExit(3)"),
        slow=topic(PART, 60),
        stubborn=topic(STUBBORN, 60),
        good=topic(GOOD),
    )
    lines = summary(said)
    assert code == 1 and list(lines) == ["bad", "slow", "stubborn", "good"], "in the order asked for"
    assert lines["bad"].startswith("3 ") and lines["bad"].endswith("no result")
    assert lines["slow"].startswith("143 ") and lines["slow"].endswith("slow-part.json (stopped after 4 s)")
    assert lines["stubborn"].startswith("-9 ") and lines["good"].endswith("good.json")
    assert (tmp_path / "gpu" / "logs" / "bad.log").read_text() == "why\n"
    assert (tmp_path / "gpu" / "logs" / "stubborn.log").read_text() == "up\nno\n", "asked first"
    assert (tmp_path / "gpu" / "good.json").read_text() == "1.5"
    with tarfile.open(tmp_path / "all.tgz") as tar:
        assert {"gpu/good.json", "gpu/slow-part.json", "gpu/logs/bad.log", "gpu/logs/summary.txt"} <= set(tar.getnames())


def test_the_archive_is_whole_after_every_topic(recorded: Recorded, tmp_path: Path) -> None:
    look = "import os, shutil; shutil.copy(os.environ['ARCHIVE'], os.path.join(os.environ['FOLDER'], '..', 'seen.tgz'))"
    code, _ = recorded(good=topic(GOOD), look=topic(look))
    assert code == 0
    with tarfile.open(tmp_path / "seen.tgz") as tar:
        assert "gpu/good.json" in tar.getnames() and "gpu/look.json" not in tar.getnames()
    assert not list(tmp_path.glob("*.new"))


def test_a_topic_that_does_not_fit_any_more_is_left_out_and_named(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMIT_S", "10")
    code, said = recorded(first=topic("import time; time.sleep(2)", 2), long=topic(GOOD, 8), short=topic(GOOD, 1))
    lines = summary(said)
    assert code == 1 and lines["first"].startswith("0 ") and lines["short"].startswith("0 ")
    assert "left out: " in lines["long"] and lines["long"].endswith("s are left, it takes 8")


def test_a_limit_is_cut_to_what_is_left(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMIT_S", "5")
    code, _ = recorded("good=100", good=topic(GOOD))
    assert code == 0 and 3 < float((tmp_path / "gpu" / "good.json").read_text()) <= 4


def test_topics_without_times_share_the_machine_and_others_are_alone(recorded: Recorded) -> None:
    meet = "import os, pathlib, time\nmine, other = (pathlib.Path(os.environ['FOLDER'], n) for n in {!r}); mine.touch()\nfor _ in range(100): time.sleep(0.1 * (not other.exists()))\nassert other.exists()"
    code, said = recorded(
        "a",
        "b",
        "alone",
        a=topic(meet.format(("a.json", "b.json")), 20, timing=False),
        b=topic(meet.format(("b.json", "a.json")), 20, timing=False),
        alone=topic(GOOD, 20),
    )
    assert code == 0, said
    assert said.index("alone begins") > max(said.index("a.json\n"), said.index("b.json\n"))


def test_what_a_topic_left_running_is_ended_before_the_next_one(recorded: Recorded, tmp_path: Path) -> None:
    leaves = "import os, subprocess, sys, pathlib; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True); pathlib.Path(os.environ['FOLDER'], 'left').write_text(str(p.pid))"
    code, _ = recorded(leaves=topic(leaves), good=topic(GOOD))
    assert code == 0
    left = Path("/proc", (tmp_path / "gpu" / "left").read_text(), "stat")
    assert not left.exists() or left.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_arguments_and_command_of_a_topic(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAYS_ARGS", "--parts 'a b'")
    code, _ = recorded(
        says=topic("import os, sys; print(sys.argv[1:], os.environ['RECORD_COMMAND'], os.environ['MORE'])", env={"MORE": "yes"})
    )
    assert code == 0
    assert (
        tmp_path / "gpu" / "logs" / "says.log"
    ).read_text() == """['--parts', 'a b'] SAYS_ARGS='--parts '"'"'a b'"'"'' bash benchmarks/gpu.sh says yes\n"""


def test_topics_that_cannot_run_here_are_named_and_unknown_ones_refused(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = recorded(peers=topic(GOOD, peers=True), two=topic(GOOD, gpus=2), good=topic(GOOD))
    assert code == 1 and summary(said)["peers"].endswith("PEERS_DIR is not set") and summary(said)["two"].endswith("it needs 2 GPUs")
    assert recorded("goood", good=topic(GOOD))[0] == 2 and recorded("good=soon", good=topic(GOOD))[0] == 2


def test_a_recorder_that_is_stopped_keeps_what_its_topic_has(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
from benchmarks import record
record.TOPICS = {{"slow": record.Topic(("-c", {PART!r}), 60), "never": record.Topic(("-c", "print()"), 1)}}
record.probe = lambda: (1, pathlib.Path({str(tmp_path)!r}))
sys.exit(record.main([]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "FOLDER": str(tmp_path)}
    )
    assert process.stdout is not None
    assert "slow begins" in process.stdout.readline()
    while "up" not in (tmp_path / "logs" / "slow.log").read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and "slow-part.json" in summary(said)["slow"] and "never" not in summary(said)


def test_every_topic_is_a_module_and_usual_times_fit_a_lease() -> None:
    for name, each in record.TOPICS.items():
        assert each.arguments[0] == "-m" and (ROOT / f"{each.arguments[1].replace('.', '/')}.py").is_file(), name
        assert record.FACTOR * each.usual_s + record.GRACE_S < 600, f"{name}: one command of a lease holds it"
    assert [each.timing for each in record.TOPICS.values()] == sorted(each.timing for each in record.TOPICS.values()), (
        "what can run together stands together"
    )


# ---- benchmarks.tests ------------------------------------------------------------------------------------------------

SUITE = """
import os, pathlib, time
import pytest

hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""

@pytest.mark.parametrize("i", range(3))
def test_anywhere(i): pass

@pytest.mark.skipif(hidden, reason="no CUDA device")
@pytest.mark.parametrize("i", range(2))
def test_gpu(i): pass

@pytest.mark.parametrize("device", ["cpu"] if hidden else ["cpu", "cuda"])
def test_device(device): pass

@pytest.mark.skipif(hidden, reason="no CUDA device")
def test_skips(): pytest.skip("20 GiB are needed")

@pytest.mark.skipif(hidden, reason="no CUDA device")
def test_slow():
    pathlib.Path(os.environ["RESULTS_DIR"], "slow").touch()
    time.sleep(float(os.environ.get("SLOW", "0")))
    assert "FAIL" not in os.environ

@pytest.mark.skipif(hidden, reason="no CUDA device")
def test_zz(): pass
"""


def suite(tmp_path: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    (tmp_path / "test_toys.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    known = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CUDA_VISIBLE_DEVICES", "RECORD_COMMAND", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
    }
    whole = {**known, "PYTHONPATH": str(ROOT), "RESULTS_DIR": str(tmp_path), "COMMIT": "abc", **env}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.tests", *arguments, str(tmp_path / "test_toys.py")],
        cwd=tmp_path,
        env=whole,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def written(tmp_path: Path, name: str) -> dict[str, Any]:
    (path,) = tmp_path.glob(f"*/{name}.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


SERIAL = ("-n0",) if importlib.util.find_spec("xdist") else ()
needs_xdist = pytest.mark.skipif(not SERIAL, reason="pytest-xdist is not installed")


@pytest.mark.parametrize("workers", [pytest.param(SERIAL, id="one process"), pytest.param(("-n2",), id="two workers", marks=needs_xdist)])
def test_gpu_only_leaves_out_what_runs_without_one(tmp_path: Path, workers: tuple[str, ...]) -> None:
    process = suite(tmp_path, "--gpu-only", *workers, FAIL="1")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 1, said
    facts = written(tmp_path, "tests")
    assert facts["counts"] == {"passed": 4, "failed": 1, "skipped": 1, "collected": 6, "not_run": 0} and facts["need_a_gpu"] == 6
    assert facts["passed"] == {"test_toys.py": {"test_device": 1, "test_gpu": 2, "test_zz": 1}} and facts["failures"] == [
        "test_toys.py::test_slow"
    ]
    assert list(facts["skips"]) == ["Skipped: 20 GiB are needed"] and "--gpu-only" in facts["command"]


def test_a_stopped_run_says_what_passed_and_what_it_did_not_come_to(tmp_path: Path) -> None:
    process = suite(tmp_path, *SERIAL, SLOW="60")
    while not (tmp_path / "slow").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.terminate()
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 2, said
    facts = written(tmp_path, "tests-part")
    assert not list(tmp_path.glob("*/tests.json"))
    assert facts["passed"] == {"test_toys.py": {"test_anywhere": 3, "test_device": 2, "test_gpu": 2}}
    assert (
        facts["counts"]["not_run"] == 2
        and facts["not_run"] == ["test_toys.py::test_slow", "test_toys.py::test_zz"]
        and facts["need_a_gpu"] == 4
    )


def test_another_name_for_a_part_of_the_suite(tmp_path: Path) -> None:
    process = suite(tmp_path, "--record", "storm", "-k", "test_gpu", RECORD_COMMAND="bash benchmarks/gpu.sh storm")
    said = process.communicate(timeout=60)[0]
    facts = written(tmp_path, "storm")
    assert process.returncode == 0 and facts["counts"]["passed"] == 2 and facts["command"] == "bash benchmarks/gpu.sh storm", said


def test_a_module_that_cannot_be_collected_without_a_gpu_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name")
    (tmp_path / "test_whole.py").write_text("def test_it(): pass")
    assert [name.rpartition("::")[2] for name in gpu_tests.run_without_gpu([str(tmp_path)])] == ["test_it"]
    with pytest.raises(RuntimeError, match="no_such_file"):
        gpu_tests.run_without_gpu([str(tmp_path / "no_such_file.py")])


def test_a_whole_result_takes_the_place_of_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESULTS_DIR", str(tmp_path))
    monkeypatch.delenv("RECORD_COMMAND", raising=False)
    part = results.write("toy-part", quiet=True)
    assert json.loads(part.read_text())["command"] == "bash benchmarks/gpu.sh toy"
    whole = results.write("toy", quiet=True)
    assert whole.exists() and not part.exists()


@needs_xdist
def test_a_worker_whose_context_is_broken_is_replaced_and_the_others_tests_run(tmp_path: Path) -> None:
    """A toy of a context: once a test has broken it, every synchronization of that process fails."""
    (tmp_path / "conftest.py").write_text("import torch\nbroken = []\ntorch.cuda.is_initialized = lambda: True\ndef synchronize():\n    if broken: raise RuntimeError('CUDA error')\ntorch.cuda.synchronize = synchronize\n")
    (tmp_path / "test_broken.py").write_text("import conftest, torch\ndef test_breaks():\n    conftest.broken.append(1)\n    assert 0\n" + "".join(f"def test_{i}(): torch.cuda.synchronize()\n" for i in range(6)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RESULTS_DIR": str(tmp_path), "COMMIT": "abc"}
    done = subprocess.run([sys.executable, "-m", "benchmarks.tests", "-n", "1", str(tmp_path / "test_broken.py")], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    facts = written(tmp_path, "tests")
    assert facts["failures"] == ["test_broken.py::test_breaks"] and facts["passed"] == {"test_broken.py": {f"test_{i}": 1 for i in range(6)}}, done.stdout


def test_a_run_that_hangs_has_left_what_it_had(tmp_path: Path) -> None:
    """The main thread is inside a call that no signal interrupts; then the process is killed."""
    code = "import ctypes\nfrom benchmarks import results\nresults.KEPT_EVERY_S = 0.2\nrows = [{'a': 1}]\nwith results.measuring('toy', None, lambda name: results.write(name, rows=rows)):\n    print('in', flush=True)\n    ctypes.CDLL(None).sleep(60)\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RESULTS_DIR": str(tmp_path), "COMMIT": "abc"}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in\n"
    for _ in range(300):
        if list(tmp_path.glob("*/toy-part.json")):
            break
        time.sleep(0.1)
    process.kill()
    process.communicate()
    assert written(tmp_path, "toy-part")["rows"] == [{"a": 1}] and not list(tmp_path.glob("*/toy.json"))
