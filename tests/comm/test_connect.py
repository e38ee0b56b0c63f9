"""Ranks meet on every group and wire that will be used, in one order, where a library would block later."""

from __future__ import annotations

from dataclasses import replace

from moeclipse.comm.connect import connect_group, connect_wires
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks


def as_nccl(group: Group) -> Group:
    """Gloo does what is asked of it, too: only whether it is asked depends on the name."""
    return replace(group, backend="nccl")


def met(mesh: Mesh) -> list[str]:
    """Labels of all transfers that this rank took part in."""
    mesh.recorder.begin_step()
    connect_group(mesh.grads, as_nccl(mesh.world))
    up, down = as_nccl(mesh.pipe("F", 0, 1)), as_nccl(mesh.pipe("B", 1, 0))
    connect_wires(mesh.grads, [(down, 1, 0), (up, 0, 1), (up, 1, 2), (up, 2, 3)])
    return [label for _, label, _, _ in mesh.recorder.end_step().transfers]


def test_each_end_of_each_wire_meets_the_other_in_one_order() -> None:
    found = run_ranks(4, met, pp=4)
    wires = ["1>0 of pipe.B.down", "0>1 of pipe.F.up", "1>2 of pipe.F.up", "2>3 of pipe.F.up"]
    for rank, labels in enumerate(found):
        mine = [f"opening of wire {wire}" for wire in wires if str(rank) in wire[:3]]
        assert labels == ["opening of group world", *mine]


def not_met(mesh: Mesh) -> int:
    mesh.recorder.begin_step()
    connect_group(mesh.grads, mesh.world)
    connect_wires(mesh.grads, [(mesh.pipe("F", 0, 1), 0, 1)])
    return len(mesh.recorder.end_step().transfers)


def test_gloo_is_left_alone() -> None:
    assert run_ranks(2, not_met, pp=2) == [0, 0]
    connect_group(Mesh.single().grads, as_nccl(Mesh.single().world))
