"""Rows of ranks and experts: their sums, and those of some ranks alone."""

from __future__ import annotations

import torch

from moeclipse.comm.async_ops.in_flight import Ready
from moeclipse.comm.group import Group
from moeclipse.moe.exchange.loads import Loads


def test_loads_of_some_of_the_ranks() -> None:
    everyone = Group(name="all", ranks=(2, 5, 7), index=0)
    loads = Loads(Ready(torch.tensor([[1, 2], [30, 40], [500, 600]])), everyone)
    assert loads.total().tolist() == [531, 642]
    assert loads.of(Group(name="some", ranks=(7, 2), index=1)).tolist() == [[500, 600], [1, 2]]
