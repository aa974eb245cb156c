"""The emulator itself (tests/emulator/README.md): instructions against plain arithmetic, and that each kind of fault is found."""

from __future__ import annotations

import pytest
import torch

from tests.emulated import Driver, EmulatorError, driver, needs_compiler

pytestmark = needs_compiler
ORDERS = ("forward", "backward", "random")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_product_of_matrices() -> None:
    """cp.async, ldmatrix, ldmatrix.trans and mma.m16n8k16 together are a matrix product: small integers exactly, others to a rounding."""
    for seed in range(3):
        a, b, c = draw(16, 16, seed=seed), draw(16, 8, seed=seed + 10), draw(16, 8, seed=seed + 20)
        for exact in (True, False):
            left, right, start = ((t * 8).round() if exact else t for t in (a, b, c))
            (result,) = driver("primitives")("product", [left.bfloat16(), right.bfloat16(), start], order=ORDERS[seed])
            expected = start.double() + left.bfloat16().double() @ right.bfloat16().double()
            assert torch.equal(result, expected.float()) if exact else torch.allclose(result.double(), expected, rtol=1e-6, atol=1e-6)


def test_registers_of_ldmatrix() -> None:
    """Lane 4 i + j has elements 2 j and 2 j + 1 of row i, or of column i of the transpose, of each of four matrices."""
    tiles = torch.arange(256, dtype=torch.float32).bfloat16().reshape(4, 8, 8)
    (found,) = driver("primitives")("matrices", [tiles])
    halves = found.view(torch.bfloat16).reshape(2, 32, 4, 2)
    for transposed, source in ((0, tiles), (1, tiles.transpose(1, 2))):
        for lane in range(32):
            i, j = divmod(lane, 4)
            assert torch.equal(halves[transposed, lane], source[:, i, 2 * j : 2 * j + 2])


def test_numbers() -> None:
    """float8 e4m3, float16 and bfloat16 as PyTorch converts them, and products of bfloat16 rounded once."""
    some = torch.tensor(
        [
            0.0,
            -0.0,
            1e-45,
            -1e-40,
            6e-8,
            5.96e-8,
            2.98e-8,
            2.9e-8,
            6.1e-5,
            65504.0,
            65519.9,
            65520.0,
            -1e9,
            3.4e38,
            torch.inf,
            -torch.inf,
            torch.nan,
            1.0,
        ]
    )
    some = torch.cat([some, draw(2000) * 10.0 ** (draw(2000, seed=1) * 12).clamp(-40, 37)])
    decoded, half, brain, products = driver("primitives")("numbers", [some])
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert (
        torch.equal(decoded.isnan(), codes.isnan())
        and torch.equal(decoded.nan_to_num(), codes.nan_to_num())
        and torch.equal(decoded.signbit(), codes.signbit() & ~codes.isnan())
    )
    for pairs, dtype in ((half, torch.float16), (brain, torch.bfloat16)):
        assert torch.equal(pairs.view(dtype).float().nan_to_num(99.0), some.to(dtype).float().nan_to_num(99.0))
        assert torch.equal(pairs.view(dtype).signbit() & ~some.isnan(), some.signbit() & ~some.isnan())
    pair = some.bfloat16().reshape(-1, 2).double()
    product = (pair[:, 0] * pair[:, 1])[:, None].expand(-1, 2)
    exact = product.float().bfloat16().double()
    result = products.view(torch.bfloat16).reshape(-1, 2).double()
    normal = (product.abs() >= 2.0**-126) & product.isfinite()
    assert torch.equal(result[normal], exact[normal]) and torch.equal(result.isnan(), product.isnan())
    assert bool(((result - product).abs()[~normal & product.isfinite()] <= 2.0**-134).all()), "half a step of subnormal numbers"


