"""A small model whose state, inputs of layers or gradients lie on the host, and the same with all at home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig

SMALL: dict[str, Any] = {
    "model.num_dense_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 24,
    "model.head_dim": 12,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "moe.num_experts": 4,
    "moe.num_shared_experts": 1,
    "moe.d_ff": 12,
    "data.seq_len": 8,
    "data.batch_size": 4,
    "data.files": (str(Path(__file__).parent / "text.txt"),),
    "optim.lr": 1e-2,
    "integrity.every": 0,
    "run.steps": 20,
}


def merged(*changes: dict[str, Any]) -> TrainConfig:
    """The later one counts."""
    values: dict[str, Any] = {}
    for one in changes:
        values |= one
    return with_values(TrainConfig(), values)


def without_memory(changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in changes.items() if not key.startswith("memory.")}
