"""``python -m dsv4_ops bench`` on the CPU: nothing wrong gets a time, everything asked for is a row or a reason."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.__main__ import main
from dsv4_ops.bench import cases, machine, peers, report, run, timing
from dsv4_ops.bench.cases import least_bytes, outcome
from dsv4_ops.testing import Op, Sample

OPS = {op.name: op for op in testing.ops()}
TIMES = {"us_p20": 1.0, "us_p50": 2.0, "us_p80": 3.0}


class Once:
    """Stands for the timer: runs each call once."""

    def measure(self, calls: list[Callable[[], Any]], cold: bool = True) -> tuple[dict[str, float], list[torch.Tensor]]:
        for call in calls:
            result = call()
        return dict(TIMES), list(result) if isinstance(result, tuple) else [result]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEERS_DIR", raising=False)
    monkeypatch.setattr(run, "copy_rate", lambda device: 100.0)


def bench(op: str, *providers: peers.Provider, rows: int = 4, **sizes: Any) -> run.Bench:
    """A bench that has measured one size of an op, by ours and by ``providers``."""
    made = run.Bench("cpu", timer=Once())
    ours = made._providers
    made._providers = lambda which: iter([*ours(which), *providers])  # type: ignore[method-assign]
    made.run(OPS[op], list(cases.cases(OPS[op], "cpu", (rows,), **sizes)))
    return made


# Every op, and the gate.


@pytest.mark.parametrize("name", OPS)
def test_every_op_can_be_measured(name: str) -> None:
    (row,) = bench(name, rows=2, **({"columns": (256,), "k": 16} if name in cases.SWEPT else {})).rows
    assert row["ok"], row
    assert (row["op"], row["provider"], row["backend"]) == (name, "dsv4_ops", OPS[name].backends["cpu"])
    assert row["params"]["rows"] == 2 and row["case"]
    assert row["bytes"] > 0 and row["GBps"] == round(row["bytes"] / 2e3, 1)
    assert row["copy_share"] == pytest.approx(row["bytes"] / 100e3 / 2, abs=1e-4)
    assert row["roof_us"] == pytest.approx(max(row["bytes"] / 100e3, 2.0), abs=1e-3)


def test_a_row_names_the_back_end_that_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(OPS["sparse_mla_decode"], "backend_of", lambda *args, **kwargs: asked.append(args[0].shape[0]) or "cuda")
    (row,) = bench("sparse_mla_decode", rows=2).rows
    assert row["ok"] and row["backend"] == "cuda" and asked == [2]


def provider(call: Callable[[Sample], Any], name: str = "peer", right: peers.Judge = peers.exact, **more: Any) -> peers.Provider:
    return peers.Provider(name, lambda s: lambda: call(s), right, **more)


def test_a_wrong_result_has_no_time_before_or_after() -> None:
    calls: list[int] = []
    wakes_calls: list[int] = []

    def tires(s: Sample) -> torch.Tensor:
        calls.append(0)
        return OPS["mtp_context_lens"].reference(*s.args, **s.kwargs) + (len(calls) > 1)

    def wakes(s: Sample) -> torch.Tensor:
        wakes_calls.append(0)
        return OPS["mtp_context_lens"].reference(*s.args, **s.kwargs) + (len(wakes_calls) == 1)

    wrong = provider(lambda s: OPS["mtp_context_lens"].reference(*s.args, **s.kwargs) + 1, "wrong")
    raises = provider(lambda s: [][0], "raises")
    refuses = provider(tires, "refuses", unable=lambda s: "it takes 5 rows")
    rows = {row["provider"]: row for row in bench("mtp_context_lens", wrong, provider(tires, "tires"), provider(wakes, "wakes"), raises, refuses).rows}
    assert rows["dsv4_ops"]["ok"]
    assert not set(TIMES) & {key for name in ("wrong", "tires", "wakes", "raises", "refuses") for key in rows[name]}
    assert all("output 0" in rows[name]["wrong"] for name in ("wrong", "tires", "wakes"))
    assert len(wakes_calls) == 1, "a wrong result is not timed"
    assert rows["raises"]["skipped"] == "IndexError: list index out of range" and rows["refuses"]["skipped"] == "it takes 5 rows"


def test_what_an_op_mutates_is_judged_and_belongs_to_one_provider() -> None:
    lazy = provider(lambda s: None, "does nothing")
    ours, other = bench("kv_cache_insert", lazy).rows
    assert ours["ok"] and "wrong" in other, "the pages that ours has written must not be what another is judged by"


def test_samples_run_on_poisoned_memory() -> None:
    op = copy.copy(OPS["mtp_context_lens"])

    def path(*args: Any, **kwargs: Any) -> torch.Tensor:
        assert bool((torch.empty(64, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()), "what is not written would look right by chance"
        result: torch.Tensor = op.reference(*args, **kwargs)
        return result

    op.backends, op.torch_impl = {"cpu": "c++"}, path
    assert run.faults(op, "cpu") == {}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Op:
    """topk with a PyTorch path that is wrong on an edge row, and only there; the dispatcher uses it."""
    op = copy.copy(OPS["topk"])
    right = op.torch_impl
    assert right is not None

    def wrong(logits: torch.Tensor, lengths: torch.Tensor, k: int, max_seq_len: int | None = None, *, lane: int = -1) -> torch.Tensor:
        return right(logits, lengths, k, max_seq_len).masked_fill(lengths.flatten()[: logits.shape[0], None].long() == 0, 0) if lengths.numel() == logits.shape[0] else right(logits, lengths, k, max_seq_len)

    op.torch_impl = wrong
    monkeypatch.setattr(Op, "overload", property(lambda self: wrong if self is op else getattr(torch.ops.dsv4_ops, self.name).default))
    monkeypatch.setattr(wrong, "_schema", torch.ops.dsv4_ops.topk.default._schema, raising=False)
    return op


def test_ours_wrong_on_an_edge_row_is_not_timed_at_full_rows(broken: Op) -> None:
    made = run.Bench("cpu", timer=Once())
    made.run(broken, list(cases.cases(broken, "cpu", (2,), (256,), 16)))
    (row,) = made.rows
    assert not row["ok"] and "us_p50" not in row and row["wrong"].startswith("on the sample '")


def test_a_path_that_is_wrong_judges_nothing(broken: Op) -> None:
    (case,) = cases.cases(broken, "cpu", (300,), (256,), 16)
    assert run.BY_REFERENCE < 300 * 256
    inputs = run.Inputs(case, "cpu", trusted=False)
    inputs.sets[0].args[1][0] = 0
    assert inputs.expected(0)[0][0].tolist() == [-1] * 16
    assert run.Inputs(case, "cpu").expected(0)[0].shape == (300, 16)


def test_a_wrong_op_of_ours_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "faults", lambda op, device: {op.backends[device]: "on the sample 'x': other numbers"})
    assert main(["bench", "mtp_context_lens", "--device", "cpu", "--rows", "2"]) == 1
    assert "WRONG, not timed: on the sample 'x': other numbers" in capsys.readouterr().out


# Peers. Functions of others are played by Python that checks how it is called.


def topk_sample(rows: int = 3, columns: int = 1024, k: int = 512, op: str = "topk") -> tuple[Sample, tuple[torch.Tensor, ...]]:
    (case,) = cases.cases(OPS[op], "cpu", (rows,), (columns,), k)
    sample = case.draw("cpu", 0)
    return sample, outcome(OPS[op], sample, OPS[op].reference(*sample.args, **sample.kwargs))


def judged(found: peers.Provider, sample: Sample, expected: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    assert found.unable(sample) == ""
    got = testing.outputs(found.prepare(sample)())
    found.right(sample, got, expected)
    return got


class VllmOps:
    """vLLM's library: right columns in descending order of score."""

    def cooperative_topk(self, logits: Any, lengths: Any, out: Any, scratch: Any, k: int, longest: int) -> None:
        assert scratch.dtype == torch.uint8 and scratch.numel() == 1 << 20 and longest == logits.shape[1] and out.shape[1] == k
        out.copy_(logits.topk(k, 1).indices)

    persistent_topk = cooperative_topk

    def top_k_per_row_decode(self, logits: Any, next_n: int, lengths: Any, out: Any, rows: int, stride: int, step: int, k: int) -> None:
        assert (next_n, rows, stride, step) == (1, *logits.shape[:1], *logits.stride())
        out.copy_(logits.topk(k, 1).indices)


