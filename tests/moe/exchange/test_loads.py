"""Rows of ranks and experts: their sums, and those of some ranks alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_parity import make

from moeclipse.comm.async_ops.lane import Ready
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.tokens import Loads, Piggyback
from moeclipse.testing.run_ranks import run_ranks


def test_loads_of_some_of_the_ranks() -> None:
    everyone = Group(name="all", ranks=(2, 5, 7), index=0)
    loads = Loads(Ready(torch.tensor([[1, 2], [30, 40], [500, 600]])), everyone)
    assert loads.total().tolist() == [531, 642]
    assert loads.of(Group(name="some", ranks=(7, 2), index=1)).tolist() == [[500, 600], [1, 2]]


def test_what_is_told_with_sizes_is_known_once_they_have_arrived() -> None:
    everyone = Group(name="all", ranks=(0, 1), index=0)
    message = Piggyback()
    loads = message.loads(torch.tensor([3, 1]), 2, everyone)
    assert message.mine is not None
    assert message.mine.tolist() == [3, 1, 2]
    with pytest.raises(AssertionError, match="have not been asked for"):
        loads.total()
    message.arrived([[3, 1, 2], [0, 5, 4]])
    assert loads.total().tolist() == [3, 6]
    assert message.tokens.get() == [[2], [4]]


def messages(mesh: Mesh, gate: GateConfig) -> tuple[list[str], list[float]]:
    """Labels of what one forward in a loop of one's own launches, and what its report says."""
    moe = make(gate, 4, 0, mesh, exchange={"schedule": "blocking"})
    x_TD = torch.arange(12.0 * 3, dtype=torch.float64).view(3, 12)[: 2 + mesh.rank] / 9
    launch, seen = mesh.a2a.launch, []

    def noted(group: Any, label: str, *given: Any, **options: Any) -> Any:
        seen.append(label.partition(",")[0])
        return launch(group, label, *given, **options)

    mesh.a2a.launch = noted  # type: ignore[method-assign]
    moe(x_TD)
    assert moe.last is not None
    return seen, [float(moe.last.aux_loss), *moe.last.load_E.tolist()]


def test_three_small_messages_are_one_unless_a_gate_must_know_before() -> None:
    plain, losses = zip(*run_ranks(2, messages, GateConfig(top_k=2)), strict=True)
    assert plain[0] == ["exchange of sizes", "dispatch of scores", "dispatch S_F@0", "combine R_F@0"]
    asks, others = zip(*run_ranks(2, messages, GateConfig(top_k=2, capacity_factor=4.0)), strict=True)
    assert asks[0][0] == "exchange of token counts"
    assert "sum of expert loads" in asks[0]
    assert losses == others, "capacity that nobody reaches: the same losses, told in another way"
