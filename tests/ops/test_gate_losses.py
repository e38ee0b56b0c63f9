"""A gate's losses from its sums, by their definition."""

from __future__ import annotations

import torch

from moeclipse.ops.gate_losses import gate_losses


def test_both_losses_and_their_gradients() -> None:
    load = torch.tensor([3, 1])
    prob = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    squares = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    aux = gate_losses(load, prob, squares, 0.1, 0.2)
    assert abs(aux.item() - (0.1 * 3.5 + 0.2 * 7)) < 1e-15
    d_prob, d_squares = torch.autograd.grad(aux, (prob, squares))
    assert torch.allclose(d_prob, torch.tensor([0.3, 0.1], dtype=torch.float64), rtol=1e-15)
    assert d_squares.item() == 0.2


def test_without_a_z_loss_the_logits_may_be_infinite() -> None:
    aux = gate_losses(torch.tensor([1]), torch.ones(1), torch.tensor(float("inf")), 2.0, 0.0)
    assert aux.item() == 2
