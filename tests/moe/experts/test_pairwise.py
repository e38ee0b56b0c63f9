"""Rows that visit several experts each: sums and every gradient against autograd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from expert_kinds import IDS, KINDS, SHADOWING, D, Net, by_definition, normal

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.experts.module_experts import ModuleExperts
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.protocols import ExpertSet
from moeclipse.moe.tokens import Structure
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone

BOUND = 1e-13
PAIRS: dict[str, tuple[int, list[list[int]]]] = {
    "several": (5, [[0, 2, 3], [1, 2], [0, 1, 2, 4]]),
    "one expert": (3, [[], [0, 1, 2], []]),
    "a row nobody wants": (4, [[0], [3, 0], [1]]),
    "no pairs": (2, [[], [], []]),
    "no rows": (0, [[], [], []]),
}
"""How many rows there are, and which of them visit each expert."""


def of_tensors(experts: ExpertSet, *like: torch.Tensor) -> PairwiseExperts:
    return PairwiseExperts(experts=experts, structure=Structure(), like=[tensor[:0] for tensor in like])


def flat(visits: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[int]]:
    index = torch.tensor([row for rows in visits for row in rows], dtype=torch.int64)
    return index, [len(rows) for rows in visits]


def against_autograd(_: Mesh, kind: str) -> None:
    for num_rows, visits in PAIRS.values():
        experts = KINDS[kind]()
        index, counts = flat(visits)
        rows, scores = normal(num_rows, D, key=1), normal(len(index), key=2)
        d_sums = normal(num_rows, D, key=3)
        leaves = [rows.requires_grad_(), scores.requires_grad_(), *experts.weights]
        y = by_definition(experts, rows[index], counts)
        expected = torch.zeros_like(d_sums).index_add(0, index, scores[:, None] * y)
        wanted = torch.autograd.grad(expected, leaves, d_sums)
        pairs = of_tensors(experts, rows)
        with torch.no_grad():
            sums, saved = pairs.forward([rows], index, counts, scores)
            (d_rows,), d_scores, pending = pairs.dgrad(d_sums, saved)
            found = [d_rows, d_scores, *pairs.wgrad([pending])]
        for one, other in zip([sums, *found], [expected, *wanted], strict=True):
            assert difference(one, other) <= BOUND


@pytest.mark.parametrize("kind", ["biased", "modules", "joint"])
def test_sums_and_gradients_are_those_of_autograd(kind: str) -> None:
    run_alone(against_autograd, kind)


def with_integers(_: Mesh) -> None:
    """A vector, a position and a flag, which travels as a byte: the vector alone has a gradient."""
    experts = ModuleExperts(IDS, Net, D)
    num_rows, visits = PAIRS["several"]
    index, counts = flat(visits)
    token = {"h": normal(num_rows, D, key=1), "position": torch.arange(num_rows)}
    token["flag"] = token["position"] % 2 == 0
    like = [tensor[:0] for tensor in token.values()]
    pairs = PairwiseExperts(experts=experts, structure=Structure(keys=tuple(token), alone=False), like=like)
    arrived = [tensor.byte() if tensor.dtype == torch.bool else tensor for tensor in token.values()]
    scores, d_sums = normal(len(index), key=2), normal(num_rows, D, key=3)
    h = token["h"].clone().requires_grad_()
    y = [net({**token, "h": h}) for net in experts.parts]
    y = torch.cat([every[rows] for every, rows in zip(y, visits, strict=True)])
    sums = torch.zeros_like(d_sums).index_add(0, index, scores[:, None] * y)
    (d_h,) = torch.autograd.grad(sums, [h], d_sums)
    with torch.no_grad():
        found, saved = pairs.forward(arrived, index, counts, scores)
        grads, _, _ = pairs.dgrad(d_sums, saved)
    assert difference(found, sums) <= BOUND
    assert difference(grads[0], d_h) <= BOUND
    assert grads[1:] == [None, None]


def test_integers_and_flags_reach_the_experts_and_have_no_gradient() -> None:
    run_alone(with_integers)


def with_shadows(_: Mesh, kind: str) -> None:
    """Weights of others in place of its own: as the others' experts, and its own gradients stay out of it."""
    owner, here = KINDS[kind](), KINDS[kind]((1, 2))
    num_rows, visits = PAIRS["several"]
    index, counts = flat(visits)
    rows, scores, d_sums = normal(num_rows, D, key=1), normal(len(index), key=2), normal(num_rows, D, key=3)
    with torch.no_grad():
        expected, saved = of_tensors(owner, rows).forward([rows], index, counts, scores)
        (d_expected,), d_scores, _ = of_tensors(owner, rows).dgrad(d_sums, saved)
        weights = owner.flatten([0, 1, 2])
        pairs = of_tensors(here, rows)
        found, kept = pairs.forward([rows], index, counts, scores, weights)
        (d_found,), d_found_scores, _ = pairs.dgrad(d_sums, kept)
    for one, other in ((found, expected), (d_found, d_expected), (d_found_scores, d_scores)):
        assert difference(one, other) <= BOUND


@pytest.mark.parametrize("kind", SHADOWING)
def test_shadows_compute_with_the_weights_they_are_given(kind: str) -> None:
    run_alone(with_shadows, kind)


def test_rows_are_computed_in_the_type_that_experts_want() -> None:
    """bf16 rows, scores and their gradients in fp32: what is kept for backward has the scores' width."""
    experts = KINDS["built-in"]()
    for weight in experts.weights:
        weight.data = weight.data.bfloat16()
    num_rows, visits = PAIRS["several"]
    index, counts = flat(visits)
    rows = normal(num_rows, D, key=1).bfloat16()
    pairs = of_tensors(experts, rows)
    with torch.no_grad():
        sums, saved = pairs.forward([rows.float()], index, counts, normal(len(index), key=2).float())
        (d_rows,), d_scores, _ = pairs.dgrad(sums, saved)
    assert (sums.dtype, d_rows.dtype, d_scores.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
