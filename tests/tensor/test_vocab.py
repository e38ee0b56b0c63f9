"""Embedding and cross-entropy over a cut vocabulary, against torch's own on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moeclipse.comm.mesh import Mesh
from moeclipse.ops.random import fill_normal
from moeclipse.tensor.cut import Cut
from moeclipse.tensor.linear import column_linear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.vocab import NO_TARGET, embed, head_losses, token_losses
from moeclipse.tensor.weight_grad import attach
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
    loss, _ = token_losses(logits, targets, cut, tp)
    (loss * 3).backward()
    grad = torch.zeros(V, D, dtype=torch.float64)
    grad[cut.start : cut.stop] = weight.main_grad if with_main_grad else weight.grad
    return {"loss": loss.detach(), "grad": tp.sum_rows(grad, "grad").get()}


def without_targets(mesh: Mesh, sequence_parallel: bool, rows: int) -> list[torch.Tensor]:
    """(loss, losses, gradients of weight and input), where every third token has nothing to predict."""
    tp = TensorParallel.of(mesh, sequence_parallel=sequence_parallel)
    cut = Cut.of((V, D), 0, index=tp.index, parts=tp.size)
    weight = nn.Parameter(torch.empty(cut.local_shape, dtype=torch.float64))
    cut.fill(weight.data, 1, 1.0)
    x = torch.arange(8 * D, dtype=torch.float64).view(8, D).sin()
    x = x[tp.index * 8 // tp.size : (tp.index + 1) * 8 // tp.size] if sequence_parallel else x
    x.requires_grad_()
    targets = ids()[1].clone()
    targets[::3] = NO_TARGET
    loss, each = head_losses(x, weight, targets, cut, tp, chunk_bytes=rows * len(weight) * 8)
    loss.backward()
    assert not each.requires_grad
    assert weight.grad is not None
    assert x.grad is not None
    grad = torch.zeros(V, D, dtype=torch.float64)
    grad[cut.start : cut.stop] = weight.grad
    d_x = tp.gather_rows(x.grad, "grad").get() if sequence_parallel else x.grad
    return [loss.detach(), each, tp.sum_rows(grad, "grad").get(), d_x]


@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_places_without_a_target_count_for_nothing(ranks: int, sequence_parallel: bool, rows: int) -> None:
    def reference(mesh: Mesh) -> list[torch.Tensor]:
        cut = Cut.of((V, D), 0, index=0, parts=1)
        weight = torch.empty(V, D, dtype=torch.float64)
        cut.fill(weight, 1, 1.0)
        weight.requires_grad_()
        x = torch.arange(8 * D, dtype=torch.float64).view(8, D).sin().requires_grad_()
        targets = ids()[1].clone()
        targets[::3] = -100
        each = F.cross_entropy(x @ weight.T, targets, reduction="none")
        each.sum().backward()
        return [each.sum().detach(), each.detach(), weight.grad, x.grad]  # type: ignore[list-item]

    expected = run_alone(reference)
    assert (expected[1][::3] == 0).all()
    for found in run_ranks(ranks, without_targets, sequence_parallel, rows, tp=ranks):
        for mine, right in zip(found, expected, strict=True):
            assert difference(mine, right) <= 1e-12


def run_in_chunks(mesh: Mesh, sequence_parallel: bool, with_main_grad: bool, rows: int) -> dict:
    """The same, with head and loss over so many tokens at a time."""
    tp = TensorParallel.of(mesh, sequence_parallel=sequence_parallel)
    cut = Cut.of((V, D), 0, index=tp.index, parts=tp.size)
    weight = nn.Parameter(torch.empty(cut.local_shape, dtype=torch.float64))
    cut.fill(weight.data, 1, 1.0)
    if with_main_grad:
        state = attach(weight, torch.full_like(weight, torch.nan), lambda: None)
        state.empty = True
    inputs, targets = ids()
    for factor in (1, 2):  # two microbatches
        h = embed(inputs.view(2, 4), weight, cut, tp)
        loss, _ = head_losses(30 * h.square(), weight, targets, cut, tp, chunk_bytes=rows * len(weight) * 8)
        (loss * factor).backward()
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


@pytest.mark.parametrize("with_main_grad", [True, False])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (4, False)])
@pytest.mark.parametrize("rows", [1, 3, T])
def test_chunks_of_tokens_change_nothing(
    tp: int, sequence_parallel: bool, with_main_grad: bool, rows: int
) -> None:
    expected = run_alone(reference)
    for found in run_ranks(tp, run_in_chunks, sequence_parallel, with_main_grad, rows, tp=tp):
        assert all(difference(found[name], expected[name]) <= 1e-12 for name in expected)


def few_logits(mesh: Mesh, dtype: torch.dtype) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The largest tensor that forward and backward make, and the gradients; under autocast."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    tp, num_tokens, vocabulary = TensorParallel.of(mesh), 64, 512
    cut = Cut.of((vocabulary, D), 0, index=0, parts=1)
    weight = nn.Parameter(fill_normal(torch.empty(vocabulary, D), 1, 1.0))
    x = fill_normal(torch.empty(num_tokens, D), 2, 1.0).requires_grad_()
    targets = torch.arange(num_tokens)
    with Sizes(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        head_losses(x, weight, targets, cut, tp, chunk_bytes=8 * vocabulary * 4)[0].backward()
    assert weight.grad is not None
    assert x.grad is not None
    return largest, x.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_never_exist_whole(dtype: torch.dtype) -> None:
    largest, *found = run_alone(few_logits, dtype)
    assert largest <= 16 * 512, "a quarter of the logits"
    _, *expected = run_alone(few_logits, torch.float32)
    for mine, right in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert difference(mine, right) < (1e-6 if dtype == torch.float32 else 3e-2)


def extremes(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    tp = TensorParallel.of(mesh)
    cut = Cut.of((V, D), 0, index=tp.index, parts=tp.size)
    logits = torch.linspace(-300, 300, V, dtype=torch.float64).repeat(2, 1).to(dtype)[:, cut.start : cut.stop]
    logits = logits.clone().requires_grad_()
    token_losses(logits, torch.tensor([0, V - 1]), cut, tp)[0].backward()
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
    loss, _ = token_losses(logits, torch.zeros(0, dtype=torch.int64), cut, tp)
    loss.backward()
    assert not weight.grad.any()
    return float(loss)


def test_a_rank_without_tokens() -> None:
    assert run_ranks(2, nothing, tp=2) == [0.0, 0.0]
