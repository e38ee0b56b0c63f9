"""A gate by its definition; its kernels are compared in tests/ops/triton and on a device."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.gate import GateKind, gate, gate_fits, gate_reference


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_best_are_chosen_and_their_scores_sum_to_the_scale(tokens: int, sigmoid: bool) -> None:
    x, weight = torch.randn(tokens, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    chosen = gate(x, weight, torch.zeros(6), GateKind(k=2, sigmoid=sigmoid, scale=2.5))
    assert torch.equal(chosen.ids_TK, (x @ weight.t()).topk(2).indices)
    torch.testing.assert_close(chosen.scores_TK.sum(1), torch.full((tokens,), 2.5, dtype=torch.float64))
    assert chosen.load_E.sum() == 2 * tokens
    torch.testing.assert_close(chosen.prob_E.sum(), torch.tensor(float(tokens), dtype=torch.float64))


def test_a_bias_steers_the_choice_and_never_the_score() -> None:
    x, weight = torch.zeros(3, 4), torch.randn(5, 4)
    chosen = gate(x, weight, torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]), GateKind(k=2, renormalise=False))
    assert chosen.ids_TK.tolist() == [[3, 1]] * 3
    torch.testing.assert_close(chosen.scores_TK, torch.full((3, 2), 0.2))


def test_of_equal_ones_the_first_are_chosen() -> None:
    chosen = gate_reference(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4), GateKind(k=3))
    assert chosen.ids_TK.tolist() == [[0, 1, 2]] * 2


def test_one_renormalised_choice_has_no_gradient() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    gate(torch.randn(5, 3), weight, torch.zeros(4), GateKind(k=1)).scores_TK.sum().backward()
    assert weight.grad is None or not weight.grad.any()


def test_kernels_take_bf16_on_cuda_alone() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    assert not gate_fits(x, x, 1), "not on the CPU"
