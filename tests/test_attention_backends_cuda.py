"""FlashMLA and the CUDA kernels as back ends, on a GPU: the op's contract by the conformance kit, against fp64, in graphs and compiled programs.

FlashMLA is the installed one, or the one whose pieces lie in PEERS_DIR (``flash_mla_interface.py`` and ``_flashmla_C.abi3.so``, or ``.so.xz``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention
from dsv4_ops import SparseMLADecode, _decode_backends, _flashmla, sparse_key_rows, sparse_mla_decode, testing
from dsv4_ops.errors import UnsupportedError
from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE
from tests.test_sparse_decode import batch, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SCALE = 512**-0.5
FORMS = [(64, (128, 0)), (128, (128, 512)), (64, (133, 512)), (32, (192, 100)), (100, (70, 1))]


@pytest.fixture(scope="module", autouse=True)
def _pieces() -> Iterator[None]:
    """A FlashMLA to be found: PEERS_DIR's pieces laid out as they lie in vLLM, where none is installed."""
    peers, path = os.environ.get("PEERS_DIR"), list(sys.path)
    if _flashmla.installed().module is None and peers:
        attention.flashmla(Path(peers).resolve())
    _decode_backends.requirements.cache_clear()
    yield
    sys.path[:] = path


def available(name: str) -> str:
    unmet = [str(r) for r in _decode_backends.requirements(name, form(64, (128, None)).shape, torch.cuda.get_device_capability()) if not r.ok]
    if unmet:
        pytest.skip(f"{name} cannot serve here: {' '.join(unmet)}")
    return name


@pytest.fixture
def flashmla() -> str:
    return available("flashmla")


@pytest.fixture(params=["flashmla", "cuda"])
def backend(request: pytest.FixtureRequest) -> str:
    return available(request.param)


def form(heads: int, widths: tuple[int, int | None]) -> SparseMLADecode:
    return SparseMLADecode(heads, widths[0], extra_width=widths[1])


def calls(tokens: int, heads: int, widths: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    return batch(tokens, heads, widths, torch.uint8, torch.bfloat16, "cuda", seed)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def compare(found: Any, right: Any) -> None:
    """A few thousandths of the norm, what bf16 weights and results cost; rows without keys exactly."""
    assert found[0].dtype == right[0].dtype and found[0].is_contiguous() and found[1].is_contiguous()
    keyless = right[1] == float("-inf")
    assert torch.equal(found[1] == float("-inf"), keyless) and not bool(found[0][keyless].any())
    assert error(found[0], right[0]) < 6e-3
    torch.testing.assert_close(found[1][~keyless], right[1][~keyless], rtol=1e-4, atol=1e-4)


def test_the_contract_of_the_op_holds(backend: str) -> None:
    """Every case of the kit that is of its dtypes: holes, garbage slots and lengths, rows without keys, sinks, padded pages."""

    def accepts(case: Any) -> bool:
        caches = [case.inputs[name] for name in ("swa_cache", "extra_cache") if case.inputs.get(name) is not None]
        return all(c.dtype == torch.uint8 for c in caches)

    def decode(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, lse = sparse_mla_decode(q.bfloat16(), *args, **kwargs, backend=backend)
        return out.to(q.dtype), lse

    report = testing.check_sparse_decode(decode, "cuda", accepts=accepts, rtol=2**-6, atol=2**-6)
    assert len(report.passed) >= 3, report


@pytest.mark.parametrize(("heads", "widths"), FORMS)
@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
def test_matches_the_reference(heads: int, widths: tuple[int, int], tokens: int, backend: str) -> None:
    arguments = calls(tokens, heads, widths)
    compare(sparse_mla_decode(*arguments, scale=SCALE, backend=backend), SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))


def test_what_is_no_key_is_never_used(backend: str) -> None:
    """Slots past the cache, negative ones and lengths out of range: the same bits as rows that say so plainly."""
    arguments = calls(9, 64, (128, 512))
    for place in (2, 5):
        indices, lens = arguments[place], arguments[place + 1]
        slots = arguments[place - 1].shape[0] * arguments[place - 1].shape[1]
        indices[:, ::7] = torch.tensor([slots, -5, 2**31 - 1, -(2**31), slots + 7, -1, -2, 2**30, slots], dtype=torch.int32, device="cuda")[:, None]
        lens[:3] = torch.tensor([2**31 - 1, -(2**31), 0], dtype=torch.int32, device="cuda")
    found = sparse_mla_decode(*arguments, scale=SCALE, backend=backend)
    compare(found, SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))
    if backend == "cuda":  # packed rows deal keys out to other blocks
        return
    for place in (2, 5):
        slots = arguments[place - 1].shape[0] * arguments[place - 1].shape[1]
        arguments[place] = sparse_key_rows(arguments[place], arguments[place + 1], swa_slots=slots, swa_columns=arguments[place].shape[1]).rows
        arguments[place + 1] = torch.full_like(arguments[place + 1], arguments[place].shape[1])
    assert all(torch.equal(a, b) for a, b in zip(found, sparse_mla_decode(*arguments, scale=SCALE, backend="flashmla"), strict=True))


