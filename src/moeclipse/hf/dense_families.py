"""Families without experts, as a table: what experts can be made of (`train/weights/upcycle`)."""

from __future__ import annotations

from moeclipse.hf.derive import all_dense, all_windows, by_layer_types
from moeclipse.hf.family import Family

WIDE = {"model.d_ff": "intermediate_size"}
NO_MLP_BIAS = ("mlp_bias", False, "biases in dense blocks")

DENSE_FAMILIES: tuple[Family, ...] = (
    Family(
        title="Llama",
        model_type="llama",
        architecture="LlamaForCausalLM",
        keys=WIDE,
        defaults={"attention_bias": False, "mlp_bias": False},
        rest=all_dense,
        needs=(NO_MLP_BIAS,),
        dense=True,
    ),
    Family(
        title="Mistral",
        model_type="mistral",
        architecture="MistralForCausalLM",
        keys=WIDE,
        defaults={"attention_bias": False},
        rest=lambda told: all_dense(told) | all_windows(told),
        dense=True,
    ),
    Family(
        title="Qwen2",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        keys=WIDE,
        defaults={"attention_bias": True, "use_sliding_window": False},
        rest=lambda told: all_dense(told) | by_layer_types(told) | {"model.attention_bias": "qkv"},
        dense=True,
    ),
    Family(
        title="Qwen3",
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        keys=WIDE,
        defaults={"attention_bias": False, "use_sliding_window": False},
        fixed={"model.qk_norm": "head"},
        rest=lambda told: all_dense(told) | by_layer_types(told),
        dense=True,
    ),
)
