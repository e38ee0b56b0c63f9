"""Sizes of a run's step as costs see them: what the simulator prices its ops from.

`step_work` for one rate and one link (`sim/step_costs`), `cluster_costs` for a cluster (`sim/cluster_costs`).
"""

from __future__ import annotations

import torch

from moeclipse.cost.cluster import Cluster
from moeclipse.cost.hardware import Device
from moeclipse.cost.layer_seconds import MicrobatchWork
from moeclipse.cost.model import LayerWork
from moeclipse.model.config import ModelConfig
from moeclipse.model.count import gate_width
from moeclipse.sim.cluster_costs import ClusterCosts
from moeclipse.sim.step_costs import StepWork
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.model_sizes import sizes_of_run
from moeclipse.train.predict.state_bytes import update_bytes

WIDTHS = {"float32": 4.0, "float64": 8.0, "bfloat16": 2.0, "float16": 2.0}


def value_bytes(dtype: str, hardware: Device) -> float:
    """Bytes of a value; "auto" is what a run takes on this hardware."""
    return WIDTHS.get(dtype, 4.0 if hardware.name == "cpu" else 2.0)


def step_work(config: TrainConfig, dp: int, ep: int, row_value_bytes: float) -> StepWork:
    """Sizes of a run as costs see them."""
    model, moe, data = config.model, config.moe, config.data
    samples = data.batch_size / (config.optim.accumulate * dp * ep)
    params, width = attention_sizes(model)
    layer = LayerWork(
        tokens=max(1, round(samples * data.seq_len)),
        sequence=data.seq_len,
        d_model=model.d_model,
        attn_params=params,
        attn_width=width,
        d_ff=moe.d_ff,
        num_experts=moe.num_experts,
        top_k=config.gate.top_k,
        shared_width=moe.shared_width,
        row_bytes_per_value=row_value_bytes,
    )
    return StepWork(
        layer=layer, dense_width=model.d_ff, vocab=model.vocab_size, dp=dp, ep=ep, tp=config.parallel.tp
    )


def cluster_costs(
    config: TrainConfig,
    machine: Cluster,
    axes: tuple[int, int],
    imbalance: float,
    held: torch.dtype = torch.bfloat16,
) -> ClusterCosts:
    """`axes`: dp and ep; `imbalance`: what the busiest rank has of the mean; `held`: the type of weights."""
    work = MicrobatchWork(
        model=sizes_of_run(config),
        cluster=machine,
        tokens=tokens_of(config, axes),
        sequence=config.data.seq_len,
        tp=config.parallel.tp,
        ep=axes[1],
        imbalance=imbalance if axes[1] * config.parallel.tp > 1 else 1.0,
        two_level=config.moe.transport in ("auto", "two_level"),
    )
    return ClusterCosts(work, update_bytes=update_bytes(config.optim, held))


def tokens_of(config: TrainConfig, axes: tuple[int, int]) -> int:
    """Of one microbatch of one data index."""
    samples = config.data.batch_size / (config.optim.accumulate * axes[0] * axes[1])
    return max(1, round(samples * config.data.seq_len))


def attention_sizes(model: ModelConfig) -> tuple[int, int]:
    """(parameters of its projections, heads times head width)."""
    D, heads = model.d_model, model.num_heads
    if model.attention == "gqa":
        width = heads * model.head_dim
        return D * (2 * width + 2 * model.num_kv_heads * model.head_dim + gate_width(model)), width
    query_width = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    query = D * query_width
    if model.q_lora_rank:
        query = model.q_lora_rank * (D + query_width)
    rank = model.kv_lora_rank
    values = D * (rank + model.qk_rope_head_dim) + rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return query + values + heads * model.v_head_dim * D, query_width
