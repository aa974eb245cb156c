"""What the package says while it runs: through stdlib ``logging``, under ``TORCH_LOGS``, and by ``DSV4_OPS_TRACE`` before each launch."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dsv4_ops
from dsv4_ops import WorkspaceManager, graphs, testing
from dsv4_ops._registry import _log_call
from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE


def child(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    clean = {name: value for name, value in os.environ.items() if name not in ("DSV4_OPS_TRACE", "TORCH_LOGS")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300, env={**clean, "PYTHONPATH": path, **env})


CRASH = """
import torch, dsv4_ops
good, lengths = torch.zeros(3, 64), torch.full((3,), 64)
dsv4_ops.topk(good, lengths, 4)
nowhere = torch._C._construct_storage_from_data_pointer(4096, torch.device("cpu"), 5 * 64 * 4)
bad = torch.empty(0).set_(nowhere, 0, (5, 64), (64, 1))
print("calling", flush=True)
{call}
print("not reached")
"""


@pytest.mark.parametrize("call", [
    "dsv4_ops.topk(bad, torch.full((5,), 64), 4)",
    "torch.ops.dsv4_ops.topk(bad, torch.full((5,), 64), 4)",
    "with torch.inference_mode(): torch.ops.dsv4_ops.topk(bad, torch.full((5,), 64), 4)",
    "torch.compile(lambda x, n: dsv4_ops.topk(x, n, 4), backend='eager')(bad, torch.full((5,), 64))",
], ids=["function", "torch.ops", "inference mode", "compiled"])  # fmt: skip
def test_the_last_line_names_the_call_that_crashed(call: str) -> None:
    done = child(CRASH.format(call=call), DSV4_OPS_TRACE="1")
    assert done.returncode == -signal.SIGSEGV and done.stdout == "calling\n", done.stderr
    first, *_, last = [line for line in done.stderr.splitlines() if "topk" in line]
    assert first.startswith("dsv4_ops.topk(float32[3, 64], int64[3], 4") and last.startswith("dsv4_ops.topk(float32[5, 64], int64[5], 4"), done.stderr
    assert " on cpu by " in last


def test_trace_can_be_switched_on_late_for_the_functions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    op = next(op for op in testing.ops() if op.name == "prepare_dflash_inputs")
    sample = op.sized("cpu", 2)
    dsv4_ops.prepare_dflash_inputs(*sample.args, **sample.kwargs)
    assert not caplog.records
    monkeypatch.setenv("DSV4_OPS_TRACE", "1")
    dsv4_ops.prepare_dflash_inputs(*sample.args, **sample.kwargs)
    (record,) = caplog.records
    assert record.name == "dsv4_ops" and record.levelno == logging.WARNING
    assert "[int32[2, 40]], [64], mask_token_id=999" in record.getMessage(), "values of tensors must not be read"
    assert record.getMessage().endswith(" on cpu by torch")


def test_every_call_is_traced_once_and_traced_programs_compute_the_same() -> None:
    code = """
import torch, dsv4_ops
x, n = torch.arange(128.0).view(2, 64), torch.tensor([64, 3])
step = torch.compile(lambda x, n: dsv4_ops.topk(x, n, 4) + dsv4_ops.mtp_context_lens(n, 4), fullgraph=True, backend="aot_eager")
print(step(x, n).tolist(), dsv4_ops.topk(x, n, 4).tolist())
"""
    plain, traced = child(code), child(code, DSV4_OPS_TRACE="1")
    assert plain.returncode == traced.returncode == 0, traced.stderr
    assert traced.stdout == plain.stdout and "topk" not in plain.stderr
    names = [line.partition("(")[0] for line in traced.stderr.splitlines() if line.startswith("dsv4_ops.")]
    assert names == ["dsv4_ops.topk", "dsv4_ops.mtp_context_lens", "dsv4_ops.topk"], "shapes that a compiler asks for are no launches"


def on_cuda(args: tuple[object, ...]) -> list[object]:
    """Of the same shapes, with nothing behind them: inside a FakeTensorMode."""
    return [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda") if isinstance(a, torch.Tensor) else a for a in args]


def test_a_trace_names_the_back_end_that_was_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    sample = SPARSE_MLA_DECODE.sized("cpu", 2)
    for chosen, by in ((lambda *args, **kwargs: "flashmla", "flashmla"), (lambda *args, **kwargs: args[99], SPARSE_MLA_DECODE.backends["cuda"])):
        monkeypatch.setattr(SPARSE_MLA_DECODE, "chosen", chosen)
        with FakeTensorMode():
            _log_call(SPARSE_MLA_DECODE, on_cuda(sample.args), sample.kwargs)
        assert caplog.records[-1].getMessage().endswith(f" on cuda by {by}")
    _log_call(SPARSE_MLA_DECODE, sample.args, sample.kwargs)
    assert caplog.records[-1].getMessage().endswith(f" on cpu by {SPARSE_MLA_DECODE.backends['cpu']}")


def test_a_trace_takes_any_arguments(caplog: pytest.LogCaptureFixture) -> None:
    """Also those among which no back end can be chosen: the op's own words are about to come."""
    bad = list(SPARSE_MLA_DECODE.bad_inputs("cpu"))
    for one in bad:
        with FakeTensorMode():
            _log_call(SPARSE_MLA_DECODE, on_cuda(one.args), one.kwargs)
    assert len(caplog.records) == len(bad)


