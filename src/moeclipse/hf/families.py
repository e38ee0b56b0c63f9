"""Families of Hugging Face models, as a table.

A family is a row: what its tensors are called (`hf/names`), which keys of its `config.json` stand for one of
ours, what it takes for granted, and a function for the rest (`hf/derive`). `hf/read` reads a configuration by
it, `hf/compose` writes one. To add a family is to add a row, and a tiny model to `tests/hf/tiny_models.py`.
`hf/missing_families` says of others why they have no row.

Contract. A key that transformers may leave out of a file has the default that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moeclipse.hf.derive import (
    bias_of_all,
    bias_of_inputs,
    by_block_types,
    deepseek_v2,
    deepseek_v3,
    dots,
    ernie,
    glm4,
    gpt_oss,
    granite,
    granite_shared,
    granite_windows,
    grouped,
    minimax,
    mixtral,
    olmoe,
    qwen2,
    qwen3,
    renormalises,
    sigmoid,
)
from moeclipse.hf.family import Family
from moeclipse.hf.names import (
    GRANITE,
    GRANITE_SWA,
    HUNYUAN,
    INTERLEAVED,
    MINIMAX,
    MIXTRAL,
    SHARED_MLP,
    Names,
)

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
WIDE_EXPERTS = {"moe.num_experts": "num_local_experts", "moe.d_ff": "intermediate_size"}
NO_BIAS = ("attention_bias", False, "biases in latent attention")
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


def without(keys: Mapping[str, str], *ours: str) -> dict[str, str]:
    return {key: theirs for key, theirs in keys.items() if key not in ours}


FAMILIES: tuple[Family, ...] = (
    Family(
        title="Mixtral",
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        keys=WIDE_EXPERTS,
        defaults={"router_jitter_noise": 0.0},
        rest=mixtral,
        needs=(("router_jitter_noise", 0.0, "noise on the router's input"),),
        names=MIXTRAL,
        theta=1e6,
    ),
    Family(
        title="Qwen2-MoE",
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        keys={
            **QWEN,
            "moe.num_experts": "num_experts",
            "moe.shared_d_ff": "shared_expert_intermediate_size",
        },
        defaults={
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "qkv_bias": True,
        },
        fixed={"moe.num_shared_experts": 1, "moe.shared_gate": True},
        rest=qwen2,
    ),
    Family(
        title="Qwen3-MoE",
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        keys=QWEN,
        defaults={
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "use_sliding_window": False,
            "attention_bias": False,
        },
        fixed={"model.qk_norm": "head"},
        rest=qwen3,
    ),
    Family(
        title="OLMoE",
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        keys={"moe.num_experts": "num_experts", "moe.d_ff": "intermediate_size"},
        defaults={"norm_topk_prob": False, "attention_bias": False},
        fixed={"model.qk_norm": "whole"},
        rest=olmoe,
    ),
    Family(
        title="DeepSeek-V2",
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        keys={**DEEPSEEK, **MLA},
        defaults={
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "attention_bias": False,
            "mlp_bias": False,
        },
        fixed={"model.rope_pairs": "neighbours"},
        rest=deepseek_v2,
        needs=(NO_BIAS, ("mlp_bias", False, "biases in dense blocks")),
    ),
    Family(
        title="DeepSeek-V3",
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        keys={**DEEPSEEK, **MLA},
        defaults={
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "attention_bias": False,
        },
        rest=deepseek_v3,
        needs=(NO_BIAS,),
        beside=NO_DRAFTS,
    ),
    Family(
        title="gpt-oss",
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        keys=WIDE_EXPERTS,
        defaults={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        fixed={
            "model.attention_sinks": True,
            "moe.activation": "clamped_swiglu",
            "moe.expert_bias": True,
            "gate.logit_bias": True,
            **RENORMALISED,
        },
        rest=gpt_oss,
        needs=(
            ("swiglu_alpha", 1.702, "another slope of its activation"),
            ("swiglu_limit", 7.0, "another limit of its activation"),
        ),
        names=INTERLEAVED,
        theta=150000.0,
    ),
    Family(
        title="GLM-4-MoE",
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        keys=DEEPSEEK,
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
        },
        rest=glm4,
        beside=NO_DRAFTS,
    ),
    Family(
        title="Granite-MoE",
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        keys=WIDE_EXPERTS,
        defaults=GRANITE_FACTORS,
        fixed=RENORMALISED,
        rest=granite,
        names=GRANITE,
    ),
    Family(
        title="Ernie-4.5-MoE",
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        keys={
            **QWEN,
            "moe.num_experts": "moe_num_experts",
            "moe.num_shared_experts": "moe_num_shared_experts",
            "gate.top_k": "moe_k",
        },
        defaults={
            "tie_word_embeddings": True,
            "use_bias": False,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_num_shared_experts": 2,
        },
        fixed={"model.rope_pairs": "neighbours", **RENORMALISED},
        rest=ernie,
        needs=(("use_bias", False, "biases in all projections"),),
        names=Names(choice_bias="moe_statics.e_score_correction_bias", choice_bias_rows=1),
        theta=500000.0,
    ),
    Family(
        title="dots.llm1",
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        keys=DEEPSEEK,
        defaults={
            **ONE_GROUP,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "attention_bias": False,
            "max_window_layers": 62,
        },
        fixed={"model.qk_norm": "head"},
        rest=dots,
    ),
    Family(
        title="GLM-4-MoE-Lite",
        model_type="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        keys={**without(DEEPSEEK, "model.num_dense_layers"), **MLA},
        defaults={
            **ONE_GROUP,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "attention_bias": False,
        },
        rest=lambda told: deepseek_v3(told) | by_block_types(told, first=1),
        needs=(NO_BIAS,),
    ),
    Family(
        title="MiniMax-M2",
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        keys=WIDE_EXPERTS,
        defaults={"router_jitter_noise": 0.0},
        fixed={"model.qk_norm": "whole", "gate.kind": "sigmoid", "gate.renormalise": True},
        rest=minimax,
        needs=(("router_jitter_noise", 0.0, "noise on the router's input"),),
        names=MINIMAX,
        theta=5e6,
    ),
    Family(
        title="Solar-Open",
        model_type="solar_open",
        architecture="SolarOpenForCausalLM",
        keys=without(DEEPSEEK, "model.num_dense_layers", "model.d_ff"),
        defaults={
            **ONE_GROUP,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "attention_bias": False,
        },
        rest=lambda told: grouped(told) | sigmoid(told) | bias_of_inputs(told),
        theta=1e6,
    ),
    Family(
        title="Hunyuan-V3",
        model_type="hy_v3",
        architecture="HYV3ForCausalLM",
        keys={
            **QWEN,
            "moe.num_experts": "num_experts",
            "moe.num_shared_experts": "num_shared_experts",
            "gate.scale": "router_scaling_factor",
        },
        defaults={
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
            "attention_bias": False,
            "mlp_bias": False,
        },
        fixed={"model.qk_norm": "head", "gate.kind": "sigmoid", "gate.renormalise": True},
        rest=lambda told: grouped(told) | bias_of_all(told) | by_block_types(told, first=1),
        needs=(("mlp_bias", False, "biases in dense blocks"),),
        names=HUNYUAN,
        theta=11158840.0,
    ),
    Family(
        title="FlexOlmo",
        model_type="flex_olmo",
        architecture="FlexOlmoForCausalLM",
        keys={"moe.num_experts": "num_experts", "moe.d_ff": "intermediate_size"},
        defaults={"norm_topk_prob": False, "attention_bias": False},
        fixed={"model.qk_norm": "whole", "model.norms": "after"},
        rest=lambda told: grouped(told) | renormalises(told) | bias_of_all(told),
        theta=500000.0,
    ),
    Family(
        title="Granite-MoE-Shared",
        model_type="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        keys=WIDE_EXPERTS,
        defaults={**GRANITE_FACTORS, "shared_intermediate_size": 0},
        fixed=RENORMALISED,
        rest=granite_shared,
        names=replace(GRANITE, shared=SHARED_MLP),
    ),
    Family(
        title="Granite-MoE-SWA",
        model_type="granitemoe_swa",
        architecture="GraniteMoeSWAForCausalLM",
        keys=WIDE_EXPERTS,
        defaults={**GRANITE_FACTORS, "shared_intermediate_size": 0, "sliding_window": 128},
        fixed={"model.attention_sinks": True, **RENORMALISED},
        rest=granite_windows,
        names=GRANITE_SWA,
    ),
)
