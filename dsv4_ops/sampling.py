"""Sampling by Gumbel-max: unbiased, and exact for greedy requests.

Noise is a function of (request seed, position of the token being predicted, stream) alone (``_philox.py`` has the exact
map from words to noise), with one stream each for plain sampling, drafts, acceptance and recovery.

**Weights and draws.** A row's weights are ``exp((x - max(x)) / temperature)``; a token is drawn as the arg-max of
``weight / e`` with exponential noise ``e``, which is Gumbel-max without its outer logarithm: the law is the same, a weight of 0 never wins, and the
error is a relative one of a few fp32 units. NaN logits count as -inf, +inf as the largest finite value. A row with nothing above -inf gives
token 0, with certainty, as a target and as a draft. Ties go to the lowest id. Requests are *greedy* when their temperature is
below the smallest normal fp32 number (0 is), or NaN: their token is the arg-max of the logits.

Words and uniforms have the same bits on every device. Ids are the same unless the two best ``weight / e`` are within
``MARGIN`` of each other, relatively (``exp`` and ``log1p`` may differ by a few units in the last place).

gumbel_sample

==============  =========  =============  ==========================================================================
argument        dtype      shape          meaning
==============  =========  =============  ==========================================================================
logits          fp32/bf16  [T, V]         raw logits (temperature is applied here), any strides, V at least 1
temperature     fp32       [max_reqs]     by request state
seeds           int64      [max_reqs]     by request state
positions       int64      [T]            position of the token being predicted; any int64
idx_mapping     int32/64   [T]            row to request state; negative or past the table: inert
stream          int                       STREAM_PLAIN or STREAM_DRAFT (any of the four is taken)
lane            int                       workspace lane, -1: the ambient one (only the CUDA path takes scratch)
returns         int64      [T]            token ids in [0, V); 0 for inert rows
==============  =========  =============  ==========================================================================

The proposal law of a sampled draft is ``softmax(draft_logits / temperature)`` of the same logits, which is all that the verifier needs.

No sum over a row is rounded in an order that depends on its batch. Graph-safe: yes (no host read; on CPU only, a batch without a random
request skips the random half). ``rejection.py`` judges speculated tokens by the same weights and draws. Replaces the samplers of
serving engines.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _checks, _registry
from ._philox import (
    STREAM_ACCEPTANCE,
    STREAM_DRAFT,
    STREAM_PLAIN,
    STREAM_RECOVERY,
    exponential_noise,
    philox4x32_scalar,
    uniforms,
    word_to_uniform,
)
from ._registry import BadInput, Sample
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = ["MARGIN", "STREAM_ACCEPTANCE", "STREAM_DRAFT", "STREAM_PLAIN", "STREAM_RECOVERY", "gumbel_sample"]

MARGIN = 1e-5
"""Relative distance of the two best scores below which two devices may draw different ids."""

_LARGEST = torch.finfo(torch.float32).max
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny

GUMBEL_SAMPLE = _registry.define(
    "gumbel_sample(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, Tensor idx_mapping, int stream=0, *, int lane=-1) -> Tensor",
    out=("out",),
)


def gumbel_sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor, stream: int = STREAM_PLAIN,
    *, lane: int = -1,
) -> torch.Tensor:  # fmt: skip
    """One token a row, drawn from ``softmax(logits / temperature)`` or greedily: int64 ``[T]``.

    Raises ArgumentError (unknown stream, ``lane`` out of range), ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops gumbel_sample``.
    """
    return GUMBEL_SAMPLE(logits, temperature, seeds, positions, idx_mapping, stream, lane=lane)  # type: ignore[no-any-return]


def check_requests(where: str, temperature: torch.Tensor, seeds: torch.Tensor) -> None:
    _checks.tensor(where, "temperature", temperature, (torch.float32,), 1)
    _checks.tensor(where, "seeds", seeds, _checks.INT64, 1)
    _checks.shape(where, "seeds", seeds, (temperature.shape[0],), "[max_reqs] like temperature")


def _check(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor, stream: int = 0, lane: int = -1) -> None:
    where = "gumbel_sample"
    _checks.tensor(where, "logits", logits, _checks.FLOATS, 2)
    if logits.shape[1] < 1:
        raise ArgumentShapeError(where, "logits", "of at least one column", f"shape {list(logits.shape)}")
    check_requests(where, temperature, seeds)
    _checks.tensor(where, "positions", positions, _checks.INT64, 1)
    _checks.shape(where, "positions", positions, (logits.shape[0],), "[T], one for each row of logits")
    _checks.tensor(where, "idx_mapping", idx_mapping, _checks.INDEX, 1)
    _checks.shape(where, "idx_mapping", idx_mapping, (logits.shape[0],), "[T], one for each row of logits")
    _checks.integer(where, "stream", stream, STREAM_PLAIN, STREAM_RECOVERY)
    _checks.lane(where, lane)
    _checks.same_device(where, logits=logits, temperature=temperature, seeds=seeds, positions=positions, idx_mapping=idx_mapping)


def clean_logits(logits: torch.Tensor) -> torch.Tensor:
    """A fresh fp32 copy without NaN and +inf."""
    return torch.nan_to_num(logits.to(torch.float32), nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


def reference_noise(seed: int, position: int, stream: int, count: int) -> torch.Tensor:
    """Uniforms of one row, block by block in plain integers."""
    mask = 0xFFFFFFFF
    words: list[int] = []
    for block in range((count + 3) // 4):
        words += philox4x32_scalar((block, stream, position & mask, (position >> 32) & mask), (seed & mask, (seed >> 32) & mask))
    return word_to_uniform(torch.tensor(words[:count], dtype=torch.int64))


def reference_law(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """fp64 probabilities of one row at a temperature above 0."""
    x = clean_logits(row).cpu().double()
    if x.max() == -torch.inf:
        return torch.nn.functional.one_hot(torch.tensor(0), x.shape[0]).double()
    return torch.softmax((x - x.max()) / min(temperature, _LARGEST), 0)


def reference_draw(law: torch.Tensor, seed: int, position: int, stream: int) -> int:
    noise = -torch.log1p(-reference_noise(seed, position, stream, law.shape[0]).double())
    return int(torch.argmax(law / noise))


def _reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor, stream: int = 0, lane: int = -1
) -> torch.Tensor:
    ids = []
    for row, position, request in zip(logits, positions.tolist(), idx_mapping.tolist(), strict=True):
        if not 0 <= request < temperature.shape[0]:
            ids.append(0)
            continue
        t = float(temperature[request])
        ids.append(reference_draw(reference_law(row, t), int(seeds[request]), position, stream) if t >= SMALLEST_TEMPERATURE else int(torch.argmax(clean_logits(row))))
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def request_state(idx_mapping: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row: is it live, is it random, a temperature that can be divided by, the seed."""
    count = temperature.shape[0]
    live = (idx_mapping >= 0) & (idx_mapping < count)
    if count == 0:
        zero = torch.zeros(idx_mapping.shape, dtype=torch.int64, device=idx_mapping.device)
        return live, live, zero.to(torch.float32) + 1, zero
    request = idx_mapping.clamp(0, count - 1).to(torch.int64)
    t = temperature[request]
    random = live & (t >= SMALLEST_TEMPERATURE)
    return live, random, torch.where(random, t.clamp(max=_LARGEST), 1.0), seeds[request]


