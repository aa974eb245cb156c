"""The run and make-tiny commands, with an engine whose tokens and faults are known."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_ops.__main__ import main
from dsv4_ops.engine import runner
from dsv4_ops.engine.requests import Completion, Request
from dsv4_ops.engine.verify import ERROR_LIMITS, verify_greedy, verify_sampled
from dsv4_ops.errors import UnsupportedError

VOCAB = 320


def logits_row(prefix: tuple[int, ...], request: Request) -> torch.Tensor:
    """A made-up language model: its row depends on the whole prefix, and for sampled requests on the seed."""
    key = repr((prefix, request.seed if request.temperature else None)).encode()
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:7], "big"))
    row = torch.full((VOCAB,), -8.0)
    row[97:123] = torch.randn(26, generator=generator)
    return row


@dataclass
class FakeEngine:
    """Serves all requests at once. ``fault(engine, request, position, row)`` may change a row of a request."""

    config: Any
    fault: Callable[..., torch.Tensor] | None = None
    after: Callable[[Completion], None] | None = None
    stats: Any = field(default_factory=lambda: SimpleNamespace(tokens=0, steps=0, accepted=Counter(), workspace_lanes=1, workspace_bytes=0, kv_bytes=2048, preemptions=0))
    batch: int = 0

    def generate(self, requests: list[Request], on_finish: Callable[[Completion], None] | None = None) -> list[Completion]:
        self.batch = len(requests)
        assert [r.index for r in requests] == list(range(self.batch))
        return [self.one(r, on_finish) for r in sorted(requests, key=lambda r: r.max_tokens)]

    def one(self, request: Request, on_finish: Callable[[Completion], None] | None) -> Completion:
        done, each = Completion(request.index), 1 if self.config.mode == "plain" else 2
        while len(done.token_ids) < request.max_tokens:
            row = logits_row((*request.prompt_ids, *done.token_ids), request)
            if self.fault is not None:
                row = self.fault(self, request, len(done.token_ids), row)
            done.token_ids.append(int(row.argmax()))
            done.logits += [row] if self.config.record_logits else []
        done.accepted_lengths = [each] * (request.max_tokens // each)
        done.steps, done.finish_reason = len(done.accepted_lengths), "length"
        self.stats.tokens += request.max_tokens
        self.stats.steps += done.steps
        self.stats.accepted.update(done.accepted_lengths)
        if on_finish is not None:
            on_finish(done)
        if self.after is not None:
            self.after(done)
        return done


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 256, "hidden_size": 64, "dspark_block_size": 5}))
    return path


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Set ``fault`` or ``after`` for the engines that the command makes; ``made`` lists them."""
    setting: dict[str, Any] = {"fault": None, "after": None, "made": []}

    def make(model: Path, config: Any) -> FakeEngine:
        setting["made"].append(FakeEngine(config, setting["fault"], setting["after"]))
        return setting["made"][-1]

    monkeypatch.setattr(runner, "make_engine", make)
    return setting


REQUESTS = [
    {"prompt": "one", "max_tokens": 8, "id": "a"},
    {"prompt": "two", "max_tokens": 4, "temperature": 0.5, "seed": 3},
    {"prompt": "three", "max_tokens": 6},
]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in REQUESTS))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Running.


def test_serves_and_writes_results_as_they_finish(model: Path, requests: Path, engines: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    sizes: list[int] = []
    engines["after"] = lambda completion: sizes.append(len(results(out)))
    assert main(["run", str(requests), "--model", str(model), "--out", str(out)]) == 0
    assert sizes == [1, 2, 3], "each result is in the file before the next request finishes"
    records = {r["line"]: r for r in results(out)}
    assert [records[i]["finish_reason"] for i in (1, 2, 3)] == ["length"] * 3 and records[1]["id"] == "a"
    assert [len(records[i]["token_ids"]) for i in (1, 2, 3)] == [8, 4, 6]
    assert all(r["text"] == bytes(r["token_ids"]).decode() and r["mode"] == "plain" and sum(r["accepted_lengths"]) == len(r["token_ids"]) for r in records.values())
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:4] == ["mode", "requests", "tokens", "seconds"] and table[1].split()[:3] == ["plain", "3", "18"]
    assert "1:18" in table[1] and "2.0 KiB" in table[1]


