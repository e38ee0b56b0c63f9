"""The first step on a device: each op to its end before the next, in the proved order, to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_learner import configure
from test_pipelined import BASE, MODELS, SCHEDULES, corpus  # noqa: F401  (a fixture)

from moeclipse.comm.async_ops import execute
from moeclipse.comm.mesh import Mesh
from moeclipse.pipeline import runtime
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner


def both_ways(mesh: Mesh, config: TrainConfig) -> list[bool]:
    """Whether gradients of a step that settles equal those of one that does not, and that it did settle."""
    settled: list[str] = []
    real = execute.execute_settled

    def noted(*given: Any) -> None:
        settled.append("")
        real(*given)

    runtime.execute_settled = noted  # type: ignore[attr-defined]
    grads = []
    for settles in (True, False):
        learner = Learner(config, mesh)
        assert learner.pipelined is not None
        learner.pipelined.runtime.settles = settles
        learner.backward(0)
        grads.append([bucket.reduced().clone() for bucket in learner.buckets])
    return [len(settled) == 1, all(torch.equal(a, b) for a, b in zip(*grads, strict=True))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_settled_step_ends_and_gives_the_same_bits(corpus: str, schedule: str) -> None:  # noqa: F811
    changes = {**BASE, **MODELS["softmax"], "pipeline.schedule": schedule, "pipeline.overlap": "pair+self"}
    mirrored = schedule == "dualpipe"
    for result in run_ranks(4, both_ways, configure(corpus, **changes), pp=2, mirrored=mirrored):
        assert result == [True, True]
