"""Parameters counted by formula are those that are there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_model import GATE, MLA, MODEL, MOE, build

from moeclipse.comm.mesh import Mesh
from moeclipse.model.config import ModelConfig
from moeclipse.model.count import count_parameters
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig

ALL = replace(
    MODEL, attention_bias="all", qk_norm="whole", attention_sinks=True, norms="both", dense_layers=(1,)
)


@pytest.mark.parametrize(
    "config",
    [
        *(MODEL, MLA, replace(MLA, q_lora_rank=0), ALL, replace(ALL, attention_bias="qkv", qk_norm="head")),
        replace(ALL, mixers=("gated_delta", "kimi_delta"), delta_key_dim=3, delta_value_dim=5),
        replace(ALL, mixers=("short_conv", "attention"), attention_gate="component", qk_norm="turned"),
        replace(MODEL, attention_gate="head_softplus", qk_norm="unit"),
    ],
    ids=["gqa", "mla", "mla-full-q", "everything", "by-head", "states", "convolutions", "gated"],
)
@pytest.mark.parametrize(
    "gate",
    [GATE, GateConfig(kind="noisy"), GateConfig(logit_bias=True)],
    ids=["softmax", "noisy", "logit-bias"],
)
def test_parameter_count_by_formula(config: ModelConfig, gate: GateConfig) -> None:
    everything, active = count_parameters(config, MOE, gate)
    model = build(config, gate)
    assert everything == sum(p.numel() for p in model.parameters())
    assert active == everything - (6 - 2) * 3 * 16 * 10 * len(config.expert_layers)


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_of_any_width(gated: bool) -> None:
    moe = replace(MOE, num_shared_experts=1, shared_d_ff=7, shared_gate=gated, expert_bias=True)
    model = Transformer(MODEL, moe, GATE, mesh=Mesh.single(), dtype=torch.float64)
    assert count_parameters(MODEL, moe, GATE)[0] == sum(p.numel() for p in model.parameters())
