"""A run's folder, as training leaves it, without the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import to_toml, with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

TINY = {
    "run.name": "tiny",
    "model.num_layers": 2,
    "model.num_dense_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 20,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 6,
    "model.dtype": "float64",
    "model.init_std": 0.3,
    "moe.d_ff": 10,
    "moe.num_experts": 4,
    "moe.num_shared_experts": 1,
    "gate.top_k": 2,
    "data.seq_len": 32,
}


def make_run(mesh: Mesh, root: Path, values: dict[str, Any]) -> None:
    """A run that has not learned anything: its folder, as training leaves it."""
    (root / "text.txt").write_text("abcdefgh" * 50)
    config = with_values(TrainConfig(), {**TINY, "data.files": (str(root / "text.txt"),), **values})
    learner = Learner(config, mesh)
    learner.save(root / "run" / "checkpoints", 0)
    (root / "run" / "config.toml").write_text(to_toml(config))
