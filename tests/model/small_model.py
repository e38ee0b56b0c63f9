"""Models that are small enough to be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.blocks import Settings
from moeclipse.model.config import ModelConfig
from moeclipse.model.rotary import Positions, Rotary
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.tensor.parallel import TensorParallel

MODEL = ModelConfig(num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=20, vocab_size=40)
MLA = replace(
    MODEL,
    attention="mla",
    num_dense_layers=1,
    q_lora_rank=7,
    kv_lora_rank=9,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    tie_embeddings=True,
)
MOE = MoEConfig(num_experts=6, d_ff=10, num_shared_experts=2)
GATE = GateConfig(top_k=2)
SETTINGS = Settings(
    layer=0,
    num_layers=1,
    seed=0,
    init_std=0.3,
    device=torch.device("cpu"),
    dtype=torch.float64,
    tp=TensorParallel.of(Mesh.single()),
)


def build(config: ModelConfig, gate: GateConfig = GATE, mesh: Mesh | None = None) -> Transformer:
    return Transformer(config, MOE, gate, mesh=mesh or Mesh.single(), seed=3, dtype=torch.float64)


def positions(config: ModelConfig, length: int) -> Positions:
    return Positions.of(Rotary.of(config), length, torch.device("cpu"))
