"""A Qwen3-MoE of transformers in the shape of one of our configurations: what benches compare with."""

from __future__ import annotations

from typing import Any

from moeclipse.train.config import TrainConfig


def qwen3_config(config: TrainConfig, num_layers: int) -> Any:
    from transformers import AutoConfig

    shape, moe = config.model, config.moe
    return AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=moe.d_ff,
        moe_intermediate_size=moe.d_ff,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_experts=moe.num_experts,
        num_experts_per_tok=config.gate.top_k,
        norm_topk_prob=True,
        max_position_embeddings=config.data.seq_len,
        use_cache=False,
    )
