"""Inside `torch.compile`: one graph on one rank, the same numbers on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_models import Net, assert_alike, gradients, layer, often, tokens

import moeclipse
from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.testing.run_ranks import run_ranks

GATES = {
    "softmax": GateConfig(top_k=2, z_loss=0.1),
    "sigmoid": GateConfig(kind="sigmoid", top_k=2, bias_rate=0.1),
    "switch": GateConfig(kind="switch", top_k=1),
    "top_p": GateConfig(top_k=3, choose="top_p"),
    "groups": GateConfig(top_k=2, num_groups=2),
}


def trained(model: Any, net: Net, calls: int, rank: int = 0) -> dict[str, torch.Tensor]:
    for number in range(calls):
        (model(tokens(number, rank, 7 + number)).square().mean() + moeclipse.aux_loss(net)).backward()
    return gradients(net) | {"load": net.moe.load_E.double()}


@pytest.mark.parametrize("gate", often(GATES, "sigmoid"))
@apart
def test_one_graph_on_one_rank(gate: str) -> None:
    """`aot_eager` traces forward and backward as inductor does, and needs no compiler of C++."""
    torch.compiler.reset()
    net, other = (Net(layer(gate=GATES[gate], num_shared_experts=1)) for _ in range(2))
    whole = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert_alike(trained(whole, net, 3), trained(other, other, 3))


def broken(mesh: Mesh, kind: str, gate: str) -> None:
    torch.compiler.reset()
    more = {"exchange": {"schedule": "smart", "group_size": 1, "chunks": 2}} if mesh.num_ranks > 1 else {}
    net, other = (Net(layer(kind, gate, mesh if mesh.num_ranks > 1 else None, **more)) for _ in range(2))
    compiled = torch.compile(net, backend="aot_eager")
    assert_alike(trained(compiled, net, 3, mesh.rank), trained(other, other, 3, mesh.rank))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["built-in", "modules"])
def test_exact_on_two_ranks(kind: str) -> None:
    run_ranks(2, broken, kind, "noisy", deadline_s=120)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "gate"), [("modules", "softmax"), ("built-in", "noisy"), ("built-in", "gshard")]
)
def test_exact_where_a_compiler_cannot_see_through(kind: str, gate: str) -> None:
    run_ranks(1, broken, kind, gate, deadline_s=120)
