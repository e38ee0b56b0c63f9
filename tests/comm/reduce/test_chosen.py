"""All ranks take one algorithm, and it depends on how their devices are joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce import table as chosen
from moeclipse.comm.reduce.table import Algorithm, choose_algorithm
from moeclipse.comm.shared.links import Topology
from moeclipse.testing.run_ranks import run_ranks

NOWHERE = Path("/nonexistent/table.toml")
MIB = 1 << 20


def chosen_by(mesh: Mesh) -> int | None:
    mine = Algorithm(two_stages_from=1000 + mesh.rank)
    return choose_algorithm(mesh.world, mesh.watch, mesh.device, NOWHERE, mine).two_stages_from


def test_all_take_what_the_first_rank_takes() -> None:
    assert run_ranks(2, chosen_by) == [1000, 1000]


def joined(links: int) -> Topology:
    row = tuple(tuple(0 if a == b else links for b in range(4)) for a in range(4))
    return Topology(uuids=tuple("abcd"), nvlinks=row, access=((True,) * 4,) * 4)


@pytest.mark.parametrize(
    ("devices", "links", "stages"), [("abcd", 18, 2), ("abcd", 0, 1), ("abce", 18, 1), ("aaaa", 18, 1)]
)
def test_two_stages_where_all_devices_have_links(
    monkeypatch: pytest.MonkeyPatch, devices: str, links: int, stages: int
) -> None:
    group = Group(name="world", ranks=(0, 1, 2, 3), index=0)
    monkeypatch.setattr(chosen, "devices_of", lambda *_: list(devices))
    monkeypatch.setattr(chosen, "tell_all", lambda group, watch, value, label: [value])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    watch: Any = None
    found = choose_algorithm(group, watch, torch.device("cuda"), NOWHERE, topology=joined(links))
    assert found.num_stages(MIB, copied=False) == stages
