"""A whole layer over every wire: outputs and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_parity import compare, run

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared import host
from moeclipse.comm.transports import copy_engines
from moeclipse.comm.transports.host_ring import PeerTransport
from moeclipse.comm.transports.two_level import TwoLevelTransport
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.tune import cut_choice
from moeclipse.moe.tune.granularity import partitions_to_try
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATE = GateConfig(top_k=3, z_loss=0.1)
SIZES = [5, 0, 9, 4, 3, 7]
EXCHANGES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "blocking-shadows": {"shadow": (1, 2, 6)},
    "smart": {"schedule": "smart"},
    "smart-shadows": {"schedule": "smart", "group_size": 1, "chunks": 3, "shadow": (0, 5, 6)},
}


def over(mesh: Mesh, wire: str, slot_bytes: int) -> list[dict]:
    """All exchanges, one after the other, over one transport; slots that hold less than a row."""
    copy_engines.SLOT_BYTES["cpu"] = slot_bytes
    kinds = {"peer": PeerTransport, "pinned": copy_engines.PinnedTransport}
    found = []
    for exchange in EXCHANGES.values():
        more = {"exchange": {"transport": wire, **exchange}}
        assert isinstance(MoE(8, 8, 8, mesh=mesh, **more).dispatcher.transport, kinds[wire])
        found.append(run(mesh, GATE, 8, 1, SIZES[: mesh.num_ranks], more))
    return found


@pytest.mark.peer_memory
@pytest.mark.parametrize("wire", ["peer", "pinned"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_layer_over_memory_of_the_host(num_ranks: int, wire: str) -> None:
    ranks = run_ranks(num_ranks, over, wire, 90 if num_ranks == 3 else 1 << 16)
    reference = run_alone(run, GATE, 8, 1, [sum(SIZES[:num_ranks])])
    for number in range(len(EXCHANGES)):
        compare([results[number] for results in ranks], reference, 1, num_ranks)


def apart(mesh: Mesh, wire: str) -> None:
    host.host_id = lambda: f"host {mesh.rank}"
    text = rf'"{wire}" does not work between ranks \(0, 1\): ranks 0 and 1 are on different hosts'
    with pytest.raises(ConfigError, match=text):
        MoE(8, 8, 8, mesh=mesh, exchange={"transport": wire})


@pytest.mark.peer_memory
@pytest.mark.parametrize("wire", ["peer", "pinned"])
def test_ranks_on_other_hosts_are_refused_before_anybody_waits(wire: str) -> None:
    run_ranks(2, apart, wire)


def alone(mesh: Mesh) -> bool:
    moe = MoE(8, 8, 8, mesh=mesh, exchange={"transport": "pinned"})
    return bool(moe(torch.ones(3, 8)).isfinite().all())


def test_one_rank_needs_no_wire() -> None:
    assert run_alone(alone)


def on_hosts(mesh: Mesh, hosts: list[int], exchange: dict[str, Any]) -> dict:
    mesh.hosts = tuple(hosts)
    more = {"exchange": {"transport": "two_level", **exchange}}
    assert isinstance(MoE(8, 8, 8, mesh=mesh, **more).dispatcher.transport, TwoLevelTransport)
    return run(mesh, GATE, 8, 1, SIZES[: mesh.num_ranks], more)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1, 2, 2]], ids=str)
def test_a_layer_in_two_levels(hosts: list[int], exchange: str) -> None:
    results = run_ranks(len(hosts), on_hosts, hosts, EXCHANGES[exchange])
    reference = run_alone(run, GATE, 8, 1, [sum(SIZES[: len(hosts)])])
    compare(results, reference, 1, len(hosts))


def in_merged_hosts(mesh: Mesh, hosts: tuple[int, ...]) -> dict:
    mesh.hosts = hosts
    groups = partitions_to_try("auto", hosts)[1]
    assert groups == ((0, 1, 4), (2, 3))
    cut_choice.start_groups = lambda *_: groups
    return run(mesh, GATE, 8, 1, SIZES[: mesh.num_ranks], {"exchange": EXCHANGES["smart"]})


def test_groups_of_several_hosts_that_are_no_neighbours() -> None:
    hosts = (0, 1, 2, 3, 0)
    reference = run_alone(run, GATE, 8, 1, [sum(SIZES[: len(hosts)])])
    compare(run_ranks(len(hosts), in_merged_hosts, hosts), reference, 1, len(hosts))


def ragged(mesh: Mesh) -> str:
    mesh.hosts = (0, 0, 1)
    with pytest.raises(ConfigError, match=r"have 2, 1 of them; use moe\.transport"):
        MoE(8, 8, 8, mesh=mesh, exchange={"transport": "two_level"})
    return "refused"


def test_ragged_hosts_are_refused_before_anybody_waits() -> None:
    assert run_ranks(3, ragged) == ["refused"] * 3