def test_lanes_of_a_warp() -> None:
    values = torch.randint(-900, 900, (32,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    lane = torch.arange(32)
    low, high = values[:8].sum(), values[8:].sum()
    unsigned = values.long() % 2**32
    expected = [
        values[5].expand(32),
        torch.where(lane < 3, values, values[lane - 3]),
        torch.where(lane >= 27, values, values[(lane + 5) % 32]),
        values[lane ^ 17],
        values[lane // 8 * 8 + (lane + 1) % 8],
        torch.tensor(sum(1 << i for i in range(32) if values[i] > 0)).to(torch.int32).expand(32),
        torch.tensor(0).expand(32),
        torch.tensor(1).expand(32),
        values.sum().expand(32),
        values.min().expand(32),
        values.max().expand(32),
        unsigned.min().to(torch.int32).expand(32),
        unsigned.max().to(torch.int32).expand(32),
        torch.where(lane < 8, low, high),
    ]
    for order in ORDERS:
        (found,) = driver("primitives")("lanes", [values], order=order)
        for i, row in enumerate(expected):
            assert found[i].tolist() == row.tolist(), (order, i)


def rows() -> torch.Tensor:
    return torch.randint(1, 99, (8, 80), generator=torch.Generator().manual_seed(5), dtype=torch.int32)[:, :64]


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_a_sound_kernel_passes(blocks: int) -> None:
    """The kernel that the faults below are put into: copies, barriers, atomics and stores between blocks, in any order of threads."""
    expected = rows().view(-1, blocks, 64).roll(-1, 1).reshape(-1, 64).flip(1) + rows().sum(1, keepdim=True)
    for seed in range(6):
        (out,) = driver("primitives")("rotate", [rows()], [blocks, 0], order=ORDERS[seed % 3], seed=seed)
        assert out.tolist() == expected.tolist()


def test_counted_sends_are_for_clusters() -> None:
    """PTX leaves st.async undefined in a cluster of one block, to itself too."""
    with pytest.raises(EmulatorError, match=r"st\.async in a cluster of one block"):
        driver("primitives")("rotate", [rows()], [1, 0])


FAULTS = {  # in the order of primitives.cpp
    "no barrier": "race: write and read of shared memory",
    "no barrier in a warp": "race: write and read of shared memory",
    "a barrier for one warp": "deadlock: no thread can go on\n.*threads 0-31 wait .*\n.*threads 32-63 wait at __syncthreads",
    "a barrier for some lanes": "deadlock: no thread can go on",
    "a lane has left": "__syncthreads by a warp of which lane 8 has exited",
    "a lane outside its mask": "a lane is not in the mask 7fffffff",
    "past the end of shared memory": "write of 1 bytes at 8.., outside of the launch's 788 bytes of shared memory",
    "past the end of a row": "read of 4 bytes outside of all memory by thread 63.*\n  0 bytes past the end of a buffer of 256",
    "uninitialized": "uninitialized shared memory is read",
    "misaligned": "misaligned read of 4 bytes",
    "before the previous grid ended": "device memory is used before griddepcontrol.wait",
    "no cluster barrier": "before a cluster barrier has shown that it runs",
    "an arrival that releases nothing": "race: write and read of shared memory",
    "two arrivals": "barrier.cluster.arrive twice without a wait",
    "a block has left": "shared memory of block . is used, which has ended",
    "copies not waited for": "uninitialized shared memory is read",
    "two blocks write one place": "race: write and write of device memory",
    "an endless loop": "hang: more than 1000000 steps",
    "a constant load of written memory": "__ldg of memory that the kernel may write",
    "an input is written": "an input is written",
    "more bytes come than are expected": "more bytes come by st.async than are expected",
    "fewer bytes come than are expected": "deadlock: no thread can go on\n.*wait for bytes",
    "bytes not waited for": "uninitialized shared memory is read",
    "a buffer used again while it is read": "race: write and read of shared memory",
    "a shuffle from outside the mask": "a shuffle reads lane 20, which is not in its mask 0000ffff",
    "lanes in different collectives": "lanes of a warp are in different operations",
    "a cluster barrier for part of a warp": "barrier.cluster.arrive by a warp of which lane 0 has exited",
    "more shared memory than allowed": "a launch with 50000 bytes of shared memory, where 49152 are allowed",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    with pytest.raises(EmulatorError, match=FAULTS[fault]) as caught:
        driver("primitives")("rotate", [rows()], [4, 1 + list(FAULTS).index(fault)], steps=1_000_000)
    assert "a launch with" in str(caught.value) or "tests/emulator/primitives.cpp:" in str(caught.value), "with its place in the source"


def test_loop_that_touches_nothing_is_ended() -> None:
    kernels = Driver(driver("primitives").program)
    kernels.seconds = 1
    with pytest.raises(EmulatorError, match="hang: no answer in 1 s"):
        kernels("rotate", [rows()], [4, 1 + len(FAULTS)])