def test_without_a_file_the_texts_are_shown(model: Path, requests: Path, engines: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(requests), "--model", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["line 1 (a)", "line 2", "line 3"]


def test_results_on_standard_output_are_nothing_but_results(model: Path, requests: Path, engines: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(requests), "--model", str(model), "--out", "-", "--mode", "all", "--verify"]) == 0
    captured = capfd.readouterr()
    assert len([json.loads(line) for line in captured.out.splitlines()]) == 12
    assert "tokens/s" in captured.err and "verify: passed" in captured.err


def test_options_reach_the_engine(model: Path, requests: Path, engines: dict[str, Any]) -> None:
    (model / "dflash").mkdir()
    (model / "dflash" / "config.json").write_text(json.dumps({"dspark_block_size": 7}))
    arguments = ["run", str(requests), "--model", str(model), "--mode", "all", "--kv-dtype", "fp8", "--max-seqs", "4", "--compile", "--fused", "--device", "cpu", "--max-tokens", "2"]
    assert main(arguments) == 0
    configs = [e.config for e in engines["made"]]
    assert [c.mode for c in configs] == ["plain", "mtp", "dspark", "dflash"]
    assert [c.tokens_per_decode for c in configs] == [1, 1 + 3, 1 + 5, 1 + 7]
    assert all(c.kv_dtype == "fp8" and c.max_num_seqs == 4 and c.compile and c.fused and c.device == "cpu" and c.max_num_batched_tokens == 256 and c.capture_sizes is None for c in configs)
    assert all(c.max_model_len == 256 and not c.record_logits for c in configs)
    assert [e.stats.tokens for e in engines["made"]] == [6] * 4
    engines["made"].clear()
    assert main([*arguments, "--draft-tokens", "2", "--verify", "--max-model-len", "99", "--max-seqs", "40"]) == 0
    configs = [e.config for e in engines["made"]]
    assert {c.tokens_per_decode for c in configs} == {1, 3} and {c.max_num_batched_tokens for c in configs} == {120}
    assert all(c.capture_sizes == (c.max_num_batched_tokens,) and c.record_logits and c.max_model_len == 99 for c in configs)


@pytest.mark.parametrize(("hidden_size", "arguments", "threads"), [(64, [], 1), (1024, [], 2), (64, ["--threads", "2"], 2), (4096, ["--threads", "1"], 1)])
def test_threads(hidden_size: int, arguments: list[str], threads: int, model: Path, requests: Path, engines: dict[str, Any]) -> None:
    config = json.loads((model / "config.json").read_text()) | {"hidden_size": hidden_size}
    (model / "config.json").write_text(json.dumps(config))
    seen: list[int] = []
    engines["after"] = lambda completion: seen.append(torch.get_num_threads())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main(["run", str(requests), "--model", str(model), "--device", "cpu", *arguments]) == 0
        assert set(seen) == {threads} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_summary_shows_what_was_accepted() -> None:
    table = runner.summary_table([runner.ModeSummary("mtp", 3, 30, 2.0, 12, Counter({1: 4, 3: 2, 4: 5}), 2, 3 * 2**20, 5 * 2**30, 1)])
    cells = table.splitlines()[1].split()
    assert cells[:7] == ["mtp", "3", "30", "2.00", "15.0", "12", f"{30 / 11:.2f}"]
    assert cells[7:10] == ["1:4", "3:2", "4:5"] and cells[10:] == ["2", "3.0", "MiB", "5.0", "GiB", "1"]


# Exit codes and errors.


def test_bad_requests_are_reported_and_the_rest_is_served(model: Path, requests: Path, engines: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests.write_text('{"prompt": ""}\n' + requests.read_text() + "oops\n" + json.dumps({"prompt": "x" * 300}))
    out = tmp_path / "out.jsonl"
    assert main(["run", str(requests), "--model", str(model), "--out", str(out)]) == 3
    err = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in err[:3]] == [f"{requests}:1", f"{requests}:5", f"{requests}:6"]
    assert "model's length of 256" in err[2] and err[3] == "3 of 6 requests were refused"
    assert sorted(r["line"] for r in results(out)) == [2, 3, 4]


