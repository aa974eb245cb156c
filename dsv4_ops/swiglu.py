"""Clamped SwiGLU, the activation between the two matrix products of an expert, and where its parameters come from.

With ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)`` the result is ``g * sigmoid(alpha * g) * (u + beta)``: the
gate is clamped from above only, up on both sides, both before the product. It is computed in fp32 as
``g / (1 + exp(-alpha * g)) * (u + beta)`` and rounded once. Without a limit nothing is clamped, and with ``beta == 0`` nothing is
added (adding 0 would turn -0.0 into 0.0), so plain SwiGLU is what it always was, bit for bit. NaN passes through.

swiglu: one set of parameters

===========  =========  ===============  =============================================================================
argument     dtype      shape            meaning
===========  =========  ===============  =============================================================================
gate_up      fp32/bf16  [..., 2*I]       1 to 4 dimensions, any strides; gate in the first half, up in the second
alpha        float                       slope inside the sigmoid
beta         float                       added to up
limit        float?                      above 0; None: no clamp
interleaved  bool                        true: gate in the even columns, up in the odd ones
returns      as input   [..., I]         contiguous
===========  =========  ===============  =============================================================================

swiglu_per_expert: parameters by expert

============  =========  =============  ==============================================================================
argument      dtype      shape          meaning
============  =========  =============  ==============================================================================
gate_up       fp32/bf16  [rows, 2*I]    any strides
expert_ids    int32/64   [rows]         expert of each row; an id outside [0, num_experts) is padding: zeros, no load
alpha         fp32       [num_experts]
beta          fp32       [num_experts]
limit         fp32       [num_experts]  above 0; +inf: no clamp. 0, a negative value or NaN gives a row of NaN: the
                                        values are on the device, so an error cannot be raised without a synchronization
                                        (``SwiGLUParams`` raises it when it is built)
interleaved   bool
returns       as input   [rows, I]      contiguous; a row has the bits that ``swiglu`` gives with its expert's values
============  =========  =============  ==============================================================================

Graph-safe: yes (no host reads). Replaces the activation kernels of fused MoE layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError

__all__ = ["SwiGLUParams", "swiglu", "swiglu_per_expert"]

SWIGLU = _registry.define("swiglu(Tensor gate_up, float alpha=1.0, float beta=0.0, float? limit=None, bool interleaved=False) -> Tensor", out=("out",))


def swiglu(gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, interleaved: bool = False) -> torch.Tensor:
    """Clamped SwiGLU over the last dimension: ``[..., 2*I] -> [..., I]`` in the input's dtype.

    Raises ArgumentError (limit of 0 or less), ArgumentDtypeError, ArgumentShapeError.
    Arguments: ``python -m dsv4_ops ops swiglu``.
    """
    return SWIGLU(gate_up, alpha, beta, limit, interleaved)  # type: ignore[no-any-return]


def _check_gate_up(where: str, gate_up: torch.Tensor, ndim: int | tuple[int, ...]) -> None:
    _checks.tensor(where, "gate_up", gate_up, _checks.FLOATS, ndim)
    if gate_up.shape[-1] % 2:
        raise ArgumentShapeError(where, "gate_up", "of an even last dimension (gate and up)", f"shape {list(gate_up.shape)}")


def _check(gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, interleaved: bool = False) -> None:
    _check_gate_up("swiglu", gate_up, (1, 2, 3, 4))
    if limit is not None and not limit > 0:
        raise ArgumentError("swiglu", "limit", "above 0, or None for no clamp", limit)


def _halves(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = gate_up.shape[-1] // 2
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else (gate_up[..., :width], gate_up[..., width:])
    return gate.to(torch.float32), up.to(torch.float32)


def _reference(gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, interleaved: bool = False) -> torch.Tensor:
    g, u = _halves(gate_up, interleaved)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if beta != 0:
        u = u + beta
    return (g / (1 + torch.exp(-alpha * g)) * u).to(gate_up.dtype).contiguous()


def _torch(gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, interleaved: bool = False) -> torch.Tensor:
    g, u = _halves(gate_up, interleaved)
    copied = gate_up.dtype != torch.float32  # then both halves are copies, free to be overwritten
    if limit is not None:
        g, u = (g.clamp_(max=limit), u.clamp_(-limit, limit)) if copied else (g.clamp(max=limit), u.clamp(-limit, limit))
    if beta != 0:
        u = u.add_(beta) if copied else u + beta
    # exp() and not sigmoid(): PyTorch's CPU sigmoid and SiLU round the last few elements of a tensor in another way than the rest.
    result = torch.mul(g, -alpha).exp_().add_(1)
    return torch.div(g, result, out=result).mul_(u).to(gate_up.dtype).contiguous()


def _triton(gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, interleaved: bool = False) -> torch.Tensor:
    from ._triton import swiglu as kernels

    return kernels.swiglu(gate_up, alpha, beta, limit, interleaved)


def _fake(gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, interleaved: bool = False) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 8).to(device)

    yield Sample("plain, bf16", (values(5, 64).bfloat16(),))
    yield Sample("DeepSeek-V4, bf16", (values(5, 64).bfloat16(), 1.0, 0.0, 10.0))
    yield Sample("GPT-OSS, fp32, interleaved", (values(7, 34), 1.702, 1.0, 7.0, True))
    yield Sample("three dimensions, row stride", (values(2, 3, 48)[..., 5:35], 1.0, 0.0, 10.0))
    yield Sample("transposed", (values(30, 4).t(), 1.0, 0.0, 3.0, True))
    yield Sample("no rows", (values(0, 16), 1.0, 0.0, 10.0))
    yield Sample("no columns", (values(4, 0), 1.0, 0.5, 10.0))
    yield Sample("one row, one value, limit infinite", (values(2), 1.0, 0.0, float("inf")))
    extremes = torch.tensor([torch.inf, 3e38, -3e38, 0.0, -0.0, 88.0, -88.0, 1e-40], device=device)
    yield Sample("extremes and signed zeros", (torch.cartesian_prod(extremes, extremes), 1.0, 0.0, 10.0))


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(f"{n} rows", (torch.randn(n, 96, generator=generator).to(device), 1.0, 0.0, 10.0))


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    x = torch.ones(3, 8, device=device)
    yield BadInput("fp16", (x.half(),), ArgumentDtypeError, "gate_up must be float32 or bfloat16")
    yield BadInput("odd width", (x[:, :7],), ArgumentShapeError, "gate_up must be of an even last dimension")
    yield BadInput("scalar", (x[0, 0],), ArgumentShapeError, "gate_up must be 1-dimensional")
    yield BadInput("limit 0", (x, 1.0, 0.0, 0.0), ArgumentError, "limit must be above 0, or None for no clamp, got 0.0")
    yield BadInput("limit negative", (x, 1.702, 1.0, -7.0), ArgumentError, "limit must be above 0")
    yield BadInput("limit NaN", (x, 1.0, 0.0, float("nan")), ArgumentError, "limit must be above 0")


SWIGLU.implement(check=_check, reference=_reference, torch_impl=_torch, triton=_triton, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs)

SWIGLU_PER_EXPERT = _registry.define(
    "swiglu_per_expert(Tensor gate_up, Tensor expert_ids, Tensor alpha, Tensor beta, Tensor limit, bool interleaved=False) -> Tensor", out=("out",)
)


def swiglu_per_expert(
    gate_up: torch.Tensor, expert_ids: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, limit: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Clamped SwiGLU of rows that belong to experts with parameters of their own: ``[rows, 2*I] -> [rows, I]`` in the input's dtype.

    Raises ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops swiglu_per_expert``.
    """
    return SWIGLU_PER_EXPERT(gate_up, expert_ids, alpha, beta, limit, interleaved)  # type: ignore[no-any-return]


