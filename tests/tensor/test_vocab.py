"""Embedding and cross-entropy over a cut vocabulary, against torch's own on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.ops.random import fill_normal
from moeclipse.tensor.cut import Cut
from moeclipse.tensor.linear import column_linear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.vocab import cross_entropy, embed
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

V, D, T = 11, 6, 8  # 11 ids over 4 ranks: parts differ


def ids() -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(T)
    return (index * 7 + 3) % V, (index * 5) % V


def run(mesh: Mesh, sequence_parallel: bool, with_main_grad: bool, **options: Any) -> dict:
    """A tied model: embed, square, head, loss."""
    tp = TensorParallel.of(mesh, sequence_parallel=sequence_parallel, **options)
    cut = Cut.of((V, D), 0, index=tp.index, parts=tp.size)
    weight = nn.Parameter(torch.empty(cut.local_shape, dtype=torch.float64))
    cut.fill(weight.data, 1, 1.0)
    if with_main_grad:
        weight.main_grad = torch.zeros_like(weight)
    inputs, targets = ids()
    h = embed(inputs.view(2, 4), weight, cut, tp)
    (logits,) = column_linear(30 * h.square(), [weight], tp)
    loss = cross_entropy(logits, targets, cut, tp)
    (loss * 3).backward()
    grad = torch.zeros(V, D, dtype=torch.float64)
    grad[cut.start : cut.stop] = weight.main_grad if with_main_grad else weight.grad
    return {"loss": loss.detach(), "grad": tp.sum_rows(grad, "grad").get()}


def reference(mesh: Mesh) -> dict:
    weight = fill_normal(torch.empty(V, D, dtype=torch.float64), 1, 1.0).requires_grad_()
    inputs, targets = ids()
    logits = F.linear(30 * F.embedding(inputs, weight).square(), weight)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    (loss * 3).backward()
    return {"loss": loss.detach(), "grad": weight.grad}


@pytest.mark.parametrize("with_main_grad", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_loss_and_gradient_equal_one_process(tp: int, sequence_parallel: bool, with_main_grad: bool) -> None:
    expected = run_alone(reference)
    for found in run_ranks(tp, run, sequence_parallel, with_main_grad, tp=tp):
        assert all(difference(found[name], expected[name]) <= 1e-12 for name in expected)


def extremes(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    tp = TensorParallel.of(mesh)
    cut = Cut.of((V, D), 0, index=tp.index, parts=tp.size)
    logits = torch.linspace(-300, 300, V, dtype=torch.float64).repeat(2, 1).to(dtype)[:, cut.start : cut.stop]
    logits = logits.clone().requires_grad_()
    cross_entropy(logits, torch.tensor([0, V - 1]), cut, tp).backward()
    assert logits.grad.dtype == dtype
    return logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits_do_not_overflow(dtype: torch.dtype) -> None:
    assert all(run_ranks(2, extremes, dtype, tp=2))


def nothing(mesh: Mesh) -> float:
    tp = TensorParallel.of(mesh, sequence_parallel=True)
    cut = Cut.of((V, D), 0, index=tp.index, parts=tp.size)
    weight = nn.Parameter(torch.ones(cut.local_shape))
    h = embed(torch.zeros(0, 4, dtype=torch.int64), weight, cut, tp)
    (logits,) = column_linear(h, [weight], tp)
    loss = cross_entropy(logits, torch.zeros(0, dtype=torch.int64), cut, tp)
    loss.backward()
    assert not weight.grad.any()
    return float(loss)


def test_a_rank_without_tokens() -> None:
    assert run_ranks(2, nothing, tp=2) == [0.0, 0.0]
