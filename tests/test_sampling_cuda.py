"""The Triton samplers against an fp64 oracle: full vocabularies on a GPU, small ones interpreted; the law of what they emit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_ops import (
    STREAM_ACCEPTANCE,
    STREAM_DRAFT,
    STREAM_PLAIN,
    STREAM_RECOVERY,
    _philox,
    gumbel_sample,
    rejection_sample,
    testing,
    use_workspace_lane,
)
from tests.sampling_oracle import Batch, Call, Tally, batch, check_gumbel, check_rejection, drafts_of, first_of, gumbel, rejection

V = 129280
K = 5
CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="no CUDA device")
BY_NAME = {op.name: op for op in testing.ops()}
SEAMS = (1, 3, 4, 64, 2047, 2048, 2049, 4096, 4100, 6145)
"""Vocabularies around the ends of tiles, and such whose rows cannot be loaded four at a time."""


def launchers() -> tuple[Call, Call]:
    """The Triton samplers by their launchers, for tensors on CPU, where the interpreter runs them."""

    def sample(*args: Any, lane: int = -1) -> Any:
        op = BY_NAME["gumbel_sample"]
        return op.triton(*args, lane=lane)  # type: ignore[misc]

    def reject(*args: Any, lane: int = -1) -> Any:
        op = BY_NAME["rejection_sample"]
        return op.triton(*args, lane=lane)  # type: ignore[misc]

    return sample, reject


def on_device(device: str) -> tuple[Call, Call]:
    return launchers() if device == "cpu" else (gumbel_sample, rejection_sample)


# ---- checks that run on a GPU, and in the interpreter's process ------------------------------------------------------


def seams(device: str, requests: int, widths: tuple[int, ...]) -> tuple[int, int, int]:
    sample, reject = on_device(device)
    tally = Tally()
    for i, width in enumerate(widths):
        drafts = (3, 0, 1, 4)[i % 4]
        for dtype in (torch.float32, torch.bfloat16):
            b = batch(device, requests, drafts, width, seed=i, dtype=dtype)
            check_gumbel(sample, b, tally, STREAM_DRAFT)
            check_rejection(reject, sample, b, tally)
            check_rejection(reject, sample, b, tally, greedy=True)
    return tally.draws, tally.close, tally.otherwise


def special_rows(device: str, temperatures: tuple[float, ...], width: int) -> None:
    """Ties and maxima on both sides of a seam, rows of NaN and of infinities, rows with nothing usable: greedy and random."""
    sample, reject = on_device(device)
    seam, last = min(2048, width - 2), width - 1
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(10, width, generator=generator).clamp(max=5)
    rows[0, [seam - 1, seam, last]] = 9.0
    rows[1, [seam, last]] = math.inf
    rows[2, [seam - 1, last]] = torch.tensor([3e38, math.inf])
    rows[3] = -math.inf
    rows[4] = math.nan
    rows[5], rows[5, last] = -math.inf, -3e38
    rows[6] = -0.0
    rows[6, seam] = 0.0
    rows[7, ::2], rows[7, last] = math.nan, 8.0
    rows[8], rows[8, [seam - 1, seam]] = -torch.inf, 2.0
    rows[9] = torch.finfo(torch.float32).min
    rows = rows.to(device)
    n = len(rows)
    for value in temperatures:
        temperature = torch.full((n,), value, device=device)
        seeds, mapping = torch.arange(n, device=device) * 7, torch.arange(n, device=device, dtype=torch.int32)
        tally = Tally()
        tally.add(sample(rows, temperature, seeds, seeds, mapping, STREAM_PLAIN), *gumbel(rows, temperature, seeds, seeds, mapping))
        target = torch.stack([rows, rows.roll(1, 0)], 1)
        for proposal in (None, rows.roll(3, 0)[:, None]):
            for draft in (0, seam, last)[: len(temperatures)]:
                ids = torch.full((n, 1), draft, device=device)
                sampled, count = reject(target, ids, proposal, temperature, seeds, mapping, seeds)
                expected, expected_count, close = rejection(target, ids, proposal, temperature, seeds, mapping, seeds)
                tally.add(torch.cat([sampled, count[:, None]], 1), torch.cat([expected, expected_count[:, None]], 1), close)
    greedy = sample(rows, torch.zeros(n, device=device), seeds, seeds, mapping, STREAM_PLAIN).tolist()
    assert greedy == [seam - 1, seam, last, 0, 0, last, 0, last, seam - 1, 0]


def nothing_left(device: str, width: int) -> None:
    """The draft's law is the target's, and the proposal is a token that neither has: what is drawn is the target's own."""
    _, reject = on_device(device)
    n = 16
    b = batch(device, n, 1, width, seed=3)
    target = b.target.clone()
    target[:, :, 7] = -math.inf
    temperature, seeds = torch.full((n,), 0.8, device=device), torch.arange(n, device=device)
    mapping, ids = torch.arange(n, device=device, dtype=torch.int32), torch.full((n, 1), 7, device=device)
    sampled, count = reject(target, ids, target[:, :1].clone(), temperature, seeds, mapping, seeds)
    assert count.tolist() == [1] * n
    tally = Tally()
    tally.add(sampled[:, 0], *gumbel(target[:, 0], temperature, seeds, seeds, mapping, STREAM_RECOVERY))


