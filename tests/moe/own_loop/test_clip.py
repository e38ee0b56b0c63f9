"""The norm of the gradients of all ranks, in every order, with replicas; infinities that all ranks see."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from apart import apart
from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.clip import agree_on_overflow, clip_grad_norm_, grad_norm
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.run_ranks import run_alone, run_ranks

D, FF, EXPERTS = 4, 6, 4


def model(mesh: Mesh | None, placement: Placement | None = None) -> nn.Module:
    """Every gradient is a function of the parameter's name and the expert's number."""
    made = nn.ModuleDict(
        {"dense": nn.Linear(D, D), "moe": MoE(D, FF, EXPERTS, mesh=mesh, placement=placement)}
    )
    for name, parameter in made.double().named_parameters():
        if ".experts." in name:
            parameter.grad = torch.empty_like(parameter)
            for slot, expert in enumerate(made["moe"].experts.ids):
                fill_normal(parameter.grad[slot], key_of(name, expert), 1.0)
        else:
            parameter.grad = fill_normal(torch.empty_like(parameter), key_of(name), 1.0)
    return made


def norm(
    mesh: Mesh, order: float, slots: tuple[tuple[int, ...], ...] | None = None, listed: bool = False
) -> list[float]:
    placement = None if slots is None else Placement(slots)
    made = model(mesh if mesh.num_ranks > 1 else None, placement)
    found = clip_grad_norm_(made.parameters() if listed else made, 0.5, order)
    return [float(found), float(grad_norm(made, order)), *made["dense"].weight.grad.flatten().tolist()]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_is_that_of_one_process_on_all_ranks(order: float) -> None:
    expected = run_alone(norm, order)
    assert expected[1] == pytest.approx(0.5, rel=1e-5)
    for ranks in (2, 3):
        results = run_ranks(ranks, norm, order)
        assert all(result == results[0] for result in results), "the same bits"
        assert results[0] == pytest.approx(expected, rel=1e-12)


def test_replicas_count_once() -> None:
    slots = ((0, 1, 2), (2, 3, 0))
    results = run_ranks(2, norm, 2.0, slots)
    assert results[0] == pytest.approx(run_alone(norm, 2.0), rel=1e-12)


@pytest.mark.parametrize("slots", [None, ((0, 1, 2), (2, 3, 0))], ids=["single", "replicas"])
def test_parameters_are_taken_as_torch_takes_them(slots: tuple[tuple[int, ...], ...] | None) -> None:
    whole = run_ranks(2, norm, 2.0, slots)
    assert run_ranks(2, norm, 2.0, slots, True) == whole, "the same bits as of the model"


def some(mesh: Mesh) -> list[float]:
    made = model(mesh if mesh.num_ranks > 1 else None)
    copied = copy.deepcopy(made["moe"].experts.up)  # knows no layer: a copy is nobody's expert
    copied.grad = torch.ones_like(copied)
    up = made["moe"].experts.up
    found = [grad_norm([up]), clip_grad_norm_(made["dense"].weight, 1e-3), grad_norm([copied])]
    return [float(one) for one in found]


def test_some_of_the_parameters_alone() -> None:
    (experts, dense, _), (again, other, alone) = run_alone(some), run_ranks(2, some)[1]
    assert [again, other] == pytest.approx([experts, dense], rel=1e-12)
    assert alone == pytest.approx(math.sqrt(2 * 2 * FF * D))


@apart
def test_one_rank_does_as_torch_does() -> None:
    ours, theirs = model(None), model(None)
    for bound in (0.3, 1e9):
        found, wanted = clip_grad_norm_(ours, bound), nn.utils.clip_grad_norm_(theirs.parameters(), bound)
        assert float(found) == pytest.approx(float(wanted), rel=1e-12)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0)


@apart
def test_a_norm_that_is_not_finite_raises_on_request() -> None:
    made = model(None)
    made["dense"].weight.grad[0, 0] = math.inf
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        clip_grad_norm_(made, 1.0, error_if_nonfinite=True)
    assert torch.isinf(clip_grad_norm_(made, 1.0))


def scaled(mesh: Mesh, overflow: bool) -> list[float]:
    """Two steps of a GradScaler; in the first, an expert of rank 1 overflows."""
    made = model(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    scaler.scale(torch.zeros(()))
    if overflow and mesh.rank == 1:
        made["moe"].experts.up.grad[0, 0, 0] = math.inf
    agree_on_overflow(made)
    before = made["dense"].weight.detach().clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [float((made["dense"].weight - before).abs().sum() > 0), scaler.get_scale()]


def test_all_ranks_skip_a_step_that_one_must_skip() -> None:
    assert run_ranks(2, scaled, True) == [[0.0, 2.0]] * 2
    assert run_ranks(2, scaled, False) == [[1.0, 4.0]] * 2


def stage(number: int, mesh: Mesh | None) -> nn.ModuleDict:
    """The last stage has no experts."""
    made: dict[str, nn.Module] = {"dense": nn.Linear(D, D, dtype=torch.float64)}
    if number < 1:
        made["moe"] = MoE(D, FF, EXPERTS, mesh=mesh, dtype=torch.float64)
    built = nn.ModuleDict(made)
    for key, parameter in built.named_parameters():
        values = torch.arange(1, parameter.numel() + 1, dtype=torch.float64).view_as(parameter)
        first = 0 if mesh is None or ".experts." not in key else mesh.ep_index * parameter.numel()
        parameter.grad = 1e-3 * (number + 1) * (values + first)
    return built


def staged(mesh: Mesh) -> list[float]:
    assert mesh.hosts, "asked by all ranks together, also those without a layer"
    made = stage(mesh.pp_index, mesh)
    found = clip_grad_norm_(made, 0.5, mesh=mesh)
    return [float(found), float(made["dense"].weight.grad[0, 0])]


def test_stages_have_one_norm() -> None:
    both = [stage(number, None) for number in range(2)]
    expected = nn.utils.clip_grad_norm_([p for made in both for p in made.parameters()], 0.5)
    results = run_ranks(4, staged, pp=2)
    for rank, (norm, first) in enumerate(results):
        assert norm == pytest.approx(float(expected), rel=1e-12)
        assert first == pytest.approx(float(both[rank // 2]["dense"].weight.grad[0, 0]), rel=1e-5)
    assert len({norm for norm, _ in results}) == 1, "the same bits"