def test_failed_check_outranks_a_bad_request(model: Path, requests: Path, engines: dict[str, Any]) -> None:
    requests.write_text(requests.read_text() + "oops\n")
    assert main(["run", str(requests), "--model", str(model), "--verify"]) == 3
    engines["fault"] = lambda engine, request, position, row: row.roll(1) if engine.batch > 1 and position == 2 else row
    assert main(["run", str(requests), "--model", str(model), "--verify"]) == 1


def _with_file(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder)


def _empty_file(folder: Path) -> str:
    (folder / "empty.jsonl").write_text("\n")
    return str(folder / "empty.jsonl")


USER_ERRORS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no request file": (lambda p: [str(p / "absent.jsonl")], "no such file of requests"),
    "folder for a request file": (lambda p: [str(p)], "is a folder, not a file of requests"),
    "empty request file": (lambda p: [_empty_file(p), "--model", str(p / "model")], "holds no requests"),
    "no model": (lambda p: [str(p / "requests.jsonl"), "--model", str(p / "absent")], "--model takes a checkpoint folder"),
    "results without a folder": (lambda p: [str(p / "requests.jsonl"), "--model", str(p / "model"), "--out", str(p / "absent" / "o")], "cannot be written there"),
    "existing results": (lambda p: [str(p / "requests.jsonl"), "--model", str(p / "model"), "--out", str(p / "model" / "config.json")], "exists already"),
    "requests overwritten": (lambda p: [str(p / "requests.jsonl"), "--model", str(p / "model"), "--out", str(p / "model" / ".." / "requests.jsonl"), "--overwrite"], "is the file of requests"),
    "resume without results": (lambda p: [str(p / "requests.jsonl"), "--model", str(p / "model"), "--resume"], "need --out FILE"),
    "unknown device": (lambda p: [str(p / "requests.jsonl"), "--model", str(p / "model"), "--device", "abacus"], "--device abacus: torch"),
    "device without memory": (lambda p: [str(p / "requests.jsonl"), "--model", str(p / "model"), "--device", "meta"], "--device meta: torch"),
    "broken tokenizer": (lambda p: [str(p / "requests.jsonl"), "--model", _with_file(p / "model", "tokenizer.json", "{")], "tokenizer.json: cannot be loaded"),
}


