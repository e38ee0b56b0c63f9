"""Bytes of weights, gradients and optimizer state on each rank of a pipeline, before anything is built.

    weights, main_grad     of all that a rank holds, its tp part of what is cut
    master, moments        of its shard: every element of the model lies on one rank of those that share it

And what an update moves of them, for the least work of a step (`model/flops`).

Hazard. All parameters that a rank holds are taken to be trained, without adapters: whoever freezes some needs
less. The least work of a step counts what is trained alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.config import ModelConfig
from moeclipse.model.count import (
    attention_parameters,
    expert_parameters,
    gate_parameters,
    norm_parameters,
    shared_parameters,
)
from moeclipse.model.flops import LeastWork
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.validate import expert_group
from moeclipse.ops.precision import WIDE
from moeclipse.pipeline.overlap import StageLayout
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.buckets import summed_type
from moeclipse.train.optim.optim_config import OptimConfig
from moeclipse.train.optim.parameter_groups import ParameterGroups
from moeclipse.train.step.dtype import choose_dtype


class ParamCounts(NamedTuple):
    """Parameters of a layer, or of all that a rank has."""

    cut: float = 0.0
    """Over tp."""
    whole: float = 0.0
    """The same on all tp ranks."""
    experts: float = 0.0
    """In the slots of one rank."""
    owned: float = 0.0
    """Of experts, by the ranks of a tp and ep group together."""

    def plus(self, other: ParamCounts) -> ParamCounts:
        return ParamCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def state_bytes(config: TrainConfig, mesh: Mesh, layout: StageLayout, held: torch.dtype) -> list[float]:
    """Of each rank of the pipeline; `held` is the type of weights."""
    model, last = config.model, config.model.num_layers - 1
    slots = slots_of(config, mesh)
    found = []
    for place in range(max(layout.rank_of) + 1):
        layers = layout.layers_of(place)
        table = float(model.vocab_size * model.d_model)
        ends = (0 in layers) + (last in layers) - (model.tie_embeddings and {0, last} <= set(layers))
        total = ParamCounts(cut=table * ends, whole=model.d_model * (last in layers))
        for index in layers:
            total = total.plus(of_layer(model, config.moe, config.gate, model.is_dense(index), slots))
        found.append(bytes_of(total, config, mesh, held))
    return found


def slots_of(config: TrainConfig, mesh: Mesh) -> int:
    """Experts that a rank has room for."""
    if not config.num_expert_layers:
        return 0
    ranks = expert_group(mesh, config.moe).size
    return config.placement.start(config.moe.num_experts, ranks, 0).max_slots


def of_layer(model: ModelConfig, moe: MoEConfig, gate: GateConfig, dense: bool, slots: int) -> ParamCounts:
    d = model.d_model
    attention, norms = attention_parameters(model), norm_parameters(model)
    if dense:
        return ParamCounts(cut=attention + 3.0 * d * model.d_ff, whole=norms)
    gates = gate_parameters(d, moe, gate) + moe.shared_gate * d
    shared, expert = shared_parameters(d, moe), expert_parameters(d, moe, moe.d_ff)
    sharded = moe.expert_tp == "sharded"
    return ParamCounts(
        cut=attention + (shared if sharded else 0),
        whole=norms + gates + (0 if sharded else shared),
        experts=expert * slots,
        owned=expert * moe.num_experts,
    )


def bytes_of(total: ParamCounts, config: TrainConfig, mesh: Mesh, held: torch.dtype) -> float:
    sharded = config.moe.expert_tp == "sharded"
    here = total.cut / mesh.tp + total.whole + total.experts / (mesh.tp if sharded else 1)
    mine = (total.cut + total.whole + total.owned) / mesh.dense_grads.size
    summed = summed_type(config.optim.main_grad, held)
    return here * (held.itemsize + summed.itemsize) + mine * per_element(config.optim, held)


def per_element(optim: OptimConfig, held: torch.dtype) -> float:
    """Bytes of master weights and moments."""
    wide = WIDE[held].itemsize
    master = {"fp32": wide if wide > held.itemsize else 0, "low-bits": 2, "none": 0}[optim.master]
    return master + 2 * {"fp32": wide, "bf16": 2, "8bit": 1}[optim.state]


def each_element(optim: OptimConfig, states: str, dtype: torch.dtype) -> float:
    """Bytes of state of a parameter, of one or all of `memory.states`."""
    wide = WIDE[dtype].itemsize
    master = {"fp32": wide if wide > dtype.itemsize else 0, "low-bits": 2 + 1 / 8, "none": 0}[optim.master]
    moments = 2 * {"fp32": wide, "bf16": 2, "8bit": 1 + 1 / 256}[optim.state]
    return {"all": master + moments, "moments": moments, "master": master}[states]


def update_bytes(optim: OptimConfig, held: torch.dtype) -> float:
    """That an update reads and writes of a parameter."""
    read_weight = 0 if optim.master == "fp32" and WIDE[held] != held else held.itemsize
    gradient = 2 * summed_type(optim.main_grad, held).itemsize  # for the norm, and for the update
    return 2 * per_element(optim, held) + gradient + read_weight + held.itemsize


def least_work(config: TrainConfig, device: torch.device) -> LeastWork:
    data, groups = config.data, ParameterGroups.of(config.optim, config.lora)
    return LeastWork.of(
        config.model,
        config.moe,
        config.gate,
        tokens=data.batch_size * data.seq_len,
        seq_len=data.seq_len,
        lora=config.lora,
        is_frozen=groups.is_frozen,
        bytes_each=update_bytes(config.optim, choose_dtype(config.model.dtype, device)),
    )