def one_column_left(device: str, width: int) -> None:
    """The target has more than the draft in its last column alone: tiles with nothing of their own must not draw."""
    _, reject = on_device(device)
    n = 16
    proposal = torch.randn(n, 1, width, generator=torch.Generator().manual_seed(6)).to(device)
    target = proposal.repeat(1, 2, 1)
    target[..., 7] = -math.inf
    target[..., -1] += 8.0
    temperature, seeds = torch.ones(n, device=device), torch.arange(n, device=device)
    sampled, count = reject(target, torch.full((n, 1), 7, device=device), proposal, temperature, seeds, seeds, seeds)
    assert count.tolist() == [1] * n and sampled[:, 0].tolist() == [width - 1] * n


def thresholds(device: str, width: int) -> None:
    """Laws made so that a proposal's ratio of p to q is a thousandth above or below the number that it is judged by."""
    _, reject = on_device(device)
    n = 12
    seeds = torch.arange(n, device=device)
    chance = _philox.uniforms(seeds, seeds, STREAM_ACCEPTANCE, 1)[:, 0].double()
    above = seeds % 2 == 0
    ratio = chance * torch.where(above, 1.001, 0.999)
    assert float(ratio.max()) < 0.99, "other seeds are needed"
    column = (seeds * 997) % width
    for proposal, q in ((None, 1.0), (torch.zeros(n, 1, width, device=device), 1 / width)):
        p = ratio * q  # of one column; the others share the rest equally, so that every tile takes part in the sums
        target = torch.zeros(n, 2, width, device=device)
        target[seeds, 0, column] = torch.log(p / (1 - p) * (width - 1)).float()
        _, count = reject(target, column[:, None], proposal, torch.ones(n, device=device), seeds, seeds, seeds)
        assert (count == 2).tolist() == above.tolist()