def _expert_check(gate_up: torch.Tensor, expert_ids: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, limit: torch.Tensor, interleaved: bool = False) -> None:
    where = "swiglu_per_expert"
    _check_gate_up(where, gate_up, 2)
    _checks.tensor(where, "expert_ids", expert_ids, _checks.INDEX, 1)
    _checks.shape(where, "expert_ids", expert_ids, (gate_up.shape[0],), "[rows], one for each row of gate_up")
    for name, value in (("alpha", alpha), ("beta", beta), ("limit", limit)):
        _checks.tensor(where, name, value, (torch.float32,), 1)
        _checks.shape(where, name, value, (alpha.shape[0],), "[num_experts] like alpha")
    _checks.same_device(where, gate_up=gate_up, expert_ids=expert_ids, alpha=alpha, beta=beta, limit=limit)


def _expert_reference(
    gate_up: torch.Tensor, expert_ids: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, limit: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    out = gate_up.new_zeros((gate_up.shape[0], gate_up.shape[1] // 2))
    for row, expert in enumerate(expert_ids.tolist()):
        if 0 <= expert < alpha.shape[0]:
            bound = float(limit[expert])
            out[row] = _reference(gate_up[row], float(alpha[expert]), float(beta[expert]), bound, interleaved) if bound > 0 else torch.nan
    return out


def _expert_torch(
    gate_up: torch.Tensor, expert_ids: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, limit: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    experts = alpha.shape[0]
    if experts == 0:
        return gate_up.new_zeros((gate_up.shape[0], gate_up.shape[1] // 2))
    expert = expert_ids.clamp(0, experts - 1).to(torch.int64)
    a, b, bound = alpha[expert, None], beta[expert, None], limit[expert, None]
    bound = torch.where(bound > 0, bound, torch.nan)
    g, u = _halves(gate_up, interleaved)
    g = torch.minimum(g, bound)
    u = torch.maximum(u, -bound)
    torch.minimum(u, bound, out=u)
    u.add_(torch.where(b == 0, -0.0, b))  # adding -0.0 changes no value, not even -0.0
    result = torch.mul(g, -a).exp_().add_(1)
    torch.div(g, result, out=result).mul_(u)
    live = (expert_ids >= 0) & (expert_ids < experts)
    return result.masked_fill_(~live[:, None], 0.0).to(gate_up.dtype).contiguous()


def _expert_triton(
    gate_up: torch.Tensor, expert_ids: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, limit: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    from ._triton import swiglu as kernels

    return kernels.swiglu(gate_up, alpha, beta, limit, interleaved, expert_ids)


def _expert_fake(
    gate_up: torch.Tensor, expert_ids: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, limit: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _expert_args(device: torch.device | str, rows: int, width: int, experts: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(rows, width, generator=generator) * 8).to(dtype)
    ids = torch.randint(-1, experts + 1, (rows,), generator=generator, dtype=torch.int32)
    alpha, beta, limit = (torch.rand(experts, generator=generator) * scale for scale in (2.0, 1.0, 12.0))
    beta[::2], limit[1::3] = 0.0, torch.inf
    return [x.to(device) for x in (gate_up, ids, alpha, beta, limit)]


def _expert_samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    yield Sample("bf16, padding rows", (*_expert_args(device, 40, 32, 6, seed, torch.bfloat16),))
    yield Sample("fp32, interleaved", (*_expert_args(device, 9, 20, 3, seed), True))
    yield Sample("no rows", (*_expert_args(device, 0, 8, 3, seed),))
    gate_up, ids, alpha, beta, limit = _expert_args(device, 6, 16, 4, seed)
    yield Sample("no experts", (gate_up, ids, alpha[:0], beta[:0], limit[:0]))
    extremes = torch.tensor([0, 4, -1, 2**31 - 1, -(2**31), 3], dtype=torch.int32, device=device)
    yield Sample("int32 extremes", (gate_up, extremes, alpha, beta, limit))
    yield Sample("strided", (gate_up.repeat(1, 2)[:, ::2], ids.repeat(2)[::2], alpha.repeat(2)[::2], beta, limit))


def _expert_sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    return Sample(f"{n} rows", (*_expert_args(device, n, 96, 12, seed),))


def _expert_bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    gate_up, ids, alpha, beta, limit = _expert_args(device, 5, 8, 3, 0)
    yield BadInput("odd width", (gate_up[:, :7], ids, alpha, beta, limit), ArgumentShapeError, "gate_up must be of an even last dimension")
    yield BadInput("float ids", (gate_up, ids.float(), alpha, beta, limit), ArgumentDtypeError, "expert_ids must be int32 or int64")
    yield BadInput("fewer ids", (gate_up, ids[:4], alpha, beta, limit), ArgumentShapeError, "expert_ids must be of shape [rows]")
    yield BadInput("bf16 alpha", (gate_up, ids, alpha.bfloat16(), beta, limit), ArgumentDtypeError, "alpha must be float32")
    yield BadInput("one limit", (gate_up, ids, alpha, beta, limit[:1]), ArgumentShapeError, "limit must be of shape [num_experts]")


SWIGLU_PER_EXPERT.implement(
    check=_expert_check, reference=_expert_reference, torch_impl=_expert_torch, triton=_expert_triton, fake=_expert_fake, samples=_expert_samples, sized=_expert_sized,
    bad_inputs=_expert_bad_inputs,
)  # fmt: skip

_MISSING: Any = object()


@dataclass(frozen=True, eq=False)
class SwiGLUParams:
    """Parameters of the activation of one model, decided by its model type and its quantization config.

    Each is a number, or fp32 ``[num_experts]``; ``limit`` may be None. An ``alpha`` or ``beta`` of None is 1 or 0: a limit alone is
    a clamped SwiGLU, not a plain one. Lists become tensors (None inside a list of limits: that expert has none).
    """

    alpha: float | torch.Tensor = 1.0
    beta: float | torch.Tensor = 0.0
    limit: float | torch.Tensor | None = None

    def __post_init__(self) -> None:
        alpha, beta, limit = _parameter(self.alpha, 1.0), _parameter(self.beta, 0.0), _parameter(self.limit, None)
        if limit is not None and not (bool((limit > 0).all()) if isinstance(limit, torch.Tensor) else limit > 0):
            raise ArgumentError("SwiGLUParams", "limit", "above 0, or None for no clamp", limit)
        counts = {value.shape[0] for value in (alpha, beta, limit) if isinstance(value, torch.Tensor)}
        if len(counts) > 1:
            raise ArgumentShapeError("SwiGLUParams", "per-expert parameters", "of one shape [num_experts]", f"{sorted(counts)} experts")
        for name, value in (("alpha", alpha), ("beta", beta), ("limit", limit)):
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SwiGLUParams) and self.to_config() == other.to_config()

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_experts(self) -> int | None:
        """Number of experts that the parameters tell apart, or None."""
        return next((value.shape[0] for value in (self.alpha, self.beta, self.limit) if isinstance(value, torch.Tensor)), None)

    @classmethod
    def from_config(cls, config: Any) -> SwiGLUParams:
        """Parameters of a model config (a transformers config object, or the dict of a ``config.json``).

        The model type decides: ``gpt_oss`` has (1.702, 1, 7), ``deepseek_v4`` (1, 0, its ``swiglu_limit``), any other (1, 0, None); ``swiglu_alpha``,
        ``swiglu_beta`` and ``swiglu_limit`` of the model config, then of its ``quantization_config``, replace what is there. How
        weights are stored decides nothing. Raises ArgumentError where a DeepSeek-V4 config has no ``swiglu_limit`` at all.
        """
        model_type = str(_get(config, "model_type", "") or "")
        text = _get(config, "text_config", None)
        if text is not None and text is not config and not _is_known(model_type):
            return cls.from_config({**_fields(text), "quantization_config": _get(config, "quantization_config", None) or _get(text, "quantization_config", None)})
        values: dict[str, Any] = {"alpha": 1.0, "beta": 0.0, "limit": None}
        if model_type == "gpt_oss":
            values = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
        values.update((name, value) for name, value in _stated(config).items() if value is not None or name == "limit")
        values.update((name, value) for name, value in _stated(_get(config, "quantization_config", None)).items() if value is not None)
        if _is_known(model_type) and model_type != "gpt_oss" and values["limit"] is None and "limit" not in _stated(config):
            raise ArgumentError("SwiGLUParams.from_config", "config", "a DeepSeek-V4 config with swiglu_limit", "none", "Set swiglu_limit (null for no clamp) in config.json.")
        return cls(**values)

    def to_config(self) -> dict[str, Any]:
        """The three values as a ``quantization_config`` states them (plain JSON); ``from_config`` reads them back unchanged."""

        def plain(value: float | torch.Tensor | None) -> Any:
            return [None if x == float("inf") else x for x in value.tolist()] if isinstance(value, torch.Tensor) else value

        return {f"swiglu_{name}": plain(getattr(self, name)) for name in _FIELDS}

    def apply(self, gate_up: torch.Tensor, expert_ids: torch.Tensor | None = None, interleaved: bool = False) -> torch.Tensor:
        """The activation with these parameters; per-expert ones need ``expert_ids`` ``[rows]``.

        Raises ArgumentError where these are missing, and what :func:`swiglu` raises.
        """
        experts = self.num_experts
        if experts is None:
            return swiglu(gate_up, self.alpha, self.beta, self.limit, interleaved)  # type: ignore[arg-type]
        if expert_ids is None:
            raise ArgumentError("SwiGLUParams.apply", "expert_ids", "given for per-expert parameters", None)

        def full(value: float | torch.Tensor | None) -> torch.Tensor:
            if isinstance(value, torch.Tensor):
                return value.to(gate_up.device)
            return torch.full((experts,), float("inf") if value is None else value, device=gate_up.device)

        return swiglu_per_expert(gate_up, expert_ids, full(self.alpha), full(self.beta), full(self.limit), interleaved)


_FIELDS = ("alpha", "beta", "limit")


def _is_known(model_type: str) -> bool:
    return model_type in ("gpt_oss", "deepseek_v4") or model_type.startswith("deepseek_v4_")


def _get(config: Any, name: str, default: Any) -> Any:
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)


def _fields(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else dict(vars(config))


def _stated(config: Any) -> dict[str, Any]:
    """The swiglu fields that ``config`` has, by short name."""
    found = {name: _get(config, f"swiglu_{name}", _MISSING) for name in _FIELDS} if config is not None else {}
    return {name: value for name, value in found.items() if value is not _MISSING}


def _parameter(value: Any, default: float | None) -> Any:
    if value is None:
        return default
    if isinstance(value, torch.Tensor | list | tuple):
        listed = value if isinstance(value, torch.Tensor) else torch.tensor([float("inf") if x is None else float(x) for x in value])
        if listed.dim() != 1:
            raise ArgumentShapeError("SwiGLUParams", "per-expert parameters", "of shape [num_experts]", f"shape {list(listed.shape)}")
        return listed.to(torch.float32)
    return float(value)
