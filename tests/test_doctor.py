"""The doctor and ops commands."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_ops import _registry, doctor, testing
from dsv4_ops.__main__ import main

OPS = {op.name: op for op in testing.ops()}


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run([sys.executable, "-m", "dsv4_ops", *arguments], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path, **env})


def test_table_names_every_op_with_its_schema() -> None:
    rows = {r["op"]: r for r in doctor.ops_table()}
    assert set(rows) == set(OPS)
    for name, row in rows.items():
        assert row["schema"] == OPS[name].schema and row["schema"].startswith(f"{name}(")
        assert row["backends"]["cpu"][-1] == row["backends"]["cuda"][-1] == "torch"
    assert rows["topk"]["backends"]["cpu"] == ["c++", "torch"]
    assert rows["kv_cache_insert"]["mutates"] == ["cache"]


def test_table_does_not_depend_on_the_machine() -> None:
    """README is compared with it where the package may have been built without a compiler."""
    built, bare = command("ops", "--markdown"), command("ops", "--markdown", DSV4_OPS_DISABLE_C="1")
    assert built.returncode == bare.returncode == 0
    assert built.stdout == bare.stdout == doctor.ops_markdown()


def test_markdown_is_a_table() -> None:
    lines = doctor.ops_markdown().splitlines()
    assert {line.count(" | ") for line in lines if "---" not in line} == {5}
    assert len(lines) == 2 + len(OPS)


def test_op_that_is_not_graph_safe_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    unsafe = copy.copy(OPS["topk"])
    unsafe.graph_safe, unsafe.graph_note = False, "it asks the host"
    monkeypatch.setattr(_registry, "ops", lambda: [unsafe])
    assert "| no: it asks the host |" in doctor.ops_markdown()
    assert "not graph-safe: it asks the host" in doctor.ops_text()


def test_table_is_put_between_the_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{doctor.BEGIN}\nold\n{doctor.END}\nafter\n")
    assert main(["ops", "--write", str(page)]) == 0
    assert page.read_text() == f"before\n{doctor.BEGIN}\n{doctor.ops_markdown()}{doctor.END}\nafter\n"
    assert main(["ops", "--write", str(page)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{page}: written", f"{page}: up to date"]


@pytest.mark.parametrize("text", ["", f"{doctor.BEGIN}\n", f"{doctor.END}\n{doctor.BEGIN}\n", f"{doctor.BEGIN}\n{doctor.BEGIN}\n{doctor.END}\n"])
def test_page_without_markers_is_refused_and_untouched(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert main(["ops", "--write", str(page)]) == 4
    assert "must have the lines" in capsys.readouterr().err and page.read_text() == text


def test_report_is_json_and_complete() -> None:
    done = command("doctor", "--json", SECRET_TOKEN="hunter2")
    assert done.returncode == 0 and done.stderr == "" and "hunter2" not in done.stdout
    facts = json.loads(done.stdout)
    assert {r["op"] for r in facts["ops"]} == set(OPS)
    assert facts["versions"]["torch"] and facts["versions"]["python"]
    assert {v["name"] for v in facts["environment"]} >= {"DSV4_OPS_TRACE", "DSV4_OPS_DISABLE_C"}
    assert bool(facts["gpus"]) != bool(facts["no_gpu"])
    assert "PyTorch version" in facts["system"]["text"]
    loaded, skipped = facts["compiled"]["loaded"], facts["compiled"]["skipped"]
    assert set(loaded) | set(skipped) == {"_C", "_C_cuda"} and all(skipped.values())


def test_gap_has_reason_and_fix() -> None:
    facts = json.loads(command("doctor", "--json", DSV4_OPS_DISABLE_C="1").stdout)
    (gap,) = next(r for r in facts["ops"] if r["op"] == "topk")["backends"]["cpu"]["gaps"]
    assert gap == {"backend": "c++", "reason": "_C: DSV4_OPS_DISABLE_C is set", "fix": "unset DSV4_OPS_DISABLE_C"}
    text = doctor.render(facts)
    assert "c++ on cpu for" in text and "why: _C: DSV4_OPS_DISABLE_C is set" in text and "fix: unset" in text
    assert not next(r for r in facts["ops"] if r["op"] == "mtp_context_lens")["backends"]["cpu"]["gaps"]


def test_gap_of_a_part_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    op = copy.copy(OPS["topk"])
    op.backends, op.cpp = {"cpu": "torch", "cuda": "torch"}, frozenset()
    op.triton = lambda: None
    op.cpp_sources = frozenset({"cpu", "cuda"})
    monkeypatch.setattr(_registry, "skipped", {"_C": "not built: no compiler", "_C_cuda": "not built: no nvcc"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (cpu,) = doctor._gaps(op, "cpu")
    assert cpu["reason"] == "_C: not built: no compiler" and "C++ compiler" in cpu["fix"]
    kernel, triton = doctor._gaps(op, "cuda")
    assert "nvcc" in kernel["fix"] and triton == {"backend": "triton", "reason": "triton is not installed", "fix": "pip install triton"}
    op.backends = {"cpu": "c++", "cuda": "triton"}
    assert doctor._gaps(op, "cpu") == [] and [g["backend"] for g in doctor._gaps(op, "cuda")] == ["c++"]


def test_a_kernel_that_a_launcher_takes_is_a_gap_where_it_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    op = copy.copy(OPS["sparse_mla_decode"])
    op.backends = {"cpu": "c++", "cuda": "triton"}
    monkeypatch.setattr(_registry, "skipped", {"_C_cuda": "not built: no nvcc"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    asked = []
    for loaded in (True, False):
        monkeypatch.setattr(_registry, "_has_kernel", lambda name, key, loaded=loaded: asked.append((name, key)) or loaded)
        assert [(gap["backend"], gap["reason"]) for gap in doctor._gaps(op, "cuda")] == [("c++", "_C_cuda: not built: no nvcc")] * (not loaded)
        assert doctor._gaps(op, "cpu") == []
    assert set(asked) == {("dsv4_ops_kernels::sparse_mla_decode_cluster", "CUDA")}


@pytest.mark.parametrize(("own", "serves", "arch", "said"), [
    ("triton", True, [9, 0], "on sm_90 cuda for up to 640 columns, else triton"), ("torch", True, [9, 0], "torch"), ("triton", False, [9, 0], "triton"), ("triton", True, [10, 0], "triton"),
])  # fmt: skip
def test_what_auto_takes(own: str, serves: bool, arch: list[int], said: str) -> None:
    row = {"backend": "cuda", "serves": serves, "arch": arch, "batch_invariant": True, "unmet": [], "never_run": ""}
    facts = {"gpus": [{}], "ops": [{"op": "sparse_mla_decode", "backends": {"cuda": {"in_use": own}}}], "attention": [row]}
    assert next(doctor._attention_lines(facts)) == f"  auto: {said}, by this package; a row's bits never depend on its batch"


def test_report_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "Some GPU", "capability": [12, 0], "memory_bytes": 96 * 2**30, "multiprocessors": 188}
    monkeypatch.setattr(doctor, "_gpus", lambda: ([gpu, gpu], ""))
    facts = json.loads(json.dumps(doctor.report(system=False)))
    text = doctor.render(facts)
    assert "1: Some GPU, sm_120, 96.0 GiB, 188 SMs" in text and "sm_120, 64 heads, top-k 192: " in text
    assert all(r["backends"]["cuda"]["in_use"] for r in facts["ops"])


def test_broken_probes_do_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such program")

    monkeypatch.setattr("torch.utils.collect_env.get_env_info", broken)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: (_ for _ in ()).throw(RuntimeError("driver too old")))
    text = doctor.render(doctor.report())
    assert "CUDA does not start: driver too old" in text and "collect_env failed: OSError: no such program" in text


def test_selftest_passes_for_every_op_and_back_end() -> None:
    outcomes = doctor.selftest(devices=["cpu"])
    assert {o.op for o in outcomes} == set(OPS) and all(o.samples for o in outcomes)
    assert [doctor.outcome_line(o) for o in outcomes if not o.ok] == []
    assert {(o.op, o.backend) for o in outcomes} >= {("topk", "torch")}


def wrong_value(result: torch.Tensor) -> torch.Tensor:
    return result + 1


def unwritten(result: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(result)


def wrong_dtype(result: torch.Tensor) -> torch.Tensor:
    return result.to(torch.int64)


@pytest.mark.parametrize("fault", [wrong_value, unwritten, wrong_dtype])
def test_selftest_finds_a_wrong_back_end(fault: Any) -> None:
    op = copy.copy(OPS["topk"])
    right = op.torch_impl
    assert right is not None
    op.backends = {"cpu": "c++", "cuda": "c++"}
    op.torch_impl = lambda *a, **k: fault(right(*a, **k))
    good, bad = doctor.selftest([op], ["cpu"])
    assert good.ok and good.backend == "c++"
    assert not bad.ok and bad.backend == "torch" and "FAIL  topk on cpu by torch" in doctor.outcome_line(bad)


def test_selftest_compares_mutated_arguments() -> None:
    op = copy.copy(OPS["kv_cache_insert"])
    op.backends = {"cpu": "c++", "cuda": "c++"}
    op.torch_impl = lambda *a, **k: None
    bad = doctor.selftest([op], ["cpu"])[1]
    assert any("mutated arguments" in f for f in bad.failures)


def test_selftest_survives_a_back_end_that_raises() -> None:
    op = copy.copy(OPS["topk"])
    op.backends = {"cpu": "c++", "cuda": "c++"}
    op.torch_impl = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("illegal instruction\nmore"))
    bad = doctor.selftest([op], ["cpu"])[1]
    assert len(bad.failures) == bad.samples and bad.failures[0].endswith("RuntimeError: illegal instruction")


@pytest.mark.parametrize("as_json", [False, True])
def test_selftest_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    flags = ["--json"] if as_json else []
    monkeypatch.setattr(doctor, "_system", lambda: {"text": ""})
    verdicts = [doctor.Outcome("topk", "cpu", "torch", 3, (), 0.1)]

    def selftest(on_outcome: Any = None, **_: Any) -> list[doctor.Outcome]:
        for outcome in verdicts:
            if on_outcome is not None:
                on_outcome(outcome)
        return verdicts

    monkeypatch.setattr(doctor, "selftest", selftest)
    assert main(["doctor", "--selftest", *flags]) == 0
    verdicts.append(doctor.Outcome("topk", "cuda", "c++", 3, ("a: wrong",), 0.1))
    capsys.readouterr()
    assert main(["doctor", "--selftest", *flags]) == 1
    out = capsys.readouterr().out
    if as_json:
        assert [o["ok"] for o in json.loads(out)["selftest"]] == [True, False]
    else:
        assert "FAIL  topk on cuda by c++: 2 of 3 samples" in out and "self-test: 1 of 2 passed" in out
    assert main(["doctor"]) == 0


REASONS = [
    ("cpu", "not built: torch with its C++ headers was not found; install torch>=2.11 first", "is installed now: pip install --force-reinstall --no-deps ."),
    ("cpu", "not built: built with DSV4_OPS_BUILD=none", "unset DSV4_OPS_BUILD"),
    ("cpu", "not built: the build failed (g++ failed); DSV4_OPS_BUILD=require shows all of its output", "C++ compiler"),
    ("cpu", "not built: torch 2.9.0 is too old, 2.11 is the oldest that the compiled parts run with", "install torch 2.11"),
    ("cpu", "not built: this is a source folder that was not installed", "pip install -e ."),
    ("cpu", "built, but the library is gone: install again", "--force-reinstall"),
    ("cuda", "not built: built with DSV4_OPS_CUDA=0", "unset DSV4_OPS_CUDA,"),
    ("cuda", "torch 2.13.0+cpu is a CPU build", "CUDA build of torch"),
    ("cuda", "not built: no CUDA toolkit was found (bin/nvcc beside include/cuda_runtime.h); set CUDA_HOME", "set CUDA_HOME"),
]


@pytest.mark.parametrize(("device", "reason", "words"), REASONS)
def test_fix_follows_from_the_reason(device: str, reason: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "skipped", {"_C": reason, "_C_cuda": reason})
    why, fix = doctor._why_missing("c++", device)
    assert reason in why and words in fix
    assert ("C++ compiler" in fix) == ("the build failed" in reason)


def test_reasons_of_the_build_are_known_to_doctor() -> None:
    """A reason that is reworded in setup.py must not lose its fix."""
    setup = Path(__file__).parents[1] / "setup.py"
    text = setup.read_text()
    assert all(words in text for words in ("headers was not found", "DSV4_OPS_BUILD=none", "DSV4_OPS_CUDA=0", "is too old", "the build failed", "CUDA toolkit"))


def test_report_is_short_and_ends_with_a_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_system", lambda: {"text": "of PyTorch"})
    monkeypatch.setattr(doctor, "_gpus", lambda: ([], "there is none"))
    assert main(["doctor"]) == 0
    short = capsys.readouterr().out
    assert "of PyTorch" not in short and short.splitlines()[-1].startswith(f"verdict: all {len(OPS)} ops run on cpu: ")
    why = short.splitlines().index("    why: there is none")
    assert short.splitlines()[why + 1].startswith("    fix: ")
    assert main(["doctor", "--verbose"]) == 0
    assert "torch.utils.collect_env\nof PyTorch" in capsys.readouterr().out


def test_one_op_is_shown_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "topk"]) == 0
    out = capsys.readouterr().out
    assert "logits              float32/bf16  [rows, width]" in out and OPS["topk"].schema in out
    assert "torch.ops.dsv4_ops.topk.out(..., out=buffer)" in out


@pytest.mark.parametrize("name", OPS)
def test_example_of_an_op_runs(name: str) -> None:
    script = "".join(line.removeprefix("  ") + "\n" for line in doctor.op_example(OPS[name]).splitlines())
    space: dict[str, Any] = {}
    exec(compile(script, name, "exec"), space)
    results = testing.outputs(space["result"])
    sample = OPS[name].sized("cpu", 4)
    assert [r.shape for r in results] == [r.shape for r in testing.outputs(OPS[name](*sample.args, **sample.kwargs))]


@pytest.mark.parametrize(("name", "words"), [("topkk", "Near: topk"), ("mla", "sparse_mla_decode"), ("qqqq", "lists all")])
def test_unknown_op_has_near_matches(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", name]) == 2
    err = capsys.readouterr().err
    assert f"no op '{name}'" in err and words in err and err.count("\n") == 1


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "make-tiny" in capsys.readouterr().err


def test_commands_need_neither_transformers_nor_a_gpu_library() -> None:
    script = (
        "import sys\n"
        "from dsv4_ops.__main__ import main\n"
        "assert main(['ops']) == 0\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('transformers', 'safetensors', 'triton', 'flashinfer')]\n"
        "assert not bad, bad\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr


def test_reader_that_goes_away_is_no_traceback() -> None:
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen([sys.executable, "-m", "dsv4_ops", "ops"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait() != 0


@pytest.mark.parametrize("arguments", [["nothing"], ["doctor", "--nothing"]])
def test_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    capsys.readouterr()


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n  {code} " in out for code in (0, 1, 2, 3, 4, 130))


@pytest.mark.parametrize("capability", [[9, 0], [10, 0], [12, 0]])
def test_attention_back_ends_of_a_machine(capability: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "Some GPU", "capability": capability, "memory_bytes": 2**36, "multiprocessors": 100}
    monkeypatch.setattr(doctor, "_gpus", lambda: ([gpu], ""))
    facts = json.loads(json.dumps(doctor.report(system=False)))
    rows = {r["backend"]: r for r in facts["attention"]}
    assert list(rows) == ["reference", "triton", "cuda", "flashmla", "flashinfer"] and all(r["serves"] == (not r["unmet"]) for r in rows.values())
    assert rows["reference"]["serves"] and not rows["flashinfer"]["serves"], "not installed where tests run"
    unmet = {name: {line.split(":")[0] for line in row["unmet"]} for name, row in rows.items()}
    assert ("architecture" in unmet["flashmla"]) == (capability == [12, 0]) and ("architecture" in unmet["flashinfer"]) == (capability == [9, 0])
    text = doctor.render(facts)
    assert f"flashinfer on sm_{capability[0]}{capability[1]}: cannot serve; bits depend on the batch" in text
    assert "never run: on any GPU (" in text and "reference on sm_" in text
    assert "auto: " in text and text.count("never run:") == 4
    cuda = text[text.index(f"  cuda on sm_{capability[0]}{capability[1]}:") :]
    assert cuda.index("never run: on any GPU but sm_90") < cuda.index("  flashmla on")
    assert ("architecture" in unmet["cuda"]) == (capability == [12, 0])


def test_attention_back_ends_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: ([], "none"))
    facts = doctor.report(system=False)
    assert [r["serves"] for r in facts["attention"]] == [True, False, False, False, False]
    assert "  flashmla: cannot serve" in doctor.render(facts)
