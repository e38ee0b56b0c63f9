"""Microbatches in turn: sums and gradients are those of the batch, and buckets leave while the last runs."""

from __future__ import annotations

from typing import Any

import torch
from test_graphs import SMALL

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

EVEN: dict[str, Any] = {**SMALL, "gate.balance_loss": 0.0}
"""A balance loss is not linear in the tokens: parts of a batch would not add up."""


def cut_into(mesh: Mesh, accumulate: int, scale: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(sums, all gradients, buckets that left before the end)."""
    learner = Learner(with_values(TrainConfig(), {**EVEN, "optim.accumulate": accumulate}), mesh)
    learner.buckets.zero()
    sums = learner.sequential.run(0, scale)
    early = learner.buckets._next
    learner.buckets.finish()
    return sums, torch.cat([bucket.reduced() for bucket in learner.buckets]), early


def test_microbatches_add_up_to_the_batch() -> None:
    whole, gradient, early = run_alone(cut_into, 1, 1.0)
    assert early > 0, "nothing left while backward ran"
    for accumulate, scale in ((2, 1.0), (3, 4.0)):
        sums, found, _ = run_alone(cut_into, accumulate, scale)
        assert difference(sums, whole) < 1e-12
        assert difference(found, scale * gradient) < 1e-12
