"""MoEclipse trains Mixture-of-Experts models so that communication disappears behind computation.

Importing this package touches no device, opens no port and reads no environment variable; the names
below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The same names for type checkers and editors, which do not run `__getattr__`; a test compares them.
    from moeclipse.balance.config import PlacementConfig
    from moeclipse.balance.placement import Placement
    from moeclipse.comm.config import ParallelConfig
    from moeclipse.comm.mesh import Mesh
    from moeclipse.comm.reduce.all_reduce import PeerAllReduce
    from moeclipse.core.config import validate, with_values
    from moeclipse.core.errors import (
        CheckpointError,
        CommError,
        ConfigError,
        CorruptionError,
        DataError,
        DivergedError,
        MoEclipseError,
        Preempted,
        ScheduleError,
    )
    from moeclipse.model.config import ModelConfig
    from moeclipse.moe.config import ExchangeConfig, GateConfig, MoEConfig
    from moeclipse.moe.experts.module_experts import joint
    from moeclipse.moe.gate.custom_gate import routing_of
    from moeclipse.moe.gate.routing import Routing
    from moeclipse.moe.layer import MoE
    from moeclipse.moe.own_loop.clip import agree_on_overflow, clip_grad_norm_
    from moeclipse.moe.own_loop.full_state import full_state_dict
    from moeclipse.moe.own_loop.overlap import overlap
    from moeclipse.moe.own_loop.parallelize import parallelize
    from moeclipse.moe.own_loop.standalone import (
        attach,
        aux_loss,
        exclude_experts,
        expert_parameters,
        sync_gradients,
    )
    from moeclipse.pipeline.config import PipelineConfig
    from moeclipse.tensor.linear import ColumnParallelLinear, RowParallelLinear
    from moeclipse.tensor.parallel import TensorParallel
    from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
    from moeclipse.train.checkpoints.checkpoint import newest as newest_checkpoint
    from moeclipse.train.config import MetricsConfig, RunConfig, TrainConfig
    from moeclipse.train.data.corpus import open_corpus
    from moeclipse.train.data.data_config import DataConfig
    from moeclipse.train.data.samples import Batches, Samples
    from moeclipse.train.generate.text import GenerateConfig, LanguageModel, load_model
    from moeclipse.train.optim.optim_config import OptimConfig
    from moeclipse.train.presets import load as load_config
    from moeclipse.train.run.survival_config import CheckpointConfig, IntegrityConfig
    from moeclipse.train.run.trainer import train as run_training

__version__ = "0.2.0"

_EXPORTS = {
    # a layer in a model of one's own
    "MoE": "moeclipse.moe.layer",
    "Mesh": "moeclipse.comm.mesh",
    "Placement": "moeclipse.balance.placement",
    "joint": "moeclipse.moe.experts.module_experts",
    "Routing": "moeclipse.moe.gate.routing",
    "routing_of": "moeclipse.moe.gate.custom_gate",
    "aux_loss": "moeclipse.moe.own_loop.standalone",
    "attach": "moeclipse.moe.own_loop.standalone",
    "parallelize": "moeclipse.moe.own_loop.parallelize",
    "overlap": "moeclipse.moe.own_loop.overlap",
    "clip_grad_norm_": "moeclipse.moe.own_loop.clip",
    "agree_on_overflow": "moeclipse.moe.own_loop.clip",
    "expert_parameters": "moeclipse.moe.own_loop.standalone",
    "exclude_experts": "moeclipse.moe.own_loop.standalone",
    "sync_gradients": "moeclipse.moe.own_loop.standalone",
    "full_state_dict": "moeclipse.moe.own_loop.full_state",
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
    "DataConfig": "moeclipse.train.data.data_config",
    "OptimConfig": "moeclipse.train.optim.optim_config",
    "CheckpointConfig": "moeclipse.train.run.survival_config",
    "IntegrityConfig": "moeclipse.train.run.survival_config",
    "MetricsConfig": "moeclipse.train.config",
    "load_config": "moeclipse.train.presets:load",
    "with_values": "moeclipse.core.config",
    "validate": "moeclipse.core.config",
    # runs, their data and their checkpoints (`moeclipse.train(...)` calls a room: `train/one_call`)
    "run_training": "moeclipse.train.run.trainer:train",
    "open_corpus": "moeclipse.train.data.corpus",
    "Samples": "moeclipse.train.data.samples",
    "Batches": "moeclipse.train.data.samples",
    "Checkpoint": "moeclipse.train.checkpoints.checkpoint",
    "OneRank": "moeclipse.train.checkpoints.checkpoint",
    "newest_checkpoint": "moeclipse.train.checkpoints.checkpoint:newest",
    # text from a model
    "load_model": "moeclipse.train.generate.text",
    "LanguageModel": "moeclipse.train.generate.text",
    "GenerateConfig": "moeclipse.train.generate.text",
    # errors
    "MoEclipseError": "moeclipse.core.errors",
    "ConfigError": "moeclipse.core.errors",
    "ScheduleError": "moeclipse.core.errors",
    "DataError": "moeclipse.core.errors",
    "CheckpointError": "moeclipse.core.errors",
    "CommError": "moeclipse.core.errors",
    "DivergedError": "moeclipse.core.errors",
    "CorruptionError": "moeclipse.core.errors",
    "Preempted": "moeclipse.core.errors",
}
"""Public name -> the module that holds it, and its name there where that is another one."""

__all__ = [
    "Batches",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "ColumnParallelLinear",
    "CommError",
    "ConfigError",
    "CorruptionError",
    "DataConfig",
    "DataError",
    "DivergedError",
    "ExchangeConfig",
    "GateConfig",
    "GenerateConfig",
    "IntegrityConfig",
    "LanguageModel",
    "Mesh",
    "MetricsConfig",
    "MoE",
    "MoEConfig",
    "MoEclipseError",
    "ModelConfig",
    "OneRank",
    "OptimConfig",
    "ParallelConfig",
    "PeerAllReduce",
    "PipelineConfig",
    "Placement",
    "PlacementConfig",
    "Preempted",
    "Routing",
    "RowParallelLinear",
    "RunConfig",
    "Samples",
    "ScheduleError",
    "TensorParallel",
    "TrainConfig",
    "__version__",
    "agree_on_overflow",
    "attach",
    "aux_loss",
    "clip_grad_norm_",
    "exclude_experts",
    "expert_parameters",
    "full_state_dict",
    "joint",
    "load_config",
    "load_model",
    "newest_checkpoint",
    "open_corpus",
    "overlap",
    "parallelize",
    "routing_of",
    "run_training",
    "sync_gradients",
    "validate",
    "with_values",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        module, _, attribute = _EXPORTS[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)
    if name in ("train", "hf"):  # rooms that are used by their own names
        return importlib.import_module(f"moeclipse.{name}")
    raise AttributeError(f"module 'moeclipse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
