"""Tokens of all ranks on every rank: outputs and gradients of one process, and nobody tells sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_parity import GATES, compare, run
from torch import nn

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.exchange.gathered import own_experts
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATHERED: dict[str, Any] = {"exchange": {"schedule": "gathered"}}
SIZES = [5, 0, 9, 4]
UNEVEN = {"exchange": {"schedule": "gathered"}, "placement": Placement(((7, 1, 2), (0, 3, 4, 6), (5,)))}


def several(mesh: Mesh, gates: list[str], sizes: list[int], more: dict[str, Any]) -> list[dict]:
    return [run(mesh, GATES[gate], 8, 1, sizes, more) for gate in gates]


@pytest.mark.parametrize(
    ("dp", "ep", "gates", "more"),
    [
        (1, 2, ["softmax", "sigmoid", "switch", "noisy", "all", "capacity"], GATHERED),
        (2, 2, ["softmax", "gshard"], GATHERED),
        (1, 3, ["softmax", "all"], UNEVEN),
    ],
)
def test_gradients_are_those_of_one_process(dp: int, ep: int, gates: list[str], more: dict[str, Any]) -> None:
    """With a rank that has no token, an expert that nobody wants, rows that are dropped."""
    sizes = SIZES[: dp * ep]
    ranks = run_ranks(dp * ep, several, gates, sizes, more, dp=dp)
    for number, gate in enumerate(gates):
        reference = run_alone(run, GATES[gate], 8, 1, [sum(sizes)])
        if "placement" in more:
            order = [expert for row in more["placement"].slots for expert in row]
            for name in ("experts.up", "experts.down"):
                reference[name] = reference[name][order]
        compare([found[number] for found in ranks], reference, dp, ep)


class Squared(nn.Module):
    def __init__(self, expert: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((12, 12), 0.1 * (expert + 1), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) ** 2


def forwards(mesh: Mesh, experts: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As a user calls a layer, twice; ranks have other numbers of tokens in each call."""
    moe = MoE(12, 20, 4, 2, mesh=mesh, seed=3, dtype=torch.float64, experts=experts, **GATHERED)
    x = torch.randn(9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outs, grads = [], []
    for cut in ([0, 9, 9], [0, 2, 9]):
        first, stop = (0, 9) if mesh.num_ranks == 1 else (cut[mesh.rank], cut[mesh.rank + 1])
        mine = x[first:stop].clone().requires_grad_()
        y = moe(mine)
        y.square().sum().backward()
        outs.append(y.detach())
        grads.append(mine.grad)
    weight = next(iter(moe.experts.parameters())).grad
    assert weight is not None
    return torch.cat(outs), torch.cat([grad for grad in grads if grad is not None]), weight


@pytest.mark.parametrize("experts", [None, Squared])
def test_a_layer_in_a_loop_of_ones_own(experts: Any) -> None:
    one = run_alone(forwards, experts)
    two = run_ranks(2, forwards, experts)
    order = [*range(9), *range(9, 11), *range(11, 18)]  # first call: all on rank 0; second: 2 and 7
    y = torch.cat([two[0][0][:9], two[0][0][9:], two[1][0]])
    dx = torch.cat([two[0][1][:9], two[0][1][9:], two[1][1]])
    assert difference(y[order], one[0]) < 1e-12
    assert difference(dx[order], one[1]) < 1e-12
    if experts is None:
        assert difference(torch.cat([rank[2] for rank in two]), one[2]) < 1e-12


def launched(mesh: Mesh) -> list[str]:
    """Labels of one call in training, and of one in evaluation."""
    moe = MoE(12, 20, 4, 2, mesh=mesh, dtype=torch.float64, **GATHERED)
    tokens = Tokens(mesh=mesh, first=3 * mesh.rank, total=6)
    x = torch.ones(3, 12, dtype=torch.float64, requires_grad=True)
    seen: list[str] = []
    launch = mesh.a2a.launch

    def noted(group: Any, label: str, *given: Any, **options: Any) -> Any:
        seen.append(label)
        return launch(group, label, *given, **options)

    mesh.a2a.launch = noted  # type: ignore[method-assign]
    moe.run(x, tokens)[0].sum().backward()
    seen.append("evaluation")
    moe.eval()
    moe.run(x, tokens)
    return seen


def test_what_travels_does_not_depend_on_the_gate() -> None:
    training, evaluation = " | ".join(run_ranks(2, launched)[0]).split(" | evaluation | ")
    assert [text.split(",")[0] for text in training.split(" | ")] == [
        *("sum of expert loads", "gather of tokens", "gather of choices", "sum of outputs"),
        *("gather of output gradients", "sum of token gradients", "sum of score gradients"),
    ]
    assert "exchange of sizes" in evaluation


def moved(mesh: Mesh) -> None:
    moe = MoE(12, 20, 4, 1, mesh=mesh, dtype=torch.float64, **GATHERED)
    ids = torch.tensor([[0, 1], [2, 3], [-1, 1]])
    mine = own_experts(ids, moe.dispatcher)
    assert mine.tolist() == ([[0, 1], [-1, -1], [-1, 1]] if mesh.rank == 0 else [[-1, -1], [0, 1], [-1, -1]])
    table = moe.dispatcher.slot_of_E
    moe.move_to(Placement(((2, 1), (0, 3))))
    assert moe.dispatcher.slot_of_E is table, "a graph reads the table that it was captured with"
    mine = own_experts(ids, moe.dispatcher)
    assert mine.tolist() == ([[-1, 1], [0, -1], [-1, 1]] if mesh.rank == 0 else [[0, -1], [-1, 1], [-1, -1]])


def test_experts_that_move_are_found_where_they_are() -> None:
    run_ranks(2, moved)


def uncounted(mesh: Mesh) -> None:
    moe = MoE(12, 20, 4, 1, mesh=mesh, dtype=torch.float64, **GATHERED)
    with pytest.raises(CommError, match="has 3 of 7 tokens, and nobody said"):
        moe.run(torch.ones(3, 12, dtype=torch.float64), Tokens(mesh=mesh, first=0, total=7))


def test_who_does_not_say_how_many_tokens_others_have_is_told() -> None:
    run_ranks(2, uncounted)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gate": GateConfig(capacity_factor=1.0, overflow="pad")}, "gate.overflow = 'pad'"),
        ({"exchange": {"schedule": "gathered", "shadow": (1,)}}, "moe.shadow"),
        ({"exchange": {"schedule": "gathered", "transport": "pinned"}}, "moe.transport = 'pinned'"),
    ],
)
def test_what_cannot_go_with_it_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"'gathered' cannot go with {text}"):
        MoE(8, 8, 4, **{**GATHERED, **changes})
