"""Families of transformers that have no row in `hf/families`: what they need and we do not have.

A folder of one is refused with these words before a weight is read. In a model of transformers most of them
take our experts all the same (`hf/implementation`; docs/families.md has the table).
"""

from __future__ import annotations

from collections.abc import Mapping

STATES = "layers of state spaces (Mamba)"
MISSING: Mapping[str, str] = {
    "axk2": "gates behind norms, and on what latent attention took",
    "cohere2_moe": "LayerNorms, and attention beside the block instead of before it",
    "dbrx": "LayerNorms, and queries, keys and values in one clipped matrix",
    "deepseek_v4": "hyper-connections, and attention to compressed keys",
    "doge": "attention with a dynamic mask, and experts found by product keys",
    "gemma4_text": "attention whose heads differ from layer to layer, and a block beside the experts",
    "glm5_next_text": "hyper-connections, and a bound on how much a state forgets",
    "granitemoehybrid": STATES,
    "hy_v4": "hyper-connections, and a clamped SwiGLU of another form",
    "inkling_text": "short convolutions of keys and values beside attention",
    "jamba": STATES,
    "jetmoe": "experts of attention",
    "longcat_flash": "two attentions in a layer, and experts that do nothing",
    "mimo_v2_flash": "key heads that differ from layer to layer, and values of another width",
    "minimax": "lightning attention",
    "minimax_m3_vl_text": "sparse attention by blocks of keys, and a clamped SwiGLU of another form",
    "nemotron_h": STATES,
    "nllb-moe": "an encoder",
    "phimoe": "LayerNorms with biases, and a sparse mixer as its gate",
    "qwen4_exp": "hyper-connections, and embeddings of n-grams",
    "qwen4_exp_text": "hyper-connections, and embeddings of n-grams",
    "zaya": "attention over convolutions, and a gate of several layers",
    **dict.fromkeys(
        (
            *("aria", "deepseek_ocr2", "diffusion_gemma", "ernie4_5_vl_moe", "gemma4", "glm4v_moe"),
            *(
                "glm5_next",
                "llama4",
                "minimax_m3_vl",
                "qwen3_5_moe",
                "qwen3_omni_moe",
                "qwen3_vl_moe",
                "step3p7",
            ),
        ),
        "pictures or sound",
    ),
}
