"""The loss of each source: by samples, once for all tp ranks, and told where there is something to tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.train.data.sources import add_by_source, told_by_source, zero_sums


def batches(*names: str, counts: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(samples=SimpleNamespace(names=names), counted_by_source=lambda _: list(counts))


def test_one_source_has_no_sum_of_its_own() -> None:
    mesh = Mesh.single()
    assert zero_sums(batches("a"), mesh).tolist() == [0, 0, 0]
    assert zero_sums(batches("a", "b"), mesh).tolist() == [0] * 5


def test_samples_add_to_their_sources() -> None:
    mesh, sums = Mesh.single(), torch.zeros(3, dtype=torch.float64)
    add_by_source(sums, torch.arange(6.0), torch.tensor([2, 0, 2]), mesh)
    add_by_source(sums, torch.zeros(0), torch.zeros(0, dtype=torch.int64), mesh)
    assert sums.tolist() == [5, 0, 1 + 9]


def test_a_source_that_was_not_read_is_not_told() -> None:
    told = told_by_source(batches("a", "b", counts=(4, 0)), 7, [8.0, 0.0])
    assert told == {"sources": {"a": {"loss": 2.0, "targets": 4}}}
