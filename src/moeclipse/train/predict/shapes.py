"""Models in full size by name, as their `config.json` says: to be planned, not to be downloaded.

Only what the shape follows from is listed. Extra layers that predict further tokens are left out: we have
none.
"""

from __future__ import annotations

from typing import Any

from moeclipse.hf.read import read_config

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "attention_bias": False,
}
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        **LATENT,
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
    "kimi-k2": {
        **LATENT,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
    },
    "qwen3-30b-a3b": {
        **QWEN3,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": {
        **QWEN3,
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
    },
    "mixtral-8x22b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "num_hidden_layers": 56,
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    "glm-4.5": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "num_hidden_layers": 92,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
}


def shape_values(name: str) -> dict[str, object]:
    """Keys of a configuration that say what a named model is."""
    return read_config(SHAPES[name], name).values
