"""Faults from public reports, each with its target here and a test named by its id.

``TARGETS`` says what of this package answers each case. A case in ``LATER`` has no test yet, and says why.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TARGETS: dict[str, str] = {
    **dict.fromkeys(["A01", "A03", "A07", "A09", "A11", "A13", "A14", "A15", "A18", "A20", "A22", "B08", "B12"], "topk"),
    **dict.fromkeys(["A05", "A17"], "topk on a GPU, replay of a captured graph"),
    "A25": "csrc/topk_plan.h, launch plan of the CUDA top-k",
    "A21": "global_topk_indices: every one of the k columns is translated",
    "A24": "testing.assert_topk, the checker itself",
    **dict.fromkeys(["B01", "B11"], "mtp_context_lens"),
    **dict.fromkeys(["B04", "B07"], "ragged_context_lens"),
    "B03": "context_lens.is_uniform_decode",
    "B05": "local_context_lens",
    "B10": "topk and the unpadding of its rows",
    "B13": "context_lens, classification of a batch",
    **dict.fromkeys(["C01", "C02", "C05", "C06", "C13", "C20"], "causal_swa_indices, draft_swa_indices"),
    **dict.fromkeys(["C03", "C19"], "build_mixed_sparse_indices"),
    **dict.fromkeys(["C08", "C09"], "sparse_mla_decode"),
    "C11": "packed_page_slots, page_block_span",
    **dict.fromkeys(["C14", "C15"], "global_topk_indices"),
    **dict.fromkeys(["D01", "D02", "D04", "D06", "D09", "D12", "D14", "D15", "D16", "D17", "D18", "D19"], "prepare_dflash_inputs and its capture geometry"),
    "D07": "engine: padding requests of a captured step",
    "D11": "draft_swa_indices (draft_start)",
    **dict.fromkeys(["E01", "E02", "E04", "E07", "E09", "E16", "E17"], "workspace.WorkspaceManager"),
    "E10": "ops inside a CUDA memory pool: outputs only",
    **dict.fromkeys(["E11", "E12"], "graphs.GraphPool: outputs outside the pool, a pool that outlives its graphs"),
    "E14": "dflash, capture geometry of draft and target",
    "E15": "engine: step inputs padded to capture sizes",
    **dict.fromkeys(["F01", "F02", "F04", "F05", "F06", "F08", "F09"], "swiglu, SwiGLUParams"),
    **dict.fromkeys(["G01", "G02", "G03", "G06", "G07", "G09", "G11", "G12"], "capability"),
    **dict.fromkeys(["H01", "H03", "H04", "H06", "H07", "H09", "H14", "H15"], "sampling"),
    "H10": "engine: plan of compressor windows",
    "H12": "engine: --verify and its margins",
    "H13": "distributed.broadcast_samples: one rank decides",
    **dict.fromkeys(["I01", "I03", "I04", "I14", "I16"], "every registered op"),
    **dict.fromkeys(["I05", "I17"], "kv_cache_insert"),
    "I08": "Triton kernels under torch.compile",
    **dict.fromkeys(["I09", "I10", "I12", "I13"], "dsv4_ops.passes"),
    **dict.fromkeys(["J01", "J03", "J05", "J06", "J07", "J09", "J11", "J13"], "kv_cache_insert, kv_cache_gather"),
}

LATER: dict[str, str] = {}


def named_tests(case: str) -> list[str]:
    pattern = re.compile(rf"def (test_case_{case}_\w+)\(")
    return [name for path in Path(__file__).parent.glob("test_*.py") for name in pattern.findall(path.read_text())]


@pytest.mark.parametrize("case", sorted(TARGETS))
def test_case_is_tested(case: str) -> None:
    assert named_tests(case), f"{case} ({TARGETS[case]}) has no test named test_case_{case}_..."


def test_cases_that_wait_say_why_and_have_no_test() -> None:
    for case, why in LATER.items():
        assert why
        assert not named_tests(case), f"{case} is tested now: move it to TARGETS"


def test_the_table_is_complete() -> None:
    assert not set(TARGETS) & set(LATER)
    assert len(TARGETS) + len(LATER) == 111


def test_no_case_test_without_a_case() -> None:
    named = {m for path in Path(__file__).parent.glob("test_*.py") for m in re.findall(r"def test_case_([A-J]\d\d)_", path.read_text())}
    assert named <= set(TARGETS)
