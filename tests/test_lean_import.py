"""Importing the package registers ops and does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("triton", "flashinfer", "flash_mla", "deep_gemm", "vllm", "transformers", "safetensors", "tqdm")

PROBE = """
import builtins, json, sys
builtins.heavy_imports = []
import torch
before, modules = list(builtins.heavy_imports), set(sys.modules)
import dsv4_ops
print(json.dumps({
    "heavy": [n for n in builtins.heavy_imports if n not in before],
    "modules": sorted(set(sys.modules) - modules),
    "cuda": torch.cuda.is_initialized(),
    "file": dsv4_ops.__file__,
    "threads": torch.get_num_threads() == int(sys.argv[1]),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "grad": torch.is_grad_enabled(),
}))
"""


def probe(tmp_path: Path, **env: str) -> dict[str, object]:
    # Stand-ins that note their own import: they show an import on machines that do not have the package, and a mere
    # find_spec, which is allowed, does not run them.
    for name in HEAVY:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import builtins\nbuiltins.heavy_imports.append(__name__)\n")
    result = subprocess.run(
        [sys.executable, "-c", PROBE, "2"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "2", **env},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "importing prints or warns"
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def test_import_loads_nothing_heavy_and_touches_no_device(tmp_path: Path) -> None:
    answer = probe(tmp_path)
    assert answer["heavy"] == []
    assert answer["cuda"] is False
    assert not [m for m in answer["modules"] if m.split(".")[0] in HEAVY or m.startswith(("torch._inductor", "torch._dynamo", "dsv4_ops.engine", "dsv4_ops.passes"))]  # type: ignore[attr-defined]


def test_import_changes_no_global_setting(tmp_path: Path) -> None:
    answer = probe(tmp_path)
    assert answer["threads"] and answer["grad"] and not answer["deterministic"]


def test_import_with_every_switch_set(tmp_path: Path) -> None:
    answer = probe(tmp_path, DSV4_OPS_DISABLE_C="1", DSV4_OPS_TRACE="1", DSV4_OPS_DEBUG_WORKSPACE="1")
    assert answer["heavy"] == [] and "dsv4_ops._C" not in answer["modules"]  # type: ignore[operator]
