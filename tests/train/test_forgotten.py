"""A learner that nobody needs any more leaves nothing behind: its memory is most of a device's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from test_learner import configure, corpus  # noqa: F401  (a fixture)

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner


def left(mesh: Mesh, config: TrainConfig) -> list[str]:
    learner = Learner(config, mesh)
    for step in range(3):
        learner.step(step)
    tensors: dict[str, torch.Tensor] = dict(learner.model.named_parameters())
    for bucket in learner.buckets:
        tensors |= {f"weights of {bucket.name}": bucket.params, f"gradients of {bucket.name}": bucket.grads}
    refs = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
    refs["learner"] = weakref.ref(learner)  # type: ignore[assignment]
    del learner, tensors, bucket
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "alone": ({"ranks": 1}, {}),
    "ep 2": ({"ranks": 2}, {"moe.schedule": "smart", "moe.chunks": 2}),
    "experts that move": ({"ranks": 2}, {"placement.planner": "random", "placement.start_step": 1}),
    "pp 2": ({"ranks": 2, "pp": 2}, {}),
    "pairs": ({"ranks": 2}, {"pipeline.overlap": "pair+self", "optim.accumulate": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_left(layout: str, corpus: str) -> None:  # noqa: F811
    axes, changes = LAYOUTS[layout]
    ranks, *_ = axes.values()
    others = {name: size for name, size in axes.items() if name != "ranks"}
    for found in run_ranks(ranks, left, configure(corpus, **changes), **others):  # type: ignore[arg-type]
        assert found == []