@pytest.mark.parametrize("label", USER_ERRORS)
def test_user_errors_are_one_line(label: str, model: Path, requests: Path, engines: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = USER_ERRORS[label]
    assert main(["run", *arguments(tmp_path)]) == 4
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1 and words in captured.err
    assert len(requests.read_text().splitlines()) == 3 and not engines["made"]


@pytest.mark.parametrize("config", ["{", "[]", '{"vocab_size": 0, "max_position_embeddings": 9}', '{"vocab_size": 320}'])
def test_broken_model_config(config: str, model: Path, requests: Path, engines: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.json").write_text(config)
    assert main(["run", str(requests), "--model", str(model)]) == 4
    assert str(model / "config.json") in capsys.readouterr().err


def test_folder_without_weights_is_a_user_error(model: Path, requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (model / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": VOCAB, "max_position_embeddings": 256, "hidden_size": 64}))
    assert main(["run", str(requests), "--model", str(model), "--device", "cpu"]) == 4
    assert f"error: {model}: cannot be loaded" in capsys.readouterr().err


def test_model_that_does_not_fit_is_a_user_error(model: Path, requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(model: Path, config: Any) -> Any:
        raise UnsupportedError("model", ["heads: needs 64", "layers: needs 4"])

    monkeypatch.setattr(runner, "make_engine", refuse)
    assert main(["run", str(requests), "--model", str(model)]) == 4
    assert "heads: needs 64" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes")])
def test_sizes_past_the_memory_are_a_user_error(error: Exception, model: Path, requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(model: Path, config: Any) -> Any:
        raise error

    monkeypatch.setattr(runner, "make_engine", refuse)
    assert main(["run", str(requests), "--model", str(model)]) == 4
    assert "error: there is not enough memory" in capsys.readouterr().err
    error = RuntimeError("an error of ours")
    with pytest.raises(RuntimeError, match="of ours"):
        main(["run", str(requests), "--model", str(model)])


def test_no_request_left(model: Path, requests: Path, engines: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    requests.write_text("\n{}\n")
    assert main(["run", str(requests), "--model", str(model)]) == 4
    err = capsys.readouterr().err
    assert "prompt is missing" in err and "no request in it can be served" in err


@pytest.mark.parametrize("library", ["transformers", "safetensors"])
def test_missing_library_says_what_to_install(library: str, model: Path, requests: Path) -> None:
    script = f"import sys; sys.modules[{library!r}] = None; from dsv4_ops.__main__ import main; sys.exit(main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script, "run", str(requests), "--model", str(model)], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 4 and "pip install 'dsv4_ops[engine]'" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--max-tokens", "0"], ["--max-seqs", "-1"], ["--mode", "eager"], ["--kv-dtype", "int4"], ["--draft-tokens", "x"], ["--max-tokens", "1e3"], ["--threads", "99999999999"], ["--resume", "--overwrite"]])
def test_wrong_options(arguments: list[str], requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", str(requests), *arguments])
    assert caught.value.code == 2
    capsys.readouterr()


# Interruption.

DRIVER = """
    import sys, threading
    sys.path.insert(0, {tests!r})
    from test_cli import FakeEngine
    from dsv4_ops.engine import runner
    from dsv4_ops.__main__ import main
    def after(completion):
        if len(open({out!r}).readlines()) == {stop_after}:
            print("waiting", flush=True)
            threading.Event().wait(60)
    runner.make_engine = lambda model, config: FakeEngine(config, after=after)
    sys.exit(main(["run", {requests!r}, "--model", {model!r}, "--mode", "all", "--out", {out!r}, *sys.argv[1:]]))
"""


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_keeps_what_is_finished_and_can_be_resumed(number: int, code: int, model: Path, requests: Path, engines: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    script = textwrap.dedent(DRIVER).format(tests=str(Path(__file__).parent), out=str(out), requests=str(requests), model=str(model), stop_after=5)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err and "mtp: 2 of 3 requests finished" in err and "--resume serves the rest" in err
    before = out.read_bytes()
    assert [(r["mode"], r["line"]) for r in results(out)] == [("plain", 2), ("plain", 3), ("plain", 1), ("mtp", 2), ("mtp", 3)]

    assert main(["run", str(requests), "--model", str(model), "--mode", "all", "--out", str(out), "--resume"]) == 0
    assert out.read_bytes().startswith(before)
    assert Counter((r["mode"], r["line"]) for r in results(out)) == Counter((m, i) for m in runner.MODES for i in (1, 2, 3))
    assert "plain: 3 of 3 results are there already" in capsys.readouterr().err
    assert [e.config.mode for e in engines["made"]] == ["mtp", "dspark", "dflash"]
    whole = out.read_bytes()
    capsys.readouterr()
    assert main(["run", str(requests), "--model", str(model), "--mode", "all", "--out", str(out), "--resume", "--verify"]) == 0
    assert out.read_bytes() == whole and "verify: nothing to check" in capsys.readouterr().out
    engines["made"].clear()

    requests.write_text(requests.read_text().replace('"one"', '"another"'))
    assert main(["run", str(requests), "--model", str(model), "--mode", "all", "--out", str(out), "--resume"]) == 4
    assert "the request file has changed" in capsys.readouterr().err and not engines["made"]


# Verify.


def served(mode: str = "mtp", fault: Any = None) -> Any:
    engine = FakeEngine(SimpleNamespace(mode=mode, record_logits=True), fault)

    def serve(request: Request) -> Completion:
        return engine.generate([replace(request, index=0)])[0]

    return serve


GREEDY = Request(0, (256, 65, 66), max_tokens=12)
LIMIT = ERROR_LIMITS["float32"]


def tokens(request: Request, fault: Any = None) -> list[int]:
    ids: list[int] = served(fault=fault)(request).token_ids
    return ids


def near_tie(at: int, gap: float) -> Any:
    """Make the second best token of one row ``gap`` worse than the best."""

    def fault(engine: Any, request: Request, position: int, row: torch.Tensor) -> torch.Tensor:
        place = len(request.prompt_ids) - len(GREEDY.prompt_ids) + position
        if place == at:
            row = row.clone()
            order = row.argsort(descending=True)
            row[order[1]] = row[order[0]] - gap
        return row

    return fault


def rounded(at: int, by: float, inner: Any) -> Any:
    """As ``inner``, with the best token of one row worse by ``by``: another rounding of the same row."""

    def fault(engine: Any, request: Request, position: int, row: torch.Tensor) -> torch.Tensor:
        row = inner(engine, request, position, row)
        place = len(request.prompt_ids) - len(GREEDY.prompt_ids) + position
        if place == at:
            row = row.clone()
            row[row.argmax()] -= by
        return row

    return fault


def check(got: list[int], plain_fault: Any = None, mode_fault: Any = None, limit: float = LIMIT) -> list[Any]:
    return verify_greedy(GREEDY, "mtp", got, plain_alone=served("plain", plain_fault), mode_alone=served("mtp", mode_fault), error_limit=limit)


def test_equal_tokens_pass() -> None:
    assert check(tokens(GREEDY)) == []


def test_any_wrong_token_is_found() -> None:
    right = tokens(GREEDY)
    for position in range(len(right)):
        wrong = [*right]
        wrong[position] = 97 + (wrong[position] - 96) % 26
        (finding,) = check(wrong)
        assert not finding.close and finding.position == position and (finding.expected, finding.got) == (right[position], wrong[position])


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: [], lambda t: [*t, 97]])
def test_missing_and_extra_tokens_are_found(change: Any) -> None:
    (finding,) = check(change(tokens(GREEDY)))
    assert not finding.close and "ended here" in finding.why and "the end" in str(finding)


def test_case_H12_difference_passes_only_within_the_error_of_its_row() -> None:
    for at in (0, 5, 11):
        # The mode's row is rounded the other way: its two best logits, 2e-5 apart, change places.
        plain, mode = near_tie(at, 2e-5), rounded(at, 3e-5, near_tie(at, 2e-5))
        got = tokens(GREEDY, mode)
        assert got[:at] == tokens(GREEDY, plain)[:at] and got[at] != tokens(GREEDY, plain)[at]
        (finding,) = check(got, plain, mode)
        assert finding.close and finding.position == at and "logits 2e-05 apart" in finding.why, finding
        # The same tokens where this row is computed to the same bits everywhere: nothing excuses them.
        (finding,) = check(got, plain, plain)
        assert not finding.close and finding.position == at
        # A gap of twice the error and more is no rounding either.
        (finding,) = check(got, near_tie(at, 7e-5), rounded(at, 3e-5, near_tie(at, 7e-5)))
        assert not finding.close and finding.position == at


def test_case_H12_wrong_row_does_not_excuse_itself() -> None:
    mode = rounded(4, 3.0, near_tie(4, 0.5))
    (finding,) = check(tokens(GREEDY, mode), near_tie(4, 0.5), mode)
    assert not finding.close and "more than rounding gives" in finding.why
    nan = served("mtp", lambda engine, request, position, row: torch.full_like(row, float("nan")))
    wrong = [98 if t == 97 else 97 for t in tokens(GREEDY)]
    (finding,) = verify_greedy(GREEDY, "mtp", wrong, plain_alone=served("plain"), mode_alone=nan, error_limit=LIMIT)
    assert not finding.close


def test_rest_is_checked_after_a_close_row() -> None:
    plain, mode = near_tie(3, 1e-5), rounded(3, 2e-5, near_tie(3, 1e-5))
    got = tokens(GREEDY, mode)
    assert [f.close for f in check(got, plain, mode)] == [True]
    wrong = [*got]
    wrong[8] = 97 + (wrong[8] - 96) % 26
    assert [(f.position, f.close) for f in check(wrong, plain, mode)] == [(3, True), (8, False)]
    assert [(f.position, f.close) for f in check(got[:9], plain, mode)] == [(3, True), (9, False)]


def test_stop_token_chosen_in_a_close_row_ends_the_comparison() -> None:
    plain, mode = near_tie(3, 1e-5), rounded(3, 2e-5, near_tie(3, 1e-5))
    got = tokens(GREEDY, mode)[:4]
    stopped = replace(GREEDY, stop_ids=(got[3],))
    (finding,) = verify_greedy(stopped, "mtp", got, plain_alone=served("plain", plain), mode_alone=served("mtp", mode), error_limit=LIMIT)
    assert finding.close and finding.position == 3


def test_sampled_tokens_must_not_depend_on_the_batch() -> None:
    request = Request(2, (256, 65), max_tokens=6, temperature=0.8, seed=7)
    right = tokens(request)
    assert verify_sampled(request, "mtp", right, mode_alone=served()) == []
    (finding,) = verify_sampled(request, "mtp", [*right[:4], 35, right[5]], mode_alone=served())
    assert (finding.position, finding.close, finding.index) == (4, False, 2)
    (finding,) = verify_sampled(request, "mtp", right[:4], mode_alone=served())
    assert (finding.position, finding.got) == (4, None)
    assert tokens(replace(request, seed=8)) != right


def test_verify_of_every_mode(model: Path, requests: Path, engines: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(requests), "--model", str(model), "--mode", "all", "--verify"]) == 0
    assert "verify: passed: 8 greedy, 4 sampled checked, 0 different, 0 rows closer" in capsys.readouterr().out


@pytest.mark.parametrize("mode", runner.MODES)
@pytest.mark.parametrize("temperature", [0, 0.5])
def test_fault_of_one_mode_in_a_batch_is_found(mode: str, temperature: float, model: Path, requests: Path, engines: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    def fault(engine: FakeEngine, request: Request, position: int, row: torch.Tensor) -> torch.Tensor:
        wrong = engine.config.mode == mode and engine.batch > 1 and request.temperature == temperature and position == 2
        return row.roll(1) if wrong else row

    engines["fault"] = fault
    assert main(["run", str(requests), "--model", str(model), "--mode", "all", "--verify"]) == 1
    out = capsys.readouterr().out
    assert f"DIFFERENT: {mode}, token 2" in out and "verify: FAILED" in out
    assert {line.split(",")[0] for line in out.splitlines() if line.startswith("DIFFERENT")} == {f"DIFFERENT: {mode}"}


def test_close_rows_pass_and_are_counted(model: Path, requests: Path, engines: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    def fault(engine: FakeEngine, request: Request, position: int, row: torch.Tensor) -> torch.Tensor:
        # Prompt "one" and its first three tokens make seven ids: the row of its fourth token, in whatever way it is reached.
        if request.temperature == 0 and len(request.prompt_ids) + position == 7 and request.prompt_ids[1] == ord("o"):
            row = row.clone()
            order = row.argsort(descending=True)
            row[order[1]] = row[order[0]] - 1e-5
            if engine.config.mode == "mtp":
                row[order[0]] -= 2e-5
        return row

    engines["fault"] = fault
    assert main(["run", str(requests), "--model", str(model), "--mode", "all", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "close: mtp, token 3" in out and "0 different, 1 rows closer" in out


def test_rounding_of_the_model_counts_as_that_of_its_cache(model: Path, requests: Path, engines: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The same error of a row passes for a bfloat16 model and fails for a float32 one."""

    def rounded_in_mtp(engine: FakeEngine, request: Request, position: int, row: torch.Tensor) -> torch.Tensor:
        row = row.clone()
        if request.temperature == 0 and position == 0:
            row[:] = -8.0
            row[100], row[101] = 1.0, 1.0 - 0.01 * (1 if engine.config.mode == "plain" else -1)
        return row

    engines["fault"] = rounded_in_mtp
    config = json.loads((model / "config.json").read_text())
    for dtype, code in (("float32", 1), ("bfloat16", 0)):
        (model / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
        assert main(["run", str(requests), "--model", str(model), "--mode", "mtp", "--verify", "--max-tokens", "1"]) == code, capsys.readouterr().out
        assert ("close: mtp" in capsys.readouterr().out) == (code == 0)


# The small checkpoint.


def test_default_model_is_shipped_and_old_caches_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "dsv4_ops"
    for name in ("tiny-0-0123456789ab", "tiny-0-0123456789abx1y2", "tiny-0-mine", "wheels"):
        (cache / name).mkdir(parents=True)
        (cache / name / "config.json").write_text("{}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = runner.default_model()
    assert (path / "config.json").is_file() and path.is_relative_to(Path(runner.__file__).parent)
    assert sorted(p.name for p in cache.iterdir()) == ["tiny-0-mine", "wheels"], "only what this command made"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "absent"))
    assert runner.default_model() == path


def test_sizes_follow_the_requests_and_long_waits_say_something(model: Path, requests: Path, engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(runner, "QUIET_SECONDS", 0.0)
    assert main(["run", str(requests), "--model", str(model), "--verify"]) == 0
    assert [e.config.max_model_len for e in engines["made"]] == [256]
    captured = capsys.readouterr()
    assert "plain: 1 of 3 requests\n" in captured.err and "verify plain: 3 of 3 requests\n" in captured.err and "of 3" not in captured.out
    assert "tokens/s, padded" in captured.out
    requests.write_text(json.dumps({"prompt": "x" * 500, "max_tokens": 20}) + "\n" + json.dumps({"prompt": "x" * runner.MAX_MODEL_LEN}))
    assert main(["run", str(requests), "--model", str(model)]) == 3
    assert engines["made"][-1].config.max_model_len == 768
    captured = capsys.readouterr()
    assert "model's length of 4352" in captured.err and "padded" not in captured.out


def test_make_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    first, second, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for path, seed in ((first, "5"), (second, "5"), (other, "6")):
        assert main(["make-tiny", str(path), "--seed", seed]) == 0
    assert "seed 5" in capsys.readouterr().out
    weights = [(p / "model.safetensors").read_bytes() for p in (first, second, other)]
    assert weights[0] == weights[1] != weights[2]
    assert main(["make-tiny", str(first / "config.json")]) == 4
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["make-tiny", str(first), "--size", "huge"])
    assert "choose from" in (err := capsys.readouterr().err) and "tiny" in err and "flash" in err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("only copy")
    assert main(["make-tiny", str(tmp_path / "mine")]) == 4
    assert "holds other files" in capsys.readouterr().err and [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises(SystemExit):
        main(["make-tiny", str(first), "--seed", str(2**63)])
    assert "must fit into 64 bits" in capsys.readouterr().err


# All together, with the real engine.


def test_real_engine_serves_all_modes_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model, requests, out = tmp_path / "model", tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    assert main(["make-tiny", str(model)]) == 0
    lines = [{"prompt": "Good morning", "max_tokens": 7}, {"prompt": "Rain, then ", "max_tokens": 6, "temperature": 0.9, "seed": 5}, {"prompt": ""}]
    requests.write_text("\n".join(map(json.dumps, lines)))
    assert main(["run", str(requests), "--model", str(model), "--mode", "all", "--verify", "--out", str(out), "--device", "cpu", "--max-batched-tokens", "32", "--max-seqs", "3"]) == 3
    captured = capsys.readouterr()
    assert "verify: passed: 4 greedy, 4 sampled checked, 0 different" in captured.out
    assert f"{requests}:3: prompt must not be empty" in captured.err
    records = results(out)
    assert Counter(r["mode"] for r in records) == dict.fromkeys(runner.MODES, 2)
    assert len({tuple(r["token_ids"]) for r in records if r["line"] == 1}) == 1
    assert all(sum(r["accepted_lengths"]) + 1 == len(r["token_ids"]) for r in records), "the first token comes from the prompt"
    assert len(captured.out.splitlines()[-5].split()) > 8
