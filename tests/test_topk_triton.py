"""The Triton top-k on a GPU: what machines without the compiled part run. Interpreted on CPU: test_topk.py, test_triton.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4_ops.topk import _topk_torch, _topk_triton, _topk_values_triton
from tests.test_topk_cuda import I32, INF, KINDS, captured, lens, row_of, scores, within

needs_triton = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="Triton is not installed" if torch.cuda.is_available() else "no CUDA device",
)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_draws(kind: str) -> None:
    """Up to 33 blocks a row; the draws of the compiled kernel at smaller numbers."""
    generator = torch.Generator(device="cuda").manual_seed(len(kind))
    host = torch.Generator().manual_seed(len(kind))

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=host))

    for draw in range(120):
        rows, width = number(0, 10) if draw % 7 else number(10, 300), number(1, (300, 5000, 70000)[draw % 3])
        k = (1, 64, 512, 1000, 2048, 4096)[number(0, 6)] if draw % 2 else number(1, min(width, 4096) + 1)
        offset = number(0, 5)
        logits = scores(kind, rows, width + 7, generator).to(torch.bfloat16 if draw % 4 == 0 else torch.float32)[:, offset : offset + width]
        near = torch.randint(-3, width + 4, (rows,), generator=generator, device="cuda")
        far = torch.randint(-(2**31), 2**31, (rows,), generator=generator, device="cuda")
        lengths = torch.where(torch.rand(rows, generator=generator, device="cuda") < 0.2, far, near).to(torch.int64 if draw % 5 == 0 else I32)
        lengths = lengths.repeat_interleave(2)[::2] if draw % 3 == 0 else lengths
        lengths = lengths[: number(0, rows + 1)] if draw % 6 == 0 else lengths
        bound = number(0, width + 3) if draw % 8 == 0 else None
        expected = _topk_torch(logits, lengths, k, bound)
        wanted = torch.where(expected >= 0, logits.gather(1, expected.clamp(min=0).long()), -INF)
        where = f"draw {draw}: {rows} x {width}, k {k}, offset {offset}, {logits.dtype}"
        values, indices = _topk_values_triton(logits, lengths, k, bound)
        assert torch.equal(indices, expected) and torch.equal(_topk_triton(logits, lengths, k, bound), expected), where
        bits = torch.int32 if logits.dtype == torch.float32 else torch.int16
        assert torch.equal(values.view(bits), wanted.view(bits)), where


@needs_triton
def test_graph_replay_with_changed_lengths_and_scores() -> None:
    rows, width, k = 17, 9000, 512
    logits, lengths = torch.randn(rows, width, device="cuda"), torch.full((rows,), width, dtype=I32, device="cuda")
    graph, (values, indices) = captured(lambda: _topk_values_triton(logits, lengths, k))
    for draw in range(20):
        logits.copy_((torch.randn_like(logits) * 4).round() if draw % 2 else torch.randn_like(logits))
        lengths.copy_(torch.randint(-5, (9100, 600, 3000)[draw % 3], (rows,), device="cuda"))
        values.fill_(7), indices.fill_(77)
        within(60, graph.replay)
        expected = _topk_torch(logits, lengths, k)
        assert torch.equal(indices, expected), draw
        assert torch.equal(values, torch.where(expected >= 0, logits.gather(1, expected.clamp(min=0).long()), -INF)), draw


@needs_triton
def test_compiles_once_for_any_rows_sizes_and_addresses() -> None:
    from dsv4_ops._triton.topk import topk_kernel

    def call(rows: int, width: int, k: int, offset: int, lengths: torch.Tensor) -> None:
        logits = torch.randn(rows, width + offset, device="cuda")[:, offset:]
        assert torch.equal(_topk_triton(logits, lengths, k), _topk_torch(logits, lengths, k))

    def compiled() -> int:
        return len(topk_kernel.device_caches[torch.cuda.current_device()][0])

    topk_kernel.device_caches.pop(torch.cuda.current_device(), None)  # what other tests have compiled
    call(3, 1000, 100, 0, lens(1000, 7, 30))
    before = compiled()
    for rows in (1, 2, 16, 17, 32):
        for width, k, offset in ((1024, 16, 0), (1, 1, 0), (333, 512, 1), (4097, 64, 3)):
            for lengths in (torch.full((rows,), width, dtype=I32, device="cuda"), torch.full((rows + 1,), 16, dtype=I32, device="cuda")[1:]):
                call(rows, width, k, offset, lengths)
    call(16, 160, 16, 0, torch.full((1, 16), 160, dtype=I32, device="cuda"))
    assert compiled() == before
    call(3, 1000, 100, 0, torch.full((3,), 1000, device="cuda"))  # int64 lengths
    assert compiled() == before + 1, "the cache of compiled kernels is somewhere else in this Triton"


@needs_triton
def test_row_stride_past_2_to_the_31(room: int) -> None:
    stride = 2**31 + 5
    if room < 10 << 30:
        pytest.skip(f"needs 10 GiB of GPU memory, {room >> 30} are free")
    logits = torch.zeros(2 * stride + 1000, dtype=torch.bfloat16, device="cuda").as_strided((3, 1000), (stride, 1))
    for i in range(3):
        logits[i, 10 * i + 900] = 7
    assert _topk_triton(logits, lens(1000, 1000, 1000), 512).tolist() == [row_of(range(511), 10 * i + 900, k=512) for i in range(3)]


@needs_triton
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_runs_on_the_device_of_its_tensors() -> None:
    logits, lengths = torch.randn(4, 5000, device="cuda:1"), torch.full((4,), 5000, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(_topk_triton(logits, lengths, 300), _topk_torch(logits, lengths, 300))


@needs_triton
def test_serves_where_the_compiled_part_is_missing() -> None:
    program = (
        "import torch, dsv4_ops\n"
        "from dsv4_ops.topk import TOPK, _topk_torch\n"
        "logits, lengths = torch.randn(5, 3000, device='cuda'), torch.tensor([3000, 1, 700, -1, 9999], device='cuda')\n"
        "assert torch.equal(dsv4_ops.topk(logits, lengths, 512), _topk_torch(logits, lengths, 512))\n"
        "print(TOPK.backends['cuda'])\n"
    )
    environment, root = {**os.environ, "DSV4_OPS_DISABLE_C": "1"}, Path(__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0 and result.stdout.strip() == "triton", result.stderr
    assert "without its compiled" not in result.stderr


@needs_triton
@pytest.mark.parametrize("k", [1, 16])
def test_case_I08_cuda_a_launch_whose_only_effect_is_a_buffer_is_kept(k: int) -> None:
    """The compiler sees the kernel itself and has to find out that it writes ``indices``."""
    from torch._inductor.utils import run_and_get_code

    from dsv4_ops._triton import topk as kernels

    @torch.library.triton_op(f"dsv4_ops_tests::topk_seen_{k}", mutates_args={"indices"})
    def into(logits: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor) -> None:
        arguments = kernels.arguments(logits, lengths, indices.shape[1], None, None, indices)
        torch.library.wrap_triton(kernels.topk_kernel)[(logits.shape[0],)](*arguments, BITS=32, BLOCK=kernels.BLOCK)

    def step(logits: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor) -> None:
        into(logits, lengths, indices)

    logits, lengths = torch.randn(3, 3000, device="cuda"), lens(3000, 5, 0)
    indices = torch.full((3, k), 77, dtype=I32, device="cuda")
    _, codes = run_and_get_code(torch.compile(step, fullgraph=True), logits, lengths, indices)
    assert torch.equal(indices, _topk_torch(logits, lengths, k))
    assert sum(len(re.findall(r"topk_kernel\w*\.run\(", code)) for code in codes) == 1