def test_vllm_is_called_as_its_kernels_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_vllm_ops", VllmOps)
    found = peers.providers("vllm", OPS["topk"], "cuda")
    assert [p.name for p in found] == ["vllm cooperative_topk", "vllm persistent_topk", "vllm top_k_per_row_decode"]
    sample, expected = topk_sample()
    for one in found:
        judged(one, sample, expected)
    small, _ = topk_sample(columns=64, k=16)
    many, _ = topk_sample(rows=65)
    assert [bool(p.unable(small)) for p in found] == [True, True, False] and [bool(p.unable(many)) for p in found] == [True, False, False]


@pytest.mark.parametrize("scales", [0, 2], ids=["limit", "limit, alpha and beta"])
def test_vllms_activation_is_called_with_the_arguments_that_it_has(scales: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Activation:
        default = types.SimpleNamespace(_schema=types.SimpleNamespace(arguments=[None] * (3 + scales)))

        def __call__(self, out: Any, x: Any, limit: float, *given: float) -> None:
            assert given == (1.0, 0.0)[:scales]
            out.copy_(OPS["swiglu"].reference(x, 1.0, 0.0, limit))

    monkeypatch.setattr(peers, "_vllm_ops", lambda: types.SimpleNamespace(silu_and_mul_with_clamp=Activation()))
    (found,) = peers.providers("vllm", OPS["swiglu"], "cuda")
    sample = next(iter(cases.cases(OPS["swiglu"], "cpu", (3,)))).draw("cpu", 0)
    judged(found, sample, testing.outputs(OPS["swiglu"].reference(*sample.args)))
    assert bool(found.unable(Sample("", (sample.args[0], 1.702, 1.0, 7.0)))) == (scales == 0)


def test_flashinfer_is_called_by_its_public_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def ragged(logits: Any, offsets: Any, lengths: Any, k: int) -> torch.Tensor:
        assert offsets.dtype == torch.int32 and not offsets.any()
        return logits.topk(k, 1).indices.int() + offsets[:, None]

    def pages(logits: Any, table: Any, lengths: Any, k: int, *, row_to_batch: Any, page_size: int) -> torch.Tensor:
        chosen = logits.topk(k, 1).indices
        return (table[row_to_batch.long()].gather(1, chosen // page_size) * page_size + chosen % page_size).int()

    monkeypatch.setattr(peers, "_installed", lambda module: module == "flashinfer")
    monkeypatch.setattr(peers, "_imported", lambda module: types.SimpleNamespace(top_k_ragged_transform=ragged, top_k_page_table_transform=pages))
    for name in ("topk", "topk_slots"):
        (found,) = peers.providers("flashinfer", OPS[name], "cuda")
        judged(found, *topk_sample(op=name))


def test_flashmla_is_called_as_its_interface_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["sparse_mla_decode"]

    def with_kvcache(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert given["tile_scheduler_metadata"] == "plan" and given["is_fp8_kvcache"] and given["block_table"] is None and given["cache_seqlens"] is None and given["head_dim_v"] == 512
        out, lse = op.reference(
            given["q"][:, 0], given["k_cache"].squeeze(2), given["indices"][:, 0], given["topk_length"], given["extra_k_cache"].squeeze(2),
            given["extra_indices_in_kvcache"][:, 0], given["extra_topk_length"], given["attn_sink"], scale=given["softmax_scale"],
        )  # fmt: skip
        return out[:, None] * 1.001, lse

    monkeypatch.setattr(peers, "_flashmla_interface", lambda: types.SimpleNamespace(get_mla_metadata=lambda: ("plan", None), flash_mla_with_kvcache=with_kvcache))
    (found,) = peers.providers("flashmla", op, "cuda")
    sample = next(iter(cases.cases(op, "cpu", (2,)))).draw("cpu", 0)
    expected = testing.outputs(op.reference(*sample.args, **sample.kwargs))
    got = judged(found, sample, expected)
    with pytest.raises(AssertionError, match="of its norm"):
        found.right(sample, (got[0] * 1.02, got[1]), expected)
    assert found.unable(op.sized("cpu", 2)) == "it takes 64 or 128 heads"


KERNELS = '''
import torch

def prepare(rows, k, columns, last):
    assert (rows, k, columns) == (3, 512, 1024) and last in (1024, 64)
    def call(logits, lengths, *rest):
        rest[-1].copy_(logits.topk(k, 1).indices)
        if len(rest) > 1:
            chosen = rest[-1].long()
            rest[-1].copy_(rest[1][rest[0].long()].gather(1, chosen // last) * last + chosen % last)
    return call

TOPK_PEERS = {"vllm_x": (None, None), "fi_one": (prepare, lambda *sizes: True), "fi_other": (prepare, lambda *sizes: False)}
SLOT_PEERS = {"fi_pages": (prepare, lambda *sizes: True)}
'''


def test_kernels_of_a_folder_stand_in_for_flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peers.py").write_text(KERNELS)
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "peers", None)  # restored at the end, whatever was there
    del sys.modules["peers"]
    one, other = peers.providers("flashinfer", OPS["topk"], "cuda")
    sample, expected = topk_sample()
    assert (one.name, other.name) == ("flashinfer one", "flashinfer other") and other.unable(sample)
    judged(one, sample, expected)
    again, expected_again = topk_sample()
    again.args[0].neg_()
    got = judged(one, again, testing.outputs(OPS["topk"].reference(*again.args)))
    assert not torch.equal(got[0], expected_again[0]), "one scratch for all sets, results of each"
    (slots,) = peers.providers("flashinfer", OPS["topk_slots"], "cuda")
    judged(slots, *topk_sample(op="topk_slots"))


def test_torch_stands_beside_full_rows_only() -> None:
    (found,) = peers.providers("torch", OPS["topk"], "cpu")
    sample, expected = topk_sample()
    judged(found, sample, expected)
    sample.args[1][0] = 5
    assert "full rows only" in found.unable(sample)


@pytest.mark.parametrize("spoil", [
    lambda c: c[:, :1].expand_as(c),
    lambda c: c.where(c != c[0, 0], -1),
    lambda c: c.where(c != c[0, 0], 5000),
    lambda c: (c + 1) % 1024,
], ids=["twice", "too few", "past the end", "others"])  # fmt: skip
def test_columns_of_a_peer_are_judged_by_scores(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sample, expected = topk_sample()
    peers._same_scores(sample, (expected[0].flip(1),), expected)
    with pytest.raises(AssertionError):
        peers._same_scores(sample, (spoil(expected[0]),), expected)


def test_tied_scores_and_minus_infinity_do_not_hide_a_wrong_column() -> None:
    logits = torch.full((1, 8), 1.0)
    logits[0, 4:] = -torch.inf
    sample = Sample("", (logits, torch.tensor([8], dtype=torch.int32), 6))
    right = torch.tensor([[0, 1, 2, 3, 4, 5]], dtype=torch.int32)
    peers._same_scores(sample, (torch.tensor([[0, 1, 2, 3, 7, 6]], dtype=torch.int32),), (right,))
    with pytest.raises(AssertionError, match="a column is listed twice"):
        peers._same_scores(sample, (torch.tensor([[0, 1, 2, 2, 4, 5]], dtype=torch.int32),), (right,))
    with pytest.raises(AssertionError, match="too few or too many"):
        peers._same_scores(sample, (torch.tensor([[0, 1, 2, 3, 4, -1]], dtype=torch.int32),), (right,))


def test_slots_of_a_peer_are_those_of_the_right_pages() -> None:
    sample, expected = topk_sample(op="topk_slots")
    peers._same_slots(sample, (expected[0].flip(1),), expected)
    with pytest.raises(AssertionError):
        peers._same_slots(sample, (expected[0] + 1,), expected)


@pytest.mark.parametrize(("package", "op", "device", "reason"), [
    ("vllm", "topk", "cuda", "not installed (no module named vllm: pip install vllm)"),
    ("flashinfer", "topk", "cuda", "not installed (no module named flashinfer: pip install flashinfer-python)"),
    ("flashmla", "sparse_mla_decode", "cuda", "not installed (no module named flash_mla: pip install FlashMLA, or vllm, which brings it)"),
    ("vllm", "topk", "cpu", "vllm has kernels for GPUs only"),
    ("flashmla", "topk", "cuda", "this command knows no function of flashmla for topk (it does for sparse_mla_decode)"),
    ("torch", "swiglu", "cpu", "dsv4_ops runs swiglu by PyTorch here itself"),
])  # fmt: skip
def test_what_is_not_measured_has_a_reason(package: str, op: str, device: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_installed", lambda module: False)
    peers._vllm_ops.cache_clear()
    peers._flashmla_interface.cache_clear()
    with pytest.raises(peers.Missing) as raised:
        peers.providers(package, OPS[op], device)
    assert str(raised.value) == reason


def test_a_package_that_does_not_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcudart.so.99: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(peers.Missing, match=r"flashinfer is there but does not import: OSError: libcudart.so.99: cannot open"):
        peers.providers("flashinfer", OPS["topk"], "cuda")


# Bytes and times.


def moved(op: str, rows: int, **sizes: Any) -> int:
    (case,) = cases.cases(OPS[op], "cpu", (rows,), **sizes)
    sample = case.draw("cpu", 0)
    mine = testing.clone_args(sample)
    return least_bytes(OPS[op], sample, outcome(OPS[op], mine, OPS[op].reference(*mine.args, **mine.kwargs)))


def test_bytes_by_hand() -> None:
    assert moved("topk", 3, columns=(1024,), k=512) == 3 * 1024 * 4 + 3 * 4 + 3 * 512 * 4
    assert moved("topk_values", 3, columns=(1024,), k=512) == 3 * 1024 * 4 + 3 * 4 + 3 * 512 * (4 + 4)
    assert moved("swiglu", 5) == 5 * (4096 + 2048) * 2
    assert moved("kv_cache_insert", 8) == 8 * (512 * OPS["kv_cache_insert"].sized("cpu", 8).args[0].element_size() + 8 + 584)
    q_and_out, lse, keys = 2 * 64 * 512 * 2, 64 * 4, 640 * 584
    assert moved("sparse_mla_decode", 2) == 2 * (q_and_out + lse + keys + 640 * 4 + 2 * 4) + 64 * 4
    assert moved("expand_block_table", 4) == 4 * (2 * 256 * 4 + 4 + 1)


def test_percentiles_are_those_of_the_ordered_times() -> None:
    assert timing.percentiles([5.0, 1.0, 4.0, 2.0, 3.0]) == {"us_p20": 2.0, "us_p50": 3.0, "us_p80": 5.0}


def test_host_timer_runs_every_call_and_gives_the_last_result() -> None:
    seen: list[int] = []

    def call(i: int) -> torch.Tensor:
        seen.append(i)
        return torch.tensor(i)

    times, last = timing.HostCalls().measure([lambda i=i: call(i) for i in range(150)])  # type: ignore[misc]
    assert set(seen) == set(range(150)) and [int(t) for t in last] == [149]
    assert 0 < times["us_p20"] <= times["us_p50"] <= times["us_p80"]


# The command.


def test_command_prints_a_table_and_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.json"
    arguments = ["bench", "topk", "mtp_context_lens", "--device", "cpu", "--rows", "1,2", "--columns", "256,8", "--k", "16", "--against", "torch,flashmla", "--json", str(file)]
    assert main(arguments) == 0
    out, facts = capsys.readouterr().out, json.loads(file.read_text())
    assert "say nothing about GPUs" in out.splitlines()[3] and out.rstrip().splitlines()[-2].endswith("times of a CPU say nothing about GPUs")
    assert {(row["op"], row["provider"], row["params"]["rows"], row["params"].get("columns")) for row in facts["rows"]} == {
        *(("mtp_context_lens", "dsv4_ops", rows, None) for rows in (1, 2)), *(("topk", who, rows, 256) for who in ("dsv4_ops", "torch.topk") for rows in (1, 2)),
    }  # fmt: skip
    assert all(row["ok"] for row in facts["rows"])
    assert facts["missing"]["flashmla"].keys() == {"topk", "mtp_context_lens"} and "flashmla (mtp_context_lens, topk): this command knows no function of flashmla for it (it does for sparse_mla_decode)" in out
    assert facts["env"]["torch"] == torch.__version__ and facts["env"]["gpu"] == "cpu" and facts["commit"] == machine.commit()
    assert facts["command"] == "python -m dsv4_ops " + " ".join([*arguments[:3], "--against", "torch,flashmla", "--rows", "1,2", "--columns", "256,8", "--k", "16", "--device", "cpu", "--json", "b.json"])
    assert main(["bench", "--from", str(file)]) == 0
    again = capsys.readouterr().out
    assert again.split("wrote")[0].rstrip() == out.split("wrote")[0].rstrip()


@pytest.mark.parametrize(("arguments", "message"), [
    (["tokp"], "there is no op 'tokp'. Near: topk"),
    (["topk", "--against", "sglang"], "there is no package 'sglang'. There are: vllm, flashinfer, flashmla, torch."),
    (["topk", "--plot", "a.gif"], "--plot: the name must end in .png, .svg, .pdf, got 'a.gif'"),
    (["swiglu", "--columns", "64"], "--columns and --k are for topk, topk_values, topk_slots"),
    (["topk", "--columns", "64"], "no size is left for topk: every row is narrower than k"),
])  # fmt: skip
def test_command_line_that_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(("option", "message"), [("--rows=0", "at least 1"), ("--rows=1,x", "at least 1"), ("--rows=", "at least 1"), ("--rows=-3", "at least 1"), ("--k=0", "at least 1"), ("--k=4097", "at most 4096 entries")])
def test_sizes_are_whole_numbers_and_k_is_one_that_the_op_takes(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "topk", option])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_what_cannot_be_done_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "Bench", None)
    missing = tmp_path / "no" / "a.json"
    (tmp_path / "other.json").write_text('{"rows": []}')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cases_ = [(["topk", "--json", str(missing)], "there is no folder"), (["topk", "--device", "cuda"], "no CUDA device"), (["--from", str(missing)], "holds no results"), (["--from", str(tmp_path / "other.json")], "holds no results")]
    for arguments, message in cases_:
        assert main(["bench", *arguments]) == 4
        assert message in capsys.readouterr().err
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name, *rest))
    assert main(["bench", "topk", "--device", "cpu", "--plot", str(tmp_path / "a.png")]) == 4
    assert capsys.readouterr().err == "error: --plot needs matplotlib: pip install matplotlib (this package's extra `bench`)\n"


def test_what_is_measured_when_it_is_interrupted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = run.Bench.run

    def stops(self: run.Bench, op: Op, sizes: Any) -> None:
        if op.name == "mtp_context_lens":
            raise KeyboardInterrupt
        real(self, op, sizes)

    monkeypatch.setattr(run.Bench, "run", stops)
    file = tmp_path / "b.json"
    assert main(["bench", "local_context_lens", "mtp_context_lens", "--device", "cpu", "--rows", "2", "--json", str(file)]) == 130
    assert [row["op"] for row in json.loads(file.read_text())["rows"]] == ["local_context_lens"] and "interrupted" in capsys.readouterr().err


# The picture.


def facts() -> dict[str, Any]:
    def rows() -> Iterator[dict[str, Any]]:
        for count in (1, 64):
            for columns in (2048, 32768):
                for i, who in enumerate(("dsv4_ops", "torch.topk", "vllm persistent_topk", "flashinfer cub")):
                    us, bytes_ = 5.0 + columns / 4096 + 0.05 * i, count * columns * 4
                    yield {"op": "topk", "case": "full", "params": {"rows": count, "columns": columns, "k": 512, "dtype": "float32"}, "provider": who, "ok": True, "bytes": bytes_, "us_p20": us, "us_p50": us, "us_p80": us, "GBps": 1.0, "copy_share": 0.1, "floor_share": 0.1, "roof_us": max(1.0, bytes_ / 4e6)}  # fmt: skip
        yield {"op": "topk", "case": "full", "params": {"rows": 1, "columns": 2048, "k": 512, "dtype": "float32"}, "provider": "bad", "ok": False, "wrong": "x"}

    env = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "triton": "3.6.0", "cpu": "x", "copy_GBps": 4000.0, "empty_kernel_us": 1.0, "empty_kernel": "an empty kernel", "cuda": "13.0", "python": "3.12"}
    return {"version": "0.1.0", "commit": "abc", "date": "2026-11-30", "env": env, "device": "cuda", "method": "m", "missing": {}, "rows": list(rows())}


