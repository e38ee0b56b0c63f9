"""The gate's choice and its scores: order, ties, gradients, and the operator that torch knows."""

from __future__ import annotations

import pytest
import torch
from interpreted import assert_equal_references

from apart import apart
from moeclipse.ops import topk_softmax as module
from moeclipse.ops.topk_softmax import (
    gate_fits,
    topk_softmax,
    topk_softmax_operator,
    topk_softmax_reference,
)


def test_the_gate_prefers_smaller_ids_among_equals() -> None:
    scores, ids = topk_softmax(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 2, 3]]
    assert ids.dtype == torch.int32
    torch.testing.assert_close(scores.sum(), torch.tensor(1.0))


def test_scores_are_the_softmax_of_what_was_chosen() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 9).bfloat16()
    scores, ids = topk_softmax(logits, 4)
    assert scores.dtype == torch.float32, "wider than the logits"
    chosen = logits.float().gather(1, ids.long())
    assert (chosen[:, :-1] >= chosen[:, 1:]).all()
    torch.testing.assert_close(scores, chosen.softmax(1))


@apart
def test_the_operator_is_accepted_by_torch() -> None:
    torch.library.opcheck(
        topk_softmax_operator, (torch.randn(5, 9, dtype=torch.float64, requires_grad=True), 3)
    )


@apart
def test_the_operator_has_the_gradient_of_autograd() -> None:
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    d_scores = torch.randn(6, 3, dtype=torch.float64)
    found = torch.autograd.grad(topk_softmax_operator(logits, 3)[0], logits, d_scores)
    expected = torch.autograd.grad(topk_softmax_reference(logits, 3)[0], logits, d_scores)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("compiling", [False, True])
@apart
def test_where_the_kernel_fits_it_is_taken(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its places are taken by references here, forward and backward."""
    logits = torch.randn(6, 9, requires_grad=True)
    d_scores = torch.randn(6, 3)
    expected, ids = topk_softmax_reference(logits, 3)
    (gradient,) = torch.autograd.grad(expected, logits, d_scores)
    monkeypatch.setattr(module, "gate_fits", lambda *_: True)
    monkeypatch.setattr(module, "topk_softmax_kernel", topk_softmax_reference)
    monkeypatch.setattr(module, "topk_softmax_backward_kernel", lambda *_: gradient)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    scores, found = topk_softmax(logits, 3)
    assert torch.equal(found, ids)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(torch.autograd.grad(scores, logits, d_scores)[0], gradient)


def test_what_the_kernel_takes() -> None:
    assert not gate_fits(torch.randn(4, 8), 2), "nothing on the CPU"


@pytest.mark.parametrize("what", ["gate scores", "gate ids", "gate gradient"])
def test_the_kernel_equals_the_reference(what: str) -> None:
    assert_equal_references("gate", what)
