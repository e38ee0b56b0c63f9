"""What every kind of experts promises: calls that keep nothing in the experts, and shadows of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_kinds import IDS, KINDS, SHADOWING, D, built_in, by_definition, normal

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.experts.fused import FusedExperts
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.protocols import ExpertSet, PairExperts
from moeclipse.moe.tokens import Structure
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone

CALLS = ([3, 0, 5], [1, 4, 2], [0, 0, 0])
BOUND = 1e-13


def expected(experts: ExpertSet, counts: list[int], number: int) -> tuple[torch.Tensor, ...]:
    """(y, d_x, gradients of the weights) by autograd."""
    x, d_y = rows(counts, number)
    y = by_definition(experts, x.requires_grad_(), counts)
    grads = torch.autograd.grad(y, [x, *experts.weights], d_y, allow_unused=True)
    wanted = zip(grads, [x, *experts.weights], strict=True)
    return y.detach(), *(torch.zeros_like(t) if grad is None else grad for grad, t in wanted)


def rows(counts: list[int], number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(sum(counts), D, key=number), normal(sum(counts), D, key=100 + number)


def in_flight_together(_: Mesh, kind: str) -> None:
    """All forwards, then all dgrads the other way round, then all weight gradients, in two goes."""
    experts: ExpertSet = KINDS[kind]()
    results = [expected(experts, counts, number) for number, counts in enumerate(CALLS)]
    with torch.no_grad():
        done = [experts.forward(rows(counts, number)[0], counts) for number, counts in enumerate(CALLS)]
        pending = []
        for number in reversed(range(len(CALLS))):
            y, saved = done[number]
            d_x, later = experts.dgrad(rows(CALLS[number], number)[1], saved)
            pending.append(later)
            assert difference(y, results[number][0]) <= BOUND
            assert difference(d_x, results[number][1]) <= BOUND
        grads = experts.wgrad(pending[1:], experts.wgrad(pending[:1]))
    for place, grad in enumerate(grads):
        assert difference(grad, sum(result[2 + place] for result in results)) <= BOUND, place


@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_flight_do_not_disturb_each_other(kind: str) -> None:
    run_alone(in_flight_together, kind)


def into_main_grads(_: Mesh, kind: str) -> None:
    experts: ExpertSet = KINDS[kind]()
    for weight in experts.weights:
        weight.main_grad = torch.ones_like(weight)
    x, d_y = rows(CALLS[0], 0)
    _, _, *wanted = expected(experts, CALLS[0], 0)
    with torch.no_grad():
        _, pending = experts.dgrad(d_y, experts.forward(x, CALLS[0])[1])
        assert all(grad is None for grad in experts.wgrad([pending])), "autograd has nothing left to add"
    for weight, grad in zip(experts.weights, wanted, strict=True):
        assert difference(weight.main_grad, 1 + grad) <= BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_main_grad(kind: str) -> None:
    run_alone(into_main_grads, kind)


def shadowed(_: Mesh, kind: str) -> None:
    """Another rank's experts compute with weights of these: outputs and gradients are those of the owner."""
    owner, other = KINDS[kind](), KINDS[kind]((1, 2))
    slots, counts = [2, 0], [3, 4]
    x, d_y = rows(counts, 7)
    here = [0] * len(IDS)
    for slot, count in zip(slots, counts, strict=True):
        here[slot] = count
    mine = torch.cat([x[3:], x[:3]]), torch.cat([d_y[3:], d_y[:3]])  # in the owner's order: slot 0, then 2
    with torch.no_grad():
        y, saved = owner.forward(mine[0], here)
        d_x, pending = owner.dgrad(mine[1], saved)
        weights = owner.flatten(slots)
        found, kept = other.forward(x, counts, weights)
        d_found, later = other.dgrad(d_y, kept)
        returned = torch.zeros_like(weights)
        other.shadow_wgrad(later, returned)
        grads = owner.wgrad([pending])
        added = owner.wgrad([])
        owner.add_shadow_grads(slots, returned, added)
    assert difference(torch.cat([found[3:], found[:3]]), y) <= BOUND
    assert difference(torch.cat([d_found[3:], d_found[:3]]), d_x) <= BOUND
    for grad, reference in zip(added, grads, strict=True):
        assert difference(grad, reference) <= BOUND
    assert owner.flatten([]).shape == (0, weights.shape[1])


@pytest.mark.parametrize("kind", SHADOWING)
def test_shadows_compute_what_the_owner_would(kind: str) -> None:
    run_alone(shadowed, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_told(kind: str) -> None:
    experts: ExpertSet = KINDS[kind]()
    assert experts.ids == IDS
    assert experts.out_width == D
    assert len(experts.weights) > 0


def both(_: Mesh) -> None:
    """The experts in kernels (here: their references) and those that copy rows agree about the same pairs."""
    experts, counts = built_in(), [3, 0, 4]
    index = torch.tensor([0, 2, 3, 0, 1, 2, 4])
    given, score, d_partial = normal(5, D, key=1), normal(7, key=2), normal(5, D, key=3)
    kinds: list[PairExperts] = [
        PairwiseExperts(experts=experts, structure=Structure(), like=[given[:0]]),
        FusedExperts(experts, top_k=2),
    ]
    found: list[list[Any]] = []
    with torch.no_grad():
        for pairs in kinds:
            partial, saved = pairs.forward([given], index, counts, score)
            (d_rows,), d_score, pending = pairs.dgrad(d_partial, saved)
            found.append([partial, d_rows, d_score, *pairs.wgrad([pending])])
            assert pairs.weights == experts.weights
    for one, other in zip(*found, strict=True):
        assert difference(one, other) <= BOUND


def test_rows_as_they_arrive_give_the_same_by_both_ways() -> None:
    run_alone(both)


@pytest.mark.parametrize("kind", ["built-in", "modules"])
@pytest.mark.parametrize("name", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_that_will_never_fire_are_told(kind: str, name: str) -> None:
    with pytest.warns(UserWarning, match=r"hooks on moe.experts never fire"):
        getattr(KINDS[kind](), f"register_{name}")(print)
