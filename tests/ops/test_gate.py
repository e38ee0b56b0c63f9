"""A gate by its definition; its kernels are compared in tests/ops/triton and on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.ops import gate as module
from moeclipse.ops.gate import Chosen, GateKind, gate, gate_fits, gate_reference


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


def test_a_bias_of_the_logits_changes_choice_and_score() -> None:
    more = torch.tensor([0.0, 3.0, 0.0])
    chosen = gate(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3), GateKind(k=1), None, more)
    assert chosen.ids_TK.tolist() == [[1], [1]]
    torch.testing.assert_close(chosen.prob_E, 2 * more.softmax(0))


@pytest.mark.parametrize("biased", [True, False])
def test_gradients_around_the_kernels(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    """Products and the bias, with kernels and products for devices replaced by what defines them."""
    eye, product, kind = torch.eye(6, dtype=torch.float64), torch.mm, GateKind(k=2)

    def chosen(logits: torch.Tensor, bias: torch.Tensor, kind: GateKind) -> Chosen:
        return gate_reference(logits, eye, bias, kind)

    def pieces(logits: torch.Tensor, _: Any, *given: Any) -> torch.Tensor:
        *grads, kind, _ = given
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            told = chosen(leaf, torch.zeros(6), kind)
            outputs = (told.scores_TK, told.prob_E, told.squares)
            (d_logits,) = torch.autograd.grad(outputs, leaf, grads)
        return torch.cat([d_logits / 2, d_logits / 4, d_logits / 4], 1)

    monkeypatch.setattr(module, "gate_fits", lambda *_: True)
    monkeypatch.setattr(module, "choose_kernel", chosen)
    monkeypatch.setattr(module, "choose_backward_kernel", pieces)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None: product(a, b))
    generator = torch.Generator().manual_seed(0)
    found = []
    for run in (gate, gate_reference):
        generator.manual_seed(0)
        shapes = ((5, 4), (6, 4), (6,))
        x, weight, more = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        leaves = [x.requires_grad_(), weight.requires_grad_(), *([more.requires_grad_()] if biased else [])]
        args = (x, weight, torch.zeros(6), kind)
        place_or_bias = (None, leaves[2]) if run is gate and biased else (leaves[2],) if biased else ()
        told = run(*args, *place_or_bias)  # type: ignore[operator]
        weights = torch.arange(6.0, dtype=torch.float64)
        loss = (told.scores_TK * weights[told.ids_TK]).sum() + (told.prob_E * weights).sum() + told.squares
        found.append(torch.autograd.grad(loss, leaves))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
