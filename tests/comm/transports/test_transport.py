"""Rank to rank over torch.distributed: by its all-to-all in a host, pair by pair between hosts."""

from __future__ import annotations

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.transport import TorchTransport, Transport, direct
from moeclipse.testing.run_ranks import run_ranks


def wires(mesh: Mesh) -> list[Transport]:
    near, far = (direct(mesh, mesh.experts, hosts) for hosts in ([0] * 3, [0, 1, 1]))
    assert (near.pairs is None, far.pairs is None) == (True, False)
    assert direct(mesh, mesh.experts, [1, 2, 3]).pairs is far.pairs, "made once for a group"
    return [near, far]


def exchanged(mesh: Mesh) -> None:
    """Rank r sends r + p rows to p, rank 0 nothing to itself; into new memory, and where the caller says."""
    me, P = mesh.rank, mesh.num_ranks
    send, receive = [me + p for p in range(P)], [source + me for source in range(P)]
    rows = torch.cat([torch.full((me + p, 2), 10.0 * me + p) for p in range(P)])
    expected = torch.cat([torch.full((source + me, 2), 10.0 * source + me) for source in range(P)])
    for wire in wires(mesh):
        assert torch.equal(wire.all_to_all(rows, send, receive, "new").get(), expected)
        out = torch.full_like(expected, -1)
        assert wire.all_to_all(rows, send, receive, "given", out).get() is out
        assert torch.equal(out, expected)
        strided = torch.stack([rows, rows], dim=2)[:, :, 0].requires_grad_()
        assert torch.equal(wire.all_to_all(strided, send, receive, "strided").get(), expected)


def test_rows_arrive_over_either() -> None:
    run_ranks(3, exchanged)


def recorded(mesh: Mesh) -> list[list[str]]:
    found = []
    for wire in wires(mesh):
        mesh.recorder.begin_step()
        wire.all_to_all(torch.ones(3, 1), [1] * 3, [1] * 3, "dispatch, layer 0").get()
        found.append([label for _, label, begun, done in mesh.recorder.end_step().transfers if begun <= done])
    return found


def test_transfers_are_recorded_over_either() -> None:
    assert run_ranks(3, recorded) == [[["dispatch, layer 0"]] * 2] * 3


def test_one_rank_keeps_its_rows() -> None:
    mesh, rows = Mesh.single(), torch.ones(3, 2)
    wire = direct(mesh, mesh.experts, mesh.hosts)
    assert wire == TorchTransport(mesh.a2a, mesh.experts)
    assert wire.all_to_all(rows, [3], [3], "test").get() is rows
