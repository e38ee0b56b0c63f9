"""A whole layer whose rows travel in two levels: outputs and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
from test_layer import compare, run

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.wires.two_level import TwoLevelTransport
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATE = GateConfig(top_k=3, z_loss=0.1)
SIZES = [5, 0, 9, 4, 3, 7]


def on_hosts(mesh: Mesh, hosts: list[int], exchange: dict[str, Any]) -> dict:
    mesh.hosts = tuple(hosts)
    more = {"exchange": {"transport": "two_level", **exchange}}
    assert isinstance(MoE(8, 8, 8, mesh=mesh, **more).dispatcher.transport, TwoLevelTransport)
    return run(mesh, GATE, 8, 1, SIZES[: mesh.num_ranks], more)


@pytest.mark.parametrize(
    "exchange",
    [
        {},
        {"shadow": (1, 2, 6)},
        {"schedule": "smart"},
        {"schedule": "smart", "group_size": 1, "chunks": 3, "shadow": (0, 5, 6)},
    ],
    ids=["blocking", "blocking-shadows", "smart", "smart-shadows"],
)
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1, 2, 2]], ids=str)
def test_a_layer_in_two_levels(hosts: list[int], exchange: dict[str, Any]) -> None:
    results = run_ranks(len(hosts), on_hosts, hosts, exchange)
    reference = run_alone(run, GATE, 8, 1, [sum(SIZES[: len(hosts)])])
    compare(results, reference, 1, len(hosts))


def ragged(mesh: Mesh) -> str:
    mesh.hosts = (0, 0, 1)
    with pytest.raises(ConfigError, match=r"have 2, 1 of them; use moe\.transport"):
        MoE(8, 8, 8, mesh=mesh, exchange={"transport": "two_level"})
    return "refused"


def test_ragged_hosts_are_refused_before_anybody_waits() -> None:
    assert run_ranks(3, ragged) == ["refused"] * 3
