"""All experts on one rank: what a definition says, and the bits of an exchange among one."""

from __future__ import annotations

import pytest
import torch
from expert_kinds import normal
from layer_parity import GATES, D, gradients, make

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.pairwise import LocalExperts
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Structure
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone

BOUND = 1e-13


def by_definition(
    moe: MoE, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor
) -> torch.Tensor:
    """Token by token, choice by choice."""
    up, down = moe.experts.weights
    out = []
    for x_D, scores_K, ids_K in zip(x_TD, scores_TK, ids_TK, strict=True):
        y_D = 0.0 * x_D
        for score, expert in zip(scores_K, ids_K.tolist(), strict=True):
            if expert >= 0:
                one, two = (up[expert] @ x_D).chunk(2)
                y_D = y_D + score * (down[expert] @ (torch.nn.functional.silu(one) * two))
        out.append(y_D)
    return torch.stack(out) if out else x_TD * 0.0


@pytest.mark.parametrize(
    "ids",
    [
        [[0, 2], [2, 1], [-1, 2], [1, -1], [-1, -1]],
        [[0, 0], [0, 0]],  # twice the same expert
        [[3, 1]],
        [[-1, -1]],
        [],
    ],
)
def test_outputs_and_gradients_are_those_of_the_definition(ids: list[list[int]]) -> None:
    run_alone(against_definition, ids)


def against_definition(_: Mesh, ids: list[list[int]]) -> None:
    moe = make(GateConfig(top_k=2), 4, 0, None)
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    x_TD, scores_TK = normal(len(ids), D, key=1).requires_grad_(), normal(len(ids), 2, key=2).requires_grad_()
    d_y_TD = normal(len(ids), D, key=3)
    leaves = [x_TD, scores_TK, *moe.experts.weights]
    experts = moe._pairwise(Structure(), (x_TD,))
    y_TD = LocalExperts.apply(scores_TK, ids_TK, experts, x_TD, *moe.experts.weights)
    expected = by_definition(moe, x_TD, scores_TK, ids_TK)
    found = torch.autograd.grad(y_TD, leaves, d_y_TD)
    wanted = torch.autograd.grad(expected, leaves, d_y_TD, allow_unused=True, materialize_grads=True)
    for one, other in zip([y_TD, *found], [expected, *wanted], strict=True):
        assert difference(one, other) <= BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_are_those_of_an_exchange_among_one(dtype: torch.dtype) -> None:
    run_alone(both_ways, dtype)


def both_ways(mesh: Mesh, dtype: torch.dtype) -> None:
    for name in ("softmax", "switch-pad", "gshard", "capacity"):
        found = []
        for local in (True, False):
            moe = make(GATES[name], 8, 1, mesh, dtype=dtype)
            vars(moe.dispatcher)["holds_all"] = local
            found.append(gradients(moe, mesh, [23]))
        for key, one in found[0].items():
            other = found[1][key]
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            assert same, (name, key)


def test_a_second_backward_is_torchs_own_error_and_rows_are_let_go() -> None:
    run_alone(twice)


def twice(_: Mesh) -> None:
    moe, x_TD = make(GateConfig(top_k=2), 4, 0, None), normal(6, D, key=1).requires_grad_()
    y_TD = moe(x_TD)
    y_TD.sum().backward(retain_graph=True)
    y_TD.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y_TD.sum().backward()
