"""Clamped SwiGLU against hand numbers, fp64, and the activation modules of transformers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_ops import SwiGLUParams, swiglu, swiglu_per_expert
from dsv4_ops.errors import ArgumentError, ArgumentShapeError
from tests.common import ratio


def one(gate: float, up: float, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None) -> float:
    """Both layouts give the same number."""
    halves = float(swiglu(torch.tensor([gate, up], dtype=torch.float32), alpha, beta, limit))
    assert halves == float(swiglu(torch.tensor([[gate, up]], dtype=torch.float32), alpha, beta, limit, interleaved=True))
    return halves


def params(model: dict[str, Any] | object, **quantization: Any) -> SwiGLUParams:
    return SwiGLUParams.from_config({**model, "quantization_config": quantization} if isinstance(model, dict) else model)


def triple(p: SwiGLUParams) -> tuple[Any, Any, Any]:
    return p.alpha, p.beta, p.limit


def test_case_F01_model_type_decides_the_parameters() -> None:
    assert one(2, 3, 1.0, 0.0, 10.0) == pytest.approx(5.284782, abs=1e-6)
    assert one(2, 3, 1.702, 1.0, 7.0) == pytest.approx(7.742634, abs=1e-6)
    for storage in ({}, {"quant_method": "mxfp4"}, {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}):  # how weights are stored decides nothing
        assert triple(params({"model_type": "deepseek_v4", "swiglu_limit": 10.0}, **storage)) == (1.0, 0.0, 10.0)
        assert triple(params({"model_type": "deepseek_v4", "swiglu_limit": None}, **storage)) == (1.0, 0.0, None)
        assert triple(params({"model_type": "gpt_oss"}, **storage)) == (1.702, 1.0, 7.0)
        assert triple(params({"model_type": "llama"}, **storage)) == (1.0, 0.0, None)


def test_case_F02_limit_is_applied() -> None:
    assert one(20, -30, limit=10.0) == pytest.approx(-99.995460, abs=1e-5)
    assert one(20, -30) == pytest.approx(-600.0, abs=1e-4)


def test_case_F04_no_limit_is_byte_identical_to_plain() -> None:
    x = torch.randn(64, 4096).mul(6).bfloat16()
    x[0, :4] = torch.tensor([-0.0, 0.0, -0.0, 1.0])
    x[0, 2048:2052] = torch.tensor([-0.0, -0.0, 0.0, -0.0])
    gate, up = x[:, :2048].float(), x[:, 2048:].float()
    plain = (gate / (1 + torch.exp(-gate)) * up).bfloat16()
    bits = lambda t: t.view(torch.int16)  # noqa: E731
    assert torch.equal(bits(plain), bits((torch.nn.functional.silu(gate) * up).bfloat16()))
    for limit in (None, 1e30, math.inf):
        assert torch.equal(bits(swiglu(x, limit=limit)), bits(plain))
    ids, full = torch.zeros(64, dtype=torch.int32), [torch.tensor([v]) for v in (1.0, 0.0, math.inf)]
    assert torch.equal(bits(swiglu_per_expert(x, ids, *full)), bits(plain))
    for wrong in (0.0, -0.0, -7.0, math.nan):
        with pytest.raises(ArgumentError, match="limit must be above 0"):
            swiglu(x, limit=wrong)
        with pytest.raises(ArgumentError, match="limit must be above 0"):
            SwiGLUParams(limit=wrong)


def test_case_F05_gate_is_clamped_from_above_only() -> None:
    assert one(-20, 12, limit=10.0) == pytest.approx(-4.122307e-07, rel=1e-5)
    assert one(20, 1, limit=10.0) == pytest.approx(10 / (1 + math.exp(-10)), rel=1e-6)
    assert one(1, 30, limit=10.0) == -one(1, -30, limit=10.0) == pytest.approx(7.310586, abs=1e-5)


def test_case_F06_limit_without_alpha_is_a_clamp() -> None:
    for made in (
        SwiGLUParams(None, None, 10.0),  # type: ignore[arg-type]
        params({"model_type": "other"}, swiglu_alpha=None, swiglu_beta=None, swiglu_limit=10.0),
        params({"model_type": "other", "swiglu_limit": 10.0, "swiglu_alpha": None}),
        params({"model_type": "deepseek_v4", "swiglu_limit": 10.0}, swiglu_alpha=None),
    ):
        assert triple(made) == (1.0, 0.0, 10.0)
        assert float(made.apply(torch.tensor([20.0, -30.0]))) == pytest.approx(-99.995460, abs=1e-5)


def test_case_F08_per_expert_parameters_are_used_and_survive_a_round_trip() -> None:
    made = params({"model_type": "gpt_oss"}, swiglu_alpha=[1.702, 1.702], swiglu_beta=[1.0, 1.0], swiglu_limit=[7.0, 3.0])
    x, ids = torch.tensor([[8.0, 9.0], [8.0, 9.0], [8.0, 9.0]]), torch.tensor([0, 1, -1], dtype=torch.int32)
    out = made.apply(x, ids)
    assert out[:, 0].tolist() == pytest.approx([55.999625, 11.927715, 0.0], abs=1e-5)
    again = params({"model_type": "gpt_oss"}, **json.loads(json.dumps(made.to_config())))
    assert again == made and again.num_experts == 2
    for value in triple(again):
        assert isinstance(value, torch.Tensor) and value.shape == (2,) and value.dtype == torch.float32
    assert torch.equal(again.apply(x, ids), out)
    with pytest.raises(ArgumentError, match="expert_ids must be given"):
        made.apply(x)


def test_case_F09_clamp_comes_before_the_product() -> None:
    assert one(3, 5, limit=10.0) == pytest.approx(14.288612, abs=1e-5)


def test_one_tensor_parameter_makes_all_three_per_expert() -> None:
    """Mixed with numbers, with None in a list and as tensors of another dtype: nothing is dropped."""
    made = SwiGLUParams(1.702, torch.tensor([0.0, 1.0], dtype=torch.float64), [7.0, None])  # type: ignore[arg-type]
    x = torch.randn(6, 32) * 9
    ids = torch.tensor([0, 1, 0, 1, 2, 0])
    out = made.apply(x, ids, interleaved=True)
    for row, expert in enumerate(ids.tolist()):
        expected = swiglu(x[row], 1.702, (0.0, 1.0)[expert], (7.0, None)[expert], interleaved=True) if expert < 2 else torch.zeros(16)
        assert torch.equal(out[row], expected)
    assert made == SwiGLUParams.from_config({"quantization_config": json.loads(json.dumps(made.to_config()))})
    assert made != SwiGLUParams(1.702, [0.0, 1.0], [7.0, 8.0])  # type: ignore[arg-type]
    for wrong, error in (({"limit": [7.0, 0.0]}, ArgumentError), ({"limit": torch.ones(2, 2)}, ArgumentShapeError), ({"alpha": [1.0], "beta": [1.0, 2.0]}, ArgumentShapeError)):
        with pytest.raises(error):
            SwiGLUParams(**wrong)


def test_unusable_device_limit_shows_as_nan() -> None:
    x, ids = torch.ones(5, 8), torch.arange(5)
    limit = torch.tensor([0.0, -1.0, torch.nan, 2.0, torch.inf])
    out = swiglu_per_expert(x, ids, torch.ones(5), torch.zeros(5), limit)
    assert out.isnan().all(1).tolist() == [True, True, True, False, False]


def test_config_sources() -> None:
    """Objects, nested text configs, draft heads; the quantization config has the last word, field by field."""
    v4 = SimpleNamespace(model_type="deepseek_v4", swiglu_limit=10.0)
    assert triple(params(v4)) == (1.0, 0.0, 10.0)
    assert triple(params({"model_type": "deepseek_v4_mtp", "swiglu_limit": 10.0})) == (1.0, 0.0, 10.0)
    assert triple(params({"model_type": "wrapper", "text_config": v4})) == (1.0, 0.0, 10.0)
    assert triple(params({"model_type": "wrapper", "text_config": {"model_type": "gpt_oss"}}, swiglu_limit=5.0)) == (1.702, 1.0, 5.0)
    assert triple(params({"model_type": "gpt_oss", "swiglu_alpha": 1.5, "swiglu_limit": 6.0})) == (1.5, 1.0, 6.0)
    assert triple(params({"model_type": "deepseek_v4", "swiglu_limit": 10.0}, swiglu_limit=4.0)) == (1.0, 0.0, 4.0)
    v4.quantization_config = SimpleNamespace(quant_method="fp8", swiglu_beta=0.5)
    assert triple(params(v4)) == (1.0, 0.5, 10.0)
    with pytest.raises(ArgumentError, match="config must be a DeepSeek-V4 config with swiglu_limit"):
        params({"model_type": "deepseek_v4"})


def test_against_transformers_deepseek_v4() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts, DeepseekV4MLP

    config = DeepseekV4Config(hidden_size=32, intermediate_size=24, moe_intermediate_size=24, swiglu_limit=2.0, num_hidden_layers=1)
    made = SwiGLUParams.from_config(config)
    assert triple(made) == (1.0, 0.0, 2.0) and triple(SwiGLUParams.from_config(config.to_dict())) == (1.0, 0.0, 2.0)
    assert triple(SwiGLUParams.from_config(DeepseekV4Config())) == (1.0, 0.0, 10.0)
    mlp = DeepseekV4MLP(config)
    x = torch.randn(9, 32) * 20
    with torch.no_grad():
        gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1)
        assert bool((gate_up.abs() > 2).any()) and bool((gate_up.abs() < 2).any())
        torch.testing.assert_close(mlp.down_proj(made.apply(gate_up)), mlp(x), rtol=1e-5, atol=1e-6)
        experts = DeepseekV4Experts(config)
        torch.testing.assert_close(made.apply(gate_up), experts._apply_gate(gate_up), rtol=1e-6, atol=1e-6)


def test_against_transformers_gpt_oss() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=16, intermediate_size=8, num_local_experts=2, num_hidden_layers=1)
    made = SwiGLUParams.from_config(config)
    assert triple(made) == (1.702, 1.0, 7.0)
    gate_up = torch.randn(9, 16) * 8
    with torch.no_grad():
        torch.testing.assert_close(made.apply(gate_up, interleaved=True), GptOssExperts(config)._apply_gate(gate_up), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("alpha", "beta", "limit"), [(1.0, 0.0, None), (1.0, 0.0, 10.0), (1.702, 1.0, 7.0), (0.5, -0.25, 1e-3)])
def test_rounded_once_from_full_precision(alpha: float, beta: float, limit: float | None, dtype: torch.dtype, device: str) -> None:
    x = (torch.randn(50, 62) * 8).to(dtype).to(device)
    gate, up = x[:, :31].double(), x[:, 31:].double()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    exact = gate * torch.sigmoid(alpha * gate) * (up + beta)
    got = swiglu(x, alpha, beta, limit).double()
    working = (gate * torch.sigmoid(alpha * gate)).abs() * (up.abs() + abs(beta)) * (2.0**-21 + (alpha * gate).abs() * 2.0**-23)  # fp32, exp() magnifies its argument's rounding
    last = exact.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0.0  # half a unit in the last place, once
    assert bool(((got - exact).abs() <= working + last + 1e-37).all())


def test_row_has_the_same_bits_in_any_batch() -> None:
    x = torch.randn(33, 2 * 53) * 5
    whole = swiglu(x, 1.702, 1.0, 7.0)
    assert all(torch.equal(swiglu(x[i : i + 1], 1.702, 1.0, 7.0)[0], whole[i]) for i in range(33))


def test_costs_less_than_three_times_the_plain_calls() -> None:
    """1.7x to 2.1x on one core."""
    x = torch.randn(64, 4096).bfloat16()
    silu = torch.nn.functional.silu
    plain = lambda: (silu(x[:, :2048].float().clamp(max=10)) * x[:, 2048:].float().clamp(-10, 10)).bfloat16()  # noqa: E731
    assert ratio(lambda: swiglu(x, 1.0, 0.0, 10.0), plain) < 3
