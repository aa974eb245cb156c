"""The kernels of the activation against exact values: interpreted on CPU, compiled on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.swiglu import SWIGLU, SWIGLU_PER_EXPERT
from tests.interpreter import Interpreter
from tests.test_triton import needs_triton

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

F32, BF16 = torch.float32, torch.bfloat16
KINDS = [
    ((3, 96), False, F32, 1), ((3, 96), False, BF16, 1), ((2, 5, 34), True, BF16, 1), ((2, 5, 34), True, F32, 2), ((7, 2, 3, 10), False, F32, 1),
    ((17, 4100), False, BF16, 1), ((17, 4100), False, F32, 1), ((17, 516), True, F32, 1), ((40,), True, BF16, 2),
]  # fmt: skip
"""Shape, interleaved, dtype, column stride: few, so that thousands of draws compile little."""
PARAMETERS = [(1.0, 0.0, None), (1.0, 0.0, 10.0), (1.702, 1.0, 7.0), (1.0, -0.5, float("inf"))]
FP32 = {"cpu": 4e-6, "cuda": 1e-6}
"""Relative error of fp32 results. The interpreter does not fuse multiply and add, which loses what the kernel makes up for."""


def exact(gate_up: torch.Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool) -> torch.Tensor:
    """float64, but for the product in the exponent, which is rounded to fp32 by contract."""
    width = gate_up.shape[-1] // 2
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else (gate_up[..., :width], gate_up[..., width:])
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    up = up + beta if beta else up
    return gate.double() / (1 + torch.exp((gate * -alpha).double())) * up.double()


def compare(seed: int, device: str) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    (shape, interleaved, dtype, step), (alpha, beta, limit) = rng.choice(KINDS), rng.choice(PARAMETERS)
    values = torch.randn(*shape[:-1], shape[-1] * step, generator=generator) * rng.choice((1.0, 8.0, 40.0))
    gate_up = values.to(dtype)[..., ::step]
    moved = gate_up.to(device) if step == 1 else values.to(dtype).to(device)[..., ::step]
    actual = SWIGLU.triton(moved, alpha, beta, limit, interleaved).cpu()  # type: ignore[misc]
    expected = exact(gate_up, alpha, beta, limit, interleaved)
    if dtype == torch.float32:
        torch.testing.assert_close(actual.double(), expected, rtol=FP32[device], atol=1e-30, msg=lambda m: f"draw {seed}: {m}")
    else:
        near = expected.float().to(torch.bfloat16)
        distance = (actual.view(torch.int16).int() - near.view(torch.int16).int()).abs()
        tiny = near.abs() < 1e-30  # past the end of the fp32 exponential
        assert bool((actual[tiny].abs() < 1e-30).all()), f"draw {seed}: not almost 0"
        distance[tiny] = 0
        assert int(distance.max()) <= 1, f"draw {seed}: more than a place away from the nearest bf16"
        assert int((distance > 0).sum()) <= 2 + 0.002 * distance.numel(), f"draw {seed}: {int((distance > 0).sum())} of {distance.numel()} are not the nearest bf16"
    if gate_up.dim() == 2:
        per_expert(seed, moved, interleaved, device)


def per_expert(seed: int, gate_up: torch.Tensor, interleaved: bool, device: str) -> None:
    """A row has the bits that its expert's numbers give; padding rows are zeros, and a limit of 0 gives NaN."""
    generator = torch.Generator().manual_seed(seed)
    alpha, beta, limit = torch.tensor([1.0, 1.702, 0.5, 1.0]), torch.tensor([0.0, 1.0, -0.0, 0.25]), torch.tensor([10.0, 7.0, torch.inf, 0.0])
    ids = torch.randint(-1, 6, (gate_up.shape[0],), generator=generator)
    rows = SWIGLU_PER_EXPERT.triton(gate_up, ids.to(device), alpha.to(device), beta.to(device), limit.to(device), interleaved)  # type: ignore[misc]
    for i, expert in enumerate(ids.tolist()):
        if not 0 <= expert < 4:
            assert not bool(rows[i].any()), f"draw {seed}: padding row {i}"
        elif expert == 3:
            assert bool(rows[i].isnan().all()), f"draw {seed}: row {i}, limit 0"
        else:
            one = SWIGLU.triton(gate_up[i], float(alpha[expert]), float(beta[expert]), float(limit[expert]), interleaved)  # type: ignore[misc]
            assert torch.equal(one.view(torch.uint8), rows[i].view(torch.uint8)), f"draw {seed}: row {i} of expert {expert}"


def special(device: str) -> None:
    """Infinities, NaN, signed zeros and the ends of the exponential: as the reference has them."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0, -0.0, 88.72, -88.72, -88.73, 88.75, -104.0, 1e-40, -1e-40])
    pairs = torch.cartesian_prod(values, values)
    for alpha, beta, limit in PARAMETERS:
        actual, expected = SWIGLU.triton(pairs.to(device), alpha, beta, limit).cpu(), SWIGLU.reference(pairs, alpha, beta, limit)  # type: ignore[misc]
        testing.assert_same(actual, expected, f"{alpha} {beta} {limit}", {torch.float32: (4e-6, 1e-36)})
        zeros = (expected == 0) & (actual == 0)
        assert torch.equal(actual.signbit()[zeros], expected.signbit()[zeros])


def interpreted(first: int, last: int) -> None:
    for seed in range(first, last):
        compare(seed, "cpu")


@needs_triton
def test_random_calls_interpreted(interpreter: Interpreter) -> None:
    interpreter(interpreted, 0, 40)


@needs_triton
def test_special_values_interpreted(interpreter: Interpreter) -> None:
    interpreter(special, "cpu")


@needs_cuda
@needs_triton
@pytest.mark.parametrize("part", range(5))
def test_random_calls_on_cuda(part: int) -> None:
    for seed in range(part * 1000, part * 1000 + 1000):
        compare(seed, "cuda")


@needs_cuda
@needs_triton
def test_special_values_on_cuda() -> None:
    special("cuda")


@needs_cuda
@needs_triton
def test_rows_past_two_to_the_31_elements_on_cuda(room: int) -> None:
    if room < 10 << 30:
        pytest.skip(f"needs 10 GiB of GPU memory, {room >> 30} are free")
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    stride = 2**30 + 24
    wide = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device="cuda").as_strided((3, 64), (stride, 1))
    wide.copy_(rows)
    assert torch.equal(SWIGLU.triton(wide, 1.0, 0.0, 10.0), SWIGLU.triton(rows.cuda(), 1.0, 0.0, 10.0))  # type: ignore[misc]