def test_picture_has_conditions_lines_labels_and_the_roof(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dsv4_ops.bench import plot

    drawn = plot.figure(facts())
    head = " ".join(text.get_text() for text in drawn.texts)
    for part in ("topk, k = 512, float32: time of a call in a CUDA graph, cold L2", "NVIDIA H200, driver 580", "at abc, 2026-11-30", "4000 GB/s", "1.00 us"):
        assert part in head
    one, many = drawn.axes
    assert (one.get_title(loc="left"), many.get_title(loc="left")) == ("1 row", "64 rows")
    for axes in (one, many):
        assert axes.get_xscale() == axes.get_yscale() == "log"
        labels = {text.get_text().rsplit("  ", 1)[0]: text for text in axes.texts}
        assert labels.keys() >= {"dsv4_ops", "torch.topk", "vllm persistent_topk", "flashinfer cub"} and "bad" not in labels
        places = sorted(axes.transData.transform((1, text.get_position()[1]))[1] for text in labels.values())
        assert min(b - a for a, b in itertools.pairwise(places)) > 8, "labels stand on each other"
    assert any(text.get_text() == "roof: launch  1" for text in one.texts) and any(text.get_text() == "roof: copy  2.1" for text in many.texts)
    for suffix in plot.SUFFIXES:
        plot.draw(facts(), tmp_path / f"a{suffix}")
        assert (tmp_path / f"a{suffix}").stat().st_size > 5000


def test_roof_is_the_longer_of_copy_and_launch_on_the_way_too() -> None:
    pytest.importorskip("matplotlib")
    from dsv4_ops.bench import plot

    roof = plot._roof([{"ok": True, "params": {"rows": n}, "bytes": n * 4000} for n in (1, 100, 100, 10000)], 10.0, 4.0)
    assert [(round(size, 6), round(us, 6)) for size, us in (roof[0], roof[-1])] == [(1, 10), (10000, 10000)]
    assert all(us == pytest.approx(max(size, 10.0)) for size, us in roof)


def test_table_says_what_is_wrong_and_what_did_not_run() -> None:
    row = facts()["rows"][0]
    lines = report.row_lines(row, None)
    assert lines[2] == "topk  rows 1, columns 2048, k 512, dtype float32  (full): 8.19 kB to move"
    assert lines[3].split() == ["dsv4_ops", "5.50", "5.50", "5.50", "1.0", "10.0%", "10.0%"]
    assert report.row_lines(row | {"ok": False, "wrong": "other"}, row)[-1].split(maxsplit=1) == ["dsv4_ops", "WRONG, not timed: other"]
    assert report.row_lines(row | {"ok": False, "skipped": "why"}, row)[-1].split(maxsplit=1) == ["dsv4_ops", "not run: why"]


# A GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_ours_is_faster_than_its_roof_allows_nowhere() -> None:
    made = run.Bench("cuda", ("torch",))
    for name, sizes in (("swiglu", {}), ("topk", {"columns": (8192,)}), ("kv_cache_insert", {})):
        made.run(OPS[name], list(cases.cases(OPS[name], "cuda", (8,), **sizes)))
    assert all(row["ok"] for row in made.rows), made.rows
    assert all(row["us_p50"] > 0.9 * made.floor_us and row["copy_share"] < 1 for row in made.rows)