def known_greedy(random: torch.Tensor) -> bool:
    """No random row, where that can be known without a synchronization."""
    return random.device.type == "cpu" and not bool(random.any())


def weights_of(clean: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Unnormalized probabilities, the largest 1, in place of ``clean`` ``[..., V]``; ``temperature`` is ``[...]``."""
    top = clean.amax(-1, keepdim=True)
    clean.sub_(top.clamp(min=-_LARGEST)).div_(temperature[..., None]).exp_()
    clean[..., :1].copy_(torch.where(top == -torch.inf, 1.0, clean[..., :1]))
    return clean


def draw(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor) -> torch.Tensor:
    return race(weights, uniforms(seeds, positions, stream, weights.shape[-1]))


def race(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return torch.argmax(weights / exponential_noise(uniform), -1)


def _torch(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor, stream: int = 0, lane: int = -1
) -> torch.Tensor:
    live, random, t, seed = request_state(idx_mapping, temperature, seeds)
    clean = clean_logits(logits)
    ids = torch.argmax(clean, -1)
    if not known_greedy(random):
        ids = torch.where(random, draw(weights_of(clean, t), seed, positions, stream), ids)
    return torch.where(live, ids, 0)


def _triton(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor, stream: int = 0, lane: int = -1
) -> torch.Tensor:
    from ._triton import sampling as kernels

    return kernels.gumbel_sample(logits, temperature, seeds, positions, idx_mapping, stream, lane)


def _fake(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor, stream: int = 0, lane: int = -1) -> torch.Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def request_samples(device: torch.device | str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperatures (every third request greedy) and seeds over the whole int64 range."""
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(count, generator=generator) * 1.5 + 0.2
    temperature[::3] = 0.0
    return temperature.to(device), torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(device)


def _args(device: torch.device | str, rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, width, generator=generator) * 3).to(dtype).to(device)
    positions = torch.randint(0, 2**40, (rows,), generator=generator).to(device)
    return [logits, *request_samples(device, rows, seed), positions, torch.randperm(rows, generator=generator).to(torch.int32).to(device)]


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    yield Sample("mixed batch", (*_args(device, 7, 37, seed),))
    yield Sample("bf16, draft stream", (*_args(device, 5, 64, seed, torch.bfloat16), STREAM_DRAFT))
    yield Sample("no rows", (*_args(device, 0, 8, seed),))
    yield Sample("one column", (*_args(device, 3, 1, seed),), {"lane": 1})
    logits, temperature, seeds, positions, mapping = _args(device, 6, 21, seed)
    yield Sample("no requests: all inert", (logits, temperature[:0], seeds[:0], positions, mapping))
    extremes = torch.tensor([-1, 0, 5, 6, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    yield Sample("inert rows and int32 extremes", (logits, temperature, seeds, positions, extremes))
    degenerate = logits.clone()
    degenerate[0], degenerate[1, 3], degenerate[2], degenerate[3, ::2], degenerate[4, 5] = -torch.inf, torch.nan, torch.nan, -torch.inf, torch.inf
    odd = torch.tensor([torch.inf, 1e-30, torch.nan, 1.0, -1.0, 1e-42], device=device)
    yield Sample("masked, NaN and infinite logits, odd temperatures", (degenerate, odd, seeds, positions, mapping))
    far = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 2**32, 2**32 - 1], device=device)
    yield Sample("int64 positions, strided rows, int64 mapping", (logits.repeat(1, 2)[:, ::2], temperature, seeds, far, mapping.long()))


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    return Sample(f"{n} rows", (*_args(device, n, 96, seed),))


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    logits, temperature, seeds, positions, mapping = _args(device, 4, 8, 0)
    yield BadInput("fp16 logits", (logits.half(), temperature, seeds, positions, mapping), ArgumentDtypeError, "logits must be float32 or bfloat16")
    yield BadInput("1-D logits", (logits[0], temperature, seeds, positions, mapping), ArgumentShapeError, "logits must be 2-dimensional")
    yield BadInput("no columns", (logits[:, :0], temperature, seeds, positions, mapping), ArgumentShapeError, "at least one column")
    yield BadInput("int32 seeds", (logits, temperature, seeds.int(), positions, mapping), ArgumentDtypeError, "seeds must be int64")
    yield BadInput("fewer seeds", (logits, temperature, seeds[:3], positions, mapping), ArgumentShapeError, "seeds must be of shape [max_reqs]")
    yield BadInput("fp64 temperature", (logits, temperature.double(), seeds, positions, mapping), ArgumentDtypeError, "temperature must be float32")
    yield BadInput("fewer positions", (logits, temperature, seeds, positions[:3], mapping), ArgumentShapeError, "positions must be of shape [T]")
    yield BadInput("mapping by token", (logits, temperature, seeds, positions, mapping[:2]), ArgumentShapeError, "idx_mapping must be of shape [T]")
    yield BadInput("stream 4", (logits, temperature, seeds, positions, mapping, 4), ArgumentError, "stream must be between 0 and 3, got 4")
    yield BadInput("lane 16", (logits, temperature, seeds, positions, mapping), ArgumentError, "lane must be between -1 and 15, got 16", {"lane": 16})


GUMBEL_SAMPLE.implement(
    check=_check, reference=_reference, torch_impl=_torch, triton=_triton, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs
)