REFUSED = """
from dsv4_ops import testing
for op in testing.ops():
    for bad in op.bad_inputs("{device}"):
        testing.check_bad_input(op, bad)
print("all refused")
"""


def test_what_is_refused_is_refused_in_the_same_words_when_traced(device: str) -> None:
    done = child(REFUSED.format(device=device), DSV4_OPS_TRACE="1")
    assert done.returncode == 0 and done.stdout == "all refused\n", done.stderr
    assert "dsv4_ops.sparse_mla_decode(" in done.stderr


COMPILED = """
import torch, dsv4_ops
from dsv4_ops.passes import backend
torch.compile(lambda x, n: dsv4_ops.topk(x, n, 4), backend=backend("eager"))(torch.zeros(2, 64), torch.tensor([64, 3]))
"""


@pytest.mark.parametrize(("setting", "shown"), [("+dsv4_ops", True), ("+dsv4_ops.passes", True), ("dsv4_ops", False), ("+dsv4_ops._registry", False)])
def test_torch_logs_takes_the_package_by_its_name(setting: str, shown: bool) -> None:
    done = child(COMPILED, TORCH_LOGS=setting)
    assert done.returncode == 0, done.stderr
    assert ("lanes bound: BindReport(" in done.stderr) == shown


def test_growth_of_scratch_and_captures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    manager = WorkspaceManager("cpu", num_lanes=2)
    with caplog.at_level(logging.DEBUG, logger="dsv4_ops"):
        manager.get(((16,), torch.float32), lane=1, op="topk")
        manager.get(((8,), torch.float32), lane=1, op="topk")
        manager.reserve(4096, lane=1)
        pool = graphs.GraphPool("cpu", manager=manager, recorder=testing.TapeRecorder())
        pool.step("draft", lambda x: x + 1, {"x": graphs.StepInput(torch.float32)}, sizes=(1, 4))
        pool.capture()
    grown = [r.getMessage() for r in caplog.records if r.name == "dsv4_ops.workspace"]
    assert [text.partition(" on cpu: ")[0] for text in grown[:2]] == ["workspace of lane 1, ubatch 0"] * 2 and "before 0, for topk" in grown[0]
    assert [r.getMessage().partition(":")[0] for r in caplog.records if r.name == "dsv4_ops.graphs"] == ["step 'draft' captured at size 4", "step 'draft' captured at size 1"]


def test_the_package_installs_no_handler_and_warns_nothing_by_itself() -> None:
    assert not logging.getLogger("dsv4_ops").handlers and logging.getLogger("dsv4_ops.passes").parent is logging.getLogger("dsv4_ops")
    done = child("import torch, dsv4_ops; dsv4_ops.topk(torch.zeros(2, 64), torch.tensor([64, 3]), 4)")
    assert done.stderr == "" or "compiled cpu kernel" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_launch_on_a_gpu_is_named_before_it_runs() -> None:
    code = "import torch, dsv4_ops; dsv4_ops.topk(torch.zeros(2, 64, device='cuda'), torch.full((2,), 64, device='cuda'), 4)"
    assert "dsv4_ops.topk(float32[2, 64], int64[2], 4) on cuda by " in child(code, DSV4_OPS_TRACE="1").stderr
