"""A configuration's model as costs see it (`cost/sizes`)."""

from __future__ import annotations

from moeclipse.cost.cluster import ExpertChoice
from moeclipse.cost.sizes import ModelSizes
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.ops.activation import hidden_width


def sizes_of(model: ModelConfig, moe: MoEConfig, gate: GateConfig) -> ModelSizes:
    latent = model.attention == "mla"
    layers = range(model.num_layers)
    return ModelSizes(
        vocab=model.vocab_size,
        d_model=model.d_model,
        num_heads=model.num_heads,
        kv_heads=model.num_heads if latent else model.num_kv_heads,
        d_qk=model.qk_nope_head_dim + model.qk_rope_head_dim if latent else model.head_dim,
        d_v=model.v_head_dim if latent else model.head_dim,
        q_rank=model.q_lora_rank if latent else 0,
        kv_rank=model.kv_lora_rank if latent else 0,
        d_rope=model.qk_rope_head_dim if latent else 0,
        qk_norm=model.qk_norm != "none",
        moe_layers=tuple(not model.is_dense(layer) for layer in layers),
        windows=tuple(map(model.window_of, layers)) if any(model.windows) else (),
        dense_width=model.d_ff,
        expert_width=moe.d_ff,
        gated=hidden_width(moe.activation, 1) == 2,
        experts=ExpertChoice(
            num_experts=moe.num_experts,
            top_k=gate.top_k,
            num_groups=gate.num_groups,
            top_groups=gate.top_groups,
        ),
        shared_width=moe.shared_width,
        tied=model.tie_embeddings,
    )
