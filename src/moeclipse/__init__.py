"""MoEclipse trains Mixture-of-Experts models so that communication disappears behind computation.

Importing this package touches no device, opens no port and reads no environment variable; the names
below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    # a layer in a model of one's own
    "MoE": "moeclipse.moe.layer",
    "Mesh": "moeclipse.comm.mesh",
    "Placement": "moeclipse.balance.placement",
    "joint": "moeclipse.moe.adapters",
    "aux_loss": "moeclipse.moe.standalone",
    "exclude_experts": "moeclipse.moe.standalone",
    "sync_gradients": "moeclipse.moe.standalone",
    "TensorParallel": "moeclipse.tensor.parallel",
    "ColumnParallelLinear": "moeclipse.tensor.linear",
    "RowParallelLinear": "moeclipse.tensor.linear",
    "PeerAllReduce": "moeclipse.comm.reduce.all_reduce",
    # configurations
    "TrainConfig": "moeclipse.train.config",
    "RunConfig": "moeclipse.train.config",
    "ModelConfig": "moeclipse.model.config",
    "MoEConfig": "moeclipse.moe.config",
    "GateConfig": "moeclipse.moe.config",
    "ExchangeConfig": "moeclipse.moe.config",
    "PlacementConfig": "moeclipse.balance.config",
    "ParallelConfig": "moeclipse.comm.config",
    "PipelineConfig": "moeclipse.pipeline.config",
    "DataConfig": "moeclipse.train.config",
    "OptimConfig": "moeclipse.train.config",
    "CheckpointConfig": "moeclipse.train.config",
    "IntegrityConfig": "moeclipse.train.config",
    "MetricsConfig": "moeclipse.train.config",
    "load_config": "moeclipse.train.presets:load",
    "with_values": "moeclipse.core.config",
    "validate": "moeclipse.core.config",
    # runs, their data and their checkpoints (`train` is the name of a room)
    "run_training": "moeclipse.train.trainer:train",
    "open_corpus": "moeclipse.train.corpus",
    "Samples": "moeclipse.train.data",
    "Batches": "moeclipse.train.data",
    "Checkpoint": "moeclipse.train.checkpoints.checkpoint",
    "OneRank": "moeclipse.train.checkpoints.checkpoint",
    "newest_checkpoint": "moeclipse.train.checkpoints.checkpoint:newest",
    # errors
    "MoEclipseError": "moeclipse.core.errors",
    "ConfigError": "moeclipse.core.errors",
    "ScheduleError": "moeclipse.core.errors",
    "DataError": "moeclipse.core.errors",
    "CheckpointError": "moeclipse.core.errors",
    "CommError": "moeclipse.core.errors",
    "DivergedError": "moeclipse.core.errors",
    "CorruptionError": "moeclipse.core.errors",
}
"""Public name -> the module that holds it, and its name there where that is another one."""

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        module, _, attribute = _EXPORTS[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)
    raise AttributeError(f"module 'moeclipse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
