"""What an exchange says that it launches is what it launches, whole and in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.comm.async_ops.ledger import Ledger
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.layer import MoE
from moeclipse.schedule import kinds
from moeclipse.testing.run_ranks import run_ranks

STYLES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "smart": {"schedule": "smart", "group_size": 1, "chunks": 2},
    "shadows": {"schedule": "smart", "group_size": 1, "chunks": 2, "shadow": (0, 1)},
}
FORWARD = (kinds.DISPATCH_F, kinds.MLP_F, kinds.COMBINE_F)
BACKWARD = (kinds.COMBINE_B, kinds.MLP_B, kinds.DISPATCH_B, kinds.MLP_W)


class Notes(Ledger):
    """Notes what is announced and launched."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.launched: list[str] = []

    def announce(self, where: str, slices: Any) -> None:
        self.said.append((where, slices))

    def launch(self, lane: str, group: str, label: str) -> None:
        self.launched.append(label)


def said_and_done(mesh: Mesh, exchange: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    torch.manual_seed(mesh.rank)
    moe = MoE(8, 16, 4, 2, mesh=mesh, exchange=exchange, dtype=torch.float64)
    notes = Notes()
    mesh.recorder.ledger = notes
    moe(torch.randn(6, 8, dtype=torch.float64, requires_grad=True)).sum().backward()
    ((where, slices),) = notes.said
    assert where == "layer 0, microbatch 0"
    said = [label for kind in (*FORWARD, *BACKWARD) for label in slices.get(kind, ())]
    rows = [label for label in notes.launched if label in set(said)]
    return said, rows, list(slices[kinds.DISPATCH_R])


@pytest.mark.parametrize("style", STYLES)
def test_a_layer_announces_what_it_launches(style: str) -> None:
    for said, done, again in run_ranks(2, said_and_done, STYLES[style]):
        assert said == done
        assert len(said) == {"blocking": 4, "smart": 8, "shadows": 10}[style]
        assert again == [label for label in said if label.startswith("dispatch S_F")]
