"""Norms of bfloat16 models, with the transformers that is here and with one whose norms give float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

from dsv4_ops.engine.norms import keep_type


def multiplies_last(self: DeepseekV4RMSNorm, states: torch.Tensor) -> torch.Tensor:
    normed = states.float() * torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * normed.to(states.dtype)


@pytest.mark.parametrize("old", [False, True])
def test_norms_round_to_the_type_of_their_input(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old:
        monkeypatch.setattr(DeepseekV4RMSNorm, "forward", multiplies_last)
    model = nn.Sequential(DeepseekV4RMSNorm(16), nn.Linear(16, 16, bias=False, dtype=torch.bfloat16), DeepseekV4RMSNorm(16))
    states = torch.randn(3, 16, dtype=torch.bfloat16)
    needed = DeepseekV4RMSNorm(16)(states).dtype != states.dtype
    assert needed or not old
    if needed:
        with pytest.raises(RuntimeError, match="same dtype"):
            model(states)
    for _ in range(2):
        keep_type(model)
        assert all(len(norm._forward_hooks) == needed for norm in model[::2]), "once, and only where it is needed"
    assert model(states).dtype == torch.bfloat16 and model[0](states.float()).dtype == torch.float32
    assert torch.equal(model[0](states), nn.functional.rms_norm(states.float(), (16,), eps=model[0].variance_epsilon).bfloat16())
