"""How devices are joined, asked of topologies that no machine here has."""

from __future__ import annotations

import pytest

from moeclipse.cli.checks import links
from moeclipse.comm.reduce.table import default_algorithm
from moeclipse.comm.shared.links import Topology


def machine(nvlinks: list[list[int]], apart: tuple[int, int] | None = None) -> Topology:
    count = len(nvlinks)
    return Topology(
        uuids=tuple(f"gpu-{i}" for i in range(count)),
        nvlinks=tuple(map(tuple, nvlinks)),
        access=tuple(tuple(apart not in ((a, b), (b, a)) for b in range(count)) for a in range(count)),
    )


SWITCHED = machine([[0 if a == b else 18 for b in range(8)] for a in range(8)])
BUS = machine([[0] * 4 for _ in range(4)])
PAIRS = machine([[0, 4, 0, 0], [4, 0, 0, 0], [0, 0, 0, 4], [0, 0, 4, 0]])
APART = machine([[0, 4], [4, 0]], apart=(0, 1))


@pytest.mark.parametrize(
    ("topology", "devices", "linked"),
    [
        (SWITCHED, range(8), True),
        (SWITCHED, (3,), True),
        (SWITCHED, (3, 3), True),
        (BUS, range(4), False),
        (PAIRS, (0, 1), True),
        (PAIRS, (0, 1, 2), False),
        (APART, (0, 1), False),
        (BUS, (0, 9), False),
    ],
)
def test_linked_means_nvlink_between_each_two(topology: Topology, devices: range, linked: bool) -> None:
    assert topology.linked([f"gpu-{i}" for i in devices]) == linked


def test_two_stages_need_links_between_all() -> None:
    stages = {
        name: default_algorithm("a GPU", 4, topology.linked(topology.uuids[:4])).num_stages(1 << 20, False)
        for name, topology in {"switched": SWITCHED, "bus": BUS, "pairs": PAIRS}.items()
    }
    assert stages == {"switched": 2, "bus": 1, "pairs": 1}


@pytest.mark.parametrize(
    ("topology", "state", "value"),
    [
        (SWITCHED, "works", "all 8 devices have NVLink to each other"),
        (PAIRS, "works", "0-2, 0-3, 1-2, 1-3 reach each other over the bus, not over NVLink"),
        (APART, "limited", "not between 0-1"),
    ],
)
def test_the_doctor_gives_the_same_answer(topology: Topology, state: str, value: str) -> None:
    found = links(topology)
    assert (found.state, found.value) == (state, value)
