"""The forms in which transformers keeps experts, turned into ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import build

from moeclipse.hf.foreign_experts import activation_of, apart, is_experts, own_form, parameter_names
from moeclipse.testing.run_ranks import run_alone


def experts_of(model_type: str, **changes: Any) -> Any:
    return next(module for module in build(model_type, **changes).modules() if is_experts(module))


@pytest.mark.parametrize(
    ("model_type", "expected"), [("mixtral", "swiglu"), ("gpt_oss", "clamped_swiglu"), ("olmoe", "swiglu")]
)
def test_the_activation_is_known(model_type: str, expected: str) -> None:
    assert activation_of(experts_of(model_type)) == expected


def test_other_activations_are_told_apart() -> None:
    assert activation_of(experts_of("mixtral", hidden_act="gelu")) == "geglu"
    assert activation_of(experts_of("mixtral", hidden_act="gelu_pytorch_tanh")) is None
    assert activation_of(experts_of("mixtral", hidden_act="relu")) is None
    other = experts_of("gpt_oss")
    other.limit = 5.0
    assert activation_of(other) is None
    normed = experts_of("mixtral")
    normed.has_post_expert_norm = True
    assert activation_of(normed) is None
    plain = SimpleNamespace(has_gate=False, act_fn=torch.nn.Tanh())
    assert activation_of(plain) is None  # type: ignore[arg-type]


def test_rows_that_take_turns_are_taken_apart() -> None:
    assert apart(torch.tensor([[0, 10, 1, 11, 2, 12]])).tolist() == [[0, 1, 2, 10, 11, 12]]


def forms(_: Any) -> None:
    experts = experts_of("gpt_oss")
    assert parameter_names(experts) == ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]
    up, down, up_bias, _ = own_form(experts)
    assert up.shape == (4, 12, 16)
    assert torch.equal(up[:, :6], experts.gate_up_proj[..., ::2].transpose(1, 2))
    assert torch.equal(up[:, 6:], experts.gate_up_proj[..., 1::2].transpose(1, 2))
    assert torch.equal(up_bias[:, 6:], experts.gate_up_proj_bias[:, 1::2])
    assert torch.equal(down, experts.down_proj.transpose(1, 2))
    up.sum().backward()
    assert torch.equal(experts.gate_up_proj.grad, torch.ones_like(experts.gate_up_proj))
    same = experts_of("mixtral")
    assert own_form(same)[0] is same.gate_up_proj, "nothing is copied where forms agree"


def test_weights_are_given_in_our_form() -> None:
    run_alone(forms)
