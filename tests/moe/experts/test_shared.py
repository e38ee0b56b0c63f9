"""The shared expert: its node and plain operations agree, in every type of gradient that there is."""

from __future__ import annotations

import pytest
import torch
from expert_kinds import D, built_in, normal

from apart import apart
from moeclipse.moe.experts.shared import shared_expert, shared_expert_reference
from moeclipse.testing.compare import difference


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 9])
@apart
def test_the_node_equals_its_definition(rows: int, bias: bool) -> None:
    experts, x, dy = built_in([-1], bias), normal(rows, D, key=1).requires_grad_(), normal(rows, D, key=2)
    given = [x, *experts.weights]
    found = [function(x, experts) for function in (shared_expert, shared_expert_reference)]
    assert difference(*found) <= 1e-14
    grads = [torch.autograd.grad(y, given, dy) for y in found]
    for one, other in zip(*grads, strict=True):
        assert difference(one, other) <= 1e-13


@apart
def test_gradients_go_where_those_of_weights_go() -> None:
    experts, x = built_in([-1]), normal(4, D, key=1)
    expected = torch.autograd.grad(shared_expert_reference(x, experts).sum(), experts.up)[0]
    experts.up.main_grad, experts.down.main_grad = (torch.ones_like(w) for w in experts.weights)
    shared_expert(x, experts).sum().backward()
    assert difference(experts.up.main_grad, 1 + expected) <= 1e-13
    assert experts.up.grad is None
