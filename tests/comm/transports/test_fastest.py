"""The plain wire stays unless another is clearly faster, and all ranks know the same times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports import fastest as wires
from moeclipse.comm.transports.fastest import MARGIN, fastest, wire_times, wires_to_try
from moeclipse.core.errors import ConfigError
from moeclipse.testing.run_ranks import run_ranks


def test_another_wire_must_win_at_both_sizes() -> None:
    direct = [2.0, 4.0]
    assert fastest({"direct": direct}) == "direct"
    assert fastest({"direct": direct, "peer": [1.0, 2.0]}) == "peer"
    assert fastest({"direct": direct, "peer": [1.0, 4.0]}) == "direct"
    assert fastest({"direct": direct, "peer": [2.0, 1.0]}) == "direct"
    barely = [0.99 * seconds / MARGIN for seconds in direct]
    assert fastest({"direct": direct, "peer": barely}) == "peer"
    assert fastest({"direct": direct, "peer": [1.02 * seconds for seconds in barely]}) == "direct"


@pytest.mark.parametrize(
    ("hosts", "device", "expected"),
    [
        ((0, 0, 0, 0), "cpu", ["direct", "peer"]),
        ((0, 0, 0, 0), "cuda", ["direct"]),
        ((0, 0, 1, 1), "cpu", ["direct", "two_level"]),
        ((0, 1, 2, 3), "cpu", ["direct"]),
        ((0, 0, 0, 1), "cpu", ["direct"]),
    ],
)
def test_wires_that_these_ranks_can_have(hosts: tuple[int, ...], device: str, expected: list[str]) -> None:
    mesh: Any = SimpleNamespace(
        hosts=hosts, device=SimpleNamespace(type=device), partitions={"experts": [(0, 1, 2, 3)]}
    )
    group: Any = SimpleNamespace(name="experts", size=4)
    assert wires_to_try(mesh, group) == expected
    assert wires_to_try(mesh, SimpleNamespace(name="experts", size=1)) == ["direct"]  # type: ignore[arg-type]


def tried(mesh: Mesh, broken: bool) -> dict[str, list[float]]:
    if broken:
        real = wires.open_wire

        def refuse(kind: Any, *given: Any) -> Any:
            if kind == "peer":
                raise ConfigError("no memory to share")
            return real(kind, *given)

        wires.open_wire = refuse  # type: ignore[attr-defined, assignment]
    return {str(kind): times for kind, times in wire_times(mesh, mesh.experts).items()}


@pytest.mark.peer_memory
@pytest.mark.parametrize("broken", [False, True])
def test_wires_are_tried_by_all_ranks_together(broken: bool) -> None:
    """Two copies of a pair of ranks: each pair tries, and all four know the slowest."""
    results = run_ranks(4, tried, broken, dp=2)
    assert all(found == results[0] for found in results)
    assert list(results[0]) == (["direct"] if broken else ["direct", "peer"])
    assert all(len(times) == 2 and min(times) > 0 for times in results[0].values())