def without_drafts(device: str, requests: int, width: int) -> None:
    """A request whose proposals are placeholders, or that has none, draws the very token that gumbel_sample gives it."""
    sample, reject = on_device(device)
    b = batch(device, requests, 2, width, seed=4)
    live = b.mapping >= 0
    plain = torch.where(live, sample(b.target[:, 0], *b.states[:2], b.positions, b.mapping, STREAM_PLAIN), -1)
    none = torch.full((requests, 2), -1, device=device)
    for proposal in (None, b.proposal):
        sampled, count = reject(b.target, none, proposal, *b.states)
        assert torch.equal(sampled[:, 0], plain) and torch.equal(count, live.int())
    sampled, _ = reject(b.target[:, :1], none[:, :0], None, *b.states)
    assert torch.equal(sampled[:, 0], plain)
    certain = b.target.clone()
    certain[:, :2, width // 2] = 1e4
    sampled, count = reject(certain, torch.full_like(none, width // 2), None, *b.states)
    last = sample(b.target[:, 2], *b.states[:2], b.positions + 2, b.mapping, STREAM_PLAIN)
    assert torch.equal(count, live.int() * 3) and torch.equal(sampled[:, 2], torch.where(live, last, -1))


def rows_alone(device: str, requests: int, width: int) -> None:
    """Each request alone, in another place and twice: the same tokens."""
    sample, reject = on_device(device)
    b = batch(device, requests, 2, width, seed=5)
    draft = drafts_of(b, sample)
    whole = reject(b.target, draft, b.proposal, *b.states)
    plain = sample(b.target[:, 1], *b.states[:2], b.positions, b.mapping, STREAM_PLAIN)
    order = torch.arange(requests - 1, -1, -1, device=device)
    assert torch.equal(sample(b.target[order, 1], *b.states[:2], b.positions[order], b.mapping[order], STREAM_PLAIN), plain[order])
    for _ in range(2):
        back = reject(b.target[order], draft[order], b.proposal[order], *b.states[:2], b.mapping[order], b.positions[order])
        assert all(torch.equal(x, y[order]) for x, y in zip(back, whole, strict=True))
    for i in range(0, requests, 3):
        one = slice(i, i + 1)
        alone = reject(b.target[one], draft[one], b.proposal[one], *b.states[:2], b.mapping[one], b.positions[one])
        assert all(torch.equal(x, y[one]) for x, y in zip(alone, whole, strict=True))
        assert torch.equal(sample(b.target[one, 1], *b.states[:2], b.positions[one], b.mapping[one], STREAM_PLAIN), plain[one])


SMALL: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (seams, ("cpu", 6, (4100, 3, 6145, 64))),
    (special_rows, ("cpu", (1.0,), 4100)),
    (special_rows, ("cpu", (0.0,), 6145)),
    (nothing_left, ("cpu", 4100)),
    (one_column_left, ("cpu", 4100)),
    (thresholds, ("cpu", 6145)),
    (without_drafts, ("cpu", 9, 4100)),
    (rows_alone, ("cpu", 7, 6145)),
]


@pytest.mark.parametrize(("check", "args"), SMALL, ids=[f"{check.__name__}-{args[-1]}" for check, args in SMALL])
def test_interpreted(check: Callable[..., Any], args: tuple[Any, ...], interpreter: Any) -> None:
    counted = interpreter(check, *args)
    if counted is not None:
        draws, close, _ = counted
        assert draws == 6 * 4 * 6 and close <= 2, counted


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@needs_gpu
def test_seams_of_tiles_on_cuda() -> None:
    draws, close, otherwise = seams("cuda", 200, SEAMS)
    print(f"{draws} draws, {close} within the margin, {otherwise} of them otherwise")
    assert draws == 200 * len(SEAMS) * 6 and close <= 5


@needs_gpu
@pytest.mark.parametrize("width", [3, 4100, 6145, V])
def test_special_rows_on_cuda(width: int) -> None:
    special_rows("cuda", (0.0, 1e-30, 1.0, math.inf), width)


@needs_gpu
@pytest.mark.parametrize("width", [64, 6145, V])
def test_what_is_drawn_depends_on_the_request_alone_on_cuda(width: int) -> None:
    rows_alone("cuda", 33, width)
    without_drafts("cuda", 33, width)
    nothing_left("cuda", width)
    one_column_left("cuda", width)
    thresholds("cuda", width)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gumbel_sample_5000_draws_of_the_whole_vocabulary(dtype: torch.dtype) -> None:
    tally = Tally()
    for i in range(20):
        check_gumbel(gumbel_sample, batch("cuda", 250, 0, V, seed=i, dtype=dtype), tally, (STREAM_PLAIN, STREAM_DRAFT)[i % 2])
    print(tally)
    assert tally.draws == 5000 and tally.close <= 5


@needs_gpu
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled proposals", "greedy proposals"])
def test_rejection_sample_5000_draws_of_the_whole_vocabulary(greedy: bool) -> None:
    tally = Tally()
    for i in range(50):
        check_rejection(rejection_sample, gumbel_sample, batch("cuda", 100, K, V, seed=i, spread=0.5), tally, greedy)
    print(tally)
    assert tally.draws == 5000 and tally.close <= 5


@needs_gpu
def test_captured_once_replayed_on_other_inputs() -> None:
    """Drafts, verification and plain sampling in one graph; what a replay gives is what a call gives, whatever ran between."""
    first, *others = (batch("cuda", 12, K, V, seed=i) for i in range(4))
    drafts = [drafts_of(b, gumbel_sample) for b in (first, *others)]

    def step(b: Batch, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (gumbel_sample(b.target[:, 0], *b.states[:2], b.positions, b.mapping), *rejection_sample(b.target, ids, b.proposal, *b.states), *rejection_sample(b.target, ids, None, *b.states))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(first, drafts[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(first, drafts[0])
    for b, ids in zip(others, drafts[1:], strict=True):
        expected = step(b, ids)
        for name in vars(first):
            getattr(first, name).copy_(getattr(b, name))
        drafts[0].copy_(ids)
        for _ in range(3):
            for result in results:
                result.fill_(-7)
            graph.replay()
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


@needs_gpu
def test_two_streams_in_two_lanes_do_not_disturb_each_other() -> None:
    batches = [batch("cuda", 64, K, V, seed=i) for i in (0, 1)]
    drafts = [drafts_of(b, gumbel_sample) for b in batches]
    call = lambda i: (rejection_sample(batches[i].target, drafts[i], batches[i].proposal, *batches[i].states), gumbel_sample(batches[i].target[:, 0], *batches[i].states[:2], batches[i].positions, batches[i].mapping))  # noqa: E731
    expected = [call(0), call(1)]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream), use_workspace_lane(i):
                results.append((i, call(i)))
    torch.cuda.synchronize()
    for i, ((sampled, count), plain) in results:
        (right, right_count), right_plain = expected[i]
        assert torch.equal(sampled, right) and torch.equal(count, right_count) and torch.equal(plain, right_plain)


@needs_gpu
def test_batch_sizes_compile_nothing_new() -> None:
    from dsv4_ops._triton import rejection as kernels
    from dsv4_ops._triton import sampling

    def compiled() -> list[int]:
        device = torch.cuda.current_device()
        return [len(k.device_caches[device][0]) for k in (sampling.race_kernel, sampling.first_kernel, kernels.judge_kernel, kernels.draw_kernel)]

    def run(requests: int) -> None:
        b = batch("cuda", requests, 3, 1000, seed=requests)
        ids = drafts_of(b, gumbel_sample)
        for greedy in (False, True):
            rejection_sample(b.target, ids, b.proposal, *b.states, greedy)

    run(7)
    before = compiled()
    for requests in (1, 2, 16, 17, 32, 255, 256):
        run(requests)
    assert compiled() == before and all(before)


@needs_gpu
def test_rows_past_two_to_the_31_elements(room: int) -> None:
    """The last rows of a logits tensor of 2**31 elements and more, and rows 2**31 elements apart."""
    rows = 2**31 // V + 9
    if room < 8 * rows * V:
        pytest.skip(f"needs {8 * rows * V >> 30} GB of GPU memory")
    logits = torch.zeros((rows, V), dtype=torch.bfloat16, device="cuda")
    wanted = torch.arange(rows, device="cuda") * 7919 % V
    logits.scatter_(1, wanted[:, None], 1.0)
    none, seeds = torch.zeros(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    mapping = torch.arange(rows, device="cuda")
    assert torch.equal(gumbel_sample(logits, none, seeds, seeds, mapping), wanted)
    far = logits.view(-1)[: 2**31 + V].as_strided((2, V), (2**31, 1))
    assert torch.equal(gumbel_sample(far, none[:2], seeds[:2], seeds[:2], mapping[:2]), first_of(far.float()))
    requests = rows // 3
    target, best = logits[: requests * 3].view(requests, 3, V), wanted[: requests * 3].view(requests, 3)
    states = (none[:requests], seeds[:requests], mapping[:requests], seeds[:requests])
    sampled, count = rejection_sample(target, best[:, :2], None, *states)
    assert torch.equal(sampled, best) and bool((count == 3).all())
    warm = (none[:requests] + 1e-3, *states[1:])  # differences of 1 are certain: the random path gives the same
    for proposal in (None, target[:, :2]):
        sampled, count = rejection_sample(target, best[:, :2], proposal, *warm)
        assert torch.equal(sampled, best) and bool((count == 3).all())


# ---- the law of what is emitted --------------------------------------------------------------------------------------

TRIALS = 200_000


def p_value(tokens: torch.Tensor, law: torch.Tensor) -> float:
    """Of Pearson's chi-square, by the regularized gamma function."""
    expected = law.cpu().double() * tokens.numel()
    assert float(expected.min()) >= 5
    counts = torch.bincount(tokens.cpu(), minlength=len(law)).double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(law) - 1) / 2, dtype=torch.float64), statistic / 2))


def emitted(device: str, width: int, draft_stream: int, temperature: float = 1.1, greedy: bool = False) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], float]:
    """Two proposals in each of 200,000 requests, one seed each: emitted tokens with their laws, and the share of rejected first proposals."""
    generator = torch.Generator().manual_seed(width)
    target = torch.randn(3, width, generator=generator)
    proposal = (target[:2] + 1.2 * torch.randn(2, width, generator=generator)).to(device)
    target = target.to(device)
    t, seeds = torch.full((TRIALS,), temperature, device=device), torch.arange(TRIALS, device=device)
    mapping, positions = torch.arange(TRIALS, device=device), torch.full((TRIALS,), 41, device=device)
    if greedy:
        draft = target[:2].argmax(1).expand(TRIALS, 2)
    else:
        draft = torch.stack([gumbel_sample(proposal[j].expand(TRIALS, -1), t, seeds, positions + j, mapping, draft_stream) for j in (0, 1)], 1)
    q = None if greedy else proposal.expand(TRIALS, 2, width)
    sampled, count = rejection_sample(target.expand(TRIALS, 3, width), draft, q, t, seeds, mapping, positions)
    laws = torch.softmax(target.double() / temperature, 1)
    tokens = [(sampled[count > j, j], laws[j]) for j in range(3)]
    return tokens, float((count == 1).double().mean())


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled proposals", "greedy proposals"])
@pytest.mark.parametrize("width", [16, 64])
def test_emitted_tokens_have_the_law_of_the_target(width: int, greedy: bool, device: str) -> None:
    tokens, rejected = emitted(device, width, STREAM_DRAFT, greedy=greedy)
    assert 0.1 < rejected < 0.99, "both acceptance and recovery take part"
    for j, (ids, law) in enumerate(tokens[: 2 if greedy else 3]):
        assert p_value(ids, law) > 0.001, f"position {j}"
    assert len(tokens[0][0]) == TRIALS


@pytest.mark.parametrize(("shared", "width"), [(STREAM_RECOVERY, 16), (STREAM_ACCEPTANCE, 4)], ids=["recovery", "acceptance"])
def test_the_law_is_lost_when_the_draft_shares_noise(shared: int, width: int, device: str) -> None:
    """An acceptance takes one number, which a draft would share with its first token only: a small vocabulary shows it."""
    tokens, _ = emitted(device, width, shared)
    assert p_value(*tokens[0]) < 1e-9
