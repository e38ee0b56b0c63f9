"""Training through peer memory: the same bits as over torch.distributed, rows and gradients alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import SMALL

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.collectives import Collectives, PeerCollectives
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner


def trained(mesh: Mesh, config: TrainConfig) -> tuple[list[torch.Tensor], list[float]]:
    learner = Learner(config, mesh)
    wires = {type(bucket.wire) for bucket in learner.buckets if bucket.group.size > 1}
    wires |= {type(learner.model.tp.comm)} if mesh.tp > 1 else set()
    assert wires == {Collectives if config.parallel.peer == "off" else PeerCollectives}
    losses = [learner.step(step)["loss"] for step in range(3)]
    return [bucket.params.clone() for bucket in learner.buckets], losses


@pytest.mark.peer_memory
@pytest.mark.parametrize(
    ("dtype", "tp"),
    [
        ("float32", 2),
        *(pytest.param(dtype, tp, marks=pytest.mark.full) for dtype, tp in [("float32", 1), ("float64", 2)]),
    ],
)
def test_parameters_are_the_same_to_the_bit(tmp_path: Path, dtype: str, tp: int) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    values: dict[str, Any] = {"data.files": (str(text),), "model.dtype": dtype, "moe.num_experts": 8}
    config = with_values(TrainConfig(), SMALL | values | {"parallel.tp": tp, "model.num_kv_heads": 2})
    ways = [{"parallel.peer": "off"}, {"parallel.peer": "on", "moe.transport": "peer"}]
    off, on = (run_ranks(4, trained, with_values(config, way), dp=2, tp=tp) for way in ways)
    for (expected, losses), (found, other_losses) in zip(off, on, strict=True):
        assert losses == other_losses
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