@pytest.mark.parametrize("warm", [True, False])
def test_captured_once_replayed_on_other_inputs(warm: bool, flashmla: str) -> None:
    """With its plan made before, and with one that is captured along: lengths change from replay to replay."""
    tokens = 11 if warm else 13
    first, *others = (calls(tokens, 64, (133, 512), seed) for seed in range(4))
    if warm:
        sparse_mla_decode(*first, scale=SCALE, backend="flashmla")
    plans = len(_flashmla._plans)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = sparse_mla_decode(*first, scale=SCALE, backend="flashmla")
    assert len(_flashmla._plans) == plans
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            mine.copy_(theirs)
        for result in results:
            result.fill_(-7)
        graph.replay()
        compare(results, SPARSE_MLA_DECODE.reference(*other, scale=SCALE))


def test_calls_of_a_known_shape_never_wait_for_the_device(backend: str) -> None:
    arguments = calls(8, 64, (128, 512))
    sparse_mla_decode(*arguments, scale=SCALE, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse_mla_decode(*arguments, scale=SCALE, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_whole_for_every_batch_size(backend: str) -> None:
    torch._dynamo.reset()
    graphs = 0

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return gm.forward

    decode = SparseMLADecode(64, 128, extra_width=512, backend=backend)
    compiled = torch.compile(lambda *a: decode(*a, scale=SCALE), backend=counting, fullgraph=True, dynamic=True)
    for tokens in (4, 9, 33):
        arguments = calls(tokens, 64, (128, 512), tokens)
        compare(compiled(*arguments), SPARSE_MLA_DECODE.reference(*arguments, scale=SCALE))
    assert graphs == 1


def test_fastest_is_one_of_the_back_ends_and_auto_is_ours() -> None:
    arguments = calls(128, 64, (128, 512))
    in_use = SPARSE_MLA_DECODE.backends["cuda"].replace("torch", "reference")
    shape = _decode_backends.shape_of(arguments[0], arguments[1], arguments[2], arguments[4], arguments[5])
    name, own = _decode_backends.fastest(in_use, 128, shape, torch.cuda.get_device_capability()), _decode_backends.ours(in_use, shape, torch.cuda.get_device_capability())
    for choice, expected in (("fastest", name), ("auto", own)):
        found, right = (sparse_mla_decode(*arguments, scale=SCALE, backend=b) for b in (choice, expected))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_auto_keeps_the_bits_of_a_row_in_any_batch() -> None:
    arguments = calls(130, 64, (128, 512))
    whole = sparse_mla_decode(*arguments, scale=SCALE)
    for first, count in ((0, 1), (129, 1), (64, 8)):
        index = torch.arange(first, first + count, device="cuda")
        part = sparse_mla_decode(*rows(arguments, index), scale=SCALE)
        assert all(torch.equal(a, b[index]) for a, b in zip(part, whole, strict=True))


def test_more_tokens_than_a_planner_takes(flashmla: str) -> None:
    arguments = calls(_flashmla.SLICE + 3, 64, (64, 0))
    compare(sparse_mla_decode(*arguments, scale=SCALE, backend="flashmla"), sparse_mla_decode(*arguments, scale=SCALE, backend="reference"))


def test_refused_calls_reach_no_kernel(backend: str) -> None:
    arguments = calls(3, 64, (128, 512))
    with pytest.raises(UnsupportedError, match="query: needs bfloat16, found float32"):
        sparse_mla_decode(arguments[0].float(), *arguments[1:], scale=SCALE, backend=backend)
    if backend == "flashmla":
        with pytest.raises(ValueError, match="scale must be positive"):
            sparse_mla_decode(*arguments, scale=0.0, backend=backend)
    torch.cuda.synchronize()
