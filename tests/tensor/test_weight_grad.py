"""How a weight gradient reaches main_grad: types, deferral, and who is told when it is complete."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.ops.random import fill_normal
from moeclipse.tensor.linear import column_linear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.weight_grad import are_first, attach, begin, bias_grad, weight_grad
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone

TOKENS, N, D = 700, 6, 10  # more rows than one chunk
FINE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    dy = fill_normal(torch.empty(TOKENS, N, dtype=torch.float64), 1, 0.2)
    x = fill_normal(torch.empty(TOKENS, D, dtype=torch.float64), 2, 0.2)
    return dy.to(dtype), x.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "into"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_products_add_into_main_grad(dtype: torch.dtype, into: torch.dtype) -> None:
    dy, x = operands(dtype)
    weight = nn.Parameter(torch.zeros(N, D, dtype=dtype))
    bias = nn.Parameter(torch.zeros(N, dtype=dtype))
    weight.main_grad = torch.ones(N, D, dtype=into)
    bias.main_grad = torch.ones(N, dtype=into)
    for _ in range(2):
        assert weight_grad(weight, dy, x) is None
        assert bias_grad(bias, dy) is None
    bound = max(FINE[into], 1e-5 if dtype != torch.float64 else 0)
    assert difference(weight.main_grad, 1 + 2 * dy.double().t() @ x.double()) < bound
    assert difference(bias.main_grad, 1 + 2 * dy.double().sum(0)) < bound


@pytest.mark.parametrize(
    ("dtype", "into"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_the_first_product_is_stored(dtype: torch.dtype, into: torch.dtype, tokens: int) -> None:
    """What an empty accumulator holds is of an earlier step."""
    dy, x = (operand[:tokens] for operand in operands(dtype))
    weight, bias = nn.Parameter(torch.zeros(N, D, dtype=dtype)), nn.Parameter(torch.zeros(N, dtype=dtype))
    for parameter in (weight, bias):
        stale = torch.full_like(parameter, torch.nan, dtype=into)
        attach(parameter, stale, lambda: None).empty = True
    for _ in range(2):
        weight_grad(weight, dy, x)
        bias_grad(bias, dy)
    bound = max(FINE[into], 1e-5 if dtype != torch.float64 else 0)
    assert difference(weight.main_grad, 2 * dy.double().t() @ x.double()) <= bound
    assert difference(bias.main_grad, 2 * dy.double().sum(0)) <= bound


def test_gradients_that_come_together_are_stored_together_or_added() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    first, second = (attach(p, torch.full((3,), torch.nan), lambda: None) for p in parameters)
    first.empty = second.empty = True
    assert are_first(parameters)
    assert not are_first(parameters)
    first.empty = True
    second.main_grad.fill_(5.0)
    assert not are_first(parameters), "one of them holds something"
    assert not first.main_grad.any(), "so the other begins at zero"
    assert bool((second.main_grad == 5).all())
    assert not are_first([nn.Parameter(torch.zeros(1))]), "nobody keeps this one's gradients"


def test_without_a_main_grad_autograd_gets_the_gradient() -> None:
    dy, x = operands(torch.float32)
    weight = nn.Parameter(torch.zeros(N, D))
    assert torch.equal(weight_grad(weight, dy, x), dy.t() @ x)
    weight.main_grad = torch.zeros(N, D)
    assert torch.equal(weight_grad(weight, dy, x, fuse=False), dy.t() @ x)
    assert not weight.main_grad.any()


@pytest.mark.parametrize(
    ("dtype", "into", "message"),
    [
        (
            torch.float32,
            torch.bfloat16,
            r"torch.float32 operands cannot add into a main_grad of torch.bfloat16",
        ),
        (torch.float16, torch.bfloat16, r"give the parameter a main_grad of torch.float16, torch.float32"),
        (torch.bfloat16, torch.int32, r"main_grad of torch.int32"),
    ],
)
def test_types_that_do_not_fit_are_named(dtype: torch.dtype, into: torch.dtype, message: str) -> None:
    dy, x = operands(dtype)
    weight = nn.Parameter(torch.zeros(N, D, dtype=dtype))
    weight.main_grad = torch.zeros(N, D, dtype=into)
    with pytest.raises(ConfigError, match=message):
        weight_grad(weight, dy, x)
    weight.main_grad = torch.zeros(N, dtype=into)
    with pytest.raises(ConfigError, match=message):
        bias_grad(weight, dy)


def tied(mesh: Mesh, deferred: bool, with_main_grad: bool) -> tuple[torch.Tensor, list[str]]:
    """One weight used twice in each of two microbatches; what happened, in order."""
    tp = TensorParallel.of(mesh)
    weight = nn.Parameter(fill_normal(torch.empty(D, D, dtype=torch.float64), 3, 0.5))
    events: list[str] = []
    if with_main_grad:
        attach(weight, torch.zeros_like(weight), lambda: events.append("ready"))
    for m in range(2):
        x = fill_normal(torch.empty(5, D, dtype=torch.float64), 4 + m, 1.0)
        (h,) = column_linear(x, [weight], tp)
        (y,) = column_linear(torch.tanh(h), [weight], tp)
        if deferred:
            with tp.wgrads.deferred(microbatch=m, stage=1):
                y.square().sum().backward()
        else:
            y.square().sum().backward()
        events.append(f"backward {m}")
    if deferred:
        with pytest.raises(
            ScheduleError, match=r"4 weight gradients .* never ran: w \(microbatch 0, stage 1\)"
        ):
            tp.wgrads.check_empty([("w", weight)])
        for m in range(2):
            tp.wgrads.run(microbatch=m, stage=1)
            events.append(f"W {m}")
    tp.wgrads.check_empty()
    return (weight.main_grad if with_main_grad else weight.grad).detach(), events


def plain_tied(mesh: Mesh) -> torch.Tensor:
    weight = fill_normal(torch.empty(D, D, dtype=torch.float64), 3, 0.5).requires_grad_()
    for m in range(2):
        x = fill_normal(torch.empty(5, D, dtype=torch.float64), 4 + m, 1.0)
        F.linear(torch.tanh(F.linear(x, weight)), weight).square().sum().backward()
    return weight.grad


@pytest.mark.parametrize("with_main_grad", [True, False])
def test_tied_weights_and_microbatches_accumulate_now_and_deferred(with_main_grad: bool) -> None:
    expected = run_alone(plain_tied)
    now, told_now = run_alone(tied, False, with_main_grad)
    later, told_later = run_alone(tied, True, with_main_grad)
    assert difference(now, expected) < 1e-12
    assert difference(later, expected) < 1e-12
    if with_main_grad:
        assert torch.equal(now, later)
        assert told_now == ["ready", "backward 0", "ready", "backward 1"]
        assert told_later == ["backward 0", "backward 1", "W 0", "ready", "W 1"]


def early_w(mesh: Mesh) -> list[str]:
    """W of an earlier microbatch runs inside the last one: the bucket must not leave without the last."""
    tp = TensorParallel.of(mesh)
    weight = nn.Parameter(torch.ones(D, D))
    events: list[str] = []
    state = attach(weight, torch.zeros(D, D), lambda: events.append("ready"))

    def backward(m: int) -> None:
        (y,) = column_linear(torch.ones(2, D), [weight], tp)
        with tp.wgrads.deferred(microbatch=m):
            y.sum().backward()

    backward(0)
    begin([state])
    tp.wgrads.run(microbatch=0)
    events.append("W 0")
    backward(1)
    events.append("backward 1")
    tp.wgrads.run(microbatch=1)
    return events


def test_a_late_w_does_not_announce_a_gradient_that_is_not_complete() -> None:
    assert run_alone(early_w) == ["W 0", "backward 1", "ready"]


def test_queues_are_used_as_said() -> None:
    grads = TensorParallel.of(Mesh.single()).wgrads
    with pytest.raises(
        ScheduleError, match=r"no weight gradient of microbatch 3, stage 0 is queued; .*: none"
    ):
        grads.run(microbatch=3)
    with (
        grads.deferred(microbatch=0),
        pytest.raises(ScheduleError, match="leave that block first"),
        grads.deferred(microbatch=1),
    ):
        pass
