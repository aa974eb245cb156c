"""Gates: made-up tables, published FlashInfer builds, and the handed cases of area G."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_ops import _flashinfer_table, capability
from dsv4_ops._flashinfer_table import build_for, checked_table, installed_dispatch_table
from dsv4_ops._module_slice import PackageSlice, SliceError, find_package
from dsv4_ops.capability import (
    STORAGE_OFFSETS,
    Support,
    accepts_keyword,
    cooperative_topk_supported,
    explain,
    has_sparse_mla_decode_config,
    packed_page_arguments,
    pad_heads,
    pad_indexer_heads,
    paged_logits_states,
    paged_logits_supported,
    require_sparse_mla_decode,
    required_sparse_topk,
    select_sparse_width,
)
from dsv4_ops.errors import ArgumentDtypeError, ArgumentError, UnsupportedError

HEADS = (8, 16, 32, 64, 128)
OLD = frozenset((h, k) for h in HEADS for k in (128, 512, 1024))
NEW = frozenset((h, k) for h in HEADS for k in (128, 192, 256, 512, 1024))
SM120 = (12, 0)


class Envelope:
    """Answers only ``in``, only for tuples of exactly int, as the newest builds do."""

    def __contains__(self, pair: object) -> bool:
        if type(pair) is not tuple or [type(x) for x in pair] != [int, int]:
            return False
        return 1 <= pair[0] <= 128 and pair[1] >= 1


# Handed cases.


def test_case_G01_missing_pair_is_refused_at_construction_with_the_nearest_width() -> None:
    assert has_sparse_mla_decode_config(32, 256, SM120, table=OLD) is Support.NO
    with pytest.raises(UnsupportedError) as caught:
        require_sparse_mla_decode(32, 256, SM120, table=OLD)
    text = str(caught.value)
    for words in ("32 heads", "top-k 256", "sm_120", "nearest width it has, 512", "flashinfer-python>=0.6.18"):
        assert words in text
    require_sparse_mla_decode(32, 512, SM120, table=OLD)


def test_case_G02_matrix_of_heads_and_widths() -> None:
    assert all(has_sparse_mla_decode_config(h, k, SM120, table=NEW) for h in HEADS for k in (128, 192, 256, 512, 1024))
    for heads in (4, 12, 96):
        assert all(has_sparse_mla_decode_config(heads, k, SM120, table=NEW) is Support.NO for k in (128, 192, 256, 512, 1024))
    for top_k in (384, 2048):
        assert all(has_sparse_mla_decode_config(h, top_k, SM120, table=NEW) is Support.NO for h in HEADS)


def test_case_G03_draft_width_is_rounded_to_one_that_is_there() -> None:
    tables = [{128, 512, 1024}, {128, 192, 512}, {128, 192, 256, 512, 1024}, {128}]
    entries = 128 + 5
    assert [select_sparse_width(entries, t) for t in tables] == [512, 192, 192, None]
    assert [select_sparse_width(required_sparse_topk(128, 5, non_causal=True), t) for t in tables] == [512, 192, 192, None]
    assert [select_sparse_width(required_sparse_topk(128), t) for t in tables] == [128] * 4
    assert [select_sparse_width(entries, t, 64) for t in (OLD, NEW, Envelope())] == [512, 192, 192]
    assert select_sparse_width(entries, NEW, 12) is None


def test_case_G06_keyword_that_a_function_lacks() -> None:
    def without(q: int) -> None: ...

    def with_it(q: int, *, kv_scale_format: str = "ue8m0") -> None: ...

    def anything(q: int, **kwargs: Any) -> None: ...

    def positional(kv_scale_format: int, /) -> None: ...

    hidden = dict.fromkeys  # some builtins have a signature, this one shows none of these names
    assert [accepts_keyword(f, "kv_scale_format") for f in (with_it, without, anything, hidden, positional, min, type)] == [True, False, True, False, False, False, False]
    assert accepts_keyword(functools.wraps(with_it)(lambda *a, **k: None), "kv_scale_format")
    assert accepts_keyword(functools.partial(with_it, 1), "kv_scale_format")
    # lambdas of one code object are different functions
    assert [accepts_keyword(f, "x") for f in (lambda x: x, lambda y: y)] == [True, False]


def test_signature_is_read_once_for_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = capability._takes
    monkeypatch.setattr(capability, "_takes", lambda f, n: calls.append((f, n)) or real(f, n))

    def function(a: int) -> None: ...

    assert accepts_keyword(function, "a") and accepts_keyword(function, "a") and not accepts_keyword(function, "b")
    assert calls == [(function, "a"), (function, "b")]


def test_case_G07_clusters_by_capability() -> None:
    archs = [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (8, 9)]
    for size in (2, 4, 8, 16):
        assert [cooperative_topk_supported(a, size) for a in archs] == [True, True, True, False, False, False]
    assert not cooperative_topk_supported((9, 0), 32) and not cooperative_topk_supported((9, 0), 3)
    assert not cooperative_topk_supported((13, 0), 4), "a chip nobody has seen takes the path that always works"
    assert all(cooperative_topk_supported(a, 1) for a in archs), "a cluster of one is an ordinary launch"


def test_case_G09_indexer_heads_are_padded_with_zeros() -> None:
    q, k, weights = torch.randn(5, 16, 128), torch.randn(40, 128), torch.randn(5, 16)

    def logits(q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # Head by head, in order, so that adding zeros at the end cannot change a rounding.
        total = torch.zeros(q.shape[0], k.shape[0])
        for head in range(q.shape[1]):
            total = total + weights[:, head, None] * (q[:, head] @ k.T).relu()
        return total

    padded_q, padded_weights = pad_indexer_heads(q, weights, (32, 64))
    assert padded_q.shape == (5, 32, 128) and padded_weights.shape == (5, 32)
    assert torch.equal(logits(padded_q, padded_weights), logits(q, weights))
    assert [pad_heads(h, (32, 64)) for h in (1, 16, 32, 33, 64, 65, 128)] == [32, 32, 32, 64, 64, None, None]
    with pytest.raises(UnsupportedError, match="at most 64 heads, found 128"):
        pad_indexer_heads(torch.randn(1, 128, 8), torch.randn(1, 128), (32, 64))
    with pytest.raises(ArgumentError, match="weights must be one for each of the 16 heads"):
        pad_indexer_heads(q, weights[:, :8])


def test_case_G11_packed_pages_are_remapped_exactly_once() -> None:
    def ignores_page_stride(q: int, slots: int) -> None: ...

    def has_flag(q: int, slots: int, sparse_indices_are_storage_offsets: bool) -> None: ...

    slots = torch.tensor([197, -1, 0], dtype=torch.int32)
    for function, flag in ((ignores_page_stride, {}), (has_flag, {STORAGE_OFFSETS: True})):
        sent, keywords = packed_page_arguments(function, slots, 64, 256)
        assert sent.tolist() == [773, -1, 0] and keywords == flag
    sent, keywords = packed_page_arguments(has_flag, slots, 64, 64)
    assert sent.tolist() == [197, -1, 0] and keywords == {STORAGE_OFFSETS: True}


def test_case_G12_records_a_page() -> None:
    assert [paged_logits_supported(s) for s in (2, 16, 32, 64, 256)] == [False, False, True, True, False]
    assert (paged_logits_states(256, 128), paged_logits_states(256, 4)) == (2, 64)
    with pytest.raises(ArgumentError, match="multiple of compress_ratio 128, got 64"):
        paged_logits_states(64, 128)
    assert "2 (256 / 128)" in explain("paged_logits", 256, 128) and "4096 or 8192 tokens" in explain("paged_logits", 256, 128)


# Answers.


def test_unknown_and_no_are_false() -> None:
    assert Support.YES and not Support.NO and not Support.UNKNOWN
    assert Support.UNKNOWN == "unknown" and str(Support.YES) == "yes" and f"{Support.NO}" == "no"


def test_integers_of_other_types_are_asked_as_plain_ones() -> None:
    assert has_sparse_mla_decode_config(np.int64(64), torch.tensor(192), SM120, table=Envelope()) is Support.YES
    assert has_sparse_mla_decode_config(64, 192, (np.int32(12), np.int32(1)), table=Envelope()) is Support.YES


@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (13, 0)])
def test_other_architectures(arch: tuple[int, int]) -> None:
    assert has_sparse_mla_decode_config(64, 128, arch, table=NEW) is Support.NO
    with pytest.raises(UnsupportedError, match=rf"architecture: needs sm_120 or sm_121, found sm_{arch[0]}{arch[1]}"):
        require_sparse_mla_decode(64, 128, arch, table=NEW)


class Broken:
    def __contains__(self, pair: object) -> bool:
        raise RuntimeError("no driver")


CHANGED: dict[str, tuple[Any, str]] = {
    "raises": (Broken(), "RuntimeError: no driver"),
    "not a container": (7, "does not answer"),
    "triples": (frozenset((h, k, 64) for h, k in NEW), "no longer"),
    "widths only": ({128, 192}, "no longer"),
    "names": ({"h64_k128"}, "no longer"),
    "empty": (frozenset(), "no longer"),
    "answers yes to all": (type("All", (), {"__contains__": lambda self, pair: True})(), "holds the pair (0, 0)"),
    "other order": (frozenset((k * 1000, h) for h, k in NEW), "no longer"),
}


@pytest.mark.parametrize("label", CHANGED)
def test_changed_table_is_unknown_and_says_so(label: str) -> None:
    table, words = CHANGED[label]
    assert has_sparse_mla_decode_config(64, 128, SM120, table=table) is Support.UNKNOWN
    with pytest.raises(UnsupportedError) as caught:
        require_sparse_mla_decode(64, 128, SM120, table=table)
    assert words in str(caught.value) and "pip install 'flashinfer-python>=" in str(caught.value)


def test_everything_unmet_is_listed() -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_sparse_mla_decode(12, 200, (9, 0), table=OLD)
    assert [line.split(":")[0] for line in caught.value.unmet] == ["architecture", "heads and top-k"]
    assert "pad the heads to 16 and use width 512" in str(caught.value).lower()


def test_no_build_is_promised_that_does_not_exist() -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_sparse_mla_decode(200, 128, SM120, table=NEW)
    assert "No known build has it" in str(caught.value) and "pip install" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 128, SM120), ArgumentError, "num_q_heads must be at least 1, got 0"),
        ((64, -1, SM120), ArgumentError, "top_k must be at least 1, got -1"),
        ((64.0, 128, SM120), ArgumentDtypeError, "num_q_heads must be an integer, got float"),
        ((True, 128, SM120), ArgumentDtypeError, "num_q_heads must be an integer, got bool"),
        ((64, 128, 120), ArgumentError, "arch must be a compute capability as (12, 0), got 120"),
        ((64, 128, "sm_120"), ArgumentError, "arch must be a compute capability"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    for function in (has_sparse_mla_decode_config, require_sparse_mla_decode):
        with pytest.raises(error) as caught:
            function(*arguments, table=NEW)
        assert words in str(caught.value)


def test_explain_prints_met_and_unmet() -> None:
    text = explain("sparse_mla_decode", 32, 256, SM120, table=OLD)
    assert [line.split("|")[0].strip() for line in text.splitlines()[1:3]] == ["ok", "NO"]
    assert "fix: Use the nearest width it has, 512" in text
    with pytest.raises(ArgumentError, match="gate must be one of 'sparse_mla_decode'"):
        explain("nothing")


# The installed library.


@pytest.fixture
def fake_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a package called flashinfer that must not be imported, with the given table module."""

    def make(source: str | None, version: str = "9.9", name: str = "_sparse_mla_sm120.py", **others: str) -> Path:
        root = tmp_path / version
        (root / "flashinfer" / "mla").mkdir(parents=True)
        (root / "flashinfer" / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (root / "flashinfer" / "mla" / "__init__.py").write_text("import cuda_driver\n")
        if source is not None:
            path = root / "flashinfer" / "mla" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        for other, text in others.items():
            path = root / "flashinfer" / "mla" / (other.replace("__", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        info = root / f"flashinfer_python-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(root))
        importlib.invalidate_caches()
        return root

    yield make
    assert "flashinfer" not in sys.modules


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flashinfer_table, "find_package", lambda name: None)
    assert has_sparse_mla_decode_config(64, 128, SM120) is Support.NO
    with pytest.raises(UnsupportedError, match=r"none installed. Install a build that has it: pip install 'flashinfer-python>=0.6.14'"):
        require_sparse_mla_decode(64, 128, SM120)


ENVELOPE_SOURCE = """
from __future__ import annotations
import enum
from dataclasses import dataclass
import torch
from ..autotuner import AutoTuner
from ._numbers import MOST

@dataclass(frozen=True)
class _Family:
    least: int = 1
    tuner: AutoTuner | None = None

_FAMILIES = {1: _Family()}

class _Envelope:
    def __init__(self, model: int) -> None:
        self.model = model
    def __contains__(self, pair: object) -> bool:
        if not isinstance(pair, tuple) or not all(type(x) is int for x in pair):
            return False
        return 1 <= pair[0] <= MOST and pair[1] >= _FAMILIES[self.model].least
    def device(self) -> torch.device:
        return torch.device("cuda")

_DECODE_DSV4_DISPATCH = _Envelope(1)
print("module level code must not run")
"""


def test_table_is_read_without_importing(fake_install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake_install(ENVELOPE_SOURCE, _numbers="import torch\nMOST = 128\n")
    known = installed_dispatch_table()
    assert known.version == "9.9" and not known.problem
    assert has_sparse_mla_decode_config(12, 133, SM120) is Support.YES and has_sparse_mla_decode_config(129, 133, SM120) is Support.NO
    assert capsys.readouterr().out == ""


def test_reexported_table_is_followed(fake_install: Any) -> None:
    fake_install(
        "from ._api import (\n    _DECODE_DSV4_DISPATCH as _DECODE_DSV4_DISPATCH,\n)\n",
        name="_sparse_mla_sm120/__init__.py",
        _sparse_mla_sm120___api="import torch\nfrom ._policy import *\n",
        _sparse_mla_sm120___policy="TOPKS = (128, 192)\n_DECODE_DSV4_DISPATCH = set()\nfor h in (8, 64):\n    for k in TOPKS:\n        _DECODE_DSV4_DISPATCH.add((h, k))\n",
    )
    assert has_sparse_mla_decode_config(64, 192, SM120) is Support.YES and has_sparse_mla_decode_config(64, 512, SM120) is Support.NO


UNREADABLE: dict[str, tuple[str | None, str]] = {
    "no module": (None, "flashinfer has no module mla._sparse_mla_sm120"),
    "no table": ("x = 1\n", "has no _DECODE_DSV4_DISPATCH"),
    "broken source": ("def f(:\n", "cannot be read"),
    "from the compiled module": ("from .._build import query\n_DECODE_DSV4_DISPATCH = query(1)\n", "cannot be evaluated without importing"),
    "from torch": ("import torch\n_DECODE_DSV4_DISPATCH = torch.ops.x.y()\n", "NameError"),
    "from a library": ("from tvm import TABLE as _DECODE_DSV4_DISPATCH\n", "needs tvm"),
    "circle": ("from ._sparse_mla_sm120 import _DECODE_DSV4_DISPATCH\n", "imported in a circle"),
    "None": ("_DECODE_DSV4_DISPATCH = None\n", "it is None"),
    "fails when asked": ("class T:\n    def __contains__(self, pair):\n        return driver.ask(pair)\n_DECODE_DSV4_DISPATCH = T()\n", "NameError: name 'driver'"),
}


@pytest.mark.parametrize("label", UNREADABLE)
def test_missing_or_unreadable_table_is_unknown(fake_install: Any, label: str) -> None:
    source, words = UNREADABLE[label]
    fake_install(source)
    assert has_sparse_mla_decode_config(64, 128, SM120) is Support.UNKNOWN
    with pytest.raises(UnsupportedError) as caught:
        require_sparse_mla_decode(64, 128, SM120)
    text = str(caught.value)
    assert words in text and "9.9" in text and "64 query heads and top-k 128" in text and "pip install 'flashinfer-python>=0.6.14'" in text


def test_table_is_read_once_a_version(fake_install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []

    class Counting(PackageSlice):
        def value(self, module: str, name: str) -> Any:
            reads.append(self.root)
            return super().value(module, name)

    monkeypatch.setattr(_flashinfer_table, "PackageSlice", Counting)
    first = fake_install(f"_DECODE_DSV4_DISPATCH = {set(OLD)!r}\n", "9.1")
    assert not has_sparse_mla_decode_config(64, 192, SM120) and has_sparse_mla_decode_config(64, 128, SM120)
    second = fake_install(f"_DECODE_DSV4_DISPATCH = {set(NEW)!r}\n", "9.2")
    assert has_sparse_mla_decode_config(64, 192, SM120) and has_sparse_mla_decode_config(64, 128, SM120)
    assert reads == [first / "flashinfer", second / "flashinfer"]


def test_imported_module_is_asked_rather_than_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    live = types.ModuleType("flashinfer.mla._sparse_mla_sm120")
    live._DECODE_DSV4_DISPATCH = NEW  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, live.__name__, live)
    assert has_sparse_mla_decode_config(64, 192, SM120) is Support.YES
    del live._DECODE_DSV4_DISPATCH
    assert has_sparse_mla_decode_config(64, 192, SM120) is Support.UNKNOWN


def test_missing_build_tools_are_listed(fake_install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_install(f"_DECODE_DSV4_DISPATCH = {set(NEW)!r}\n")
    monkeypatch.setattr(_flashinfer_table, "_is_installed", lambda project: False)
    monkeypatch.setattr(shutil, "which", lambda *a, **k: None)
    with pytest.raises(UnsupportedError, match="build tools: needs flashinfer-jit-cache, or nvcc and ninja, found no nvcc, no ninja"):
        require_sparse_mla_decode(64, 128, SM120)
    monkeypatch.setattr(shutil, "which", lambda name, *a, **k: name)
    require_sparse_mla_decode(64, 128, SM120)
    monkeypatch.setattr(shutil, "which", lambda *a, **k: None)
    monkeypatch.setattr(_flashinfer_table, "_is_installed", lambda project: project == "flashinfer-jit-cache")
    require_sparse_mla_decode(64, 128, SM120)


# Published builds.

BUILDS = ("0.6.2", "0.6.15", "0.6.18.post1", "0.7.2.post1")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4_ops" / "wheels"


@functools.cache
def installed(version: str) -> Path:
    """A folder with that build, installed once without its dependencies."""
    target = CACHE / f"flashinfer-{version}"
    if not (target / "flashinfer").is_dir():
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check", "--target", str(partial), f"flashinfer-python=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(partial, ignore_errors=True)
            pytest.skip(f"flashinfer-python=={version} cannot be installed here (no network, or no pip)")
        try:
            partial.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(partial, ignore_errors=True)
    return target


@pytest.fixture
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(str(installed(request.param)))
    importlib.invalidate_caches()
    yield request.param
    assert not any(name.split(".")[0] == "flashinfer" for name in sys.modules)


def answers(heads: tuple[int, ...], widths: tuple[int, ...]) -> set[tuple[int, int]]:
    return {(h, k) for h in heads for k in widths if has_sparse_mla_decode_config(h, k, SM120) is Support.YES}


@pytest.mark.parametrize("build", BUILDS, indirect=True)
def test_published_build(build: str) -> None:
    heads, widths = (1, 4, *HEADS, 12, 96, 129), (64, 128, 133, 192, 256, 384, 512, 1024, 2048)
    known = installed_dispatch_table()
    assert known.version == build
    if build == "0.6.2":
        assert known.table is None and "has no module mla._sparse_mla_sm120" in known.problem
        assert has_sparse_mla_decode_config(64, 128, SM120) is Support.UNKNOWN
        return
    expected = {"0.6.15": set(OLD), "0.6.18.post1": set(NEW), "0.7.2.post1": {(h, k) for h in heads if h <= 128 for k in widths}}[build]
    assert answers(heads, widths) == expected
    assert select_sparse_width(133, known.table, 64) == {"0.6.15": 512, "0.6.18.post1": 192, "0.7.2.post1": 192}[build]
    assert has_sparse_mla_decode_config(64, 128, (9, 0)) is Support.NO


@pytest.mark.parametrize("build", BUILDS, indirect=True)
def test_error_for_a_published_build(build: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_sparse_mla_decode(64, 192, (9, 0))
    text = str(caught.value)
    assert "64 heads" in text and "top-k 192" in text and "found sm_90" in text
    if build in ("0.6.2", "0.6.15"):
        assert build in text and "flashinfer-python>=0.6.18" in text
    if build == "0.6.15":
        assert "nearest width it has, 512" in text


@pytest.mark.parametrize("build", BUILDS, indirect=True)
def test_advice_on_what_to_install_is_true(build: str) -> None:
    from packaging.version import Version

    for heads, width in [(64, 128), (64, 192), (12, 133), (129, 128)]:
        advice = build_for(heads, width)
        promised = bool(advice) and Version(build) >= Version(advice.split(">=")[1].rstrip("'."))
        assert bool(has_sparse_mla_decode_config(heads, width, SM120)) == promised


@pytest.mark.parametrize("build", BUILDS[1:], indirect=True)
def test_keywords_of_a_published_build(build: str) -> None:
    root = find_package("flashinfer")
    assert root is not None
    source = PackageSlice("flashinfer", root)
    names, has_any = source.parameters("mla", "trtllm_batch_decode_sparse_mla_dsv4")
    assert {"sparse_indices", "swa_topk_lens"} <= names and not has_any
    assert (STORAGE_OFFSETS in names) == (build == "0.7.2.post1")
    with pytest.raises(SliceError, match="has no nothing_of_the_kind"):
        source.parameters("mla", "nothing_of_the_kind")


@pytest.mark.parametrize("version", BUILDS[-1:])
def test_gates_touch_neither_cuda_nor_flashinfer(version: str) -> None:
    script = (
        "import sys, torch\n"
        "from dsv4_ops.capability import *\n"
        "print(has_sparse_mla_decode_config(64, 192, (12, 0)), 'ok |' in explain('sparse_mla_decode', 64, 192, (12, 0)))\n"
        "assert not torch.cuda.is_initialized()\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('flashinfer', 'triton', 'cuda', 'tvm_ffi')])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed(version)), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["yes True", "[]"]


def test_tables_are_only_ever_asked_by_membership() -> None:
    asked: list[Any] = []

    class Spy:
        def __contains__(self, pair: object) -> bool:
            asked.append(pair)
            return pair in NEW

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("iterated")

    assert has_sparse_mla_decode_config(64, 192, SM120, table=Spy())
    assert checked_table("given", Spy(), "").table is not None
    assert asked and all(type(p) is tuple and [type(x) for x in p] == [int, int] for p in asked)
