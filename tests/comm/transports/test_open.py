"""Which wire rows take: the one that is named, made once, or an error that says why not and what would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared import host
from moeclipse.comm.transports import open as wires
from moeclipse.comm.transports.open import open_wire
from moeclipse.core.errors import ConfigError
from moeclipse.testing.run_ranks import run_ranks

KINDS: dict[Any, str] = {
    "direct": "TorchTransport",
    "two_level": "TwoLevelTransport",
    "peer": "PeerTransport",
    "pinned": "PinnedTransport",
}


def opened(mesh: Mesh) -> list[str]:
    mesh.hosts, found = (0, 0, 1, 1), []
    for kind in KINDS:
        wire = open_wire(kind, mesh, mesh.experts)
        rows = torch.arange(4.0)[:, None] + 10 * mesh.rank
        arrived = wire.all_to_all(rows, [1] * 4, [1] * 4, "test").get()
        assert arrived.flatten().tolist() == [10.0 * source + mesh.rank for source in range(4)]
        again = open_wire(kind, mesh, mesh.experts)
        if kind == "peer":
            assert again.exchange is wire.exchange, "memory is opened once"
        found.append(type(wire).__name__)
    return found


@pytest.mark.peer_memory
def test_every_wire_carries_rows() -> None:
    assert run_ranks(4, opened) == [list(KINDS.values())] * 4


def apart(mesh: Mesh) -> list[str]:
    host.host_id = lambda: f"host {mesh.rank}"
    messages = []
    for kind in ("peer", "pinned"):
        with pytest.raises(ConfigError) as caught:
            open_wire(kind, mesh, mesh.experts)
        messages.append(str(caught.value))
    return messages


@pytest.mark.peer_memory
def test_a_wire_that_these_ranks_cannot_have_is_an_error_on_all_of_them() -> None:
    for messages in run_ranks(2, apart):
        for kind, message in zip(("peer", "pinned"), messages, strict=True):
            assert message.startswith(f'moe.transport = "{kind}" does not work between ranks (0, 1): ranks 0')
            assert message.endswith('; use moe.transport = "direct", or "two_level" across hosts')


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_needs_no_wire(kind: Any) -> None:
    mesh = Mesh.single()
    assert type(open_wire(kind, mesh, mesh.experts)).__name__ == "TorchTransport"


def test_on_devices_peers_pull_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(wires, "pinned", lambda mesh, group, through: asked.append(through))
    mesh = Mesh.single()
    pair = replace(mesh.experts, ranks=(0, 1))
    mesh.device = torch.device("cuda")
    for kind in ("peer", "pinned"):
        open_wire(kind, mesh, pair)
    assert asked == ["device", "host"]
