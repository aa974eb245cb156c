"""Counter-based random numbers: Philox4x32-10 keyed by (request seed, position, stream), the same bits everywhere.

One number is a pure function of what it is for. Nothing is advanced from call to call, so a request draws the same
numbers alone or in a batch, on any row and any device, and after any number of other calls.

=========  ==============================================================================================
key        ``(seed & 0xffffffff, seed >> 32)`` of the request's int64 seed
counter    ``(i // 4, stream, position & 0xffffffff, position >> 32)`` for number ``i``; position is int64
word       output word ``i % 4`` of the block: 32 bits, ``w``
uniform    ``u = min(fp32(w) * 2**-32 + 2**-32, 1 - 2**-24)`` in fp32, round to nearest, ``fp32(w)`` too
noise      ``e = -log1p(-u)``, exponential; ``-log(e)`` is Gumbel noise
=========  ==============================================================================================

``stream`` is one word of the counter and each use has a value of its own, so no two uses can meet on one block.

``u`` lies in ``[2**-32, 1 - 2**-24]``: never 0 or 1. The product by a power of two is exact, so a fused multiply-add
gives the same bits as multiply and add. The grid is finest near 0, where the exponential noise is small and a token wins; that keeps
``P(u <= k * 2**-32) = k * 2**-32`` for small k and rare tokens their share. ``e`` is in ``[2**-32, 16.64]``, Gumbel noise in
``[-2.82, 22.19]`` (32 ln 2 is 22.18): a masked token stays masked.
"""

from __future__ import annotations

import torch

__all__ = ["STREAM_ACCEPTANCE", "STREAM_DRAFT", "STREAM_PLAIN", "STREAM_RECOVERY", "exponential_noise", "philox4x32", "philox4x32_scalar", "uniforms", "word_to_uniform"]

STREAM_PLAIN = 0
"""Plain sampling, the bonus token, and a position without a draft."""
STREAM_DRAFT = 1
"""What a drafter draws its proposals with."""
STREAM_ACCEPTANCE = 2
"""The uniform that a proposal is accepted or rejected by."""
STREAM_RECOVERY = 3
"""The token drawn in place of a rejected proposal."""

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def philox4x32_scalar(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block in plain integers: the definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks of four 32-bit words, as int64 tensors. All inputs int64 in ``[0, 2**32)``, broadcast against each other.

    The high half of an int64 product is right although the product may wrap: the shift keeps bits 32 to 63 and the mask
    drops the sign. ``c1`` and ``c3`` carry such bits above the word until they are masked as part of a sum.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    shape = torch.broadcast_tensors(*counter, *key)[0].shape  # type: ignore[no-untyped-call]
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = _mix(p1, c1, k0, shape), p1, _mix(p0, c3, k1, shape), p0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0.expand(shape), (c1 & _MASK).expand(shape), c2.expand(shape), (c3 & _MASK).expand(shape)


def _mix(product: torch.Tensor, word: torch.Tensor, key: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    high = product >> 32
    if high.shape == shape:  # of full size, so the rest can happen in place; in the first two rounds it is not yet
        return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(_MASK)
    return (high ^ word ^ key) & _MASK


def word_to_uniform(words: torch.Tensor) -> torch.Tensor:
    """fp32 uniforms strictly inside (0, 1) from 32-bit words (int64)."""
    return words.to(torch.float32).mul_(2.0**-32).add_(2.0**-32).clamp_(max=_LARGEST_UNIFORM)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` uniforms of each row: fp32 ``[rows, count]``.

    ``seeds`` and ``positions`` are int64 ``[rows]``; ``stream`` is one stream or int64 ``[rows]``.
    """
    rows, device = seeds.shape[0], seeds.device
    blocks = (count + 3) // 4
    out = torch.empty((rows, blocks, 4), dtype=torch.float32, device=device)
    block = torch.arange(blocks, dtype=torch.int64, device=device)[None]
    streams = stream if isinstance(stream, torch.Tensor) else torch.full((rows,), stream, dtype=torch.int64, device=device)
    # Rows in groups: on CPU the five running int64 tensors stay in the cache, elsewhere they stay small beside the logits.
    group = max(1, (2**17 if device.type == "cpu" else 2**25) // max(1, blocks))
    for first in range(0, rows, group):
        part = slice(first, min(rows, first + group))
        seed, position, which = seeds[part, None], positions[part, None], streams[part, None]
        words = philox4x32((block, which, position & _MASK, (position >> 32) & _MASK), (seed & _MASK, (seed >> 32) & _MASK))
        for j, word in enumerate(words):
            out[part, :, j] = word_to_uniform(word)
    return out.view(rows, blocks * 4)[:, :count]


def exponential_noise(uniform: torch.Tensor) -> torch.Tensor:
    """Exponential noise of rate 1, in ``[2**-32, 16.64]``."""
    return torch.log1p(uniform.neg()).neg_()
