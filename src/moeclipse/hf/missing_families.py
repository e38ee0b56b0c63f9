"""Families of transformers that have no row in `hf/families`: what they need and we do not have.

A folder of one is refused with these words before a weight is read. In a model of transformers most of them
take our experts all the same (`hf/implementation`; docs/families.md has the table).
"""

from __future__ import annotations

from collections.abc import Mapping

GATED_DELTA = "linear attention by the gated delta rule"
SPARSE = "sparse attention by an indexer"
STATES = "layers of state spaces (Mamba)"
MISSING: Mapping[str, str] = {
    "aria_text": "experts with weights of another form",
    "axk2": "a norm behind experts alone",
    "cohere2_moe": "LayerNorms, and attention beside the block instead of before it",
    "dbrx": "LayerNorms, and queries, keys and values in one clipped matrix",
    "deepseek_v4": f"{SPARSE}, and hyper-connections",
    "doge": "attention with a dynamic mask, and experts found by product keys",
    "gemma4_text": "attention whose heads differ from layer to layer, and a block beside the experts",
    "glm5_next_text": f"{GATED_DELTA}, and {SPARSE}",
    "granitemoehybrid": STATES,
    "hy_v4": "a clamped SwiGLU with another limit",
    "inkling_text": "short convolutions beside attention, whose heads differ from layer to layer",
    "jamba": STATES,
    "jetmoe": "experts of attention",
    "laguna": "gates on attention's output",
    "longcat_flash": "two attentions in a layer, and experts that do nothing",
    "mellum": "rotary position that differs from layer to layer",
    "mimo_v2_flash": "attention whose heads differ from layer to layer",
    "minimax": "lightning attention",
    "minimax_m3_vl_text": SPARSE,
    "nemotron_h": STATES,
    "nllb-moe": "an encoder",
    "phimoe": "LayerNorms with biases, and a sparse mixer as its gate",
    "qwen4_exp": f"{GATED_DELTA}, and gates on attention's output",
    "qwen4_exp_text": f"{GATED_DELTA}, and gates on attention's output",
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
