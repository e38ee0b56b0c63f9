"""Keys, defaults and needs that several families of the tables have in common."""

from __future__ import annotations

from collections.abc import Mapping

QWEN = {"model.d_ff": "intermediate_size", "moe.d_ff": "moe_intermediate_size"}
DEEPSEEK = {
    **QWEN,
    "moe.num_experts": "n_routed_experts",
    "moe.num_shared_experts": "n_shared_experts",
    "model.num_dense_layers": "first_k_dense_replace",
    "gate.scale": "routed_scaling_factor",
}
MLA = {
    "model.kv_lora_rank": "kv_lora_rank",
    "model.qk_nope_head_dim": "qk_nope_head_dim",
    "model.qk_rope_head_dim": "qk_rope_head_dim",
    "model.v_head_dim": "v_head_dim",
}
INDEXER = {
    "model.index_topk": "index_topk",
    "model.index_heads": "index_n_heads",
    "model.index_dim": "index_head_dim",
}
WIDE_EXPERTS = {"moe.num_experts": "num_local_experts", "moe.d_ff": "intermediate_size"}
NO_BIAS = ("attention_bias", False, "biases in latent attention")
DELTA = {
    "model.delta_key_heads": "linear_num_key_heads",
    "model.delta_value_heads": "linear_num_value_heads",
    "model.delta_key_dim": "linear_key_head_dim",
    "model.delta_value_dim": "linear_value_head_dim",
    "model.conv_width": "linear_conv_kernel_dim",
}
GATED_ATTENTION = {
    "model.qk_norm": "head",
    "model.attention_gate": "component",
    "model.zero_centred_norms": True,
    "moe.num_shared_experts": 1,
    "moe.shared_gate": True,
}
"""Of Qwen3-Next and Qwen3.5."""
GRANITE_FACTORS = {
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
NO_DRAFTS = {"num_nextn_predict_layers": 0}
RENORMALISED = {"gate.kind": "softmax", "gate.renormalise": True}
DELTA_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "attention_bias": False,
}


def without(keys: Mapping[str, str], *ours: str) -> dict[str, str]:
    return {key: theirs for key, theirs in keys.items() if key not in ours}
