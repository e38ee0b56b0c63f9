"""Families whose layers mix tokens in different ways, as a table (`hf/families` has the others)."""

from __future__ import annotations

from moeclipse.hf.derive import dense_of_qwen, qwen3_next, renormalises
from moeclipse.hf.family import Family
from moeclipse.hf.family_keys import DELTA, DELTA_DEFAULTS, GATED_ATTENTION, QWEN, RENORMALISED
from moeclipse.hf.names import QWEN3_NEXT

HYBRID_FAMILIES: tuple[Family, ...] = (
    Family(
        title="Qwen3-Next",
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        keys={
            **QWEN,
            **DELTA,
            "moe.num_experts": "num_experts",
            "moe.shared_d_ff": "shared_expert_intermediate_size",
        },
        defaults={**DELTA_DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
        fixed=GATED_ATTENTION,
        rest=lambda told: qwen3_next(told) | dense_of_qwen(told) | renormalises(told),
        names=QWEN3_NEXT,
    ),
    Family(
        title="Qwen3.5-MoE",
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        keys={
            **DELTA,
            "moe.num_experts": "num_experts",
            "moe.d_ff": "moe_intermediate_size",
            "moe.shared_d_ff": "shared_expert_intermediate_size",
        },
        defaults=DELTA_DEFAULTS,
        fixed={**GATED_ATTENTION, **RENORMALISED},
        rest=qwen3_next,
    ),
)
