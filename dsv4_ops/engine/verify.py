"""Checks that what an engine said does not depend on how it decoded.

*Greedy* (temperature 0): every mode, in any batch, gives the tokens of plain decode of that request alone. Two ways of
computing one row of logits may round differently, so at a difference both rows are computed from the same tokens: one by
plain decode of the request alone, the other by the mode's own engine, which reads the whole prefix as a prompt and drafts
nothing. The largest difference of these two rows is the error of a logit, measured on that row. Where the two tokens'
logits are no further apart than twice this error the row is *close*: it is counted and shown, and the rest is compared with
plain decode after the token that was chosen. Anything else is *different*. An error too large for rounding is different, too,
so that a wrong row does not excuse itself.

*Sampled* (temperature above 0): in one mode, the tokens of a request are those it gets alone, served after all others. They
depend on its seed, not on its batch. There is no tolerance here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .requests import Completion, Request

__all__ = ["ERROR_LIMITS", "Finding", "verify_greedy", "verify_sampled"]

ERROR_LIMITS = {"float32": 2.0**-12, "bfloat16": 2.0**-4, "fp8": 2.0**-3}
"""Largest error of a logit, relative to the row's largest, that is taken for rounding, by dtype of the KV cache or of the model, whichever rounds more."""

Serve = Callable[[Request], Completion]


@dataclass(frozen=True)
class Finding:
    """One place where two decodes of one request gave different tokens. ``close``: rounding explains it."""

    mode: str
    index: int
    position: int
    """Which generated token."""
    expected: int | None
    got: int | None
    """None: no token, the other went on."""
    close: bool
    why: str

    def __str__(self) -> str:
        verdict = "close" if self.close else "DIFFERENT"
        return f"{verdict}: {self.mode}, token {self.position}: expected {_token(self.expected)}, got {_token(self.got)}: {self.why}"


def verify_greedy(request: Request, mode: str, got: Sequence[int], *, plain_alone: Serve, mode_alone: Serve, error_limit: float) -> list[Finding]:
    """Compare the tokens ``got`` of a greedy request in ``mode`` with plain decode of it alone.

    Both callables serve one request alone and record logits; ``mode_alone`` in the mode's engine.
    """
    findings: list[Finding] = []
    done = 0
    expected = plain_alone(request)
    while (at := _first_difference(got[done:], expected.token_ids)) is not None:
        position = done + at
        want = expected.token_ids[at] if at < len(expected.token_ids) else None
        have = got[position] if position < len(got) else None
        if want is None or have is None:
            return [*findings, Finding(mode, request.index, position, want, have, False, "one of the two ended here")]
        prefix = replace(request, prompt_ids=(*request.prompt_ids, *got[:position]), max_tokens=1)
        finding = _judge(mode, request.index, position, want, have, expected.logits[at], mode_alone(prefix).logits[0], error_limit)
        findings.append(finding)
        if not finding.close:
            return findings
        done = position + 1
        if done == len(got) == request.max_tokens or have in request.stop_ids:
            return findings
        expected = plain_alone(replace(request, prompt_ids=(*request.prompt_ids, *got[:done]), max_tokens=request.max_tokens - done))
    return findings


def _judge(mode: str, index: int, position: int, want: int, have: int, plain: torch.Tensor, other: torch.Tensor, error_limit: float) -> Finding:
    gap = float(plain[want] - plain[have])
    finite = plain.isfinite() & other.isfinite()
    error = float((plain - other)[finite].abs().max()) if bool(finite.any()) else float("inf")
    if not torch.equal(plain.isfinite(), other.isfinite()):
        error = float("inf")
    limit = error_limit * float(plain[plain.isfinite()].abs().max()) if bool(finite.any()) else 0.0
    close = gap <= 2 * error and error <= limit
    why = f"logits {gap:.3g} apart, error of a logit on this row {error:.3g}"
    if error > limit:
        why += f", more than rounding gives ({limit:.3g})"
    return Finding(mode, index, position, want, have, close, why)


def verify_sampled(request: Request, mode: str, got: Sequence[int], *, mode_alone: Serve) -> list[Finding]:
    """Compare the tokens of a sampled request in a batch with those it gets alone in the same mode."""
    alone = mode_alone(request).token_ids
    at = _first_difference(got, alone)
    if at is None:
        return []
    want = alone[at] if at < len(alone) else None
    have = got[at] if at < len(got) else None
    return [Finding(mode, request.index, at, want, have, False, "sampled tokens depend on the batch")]


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
